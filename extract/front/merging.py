"""Merging: plans whose collectives are fewer, made of plans of a front.

Collectives of one kind over the same devices that need not wait for each other can be one: all pay
their bytes, and one its latency. What they are made of then waits for the last of it, and what
reads them comes later, so a plan gets faster and may hold more. This is done with finished plans:
the search prices every collective on its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.merging import (
    Key,
    Kind,
    copying,
    entering,
    kind_of,
    most_bytes,
    payload,
    single_moves,
)
from tapestry_egg.extract.certify.moves import Move
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.search.archive import Candidate, shown
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.objectives import Objective
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.fetch import fetches
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.quantities import TIME
from tapestry_egg.schedule.of_plans import plan_schedule, with_merged

from .front import Front, in_order, value, within
from .merge import NetworkResult, bounded_plan, epsilon

# Which collectives are put together.
_Which = Literal["next", "before", "after"]

# What merging must save of a plan's seconds: a front shows no smaller steps (`archive.shown`).
LEAST = 0.01
# What is tried: which collectives are put together (those next to each other, or those that as
# many others precede, or follow, one after the other), which part of the bytes that the compiler
# makes one collective of is the most of one, and whether gathers are merged, too. Those that save
# most are tried first, and the first that holds no more ends it.
_WAYS: tuple[tuple[_Which, float, bool], ...] = (
    ("next", 1.0, True),
    ("before", 1.0, True),
    ("after", 1.0, True),
    ("next", 1.0, False),
    ("before", 1.0, False),
    ("next", 0.25, False),
    ("next", 0.0625, False),
)

# What is proven is a plan's bound where it is less than another by no more than this share, which
# tables do not show.
_LITTLE = 1e-4

# A labelling of a problem; a plan, and what of it may be merged.
_Found = tuple[PlanProblem, Candidate]
_Posed = tuple[Plan, "_Candidates"]

# Operations that all plans may have together that are tried, those of a loop once: a plan of 2000
# takes about a second for each way. The first is always tried, those of the front before others.
# What was found for merging is counted apart: each of it is behind the front before it is merged.
_MOST, _MOST_MEANT = 175_000, 100_000


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
    grounds: dict[int, Ground] = {}

    def mergeable(plan: Plan) -> _Candidates | None:
        if id(plan.graph) not in grounds:
            grounds[id(plan.graph)] = Ground(plan_schedule(plan.body, feedback), machine)
        return _candidates(plan, grounds[id(plan.graph)])

    found = [(c.most_saved() / p.costs.seconds, p, c) for p in front.plans if (c := mergeable(p))]
    made: list[Plan] = []
    tries, left = 0, 0
    for _, plan, candidates in sorted(found, key=lambda x: -x[0]):
        tries += len(_WAYS) * len(candidates.walk.program.instances)
        if made and tries > _MOST:
            left += 1
        else:
            made += _merged(plan, candidates, feedback)
    # What merging may bring to the front besides: plans that were found for it, and those of which
    # others are a little better.
    here = {(p.mesh, p.costs) for p in front.plans}

    def posed(some: Sequence[_Found], tried: int, most: int, ways: int) -> Iterator[_Posed]:
        """The plans of some labellings in which merging may save something."""
        nonlocal left
        for k, (assembled, candidate) in enumerate(some):
            tried += (1 + ways) * len(assembled.choices.schedule.program.instances)
            if tried > most:
                left += len(some) - k
                return
            plan = bounded_plan(results, assembled, candidate, objectives)
            if (plan.mesh, plan.costs) not in here and (one := mergeable(plan)) is not None:
                yield plan, one

    for by_lines in (False, True):
        some = [*posed(_meant(results, by_lines), 0, _MOST_MEANT, 0)]
        for plan, one in _promising(some, [*made] if by_lines else ()):
            made += _merged(plan, one, feedback)
    if found:
        for plan, one in posed(_behind(front, results), tries, _MOST, len(_WAYS)):
            made += _merged(plan, one, feedback)
    least, of_all = _least_merged(results)
    whole &= of_all
    made = [_raised(p, least, whole) for p in made]
    fitting = [p for p in (*front.plans, *made) if within(p, limits)]
    notes: tuple[str, ...] = ()
    if left:
        notes = (f"of {left} plans that may gain least by it no collectives were merged",)
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


def _meant(results: Sequence[NetworkResult], by_lines: bool) -> list[_Found]:
    """The labellings that were found for merging at prices of one sort, the first of each search
    before all second."""
    every = [
        (k, r.assembled, c)
        for r in results
        for sort, own in r.mergeable
        for k, c in enumerate(own)
        if sort == by_lines
    ]
    return [x[1:] for x in sorted(every, key=lambda x: x[0])]


def _promising(plans: Sequence[_Posed], made: Sequence[Plan] = ()) -> list[_Posed]:
    """The plans that a front would show if merging saved of each as much as it may, but for those
    that take no less than one that was `made` even so."""
    if not plans:
        return []
    costs = np.array([(p.costs.seconds, p.costs.peak_bytes, p.costs.joules) for p, _ in plans])
    least = costs.copy()
    costs[:, 0] -= [one.most_saved() for _, one in plans]
    # Joules fall with seconds, and by no greater share.
    least[:, [0, 2]] *= (costs[:, 0] / least[:, 0])[:, None]
    beaten = np.zeros(len(plans), dtype=bool)
    for one in made:
        known = np.array([one.costs.seconds, one.costs.peak_bytes, one.costs.joules])
        beaten |= (known <= least).all(axis=1)
    return [plans[i] for i in shown(costs) if not beaten[i]]


def _behind(front: Front, results: Sequence[NetworkResult]) -> list[_Found]:
    """Every candidate of the searches, those first that are slower by the least share than what the
    front has of no larger peak."""
    seconds = np.array([p.costs.seconds for p in front.plans])
    peaks = np.array([p.costs.peak_bytes for p in front.plans])

    def slower(candidate: Candidate) -> float:
        rivals = seconds[peaks <= candidate.peak * (1 + 1e-9)]
        return candidate.seconds / float(rivals.min()) if len(rivals) else 1.0

    every = [(r.assembled, c) for r in results for c in r.archive.candidates]
    return sorted(every, key=lambda x: (slower(x[1]), x[1].costs))


def merged_plans(plan: Plan, ground: Ground, feedback: Mapping[int, int]) -> list[Plan]:
    """The same plan with collectives merged, in several ways; those that are faster by a share
    worth telling, each with the same plan's bound less what it saves. `ground` is that of the
    plan's schedule.

    Raises ExtractError where the plan is not legal.
    """
    found = _candidates(plan, ground)
    return [] if found is None else _merged(plan, found, feedback)


def _candidates(plan: Plan, ground: Ground) -> _Candidates | None:
    """What may be merged in a plan; None where that saves no share worth telling."""
    if ground.target.combiner is None or plan.mesh.devices == 1 or plan.body.merged:
        return None
    if not plan.costs.seconds:
        return None
    walk = Walk(plan, ground)
    walk.find_moves()
    found = _Candidates(walk)
    return found if found.most_saved() >= LEAST * plan.costs.seconds else None


def _merged(plan: Plan, found: _Candidates, feedback: Mapping[int, int]) -> list[Plan]:
    """The ways that are tried to merge a plan's collectives, but for those that save too little."""
    made: list[Plan] = []
    ways = dict(found.groups(*way) for way in _WAYS)
    for groups in sorted(filter(None, ways), key=lambda groups: -ways[groups]):
        one = _made(plan, groups, found.walk.ground, feedback)
        if one is not None and one.costs.seconds <= (1.0 - LEAST) * plan.costs.seconds:
            made.append(one)
            if one.costs.peak_bytes <= plan.costs.peak_bytes:
                break
    return made


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


@dataclass(frozen=True, slots=True)
class _Member:
    """A copy that may be merged: what it takes alone, the unit that makes its value, those that
    read it, and all units that must have run before it is made."""

    key: Key
    move: Move
    seconds: float
    maker: int
    readers: int  # a bit for each unit
    before: int  # a bit for each unit


class _Candidates:
    """The copies of a plan that may be merged, by what they do."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        before = _ancestors(walk)
        lives = walk.ground.lives
        apart = _apart(walk)
        self.members: dict[Kind, list[_Member]] = {}
        for key, move in single_moves(walk).items():
            kind = kind_of(walk, move)
            if kind is None or key in apart or payload(walk, [move]) > most_bytes(walk, move):
                continue
            maker = lives.maker[move.value]
            readers = sum(1 << u for u in set(lives.users[move.value]) - {maker})
            seconds = self._seconds(kind, [move])
            one = _Member(key, move, seconds, maker, readers, before[maker])
            self.members.setdefault(kind, []).append(one)
        for kind, members in self.members.items():
            late = kind[0] == "all_gather"  # fetched for their readers, not sent when made
            members.sort(key=lambda m: (walk.read_at(m.move) if late else 0, m.maker, m.key[0]))

    def most_saved(self) -> float:
        """Seconds that merging can save at most, of what is tried."""
        return max(self.groups(which, 1.0, True)[1] for which in get_args(_Which))

    def groups(self, which: _Which, part: float, gathers: bool) -> tuple[tuple[Merged, ...], float]:
        """Copies to merge, of no more than so large a part of the bytes that may be, and the
        seconds that this saves."""
        made: list[Merged] = []
        saved = 0.0
        for kind, run in self._runs(which, part, gathers):
            less = sum(m.seconds for m in run) - self._seconds(kind, [m.move for m in run])
            if less > 0.0:
                made.append(tuple(m.key for m in run))
                saved += less
        return tuple(made), saved

    def _runs(
        self, which: _Which, part: float, gathers: bool
    ) -> Iterator[tuple[Kind, list[_Member]]]:
        """Members that need not wait for each other, two or more."""
        kinds = {k: own for k, own in self.members.items() if gathers or k[0] != "all_gather"}
        level: Mapping[Key, int] = {}
        if which != "next":
            every = [m for own in kinds.values() for m in own]
            level = _levels(self.walk, every, which == "before")
        for kind, members in kinds.items():
            run: list[_Member] = []
            # None of a level waits for another, nor do levels for each other in a circle.
            for m in sorted(members, key=lambda m: level[m.key]) if level else members:
                moves = [x.move for x in (*run, m)]
                small = payload(self.walk, moves) <= part * most_bytes(self.walk, m.move)
                if level:
                    free = bool(run) and level[run[-1].key] == level[m.key]
                else:
                    free = not any(x.readers & m.before or m.readers & x.before for x in run)
                if not (small and free):
                    if len(run) > 1:
                        yield kind, run
                    run = []
                run = [*run, m]
            if len(run) > 1:
                yield kind, run

    def _seconds(self, kind: Kind, moves: Sequence[Move]) -> float:
        walk = self.walk
        amount = entering(walk, moves)
        sent = float(collective_seconds(kind[0], amount, kind[1], walk.mesh, walk.target))
        return sent + copying(walk, moves)


def _levels(walk: Walk, members: Iterable[_Member], before: bool) -> dict[Key, int]:
    """Of each copy how many others must be made one after the other `before` it, or else after it,
    at most."""
    lives, units = walk.ground.lives, walk.schedule.units
    copied = {m.move.value for m in members}
    far = [0] * len(units)  # of each unit, to what it reads or from what it makes
    for u in range(len(units)) if before else reversed(range(len(units))):
        for _, _, v in units[u].reads:
            maker = lives.maker[v]
            if maker < u and before:
                far[u] = max(far[u], far[maker] + (v in copied))
            elif maker < u:
                far[maker] = max(far[maker], far[u] + (v in copied))
    if before:
        return {m.key: far[lives.maker[m.move.value]] for m in members}
    users = {v: [far[u] for u in lives.users[v] if u != lives.maker[v]] for v in copied}
    return {m.key: max(users[m.move.value], default=0) for m in members}


def _ancestors(walk: Walk) -> list[int]:
    """Per unit, a bit for itself and for each unit that what it reads is made from."""
    maker = walk.ground.lives.maker
    found: list[int] = []
    for u, unit in enumerate(walk.schedule.units):
        bits = 1 << u
        for _, _, v in unit.reads:
            if maker[v] < u:
                bits |= found[maker[v]]
        found.append(bits)
    return found


def _apart(walk: Walk) -> set[Key]:
    """Copies that are not merged: made a second time to save memory, or for what is computed
    again."""
    body = walk.plan.body
    operations = body.graph.operations
    again = {op.remat for op in operations if op.remat is not None}
    return {
        (f.value, f.need)
        for k, reads in enumerate(fetches(body))
        for f in reads
        if f.again or (k < len(operations) and operations[k].remat in again)
    }
