"""Attention whose query heads share keys and values, over more devices than there are groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime import compile
from tapestry_egg.runtime.lower.kernels.attention import (
    flash_attention_backward_p,
    flash_attention_p,
)
from tapestry_egg.tracing.trace import trace
from tests.extract.brute_ways import every_strategy
from tests.plans.plans import finish, make_plan, signature_of
from tests.runtime.lowered import MESH, X, Y, numbers

Array = Any
F64 = np.ndarray[Any, np.dtype[np.float64]]


def attention(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """[batch, rows, heads, width] with fewer heads of keys, as reshaped queries."""
    batch, rows, _, width = q.shape
    split = q.reshape(batch, rows, k.shape[2], -1, width)
    scores = jnp.einsum("btgrh,bsgh->bgrts", split, k) / width**0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bgrts,bsgh->btgrh", jax.nn.softmax(scores), v).reshape(q.shape)


def repeated(q: Array, k: Array, v: Array, causal: bool) -> Array:
    """The same with keys and values repeated."""
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e30)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)


def library(q: Array, k: Array, v: Array, causal: bool) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=causal)


def in_numpy(
    q: F64, k: F64, v: F64, grad: F64, causal: bool, window: int = 0
) -> tuple[F64, F64, F64, F64]:
    """Attention and its gradients, head by head, in float64."""
    q, k, v, grad = (np.asarray(x, np.float64) for x in (q, k, v, grad))
    shared, width = q.shape[2] // k.shape[2], q.shape[3]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    behind = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])[None, :]
    seen = (behind >= 0) & (behind < (window or k.shape[1])) if causal else behind == behind
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            g = h // shared
            scores = np.where(seen, q[b, :, h] @ k[b, :, g].T / width**0.5, -np.inf)
            p = np.exp(scores - scores.max(1, keepdims=True))
            p /= p.sum(1, keepdims=True)
            out[b, :, h] = p @ v[b, :, g]
            dp = grad[b, :, h] @ v[b, :, g].T
            ds = p * (dp - (p * dp).sum(1, keepdims=True)) / width**0.5
            dq[b, :, h] = ds @ k[b, :, g]
            dk[b, :, g] += ds.T @ q[b, :, h]
            dv[b, :, g] += p.T @ grad[b, :, h]
    return out, dq, dk, dv


def kernels(causal: bool, window: int = 0) -> Any:
    """Attention and its gradients, by the two kernels."""
    params = {"scale": 8**-0.5, "causal": causal, "window": window, "fill": 0.0}

    def both(q: Array, k: Array, v: Array, grad: Array) -> tuple[Array, ...]:
        out, stats = flash_attention_p.bind(q, k, v, **params)
        return out, *flash_attention_backward_p.bind(q, k, v, stats, out, grad, **params)

    return both


def cut_so(fn: Any, cuts: Mapping[str, tuple[int, ...]], *xs: np.ndarray) -> Plan:
    """The plan in which all fused attention is cut so, from replicated operands to such results."""
    program = trace(fn, *xs)
    graph = program.graph
    strategies = []
    for op in graph.operations:
        signature = signature_of(graph, op)
        mine = tuple(cuts.get(d.name, ()) for d in signature.index)
        (found,) = [s for s in every_strategy(signature, MESH) if s.cuts == mine]
        strategies.append(found)
    assert [op.kernel[:5] for op in graph.operations] == ["flash"] * 2
    inputs, outputs = (
        tuple(Layout.replicated(graph.values[v].rank) for v in vs)
        for vs in (graph.inputs, graph.outputs)
    )
    plan = make_plan(finish(graph, MESH, inputs, outputs, tuple(strategies)), MESH)
    return replace(plan, program=program)


def agrees(plan: Plan, xs: tuple[np.ndarray, ...], causal: bool, window: int = 0) -> None:
    got, wanted = compile(plan)(*xs), in_numpy(*xs, causal, window)  # type: ignore[arg-type]
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 1e-5 * np.abs(b).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "causal", "cuts"),
    [
        (1, True, {"r": (X, Y)}),
        (1, False, {"r": (Y,), "b": (X,)}),
        (2, True, {"g": (X,), "r": (Y,)}),
        (2, False, {"g": (X,), "t": (Y,)}),
        (4, False, {"g": (Y,), "r": (X,)}),
        (4, True, {"b": (X,), "g": (Y,)}),
        (1, False, {"t": (Y, X)}),
    ],
)
def test_heads_of_a_group_and_rows_are_cut(
    groups: int, causal: bool, cuts: Mapping[str, tuple[int, ...]]
) -> None:
    """Over both, gradients of keys and values are partial sums, and those of queries in blocks."""
    shapes = [(2, 16, 8, 8), (2, 16, groups, 8), (2, 16, groups, 8), (2, 16, 8, 8)]
    xs = tuple(numbers(*s, seed=k) for k, s in enumerate(shapes))
    plan = cut_so(kernels(causal), cuts, *xs)
    summed = {a for d in ("r", "t") for a in cuts.get(d, ())}
    dq, dk, dv = plan.body.strategies[1].gives
    assert not dq.partial
    assert set(dk.partial) == set(dv.partial) == summed
    agrees(plan, xs, causal)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spelled", "heads", "causal"),
    [(attention, 2, True), (attention, 4, False), (library, 1, False), (repeated, 2, True)],
)
def test_fewer_heads_of_keys_than_devices_take_as_long_as_all(
    spelled: Any, heads: int, causal: bool
) -> None:
    """The gradients of eight heads of 32 768 rows on eight devices; all-reduces come to 4 %."""

    def gradients(q: Array, k: Array, v: Array, grad: Array) -> Array:
        return jax.vjp(lambda *xs: spelled(*xs, causal), q, k, v)[1](grad)

    def front(heads: int) -> te.Front:
        q = jax.ShapeDtypeStruct((1, 32768, 8, 64), jnp.bfloat16)
        k = jax.ShapeDtypeStruct((1, 32768, heads, 64), jnp.bfloat16)
        settings = te.Settings(work=3.0, workers=1)
        program = te.trace(gradients, q, k, k, q)
        return te.optimize(program, "h100:8", ("seconds", "peak_bytes"), settings=settings)

    all_of_them = front(8).best("seconds").costs
    assert any(
        p.costs.seconds <= 1.1 * all_of_them.seconds
        and p.costs.peak_bytes <= 1.25 * all_of_them.peak_bytes
        for p in front(heads)
    )
