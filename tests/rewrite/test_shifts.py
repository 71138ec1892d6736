"""Shifts: what reads neighbours has as many rows as what it reads, however it is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels.registry import signature_of
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.pipeline import Settings
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims
from tapestry_egg.rewrite.rows.shifts import with_rows_looked_up, with_shifts
from tapestry_egg.tracing.trace import trace

Array = Any
Function = Callable[..., Array]
PARTS = 8
N, M = 32, 16


def normal(*shape: int) -> Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).normal(size=shape), jnp.float32)


def shifted(function: Function, *arguments: Array) -> BlockGraph:
    """The program with shifts, checked: it has the numbers that JAX gives without it."""
    graph = trace(function, *arguments).graph
    made = with_rows_looked_up(with_shifts(graph, PARTS), PARTS)
    verify_graph(made)
    want = jax.tree.leaves(jax.jit(function)(*arguments))
    for got, true in zip(execute(made, jax.tree.leaves(arguments)), want, strict=True):
        assert (got.shape, got.dtype) == (true.shape, true.dtype)
        np.testing.assert_allclose(got, true, rtol=1e-5, atol=1e-5)
    return made


def every(graph: BlockGraph) -> Iterator[BlockGraph]:
    yield graph
    for op in graph.operations:
        for region in op.regions:
            yield from every(region)


def kernels(graph: BlockGraph) -> list[str]:
    return sorted(op.kernel for g in every(graph) for op in g.operations)


def uneven(graph: BlockGraph) -> set[tuple[int, ...]]:
    """Shapes that operations make of which no dim can be shared."""
    shapes = {g.values[v].shape for g in every(graph) for op in g.operations for v in op.outputs}
    return {s for s in shapes if len(s) > 1 and all(n % PARTS for n in s)}


def next_token(x: Array) -> Array:
    """What stands in a row is guessed from the row before; the mean of all rows but the last."""
    guess = jax.nn.log_softmax(x[:-1])
    return -jnp.mean(jnp.take_along_axis(guess, jnp.argmax(x[1:], -1)[:, None], -1))


def stencil(x: Array) -> Array:
    inside = x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] - 3.0 * x[1:-1, :-2]
    return jnp.pad(jnp.sin(inside), 1)


def looped(step: Function) -> Function:
    return lambda x: lax.scan(lambda x, _: (step(x), None), x, length=3)[0]


def gradient(function: Function) -> Function:
    return jax.grad(lambda x: jnp.sum(jnp.sin(function(x) * x)))


def bordered(x: Array) -> Array:
    y = jnp.pad(x, 1)
    return x + y[2:, 1:-1] * y[:-2, 1:-1] - y[1:-1, 2:] * y[1:-1, :-2]


def around(x: Array) -> Array:
    return x * jnp.roll(x, 1, 0) - jnp.roll(x, -2, 0) * jnp.roll(x, (1, 1), (0, 1))


def within(x: Array) -> Array:
    """The same as `bordered`, inside; elsewhere it stays."""
    part = x[2:, 1:-1] * x[:-2, 1:-1] - x[1:-1, 2:] * x[1:-1, :-2]
    return x.at[1:-1, 1:-1].set(x[1:-1, 1:-1] + part)


def deep(x: Array) -> Array:
    """What has a row less than what has a row less."""
    once = jnp.sin(x[1:] - x[:-1])
    twice = once[1:] * once[:-1]
    return jnp.pad(twice, [(1, 1), (0, 0)])


#: A grid whose first and last rows follow rules of their own.
BORDERS: dict[str, Function] = {
    "differences to one side": lambda x: x - 0.1 * jnp.gradient(x, axis=0) ** 2,
    "along both dims": lambda x: sum(jnp.gradient(jnp.sin(x))),
    "gradient of both dims": gradient(lambda x: sum(jnp.gradient(x * x))),
}

PROGRAMS: dict[str, Function] = {
    "next token": next_token,
    "slice and pad": lambda x: jnp.pad(jnp.sin(x)[:-1], [(1, 0), (0, 0)]),
    "a number before": lambda x: jnp.pad(x[:-2] * x[2:], [(2, 0), (0, 0)], constant_values=7.0),
    "joined": lambda x: jnp.concatenate([jnp.zeros((3, M)), x[:-3]]) * x,
    "another row before": lambda x: jnp.concatenate([x[5:6] * 2.0, x[:-1]]) * x,
    "ends again": lambda x: x - jnp.concatenate([x[:1], x[:-1]]),
    "stencil": stencil,
    "bordered": bordered,
    "around": around,
    "within": within,
    "deep": deep,
    "added": lambda x: x.at[1:-1].add(jnp.sin(x[2:] - x[:-2])),
    "updated": lambda x: lax.dynamic_update_slice(x, jnp.cos(x[:-2] + x[2:]), (1, 0)),
    "a row is one number": lambda x: x.at[0].set(3.0) - jnp.roll(x, 1, 0),
    "sum inside": lambda x: jnp.sum(jnp.log(jnp.abs(x[1:-1])) * x[2:], 0),
    "largest inside": lambda x: jnp.max(x[1:] - x[:-1], 0),
    "product inside": lambda x: x[:-1].T @ jnp.cos(x[1:]),
    "steps": looped(stencil),
    "steps around": looped(around),
    "steps within": looped(within),
    **{f"gradient of {f.__name__}": gradient(f) for f in (stencil, bordered, around, within, deep)},
    "gradient of steps": gradient(looped(bordered)),
    "gradient of next token": jax.grad(next_token),
    **{name: BORDERS[name] for name in BORDERS},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_shifts_have_the_rows_of_what_they_read(name: str) -> None:
    made = shifted(PROGRAMS[name], normal(N, M))
    assert not uneven(made), kernels(made)


def single_rows(function: Function) -> bool:
    """Whether the program with shifts makes rows one by one."""
    made = shifted(function, normal(64, 64))
    types = [g.values[v] for g in every(made) for op in g.operations for v in op.outputs]
    return any(1 in t.shape for t in types)


@pytest.mark.parametrize("name", BORDERS)
def test_a_border_is_computed_with_the_rows_beside_it(name: str) -> None:
    assert not single_rows(BORDERS[name])


def test_rows_of_a_border_that_other_devices_have_are_made_one_by_one() -> None:
    assert single_rows(lambda x: jnp.concatenate([jnp.tanh(x[20:21]) * x[:1], x[:-1]]))
    assert single_rows(lambda x: jnp.concatenate([x[:-1], jnp.tanh(x[40:41])]))


TWINS: dict[str, tuple[Function, Function]] = {
    "slice and pad": (
        lambda x: jnp.pad(x[:-2], [(2, 0), (0, 0)]),
        lambda x: lax.pad(x, jnp.float32(0), [(2, -2, 0), (0, 0, 0)]),
    ),
    "zeros joined": (
        lambda x: jnp.concatenate([jnp.zeros((2, M)), x[:-2]]),
        lambda x: lax.pad(x, jnp.float32(0), [(2, -2, 0), (0, 0, 0)]),
    ),
    "padded and sliced": (
        lambda x: jnp.pad(x, 1)[2:, 1:-1],
        lambda x: lax.pad(x, jnp.float32(0), [(-1, 1, 0), (0, 0, 0)]),
    ),
    "wrapped": (lambda x: jnp.pad(x, 1, "wrap")[2:, :-2], lambda x: jnp.roll(x, (-1, 1), (0, 1))),
    "joined halves": (
        lambda x: jnp.concatenate([x[3:], x[:3]]),
        lambda x: jnp.roll(x, -3, 0),
    ),
    "rolled twice": (lambda x: jnp.roll(jnp.roll(x, 3, 0), -1, 0), lambda x: jnp.roll(x, 2, 0)),
}


@pytest.mark.parametrize("name", TWINS)
def test_equal_shifts_are_one_operation(name: str) -> None:
    x = normal(N, M)
    found = [shifted(f, x) for f in TWINS[name]]
    mine, twin = ([(op.kernel, op.params) for op in g.operations] for g in found)
    assert [o for o in mine if o[0] != "convert_element_type"] == twin and len(twin) == 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.concatenate([-x[:, M // 2 :], x[:, : M // 2]], 1),
        lambda x: jnp.concatenate([x[N // 2 :], x[: N // 2]]),
        lambda x: x[:-12] * 2.0,
        lambda x: x[:, ::2] + x[:, 1::2],
        lambda x: x[:N:2],
    ],
    ids=["halves change signs", "halves", "far", "every other", "half"],
)
def test_what_is_no_shift_stays(function: Function) -> None:
    graph = trace(function, normal(N, M)).graph
    assert with_shifts(graph, PARTS) is graph


def test_extents_that_devices_cannot_share_stay() -> None:
    graph = trace(deep, normal(31, 15)).graph
    assert with_shifts(graph, 7) is graph


@st.composite
def programs(draw: st.DrawFn) -> Function:
    """Values that are sliced, padded, joined, rolled, written and computed with, then summed."""
    steps = draw(
        st.lists(
            st.tuples(
                st.sampled_from(
                    ["slice", "pad", "zeros", "roll", "ends", "set", "sin", "add", "border"]
                ),
                st.integers(0, 3),
                st.integers(0, 3),
                st.integers(0, 1),
            ),
            min_size=2,
            max_size=8,
        )
    )

    def run(x: Array) -> Array:
        known = [x]
        for kind, a, b, d in steps:
            y = known[-1]
            n = y.shape[d]
            edges = [(a, b) if e == d else (0, 0) for e in range(2)]
            if kind == "slice" and a + b < n:
                y = lax.slice_in_dim(y, a, n - b, axis=d)
            elif kind == "pad":
                y = jnp.pad(y, edges, constant_values=float(a - 1))
            elif kind == "zeros" and a:
                zeros = jnp.zeros(tuple(a if e == d else m for e, m in enumerate(y.shape)))
                y = jnp.concatenate([zeros, lax.slice_in_dim(y, 0, n - b, axis=d)], d)
            elif kind == "roll":
                y = jnp.roll(y, a - 2, d)
            elif kind == "ends" and a < n:
                y = jnp.pad(y, edges, "edge")
            elif kind == "set" and a + b + 1 < n:
                part = jnp.cos(lax.slice_in_dim(y, 1, n - a - b, axis=d))
                y = lax.dynamic_update_slice_in_dim(y, part, a, d)
            elif kind == "sin":
                y = jnp.sin(y)
            elif kind == "border" and a + b + 2 < n:
                row, other = (lax.slice_in_dim(y, k, k + 1, axis=d) for k in (a, b))
                rest = lax.slice_in_dim(y, 1, n, axis=d)
                y = jnp.concatenate([row * jnp.cos(other), rest], d)
            elif kind == "add":
                other = known[a % len(known)]
                shape = tuple(map(min, y.shape, other.shape))
                y = lax.slice(y, (0, 0), shape) * 0.5 + lax.slice(other, (0, 0), shape)
            known.append(y)
        return known[-1], jnp.sum(jnp.exp(-known[len(known) // 2]), 0)

    return run


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(programs())
def test_programs_of_moves_keep_their_numbers(function: Function) -> None:
    shifted(function, normal(16, 24))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["wrap", "edge", "constant"])
def test_gradients_of_sums_of_shifts_have_plans(mode: str) -> None:
    """Shifts may be found in a program of shifts, again and again: that is tried once."""

    def loss(x: Array) -> Array:
        return jnp.sum(
            jnp.sin(sum(jnp.pad(x, ((1, 1), (0, 0)), mode)[k : N + k] for k in range(3)))
        )

    program = te.trace(jax.grad(loss), jax.ShapeDtypeStruct((N, M), jnp.float32))
    wanted = Settings(work=0.3, merge=False)
    plan = te.optimize(program, "h100:8", pins={"[0]": ("x", None)}, settings=wanted)[0]
    x = normal(N, M).astype(np.float32)
    found = te.compile(plan, jax.devices()[: plan.mesh.devices])(x)
    np.testing.assert_allclose(found, jax.grad(loss)(x), atol=1e-5)


def probed(x: Array) -> Array:
    """A field that is watched at a place while it changes."""

    def step(x: Array, _: None) -> tuple[Array, Array]:
        return 0.5 * x + 1.0, x[N // 2 + 1, M // 2]

    return lax.scan(step, x, None, length=3)


@pytest.mark.parametrize(
    ("function", "looked_up"),
    [
        pytest.param(probed, 1, id="a place in a loop"),
        pytest.param(lambda x: jnp.tanh(x[-1]), 1, id="the last row"),
        pytest.param(lambda x: x[3:4, 2:-2] * 2.0, 1, id="a row, all but its ends"),
        pytest.param(lambda x: x[:, 3] + x[:, 4], 2, id="two columns"),
        pytest.param(lambda x: x[5:8:3], 1, id="the first of every three"),
        pytest.param(lambda x: x[5:9:3], 0, id="two of every three"),
        pytest.param(lambda x: jnp.roll(x, 1, 0), 0, id="a row that goes round"),
        pytest.param(lambda x: x.reshape(2, -1, M)[1], 0, id="a row of two"),
        pytest.param(lambda x: sum(x[k] for k in range(5)), 0, id="many rows"),
        pytest.param(lambda x: [2.0 * y for y in lax.split(x, (1, N - 1))], 1, id="two parts"),
    ],
)
def test_one_row_of_many_is_looked_up(function: Function, looked_up: int) -> None:
    assert kernels(shifted(function, normal(N, M))).count("dynamic_slice") == looked_up


@pytest.mark.slow
@pytest.mark.parametrize("place", [-1, 0, 5, 37, 63, 64, 1000])
@pytest.mark.parametrize("known", [True, False], ids=["known", "data"])
def test_what_one_row_is_read_of_is_not_gathered(known: bool, place: int) -> None:
    """The device that has the row gives it, also where the place is beyond an end."""
    place = min(place, 63) if known else place

    def read(x: Array, i: Array) -> Array:
        at = place if known else i
        return 2.0 * (lax.index_in_dim if known else lax.dynamic_index_in_dim)(x, at)

    given_ = normal(64, 256), jnp.int32(place)
    plan = te.optimize(
        trace(read, *given_),
        "cpu:8",
        mesh=MeshShape(("x",), (8,)),
        pins={"[0]": ("x", None)},
        settings=Settings(work=0.3),
    ).best("seconds")
    assert plan.costs.wire_bytes < given_[0].nbytes / 8
    assert {c.kind for c in plan.collectives} <= {"all_reduce", "reduce_scatter"}
    found = te.compile(plan, jax.devices()[:8])(*given_)
    np.testing.assert_array_equal(found, jax.jit(read)(*given_))


# Rows of an operation: what is remembered of one question is no answer to another.


X = jax.ShapeDtypeStruct((8, 4), jnp.float32)


def signature(kernel: str) -> OperationSignature:
    graph = trace(lambda x: jnp.max(jnp.exp(x), axis=0), X).graph
    op = next(op for op in graph.operations if op.kernel == kernel)
    types = [tuple([graph.values[v] for v in side]) for side in (op.inputs, op.outputs)]
    return signature_of(op, *types)


def test_rows_of_one_index_and_of_several() -> None:
    sig = signature("exp")
    for dim, inner in ((0, 1), (0, 2), (1, 1), (1, 2), (0, 2)):
        rows = Rows.along(sig, dim, inner)
        assert rows is not None and rows.outputs == (Cut(dim, inner),)


def test_rows_that_a_maximum_takes_in() -> None:
    sig = signature("reduce_max")
    along = next(d for d, x in enumerate(sig.index) if x.role == "reduce")
    for _ in range(2):
        assert Rows.along(sig, along) is None, "its results are no sums"
        rows = Rows.along(sig, along, any_monoid=True)
        assert rows is not None and rows.summed and rows.monoid == "max"


@pytest.mark.parametrize(
    ("numbers", "counts"),
    [
        (lambda: jnp.arange(8), True),
        (lambda: jnp.arange(1, 9) - 1, True),  # computed, and count for all that
        (lambda: jnp.arange(16) // 2 * 2 - jnp.arange(16), False),
        (lambda: (jnp.arange(8) + 1) % 8, False),
    ],
    ids=["count", "computed", "far from it", "from another row on"],
)
def test_rows_that_are_read_by_their_own_numbers_need_not_be_together(
    numbers: Callable[[], jax.Array], counts: bool
) -> None:
    columns = jax.ShapeDtypeStruct(numbers().shape, jnp.int32)
    graph = trace(lambda x, c: x[numbers(), c], X, columns).graph
    (gather,) = (op for op in with_batch_dims(graph).operations if op.kernel == "gather")
    dims = gather.params["dimension_numbers"]
    assert dims["operand_batching_dims"] == ([0] if counts else [])
    assert dims["start_index_map"] == ([1] if counts else [0, 1])
