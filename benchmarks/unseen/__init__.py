"""Programs as people write them that no table, rule or default of ours was made on.

One module for a kind of network; every public function of a module makes one program: a train step
`(function, arguments)` whose first argument is the state that it returns first. Arguments are
described (`jax.ShapeDtypeStruct`), so that sizes are those of real runs and nothing is allocated;
sizes given by name are smaller, and `drawn` makes arrays of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.listed import function

#: A train step, and the arguments that describe one call.
Program = tuple[Callable[..., Any], tuple[Any, ...]]


def make(name: str, **sizes: Any) -> Program:
    """The program of a name, of the sizes given."""
    made: Program = function("unseen", name)(**sizes)
    return made


def drawn(program: Program, seed: int = 0) -> Program:
    """A program with arrays for its arguments.

    Weights keep the size of what they multiply; moments of an optimizer are between 0 and 1, so
    that no root is of less than nothing and no sign hangs on the last place of a gradient; labels,
    tokens and places are below 8.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    function, (state, *data) = program
    random = np.random.default_rng(seed)

    def weights(x: jax.ShapeDtypeStruct) -> jax.Array:
        fan_in = float(np.prod(x.shape[:-1])) or 1.0
        return jnp.asarray(random.normal(size=x.shape) / min(fan_in, 64.0) ** 0.5, x.dtype)

    def moments(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.zeros(x.shape, x.dtype)
        return jnp.asarray(random.uniform(size=x.shape), x.dtype)

    def batch(x: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(random.integers(0, 8, x.shape), x.dtype)
        return jnp.asarray(random.uniform(size=x.shape), x.dtype)

    params, *rest = state if isinstance(state, tuple) else (state,)
    filled = jax.tree.map(weights, params)
    if isinstance(state, tuple):
        filled = (filled, *jax.tree.map(moments, rest))
    return function, (filled, *jax.tree.map(batch, data))
