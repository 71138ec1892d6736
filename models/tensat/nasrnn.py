"""NasRNN: a recurrent cell found by architecture search, five steps (Zoph and Le, 2017).

Every step combines its input and the state eight times, each time with weights of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from .network import Network, Take


@dataclass(frozen=True)
class Size:
    """Steps, and the width of inputs and state."""

    steps: int = 5
    hidden: int = 512


SIZES = {"published": Size(), "reduced": Size(), "small": Size(2, 16)}


def network(size: str) -> Network:
    """The network of one of the sizes."""
    s = SIZES[size]
    return Network("NasRNN", partial(apply, s), ((1, s.hidden),) * s.steps)


def apply(size: Size, take: Take, *xs: jax.Array) -> jax.Array:
    """The state after the last of the inputs `[1, hidden]`."""
    state = take(1, size.hidden)
    for x in xs:
        state = cell(take, size.hidden, state, x)
    return state


def cell(take: Take, hidden: int, state: jax.Array, x: jax.Array) -> jax.Array:
    """One step."""
    relu, sigmoid, tanh = jax.nn.relu, jax.nn.sigmoid, jnp.tanh
    t = [x @ take(hidden, hidden) + state @ take(hidden, hidden) for _ in range(8)]
    a = relu(t[0]) + sigmoid(t[3])
    b = sigmoid(t[1]) + tanh(t[2])
    c = sigmoid(t[4]) * tanh(t[5])
    d = sigmoid(t[6]) * relu(t[7])
    e = sigmoid(b) + tanh(c)
    f = tanh(a) * tanh(d)
    return tanh(tanh(e) * tanh(f))
