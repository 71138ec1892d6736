"""Bodies of loops that can be computed in several ways: one problem of all programs that they make.

The programs are written down by hand, one function for each combination of ways, and each is posed
alone; a solver finds the least seconds of each, and of the one problem, within every peak.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.pins.boundary import Fixed, restrict
from tapestry_egg.extract.pins.pins import Pin
from tapestry_egg.extract.places.axis import Names
from tapestry_egg.extract.places.patched import patched
from tapestry_egg.extract.places.programs import Patched
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.patching import Posed, Programs
from tapestry_egg.rewrite import forms as forms_module
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rules.language.book import Rule, load_books
from tapestry_egg.runtime import compare
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract.labellings import agreeing
from tests.reference.exact import exact

Array = jax.Array
Way = Callable[[Array, Array, Array], Array]
BOOKS = load_books(("algebra", "fusion", "sharding", "collectives"))
TARGET = load_target("h100:4")
#: The product of three factors: both ways, as written first.
WAYS: tuple[Way, Way] = (lambda a, b, c: (a @ b) @ c, lambda a, b, c: a @ (b @ c))
ROWS, COLUMNS, WHOLE = (None, "x", None), (None, None, "x"), (None, None, None)


def loop(way: Way, h: Array, stacks: Sequence[Array]) -> Array:
    def body(h: Array, factors: Sequence[Array]) -> tuple[Array, None]:
        return jnp.tanh(h + way(*factors)), None

    return jax.lax.scan(body, h, tuple(stacks))[0]


def two_loops(ways: Sequence[int]) -> Callable[..., tuple[Array, Array]]:
    """Two loops one after another, on arguments of their own."""

    def run(h: Array, one: Any, g: Array, two: Any) -> tuple[Array, Array]:
        return loop(WAYS[ways[0]], h, one), loop(WAYS[ways[1]], g, two)

    return run


def nested(ways: Sequence[int]) -> Callable[..., Array]:
    """A loop in a loop, each with a product of its own."""

    def run(h: Array, one: Any, two: Any) -> Array:
        def body(h: Array, factors: Sequence[Array]) -> tuple[Array, None]:
            h = loop(WAYS[ways[1]], h, two)
            return h + WAYS[ways[0]](*factors), None

        return jax.lax.scan(body, h, one)[0]

    return run


def branches(ways: Sequence[int]) -> Callable[..., Array]:
    """Two branches, each with a product of its own."""

    def run(p: Array, one: Any, two: Any) -> Array:
        return jax.lax.cond(p, lambda: WAYS[ways[0]](*one), lambda: WAYS[ways[1]](*two))

    return run


def stack(*dims: int) -> list[jax.ShapeDtypeStruct]:
    """Two matrices of each of the shapes that a product of three factors reads."""
    return [jax.ShapeDtypeStruct((2, *s), jnp.float32) for s in pairwise(dims)]


def one(*dims: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, jnp.float32) for s in pairwise(dims)]


H = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
P = jax.ShapeDtypeStruct((), jnp.bool_)
#: Programs by their ways, what they read, and how it is cut: dims that four devices cannot share
#: make one way or the other the better one, by how what is read lies.
CASES: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[int, int]]] = {
    "two loops": (
        two_loops,
        (H, stack(1024, 6, 1024, 512), H, stack(1024, 1024, 1024, 512)),
        {1: 1, 7: 2},
    ),
    "nested": (nested, (H, stack(1024, 512, 1024, 512), stack(1024, 512, 6, 512)), {1: 1, 6: 2}),
    "branches": (branches, (P, one(1024, 512, 1024, 512), one(1024, 512, 6, 512)), {1: 0, 6: 1}),
}


def pins(graph: Any, cut: dict[int, int]) -> tuple[Pin, ...]:
    found = []
    for k, v in enumerate(graph.inputs):
        shape = graph.values[v].shape
        dims = tuple(("x",) if cut.get(k) == d else () for d in range(len(shape)))
        found.append(Pin(k, "", "the test", shape, dims, False))
    return tuple(found)


MESH = MeshShape(("x",), (4,))


def together(name: str, frozen: bool = False) -> Patched:
    """The one problem of all programs; without the ways of the last place where that is frozen."""
    made, shapes, cut = CASES[name]
    graph = trace(made((0, 0)), *shapes).graph
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forms_module, "FORMS", 0)  # so few programs are forms, each on its own
        found = forms(graph, BOOKS, TARGET, room=10_000)[0].patches
    assert found is not None and [len(p) for p in found.places] == [2, 2]
    counts = [2, 1 if frozen else 2]
    question: Any = SimpleNamespace(
        machine=TARGET,
        pairs={},
        books=BOOKS,
        settings=Settings(),
        words=SimpleNamespace(fixed=Fixed(pins(graph, cut))),
    )
    programs = Programs(question, Form(graph), found, scheduled(prepare(graph), {}))
    laid = patched(Posed(programs, MESH), counts, Names(found.values, programs.stands))
    assert laid is not None and not laid.left
    return laid


def alone(name: str, ways: tuple[int, int]) -> Problem:
    """The problem of one of the programs as it is written by hand."""
    made, shapes, cut = CASES[name]
    graph = trace(made(ways), *shapes).graph
    plan = scheduled(prepare(graph), {})
    found = saturate(encode(plan.program, MESH), BOOKS)
    choices = unit_choices(plan, found, MESH, TARGET)
    return assemble(restrict(choices, Fixed(pins(graph, cut)))).problem


def differs(name: str, frozen: bool = False) -> float:
    """By which share the seconds of the one problem differ most from the best of all programs,
    within peaks from the least to as much as is of use."""
    problems = [alone(name, (a, b)) for a, b in product(range(2), repeat=2)]
    laid = together(name, frozen).problem
    sizes = [float(sum(u.amount.max() for v in p.variables for u in v.uses)) for p in problems]
    worst = 0.0
    for limit in np.geomspace(max(sizes) / 64, max(sizes), 6):
        best = min(exact(p, float(limit)) for p in problems)
        found = exact(laid, float(limit))
        if np.isfinite(best) or np.isfinite(found):
            worst = max(worst, abs(found / best - 1.0))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_one_problem_has_the_front_of_all_programs_written_by_hand(name: str) -> None:
    assert differs(name) < 1e-9


@pytest.mark.slow
def test_it_has_another_front_where_one_body_is_frozen() -> None:
    assert differs("two loops", frozen=True) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", list(CASES))
def test_every_labelling_is_one_of_its_own_program_at_the_same_costs(name: str) -> None:
    drawn = list(agreeing(together(name), 200))
    assert len({ways for ways, *_ in drawn}) == 4
    assert sum(legal for *_, legal in drawn) > 5


def test_bodies_that_differ_in_shapes_alone_have_forms_of_their_own() -> None:
    """Of both loops, one of which is wide, one device has the last product made first."""
    wide, narrow = (stack(512, n, 512, 8) for n in (1024, 256))
    h = jax.ShapeDtypeStruct((512, 8), jnp.float32)
    graph = trace(two_loops((0, 0)), h, wide, h, narrow).graph
    found = forms(graph, BOOKS, TARGET)[1].graph
    bodies = [op.regions[0] for op in found.operations if op.regions]
    for body, n in zip(bodies, (1024, 256), strict=True):
        assert [body.values[v].shape for v in body.inputs[1:]] == [(512, n), (n, 512), (512, 8)]
        first = next(op for op in body.operations if op.kernel == "dot_general")
        assert body.values[first.outputs[0]].shape == (n, 8)


@pytest.mark.parametrize("unproven", [(), (6,), (10,), (6, 10)])
def test_ways_of_a_body_that_are_left_out_are_told_whatever_else_is_searched(
    unproven: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each body has one other way; some are said to have no proof."""
    shapes = [x for n in (6, 10) for x in (H, stack(1024, n, 1024, 512))]
    graph = trace(two_loops((0, 0)), *shapes).graph
    whole = forms_module._is_proven

    def is_proven(given: BlockGraph, form: Form, rules: Sequence[Rule]) -> bool:
        shapes = {v.shape for v in given.values}
        return not shapes & {(1024, n) for n in unproven} and whole(given, form, rules)

    monkeypatch.setattr(forms_module, "_is_proven", is_proven)
    as_given, *others = forms(graph, BOOKS, TARGET, room=10_000)
    assert as_given.patches is None  # so few that each is searched on its own
    assert as_given.left.forms == len(unproven)
    assert len(others) == 2 ** (2 - len(unproven)) - 1


# The whole way


def as_written(*given: Any) -> list[Array]:
    """Loops one after another, of one stack of factors each."""
    return [loop(WAYS[0], h, w) for h, w in zip(given[::2], given[1::2], strict=True)]


def by_pins(ends: Sequence[str], size: int, settings: Settings) -> te.Front:
    """Loops whose factors are cut by rows, or by columns."""
    h, w = jax.ShapeDtypeStruct((size, size), jnp.float32), stack(*[size] * 4)
    said: dict[str, Any] = {}
    for k, end in enumerate(ends):
        said |= {f"[{2 * k + 1}][{n}]": WHOLE for n in range(3)}
        said[f"[{2 * k + 1}][{0 if end == 'rows' else 2}]"] = ROWS if end == "rows" else COLUMNS
    mesh = [MeshShape(("x",), (8,))]
    program = te.trace(as_written, *[h, w] * len(ends))
    return te.optimize(program, "h100:8", mesh_shapes=mesh, pins=said, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize("ends", [("rows", "columns"), ("rows", "columns", "columns", "rows")])
def test_each_loop_takes_the_way_that_its_factors_suit(
    ends: tuple[str, ...], tmp_path: Path
) -> None:
    """On one device both ways take the same; with all as written the fastest takes longer. Two
    loops make four programs, each searched on its own, and four sixteen, searched together."""
    settings = Settings(workers=1, work=2.0, merge=False)
    front = by_pins(ends, 4096, settings)
    frozen = by_pins(ends, 4096, replace(settings, forms=0))
    plan = front[0]
    assert plan.gap < 1e-3 and plan.costs.seconds < 0.8 * frozen[0].costs.seconds
    assert not plan.collectives
    assert [s.region for s in plan.steps] == [(k, 0) for k, e in enumerate(ends) if e == "columns"]
    te.save(plan, tmp_path / "plan.json")
    again = te.load(tmp_path / "plan.json")
    assert isinstance(again, te.Plan)
    assert again.costs == plan.costs and again.steps == plan.steps


@pytest.mark.slow
def test_its_plans_compute_what_the_program_does_and_move_what_they_say() -> None:
    front = by_pins(("rows", "columns", "columns"), 256, Settings(workers=1, work=1.0))
    assert any(p.steps for p in front)
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Array:
        return jnp.asarray(rng.normal(size=shape) / 16, jnp.float32)

    given: list[Any] = []
    for _ in range(3):
        given += [drawn(256, 256), [drawn(2, 256, 256) for _ in range(3)]]
    wanted = jax.jit(as_written)(*given)
    for plan in (front[0], front[-1]):
        run = te.compile(plan)
        for found, right in zip(run(*given), wanted, strict=True):
            np.testing.assert_allclose(found, right, rtol=1e-4, atol=1e-4)
        assert compare(plan, run.compile()).equal
