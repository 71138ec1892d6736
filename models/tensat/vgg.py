"""VGG-19: a chain of convolutions, pools and three dense layers (Simonyan and Zisserman, 2015)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from .network import Network, Take, conv, max_pool


@dataclass(frozen=True)
class Size:
    """Side of the image; channels and convolutions per stage; width of the dense layers."""

    image: int = 224
    stages: tuple[tuple[int, int], ...] = ((64, 2), (128, 2), (256, 4), (512, 4), (512, 4))
    dense: int = 4096
    classes: int = 1000


SIZES = {
    "published": Size(),
    "reduced": Size(96),
    "small": Size(16, ((4, 1), (8, 2)), 16, 10),
}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("VGG-19", partial(apply, s), ((1, s.image, s.image, 3),))


def apply(size: Size, take: Take, x: jax.Array) -> jax.Array:
    """Scores `[batch, classes]` of images `[batch, image, image, 3]`."""
    relu = jax.nn.relu
    for channels, convolutions in size.stages:
        for _ in range(convolutions):
            x = relu(conv(x, take(3, 3, x.shape[-1], channels)))
        x = max_pool(x, 2, 2)
    x = x.reshape(x.shape[0], -1)
    x = relu(x @ take(x.shape[-1], size.dense))
    x = relu(x @ take(size.dense, size.dense))
    return x @ take(size.dense, size.classes)
