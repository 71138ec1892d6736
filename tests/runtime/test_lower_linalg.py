"""Batched linear algebra is cut along its leading dims, and gives what `jax.jit` gives."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.runtime import compile
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import legal_dims, random_plan, signature_of
from tests.runtime.lowered import MESH, numbers, same

#: Kernels that hold matrices, as opposed to what stands around them in a program.
LINALG = {
    *("cholesky", "eig", "eigh", "fft", "hessenberg", "lu", "qr", "schur", "svd"),
    *("triangular_solve", "tridiagonal_solve"),
}


def spd(a: jax.Array) -> jax.Array:
    return a @ jnp.swapaxes(a, -1, -2) + 4 * jnp.eye(a.shape[-1])


def solved(a: jax.Array) -> Any:
    return jnp.linalg.solve(spd(a), a), jnp.linalg.slogdet(spd(a))


def factored(a: jax.Array) -> Any:
    q, r = jnp.linalg.qr(a)
    l = jnp.linalg.cholesky(spd(a))  # noqa: E741
    return q, r, jax.scipy.linalg.solve_triangular(l, a, lower=True)


def spectral(a: jax.Array) -> Any:
    w, v = jnp.linalg.eigh(spd(a))
    u, s, vt = jnp.linalg.svd(a, full_matrices=False)
    e, _ = jnp.linalg.eig(spd(a))
    return w, v * w[..., None, :], u * s[..., None, :] @ vt, jnp.sort(e.real, -1)


def reduced(a: jax.Array) -> Any:
    t, q = jax.vmap(jax.scipy.linalg.schur)(spd(a))
    h = jax.vmap(jax.scipy.linalg.hessenberg)(a)
    edge = a[..., 0].at[:, 0].set(0)
    x = lax.linalg.tridiagonal_solve(edge, a[..., 1] + 5, jnp.roll(edge, -1, -1), a)
    # A Schur vector may have either sign; processors differ.
    return t, jnp.abs(q), h, x, jnp.abs(jnp.fft.fft2(a)), jnp.fft.irfft(jnp.fft.rfft(a))


def gradient(a: jax.Array) -> Any:
    def loss(a: jax.Array) -> jax.Array:
        w, v = jnp.linalg.eigh(spd(a))
        return jnp.sum(jnp.log(w)) + jnp.sum(jnp.linalg.solve(spd(a), a) ** 2) + jnp.sum(v[0] ** 4)

    return jax.grad(loss)(a)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [
        pytest.param(solved, marks=pytest.mark.slow),
        factored,
        pytest.param(spectral, marks=pytest.mark.slow),
        pytest.param(reduced, marks=pytest.mark.slow),
        pytest.param(gradient, marks=pytest.mark.slow),
    ],
)
def test_random_plans_give_the_original_numbers(fn: Callable[..., Any]) -> None:
    a = numbers(8, 4, 4)
    program = trace(fn, a)
    plan = replace(random_plan(program.graph, MESH, random.Random(3)), program=program)
    same(compile(plan)(a), jax.tree.map(np.asarray, jax.jit(fn)(a)), 2e-3)


def test_every_matrix_kernel_is_cut_along_the_leading_dim() -> None:
    seen = set()
    for fn in (solved, factored, spectral, reduced, gradient):
        graph = trace(fn, numbers(8, 4, 4)).graph
        for op in graph.operations:
            if op.kernel in LINALG:
                seen.add(op.kernel)
                assert 0 in legal_dims(signature_of(graph, op), 8), op.kernel
    assert seen == LINALG


@pytest.mark.slow
def test_a_batch_of_decompositions_is_planned_in_parts() -> None:
    def f(a: jax.Array) -> Any:
        u, s, v = jnp.linalg.svd(a, full_matrices=False)
        return u * jnp.tanh(s)[..., None, :] @ v

    a = numbers(64, 16, 16)
    program = trace(f, a)
    plan = te.optimize(program, "cpu:8", settings=te.Settings(work=0.1, forms=0, recompute=0)).best(
        "seconds"
    )
    k = [op.kernel for op in plan.graph.operations].index("svd")
    assert plan.mesh.parts(plan.body.strategies[k].cuts[0]) == 8
    same(compile(plan)(a), jax.jit(f)(a), 1e-3)


@pytest.mark.parametrize(
    ("fn", "shape", "flops"),
    [
        (jnp.linalg.qr, (3, 200, 100), 3 * 2 * (2 * 200 * 100**2 - 2 * 100**3 / 3)),
        (jnp.linalg.svd, (2, 100, 100), 2 * (4 + 22) * 100**3),
        (jnp.linalg.eigh, (2, 100, 100), 2 * 9 * 100**3),
        (lambda a: lax.linalg.lu(a), (100, 100), 2 * 100**3 / 3),
        (lambda a: lax.linalg.lu(a), (200, 100), 200 * 100**2 - 100**3 / 3),
        (lambda a: lax.linalg.schur(a), (100, 100), 25 * 100**3),
    ],
)
def test_decompositions_cost_the_cube_of_their_size(
    fn: Callable[..., Any], shape: tuple[int, ...], flops: float
) -> None:
    graph = trace(fn, jax.ShapeDtypeStruct(shape, jnp.float32)).graph
    found = [signature_of(graph, op) for op in graph.operations if op.kernel in LINALG]
    counted = sum(s.whole_flops for s in found)
    assert counted == pytest.approx(flops, rel=0.01)
