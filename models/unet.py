"""A U-Net that removes noise, as diffusion models train it: convolutions down, up, and across.

As in Ho et al. (2020): images are mixed with noise by a random amount, the network is told how much
and says which noise it was. Group normalisation; skips join equal resolutions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, Any]
GROUPS = 4


def init(rng: np.random.Generator, channels: int, levels: int) -> Params:
    """Return fresh parameters; each of `levels` levels has twice the channels of the one above."""

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / np.prod(shape[:-1]) ** 0.5, jnp.float32)

    def block(inside: int, out: int) -> Params:
        return {
            "one": normal(3, 3, inside, out),
            "two": normal(3, 3, out, out),
            "level": normal(channels, out),
            "skip": normal(1, 1, inside, out),
            "scale": jnp.ones(out),
        }

    widths = [channels * 2**k for k in range(levels + 1)]
    return {
        "first": normal(3, 3, 3, channels),
        "down": [block(widths[k], widths[k + 1]) for k in range(levels)],
        "up": [block(2 * widths[k + 1], widths[k]) for k in reversed(range(levels))],
        "last": normal(3, 3, channels, 3),
    }


def convolve(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """Convolve NHWC with HWIO, zero-padded."""
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def normalised(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Groups of channels of one image have mean zero and variance one."""
    split = x.reshape(*x.shape[:3], GROUPS, -1)
    mean = jnp.mean(split, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(split - mean), axis=(1, 2, 4), keepdims=True)
    return ((split - mean) * lax.rsqrt(variance + 1e-5)).reshape(x.shape) * scale


def residual(p: Params, x: jax.Array, level: jax.Array) -> jax.Array:
    """Two convolutions beside one of width one, told of the noise by `level` [batch, channels]."""
    y = convolve(x, p["one"]) + (level @ p["level"])[:, None, None]
    y = convolve(jax.nn.silu(normalised(y, p["scale"])), p["two"])
    return y + convolve(x, p["skip"])


def forward(params: Params, images: jax.Array, noise: jax.Array) -> jax.Array:
    """The noise in images `[batch, size, size, 3]` of which `noise` [batch] says how much it is."""
    width = params["first"].shape[-1]
    waves = noise[:, None] * jnp.exp2(jnp.arange(width // 2))
    level = jnp.concatenate([jnp.sin(waves), jnp.cos(waves)], axis=-1)
    x = convolve(images, params["first"])
    kept = []
    for p in params["down"]:
        x = residual(p, x, level)
        kept.append(x)
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4.0
    for p, beside in zip(params["up"], reversed(kept), strict=True):
        batch, height, wide, channels = x.shape
        x = jnp.broadcast_to(x[:, :, None, :, None], (batch, height, 2, wide, 2, channels))
        x = x.reshape(batch, 2 * height, 2 * wide, channels)
        x = residual(p, jnp.concatenate([x, beside], axis=-1), level)
    return convolve(x, params["last"])


def loss(params: Params, images: jax.Array, noise: jax.Array, level: jax.Array) -> jax.Array:
    """Mean squared error of the noise that the network names."""
    share = level[:, None, None, None]
    mixed = jnp.sqrt(1 - share) * images + jnp.sqrt(share) * noise
    return jnp.mean(jnp.square(forward(params, mixed, level) - noise))


def step(params: Params, *batch: jax.Array) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, *batch)
    return jax.tree.map(lambda p, g: p - 0.02 * g, params, grads), value


def example(
    batch: int = 8, size: int = 16, channels: int = 8, levels: int = 2
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters, images, noise, and how much of it."""
    rng = np.random.default_rng(0)
    shape = (batch, size, size, 3)
    images, noise = (jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))
    level = jnp.asarray(rng.uniform(0.1, 0.9, (batch,)), jnp.float32)
    return step, (init(rng, channels, levels), images, noise, level)


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters, images, and how noisy they are."""
    _, (params, images, _, level) = example()
    return params, images, level
