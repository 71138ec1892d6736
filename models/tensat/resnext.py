"""ResNeXt-50: bottleneck blocks whose middle convolution is in 32 groups (Xie et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from .network import Network, Take, conv, max_pool


@dataclass(frozen=True)
class Size:
    """Side of the image; channels of the first stage's blocks; groups; blocks per stage."""

    image: int = 224
    width: int = 128
    groups: int = 32
    blocks: tuple[int, ...] = (3, 4, 6, 3)


SIZES = {"published": Size(), "reduced": Size(96), "small": Size(32, 8, 4, (1, 2))}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("ResNeXt-50", partial(apply, s), ((1, s.image, s.image, 3),))


def apply(size: Size, take: Take, x: jax.Array) -> jax.Array:
    """Features of images `[batch, image, image, 3]`."""
    stem = size.width // 2
    x = max_pool(jax.nn.relu(conv(x, take(7, 7, 3, stem), 2)), 3, 2, "SAME")
    for stage, blocks in enumerate(size.blocks):
        for k in range(blocks):
            stride = 2 if stage and k == 0 else 1
            x = block(take, x, size.width * 2**stage, size.groups, stride)
    return x


def block(take: Take, x: jax.Array, width: int, groups: int, stride: int) -> jax.Array:
    """Three convolutions, beside a shortcut that is a convolution where the shape changes."""
    relu, channels = jax.nn.relu, x.shape[-1]
    y = relu(conv(x, take(1, 1, channels, width)))
    y = relu(conv(y, take(3, 3, width // groups, width), stride, groups=groups))
    y = conv(y, take(1, 1, width, 2 * width))
    if stride > 1 or channels != 2 * width:
        x = relu(conv(x, take(1, 1, channels, 2 * width), stride))
    return relu(x + y)
