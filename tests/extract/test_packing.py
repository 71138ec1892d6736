"""About how fast labellings are once they are merged, against what merging makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.packing import packed
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.merged.members import Candidates
from tapestry_egg.extract.merged.runs import Runs
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.mergeable import Mergeable, copies_of
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.schedule.schedules import Schedule
from tests.extract.test_mergeable import (
    MESH,
    TARGET,
    after_each_other,
    choices_of,
    gathered_twice,
    schedule_of,
    two_sums,
)

Posed = tuple[Schedule, PlanProblem, Mergeable, list[Candidate]]


def posed(program: Callable[..., Any]) -> Posed:
    """The problem of a program, and some of its labellings."""
    plan = schedule_of(program)
    assembled = assemble(choices_of(plan))
    rng, found = np.random.default_rng(0), list[Candidate]()
    for _ in range(100):
        rows = np.array([rng.integers(len(v)) for v in assembled.problem.variables])
        seconds, joules, profile = assembled.problem.evaluate(rows)
        found.append(Candidate(rows, seconds, float(profile.max()), joules))
    return plan, assembled, Mergeable(Columns(assembled.choices)), found


@pytest.mark.parametrize("program", [two_sums, after_each_other, gathered_twice])
def test_with_all_memory_it_is_what_runs_make(program: Callable[..., Any]) -> None:
    plan, assembled, mergeable, every = posed(program)
    ground, saved = Ground(plan, TARGET), 0
    for c in every:
        walk = Walk(make_plan(assembled, c, "", 0.0), ground)
        walk.find_moves()
        cut = Runs(Candidates(walk)).within(np.inf)
        (told,) = packed(assembled, c, mergeable, [np.inf])
        # A kept copy is there for all that read its value, and may wait where no read of it does.
        free = program is gathered_twice and told < c.seconds - cut.saved
        assert free or told == pytest.approx(c.seconds - cut.saved, rel=1e-9)
        saved += cut.saved > 0.0 and not free
    assert saved


def test_gathers_take_the_memory_of_what_leaves_them() -> None:
    """Where one more copy has room they stay apart; below its own peak a labelling is none."""
    _, assembled, mergeable, every = posed(gathered_twice)
    slower = 0
    for c in every:
        copies = copies_of(assembled, c.rows, mergeable)
        if {name for name, *_ in copies} != {"all_gather"}:
            continue
        whole = MESH.devices * max(x.bytes for own in copies.values() for x in own)
        half = float(np.median(assembled.problem.evaluate(c.rows)[2]))
        limit = max(c.peak, half + whole)
        below, one, free = packed(assembled, c, mergeable, [0.99 * c.peak, limit, np.inf])
        assert below == np.inf and free <= one <= c.seconds * (1 + 1e-9)
        if limit > c.peak and free < c.seconds:
            assert one == pytest.approx(c.seconds, rel=1e-9)
            slower += 1
    assert slower
