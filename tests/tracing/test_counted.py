"""Loops that read and write at the number of their round are those that go over arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, Operation

Array = Any
N, D, B = 8, 16, 32
LAYERS, X, ROWS = (N, D, D), (B, D), (N, D)


def layer(c: Array, w: Array) -> Array:
    return jnp.tanh(c @ w)


def over(w: Array, x: Array, reverse: bool = False) -> Array:
    return lax.scan(lambda c, u: (layer(c, u), None), x, w, reverse=reverse)[0]


def rows(w: Array, x: Array) -> Array:
    return lax.scan(lambda c, u: (layer(c, u), c.sum(0)), x, w)


def by_number(w: Array, x: Array) -> Array:
    return lax.fori_loop(0, N, lambda i, c: layer(c, w[i]), x)


def from_the_last(w: Array, x: Array) -> Array:
    return lax.fori_loop(0, N, lambda i, c: layer(c, w[N - 1 - i]), x)


def by_numbers_given(w: Array, x: Array) -> Array:
    return lax.scan(lambda c, i: (layer(c, w[i]), None), x, jnp.arange(N))[0]


def until(w: Array, x: Array) -> Array:
    end = lax.while_loop(lambda s: s[0] < N, lambda s: (s[0] + 1, layer(s[1], w[s[0]])), (0, x))
    return end[1]


def checkpointed(w: Array, x: Array) -> Array:
    return lax.fori_loop(0, N, jax.checkpoint(lambda i, c: layer(c, w[i])), x)


def over_checkpointed(w: Array, x: Array) -> Array:
    return lax.scan(jax.checkpoint(lambda c, u: (layer(c, u), None)), x, w)[0]


def setting(w: Array, x: Array) -> Array:
    def each(i: Array, s: Any) -> Any:
        return layer(s[0], w[i]), s[1].at[i].set(s[0].sum(0))

    return lax.fori_loop(0, N, each, (x, jnp.ones(ROWS)))


def updating(w: Array, x: Array) -> Array:
    def each(i: Array, s: Any) -> Any:
        row = lax.dynamic_update_index_in_dim(s[1], s[0].sum(0), i, 0)
        return layer(s[0], w[i]), row

    return lax.fori_loop(0, N, each, (x, jnp.zeros(ROWS)))


def adding(w: Array, x: Array) -> Array:
    def each(i: Array, s: Any) -> Any:
        return layer(s[0], w[i]), s[1].at[i].add(s[0].sum(0))

    return lax.fori_loop(0, N, each, (x, jnp.zeros(ROWS)))


def blocks(x: Array) -> Array:
    def each(i: Array, s: Any) -> Any:
        part = lax.dynamic_slice(x, (8 * i, 0), (8, D))
        return s[0] + part.T @ part, lax.dynamic_update_slice(s[1], jnp.sin(part), (8 * i, 0))

    return lax.fori_loop(0, B // 8, each, (jnp.zeros((D, D)), x))


def over_blocks(x: Array) -> Array:
    def each(c: Array, part: Array) -> Any:
        return c + part.T @ part, jnp.sin(part)

    total, parts = lax.scan(each, jnp.zeros((D, D)), x.reshape(-1, 8, D))
    return total, parts.reshape(B, D)


def derived(f: Callable[..., Array]) -> Callable[..., Array]:
    return jax.grad(lambda *xs: sum(x.sum() for x in jax.tree.leaves(f(*xs))))


def columns(w: Array, x: Array) -> Array:
    def each(i: Array, s: Any) -> Any:
        return layer(s[0], w[i]), s[1].at[:, i].set(s[0].sum(0))

    return lax.fori_loop(0, N, each, (x, jnp.ones((D, N))))


def some_added(w: Array, x: Array) -> Array:
    def each(i: Array, s: Any) -> Any:
        return layer(s[0], w[i]), s[1].at[i + 3].add(s[0].sum(0))

    return lax.fori_loop(0, N, each, (x, jnp.ones((N + 5, D))))


def twice(f: Callable[..., Array]) -> Callable[..., Array]:
    return lambda w, x: lax.fori_loop(0, 2, lambda i, c: f(w, c), x)


Case = tuple[Callable[..., Array], Callable[..., Array], list[tuple[int, ...]]]
#: A loop that counts, the one that goes over arrays, and the shapes of the arguments.
SAME: dict[str, Case] = {
    "a slice by number": (by_number, over, [LAYERS, X]),
    "from the last": (from_the_last, lambda w, x: over(w, x, True), [LAYERS, X]),
    "numbers given": (by_numbers_given, over, [LAYERS, X]),
    "until": (until, over, [LAYERS, X]),
    "checkpointed": (checkpointed, over_checkpointed, [LAYERS, X]),
    "rows set": (setting, rows, [LAYERS, X]),
    "rows updated": (updating, rows, [LAYERS, X]),
    "rows added": (adding, rows, [LAYERS, X]),
    "blocks": (blocks, over_blocks, [(B, D)]),
    "gradient by number": (derived(by_number), derived(over), [LAYERS, X]),
    "gradient of checkpointed": (derived(checkpointed), derived(over_checkpointed), [LAYERS, X]),
}


def loops(graph: BlockGraph) -> list[tuple[int, int, int, int]]:
    """Of each loop what it takes, carries, goes over and stacks."""

    def of(op: Operation) -> tuple[int, int, int, int]:
        first, carried = int(op.params["num_consts"]), int(op.params["num_carry"])
        return first, carried, len(op.inputs) - first - carried, len(op.outputs) - carried

    return [of(op) for op in graph.operations if op.is_scan]


def drawn(shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [draw.normal(size=s) for s in shapes]


def agrees(function: Callable[..., Array], arguments: list[np.ndarray]) -> None:
    """The numbers of the traced program are those of `jax.jit`."""
    wanted = jax.tree.leaves(jax.jit(function)(*arguments))
    got = jax.tree.leaves(jax.jit(te.trace(function, *arguments))(*arguments))
    for a, b in zip(got, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", SAME)
def test_a_loop_that_counts_goes_over_arrays(case: str) -> None:
    counting, going, shapes = SAME[case]
    with jax.enable_x64(True):
        arguments = drawn(shapes)
        graphs = [te.trace(f, *arguments).graph for f in (counting, going)]
        assert loops(graphs[0]) == loops(graphs[1])
        kernels = [sorted(op.kernel for op in g.walk()) for g in graphs]
        extra = {"reshape", "squeeze", "broadcast_in_dim", "mul", "add", "add_any", "pad"}
        assert [k for k in kernels[0] if k not in extra] == [
            k for k in kernels[1] if k not in extra
        ]
        agrees(counting, arguments)


def other(i: Array, c: Array, w: Array) -> Array:
    return layer(c, w[N - 1 - i]) + layer(c, w[i])


STAYS: dict[str, tuple[Callable[..., Array], list[tuple[int, ...]], int]] = {
    "in both orders": (
        lambda w, x: lax.fori_loop(0, N, lambda i, c: other(i, c, w), x),
        [LAYERS, X],
        1,
    ),
    "not all rows": (
        lambda x: lax.fori_loop(1, B, lambda i, d: d.at[i].set(x[i]), jnp.ones(X)),
        [X],
        0,
    ),
    "beyond the end": (
        lambda w, x: lax.fori_loop(
            2, N + 2, lambda i, c: layer(c, lax.dynamic_index_in_dim(w, i, keepdims=False)), x
        ),
        [LAYERS, X],
        0,
    ),
    "a column": (lambda x: lax.fori_loop(0, D, lambda i, c: c + x[:, i], jnp.ones(B)), [X], 0),
    "rows that are read": (
        lambda x: lax.fori_loop(1, B, lambda i, d: d.at[i].set(d[i - 1] + x[i]), jnp.ones(X)),
        [X],
        0,
    ),
    "rows renewed": (
        lambda x: lax.fori_loop(0, B, lambda i, d: d.at[i].set(d[i] * x[i]), jnp.ones(X)),
        [X],
        1,
    ),
    "rows set twice": (
        lambda x: lax.fori_loop(0, B, lambda i, d: d.at[i // 2].set(x[i]), jnp.ones(X)),
        [X],
        1,
    ),
    "a total that is read": (
        lambda x: lax.fori_loop(
            0, B, lambda i, s: (s[0].at[i].set(x[i]), s[1] + s[0].sum()), (jnp.ones(X), 0.0)
        ),
        [X],
        1,
    ),
}


def read_at_once(i: Array, s: Any, x: Array) -> Any:
    made = s[0].at[i].set(x[i])
    return made, s[1] + made.sum()


def varied(x: Array) -> Array:
    steps = jnp.array([3, 1, 2, 5])
    first = steps.dtype.type(0), 1.0
    return lax.scan(lambda c, j: ((c[0] + j, c[1] * x[j, 0]), c[0]), first, steps)


def last_again(x: Array) -> Array:
    row = lambda i: x[jnp.minimum(i, B - 2)]  # noqa: E731
    return lax.fori_loop(0, B, lambda i, c: 0.5 * c + row(i), jnp.ones(D))


def one_column(x: Array) -> Array:
    return lax.fori_loop(0, 1, lambda i, c: c.at[:, i].add(x[0]), jnp.zeros((D, D)))


STAYS["columns"] = (columns, [LAYERS, X], 1)
STAYS["rows added to an array"] = (some_added, [LAYERS, X], 1)
STAYS["one row again"] = (last_again, [X], 0)
STAYS["steps that differ"] = (varied, [X], 1)
STAYS["a column of a square, once"] = (one_column, [X], 0)
STAYS["a row that is read at once"] = (
    lambda x: lax.fori_loop(0, B, lambda i, s: read_at_once(i, s, x), (jnp.ones(X), 0.0)),
    [X],
    1,
)


@pytest.mark.parametrize("case", STAYS)
def test_what_is_no_slice_of_every_round_stays(case: str) -> None:
    """Such loops have the numbers of `jax.jit`, and go over what they can."""
    function, shapes, over = STAYS[case]
    with jax.enable_x64(True):
        arguments = drawn(shapes)
        ((*_, streams, _),) = loops(te.trace(function, *arguments).graph)
        assert streams == over
        agrees(function, arguments)


def test_what_rounds_add_is_added_to_what_came_before() -> None:
    """Also where an array of zeros but for a row is added, as gradients are."""

    def spread(x: Array) -> Array:
        return lax.fori_loop(0, B, lambda i, c: c + jnp.zeros(X).at[i].set(x[i]), jnp.ones(X))

    with jax.enable_x64(True):
        agrees(derived(twice(by_number)), drawn([LAYERS, X]))
        (x,) = drawn([X])
        assert [stacks for *_, stacks in loops(te.trace(spread, x).graph)] == [1]
        agrees(spread, [x])


def test_what_counts_is_known_after_the_loop() -> None:
    def function(w: Array) -> Any:
        def each(s: Any, u: Array) -> Any:
            return (s[0] + 3, s[1] + u), (s[0] * 2, s[0] % 2 == 0)

        return lax.scan(each, (jnp.int32(5), jnp.zeros(D)), w)

    (w,) = drawn([ROWS])
    w = w.astype(np.float32)
    program = te.trace(function, w)
    assert loops(program.graph) == [(0, 1, 1, 0)]
    got = jax.tree.leaves(program(w))
    for a, b in zip(got, jax.tree.leaves(function(w)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


# Parts that loops read or add to by the number of a round, on devices and with gradients.


PARTS = np.random.default_rng(0).normal(size=(16, 8))
READS, WRITES = "dynamic_slice", "dynamic_update_slice"


def rounds(n: int, rows: int, start: Callable[[Array], Array], d: int = 0) -> Callable[..., Array]:
    """A loop over n numbers, of which each says where it reads some rows."""

    def program(x: Array) -> Array:
        def body(h: Array, i: Array) -> tuple[Array, Array]:
            h = jnp.tanh(h + lax.dynamic_slice_in_dim(x, start(i), rows, d))
            return h, h.sum()

        first = jnp.zeros_like(x[:rows] if d == 0 else x[:, :rows])
        h, sums = lax.scan(body, first, jnp.arange(n))
        return h.sum() + (sums * jnp.arange(1.0, n + 1)).sum()

    return program


def two_counters(x: Array) -> Array:
    """The number of a round, and another that the data decides."""

    def body(state: tuple[Array, Array, Array], _: None) -> tuple[Any, None]:
        i, k, h = state
        return (i + 4, k + (h[0, 0] > 0), jnp.tanh(h + lax.dynamic_slice_in_dim(x, i, 4))), None

    return lax.scan(body, (0, 0, x[:4]), None, 4)[0][2].sum()


#: Name -> the program, and which operations of parts are in loops, without and with its gradient.
PROGRAMS: dict[str, tuple[Callable[[Array], Array], set[str], set[str]]] = {
    "blocks": (rounds(4, 4, lambda i: 4 * i), set(), set()),
    "rows": (rounds(16, 1, lambda i: i), set(), set()),
    "some rows": (rounds(5, 2, lambda i: 2 * i + 3), {READS}, {READS}),
    "a counter": (
        lambda x: lax.fori_loop(3, 16, lambda i, h: jnp.tanh(h + 2 * x[i]), x[0]).sum(),
        {READS},
        {READS},
    ),
    "two counters": (two_counters, set(), set()),
    "computed again": (jax.checkpoint(rounds(4, 4, lambda i: 4 * i)), set(), set()),
    "columns": (rounds(2, 4, lambda i: 4 * i, d=1), {READS}, {READS}),
    "overlapping": (rounds(4, 4, lambda i: 2 * i), {READS}, {READS, WRITES}),
    "the last ones again": (rounds(5, 4, lambda i: 4 * i), {READS}, {READS, WRITES}),
    "from the end": (rounds(4, 4, lambda i: 12 - 4 * i), {READS}, {READS, WRITES}),
    "by data": (
        lambda x: rounds(4, 4, lambda i: 4 * i * (x[0, 0] > 0))(x),
        {READS},
        {READS, WRITES},
    ),
}


def in_loops(graph: BlockGraph, inside: bool = False) -> set[str]:
    """The kernels that read or write parts in loops."""
    found = {op.kernel for op in graph.operations if inside}.intersection((READS, WRITES))
    return found.union(*(in_loops(g, True) for op in graph.operations for g in op.regions))


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_at_known_places_are_slices_of_stacks(name: str) -> None:
    program, forward, backward = PROGRAMS[name]
    for function, left in (program, forward), (jax.value_and_grad(program), backward):
        traced = te.trace(function, PARTS.astype(np.float32))
        assert in_loops(traced.graph) == left


@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_devices_agree_with_jax(name: str) -> None:
    function = jax.value_and_grad(PROGRAMS[name][0])
    with jax.enable_x64(True):
        front = te.optimize(
            te.trace(function, PARTS),
            "cpu:8",
            pins={"[0]": (None, "x")},
            settings=te.Settings(work=0.1, forms=0, recompute=0),
        )
        wanted = jax.jit(function)(PARTS)
        for plan in (front[0], front[-1]):
            made = te.compile(plan, jax.devices()[:8])(PARTS)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-12), made, wanted)


def test_a_loop_that_reads_by_number_takes_no_longer_than_one_over_slices() -> None:
    """The gradient of one, too, in no more memory."""

    def costs(loop: Callable[..., Array]) -> Any:
        program = te.trace(jax.grad(loop), *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        return te.optimize(program, "h100:8", settings=te.Settings(work=0.3))[0].costs

    def add(total: Array, part: Array, w: Array) -> tuple[Array, None]:
        return total + jnp.sum(jnp.tanh(part * w) ** 2), None

    shapes = (64, 8, 8192), (8192,)
    one = costs(lambda x, w: lax.scan(lambda s, i: add(s, x[i], w), 0.0, jnp.arange(64))[0])
    other = costs(lambda x, w: lax.scan(lambda s, part: add(s, part, w), 0.0, x)[0])
    assert one.seconds <= 1.05 * other.seconds
    assert one.peak_bytes <= 1.05 * other.peak_bytes
