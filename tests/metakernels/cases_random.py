"""Cases of random keys and bits; keys come from their words, which are plain arrays."""

from __future__ import annotations

import jax
import numpy as np

from tapestry_egg.tracing.codec import primitive
from tests.metakernels.cases import Array, Case, Draw, of


def words(draw: Draw, shape: tuple[int, ...]) -> Array:
    return draw.integers((*shape, 2), 0, 2**32, np.uint32)


@of("random", "random_bits", "random_split")
def bits(draw: Draw, kernel: str) -> Case:
    keys, shape = draw.shape(0, 2), draw.shape(0, 3)
    width = draw.choice((8, 16, 32))

    def make(w: Array) -> Array:
        key = jax.random.wrap_key_data(w)
        if kernel == "random_split":
            return jax.random.key_data(primitive(kernel).bind(key, shape=shape))
        return primitive(kernel).bind(key, bit_width=width, shape=shape)

    return make, (words(draw, keys),)


@of("random", "random_fold_in", "random_seed", "random_wrap", "random_unwrap", "random_clone")
def keys(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(0, 2)
    if kernel == "random_seed":
        seeds = draw.integers(shape, -(2**31), 2**31)
        impl = jax.random.key(0).dtype._impl
        return lambda s: primitive(kernel).bind(s, impl=impl), (seeds,)
    if kernel == "random_fold_in":
        numbers = draw.integers(shape, 0, 2**32, np.uint32)
        return (
            lambda w, n: primitive(kernel).bind(jax.random.wrap_key_data(w), n),
            (words(draw, shape), numbers),
        )
    if kernel == "random_clone":
        return lambda w: jax.random.clone(jax.random.wrap_key_data(w)), (words(draw, shape),)
    return lambda w: jax.random.key_data(jax.random.wrap_key_data(w)), (words(draw, shape),)


@of("random", "threefry2x32")
def threefry(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    scalar = draw.coin()
    k = [draw.integers(() if scalar else shape, 0, 2**32, np.uint32) for _ in range(2)]
    x = [draw.integers(shape, 0, 2**32, np.uint32) for _ in range(2)]
    return lambda *xs: primitive(kernel).bind(*xs), (*k, *x)


@of("random", "iota_2x32_shape")
def counters(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    return lambda: primitive(kernel).bind(shape=shape), ()
