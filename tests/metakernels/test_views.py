"""Views against NumPy's own indexing; chains of views in traced graphs."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.metakernels.views import View, ViewError, folded_views, view_of
from tapestry_egg.show.text import graph_text
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import Projection, ZRange


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    return np.arange(int(np.prod(shape))).reshape(shape)


@st.composite
def chains(draw: st.DrawFn) -> tuple[View, np.ndarray, np.ndarray]:
    """A view made in up to four steps, its base, and what NumPy makes of it in these steps."""
    base = numbered(tuple(draw(st.lists(st.integers(1, 4), max_size=3))))
    view, array = View.of(base.shape), base
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.sampled_from(["select", "slice", "rev", "perm", "new", "diag", "split"]))
        if kind == "new":
            d, n = draw(st.integers(0, array.ndim)), draw(st.integers(0, 3))
            view = view.unsqueeze(d, n)
            spread = np.expand_dims(array, d)
            array = np.broadcast_to(spread, (*spread.shape[:d], n, *spread.shape[d + 1 :]))
            continue
        if not array.ndim:
            continue
        d = draw(st.integers(-array.ndim, array.ndim - 1))
        n = array.shape[d]
        if kind == "select" and n:
            i = draw(st.integers(-n, n - 1))
            view, array = view.select(d, i), np.take(array, i, d)
        elif kind == "slice":
            ends = st.one_of(st.none(), st.integers(-5, 5))
            a, b = draw(ends), draw(ends)
            s = draw(st.sampled_from([None, 1, 2, 3, -1, -2]))
            where = [slice(None)] * array.ndim
            where[d] = slice(a, b, s)
            view, array = view.slice(d, a, b, s), array[tuple(where)]
        elif kind == "rev":
            view, array = view.reverse(d), np.flip(array, d)
        elif kind == "perm":
            order = draw(st.permutations(range(array.ndim)))
            view, array = view.permute(order), array.transpose(order)
        elif kind == "diag" and array.ndim > 1 and array.shape[0] == array.shape[1]:
            view, array = view.diagonal(), np.diagonal(array)
        elif kind == "split" and n == 4:
            d %= array.ndim
            view = view.split(d, (2, 2))
            array = array.reshape(*array.shape[:d], 2, 2, *array.shape[d + 1 :])
    return view, base, array


@given(chains())
def test_views_are_what_numpy_makes(case: tuple[View, np.ndarray, np.ndarray]) -> None:
    view, base, wanted = case
    assert view.shape == wanted.shape
    np.testing.assert_array_equal(view.read(base), wanted)
    for cell in np.ndindex(*wanted.shape):  # the map itself, cell by cell
        assert base[view.projection().point(cell).start] == wanted[cell]


@given(chains(), chains())
def test_a_view_of_a_view_is_one_view(one: Any, other: Any) -> None:
    view, base, array = one
    outer = View.of(view.shape).reverse(*range(view.rank))
    np.testing.assert_array_equal(view.then(outer).read(base), np.flip(array))
    if other[0].base != view.shape:
        with pytest.raises(ViewError, match="does not apply"):
            view.then(other[0])


@pytest.mark.parametrize(
    ("selector", "indices", "shape"),
    [
        ("..., :2:2, +, +3, 0", np.s_[..., :2:2, None, None, 0], (4, 5, 1, 1, 3)),
        ("", np.s_[()], (4, 5, 6, 7)),
        ("1", np.s_[1], (5, 6, 7)),
        ("-1, ..., ::-1", np.s_[-1, ..., ::-1], (5, 6, 7)),
        ("+, 3:0:-2", np.s_[None, 3:0:-2], (1, 2, 5, 6, 7)),
        ("..., +", np.s_[..., None], (4, 5, 6, 7, 1)),
        ("1:3, 2, ..., 1::3", np.s_[1:3, 2, ..., 1::3], (2, 6, 2)),
    ],
)
def test_selectors(selector: str, indices: Any, shape: tuple[int, ...]) -> None:
    base = numbered((4, 5, 6, 7))
    view = View.of(base.shape).at(selector)
    assert view.shape == shape
    np.testing.assert_array_equal(view.read(base), np.broadcast_to(base[indices], shape))


@pytest.mark.parametrize(
    ("selector", "what"),
    [
        ("..., ...", "two `...`"),
        ("0, 0, 0", "more dims"),
        ("a", "'a' in 'a' is no selector"),
        ("0,", "'' in '0,' is no selector"),
        ("9", "no index 9"),
        ("::0", "step 0"),
        ("+-1", "no selector"),
    ],
)
def test_selectors_that_are_none(selector: str, what: str) -> None:
    with pytest.raises(ViewError, match=what):
        View.of((2, 3)).at(selector)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda v: v.select(2, 0), "no dim 2"),
        (lambda v: v.permute((0, 0)), "not an order"),
        (lambda v: v.unsqueeze(5), "no place 5"),
        (lambda v: v.broadcast((3,)), "does not broadcast"),
        (lambda v: v.broadcast((2, 2, 4)), "does not broadcast"),
        (lambda v: v.diagonal(), "no diagonal"),
        (lambda v: v.split(1, (2, 2)), "is not of"),
        (lambda v: v.read(np.zeros((3, 2))), "not a base"),
        (lambda v: View((2,), (3,), ((1,),), (0,)), "reaches"),
        (lambda v: View((2,), (2,), ((1, 0),), (0,)), "does not lead"),
    ],
)
def test_views_that_are_none(make: Any, what: str) -> None:
    with pytest.raises(ViewError, match=what):
        make(View.of((2, 3)))


@given(st.lists(st.integers(1, 3), max_size=3), st.lists(st.integers(1, 3), max_size=3))
def test_broadcasts_are_those_of_numpy(shape: list[int], target: list[int]) -> None:
    base = numbered(tuple(shape))
    try:
        wanted = np.broadcast_to(base, target)
    except ValueError:
        with pytest.raises(ViewError):
            View.of(base.shape).broadcast(target)
    else:
        np.testing.assert_array_equal(View.of(base.shape).broadcast(target).read(base), wanted)


# ---- worked examples ---------------------------------------------------------------------------


def test_x14_a_dilated_convolution_is_two_dense_ones_over_views() -> None:
    """Window 3, dilation 2 over 10 cells: boxes of 5 of which 3 are used. Over every second cell
    it is dense: 5 cells each make 3 results, which interleave to the 6."""
    x, f = np.arange(10.0) ** 2, np.array([1.0, -2.0, 3.0])
    dilated = np.array([x[j] * f[0] + x[j + 2] * f[1] + x[j + 4] * f[2] for j in range(6)])
    views = [View.of((10,)).at("0::2"), View.of((10,)).at("1::2")]
    assert [v.shape for v in views] == [(5,), (5,)]
    dense = [np.correlate(v.read(x), f, "valid") for v in views]
    assert [y.shape for y in dense] == [(3,), (3,)]
    np.testing.assert_allclose(np.stack(dense, 1).ravel(), dilated)
    window = Projection(((1,),), (0,), (3,))
    for k, view in enumerate(views):
        box = view.projection().compose(window)
        assert box == Projection(((2,),), (k,), (5,))
        assert box.image(ZRange.from_shape((3,))).size == 9


# ---- graphs ------------------------------------------------------------------------------------


def chain(x: Any) -> Any:
    y = lax.rev(x.T, (0,))[1:, ::2]
    z = jnp.broadcast_to(y[:, None, :], (5, 3, 2))
    return jnp.sin(z), z.reshape(5, 3, 2, 1, 1), jnp.squeeze(x[:1], 0).reshape(2, 3)


def test_a_chain_of_views_is_one_view_of_where_it_starts() -> None:
    x = numbered((4, 6)).astype(np.float32)
    graph = trace(chain, x).graph
    found = folded_views(graph)
    base = graph.inputs[0]
    kernels = [op.kernel for op in graph.operations]
    assert len(found) == len(kernels) - 1  # all but the sine
    for (_, view), wanted in (
        (found[graph.outputs[1]], np.asarray(chain(x)[1])),
        (found[graph.outputs[2]], np.asarray(chain(x)[2])),
    ):
        np.testing.assert_array_equal(view.read(x), wanted)
    assert {b for b, _ in found.values()} == {base}


def test_a_printed_graph_says_what_views_read() -> None:
    text = graph_text(trace(lambda x: jnp.sin(x.T[::2]), np.zeros((4, 6), np.float32)).graph)
    assert "transpose(%0) = %0[i1, i0]" in text
    assert "slice(%1) = %0[i1, 2i0]" in text
    assert "sin(%2)  #" in text


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: x.reshape(24), (4, 6)),  # a merged dim is no affine map of its parts
        (lambda x: x.reshape(6, 4), (4, 6)),
        (lambda x: x + 1, (4, 6)),
        (lambda x: x.reshape(0, 3), (0, 6)),
    ],
)
def test_what_is_no_view(function: Any, shape: tuple[int, ...]) -> None:
    graph = trace(function, np.zeros(shape, np.float32)).graph
    assert graph.outputs[0] not in folded_views(graph)


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"permutation": [0, 0]},
        {"permutation": [0]},
        {"permutation": "ab"},
        {"permutation": [7]},
    ],
)
def test_parameters_that_do_not_fit_make_no_view(params: dict[str, Any]) -> None:
    assert view_of(Operation("transpose", (0,), (1,), params), (4, 6), (6, 4)) is None
    good = Operation("transpose", (0,), (1,), {"permutation": [1, 0]})
    assert view_of(good, (4, 6), (4, 6)) is None and view_of(good, (4, 6), (6, 4)) is not None


@given(st.data())
def test_reshapes_that_split_are_views(data: st.DataObject) -> None:
    pieces = data.draw(st.lists(st.integers(1, 4), max_size=4))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pieces)), max_size=2)))
    ends = [0, *cuts, len(pieces)]
    source = tuple(int(np.prod(pieces[a:b], dtype=int)) for a, b in pairwise(ends))
    x = numbered(source).astype(np.float32)
    graph = trace(lambda x: lax.reshape(x, pieces), x).graph
    if graph.operations:
        _, view = folded_views(graph)[graph.outputs[0]]
        np.testing.assert_array_equal(view.read(x), x.reshape(pieces))
