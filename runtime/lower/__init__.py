"""Lowering: from a plan to one JAX function, a `shard_map` with explicit collectives.

In: a plan and a JAX mesh. Out: a function of the graph's inputs, shard by shard. To print one:
`te.compile(plan, mesh).lower().as_text()`.
"""
