"""References at the edges: integers divided by zero, of nothing at all, sorted NaN, powers of
infinities, as in JAX."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.kernels import prepared, reference


def run(kernel: str, params: dict[str, Any], *operands: np.ndarray[Any, Any]) -> Any:
    types = [TensorType(x.shape, x.dtype.name) for x in operands]
    signature = registry.signature(kernel, params, types)
    (ready,) = prepared(kernel, params, signature)(operands)
    if all(t.size for t in types):
        (plain,) = reference(kernel, params, signature, operands)
        assert np.array_equal(plain.astype(np.float64), ready.astype(np.float64), equal_nan=True)
    return ready


@pytest.mark.parametrize("dtype", [np.int8, np.uint8])
@pytest.mark.parametrize("kernel", ["div", "rem"])
def test_integers_divide_as_in_jax(kernel: str, dtype: Any) -> None:
    ends = np.iinfo(dtype)
    every = np.arange(ends.min, ends.max + 1).astype(dtype)
    x, y = (a.reshape(-1) for a in np.meshgrid(every, every, indexing="ij"))
    expected = np.asarray({"div": lax.div, "rem": lax.rem}[kernel](jnp.asarray(x), jnp.asarray(y)))
    assert np.array_equal(run(kernel, {}, x, y), expected)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("kernel", ["reduce_max", "reduce_min"])
def test_extremes_of_nothing_as_in_jax(kernel: str, dtype: str) -> None:
    x = np.zeros((2, 0), jnp.dtype(dtype))
    function = {"reduce_max": lax.reduce_max, "reduce_min": lax.reduce_min}[kernel]
    expected = np.asarray(function(jnp.asarray(x), axes=(1,)))
    assert np.array_equal(run(kernel, {"axes": [1]}, x), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nan_is_sorted_last(dtype: str) -> None:
    x = np.asarray(jnp.asarray([np.nan, 1.0, -np.inf, np.nan, np.inf, -2.0], dtype))
    params = {"dimension": 0, "is_stable": True, "num_keys": 1}
    expected = np.asarray(jnp.sort(jnp.asarray(x)))
    found = run("sort", params, x)
    assert np.array_equal(found.astype(float), expected.astype(float), equal_nan=True)


@pytest.mark.parametrize("exponent", [0.5, -0.5, 2.0, 1 / 3])
@pytest.mark.parametrize("shape", [(), (6,)])
def test_powers_as_in_jax(exponent: float, shape: tuple[int, ...]) -> None:
    """Also where one exponent stands for all, of which NumPy makes a root."""
    for x in (-np.inf, np.inf, -0.0, 4.0, -1.0, np.nan) if not shape else (0.0,):
        some = np.full(shape, x, np.float32)
        if shape:
            some[:] = (-np.inf, np.inf, -0.0, 4.0, -1.0, np.nan)
        y = np.float32(exponent).reshape(())
        found = run("pow", {}, some, y)
        expected = np.asarray(lax.pow(jnp.asarray(some), jnp.full(shape, y)))
        assert np.allclose(found, expected, equal_nan=True), x


@pytest.mark.parametrize("y", [1, 2, 3, 7, -1, -3])
def test_whole_powers_as_in_jax(y: int) -> None:
    """By products: of -x they are those of x in every digit, but for the sign."""
    x = np.append(np.random.default_rng(0).normal(size=1000), [0.0, -0.0, np.inf, -np.inf])
    with np.errstate(divide="ignore"):
        found, other = (run("integer_pow", {"y": y}, v) for v in (x, -x))
        narrow = run("integer_pow", {"y": y}, x.astype(np.float32))
    np.testing.assert_array_equal(other, found if y % 2 == 0 else -found)
    expected = np.asarray(lax.integer_pow(jnp.asarray(x, jnp.float32), y))
    np.testing.assert_allclose(narrow, expected, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("exponent", "mantissa"), [(8, 7), (8, 23), (5, 10), (5, 2), (8, 3)])
def test_subnormal_numbers_are_rounded_as_in_jax(dtype: str, exponent: int, mantissa: int) -> None:
    """They stay where the result has as many exponent bits, and are zero where it has fewer."""
    rng = np.random.default_rng(0)
    usual = [rng.normal(size=50), 2.0 ** rng.uniform(-150, 120, 200), 1e-40 * rng.normal(size=50)]
    with np.errstate(over="ignore"):
        x = np.concatenate([*usual, 6e-8 * np.arange(99), [-0.0, np.inf, np.nan]]).astype(
            jnp.dtype(dtype)
        )
    expected = np.asarray(lax.reduce_precision(jnp.asarray(x), exponent, mantissa))
    params = {"exponent_bits": exponent, "mantissa_bits": mantissa}
    got = run("reduce_precision", params, x)
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))


@pytest.mark.filterwarnings("ignore:Casting complex values")
def test_parts_of_complex_numbers_do_not_meet() -> None:
    x, y = np.array([0.0, np.inf], np.float32), np.array([-np.inf, np.nan], np.float32)
    expected = np.asarray(lax.complex(jnp.asarray(x), jnp.asarray(y)))
    got = run("complex", {}, x, y)
    np.testing.assert_array_equal(got.real, expected.real)
    np.testing.assert_array_equal(got.imag, expected.imag)
