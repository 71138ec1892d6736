"""A small residual convolutional network: strides, pooling, batch normalisation.

Statistics are taken over the whole batch, so whoever splits the batch has to communicate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

State = dict[str, Any]
MOMENTUM = 0.9


def init(rng: np.random.Generator, channels: int = 8, classes: int = 10) -> State:
    """Return `{"params": ..., "running": ...}`: weights, and running means and variances."""

    def normal(*shape: int) -> jax.Array:
        fan_in = np.prod(shape[:-1])
        return jnp.asarray(rng.normal(size=shape) * (2 / fan_in) ** 0.5, jnp.float32)

    def norm(width: int) -> dict[str, jax.Array]:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    def statistics(width: int) -> dict[str, jax.Array]:
        return {"mean": jnp.zeros(width), "var": jnp.ones(width)}

    widths = {"stem": channels, "first": channels, "second": 2 * channels}
    params = {
        "stem": {"kernel": normal(3, 3, 3, channels)},
        "first": {"kernel": normal(3, 3, channels, channels)},
        "second": {"kernel": normal(3, 3, channels, 2 * channels)},
        "shortcut": {"kernel": normal(1, 1, channels, 2 * channels)},
        "head": {"kernel": normal(2 * channels, classes), "bias": jnp.zeros(classes)},
    }
    for name, width in widths.items():
        params[name] |= norm(width)
    return {"params": params, "running": {k: statistics(w) for k, w in widths.items()}}


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve NHWC with HWIO, zero-padded to `ceil(size / stride)`."""
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def max_pool(x: jax.Array) -> jax.Array:
    """Take the maximum of every 2 x 2 window of NHWC."""
    window = (1, 2, 2, 1)
    pooled: jax.Array = lax.reduce_window(x, -jnp.inf, lax.max, window, window, "VALID")
    return pooled


def batch_norm(p: State, running: State, x: jax.Array) -> tuple[jax.Array, State]:
    """Normalise channels by this batch's statistics; also return the updated running ones."""
    mean = jnp.mean(x, axis=(0, 1, 2))
    var = jnp.mean(jnp.square(x - mean), axis=(0, 1, 2))
    running = {
        "mean": MOMENTUM * running["mean"] + (1 - MOMENTUM) * mean,
        "var": MOMENTUM * running["var"] + (1 - MOMENTUM) * var,
    }
    return (x - mean) * lax.rsqrt(var + 1e-5) * p["scale"] + p["bias"], running


def forward(params: State, running: State, images: jax.Array) -> tuple[jax.Array, State]:
    """Map images `[batch, height, width, 3]` to logits `[batch, classes]` and new statistics."""
    new = {}
    x = convolve(images, params["stem"]["kernel"])
    x, new["stem"] = batch_norm(params["stem"], running["stem"], x)
    x = max_pool(jax.nn.relu(x))
    y = convolve(x, params["first"]["kernel"])
    y, new["first"] = batch_norm(params["first"], running["first"], y)
    y = convolve(jax.nn.relu(y), params["second"]["kernel"], stride=2)
    y, new["second"] = batch_norm(params["second"], running["second"], y)
    x = jax.nn.relu(y + convolve(x, params["shortcut"]["kernel"], stride=2))
    x = jnp.mean(x, axis=(1, 2))
    return x @ params["head"]["kernel"] + params["head"]["bias"], new


def loss(
    params: State, running: State, images: jax.Array, labels: jax.Array
) -> tuple[jax.Array, State]:
    """Mean cross-entropy against integer labels, and the new running statistics."""
    logits, running = forward(params, running, images)
    log_probabilities = jax.nn.log_softmax(logits)
    picked = jnp.sum(log_probabilities * jax.nn.one_hot(labels, logits.shape[-1]), axis=-1)
    return -jnp.mean(picked), running


def step(
    state: State, images: jax.Array, labels: jax.Array, learning_rate: float = 0.1
) -> tuple[State, jax.Array]:
    """Take one step of gradient descent; return weights, statistics and the loss before."""
    (value, running), grads = jax.value_and_grad(loss, has_aux=True)(
        state["params"], state["running"], images, labels
    )
    params = jax.tree.map(lambda p, g: p - learning_rate * g, state["params"], grads)
    return {"params": params, "running": running}, value


def example(
    batch: int = 16, size: int = 16, channels: int = 8
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: state, `f32[batch, size, size, 3]`, `i32[batch]`."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, batch).astype(np.int32)
    images = rng.normal(size=(batch, size, size, 3)) + labels[:, None, None, None] / 10
    state = init(rng, channels)
    return step, (state, jnp.asarray(images, jnp.float32), jnp.asarray(labels))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: weights, running statistics and images."""
    _, (state, images, _) = example()
    return state["params"], state["running"], images
