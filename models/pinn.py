"""A network that solves the heat equation u_t = u_xx by its residual: derivatives of derivatives.

As in Raissi et al. (2019): the network is the solution, forward-mode derivatives along time and
place are taken at random points, and the residual is what is trained away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .mlp import Params, init
from .mlp import forward as network


def forward(params: Params, points: jax.Array) -> jax.Array:
    """The solution at points `[batch, 2]` of place and time."""
    return network(params, points)[:, 0]


def loss(params: Params, points: jax.Array, start: jax.Array) -> jax.Array:
    """Mean squared residual inside, and mean squared error at time zero, where u = sin(πx)."""

    def u(x: jax.Array, t: jax.Array) -> jax.Array:
        return forward(params, jnp.stack([x, t], axis=-1))

    x, t = points[:, 0], points[:, 1]
    ones = jnp.ones_like(x)
    _, along_time = jax.jvp(lambda t: u(x, t), (t,), (ones,))
    slope = lambda x: jax.jvp(lambda x: u(x, t), (x,), (ones,))[1]  # noqa: E731
    _, curvature = jax.jvp(slope, (x,), (ones,))
    first = forward(params, start) - jnp.sin(jnp.pi * start[:, 0])
    return jnp.mean(jnp.square(along_time - curvature)) + jnp.mean(jnp.square(first))


def step(params: Params, points: jax.Array, start: jax.Array) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, points, start)
    return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), value


def example(
    batch: int = 64, width: int = 32, layers: int = 3
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters, points inside, points at time zero."""
    rng = np.random.default_rng(0)
    points = jnp.asarray(rng.uniform(0.0, 1.0, (batch, 2)), jnp.float32)
    start = points * jnp.array([1.0, 0.0])
    return step, (init(rng, (2, *(width,) * layers, 1)), points, start)


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and points."""
    return example()[1][:2]
