"""Inception-v3: modules of branches of unequal windows, side by side (Szegedy et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .network import Network, Take, average_pool, conv, max_pool


@dataclass(frozen=True)
class Size:
    """Side of the image, and by what all channels are divided."""

    image: int = 299
    divisor: int = 1


SIZES = {"published": Size(), "reduced": Size(139), "small": Size(75, 16)}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("Inception-v3", partial(apply, s), ((1, s.image, s.image, 3),))


def apply(size: Size, take: Take, x: jax.Array) -> jax.Array:
    """Features `[batch, 2048]` of images `[batch, image, image, 3]`."""
    layers = _Layers(take, size.divisor)
    x = layers.chain(x, (32, 3, 3, 2, "VALID"), (32, 3, 3, 1, "VALID"), (64, 3, 3))
    x = layers.chain(max_pool(x, 3, 2), (80, 1, 1, 1, "VALID"), (192, 3, 3, 1, "VALID"))
    x = max_pool(x, 3, 2)
    for pooled in (32, 64, 64):
        x = layers.squares(x, pooled)
    x = layers.to_lines(x)
    for inner in (128, 160, 160, 192):
        x = layers.lines(x, inner)
    x = layers.to_crosses(x)
    x = layers.crosses(x)
    x = layers.crosses(x)
    return average_pool(x, x.shape[1], x.shape[1]).reshape(x.shape[0], -1)


# Channels, height and width of the window, stride, padding.
_Conv = tuple[int, int, int] | tuple[int, int, int, int] | tuple[int, int, int, int, str]


class _Layers:
    """The kinds of modules."""

    def __init__(self, take: Take, divisor: int) -> None:
        self.take, self.divisor = take, divisor

    def chain(self, x: jax.Array, *convolutions: _Conv) -> jax.Array:
        """Convolutions one after the other, each rectified."""
        for channels, height, width, *more in convolutions:
            kernel = self.take(height, width, x.shape[-1], channels // self.divisor)
            x = jax.nn.relu(conv(x, kernel, *more))  # type: ignore[arg-type]
        return x

    def squares(self, x: jax.Array, pooled: int) -> jax.Array:
        """1 by 1; 5 by 5; two of 3 by 3; and a pool."""
        return _side_by_side(
            self.chain(x, (64, 1, 1)),
            self.chain(x, (48, 1, 1), (64, 5, 5)),
            self.chain(x, (64, 1, 1), (96, 3, 3), (96, 3, 3)),
            self.chain(average_pool(x, 3, 1, "SAME"), (pooled, 1, 1)),
        )

    def to_lines(self, x: jax.Array) -> jax.Array:
        """Half the resolution."""
        return _side_by_side(
            average_pool(x, 3, 2),
            self.chain(x, (384, 3, 3, 2, "VALID")),
            self.chain(x, (64, 1, 1), (96, 3, 3), (96, 3, 3, 2, "VALID")),
        )

    def lines(self, x: jax.Array, n: int) -> jax.Array:
        """7 by 7 windows as 1 by 7 after 7 by 1."""
        return _side_by_side(
            self.chain(x, (192, 1, 1)),
            self.chain(x, (n, 1, 1), (n, 1, 7), (192, 7, 1)),
            self.chain(x, (n, 1, 1), (n, 7, 1), (n, 1, 7), (n, 7, 1), (192, 1, 7)),
            self.chain(average_pool(x, 3, 1, "SAME"), (192, 1, 1)),
        )

    def to_crosses(self, x: jax.Array) -> jax.Array:
        """Half the resolution again."""
        return _side_by_side(
            self.chain(x, (192, 1, 1), (320, 3, 3, 2, "VALID")),
            self.chain(x, (192, 1, 1), (192, 1, 7), (192, 7, 1), (192, 3, 3, 2, "VALID")),
            max_pool(x, 3, 2),
        )

    def crosses(self, x: jax.Array) -> jax.Array:
        """1 by 3 and 3 by 1 windows of the same, side by side."""
        one = self.chain(x, (384, 1, 1))
        two = self.chain(x, (448, 1, 1), (384, 3, 3))
        return _side_by_side(
            self.chain(x, (320, 1, 1)),
            *(self.chain(y, (384, *window)) for y in (one, two) for window in ((1, 3), (3, 1))),
            self.chain(max_pool(x, 3, 1, "SAME"), (192, 1, 1)),
        )


def _side_by_side(*branches: jax.Array) -> jax.Array:
    return jnp.concatenate(branches, axis=-1)
