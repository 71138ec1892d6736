"""Networks as functions of a source of weights, and the layers that they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

#: `take(64, 3)` is the network's next weight; it has that shape.
Take = Callable[..., jax.Array]


@dataclass(frozen=True)
class Network:
    """An inference graph: `apply(take, *inputs)`, and the shapes of its inputs."""

    name: str
    apply: Callable[..., Any]
    inputs: tuple[tuple[int, ...], ...]

    def forward(self, weights: Sequence[jax.Array], *inputs: jax.Array) -> Any:
        """The outputs; `weights` are in the order in which the network uses them."""
        rest = iter(weights)
        return self.apply(lambda *shape: next(rest), *inputs)

    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the weights, in the order of their use."""
        found: list[tuple[int, ...]] = []

        def take(*shape: int) -> jax.Array:
            found.append(shape)
            return jnp.zeros(shape)

        jax.eval_shape(lambda *inputs: self.apply(take, *inputs), *map(_struct, self.inputs))
        return found

    def abstract(self) -> tuple[Any, ...]:
        """Types of the arguments of `forward`."""
        return ([_struct(s) for s in self.shapes()], *map(_struct, self.inputs))

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """Arguments of `forward`: weights that keep the size of what they multiply, and inputs."""
        rng = np.random.default_rng(seed)

        def normal(shape: tuple[int, ...], scale: float) -> jax.Array:
            drawn = rng.standard_normal(shape, np.float32)
            return jnp.asarray(drawn * np.float32(scale))

        weights = [normal(s, (2.0 / prod(s[:-1])) ** 0.5) for s in self.shapes()]
        return (weights, *(normal(s, 1.0) for s in self.inputs))


def conv(
    x: jax.Array,
    kernel: jax.Array,
    stride: int = 1,
    padding: str = "SAME",
    groups: int = 1,
) -> jax.Array:
    """Convolve NHWC with HWIO."""
    return lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=groups,
    )


def max_pool(x: jax.Array, window: int, stride: int, padding: str = "VALID") -> jax.Array:
    """Maximum over windows of NHWC."""
    pooled: jax.Array = lax.reduce_window(
        x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), padding
    )
    return pooled


def average_pool(x: jax.Array, window: int, stride: int, padding: str = "VALID") -> jax.Array:
    """Mean over windows of NHWC; what is padded counts as zeros."""
    total: jax.Array = lax.reduce_window(
        x, 0.0, lax.add, (1, window, window, 1), (1, stride, stride, 1), padding
    )
    return total / (window * window)


def _struct(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)
