"""Runs of collectives that are one, within limits on memory, and copies that are made twice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import Key, own_moves
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.members import Candidates
from tapestry_egg.extract.front.runs import Runs
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.fetch import fetches
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.runtime import compare
from tapestry_egg.schedule.of_plans import plan_schedule
from tests.extract.test_merging import LAYERS, QUICK, WIDTH, counted, feedback, front_of, step

pytestmark = pytest.mark.slow

H100 = load_target("h100:8")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans of several peaks, all collectives of which are apart: of whole weights, and divided."""
    apart = replace(QUICK, merge=False)
    found = [p for rows in (64, 512) for p in front_of(rows, apart).plans]
    found += front_of(2048, apart, weights=("x", None)).plans
    assert len(found) > 6
    return found


def runs_of(plan: Plan) -> Runs:
    walk = Walk(plan, Ground(plan_schedule(plan.body, feedback(plan)), H100))
    walk.find_moves()
    return Runs(Candidates(walk))


def limits(plan: Plan) -> Iterator[float]:
    yield from (plan.costs.peak_bytes * x for x in (1.0, 1.1, 1.3, 2.0, np.inf))


def test_what_is_told_of_cuts_is_what_plans_have(plans: list[Plan]) -> None:
    cuts = 0  # that leave the order of kernels as it is
    for plan in plans:
        runs = runs_of(plan)
        alone = counted(plan, ())[1]
        for limit in limits(plan):
            cut = runs.within(limit, waits=False)
            one, cost = counted(plan, cut.groups)
            assert cost.seconds == pytest.approx(alone.seconds - cut.saved, rel=1e-9)
            assert cut.peak <= max(limit, alone.peak_bytes)
            if one.graph is plan.graph:  # else other values are alive then, too
                assert cost.peak_bytes == pytest.approx(cut.peak, rel=1e-9)
                cuts += bool(cut.groups)
    assert cuts > 5


def in_runs(members: list[Key]) -> Iterator[tuple[Merged, ...]]:
    """Every way to cut a list into runs; of these the ones of two or more."""
    for bits in range(1 << (len(members) - 1)):
        runs: list[list[Key]] = [[members[0]]]
        for k, key in enumerate(members[1:]):
            if bits >> k & 1:
                runs[-1].append(key)
            else:
                runs.append([key])
        yield tuple(tuple(run) for run in runs if len(run) > 1)


def test_of_all_cuts_of_one_kind_the_best_within_a_limit_is_found(plans: list[Plan]) -> None:
    tried = 0
    for plan in plans:
        runs = runs_of(plan)
        if len(runs.members) != 1 or len(next(iter(runs.members.values()))) > 6:
            continue
        (members,) = runs.members.values()
        every = []
        for groups in in_runs([m.key for m in members]):
            try:
                every.append(counted(plan, groups)[1])
            except (PlanError, ExtractError):
                continue
        tried += len(every) > 1
        for limit in limits(plan):
            least = min(x.seconds for x in every if x.peak_bytes <= limit * (1 + 1e-9))
            cost = counted(plan, runs.within(limit * (1 + 1e-9)).groups)[1]
            assert cost.seconds == pytest.approx(least, rel=1e-9)
    assert tried > 2


def twice(plan: Plan) -> tuple[Plan, set[Key]]:
    """The plan with all merged that may be, and which of that is made for the second time."""
    cut = runs_of(plan).within(np.inf)
    one = replace(counted(plan, cut.groups)[0], costs=counted(plan, cut.groups)[1].costs)
    return one, {key for members in one.body.merged for key in members if key[2]}


def test_copies_are_numbered_alike_by_the_certificate_and_by_what_is_lowered(
    plans: list[Plan],
) -> None:
    second = 0
    for plan in plans:
        walk = Walk(plan, Ground(plan_schedule(plan.body, feedback(plan)), H100))
        walk.find_moves()
        made = {
            f.key: k
            for k, reads in enumerate(fetches(plan.body))
            for f in reads
            if f.origin == "copy"
        }
        assert {key: move.reader[1] for key, move in own_moves(walk).items()} == made
        second += any(n for *_, n in made)
    assert second


def test_weights_that_are_gathered_twice_are_sent_together_each_time(
    plans: list[Plan], tmp_path: Path
) -> None:
    """Planned, compiled, run, and read from a file."""
    every = [x for p in plans if (x := twice(p))[1]]
    assert every
    plan, second = min(every, key=lambda x: x[0].costs.peak_bytes)
    weights = set(plan.graph.inputs)
    assert second and {v for v, *_ in second} & weights
    plan = replace(plan, collectives=planned_collectives(plan), bound=0.0)
    run = te.compile(plan)
    compared = compare(plan, run.compile())
    assert compared.equal
    rng = np.random.default_rng(0)
    ws = [rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / 16 for _ in range(LAYERS)]
    x = rng.normal(size=plan.graph.values[plan.graph.inputs[-1]].shape).astype(np.float32)
    for a, b in zip(run(ws, x), jax.jit(step)(ws, x), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
    te.save(plan, tmp_path / "plan.json")
    assert te.load(tmp_path / "plan.json").body.merged == plan.body.merged
