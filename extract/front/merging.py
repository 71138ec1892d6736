"""Merging: plans whose collectives are fewer, made of the labellings that a search has found.

Collectives of one kind over the same devices that need not wait for each other can be one: all pay
their bytes, and one its latency. What they are made of then waits for the last of it, and what
reads them comes later, so a plan gets faster and may hold more. A search counts a labelling as if
it were merged as far as dependences allow (`extract/problem/latencies.py`); here it is merged, and
counted exactly. Which copies may be one within a limit on memory is told beforehand
(`extract/merged/runs.py`), and those plans are made that a front would show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.engine.archive import Candidate, shown
from tapestry_egg.extract.merged.members import Candidates
from tapestry_egg.extract.merged.runs import Cut, Runs
from tapestry_egg.machine.energy import idle_joules
from tapestry_egg.machine.objectives import PEAK_BYTES, Objective
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.schedule.of_plans import with_merged

from .front import Front, in_order, value, within
from .merge import NetworkResult, bounded_plan, epsilon

# What merging must save of a plan's seconds: a front shows no smaller steps (`archive.shown`).
LEAST = 0.01

# Operations that all labellings have together that are looked at, and all plans that are made; the
# first of either is in any case.
_MOST_SEEN, _MOST_MADE = 60_000, 40_000

# So often plans are made that a front would show.
_ROUNDS = 3

# Limits on memory within which the copies of a plan are merged, besides none: from its peak on in
# steps of such a factor, as many as have so many operations together.
_STEP, _MOST_LIMITS, _FEWEST, _MOST = 1.07, 2_000, 1, 16

# Rounded, so much is within a limit as well.
_JUST = 1.0 + 1e-9


def merge_collectives(
    front: Front,
    results: Sequence[NetworkResult],
    objectives: Sequence[str | Objective],
    limits: Mapping[str, float],
    machine: Target,
    feedback: Mapping[int, int],
) -> tuple[Front, tuple[str, ...]]:
    """The front with those plans as well that merge collectives, where that saves a share worth a
    point; and what is to be said of it.

    The bounds of a search hold however collectives are merged.
    """
    if machine.combiner is None:
        return front, ()
    merging = _Merging(front, results, objectives, machine, feedback)
    made, left = merging.made(limits)
    fitting = [p for p in (*front.plans, *made) if within(p, limits)]
    costs = np.array([[value(p, k) for k in objectives] for p in fitting], dtype=float)
    plans = in_order(fitting[i] for i in shown(costs))
    points = [(p.costs.seconds, p.costs.peak_bytes) for p in plans]
    proven = min(front.epsilon, epsilon([r.archive for r in results], points))
    notes = () if not left else (f"of {left} more plans collectives were not merged",)
    return replace(front, plans=plans, epsilon=proven), notes


def merged_plans(plan: Plan, ground: Ground, feedback: Mapping[int, int]) -> list[Plan]:
    """The same plan with collectives merged, in every way that is tried, the fastest first; those
    that are faster by a share worth telling. `ground` is that of the plan's schedule.

    Raises ExtractError where the plan is not legal.
    """
    candidates = _candidates(plan, ground)
    if candidates is None:
        return []
    found = [_made(plan, cut.groups, ground, feedback) for cut in _cuts(plan, candidates)]
    worth = (1.0 - LEAST) * plan.costs.seconds
    kept = [one for one in found if one is not None and one.costs.seconds <= worth]
    return sorted(kept, key=lambda one: (one.costs.seconds, one.costs.peak_bytes))


@dataclass(frozen=True, eq=False)
class _Way:
    """A plan, what it has in common with others, and which of its copies are merged."""

    plan: Plan
    ground: Ground
    cut: Cut


@dataclass(eq=False)
class _Merging:
    """The plans that merging makes of what searches have found."""

    front: Front
    results: Sequence[NetworkResult]
    objectives: Sequence[str | Objective]
    machine: Target
    feedback: Mapping[int, int]

    def made(self, limits: Mapping[str, float]) -> tuple[list[Plan], int]:
        """Merged plans, and how many labellings were not looked at that may gain by it."""
        most = limits.get(PEAK_BYTES.name, np.inf)
        known = [_costs(p) for p in self.front.plans]
        ways, left = self._ways(known, most)
        told = np.array([_told(way.plan, way.cut, self.machine) for way in ways]).reshape(-1, 3)
        found: list[Plan] = []
        tried: set[int] = set()
        spent = 0
        for _ in range(_ROUNDS):  # what holds more than was told leaves others behind
            every = np.concatenate([np.array(known).reshape(-1, 3), told])
            every[[len(known) + k for k in tried]] = np.inf
            some = [k - len(known) for k in shown(every) if k >= len(known)]
            for k in some:
                plan, ground = ways[k].plan, ways[k].ground
                spent += len(plan.graph.operations)
                if found and spent > _MOST_MADE:
                    break
                tried.add(k)
                one = _made(plan, ways[k].cut.groups, ground, self.feedback)
                if one is not None and one.costs.seconds <= (1.0 - LEAST) * plan.costs.seconds:
                    found.append(one)
                    known.append(_costs(one))
            if not some or (found and spent > _MOST_MADE):
                break
        return found, left

    def _ways(
        self, known: Sequence[tuple[float, float, float]], most: float
    ) -> tuple[list[_Way], int]:
        """Labellings with ways to merge their copies, as plans; and how many were not looked at."""
        found: list[_Way] = []
        grounds: dict[int, Ground] = {}
        seen = left = 0
        for result, candidate in self._likely(most):
            if not _worth(known, candidate.costs):
                continue
            choices = result.assembled.choices
            seen += len(choices.schedule.program.instances)
            if found and seen > _MOST_SEEN:
                left += 1
                continue
            plan = bounded_plan(self.results, result.assembled, candidate, self.objectives, grounds)
            ground = Ground(choices.schedule, self.machine)
            ground = grounds.setdefault(id(choices.schedule), ground)
            candidates = _candidates(plan, ground)
            if candidates is not None:
                cuts = _cuts(plan, candidates)
                found += [_Way(plan, ground, cut) for cut in cuts if cut.peak <= most]
        return found, left

    def _likely(self, most: float) -> list[tuple[NetworkResult, Candidate]]:
        """The labellings that a front would show if all were merged as far as dependences allow,
        the fastest of each number of devices first; then all others."""
        chosen: list[tuple[NetworkResult, Candidate]] = []
        others: list[tuple[NetworkResult, Candidate]] = []
        for devices in dict.fromkeys(r.assembled.choices.mesh.devices for r in self.results):
            every = [
                (r, c)
                for r in self.results
                for c in r.archive.candidates
                if c.peak <= most and r.assembled.choices.mesh.devices == devices > 1
            ]
            first = shown(np.array([c.costs for _, c in every])) if every else []
            chosen += [every[i] for i in first]
            others += [x for i, x in enumerate(every) if i not in set(first)]
        return [*chosen, *sorted(others, key=lambda x: x[1].costs)]


def _worth(known: Sequence[tuple[float, float, float]], costs: tuple[float, float, float]) -> bool:
    """Whether something is faster than all that is known within its peak, by a share worth
    telling."""
    seconds, peak, _ = costs
    within = [s for s, p, _ in known if p <= peak * _JUST]
    return seconds < (1.0 - LEAST) * min(within, default=np.inf)


def _cuts(plan: Plan, candidates: Candidates) -> list[Cut]:
    """The ways to merge that save most within limits on memory, and by levels, each with about the
    peak that it has; those first that save most."""
    runs = Runs(candidates)
    found: dict[tuple[Merged, ...], Cut] = {}
    count = min(max(_MOST_LIMITS // max(len(plan.graph.operations), 1), _FEWEST), _MOST)
    own = plan.costs.peak_bytes
    for limit in (*(own * _STEP**k for k in range(count)), np.inf):
        for waits in (False, True):
            cut = runs.within(limit * _JUST, waits)
            found.setdefault(cut.groups, cut)
    for cut in runs.by_levels():
        found.setdefault(cut.groups, cut)
    worth = [cut for cut in found.values() if cut.saved >= LEAST * plan.costs.seconds]
    return sorted(worth, key=lambda cut: (-cut.saved, cut.peak))


def _told(plan: Plan, cut: Cut, target: Target) -> tuple[float, float, float]:
    """What a plan so merged would have: seconds, peak, joules."""
    idle = idle_joules(cut.saved, plan.mesh.devices, target)
    return plan.costs.seconds - cut.saved, cut.peak, plan.costs.joules - idle


def _costs(plan: Plan) -> tuple[float, float, float]:
    return plan.costs.seconds, plan.costs.peak_bytes, plan.costs.joules


def _candidates(plan: Plan, ground: Ground) -> Candidates | None:
    """What may be merged in a plan; None where that saves no share worth telling."""
    if ground.target.combiner is None or plan.mesh.devices == 1 or plan.body.merged:
        return None
    if not plan.costs.seconds:
        return None
    walk = Walk(plan, ground)
    walk.find_moves()
    found = Candidates(walk)
    return found if found.most_saved() >= LEAST * plan.costs.seconds else None


def _made(
    plan: Plan, groups: tuple[Merged, ...], ground: Ground, feedback: Mapping[int, int]
) -> Plan | None:
    """The plan with such groups merged; None where they cannot be."""
    try:
        body, schedule = with_merged(plan.body, feedback, groups)
        other = replace(plan, body=body)
        own = Ground(schedule, ground.target)
        own.legal |= ground.legal  # of the same operations, which the other ground keeps alive
        costs = Walk(other, own).certificate().costs
    except (PlanError, ExtractError):
        return None
    if ground.target.slowdown is None:  # the same sum, but for the order in which it is taken
        costs = replace(costs, seconds=costs.serial_seconds)
    bound = min(plan.bound, costs.seconds)
    return replace(other, costs=costs, bound=bound, collectives=planned_collectives(other))
