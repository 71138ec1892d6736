"""Attention whose query heads share keys and values, over more devices than there are groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.runtime import compare, compile
from tapestry_egg.runtime.lower.kernels.attention import (
    after_rows,
    flash_attention_backward_p,
    flash_attention_p,
)
from tapestry_egg.tracing.trace import trace
from tests.extract.brute_ways import every_strategy
from tests.plans.plans import finish, make_plan, signature_of
from tests.runtime.lowered import MESH, X, Y, numbers

Array = Any
F64 = np.ndarray[Any, np.dtype[np.float64]]


def more(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases of the last tier."""
    return [pytest.param(*case, marks=pytest.mark.long) for case in cases]


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
    q: F64, k: F64, v: F64, grad: F64, *bias: F64, causal: bool, window: int = 0
) -> tuple[F64, F64, F64, F64]:
    """Attention and its gradients, head by head, in float64."""
    q, k, v, grad, *bias = (np.asarray(x, np.float64) for x in (q, k, v, grad, *bias))  # type: ignore[assignment]
    added = sum(bias, np.zeros((q.shape[0], q.shape[2], q.shape[1], k.shape[1])))
    shared, width = q.shape[2] // k.shape[2], q.shape[3]
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    behind = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])[None, :]
    seen = (behind >= 0) & (behind < (window or k.shape[1])) if causal else behind == behind
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            g = h // shared
            scores = np.where(seen, q[b, :, h] @ k[b, :, g].T / width**0.5 + added[b, h], -np.inf)
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

    def both(q: Array, k: Array, v: Array, grad: Array, *bias: Array) -> tuple[Array, ...]:
        out, stats = flash_attention_p.bind(q, k, v, *bias, **params)
        return out, *flash_attention_backward_p.bind(q, k, v, stats, out, grad, *bias, **params)

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
    run = compile(plan)
    comparison = compare(plan, run.compile())
    assert comparison.equal, f"\n{comparison}"
    got, wanted = run(*xs), in_numpy(*xs, causal=causal, window=window)  # type: ignore[arg-type]
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 1e-5 * (1 + np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("groups", "causal", "window", "cuts"),
    [
        (1, False, 0, {"r": (Y,), "b": (X,)}),
        (2, True, 0, {"g": (X,), "r": (Y,)}),
        (1, True, 0, {"t": (Y, X)}),
        (2, True, 3, {"b": (X,), "t": (Y,)}),
        *more(
            (1, True, 0, {"r": (X, Y)}),
            (2, False, 0, {"g": (X,), "t": (Y,)}),
            (4, False, 0, {"g": (Y,), "r": (X,)}),
            (4, True, 0, {"b": (X,), "g": (Y,)}),
            (2, True, 0, {"g": (X,), "t": (Y,)}),
            (1, True, 7, {"t": (X, Y)}),
            (2, True, 40, {"t": (X, Y)}),
        ),
    ],
)
def test_heads_of_a_group_and_rows_are_cut(
    groups: int, causal: bool, window: int, cuts: Mapping[str, tuple[int, ...]]
) -> None:
    """Over both, gradients of keys and values are partial sums, and those of queries in blocks."""
    shapes = [(2, 16, 8, 8), (2, 16, groups, 8), (2, 16, groups, 8), (2, 16, 8, 8)]
    xs = tuple(numbers(*s, seed=k) for k, s in enumerate(shapes))
    plan = cut_so(kernels(causal, window), cuts, *xs)
    summed = {a for d in ("r", "t") for a in cuts.get(d, ())}
    dq, dk, dv = plan.body.strategies[1].gives
    assert not dq.partial
    assert set(dk.partial) == set(dv.partial) == summed
    agrees(plan, xs, causal, window)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "shape"),
    [
        (16, (1, 8, 1)),
        (12, (2, 8, 16)),
        *more((16, (2, 8, 16)), (16, (1, 1, 1)), (12, (1, 1, 1)), (12, (1, 8, 1))),
    ],
)
def test_what_is_added_to_scores_is_cut_with_rows(keys: int, shape: tuple[int, ...]) -> None:
    shapes = [(2, 16, 8, 8), (2, keys, 2, 8), (2, keys, 2, 8), (2, 16, 8, 8), (*shape, keys)]
    xs = tuple(numbers(*s, seed=k) for k, s in enumerate(shapes))
    plan = cut_so(kernels(True, 6), {"b": (X,), "t": (Y,)}, *xs)
    agrees(plan, xs, causal=True, window=6)


@pytest.mark.slow
@pytest.mark.parametrize("window", [40, *more((0,))])
def test_rows_are_cut_if_there_are_fewer_heads_than_devices(window: int) -> None:
    """In a loop, of the program as people write it; no device has more than its rows of results."""

    def layers(q: Array, k: Array, v: Array) -> Array:
        behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])
        seen = (behind >= 0) & (behind < (window or q.shape[1]))

        def layer(x: Array, w: Array) -> tuple[Array, None]:
            scores = jnp.where(seen, jnp.einsum("bthd,bsd->bhts", x * w, k), -1e30)
            return jnp.einsum("bhts,bsd->bthd", jax.nn.softmax(scores), v), None

        return jax.lax.scan(layer, q, jnp.arange(1.0, 3.0))[0]

    def step(q: Array, k: Array, v: Array, grad: Array) -> Array:
        return jax.vjp(layers, q, k, v)[1](grad)

    shapes = [(1, 512, 2, 8), (1, 512, 8), (1, 512, 8), (1, 512, 2, 8)]
    xs = tuple(numbers(*s, seed=k) / 4 for k, s in enumerate(shapes))
    target = replace(load_target("cpu:8"), fuses=False)  # else one that stores scores is faster
    settings = te.Settings(work=0.5, workers=1)
    front = te.optimize(te.trace(step, *xs), target, settings=settings)
    cut = [p for p in front if _rows_cut(p)]
    assert cut
    for a, b in zip(te.compile(cut[0])(*xs), jax.jit(step)(*xs), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def _rows_cut(plan: Plan) -> bool:
    """Whether all fused attention of a plan has its rows cut."""
    cut = []

    def walk(body: BodyPlan) -> None:
        for op, strategy in zip(body.graph.operations, body.strategies, strict=True):
            if op.kernel.startswith("flash"):
                names = [d.name for d in signature_of(body.graph, op).index]
                cut.append(bool(strategy.cuts[names.index("t")]))
            for inside in strategy.bodies:
                walk(inside)

    walk(plan.body)
    return bool(cut) and all(cut)


def from_the_first_key(
    q: Array, k: Array, v: Array, *rest: Array, causal: bool, window: int
) -> list[Array]:
    """Fused attention or, given the forward pass's results, its gradients, as a library's kernels
    have them: rows of a causal mask count from the first key, and `stats` may be of more keys."""
    shared, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    every = [jnp.repeat(x, shared, axis=2) for x in (k, v)]
    behind = jnp.arange(q.shape[1])[:, None] - jnp.arange(k.shape[1])[None, :]
    seen = (behind >= 0) & (behind < (window or k.shape[1])) if causal else behind == behind
    scores = jnp.where(seen, jnp.einsum("bthd,bshd->bhts", q, every[0]) * scale, -jnp.inf)
    if not rest:
        stats = jax.nn.logsumexp(scores, axis=-1)
        return [jnp.einsum("bhts,bshd->bthd", jnp.exp(scores - stats[..., None]), every[1]), stats]
    stats, out, grad = rest
    p = jnp.exp(scores - stats[..., None])
    less = jnp.einsum("bthd,bthd->bht", grad, out)[..., None]
    ds = p * (jnp.einsum("bthd,bshd->bhts", grad, every[1]) - less) * scale
    sums = jnp.einsum("bhts,bthd->bshd", ds, q), jnp.einsum("bhts,bthd->bshd", p, grad)
    shape = (*k.shape[:3], shared, k.shape[3])
    return [jnp.einsum("bhts,bshd->bthd", ds, every[0]), *(x.reshape(shape).sum(3) for x in sums)]


@pytest.mark.slow
@pytest.mark.parametrize("window", [0, 1, 5, 40])
@pytest.mark.parametrize("block", [1, 3])
def test_kernels_that_count_from_the_first_key_make_blocks_of_rows(window: int, block: int) -> None:
    """As on GPUs: all keys before the block and a square, or rows of zeros before the block."""
    q, grad = numbers(2, 32, 4, 8, seed=1), numbers(2, 32, 4, 8, seed=2)
    k, v = numbers(2, 32, 2, 8, seed=3), numbers(2, 32, 2, 8, seed=4)
    low, high = 8 * block, 8 * block + 8
    run = partial(from_the_first_key, causal=True, window=window)
    mine = q[:, low:high], k[:, :high], v[:, :high]
    given = grad[:, low:high]
    out, stats = after_rows(run, mine, low, window)
    made = after_rows(run, (*mine, stats, out, given), low, window)
    others = np.zeros_like(grad)
    others[:, low:high] = given  # the gradients of other rows are none
    wanted = in_numpy(q, k, v, others, causal=True, window=window)
    cut = wanted[0][:, low:high], wanted[1][:, low:high], *(x[:, :high] for x in wanted[2:])
    for a, b in zip((out, *made), cut, strict=True):
        assert np.abs(np.asarray(a, np.float64) - b).max() <= 1e-5 * (1 + np.abs(b).max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spelled", "heads", "causal"),
    [
        (repeated, 2, True),
        *more((library, 1, False), (attention, 2, True), (attention, 4, False)),
    ],
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
        settings = te.Settings(work=0.5, workers=1)
        program = te.trace(gradients, q, k, k, q)
        return te.optimize(program, "h100:8", ("seconds", "peak_bytes"), settings=settings)

    all_of_them = front(8).best("seconds").costs
    assert any(
        p.costs.seconds <= 1.1 * all_of_them.seconds
        and p.costs.peak_bytes <= 1.25 * all_of_them.peak_bytes
        for p in front(heads)
    )
