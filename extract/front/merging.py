"""Merging: plans whose collectives are fewer, made of the labellings that a search has found.

Collectives of one kind over the same devices that need not wait for each other can be one: all pay
their bytes, and one its latency. What they are made of then waits for the last of it, and what
reads them comes later, so a plan gets faster and may hold more. A search counts a labelling as if
it were merged as far as dependences allow (`extract/problem/latencies.py`); here it is merged, and
counted exactly. What a plan then holds is told beforehand (`extract/merged/peaks.py`), and those
plans are made that a front would show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.engine.archive import Candidate, shown
from tapestry_egg.extract.merged.members import WHICH, Candidates
from tapestry_egg.extract.merged.peaks import Peaks
from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.energy import idle_joules
from tapestry_egg.machine.objectives import PEAK_BYTES, Objective
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Merged, Plan
from tapestry_egg.schedule.of_plans import with_merged

from .front import Front, in_order, value, within
from .merge import NetworkResult, bounded_plan, bounding, epsilon
from .notes import Note, note

# What merging must save of a plan's seconds: a front shows no smaller steps (`archive.shown`).
LEAST = 0.01

# Operations of all labellings together that are looked at, for each unit of work and at most;
# the first is in any case.
_SEEN, _MOST_SEEN = 17_500, 84_000

# Groups of collectives that hold too much memory are halved in at most so many rounds. Of those too
# small to halve, so many are tried again, those first that save most.
_MOST_HALVED, _MOST_AGAIN = 12, 4

# Rounded, so much is within a limit as well.
_JUST = 1.0 + 1e-9


def merge_collectives(
    front: Front,
    results: Sequence[NetworkResult],
    objectives: Sequence[str | Objective],
    limits: Mapping[str, float],
    machine: Target,
    feedback: Mapping[int, int],
    work: float = np.inf,
) -> tuple[Front, tuple[Note, ...]]:
    """The front with those plans as well that merge collectives, each counted by the certificate,
    where that saves a share worth a point, in so many units of `work`; and what is to be said of
    it.

    The bounds of a search hold however collectives are merged.
    """
    if machine.combiner is None:
        return front, ()
    most = min(_SEEN * work, _MOST_SEEN)
    merging = _Merging(front, results, objectives, machine, feedback, most)
    made, left, unlikely = merging.made(limits)
    fitting = [p for p in (*front.plans, *made) if within(p, limits)]
    costs = np.array([[value(p, k) for k in objectives] for p in fitting], dtype=float)
    plans = in_order(fitting[i] for i in shown(costs))
    points = [(p.costs.seconds, p.costs.peak_bytes) for p in plans]
    proven = min(front.epsilon, epsilon(bounding(results), points))
    counts = {"unmerged": left, "unmerged-unlikely": unlikely}
    notes = tuple(note(kind, n) for kind, n in counts.items() if n)
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
    kept = [one for one in found if one is not None]
    return sorted(kept, key=lambda one: (one.costs.seconds, one.costs.peak_bytes))


@dataclass(frozen=True, slots=True)
class Cut:
    """Copies of a plan that are merged, the seconds that this saves, and the peak that it has."""

    groups: tuple[Merged, ...]
    saved: float
    peak: float


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
    most_seen: float  # operations of labellings

    def made(self, limits: Mapping[str, float]) -> tuple[list[Plan], int, int]:
        """Merged plans that a front shows, and how many labellings were not looked at: those that
        are expected to gain by merging, and those that may gain but are not expected to."""
        most = limits.get(PEAK_BYTES.name, np.inf)
        known = [_costs(p) for p in self.front.plans]
        ways, left, unlikely = self._ways(known, most)
        every = np.array([*known, *(_told(x.plan, x.cut, self.machine) for x in ways)])
        found: list[Plan] = []
        tried: set[int] = set()
        while some := [k for k in _shown(every, len(known)) if k not in tried]:
            for k in some:
                tried.add(k)
                way = ways[k - len(known)]
                one = _made(way.plan, way.cut.groups, way.ground, self.feedback)
                every[k] = np.inf if one is None else _costs(one)
                found += [] if one is None else [one]
        return found, left, unlikely

    def _ways(
        self, known: Sequence[tuple[float, float, float]], most: float
    ) -> tuple[list[_Way], int, int]:
        """Labellings with ways to merge their copies, as plans; how many were not looked at, as
        `made` counts them."""
        found: list[_Way] = []
        told = [*known]
        grounds: dict[int, Ground] = {}
        # Seconds that merged plans of a mesh take more than their labellings say, at least.
        more: dict[MeshShape, float] = {}
        seen = left = unlikely = 0
        for labellings in self._likely(most):
            tried = np.zeros(len(labellings), dtype=np.bool_)
            costs = np.array([c.costs for _, c in labellings])
            meshes = [r.assembled.choices.mesh for r, _ in labellings]
            while True:
                expected = costs.copy()
                expected[:, 0] += [more.get(mesh, 0.0) for mesh in meshes]
                gains = np.where(tried, 0.0, _gains(np.array(told), expected))
                if gains.max(initial=0.0) <= LEAST:
                    break
                k = int(gains.argmax())
                result, candidate = labellings[k]
                choices = result.assembled.choices
                seen += len(choices.schedule.program.instances)
                if found and seen > self.most_seen:
                    left += int((gains > LEAST).sum())
                    break
                tried[k] = True
                try:
                    given = self.results, result.assembled, candidate, self.objectives, grounds
                    plan = bounded_plan(*given, listed=False)
                except ExtractError:  # which the front says of it
                    continue
                ground = Ground(choices.schedule, self.machine)
                ground = grounds.setdefault(id(choices.schedule), ground)
                candidates = _candidates(plan, ground)
                if candidates is not None:
                    worth = partial(self._worth_cutting, told, plan)
                    cuts = _cuts(plan, candidates, worth)
                    own = [_Way(plan, ground, x) for x in cuts if x.peak <= most]
                    found += own
                    told += [_told(plan, x.cut, self.machine) for x in own]
                    took = plan.costs.seconds - candidates.most_saved() - candidate.seconds
                    more[meshes[k]] = min(took, more.get(meshes[k], np.inf))
            may = np.where(tried, 0.0, _gains(np.array(told), costs)) > LEAST
            unlikely += int((may & (gains <= LEAST)).sum())
        return found, left, unlikely

    def _worth_cutting(
        self, known: Sequence[tuple[float, float, float]], plan: Plan, cut: Cut
    ) -> bool:
        return _worth(known, _told(plan, cut, self.machine))

    def _likely(self, most: float) -> Iterator[list[tuple[NetworkResult, Candidate]]]:
        """The fastest labelling of each number of devices, if all were merged as far as dependences
        allow; then all others."""
        groups: list[list[tuple[NetworkResult, Candidate]]] = [[], []]
        for devices in dict.fromkeys(r.assembled.choices.mesh.devices for r in self.results):
            every = [
                (r, c)
                for r in self.results
                for c in r.archive.candidates
                if c.peak <= most and r.assembled.choices.mesh.devices == devices > 1
            ]
            every.sort(key=lambda one: one[1].costs)
            groups[0] += every[:1]
            groups[1] += every[1:]
        return (some for some in groups if some)


def _gains(known: Floats, costs: Floats) -> Floats:
    """By what share of the seconds known within their peaks labellings may be faster: [labellings].

    `known` and `costs` [..., 3] are seconds, peaks and joules.
    """
    within = known[:, 1] <= costs[:, 1, None] * _JUST
    seconds = np.where(within, known[:, 0], np.inf).min(axis=1, initial=np.inf)
    return np.where(seconds > 0.0, 1.0 - costs[:, 0] / np.maximum(seconds, 1e-30), 0.0)


def _worth(known: Sequence[tuple[float, float, float]], costs: tuple[float, float, float]) -> bool:
    """Whether something is faster than all that is known within its peak, by a share worth
    telling."""
    seconds, peak, _ = costs
    within = [s for s, p, _ in known if p <= peak * _JUST]
    return seconds < (1.0 - LEAST) * min(within, default=np.inf)


def _shown(costs: Floats, first: int) -> list[int]:
    """The entries that a front shows, from `first` on."""
    return [k for k in shown(costs) if k >= first]


def _cuts(
    plan: Plan, candidates: Candidates, worth: Callable[[Cut], bool] = lambda _: True
) -> list[Cut]:
    """Ways to merge that save at least the share `LEAST` of the seconds, each with the peak of the
    merged plan; those first that save most. If the one that saves most raises the peak, smaller
    groups are tried as well, as long as that is `worth` it."""
    held = float(plan.costs.peak_bytes)
    ways = {candidates.groups(which, waits) for waits in (True, False) for which in WHICH}
    few = LEAST * plan.costs.seconds
    saving = sorted(((x, s) for x, s in ways if s >= few), key=lambda one: (-one[1], repr(one[0])))
    if not any(worth(Cut(groups, saved, held)) for groups, saved in saving):
        return []
    peaks = Peaks(candidates)
    found: dict[frozenset[Merged], Cut] = {}
    for groups, saved in saving:
        better = any(x.saved >= saved and x.peak <= held * _JUST for x in found.values())
        if better or not worth(Cut(groups, saved, held)):
            continue
        cut = Cut(groups, saved, _held(peaks, groups))
        some = [cut]
        if not found and cut.peak > held * _JUST:  # of those that save most
            some += _halved(cut, candidates, peaks, held, lambda saved: worth(Cut((), saved, held)))
        for x in some:
            found.setdefault(frozenset(x.groups), x)
    kept = [x for x in found.values() if x.saved >= few and x.peak < np.inf]
    return sorted(kept, key=lambda cut: (-cut.saved, cut.peak))


def _halved(
    most: Cut, candidates: Candidates, peaks: Peaks, held: float, worth: Callable[[float], bool]
) -> Iterator[Cut]:
    """Cuts with smaller and smaller groups, until the peak is at most `held` bytes. Groups that are
    left out because they cannot be halved are then added again, if the peak allows it.

    Each round looks at every time at which the plan exceeds `held`, and halves those groups that
    add the most bytes then for each second that they save: as many as add half of what is too much.
    It ends when a cut is no longer `worth` it.
    """
    groups = {group: candidates.saved_by(group) for group in most.groups}
    gone: dict[Merged, float] = {}

    def cut(peak: float) -> Cut:
        return Cut(tuple(groups), sum(groups.values()), peak)

    for _ in range(_MOST_HALVED):
        try:
            peak, times = peaks.waiting([*groups], held * _JUST)
        except PlanError:
            return
        yield cut(peak)
        if not times:
            break
        if not worth(sum(groups.values())):
            return
        for group in _too_large(groups, times):
            halves = {half: candidates.saved_by(half) for half in _halves(group)}
            gone |= {} if halves else {group: groups[group]}
            del groups[group]
            groups |= {half: saves for half, saves in halves.items() if saves > 0.0}
    else:
        return  # the peak is still too high
    for group in sorted(gone, key=lambda group: -gone[group])[:_MOST_AGAIN]:
        groups[group] = gone[group]
        peak = _held(peaks, tuple(groups))
        if peak <= held * _JUST:
            yield cut(peak)
        else:
            del groups[group]


def _too_large(
    groups: Mapping[Merged, float], times: Sequence[tuple[float, Sequence[float]]]
) -> list[Merged]:
    """The groups to halve, with the seconds that each saves; `times` are those of `Peaks.waiting`.

    Times at which few groups add anything come first, because they leave the least choice."""
    some: dict[Merged, None] = {}
    for over, waiting in sorted(times, key=lambda x: sum(adds > 0.0 for adds in x[1])):
        adds = dict(zip(groups, waiting, strict=True))
        left = 0.5 * over - sum(adds[group] for group in some)
        for group in sorted(groups, key=lambda group: -adds[group] / groups[group]):
            if left > 0.0 and adds[group] > 0.0 and group not in some:
                some[group] = None
                left -= adds[group]
    # If no group adds anything, some other value is alive for longer because of one of them.
    return [*some] or sorted(groups, key=lambda group: groups[group])[:1]


def _halves(group: Merged) -> list[Merged]:
    """The two halves of a group, without those that have a single member."""
    middle = len(group) // 2
    return [part for part in (group[:middle], group[middle:]) if len(part) > 1]


def _held(peaks: Peaks, groups: tuple[Merged, ...]) -> float:
    """The peak of a plan with groups merged; infinite where they wait for each other."""
    try:
        return float(peaks.profile(groups).max(initial=0.0))
    except PlanError:
        return np.inf


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
        body, schedule = with_merged(plan.body, feedback, groups, ground.schedule)
        other = replace(plan, body=body)
        walk = Walk(other, Ground(schedule, ground.target))
        costs = walk.certificate().costs
    except (PlanError, ExtractError):
        return None
    if ground.target.slowdown is None:  # the same sum, but for the order in which it is taken
        costs = replace(costs, seconds=costs.serial_seconds)
    bound = min(plan.bound, costs.seconds)
    return replace(other, costs=costs, bound=bound, collectives=walk.collectives)
