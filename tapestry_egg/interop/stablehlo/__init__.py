"""StableHLO: modules as JAX functions, run operation by operation, so that tracing sees them all.

In: text or bytecode, which jaxlib's own parser reads. Out: a function of JAX arrays. `module.py`
reads and runs, `constants.py` has numbers, `operations.py`, `reductions.py` and `control.py` say
what operations are in JAX.
"""
