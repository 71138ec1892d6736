"""Places of a program that can be computed in several ways: one problem of all programs that they
make, against every plan of every one of these.

The programs are written down by hand, one function for each combination of ways; every way to run
every operation of each, with inputs and results where the test wants them, is listed and costed by
the certificate (`brute.py`). A solver finds the least seconds of the one problem within every peak
that the best of all those plans have. Where one place is frozen, the two part.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.pins.boundary import Fixed
from tapestry_egg.extract.pins.pins import Pin
from tapestry_egg.extract.places.axis import Names
from tapestry_egg.extract.places.patched import patched
from tapestry_egg.extract.places.programs import Patched
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.pipeline import Settings, patching
from tapestry_egg.pipeline.patching import Posed, Programs
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import _is_proven
from tapestry_egg.rewrite.patches import Patches, find_places
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, load_books
from tapestry_egg.schedule.one_device import least_seconds
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace
from tests.extract import brute
from tests.extract.labellings import agreeing
from tests.reference.exact import exact

BOOKS = load_books(("algebra", "fusion", "sharding", "collectives"))
RULES = [r for b in BOOKS for r in b.rules if r.ruleset in PROGRAM_RULESETS]
# Places that results hold before they are made are counted from below (`test_reserved.py`).
MESH, TARGET = MeshShape(("x",), (4,)), replace(load_target("h100:4"), reserves=False)

Way = Callable[..., jax.Array]
#: A place: the ways to compute it, as written first, and the shapes that it reads, by four numbers.
KINDS: tuple[tuple[tuple[Way, ...], Callable[[int, int, int, int], list[tuple[int, ...]]]], ...] = (
    (
        (lambda a, b, c: (a @ b) @ c, lambda a, b, c: a @ (b @ c)),
        lambda m, k, n, p: [(m, k), (k, n), (n, p)],
    ),
    (
        (lambda a, b, c: a @ (b @ c), lambda a, b, c: (a @ b) @ c),
        lambda m, k, n, p: [(m, k), (k, n), (n, p)],
    ),
    (
        (lambda a, b, c: jnp.tanh((a @ b) @ c), lambda a, b, c: jnp.tanh(a @ (b @ c))),
        lambda m, k, n, p: [(m, k), (k, n), (n, p)],
    ),
)
#: Dims: some that four devices cannot share.
DIMS = (6, 6, 512, 1024, 4096)


class Drawn:
    """A program of two places, and the layouts of its ends: places of arguments of their own, two
    that read the same first one, or the second of which reads what the first makes."""

    def __init__(self, seed: int, how: str = "apart") -> None:
        rng = random.Random(seed)
        self.how = how
        self.kinds = [rng.choice(KINDS) for _ in range(2)]
        if how == "series":  # else the four products are one chain, which has five ways
            self.kinds[0] = KINDS[-1]
        first, second = ([rng.choice(DIMS) for _ in range(4)] for _ in range(2))
        if how == "shared":
            second[:2] = first[:2]
        if how == "series":
            second[:2] = first[0], first[3]
        self.shapes = [k[1](*dims) for k, dims in zip(self.kinds, (first, second), strict=True)]
        self.ends = [rng.randrange(3) for _ in range(12)]

    @property
    def types(self) -> list[jax.ShapeDtypeStruct]:
        shapes = [*self.shapes[0], *self.shapes[1][self.how != "apart" :]]
        return [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]

    def program(self, ways: Sequence[int]) -> Callable[..., list[jax.Array]]:
        """The program whose place p is computed by its way `ways[p]`, by hand."""

        def run(a: jax.Array, b: jax.Array, c: jax.Array, *others: jax.Array) -> list[jax.Array]:
            (one, _), (other, _) = self.kinds
            first = one[ways[0]](a, b, c)
            if self.how == "series":
                return [other[ways[1]](first, *others)]
            rest = (a, *others) if self.how == "shared" else others
            return [first, other[ways[1]](*rest)]

        return run

    def schedule(self, ways: Sequence[int]) -> Schedule:
        return scheduled(prepare(trace(self.program(ways), *self.types).graph), {})

    def cut(self, number: int, shape: Sequence[int]) -> int:
        """Which dim of an argument or result is cut: one that can be, or none (-1)."""
        which = self.ends[number]
        return which if which < len(shape) and shape[which] % 4 == 0 else -1

    def pins(self) -> tuple[Pin, ...]:
        graph = trace(self.program([0] * len(self.kinds)), *self.types).graph
        found = []
        for output, ends in ((False, graph.inputs), (True, graph.outputs)):
            for k, v in enumerate(ends):
                shape = graph.values[v].shape
                cut = self.cut(k + (len(graph.inputs) if output else 0), shape)
                dims = tuple(("x",) if d == cut else () for d in range(len(shape)))
                found.append(Pin(k, "", "the test", shape, dims, output))
        return tuple(found)


def every_plan(drawn: Drawn, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, float]]:
    """(peak, seconds) of the front of every plan of every combination of ways."""
    whole = brute.choices

    def choices(instance: Any, mesh: MeshShape) -> Any:
        if not instance.port:
            return whole(instance, mesh)
        shape = (*instance.signature.input_types, *instance.signature.output_types)[0].shape
        cut = drawn.cut(places[id(instance)], shape)
        layout = Layout(tuple((0,) if d == cut else () for d in range(len(shape))))
        return [c for c in whole(instance, mesh) if layout in (*c.needs, *c.gives)]

    monkeypatch.setattr(brute, "choices", choices)
    every = []
    for ways in product(*(range(len(k[0])) for k in drawn.kinds)):
        plan = drawn.schedule(ways)
        ports = [i for i in plan.program.instances if i.port == "input"]
        ports += [i for i in plan.program.instances if i.port == "output"]
        places = {id(i): k for k, i in enumerate(ports)}
        every += [(c.peak_bytes, c.seconds) for c in brute.every_cost(plan, MESH, TARGET)]
    monkeypatch.undo()
    front: list[tuple[int, float]] = []
    for peak, seconds in sorted(every):
        if not front or seconds < front[-1][1] * (1 - 1e-9):
            front = [f for f in front if f[0] < peak] + [(peak, seconds)]
    return front


def network(drawn: Drawn, frozen: int = -1, target: Target = TARGET) -> tuple[Patched, Patches]:
    """The one problem of all programs; without the ways of one place where that is `frozen`."""
    graph = trace(drawn.program([0] * len(drawn.kinds)), *drawn.types).graph
    explored = explore(graph, RULES)
    least = [least_seconds(a.signature, TARGET) for a in explored.catalogue]

    def proven(built: Any) -> bool:
        return _is_proven(graph, Form(built.graph, built.rules), RULES)

    own = find_places(graph, explored.terms, explored.catalogue, least, proven, 1000)
    found = Patches(graph, (((), own),))
    counts = [1 if p == frozen else len(place) for p, place in enumerate(found.places)]
    question: Any = SimpleNamespace(
        machine=target,
        pairs={},
        books=BOOKS,
        settings=Settings(),
        words=SimpleNamespace(fixed=Fixed(drawn.pins())),
    )
    programs = Programs(question, Form(graph), found, scheduled(prepare(graph), {}))
    made = patched(Posed(programs, MESH), counts, Names(found.values, programs.stands))
    assert made is not None
    return made, found


def differs(seed: int, monkeypatch: pytest.MonkeyPatch, how: str, frozen: int = -1) -> float:
    """By which share the one problem's seconds differ most from the front of all plans."""
    drawn = Drawn(seed, how)
    front = every_plan(drawn, monkeypatch)
    made, _ = network(drawn, frozen)
    assert not made.left, "a place stays as given"
    found = np.array([exact(made.problem, peak * (1 + 1e-9)) for peak, _ in front])
    return float(np.abs(found / np.array([s for _, s in front]) - 1.0).max())


#: How often places have ways of their own, share an operand, or read what the other makes.
QUICK = (("apart", 8), ("shared", 13), ("series", 13), ("series", 4))
MORE = (("apart", 0), ("apart", 7), ("apart", 11), ("shared", 3), ("shared", 8), ("series", 8))


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seed"), QUICK)
def test_one_problem_has_the_front_of_all_plans_of_all_programs(
    how: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differs(seed, monkeypatch, how) < 1e-9


@pytest.mark.long
@pytest.mark.parametrize(("how", "seed"), MORE)
def test_larger_ones_have_it_too(how: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert differs(seed, monkeypatch, how) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(("how", "seed", "frozen"), [("apart", 8, 1), ("shared", 13, 1)])
def test_it_has_another_front_where_one_place_is_frozen(
    how: str, seed: int, frozen: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert differs(seed, monkeypatch, how, frozen) > 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("how", ["apart", "shared", "series"])
def test_every_labelling_is_one_of_its_own_program_at_the_same_costs(
    how: str, overlaps: bool
) -> None:
    target = replace(TARGET, overlaps=overlaps)
    assert (target.slowdown is not None) == overlaps
    made, found = network(Drawn(3, how), target=target)
    drawn = list(agreeing(made, 300))
    for ways, posed, _ in drawn:
        built = found.built(ways)
        assert built is not None
        same = [op.kernel for op in posed.choices.schedule.program.bodies[0].graph.operations]
        assert sorted(same) == sorted(op.kernel for op in prepare(built.graph).operations)
    assert len({ways for ways, *_ in drawn}) == 4
    assert sum(legal for *_, legal in drawn) > 50


# The whole way


@pytest.mark.slow
def test_what_its_own_program_does_not_bear_out_is_left_out_and_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the problem of one program costs more than all together say, its labellings go."""
    ends, settings = (
        ["rows", "columns", "rows", "columns", "columns"],
        Settings(workers=1, work=1.0),
    )
    found = by_ends(ends, settings)
    assert any(p.steps for p in found)
    own = patching._own

    def wrong(posed: Any, c: Any, rows: Any) -> Any:
        steps = posed.choices.schedule.program.steps
        return own(posed, replace(c, seconds=c.seconds * (1.1 if steps else 1.0)), rows)

    monkeypatch.setattr(patching, "_own", wrong)
    front = by_ends(ends, settings)
    assert len(front) and not any(p.steps for p in front)
    assert any("left out, not borne out by the own program" in note for note in front.notes)
    assert not any("not borne out" in note for note in found.notes)


def test_units_that_no_places_make_are_refused() -> None:
    """Their new values would pass for values of their own."""
    made, found = network(Drawn(8, "apart"))
    posed = made.pose((0,) * len(found))
    assert posed is not None
    with pytest.raises(ExtractError, match="no places make"):
        made.names.stands(replace(posed.choices.schedule))
    made.names.stands(posed.choices.schedule)


def by_ends(ends: Sequence[str], settings: Settings, size: int = 2048) -> te.Front:
    """The front of places (a·b)·c whose a is cut by rows, or whose c is cut by columns."""
    square = jax.ShapeDtypeStruct((size, size), jnp.float32)
    pins: dict[str, Any] = {}
    for k, end in enumerate(ends):
        pins[f"[{3 * k}]"] = ("x", None) if end == "rows" else (None, None)
        pins[f"[{3 * k + 1}]"] = (None, None)
        pins[f"[{3 * k + 2}]"] = (None, "x") if end == "columns" else (None, None)
    mesh = [MeshShape(("x",), (8,))]
    traced = te.trace(chains, *[square] * (3 * len(ends)))
    return te.optimize(traced, "h100:8", mesh_shapes=mesh, pins=pins, settings=settings)


def chains(*x: jax.Array) -> list[jax.Array]:
    return [(x[3 * k] @ x[3 * k + 1]) @ x[3 * k + 2] for k in range(len(x) // 3)]


@pytest.mark.slow
def test_each_place_takes_the_way_that_its_operands_suit() -> None:
    settings = Settings(workers=1, work=4.0, merge=False)
    rows, columns = (by_ends([end], settings)[0].costs.seconds for end in ("rows", "columns"))
    front = by_ends(["rows", "columns", "rows", "columns", "columns"], settings)
    # Places apart take as long together as each alone: of 32 programs that one is the fastest.
    assert front[0].costs.seconds == pytest.approx(2 * rows + 3 * columns, rel=1e-9)
    assert front[0].gap < 1e-3
    first = [op for op in front[0].graph.operations if set(op.inputs) <= set(front[0].graph.inputs)]
    read = sorted(front[0].graph.inputs.index(op.inputs[0]) for op in first)
    assert read == [0, 4, 6, 10, 13], "a·b where a is cut, b·c where c is"
    assert len(front[0].steps) == 3


@pytest.mark.slow
def test_a_plan_of_several_ways_computes_what_the_program_does_and_is_read_again(
    tmp_path: Path,
) -> None:
    front = by_ends(["rows", "columns", "rows", "columns"], Settings(workers=1, work=1.0), size=256)
    assert len(front[0].steps) == 2
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=(256, 256)), jnp.float32) for _ in range(12)]
    exactly = chains(*[np.asarray(x, np.float64) for x in given])  # type: ignore[arg-type]
    for found, wanted in zip(te.compile(front[0])(*given), exactly, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-2)
    te.save(front[0], tmp_path / "plan.json")
    again = te.load(tmp_path / "plan.json")
    assert isinstance(again, te.Plan)
    assert again.costs == front[0].costs and again.steps == front[0].steps
