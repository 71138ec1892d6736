"""A multilayer perceptron regressing a smooth function: dense layers, tanh, mean squared error."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Params = list[dict[str, jax.Array]]


def init(rng: np.random.Generator, widths: Sequence[int]) -> Params:
    """Return one kernel and bias per layer, from `widths[i]` to `widths[i + 1]`."""
    return [
        {
            "kernel": jnp.asarray(rng.normal(size=(n, m)) / n**0.5, jnp.float32),
            "bias": jnp.zeros(m),
        }
        for n, m in itertools.pairwise(widths)
    ]


def forward(params: Params, x: jax.Array) -> jax.Array:
    """Map `[batch, widths[0]]` to `[batch, widths[-1]]`."""
    for layer in params[:-1]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params[-1]["kernel"] + params[-1]["bias"]


def loss(params: Params, x: jax.Array, y: jax.Array) -> jax.Array:
    """Mean squared error."""
    return jnp.mean(jnp.square(forward(params, x) - y))


def step(
    params: Params, x: jax.Array, y: jax.Array, learning_rate: float = 0.1
) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), value


def example(
    widths: Sequence[int] = (16, 64, 64, 8), batch: int = 32
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters, `f32[batch, in]`, `f32[batch, out]`."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(batch, widths[0])).astype(np.float32)
    y = np.sin(x[:, : widths[-1]])
    return step, (init(rng, widths), jnp.asarray(x), jnp.asarray(y))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and inputs."""
    return example()[1][:2]
