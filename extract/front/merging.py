"""Merging: plans whose collectives are fewer, made of plans of a front.

Collectives of one kind over the same devices that need not wait for each other can be one: all pay
their bytes, and one its latency. What they are made of then waits for the last of it, and what
reads them comes later, so a plan gets faster and may hold more. This is done with finished plans:
the search prices every collective on its own. Of every plan that may become one of the front it is
told what merging saves within one limit on memory after the other (`extract/merged/runs.py`), and
counted what it then holds; where it seems that more can be saved, more is merged
(`extract/merged/joins.py`). Those are made that the front would show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.merged.joins import Joins
from tapestry_egg.extract.merged.members import Candidates
from tapestry_egg.extract.merged.runs import Cut, Runs
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.mergeable import Mergeable
from tapestry_egg.extract.search.archive import Candidate, shown
from tapestry_egg.machine.energy import idle_joules
from tapestry_egg.machine.objectives import PEAK_BYTES, Objective
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.quantities import TIME
from tapestry_egg.schedule.of_plans import plan_schedule, with_merged

from .front import Front, in_order, value, within
from .merge import NetworkResult, bounded_plan, epsilon
from .packing import packed

# What merging must save of a plan's seconds: a front shows no smaller steps (`archive.shown`).
LEAST = 0.01

# What is proven is a plan's bound where it is less than another by no more than this share, which
# tables do not show.
_LITTLE = 1e-4

# What bytes tell is not exact: this share of `LEAST` is worth a look.
_HALF = 0.5

# Limits on memory for which merging is tried are so far apart, and those for which labellings are
# looked for.
_STEP, _FINE = 1.07, 1.02

# Of the labellings that may be the fastest within each of these limits so many are looked at, and
# all others as far as the last number of operations goes.
_EACH = 3

# Operations that all plans may have together that are looked at, and made; those of a loop once.
# One of 2000 takes about half a second for either.
_MOST_SEEN, _MOST_MADE, _MOST_MORE = 100_000, 80_000, 20_000

# The last limit, in the largest peak that is known.
_TIMES = 3.0

# So often plans are made that a front would show: those of which more is told than holds leave
# others behind.
_ROUNDS = 6

# Operations that plans may have together whose peaks are counted to merge more of their copies. One
# of 2000 takes about 7 ms.
_MOST_COUNTED = 1_600_000

# Rounded, so much is within a limit as well.
_JUST = 1.0 + 1e-9


def merge_collectives(
    front: Front,
    results: Sequence[NetworkResult],
    objectives: Sequence[str | Objective],
    limits: Mapping[str, float],
    machine: Target,
    feedback: Mapping[int, int],
    whole: bool = False,
) -> tuple[Front, tuple[str, ...]]:
    """The front with those plans as well that merge collectives, where that saves a share worth a
    point; and what is to be said of it.

    A merged plan's bound is that of the plan that it was made of, less what merging saves: nothing
    that was searched is faster, of what holds no more than that plan and of which merging saves no
    more. That is no proof (`Plan.is_proven`): of others it may save more. Or it is what networks
    are known to take however merged, where that is no less: proven where `whole` networks and all
    of them were asked.
    """
    merging = _Merging(front, results, objectives, machine, feedback)
    made, left, unmade = merging.made(limits)
    least, of_all = _least_merged(results)
    whole &= of_all
    made = [_raised(p, least, whole) for p in made]
    fitting = [p for p in (*front.plans, *made) if within(p, limits)]
    notes = _omitted(left, unmade)
    costs = np.array([[value(p, k) for k in objectives] for p in fitting], dtype=float)
    plans = in_order(fitting[i] for i in shown(costs))
    mine = [p for p in plans if p.body.merged]
    if not mine:
        return front, notes
    points = [(p.costs.seconds, p.costs.peak_bytes) for p in plans]
    proven = min(front.epsilon, epsilon([r.archive for r in results], points))
    open_ = [p for p in mine if not p.is_proven]
    note = f"in {len(mine)} of {len(plans)} plans collectives are merged, after the search"
    if open_:
        note += (
            f"; where gaps have ~ (in {len(open_)}) a bound is the plan's own before, less what "
            "merging saves in it: of plans that are not here it may save more"
        )
    if whole and least:
        fastest = plans[0].costs.seconds
        notes = (
            f"however collectives are merged, no plan takes less than {TIME.format(least)}; "
            f"the fastest here takes {fastest / least - 1.0:.2%} more",
            *notes,
        )
    return replace(front, plans=plans, epsilon=proven), (note, *notes)


def _omitted(left: int, unmade: int) -> tuple[str, ...]:
    """What is said of plans that were not looked at, and of ways to merge that were not made."""
    found: tuple[str, ...] = ()
    if left:
        plans = "1 plan" if left == 1 else f"{left} plans"
        found = (f"of {plans} that may gain least by it no collectives were merged",)
    if unmade:
        ways = "1 more way" if unmade == 1 else f"{unmade} more ways"
        end = "not tried, though the front may show what comes of it"
        found += (f"{ways} to merge collectives {'was' if unmade == 1 else 'were'} {end}",)
    return found


def _least_merged(results: Sequence[NetworkResult]) -> tuple[float, bool]:
    """Seconds that all plans take at least, however merged, of the networks of which that is known;
    and whether these are all."""
    known = [r.least_merged for r in results if r.least_merged]
    return min(known, default=0.0), len(known) == len(results)


def _raised(plan: Plan, least: float, proven: bool) -> Plan:
    """A merged plan whose bound is no less than what all plans take however merged.

    Raises ExtractError where the plan takes less and that is `proven`: it is wrong then.
    """
    if proven and least > plan.costs.seconds * (1 + 1e-6):
        raise ExtractError(
            f"a bound of {least:.9g} s for a merged plan of {plan.costs.seconds:.9g} s"
        )
    if least * (1.0 + _LITTLE) < plan.bound:
        return plan
    return replace(plan, bound=min(least, plan.costs.seconds), merged_too=proven)


@dataclass(frozen=True, eq=False)
class _Posed:
    """A plan in which merging may save something."""

    plan: Plan
    candidates: Candidates
    # Within a limit on memory, what merging may save if nothing is held for what waits.
    likely: dict[float, float] = field(default_factory=dict)

    @cached_property
    def joins(self) -> Joins:
        return Joins(Runs(self.candidates))

    def cuts(self, limits: Sequence[float]) -> list[Cut]:
        """The ways to merge that save most within limits on memory, and by levels, each with the
        peak that it has."""
        found: dict[tuple[Merged, ...], Cut] = {}
        own, runs = self.plan.costs.peak_bytes, self.joins.runs
        free = runs.within(np.inf)
        for limit in (own, *(x for x in limits if own < x < free.peak), np.inf):
            for waits in (False, True):
                cut = runs.within(limit * _JUST, waits)
                found.setdefault(cut.groups, cut)
            self.likely[limit] = cut.saved
        for cut in runs.by_levels():
            found.setdefault(cut.groups, cut)
        worth = LEAST * self.plan.costs.seconds
        counted = [self.joins.counted(cut) for cut in found.values() if cut.saved >= worth]
        return [cut for cut in counted if cut is not None]

    def within(self, cuts: Sequence[Cut]) -> Iterator[tuple[float, float]]:
        """Limits on memory, the least that some cuts have among them, and what merging may save
        there."""
        yield from self.likely.items()
        own = self.plan.costs.peak_bytes
        least = min((cut.peak for cut in cuts), default=own)
        if least < own:
            yield least, self.likely[own]

    def further(self, cuts: Sequence[Cut], limit: float) -> Cut:
        """That one of some cuts which saves most within a limit, and more merged there."""
        none = Cut((), 0.0, self.plan.costs.peak_bytes, False)
        some = [cut for cut in cuts if cut.peak <= limit * _JUST]
        start = max(some, key=lambda cut: cut.saved, default=none)
        return self.joins.further(start, limit * _JUST)

    def costs(self, cut: Cut) -> tuple[float, float, float]:
        """What a plan so merged would have: seconds, peak, joules."""
        plan, target = self.plan, self.candidates.walk.target
        idle = idle_joules(cut.saved, plan.mesh.devices, target)
        return plan.costs.seconds - cut.saved, cut.peak, plan.costs.joules - idle


@dataclass(eq=False)
class _Merging:
    """The plans that merging makes of what searches have found."""

    front: Front
    results: Sequence[NetworkResult]
    objectives: Sequence[str | Objective]
    machine: Target
    feedback: Mapping[int, int]

    def made(self, limits: Mapping[str, float]) -> tuple[list[Plan], int, int]:
        """Merged plans; how many labellings were not looked at; and how many ways to merge were
        not made although a front would show them, if they have what is told of them."""
        most = limits.get(PEAK_BYTES.name, np.inf)
        posed, left = self._posed(most)
        steps = _limits([x.plan.costs.peak_bytes for x in posed])
        every = [(x, x.cuts([*steps, most])) for x in posed]
        ways = [(x, cut) for x, cuts in every for cut in cuts if cut.peak <= most]
        more, open_ = self._further(every, most)
        ways += more
        told = np.array([x.costs(cut) for x, cut in ways]).reshape(-1, 3)
        known = [_costs(p) for p in self.front.plans]
        made: list[Plan] = []
        tried = np.zeros(len(ways), dtype=bool)
        spent = 0

        def worth() -> list[int]:
            """The ways not tried that a front would show."""
            open_ = np.flatnonzero(~tried)
            every = np.concatenate([np.array(known).reshape(-1, 3), told[open_]])
            return [int(open_[k - len(known)]) for k in shown(every) if k >= len(known)]

        for _ in range(_ROUNDS):
            some = worth()
            if not some or (made and spent > _MOST_MADE):
                break
            for k in some:
                if tried[k]:
                    continue
                x, cut = ways[k]
                spent += len(x.plan.graph.operations)
                if made and spent > _MOST_MADE:
                    break
                tried[k] = True
                one = _made(x.plan, cut.groups, x.candidates.walk.ground, self.feedback)
                if one is not None and one.costs.seconds <= (1.0 - LEAST) * x.plan.costs.seconds:
                    made.append(one)
                    known.append(_costs(one))
        beside = self.machine.slowdown is not None
        for k in np.argsort(told[:, 0], kind="stable").tolist() if beside else ():
            x, cut = ways[k]
            spent += 0 if tried[k] else len(x.plan.graph.operations)
            if not tried[k] and spent <= _MOST_MORE:  # more may be true than is told
                tried[k] = True
                one = _made(x.plan, cut.groups, x.candidates.walk.ground, self.feedback)
                if one is not None and one.costs.seconds <= (1.0 - LEAST) * x.plan.costs.seconds:
                    made.append(one)
                    known.append(_costs(one))
        return made, left, len(worth()) + open_

    def _further(
        self, every: Sequence[tuple[_Posed, Sequence[Cut]]], most: float
    ) -> tuple[list[tuple[_Posed, Cut]], int]:
        """More ways to merge, none of more than `most` bytes: where runs tell of plans that are
        faster than all that are known within a limit, if nothing is held for what waits. Where they
        tell of most at first. And on how many of these no operations were left."""
        known = [_costs(p)[:2] for p in self.front.plans]
        known += [x.costs(cut)[:2] for x, cuts in every for cut in cuts]
        open_ = [
            (limit, x.plan.costs.seconds - saved, x, cuts)
            for x, cuts in every
            for limit, saved in x.within(cuts)
            if limit <= most and limit < np.inf
        ]
        found: list[tuple[_Posed, Cut]] = []
        spent = 0
        while open_:
            points = np.array(known)
            least = {
                limit: float(points[points[:, 1] <= limit * _JUST, 0].min(initial=np.inf))
                for limit, *_ in open_
            }
            open_ = [way for way in open_ if way[1] <= (1.0 - LEAST) * least[way[0]]]
            if not open_ or spent > _MOST_COUNTED:
                break
            k = max(range(len(open_)), key=lambda n: least[open_[n][0]] / open_[n][1])
            limit, _, x, cuts = open_.pop(k)
            before = x.joins.tried
            cut = x.further(cuts, limit)
            spent += (x.joins.tried - before) * len(x.plan.graph.operations)
            found.append((x, cut))
            known.append(x.costs(cut)[:2])
        return found, len(open_)

    def _posed(self, most: float) -> tuple[list[_Posed], int]:
        """Plans in which merging may save something, of those that may be the fastest within some
        limit, none of more than `most` bytes; and how many labellings were not looked at."""
        grounds: dict[int, Ground] = {}  # by graphs
        counted: dict[int, Ground] = {}  # by schedules
        found: list[_Posed] = []
        every = [
            (r, c)
            for r in self.results
            for c in {c.costs: c for c in r.found() if c.peak <= most}.values()
            if self.machine.combiner is not None and r.assembled.choices.mesh.devices > 1
        ]
        spent = looked = 0
        likely, slight = _likely(every, most)
        for rank, k in likely:
            assembled, candidate = every[k][0].assembled, every[k][1]
            spent += len(assembled.choices.schedule.program.instances)
            if found and spent > (_MOST_SEEN if rank < _EACH else _MOST_MORE):
                break
            looked += 1
            plan = bounded_plan(self.results, assembled, candidate, self.objectives, counted)
            if id(plan.graph) not in grounds:
                schedule = plan_schedule(plan.body, self.feedback)
                grounds[id(plan.graph)] = Ground(schedule, self.machine)
            some = _candidates(plan, grounds[id(plan.graph)])
            if some is not None:
                found.append(_Posed(plan, some))
        return found, slight + len(likely) - looked


def _likely(
    every: Sequence[tuple[NetworkResult, Candidate]], most: float
) -> tuple[list[tuple[int, int]], int]:
    """Which labellings may be the fastest within some limit, and of some number of devices, once
    they are merged, as far as bytes tell: of each limit one, then of each another. Each with how
    many are before it within the limit where it comes first. None of which merging saves, as far
    as bytes tell, no share worth telling; and of how many of these it saves some."""
    of = {id(r): Mergeable(Columns(r.assembled.choices, Once())) for r, _ in every}
    found: list[tuple[int, int]] = []  # the how manieth, which
    slight = 0
    for devices in dict.fromkeys(r.assembled.choices.mesh.devices for r, _ in every):
        mine = [k for k, x in enumerate(every) if x[0].assembled.choices.mesh.devices == devices]
        limits = _limits([every[k][1].peak for k in mine], _FINE)
        limits = [*(x for x in limits if x < most), most]
        some = [(every[k][0], every[k][1]) for k in mine]
        told = np.array([packed(r.assembled, c, of[id(r)], limits) for r, c in some])
        alone = np.array([c.seconds for _, c in some])
        merged = told.min(axis=1)
        worth = np.flatnonzero(merged < (1.0 - _HALF * LEAST) * alone)
        slight += int(np.count_nonzero(merged < (1.0 - _LITTLE) * alone)) - len(worth)
        mine, told = [mine[k] for k in worth.tolist()], told[worth]
        order = np.argsort(told, axis=0, kind="stable")
        for n, own in enumerate(order.tolist()):
            found += [(n, mine[k]) for step, k in enumerate(own) if told[k, step] < np.inf]
    ranks: dict[int, int] = {}
    for n, k in sorted(found, key=lambda x: x[0]):
        ranks.setdefault(k, n)
    return [(n, k) for k, n in ranks.items()], slight


def _limits(peaks: Sequence[float], step: float = _STEP) -> list[float]:
    """Limits on memory from the least of some peaks on."""
    low, high = min(peaks, default=0.0), _TIMES * max(peaks, default=0.0)
    count = int(np.log(high / low) / np.log(step)) if low else 0
    return [low * step**k for k in range(count)]


def _costs(plan: Plan) -> tuple[float, float, float]:
    return plan.costs.seconds, plan.costs.peak_bytes, plan.costs.joules


def merged_plans(plan: Plan, ground: Ground, feedback: Mapping[int, int]) -> list[Plan]:
    """The same plan with collectives merged, in every way that is tried, the fastest first; those
    that are faster by a share worth telling, each with the same plan's bound less what it saves.
    `ground` is that of the plan's schedule.

    Raises ExtractError where the plan is not legal.
    """
    candidates = _candidates(plan, ground)
    if candidates is None:
        return []
    cuts = _Posed(plan, candidates).cuts(_limits([plan.costs.peak_bytes]))
    made = [_made(plan, cut.groups, ground, feedback) for cut in cuts]
    worth = (1.0 - LEAST) * plan.costs.seconds
    found = [one for one in made if one is not None and one.costs.seconds <= worth]
    return sorted(found, key=lambda one: (one.costs.seconds, one.costs.peak_bytes))


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
    bound = max(0.0, plan.bound - (plan.costs.seconds - costs.seconds))
    return replace(other, costs=costs, bound=bound, collectives=planned_collectives(other))
