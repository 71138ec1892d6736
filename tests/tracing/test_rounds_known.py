"""Parts that loops read or add to by the number of a round, on devices and with gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph

Array = Any
N, M = 16, 8
X = np.random.default_rng(0).normal(size=(N, M))
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


def counted(x: Array) -> Array:
    return lax.fori_loop(3, N, lambda i, h: jnp.tanh(h + 2 * x[i]), x[0]).sum()


def counted_down(x: Array) -> Array:
    """The number of a round, and another that the data decides."""

    def body(state: tuple[Array, Array, Array], _: None) -> tuple[Any, None]:
        i, k, h = state
        return (i + 4, k + (h[0, 0] > 0), jnp.tanh(h + lax.dynamic_slice_in_dim(x, i, 4))), None

    return lax.scan(body, (0, 0, x[:4]), None, 4)[0][2].sum()


def by_data(x: Array) -> Array:
    return rounds(4, 4, lambda i: 4 * i * (x[0, 0] > 0))(x)


#: Name -> the program, and which operations of parts are in loops, without and with its gradient.
PROGRAMS: dict[str, tuple[Callable[[Array], Array], set[str], set[str]]] = {
    "blocks": (rounds(4, 4, lambda i: 4 * i), set(), set()),
    "rows": (rounds(N, 1, lambda i: i), set(), set()),
    "some rows": (rounds(5, 2, lambda i: 2 * i + 3), {READS}, {READS}),
    "a counter": (counted, {READS}, {READS}),
    "two counters": (counted_down, set(), set()),
    "computed again": (jax.checkpoint(rounds(4, 4, lambda i: 4 * i)), set(), set()),
    "columns": (rounds(2, 4, lambda i: 4 * i, d=1), {READS}, {READS}),
    "overlapping": (rounds(4, 4, lambda i: 2 * i), {READS}, {READS, WRITES}),
    "the last ones again": (rounds(5, 4, lambda i: 4 * i), {READS}, {READS, WRITES}),
    "from the end": (rounds(4, 4, lambda i: 12 - 4 * i), {READS}, {READS, WRITES}),
    "by data": (by_data, {READS}, {READS, WRITES}),
}


def in_loops(graph: BlockGraph, inside: bool = False) -> set[str]:
    """The kernels that read or write parts in loops."""
    found = {op.kernel for op in graph.operations if inside}.intersection((READS, WRITES))
    return found.union(*(in_loops(g, True) for op in graph.operations for g in op.regions))


@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_at_known_places_are_slices_of_stacks(name: str) -> None:
    program, forward, backward = PROGRAMS[name]
    for function, left in (program, forward), (jax.value_and_grad(program), backward):
        traced = te.trace(function, X.astype(np.float32))
        assert in_loops(traced.graph) == left


@pytest.mark.parametrize("name", PROGRAMS)
def test_eight_devices_agree_with_jax(name: str) -> None:
    function = jax.value_and_grad(PROGRAMS[name][0])
    with jax.enable_x64(True):
        front = te.optimize(
            te.trace(function, X),
            "cpu:8",
            pins={"[0]": (None, "x")},
            settings=te.Settings(work=0.2),
        )
        wanted = jax.jit(function)(X)
        for plan in (front[0], front[-1]):
            made = te.compile(plan, jax.devices()[:8])(X)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-12, 1e-12), made, wanted)


def test_a_loop_that_reads_by_number_takes_no_longer_than_one_over_slices() -> None:
    """The gradient of one, too, in no more memory."""

    def by_number(x: Array, w: Array) -> Array:
        body = lambda s, i: (s + jnp.sum(jnp.tanh(x[i] * w) ** 2), None)  # noqa: E731
        return lax.scan(body, 0.0, jnp.arange(64))[0]

    def by_slice(x: Array, w: Array) -> Array:
        body = lambda s, part: (s + jnp.sum(jnp.tanh(part * w) ** 2), None)  # noqa: E731
        return lax.scan(body, 0.0, x)[0]

    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 8, 8192), (8192,))]
    one, other = (
        te.optimize(te.trace(jax.grad(f), *shapes), "h100:8", settings=te.Settings(work=1.0))[0]
        for f in (by_number, by_slice)
    )
    assert one.costs.seconds <= 1.05 * other.costs.seconds
    assert one.costs.peak_bytes <= 1.05 * other.costs.peak_bytes
