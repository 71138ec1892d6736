"""Reference kernels in NumPy, and an executor that runs a graph whole or shard by shard with them.

In: a block graph and arrays. Out: arrays. What it computes follows from signatures alone, so it
shares nothing with lowering: rules, plans and templates are held against it.
"""
