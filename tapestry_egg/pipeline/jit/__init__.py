"""`te.jit`: a function that is planned at its first call, where `jax.jit` stood.

In: a function, its arguments as they come, a mesh. Out: a callable with the rest of `jax.jit`'s
surface (`docs/jit.md`).
"""
