"""BERT as TENSAT has it: eight layers of attention without softmax (after Devlin et al., 2019).

The input of a layer is a product of the input of the one before; the outputs of attention all
leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax

from .network import Network, Take


@dataclass(frozen=True)
class Size:
    """Layers, positions, width and heads; with as many positions as a head is wide, as published,
    queries multiply keys that are not transposed."""

    layers: int = 8
    sequence: int = 64
    width: int = 1024
    heads: int = 16


SIZES = {"published": Size(), "reduced": Size(), "small": Size(2, 8, 32, 4)}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("BERT", partial(apply, s), ((s.sequence, s.width),))


def apply(size: Size, take: Take, x: jax.Array) -> tuple[jax.Array, ...]:
    """The outputs of every layer's attention, and the last layer's product."""
    x = jax.nn.relu(x)
    outputs = []
    for _ in range(size.layers):
        x, attended = layer(size, take, x)
        outputs.append(attended)
    return (*outputs, x)


def layer(size: Size, take: Take, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The next layer's input, and what this one attends to, both `[sequence, width]`."""
    width = size.width

    def heads(y: jax.Array) -> jax.Array:
        return y.reshape(size.sequence, size.heads, width // size.heads).transpose(1, 0, 2)

    q, k, v = (heads(x @ take(width, width)) for _ in range(3))
    attended = (q @ k) @ v
    out = attended.transpose(1, 0, 2).reshape(size.sequence, width)
    return x @ take(width, width), out
