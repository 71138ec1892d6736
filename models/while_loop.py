"""A deep equilibrium network: its output is a fixed point, found by iterating until it settles.

How often the loop runs depends on the data. The gradient comes from the implicit function theorem
and is itself the fixed point of a linear iteration, found in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, jax.Array]
TOLERANCE = 1e-4
"""Root mean square change, in units of the state, below which an iteration has settled."""
MOST = 100
"""An iteration that has not settled after so many steps is taken as it is."""


def init(rng: np.random.Generator, inputs: int = 8, width: int = 16, outputs: int = 4) -> Params:
    """Return the parameters; the recurrent kernel is small enough for the map to contract."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32)

    return {
        "input": normal(inputs, width),
        "state": 0.4 * normal(width, width),
        "output": normal(width, outputs),
    }


def layer(params: Params, x: jax.Array, z: jax.Array) -> jax.Array:
    """The map whose fixed point in `z`, `[batch, width]`, is wanted."""
    return jnp.tanh(z @ params["state"] + x @ params["input"])


def iterate(f: Callable[[jax.Array], jax.Array], z: jax.Array) -> jax.Array:
    """Apply `f` until the root mean square change falls below `TOLERANCE`."""

    def unsettled(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        old, new, count = carry
        change = jnp.sqrt(jnp.mean(jnp.square(new - old)))
        return (change > TOLERANCE) & (count < MOST)

    def advance(
        carry: tuple[jax.Array, jax.Array, jax.Array],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        _, new, count = carry
        return new, f(new), count + 1

    return lax.while_loop(unsettled, advance, (z, f(z), jnp.int32(1)))[1]


@jax.custom_vjp
def fixed_point(params: Params, x: jax.Array) -> jax.Array:
    """Return z with `z = layer(params, x, z)`."""
    start = jnp.zeros((x.shape[0], params["state"].shape[0]), x.dtype)
    return iterate(lambda z: layer(params, x, z), start)


def _forward(params: Params, x: jax.Array) -> tuple[jax.Array, tuple[Params, jax.Array, jax.Array]]:
    z = fixed_point(params, x)
    return z, (params, x, z)


def _backward(saved: tuple[Params, jax.Array, jax.Array], g: jax.Array) -> tuple[Params, jax.Array]:
    params, x, z = saved
    pull_state = jax.vjp(lambda z: layer(params, x, z), z)[1]
    adjoint = iterate(lambda u: g + pull_state(u)[0], g)
    d_params, d_x = jax.vjp(lambda params, x: layer(params, x, z), params, x)[1](adjoint)
    return d_params, d_x


fixed_point.defvjp(_forward, _backward)


def forward(params: Params, x: jax.Array) -> jax.Array:
    """A linear function of the fixed point, `[batch, outputs]`."""
    return fixed_point(params, x) @ params["output"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error of a linear function of the fixed point."""
    return jnp.mean(jnp.square(forward(params, x) - y))


def step(
    params: Params, x: jax.Array, y: jax.Array, learning_rate: float = 0.1
) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), value


def example(
    batch: int = 16, inputs: int = 8, width: int = 16, outputs: int = 4
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters, `f32[batch, in]`, `f32[batch, out]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, inputs)).astype(np.float32)
    y = np.sin(x[:, :outputs])
    params = init(rng, inputs, width, outputs)
    return step, (params, jnp.asarray(x), jnp.asarray(y))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and `f32[batch, inputs]`."""
    return example()[1][:2]
