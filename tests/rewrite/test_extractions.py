"""Every form that the rules hold is judged on the mesh, against forms and plans written down."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import Costs
from tapestry_egg.rewrite.extractions import choices, kernels_of
from tapestry_egg.rewrite.terms.rebuild import Node
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.tracing.constants import prepare
from tests.extract.tables import Point, Tables
from tests.rewrite.equal_forms import graph_of, struct

#: As forms were chosen by their time on one device alone.
FROZEN = Settings(forms=0)
FREE = Settings()


def left(a: Any, b: Any, c: Any) -> Any:
    return (a @ b) @ c


def right(a: Any, b: Any, c: Any) -> Any:
    return a @ (b @ c)


def by_columns(settings: Settings) -> te.Front:
    """The front of (a·b)·c with c cut by columns and the others whole."""
    square = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    pins = {"[0]": (None, None), "[1]": (None, None), "[2]": (None, "x")}
    mesh = [MeshShape(("x",), (8,))]
    program = te.trace(left, square, square, square)
    return te.optimize(program, "h100:8", mesh_shapes=mesh, pins=pins, settings=settings)


@pytest.mark.slow
def test_a_form_of_no_less_arithmetic_is_taken_where_it_is_cut_further() -> None:
    frozen, free = by_columns(FROZEN), by_columns(FREE)
    # Left of it a·b is the same on every device, whole or not; b·c is cut as c is.
    assert frozen[0].rules == () and "product-from-the-right" in free[0].rules
    assert free[0].costs.seconds < 0.7 * frozen[0].costs.seconds
    assert free[0].gap <= 0.004


@pytest.mark.slow
def test_forms_are_searched_alike_whatever_the_workers() -> None:
    def front(workers: int) -> te.Front:
        shapes = struct(2048, 2048), struct(2048, 2048), struct(2048, 2048)
        return te.optimize(
            te.trace(left, *shapes), "h100:4", settings=Settings(work=0.5, workers=workers)
        )

    one, two = front(1), front(2)
    assert [(p.costs, p.bound) for p in one] == [(p.costs, p.bound) for p in two]
    assert one.notes == two.notes


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(4096, 512, 64, 64), (64, 64, 4096, 4096)])
def test_the_front_is_the_best_of_every_form_in_every_layout(dims: tuple[int, ...]) -> None:
    m, k, n, columns = dims
    types = struct(m, k), struct(k, n), struct(n, columns)
    mesh, target = MeshShape(("x",), (4,)), load_target("h100:4")
    every: list[Point] = []  # the fronts of all plans of either form
    for function in (left, right):
        graph = prepare(graph_of(function, *types))
        every += Tables(scheduled(graph, {}), mesh, target).front()
    program = te.trace(left, *types)
    front = te.optimize(program, target, mesh_shapes=[mesh], settings=FREE)
    for plan in front:
        least = min(c.seconds for c in every if c.peak <= plan.costs.peak_bytes)
        assert least * (1 - 1e-9) <= plan.costs.seconds <= least * (1 + plan.gap) * (1 + 1e-9)
        assert plan.bound <= least * (1 + 1e-6)
    # By how much a plan of some form is left undominated by all points: little, and as was told.
    apart = max(min(_above(p.costs, c) for p in front) for c in every) - 1.0
    assert apart < 0.02
    assert apart <= front.epsilon


def _above(point: Costs, other: Point) -> float:
    """By which factor a plan's seconds or peak exceed a point's."""
    return max(point.seconds / other.seconds, point.peak_bytes / other.peak)


# The choices among classes


@pytest.mark.parametrize("seed", range(20))
def test_every_choice_is_made_once(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(2, 7))
    nodes = [
        [
            (
                k,
                Node(
                    k, tuple(rng.integers(0, max(c, 1), rng.integers(0, 3)).tolist()) if c else ()
                ),
            )
            for k in range(rng.integers(1, 4))
        ]
        for c in range(count)
    ]
    base = [int(rng.integers(0, len(n))) for n in nodes]
    roots = [count - 1]

    def live(pick: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
        reads = nx.DiGraph((c, d) for c, k in enumerate(pick) for d in nodes[c][k][1].operands)
        reads.add_nodes_from(roots)
        computed = set(roots).union(*(nx.descendants(reads, c) for c in roots))
        return tuple((c, pick[c]) for c in sorted(computed))

    expected = {live(p) for p in product(*(range(len(n)) for n in nodes))}
    found = [live(tuple(p)) for p in choices(nodes, base, roots)]
    assert sorted(found) == sorted(expected)
    changed = [sum(k != base[c] for c, k in f) for f in found]
    assert changed == sorted(changed)


def test_programs_that_differ_in_views_alone_have_the_same_kernels() -> None:
    shapes = struct(8, 4), struct(4, 8), struct(8, 16)
    turned = graph_of(lambda a, b, c: (c.T @ (a @ b).T).T, *shapes)
    assert kernels_of(graph_of(left, *shapes)) == kernels_of(turned)
    assert kernels_of(graph_of(left, *shapes)) != kernels_of(graph_of(right, *shapes))


def test_transforms_of_two_dims_are_other_kernels_in_reverse() -> None:
    """Whatever stands between them, and whichever dims are written first."""
    square = jax.ShapeDtypeStruct((8, 8), jnp.complex64)
    fft = jnp.fft.fft
    rows_first = kernels_of(graph_of(lambda x: fft(fft(x, axis=1), axis=0), square))
    columns_first = kernels_of(graph_of(lambda x: fft(fft(x, axis=0), axis=1), square))
    assert rows_first != columns_first
    turned = kernels_of(graph_of(lambda x: fft(fft(x.T, axis=0), axis=1).T, square))
    assert turned == rows_first
