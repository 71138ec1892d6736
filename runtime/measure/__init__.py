"""What XLA compiled, read from its module: collectives, bytes, flops, peaks; against the plan.

In: an executable. Out: `Comparison`. To print one: `tapestry-egg run FILE`.
"""
