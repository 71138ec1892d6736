"""Fourier transforms of several dims: one dim after another where devices share the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime import compare
from tests.tiers import tiers

S = jax.ShapeDtypeStruct
N = 8


def real(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


def complex_(*shape: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.normal(size=shape) + 1j * rng.normal(size=shape)


def spectrum(*shape: int) -> np.ndarray:
    """What a transform of real numbers gives."""
    return np.fft.rfftn(real(*shape))


def fastest(fn: Callable[..., Any], *given: Any, dim: int = 0) -> te.Plan:
    """The fastest plan for eight devices that share a dim of the first argument."""
    return searched(fn, *given, dim=dim)[0]


def searched(fn: Callable[..., Any], *given: Any, dim: int = 0, front: bool = True) -> te.Front:
    program = te.trace(fn, *[S(x.shape, jnp.result_type(jnp.float32, x.dtype)) for x in given])
    pins = {"[0]": tuple("x" if d == dim else None for d in range(len(given[0].shape)))}
    meshes = [te.MeshShape(("x",), (N,))]
    settings = Settings(work=1.0, merge=False, front=front)
    return te.optimize(program, "h100:8", mesh_shapes=meshes, pins=pins, settings=settings)


CUBE = (128, 128, 128)
#: A transform, NumPy's own, what it is given, of which shape, and the dim that devices share.
CASES: dict[str, tuple[Any, Any, Callable[..., np.ndarray], tuple[int, ...], int]] = {
    "fftn": (jnp.fft.fftn, np.fft.fftn, complex_, CUBE, 0),
    "fftn, last dim": (jnp.fft.fftn, np.fft.fftn, complex_, CUBE, 2),
    "ifftn, middle dim": (jnp.fft.ifftn, np.fft.ifftn, complex_, CUBE, 1),
    "fft2 of a batch": (jnp.fft.fft2, np.fft.fft2, complex_, (3, 512, 512), 1),
    "rfftn": (jnp.fft.rfftn, np.fft.rfftn, real, CUBE, 0),
    "irfftn": (jnp.fft.irfftn, np.fft.irfftn, spectrum, CUBE, 0),
}


@pytest.mark.parametrize("name", tiers(CASES, usual=3))
def test_devices_share_every_dim_but_the_one_that_is_transformed(name: str) -> None:
    """Each device sends its own block once, but for what stays with it."""
    fn, right, draw, shape, dim = CASES[name]
    given = draw(*shape)
    wanted = right(given)
    plan = fastest(fn, given, dim=dim)
    assert {c.kind for c in plan.collectives} == {"all_to_all"}
    item = np.dtype(plan.graph.values[plan.graph.outputs[0]].dtype).itemsize
    longest = max(wanted.size * max(item, 8), given.size * 8)
    assert plan.costs.wire_bytes <= 1.02 * longest / N * (N - 1) / N
    found = te.compile(plan, jax.devices()[:N])(jnp.asarray(given))
    np.testing.assert_allclose(found, wanted, atol=2e-6 * np.abs(wanted).max())


def spectral(one: Callable[[jax.Array], jax.Array]) -> Callable[..., jax.Array]:
    """Rounds of a step in a loop."""
    return lambda u, k: jax.lax.fori_loop(0, 3, lambda _, u: one(u) * k, u)


LOOPS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "alone": (jnp.fft.fftn, lambda u: jnp.fft.fft(jnp.fft.fft2(u), axis=0)),
    "in a loop": (
        spectral(jnp.fft.fftn),
        spectral(lambda u: jnp.fft.fft(jnp.fft.fft2(u), axis=0)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "front"), [("alone", True), ("in a loop", True), ("in a loop", False)]
)
def test_a_transform_takes_as_long_as_one_written_dim_after_dim(name: str, front: bool) -> None:
    """Also in a loop, of whose body one form is searched alone. Which of several that take as long
    on one device that is, no mesh decides: alone it may be another one than the twin's."""
    whole, twin = LOOPS[name]
    given = [S((256, 256, 256), jnp.complex64)] * (1 if name == "alone" else 2)
    plans = [searched(fn, *given, front=front)[0] for fn in (whole, twin)]
    assert plans[0].costs.seconds <= 1.05 * plans[1].costs.seconds
    assert plans[0].costs.peak_bytes <= 1.05 * plans[1].costs.peak_bytes


@pytest.mark.slow
def test_a_convolution_and_its_gradient_transform_one_dim_after_another() -> None:
    shape = 256, 256, 128

    def loss(x: jax.Array, k: jax.Array) -> jax.Array:
        made = jnp.fft.irfftn(jnp.fft.rfftn(x) * k, s=shape)
        return jnp.sum(made**2)

    x, k = real(*shape), spectrum(*shape) / 1e3
    front = searched(jax.grad(loss), x, k)
    soon = [p for p in front if p.costs.seconds <= 1.01 * front[0].costs.seconds]
    plan = min(soon, key=lambda p: p.costs.peak_bytes)
    transforms = [op for op in plan.graph.operations if op.kernel == "fft"]
    assert len(transforms) > 4 and "all_gather" not in {c.kind for c in plan.collectives}
    run = te.compile(plan, jax.devices()[:N])
    found = run(jnp.asarray(x, jnp.float32), jnp.asarray(k, jnp.complex64))
    assert compare(plan, run.compile()).equal
    # The derivative of a filter is the filter with conjugate numbers, of what comes back.
    made = np.fft.irfftn(np.fft.rfftn(x) * k, s=shape, axes=(0, 1, 2))
    wanted = np.fft.irfftn(np.fft.rfftn(2 * made) * np.conj(k), s=shape, axes=(0, 1, 2))
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
