"""Programs in float64, whatever they say of dtypes themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.runtime.measure.numerics import accuracy, as_written, in_float64, standard

X = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32) + 4 * np.eye(8, dtype="f")
AT = np.array([3, 0, 3, 1, 1, 7, 2, 0])  # of 64 bits, as NumPy has them
WIDE = X.astype(np.float64)


def carried(x: Any) -> Any:
    return lax.scan(lambda c, r: (c + r, c * r), jnp.zeros(8, jnp.float32), x)


def carried_in_numpy(x: Any) -> Any:
    before = np.cumsum(x, 0) - x
    return x.sum(0), before * x


def grown(x: Any) -> Any:  # loops that end after different numbers of rounds
    def one(c: Any) -> Any:
        return lax.while_loop(lambda c: c < 100, lambda c: c * 1.5, c)

    return jax.vmap(jax.vmap(one))(x)


def grown_in_numpy(x: Any) -> Any:
    while (x < 100).any():
        x = np.where(x < 100, x * 1.5, x)
    return x


def branched(x: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda x: x.astype(jnp.bfloat16) * 2, jnp.bfloat16, x)


def half(x: Any) -> Any:
    return (x.astype(jnp.float16) @ x.astype(jnp.float16)).astype(jnp.float32)


def joined(x: Any) -> Any:
    return lax.reduce(x, jnp.float32(0), lambda a, b: a + b + a * b, (1,))


CASES: dict[str, tuple[Callable[..., Any], Any]] = {
    "casts to 16 bits": (half, WIDE @ WIDE),
    "what a loop carries": (carried, carried_in_numpy(WIDE)),
    "loops run together": (grown, grown_in_numpy(np.abs(WIDE))),
    "branches": (branched, WIDE * 2),
    "a solver": (lambda x: jnp.linalg.solve(x, x[0]), np.linalg.solve(WIDE, WIDE[0])),
    "computations on scalars": (joined, np.prod(1 + WIDE, 1) - 1),
    "rounding": (lambda x: lax.reduce_precision(x, 8, 7), WIDE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_programs_say_of_dtypes_is_widened(name: str) -> None:
    fn, wanted = CASES[name]
    found = in_float64(fn, [np.abs(X) if fn is grown else X])
    for x, y in zip(found, jax.tree.leaves(wanted), strict=True):
        assert x.dtype == np.float64
        assert np.allclose(x, y, rtol=1e-12, atol=1e-12)


def test_scattered_rows_are_those_of_64_bit_indices() -> None:
    (found,) = in_float64(lambda x, at: jnp.zeros((8, 8)).at[at].add(x), [X, AT])
    wanted = np.zeros((8, 8))
    np.add.at(wanted, AT, WIDE)
    assert np.abs(found - wanted).max() < 1e-12


def test_bits_and_random_numbers_are_the_programs_own() -> None:
    def drawn(key: Any, x: Any) -> Any:
        kept = jax.random.bernoulli(key, 0.5, x.shape)
        return lax.bitcast_convert_type(x, jnp.int32), kept, jax.random.normal(key) * x

    given = [jax.random.key(0), X]
    own, found = as_written(drawn, given), in_float64(drawn, given)
    assert (own[0] == found[0]).all() and (own[1] == found[1]).all()
    assert found[2].dtype == np.float64
    assert np.allclose(own[2], found[2], rtol=1e-6)


def test_sums_of_16_bits_in_another_order_are_as_accurate() -> None:
    def total(x: Any) -> Any:
        return (x.astype(jnp.float16) @ jnp.ones(x.shape[1], jnp.float16)).astype(jnp.float32)

    x = np.random.default_rng(1).normal(size=(64, 256)).astype(np.float32)
    reference, original = standard(total, lambda: [x])
    other = as_written(lambda x: total(x[:, :128]) + total(x[:, 128:]), [x])
    assert accuracy(reference, original, other)[0].ok
    assert not accuracy(reference, original, [other[0] * 1.01])[0].ok
