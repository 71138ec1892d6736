"""Lowering: from a plan to one JAX function, a `shard_map` with explicit collectives.

In: a plan and a JAX mesh. Out: what each device does, as a function of its blocks of the inputs,
which `runtime/compiled.py` wraps in `shard_map`. To print one:
`te.compile(plan, mesh).lower().as_text()`.
"""
