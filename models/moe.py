"""A mixture of experts: each token goes to its top two, dispatched by dense one-hot products.

As in GShard, each row of the batch is a group, an expert takes `capacity` tokens of a group, first
come first served, and what exceeds it is left to the residual connection.
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


def init(rng: np.random.Generator, width: int = 16, hidden: int = 32, experts: int = 8) -> Params:
    """Return the router, the experts' two kernels, `[experts, ...]`, and the output kernel."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / shape[-2] ** 0.5, jnp.float32)

    return {
        "router": normal(width, experts),
        "up": normal(experts, width, hidden),
        "down": normal(experts, hidden, width),
        "out": normal(width, width),
    }


def route(logits: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """Return the combine weights `[group, token, expert, slot]` and the load-balancing loss."""
    experts = logits.shape[-1]
    probabilities = jax.nn.softmax(logits, axis=-1)
    weights, chosen = lax.top_k(probabilities, TOP)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    # [group, choice, token, expert]: all first choices are seated before any second choice.
    seats = jax.nn.one_hot(jnp.swapaxes(chosen, 1, 2), experts, dtype=jnp.int32)
    groups, _, tokens, _ = seats.shape
    order = jnp.cumsum(seats.reshape(groups, TOP * tokens, experts), axis=1).reshape(seats.shape)
    slot = jax.nn.one_hot(order * seats - 1, capacity, dtype=logits.dtype)
    combine = jnp.einsum("gtk,gktec->gtec", weights, slot)
    share = jnp.mean(seats[:, 0].astype(logits.dtype), axis=(0, 1))
    balance = experts * jnp.sum(share * jnp.mean(probabilities, axis=(0, 1)))
    return combine, balance


def forward(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Map `[group, token, width]` to the same shape; also return the load-balancing loss."""
    capacity = 2 * TOP * x.shape[1] // params["router"].shape[-1]
    combine, balance = route(x @ params["router"], capacity)
    dispatch = (combine > 0).astype(x.dtype)
    inputs = jnp.einsum("gtec,gtd->egcd", dispatch, x)
    hidden = jax.nn.silu(jnp.einsum("egcd,edh->egch", inputs, params["up"]))
    outputs = jnp.einsum("egch,ehd->egcd", hidden, params["down"])
    return (x + jnp.einsum("gtec,egcd->gtd", combine, outputs)) @ params["out"], balance


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error plus a hundredth of the load-balancing loss."""
    out, balance = forward(params, x)
    return jnp.mean(jnp.square(out - y)) + 0.01 * balance


def step(
    params: Params, x: jax.Array, y: jax.Array, learning_rate: float = 0.2
) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), value


def example(
    batch: int = 8, tokens: int = 16, width: int = 16, hidden: int = 32, experts: int = 8
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters and two `f32[batch, tokens, width]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, tokens, width)).astype(np.float32)
    y = np.abs(x)
    return step, (init(rng, width, hidden, experts), jnp.asarray(x), jnp.asarray(y))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and `f32[batch, tokens, width]`."""
    return example()[1][:2]
