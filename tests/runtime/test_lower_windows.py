"""Windows over padded operands, cut where their boxes overlap and leave the operand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tapestry_egg.graph.layout import Layout
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.runtime import compile
from tapestry_egg.tracing.codec import primitive
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import has_gaps
from tests.plans.plans import plan_by_hand, signature_of
from tests.runtime.lowered import F32, MESH, X, Y, each_strategy, numbers, same

Array = Any
IMAGE, KERNEL = numbers(2, 4, 16, 8), numbers(4, 4, 3, 3)


def convolution(**how: Any) -> Callable[[Array, Array], Array]:
    return lambda x, k: lax.conv_general_dilated(x, k, **how)


def window(reduction: str, **how: Any) -> Callable[[Array], Array]:
    primitive = getattr(lax, f"reduce_window_{reduction}_p")
    plain = dict.fromkeys(("window_strides", "base_dilation", "window_dilation"), (1, 1))
    return lambda x: primitive.bind(x, **{**plain, **how})


CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "padded": (convolution(window_strides=(1, 1), padding=((1, 1), (1, 1))), (IMAGE, KERNEL)),
    "strided": (convolution(window_strides=(2, 1), padding=((1, 0), (2, 0))), (IMAGE, KERNEL)),
    "cropped": (convolution(window_strides=(1, 1), padding=((-2, -4), (3, -1))),
                (numbers(2, 4, 24, 8), KERNEL)),
    "dilated window": (
        convolution(window_strides=(1, 1), padding=((2, 2), (0, 2)), rhs_dilation=(2, 1)),
        (IMAGE, KERNEL),
    ),
    "dilated operand": (
        convolution(window_strides=(1, 1), padding=((1, 2), (1, 1)), lhs_dilation=(2, 1)),
        (IMAGE, KERNEL),
    ),
    "dilated operand, strided": (
        convolution(window_strides=(2, 1), padding=((2, 5), (1, 1)), lhs_dilation=(3, 1)),
        (IMAGE[:, :, :11], KERNEL),
    ),
    "far outside": (convolution(window_strides=(1, 1), padding=((9, 9), (1, 1))),
                    (IMAGE, KERNEL)),
    "sums": (
        window("sum", window_dimensions=(3, 1), padding=((1, 1), (0, 0))),
        (numbers(16, 8),),
    ),
    "maxima": (
        window("max", window_dimensions=(3, 2), window_strides=(2, 1), padding=((1, 0), (0, 1))),
        (numbers(16, 8),),
    ),
    "minima of integers": (
        window("min", window_dimensions=(3, 2), padding=((2, 0), (0, 1)), window_dilation=(1, 1)),
        (np.arange(128, dtype=np.int32).reshape(16, 8) % 37,),
    ),
    "sums with holes": (
        window("sum", window_dimensions=(3, 1), padding=((1, 2), (0, 0)), base_dilation=(2, 1)),
        (numbers(16, 8),),
    ),
    "pad": (lambda x: lax.pad(x, F32(2), ((3, 1, 0), (0, 8, 0))), (numbers(12, 8),)),
    "pad of less than nothing": (
        lambda x: lax.pad(x, F32(2), ((-3, -1, 0), (12, -4, 0))),
        (numbers(12, 8),),
    ),
    "join": (
        lambda *xs: lax.concatenate(xs, 0),
        (numbers(5, 8), numbers(1, 8, seed=1), numbers(10, 8, seed=2)),
    ),
    "join flags": (lambda *xs: lax.concatenate(xs, 0), (numbers(3) > 0, numbers(13) > 0)),
    "pad with holes": (lambda x: lax.pad(x, F32(2), ((1, 0, 1), (0, 1, 2))), (numbers(8, 8),)),
}  # fmt: skip


def unpooled(window: Array, strides: Array, padding: Array) -> Callable[[Array, Array], Array]:
    return lambda source, operand: primitive("select_and_scatter_add").bind(
        source,
        operand,
        select_prim=lax.ge_p,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )


CASES["gradient of pooling"] = (
    unpooled((3, 2), (2, 2), ((1, 1), (0, 0))),
    (numbers(8, 4), numbers(16, 8, seed=1)),
)
CASES["gradient of overlapping pooling"] = (
    unpooled((3, 3), (1, 1), ((1, 1), (2, 0))),
    (numbers(16, 8), numbers(16, 8, seed=1)),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_strategy_of_a_window(name: str) -> None:
    fn, args = CASES[name]
    each_strategy(fn, *args)


def rows_cut(fn: Callable[..., Any], *args: Any, names: tuple[str, ...]) -> None:
    """Run `fn`, one operation, with the named index dims cut over both mesh axes."""
    program = trace(fn, *args)
    graph = program.graph
    cuts = dict(zip(names, ((X, Y),) if len(names) == 1 else ((X,), (Y,)), strict=True))
    whole = [tuple(Layout.replicated(graph.values[v].rank) for v in ids)
             for ids in (graph.inputs, graph.outputs)]  # fmt: skip
    plan = plan_by_hand(graph, MESH, {0: cuts}, *whole)
    same(compile(replace(plan, program=program))(*args), fn(*args), 1e-5)


@pytest.mark.slow
def test_edge_shards_fill_what_lies_outside() -> None:
    """Eight shards of two rows; the first and the last reach one row beyond the image."""
    rows_cut(CASES["padded"][0], IMAGE, KERNEL, names=("y0",))
    rows_cut(CASES["padded"][0], IMAGE, KERNEL, names=("y0", "y1"))


def test_shards_of_a_join_that_lie_in_one_operand_or_in_two() -> None:
    rows_cut(lambda *xs: lax.concatenate(xs, 0), numbers(3, 8), numbers(13, 8), names=("i0",))


def test_shards_of_nothing_but_padding() -> None:
    rows_cut(lambda x: lax.pad(x, F32(2), ((10, 2, 0), (0, 0, 0))), numbers(4, 8), names=("i0",))


@pytest.mark.parametrize("stride", [8, 2, 3])
def test_places_of_a_window_are_cut_where_the_stride_is_longer_than_what_is_left(
    stride: int,
) -> None:
    """Of eight places each device has one: between the elements that it reads lie others'. Strides
    of the whole window, as of patches of an image, number the elements as digits do."""
    patches = convolution(window_strides=(stride,), padding=((0, 0),))
    rows_cut(patches, numbers(2, 3, 32), numbers(4, 3, 8), names=("w",))


@pytest.mark.slow
def test_transposed_convolutions_are_cut_by_the_major_digit() -> None:
    """The gradient of a strided convolution, as JAX writes it."""
    forward = convolution(window_strides=(2, 2), padding=((0, 1), (0, 1)))
    x, k = numbers(2, 4, 16, 16), numbers(4, 4, 3, 3)
    out, back = jax.vjp(lambda x: forward(x, k), x)
    graph = trace(lambda g: back(g), np.asarray(out)).graph
    at = next(i for i, op in enumerate(graph.operations) if op.kernel == "conv_general_dilated")
    assert graph.operations[at].params["lhs_dilation"] == [2, 2]
    whole = [tuple(Layout.replicated(graph.values[v].rank) for v in ids)
             for ids in (graph.inputs, graph.outputs)]  # fmt: skip
    program = trace(lambda g: back(g), np.asarray(out))
    plan = replace(plan_by_hand(graph, MESH, {at: {"y0": (X, Y)}}, *whole), program=program)
    same(compile(plan)(np.asarray(out)), back(out), 1e-5)


def test_the_search_divides_one_image_by_its_rows() -> None:
    """One image, one channel: there is nothing to cut but the positions, padded at the border."""
    x, k = numbers(1, 1, 64, 63), numbers(1, 1, 3, 3)
    blur = CASES["padded"][0]
    program = trace(lambda x, k: blur(x, k), x, k)
    settings = Settings(work=0.1, forms=0, recompute=0)
    plan = optimize(program, "cpu:8", settings=settings).best("seconds")
    (op,), (strategy,) = program.graph.operations, plan.body.strategies
    names = [d.name for d in signature_of(program.graph, op).index]
    assert [n for n, axes in zip(names, strategy.cuts, strict=True) if axes] == ["y0"]
    same(compile(plan)(x, k), blur(x, k), 1e-5)


@pytest.mark.slow
@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(-6, 6), st.integers(1, 4)), max_size=3),
    st.integers(1, 4),
)
def test_boxes_leave_holes_where_counting_finds_some(
    dims: list[tuple[int, int]], size: int
) -> None:
    points = [sum(p) for p in product(*([a * i for i in range(n)] for a, n in dims))]
    covered = {p + k for p in points for k in range(size)}
    holes = len(covered) < max(covered) - min(covered) + 1
    assert has_gaps([a for a, _ in dims], size, [n for _, n in dims]) == holes
