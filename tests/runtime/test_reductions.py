"""States of monoids over mesh axes: what eight devices compute against NumPy on all elements."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tapestry_egg.errors import PlanError
from tapestry_egg.monoids import monoid, monoids
from tapestry_egg.monoids.fold import fold, unwrap, wrap
from tapestry_egg.runtime.lower.kernels.reductions import all_reduce, reduce_scatter

SIZES = (2, 4)
NAMES = ("a", "b")
ROWS = 16  # of the reduced value, so that it can be scattered over 8


def elements(name: str, dtype: str) -> list[np.ndarray]:
    """Parts of 8 x 3 elements per place: dim 0 the device, dim 1 the elements of one device."""
    rng = np.random.default_rng(3)
    shape = (8, 3, ROWS)
    if dtype == "bool":
        x = rng.random(shape) < 0.8
    elif name == "prod":
        x = rng.integers(1, 3, shape).astype(dtype)
    else:
        x = rng.integers(-9, 9, shape).astype(dtype)
    if name in ("logaddexp", "logsumexp", "softmax_values"):
        x = np.where(rng.random(shape) < 0.2, -np.inf, x).astype(dtype)
        x[:, :, 1] = [[700.0, -np.inf, 20.0]] * 8  # exp would overflow in float32
        x[:, :, 2] = -np.inf  # all masked
    if name.startswith("arg"):
        return [x, np.broadcast_to(np.arange(24, dtype=np.int32).reshape(8, 3, 1), shape)]
    if name == "softmax_values":
        return [x, rng.normal(size=(*shape, 2)).astype(dtype)]
    return [x]


def wanted(name: str, parts: list[np.ndarray]) -> np.ndarray:
    """The reduction over all 24 elements, in float64 or exactly."""
    flat = [p.reshape(24, *p.shape[2:]) for p in parts]
    x = flat[0]
    simple = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}
    if name in simple:
        return simple[name](x, 0)
    if name in ("and", "or"):
        return (np.bitwise_and if name == "and" else np.bitwise_or).reduce(x, 0)
    if name in ("argmax", "argmin"):
        return getattr(np, name)(x, 0)
    x = x.astype(np.float64)
    if name == "moments":
        return x.mean(0)
    if name in ("logaddexp", "logsumexp"):
        return np.logaddexp.reduce(x, 0)
    with np.errstate(invalid="ignore"):
        weights = np.exp(x - x.max(0))
        weights = weights / weights.sum(0)
    return np.einsum("nr,nre->re", weights, flat[1].astype(np.float64))


def run(name: str, parts: list[np.ndarray], scatter: bool, axes: tuple[str, ...] = NAMES) -> Any:
    """Per device: wrap and fold its elements, reduce over the mesh axes, unwrap."""
    of = monoid(name)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(SIZES), NAMES)

    def body(*local: Any) -> Any:
        state = fold(of, wrap(of, *(x[0] for x in local), xp=jnp), 0, xp=jnp)
        dtype = local[0].dtype.name
        if scatter:
            state = reduce_scatter(of, state, axes, 0, dtype)
        else:
            state = all_reduce(of, state, axes, dtype)
        return {k: v[None] for k, v in unwrap(of, state, xp=jnp).items()}

    spec = PartitionSpec(NAMES)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return {k: np.asarray(v) for k, v in jax.jit(mapped)(*parts).items()}


CASES = [
    *((name, "int32") for name in ("sum", "prod", "max", "min", "and", "or", "argmax", "argmin")),
    *((name, "bool") for name in ("and", "or")),
    *((name, "float32") for name in ("sum", "max", "argmin", "moments", "logsumexp", "logaddexp")),
    ("softmax_values", "float32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "dtype"), CASES)
@pytest.mark.parametrize("scatter", [False, True], ids=["whole", "scattered"])
def test_devices_agree_with_numpy(name: str, dtype: str, scatter: bool) -> None:
    """Integers exactly, float32 within 1e-5 of the float64 result."""
    parts = elements(name, dtype)
    (got,) = [v for k, v in run(name, parts, scatter).items() if k != "variance"]
    expected = wanted(name, parts)
    if scatter:
        assert got.shape[:2] == (8, ROWS // 8)
        got = got.reshape(ROWS, *got.shape[2:])[None]
    else:
        assert got.shape[:2] == (8, ROWS)
    for one in got:
        if dtype == "float32":
            np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)
        else:
            np.testing.assert_array_equal(one, expected)


def test_every_monoid_is_tried() -> None:
    assert {name for name, _ in CASES} == set(monoids())


def test_blocks_follow_the_order_of_the_axes() -> None:
    """Over (b, a) the device at a=i, b=j holds block 2j + i."""
    parts = elements("logsumexp", "float32")
    got = run("logsumexp", parts, True, ("b", "a"))["value"]
    blocks = wanted("logsumexp", parts).reshape(8, 2)
    for device in range(8):
        i, j = divmod(device, 4)
        np.testing.assert_allclose(got[device], blocks[2 * j + i], rtol=1e-5)


def test_one_axis_leaves_the_other_apart() -> None:
    parts = elements("argmax", "int32")
    got = run("argmax", parts, False, ("b",))["at"]
    for i in range(2):
        half = parts[0][4 * i : 4 * i + 4].reshape(12, ROWS)
        for j in range(4):
            np.testing.assert_array_equal(got[4 * i + j], half.argmax(0) + 12 * i)


@pytest.mark.parametrize(
    ("name", "collectives"),
    [
        ("logsumexp", {"pmax", "psum"}),
        ("softmax_values", {"pmax", "psum"}),
        ("moments", {"psum"}),
        ("argmax", {"all_gather"}),
    ],
)
def test_the_collectives_are_those_of_the_mesh_form(name: str, collectives: set[str]) -> None:
    of = monoid(name)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(SIZES), NAMES)
    parts = elements(name, "int32" if name == "argmax" else "float32")

    def body(*local: Any) -> Any:
        state = fold(of, wrap(of, *(x[0] for x in local), xp=jnp), 0, xp=jnp)
        return all_reduce(of, state, NAMES, local[0].dtype.name)

    spec = PartitionSpec(NAMES)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    text = str(jax.make_jaxpr(mapped)(*parts))
    found = {c for c in ("pmax", "pmin", "psum", "all_gather", "all_to_all") if c in text}
    assert found == collectives


def test_a_dim_that_does_not_fall_into_blocks_is_refused() -> None:
    parts = [np.zeros((8, 3, 6), np.float32)]
    with pytest.raises(PlanError, match="8 equal blocks"):
        run("logsumexp", parts, True)
