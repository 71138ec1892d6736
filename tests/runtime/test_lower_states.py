"""Scans, `argmax` and `top_k` along a dim that devices share: the states of blocks are gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tapestry_egg.extract.certify.legality import Illegal, check_strategy
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans import exchanges
from tapestry_egg.runtime import compare, compile
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import finish, make_plan, signature_of, strategy
from tests.runtime.lowered import MESH, X, Y

Array = Any


def largest(x: Array, axis: int, k: int) -> tuple[Array, Array]:
    """By NumPy: the greatest elements, those of lower places first."""
    places = np.argsort(-x, axis, kind="stable").take(range(k), axis)
    return np.take_along_axis(x, places, axis), places


def backwards(fold: Any) -> Any:
    return lambda x, d: np.flip(fold(np.flip(x, d), d), d)


def summed(x: Array, d: int) -> Array:
    return np.cumsum(x, d, dtype=x.dtype)


#: Operation, and what it gives by NumPy.
SCANS: dict[str, tuple[Any, Any]] = {
    "cumsum": (lax.cumsum, summed),
    "cumprod": (lax.cumprod, lambda x, d: np.cumprod(x, d, dtype=x.dtype)),
    "cummax": (lax.cummax, np.maximum.accumulate),
    "cummin": (lax.cummin, np.minimum.accumulate),
    "cumlogsumexp": (lax.cumlogsumexp, np.logaddexp.accumulate),
}
FIRST: dict[str, tuple[Any, Any]] = {
    "argmax": (lax.argmax, np.argmax),
    "argmin": (lax.argmin, np.argmin),
}
#: The dim is cut over these axes, major to minor; another one, where there is one, over the rest.
CUTS = ((X, Y), (Y, X), (Y,), (X,))
LENGTHS = (8, 16, 40)


def on_blocks(fn: Callable[..., Any], x: Array, dim: int, axes: tuple[int, ...]) -> Array:
    """What a plan of one operation gives that cuts the dim of its operand by the axes, and sends
    what was planned."""
    program = trace(fn, x)
    graph = program.graph
    (op,) = graph.operations
    signature = signature_of(graph, op)
    (d,) = (d for d, a in enumerate(signature.inputs[0].matrix[dim]) if a)
    assert signature.index[d].role in ("scan", "join")
    cuts = {d: axes}
    rest = tuple(a for a in (X, Y) if a not in axes)
    others = [e for e, n in enumerate(signature.extents) if e != d and not n % MESH.parts(rest)]
    if rest and others:
        cuts[others[0]] = rest
    own = strategy(signature, MESH, cuts)
    check_strategy(signature, own, MESH)
    inputs = tuple(Layout.replicated(graph.values[v].rank) for v in graph.inputs)
    outputs = tuple(Layout.replicated(graph.values[v].rank) for v in graph.outputs)
    plan = make_plan(finish(graph, MESH, inputs, outputs, (own,)), MESH)
    run = compile(replace(plan, program=program))
    comparison = compare(plan, run.compile())
    assert comparison.equal, f"\n{comparison}"
    return run(x)


@st.composite
def arrays(draw: Any, dtypes: tuple[str, ...], wild: bool = True) -> tuple[Array, int]:
    """An array and a dim of it that eight devices can share: few numbers, so that many are tied,
    infinities and NaN among them if it is `wild`."""
    shape = draw(st.lists(st.integers(1, 5), min_size=0, max_size=2))
    dim = draw(st.integers(0, len(shape)))
    shape.insert(dim, draw(st.sampled_from(LENGTHS)))
    dtype = np.dtype(draw(st.sampled_from(dtypes)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.integers(0 if dtype.kind == "u" else -3, 4, shape).astype(dtype)
    if dtype.kind == "f" and draw(st.booleans()):
        x = rng.normal(size=shape).astype(dtype)
    if wild and dtype.kind == "f":
        for odd in draw(st.lists(st.sampled_from([np.nan, np.inf, -np.inf]), max_size=3)):
            x.flat[rng.integers(0, x.size, 2)] = odd
    return x, dim


@pytest.mark.slow
@pytest.mark.parametrize("kernel", FIRST)
@settings(max_examples=8, deadline=None)
@given(arrays(("float32", "int32", "uint8", "float16")), st.sampled_from(CUTS), st.booleans())
def test_the_place_of_the_first_extreme(
    kernel: str, drawn: tuple[Array, int], axes: tuple[int, ...], narrow: bool
) -> None:
    operation, by_numpy = FIRST[kernel]
    x, dim = drawn
    got = on_blocks(lambda x: operation(x, dim, np.int8 if narrow else np.int32), x, dim, axes)
    np.testing.assert_array_equal(got, by_numpy(x, dim))


@pytest.mark.slow
@pytest.mark.parametrize("axes", CUTS)
def test_many_places_are_combined_in_parts(
    axes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device combines the states of a part of the results, and these are gathered."""
    x = np.random.default_rng(1).integers(0, 3, (5, 16, 8)).astype(np.float32)
    x[0, 3, 4] = x[2, 12, 1] = np.nan

    def first(x: Array) -> Array:
        return lax.argmax(x, 1, np.int32)

    monkeypatch.setattr(exchanges, "EXCHANGED", 0)
    np.testing.assert_array_equal(on_blocks(first, x, 1, axes), np.argmax(x, 1))
    signature = signature_of(graph := trace(first, x).graph, graph.operations[0])
    cuts = tuple(axes if dim.role == "join" else () for dim in signature.index)
    (found,) = exchanges.states_combined(signature, cuts, MESH)
    assert [kind for kind, _ in found.states] == ["all_to_all", "all_to_all", "all_gather"]


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(arrays(("float32", "int32"), wild=False), st.sampled_from(CUTS), st.integers(1, 8))
def test_the_greatest_few_and_their_places(
    drawn: tuple[Array, int], axes: tuple[int, ...], k: int
) -> None:
    """Also where more are wanted than a block has."""
    x, dim = drawn
    got = on_blocks(lambda x: lax.top_k(x, k, axis=dim), x, dim, axes)
    for a, b in zip(got, largest(x.astype(np.float64), dim, k), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("kernel", SCANS)
@settings(max_examples=8, deadline=None)
@given(arrays(("float32", "int32")), st.sampled_from(CUTS), st.booleans())
def test_scans(kernel: str, drawn: tuple[Array, int], axes: tuple[int, ...], reverse: bool) -> None:
    operation, by_numpy = SCANS[kernel]
    x, dim = drawn
    if kernel == "cumlogsumexp":
        x = x.astype(np.float32)
    fold = backwards(by_numpy) if reverse else by_numpy
    with np.errstate(all="ignore"):
        wanted = fold(x.astype(np.float64) if x.dtype.kind == "f" else x, dim)
    got = on_blocks(lambda x: operation(x, dim, reverse=reverse), x, dim, axes)
    np.testing.assert_allclose(got, wanted, 1e-5, 1e-5)


def test_no_result_is_partial_and_no_whole_dim_is_cut() -> None:
    """What differs from the strategies that hold is refused."""
    graph = trace(lambda x: lax.argmax(x, 0, np.int32), np.zeros((16, 4), np.float32)).graph
    signature = signature_of(graph, graph.operations[0])
    d = next(d for d, dim in enumerate(signature.index) if dim.role == "join")
    own = strategy(signature, MESH, {d: (Y,)})
    check_strategy(signature, own, MESH)
    wrong = [
        replace(own, gives=(Layout(((),), (Y,), "max"),)),
        replace(own, gives=(Layout(((Y,),)),)),
        replace(own, needs=(Layout(((), (Y,))),)),
    ]
    for strategy_ in wrong:
        with pytest.raises(Illegal):
            check_strategy(signature, strategy_, MESH)
    whole = tuple(
        replace(dim, role="whole") if k == d else dim for k, dim in enumerate(signature.index)
    )
    with pytest.raises(Illegal):
        check_strategy(replace(signature, index=whole), own, MESH)
