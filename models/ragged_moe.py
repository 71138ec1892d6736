"""A mixture of experts that drops no token: sorted by expert, then multiplied by `ragged_dot`.

Each token goes to its top two experts. Rows of one expert stand together, as many as there are, and
one ragged product multiplies every row by its own expert's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, jax.Array]
TOP = 2


def init(rng: np.random.Generator, width: int = 32, hidden: int = 64, experts: int = 8) -> Params:
    """Return the router and the experts' three kernels, `[experts, ...]`."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    return {
        "router": normal(width, experts),
        "gate": normal(experts, width, hidden),
        "up": normal(experts, width, hidden),
        "down": normal(experts, hidden, width),
    }


def mixture(params: Params, x: jax.Array) -> jax.Array:
    """Map tokens `[token, width]` to the weighted sum of what their two experts give."""
    experts = params["router"].shape[-1]
    weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), TOP)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen)
    sizes = jnp.bincount(chosen, length=experts)
    rows = x[order // TOP]
    gate = lax.ragged_dot(rows, params["gate"], sizes)
    up = lax.ragged_dot(rows, params["up"], sizes)
    out = lax.ragged_dot(jax.nn.silu(gate) * up, params["down"], sizes)
    weighted = out * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // TOP].add(weighted)


def forward(params: Params, x: jax.Array) -> jax.Array:
    """Map `[batch, token, width]` to the same shape, around a residual connection."""
    return x + mixture(params, x.reshape(-1, x.shape[-1])).reshape(x.shape)


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error."""
    return jnp.mean(jnp.square(forward(params, x) - y))


def step(
    params: Params, x: jax.Array, y: jax.Array, learning_rate: float = 0.2
) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), value


def example(
    batch: int = 8, tokens: int = 16, width: int = 32, hidden: int = 64, experts: int = 8
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters and two `f32[batch, tokens, width]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, tokens, width)).astype(np.float32)
    y = jnp.abs(x)
    return step, (init(rng, width, hidden, experts), jnp.asarray(x), jnp.asarray(y))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and `f32[batch, tokens, width]`."""
    return example()[1][:2]
