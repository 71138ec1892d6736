"""NasNet-A: cells of separable convolutions and pools, found by search (Zoph et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .network import Network, Take, average_pool, conv, max_pool


@dataclass(frozen=True)
class Size:
    """Side of the image; channels of the first cells; stages; normal cells in each."""

    image: int = 224
    width: int = 128
    stages: int = 3
    cells: int = 5


SIZES = {"published": Size(), "reduced": Size(64, 64), "small": Size(16, 4, 1, 2)}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("NasNet-A", partial(apply, s), ((1, s.image, s.image, 3),))


def apply(size: Size, take: Take, x: jax.Array) -> jax.Array:
    """Features of images `[batch, image, image, 3]`."""
    width = size.width
    x = max_pool(jax.nn.relu(conv(x, take(7, 7, 3, width // 2), 2)), 3, 2, "SAME")
    for _ in range(size.stages):
        before, now = x, x
        for _ in range(size.cells):
            before, now = now, normal_cell(take, before, now, width)
        width *= 2
        x = reduction_cell(take, before, now, width)
    return x


def normal_cell(take: Take, before: jax.Array, now: jax.Array, width: int) -> jax.Array:
    """Five sums of two branches each, side by side."""
    now, before = _fitted(take, before, now, width)
    parts = (
        _separable(take, now, 3) + now,
        _separable(take, before, 3) + _separable(take, now, 3),
        average_pool(now, 3, 1, "SAME") + before,
        average_pool(before, 3, 1, "SAME") + average_pool(before, 3, 1, "SAME"),
        _separable(take, before, 3) + _separable(take, before, 3),
    )
    return jnp.concatenate(parts, axis=-1)


def reduction_cell(take: Take, before: jax.Array, now: jax.Array, width: int) -> jax.Array:
    """The same at half the resolution; later sums read the first two."""
    now, before = _fitted(take, before, now, width)
    first = _separable(take, before, 7, 2) + _separable(take, now, 5, 2)
    second = max_pool(now, 3, 2, "SAME") + _separable(take, before, 7, 2)
    parts = (
        first,
        second,
        average_pool(now, 3, 2, "SAME") + _separable(take, before, 5, 2),
        max_pool(now, 3, 2, "SAME") + _separable(take, first, 3),
        average_pool(first, 3, 1, "SAME") + second,
    )
    return jnp.concatenate(parts, axis=-1)


def _fitted(
    take: Take, before: jax.Array, now: jax.Array, width: int
) -> tuple[jax.Array, jax.Array]:
    """Both inputs of a cell with its channels, and the earlier one with the size of the later."""
    relu = jax.nn.relu
    same = before.shape[1] == now.shape[1]
    now = relu(conv(now, take(1, 1, now.shape[-1], width)))
    window, stride = (1, 1) if same else (3, 2)
    return now, relu(conv(before, take(window, window, before.shape[-1], width), stride))


def _separable(take: Take, x: jax.Array, window: int, stride: int = 1) -> jax.Array:
    """A convolution of every channel by itself, then one across channels."""
    channels = x.shape[-1]
    x = conv(x, take(window, window, 1, channels), stride, groups=channels)
    return conv(x, take(1, 1, channels, channels))
