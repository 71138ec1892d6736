"""SqueezeNet: modules that squeeze the channels and expand them again (Iandola et al., 2016)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .network import Network, Take, average_pool, conv, max_pool


@dataclass(frozen=True)
class Size:
    """Side of the image; channels of the first squeeze (each expansion has four times as many); how
    many more the later ones have; classes."""

    image: int = 224
    width: int = 16
    fires: tuple[tuple[int, ...], ...] = ((1, 1), (2, 2), (3, 3, 4, 4))
    classes: int = 1000


SIZES = {"published": Size(), "reduced": Size(), "small": Size(32, 2, ((1,), (2, 2)), 10)}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("SqueezeNet", partial(apply, s), ((1, s.image, s.image, 3),))


def apply(size: Size, take: Take, x: jax.Array) -> jax.Array:
    """Scores `[batch, classes]` of images `[batch, image, image, 3]`."""
    x = jax.nn.relu(conv(x, take(3, 3, 3, 4 * size.width), 2, "VALID"))
    for stage in size.fires:
        x = max_pool(x, 3, 2)
        for times in stage:
            x = fire(take, x, size.width * times)
    x = jax.nn.relu(conv(x, take(1, 1, x.shape[-1], size.classes)))
    return average_pool(x, x.shape[1], x.shape[1]).reshape(-1, size.classes)


def fire(take: Take, x: jax.Array, width: int) -> jax.Array:
    """Squeeze to `width` channels; expand to 8·width, half by single points, half by windows."""
    relu = jax.nn.relu
    x = relu(conv(x, take(1, 1, x.shape[-1], width)))
    one = relu(conv(x, take(1, 1, width, 4 * width)))
    three = relu(conv(x, take(3, 3, width, 4 * width)))
    return jnp.concatenate((one, three), axis=-1)
