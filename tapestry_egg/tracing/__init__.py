"""Tracing: from a JAX function and the shapes of its arguments to a program.

In: a function, arguments or `jax.ShapeDtypeStruct`s. Out: `Program`: a block graph, each operation
an instance of a template with the user's line, and the pytrees to call it by. `emit.py` goes back,
from a block graph to JAX. To print one: `tapestry-egg trace FILE.py:NAME` and `tapestry-egg show`.
"""
