"""A small search, for what numba compiles: `make test` runs this beside the linter.

Each worker would compile the loops itself, if both come before either has written them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tapestry_egg as te


def main() -> None:
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    program = te.trace(lambda x, w: jnp.tanh(x @ w) @ w, x, x)
    settings = te.Settings(work=0.2, workers=1, recompute=0, forms=0)
    te.optimize(program, "cpu:8", settings=settings)


if __name__ == "__main__":
    main()
