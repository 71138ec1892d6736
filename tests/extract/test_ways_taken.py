"""Ways of places take rows, tables and arrays from the form as given: what is laid together so,
held against the same from nothing, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import jax
import numpy as np
import pytest
from numpy.typing import NDArray

import tapestry_egg as te
from tapestry_egg.extract.places.axis import Names
from tapestry_egg.extract.places.patched import patched
from tapestry_egg.extract.problem.problem import Pair, Problem, Variable
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import OBJECTIVES
from tapestry_egg.pipeline.patching import Posed, Programs
from tapestry_egg.pipeline.pipeline import PASSES, run_passes
from tapestry_egg.pipeline.question import read_question
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.pipeline.state import State
from tapestry_egg.rules.language.book import DEFAULT_BOOKS
from tests.extract.random_programs import algebra
from tests.extract.test_patched import Drawn

#: No form has room of its own, so that all that rules find are ways of places.
SETTINGS = Settings(forms=3, recompute=0, workers=1)
MESHES = (MeshShape(("x",), (4,)), MeshShape(("x", "y"), (2, 2)))
UNTIL = [each.name for each in PASSES].index("join_patches")


def posed(program: te.Program, target: te.Target) -> State:
    """The passes up to where places are joined."""
    question = read_question(
        program,
        target,
        objectives=OBJECTIVES,
        books=DEFAULT_BOOKS,
        settings=SETTINGS,
        mesh_shapes=MESHES,
    )
    return run_passes(State(question), PASSES[:UNTIL])[0]


def columns(part: Variable | Pair) -> list[tuple[object, NDArray[np.float64]]]:
    """All that a variable or a pair says of its rows."""
    found: list[tuple[object, NDArray[np.float64]]] = [
        ("seconds", part.seconds),
        ("joules", part.joules),
    ]
    found += [((u.start, u.end), u.amount) for u in part.uses]
    found += [(s.event, s.amount) for s in part.spans]
    if isinstance(part, Pair):
        found += [((part.a, part.b), part.label_a), ("other", part.label_b)]
    return found


def assert_alike(one: Problem, other: Problem) -> None:
    assert [v.name for v in one.variables] == [v.name for v in other.variables]
    assert one.times == other.times and len(one.pairs) == len(other.pairs)
    for a, b in zip((*one.variables, *one.pairs), (*other.variables, *other.pairs), strict=True):
        mine, theirs = columns(a), columns(b)
        assert [k for k, _ in mine] == [k for k, _ in theirs]
        for (_, x), (_, y) in zip(mine, theirs, strict=True):
            assert np.array_equal(x, y)
    assert (one.timeline is None) == (other.timeline is None)
    if one.timeline is not None and other.timeline is not None:
        assert np.array_equal(one.timeline.issue, other.timeline.issue)
        assert np.array_equal(one.timeline.arrive, other.timeline.arrive)


def checked(program: te.Program, overlaps: bool) -> int:
    """So many networks of places were the same with and without what the form as given has."""
    state = posed(program, replace(te.load_target("h100:4"), overlaps=overlaps))
    count = 0
    for k, (form, shape) in enumerate(state.networks):
        patches, mesh = state.forms[form].patches, state.shapes[shape]
        if not patches:
            continue
        programs = Programs(state.question, state.forms[form], patches, state.schedules[form])
        taken, anew = Posed(programs, mesh, state), Posed(programs, mesh)
        own = taken((0,) * len(programs.counts))
        assert own is state.problems[k] or taken.encoding.algebra != state.encodings[k].algebra
        names = Names(programs.values, programs.stands)
        laid = [patched(own, programs.counts, names) for own in (taken, anew)]
        assert taken.known.keys() == anew.known.keys() and len(taken.known) > 1
        for ways, mine in taken.known.items():
            other = anew.known[ways]
            assert mine is not None and other is not None
            assert_alike(mine.problem, other.problem)
        assert laid[0] is not None and laid[1] is not None
        assert_alike(laid[0].problem, laid[1].problem)
        count += 1
    return count


@pytest.mark.parametrize("overlaps", [pytest.param(False, marks=pytest.mark.slow), True])
def test_ways_of_a_product_of_three_are_what_they_are_anew(overlaps: bool) -> None:
    drawn = Drawn(3, "series")
    program = te.trace(drawn.program([0, 0]), *drawn.types)
    assert checked(program, overlaps) == len(MESHES)


def of(seed: int) -> te.Program:
    fn, shapes = algebra(seed)
    return te.trace(fn, *[jax.ShapeDtypeStruct(s, np.float32) for s in shapes])


SEEDS: Sequence[int] = range(8)


@pytest.mark.slow
def test_ways_of_random_programs_are_what_they_are_anew() -> None:
    counts = [checked(of(seed), bool(seed % 2)) for seed in SEEDS]
    assert sum(counts) >= len(SEEDS)
