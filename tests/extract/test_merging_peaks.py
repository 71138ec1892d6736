"""What plans hold whose collectives are merged."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.buffers import may_have_places
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.merged.members import WHICH, Candidates
from tapestry_egg.extract.merged.peaks import Peaks
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.schedule.of_plans import plan_schedule
from tapestry_egg.schedule.schedules import orders_of
from tests.extract.test_merging import (
    H100,
    QUICK,
    candidates_of,
    counted,
    feedback,
    front_of,
    front_over,
    in_runs,
    one_by_one,
)

pytestmark = pytest.mark.slow


def in_loops(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """Sums along columns before a loop, after it, and of what it leaves."""

    def once(carry: jax.Array, _: None) -> tuple[jax.Array, None]:
        return jnp.tanh(jnp.sort(carry, 1)), None

    one, other = jnp.sort(x, 1), jnp.sort(y, 1)
    early = jnp.sort(lax.sort(one, 0), 1)
    left, _ = lax.scan(once, jnp.sin(early), None, length=3)
    return early, lax.sort(other, 0) + left, lax.sort(jnp.sort(other, 1), 0)


def read_by_three(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    """A value that three kernels read, each with a sum made just before; a fourth comes last."""
    shared, found = jnp.sort(x, 1), []
    for k in range(4):
        y = jnp.sort(jnp.tanh(y), 1)
        found.append(jnp.sort((shared if k < 3 else y) + jnp.sum(y, 0), 1))
    return tuple(found)


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    """Plans whose new states are in the place of the old, and plans whose results have places."""
    apart = replace(QUICK, merge=False)
    found = [p for rows in (64, 256, 512) for p in front_of(rows, apart).plans]
    found += front_of(2048, apart, weights=("x", None)).plans
    for function in (one_by_one, in_loops):
        found += front_over(function, ("x", None), *[(512, 512)] * 2).plans
    return found


def cuts(found: Candidates) -> Iterator[tuple[Merged, ...]]:
    yield ()
    for waits in (False, True):
        for which in WHICH:
            yield found.groups(which, waits)[0]
    for own in found.members.values():  # and some that no run is
        yield from in_runs([m.key for m in own[:4]])


def some_groups(found: Candidates, count: int) -> Iterator[tuple[Merged, ...]]:
    """Groups of copies drawn at random."""
    draw = random.Random(count)
    for _ in range(count):
        groups: list[Merged] = []
        for own in found.members.values():
            keys = draw.sample([m.key for m in own], draw.randint(0, len(own)))
            half = draw.randint(0, len(keys))
            groups += [tuple(part) for part in (keys[:half], keys[half:]) if len(part) > 1]
        yield tuple(groups)


def test_what_is_told_is_what_merged_plans_hold(plans: list[Plan]) -> None:
    """At every tick, in whatever order their units run."""
    moved = placed = looped = 0
    for plan in plans:
        found = candidates_of(plan)
        peaks = Peaks(found)
        for groups in dict.fromkeys(cuts(found)):
            try:
                one, cost = counted(plan, groups)
            except (PlanError, ExtractError):
                with pytest.raises(PlanError):
                    peaks.profile(groups)
                continue
            np.testing.assert_allclose(peaks.profile(groups), cost.profile, rtol=1e-9, atol=1.0)
            moved += one.graph is not plan.graph
            placed += may_have_places(found.walk.schedule, found.walk.target) and bool(groups)
            looped += bool(found.walk.program.spans) and bool(groups)
    assert moved > 20 and placed > 3 and looped


def test_what_waits_when_too_much_is_held_is_told_of_each_group(plans: list[Plan]) -> None:
    """Of every time above a limit the most that is there, and the groups whose arrays make it."""
    told = Counter[bool]()
    for plan in plans:
        found = candidates_of(plan)
        peaks = Peaks(found)
        held = float(peaks.profile(()).max())
        for which in WHICH:
            groups, _ = found.groups(which)
            try:
                peak, times = peaks.waiting(groups, held)
            except PlanError:
                continue
            profile = peaks.profile(groups)
            above = np.flatnonzero(np.diff(np.append([0], profile > held)) > 0)
            assert len(times) == len(above) and peak == profile.max()
            assert not times or held + max(over for over, _ in times) == pytest.approx(peak)
            for over, waiting in times:
                assert len(waiting) == len(groups) and min(waiting) >= 0.0
                # Elsewhere what the members are made into waits, as an old state for its update.
                told[sum(waiting) >= over * (1 - 1e-9)] += 1
    assert told[True] > 5 * told[False]


def test_the_ground_of_other_plans_stays_as_it_is(plans: list[Plan]) -> None:
    """Lives in another order are told apart from those of the schedule that plans share."""
    plan = plans[-1]
    found = candidates_of(plan)
    before = list(found.walk.profile())
    Peaks(found).profile(found.groups("next")[0])
    fresh = Ground(plan_schedule(plan.body, feedback(plan)), H100)
    values = range(len(fresh.program.types))
    made = [v for v in values if v in fresh.lives.maker]
    assert [found.walk.ground.lives.death(v) for v in made] == [fresh.lives.death(v) for v in made]
    assert list(found.walk.profile()) == before


def test_arrays_that_stand_alike_in_several_orders_are_worked_out_once(
    plans: list[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is known of other orders changes nothing of what is told, and spares most of it."""
    work, worked = Peaks._held, Counter[bool]()
    several = front_over(read_by_three, ("x", None), *[(512, 512)] * 2).plans
    for plan in (*plans, *several):
        found = candidates_of(plan)
        shared, alone = Peaks(found), Peaks(found)
        # Nothing depends on several units of a region, which run one after another in any order.
        first = orders_of(found.walk.schedule).first
        assert all(first[u] == u for u in {*shared._before.tolist(), *shared._after.tolist()})

        def held(peaks: Peaks, *of: Any, shared: Peaks = shared) -> Any:
            worked[peaks is shared] += 1
            return work(peaks, *of)

        with monkeypatch.context() as patch:
            patch.setattr(Peaks, "_held", held)
            for groups in (*cuts(found), *some_groups(found, 30), *cuts(found)):
                alone._variants.clear()
                try:
                    told = alone.profile(groups)
                except PlanError:
                    continue
                assert np.array_equal(shared.profile(groups), told)
    assert 0 < 3 * worked[True] < worked[False]
