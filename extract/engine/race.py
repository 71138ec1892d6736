"""The race: several networks searched together, always where the gap is widest.

The networks are those of a program's forms on meshes. All plans make one front, and what bounds a
plan of it is the least that any network may hold within its peak and joules. So the network to work
on is the one with the least bound at the limits with the widest gap, until every gap is small,
nothing raises a bound any more, or the work is done. Effort is counted in steps: the same networks
give the same front, on any number of threads.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from functools import partial

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Floats, Problem

from .archive import Archive, Limits, shown
from .mixtures import Mixtures, likeness
from .search import Search, share

# Tasks of one round: each of another form, so that they run side by side. Networks of one form
# learn from each other's labellings, one after the other.
_TOGETHER = 4

# In large networks, where tasks are long, those of a round have gaps of this share of the widest at
# least.
_NEARLY = 0.5

# Nodes of branch and bound when a task is begun, how many times more whenever it is taken up again,
# and at most: every network has a turn before another is searched in depth.
_NODES, _MORE, _MOST_NODES = 32, 8, 2048

# A task that leaves more than this share of a gap is not tried again at the same limits. In large
# networks it is not tried at limits within this factor of them either, because cuts hold for all
# limits.
_VAIN, _NEAR = 0.8, 1.02

# Other plans are looked for from this share of a plan's peak on: those of larger peaks a front
# would not show beside it. Between plans whose peaks differ by more than this factor large networks
# are searched half of the way. A gap where there is no plan yet counts for so much.
_BELOW, _BETWEEN, _HOLE = 0.99, 1.02, 0.5

# The widest gap, which is that of limits within which no plan is known. Below the least peak it is,
# too, until none is possible that is smaller by this share; then the share itself is the gap.
_MOST_GAP, _LITTLE = 1e6, 0.05

# The share of all work that the search for the fastest plan of every network may take.
_FOR_FASTEST = 0.4

#: Takes the archives of all networks whenever one may have improved.
Report = Callable[[Sequence[Archive]], None]


@dataclass(frozen=True)
class Effort:
    """How hard to search: so much `work` (units of `Work`) in all; `gap` is what is good enough.

    Without `front` only the fastest plan within the limits is looked for. `wanted` are the
    objectives, of seconds, peak and joules by their places. With `brief` it ends where the least
    peaks found are above the limits, too. The search ends by the clock after `seconds`, or after
    `patience` seconds without a better plan or bound.
    """

    work: float = np.inf
    gap: float = 0.004
    front: bool = True
    wanted: tuple[int, ...] = (0, 1, 2)
    brief: bool = False
    seconds: float = np.inf
    patience: float = np.inf
    threads: int = 1


@dataclass
class Race:
    """Searches of several networks.

    With `devices` of each network, one on more of them is no rival to one on fewer. Networks that
    are `within` another one have no plan that it lacks, as those on meshes whose axes it divides:
    they find plans, quickly, and bound nothing.
    """

    searches: Sequence[Search]
    effort: Effort
    limits: Limits | None = None
    report: Report | None = None
    devices: Sequence[int] | None = None
    within: frozenset[int] = frozenset()
    late: bool = False  # whether the clock ended it
    begun: set[int] = field(default_factory=set)  # the networks that were searched at all
    _vain: set[Task] = field(default_factory=set)
    _tried: dict[Task, int] = field(default_factory=dict)  # how often

    def run(self, ends: bool = False) -> None:
        """Search until every gap is small, or the effort is spent; or for the `ends` alone."""
        self._begun = self._gained = time.perf_counter()
        try:
            with ThreadPoolExecutor(max(1, self.effort.threads)) as pool:
                self._run(pool, ends)
        finally:
            for s in self.searches:
                s.leave()
                s.archive.by_clock |= self.late

    def _run(self, pool: ThreadPoolExecutor, ends: bool) -> None:
        every = range(len(self.searches))
        self.begun = {k for k in every if self.searches[k].archive.candidates}
        coarse = [k for k in every if k in self.within]
        fine = [k for k in every if k not in self.within]
        self._ends(pool, [k for k in coarse if k not in self.begun], self._fastest)
        fine.sort(key=self._of_form)
        self._ends(pool, [k for k in fine if k not in self.begun], self._fastest)
        quick = not self.effort.front and self._satisfied()
        small = all(s.small for s in self.searches)
        if quick and not small:
            return
        if not quick and (1 in self.effort.wanted or self.limits is not None):
            found = self._satisfied  # else more work than was asked for is done
            first = [] if small else self._quickest_of_forms()
            in_turn = [*dict.fromkeys([*first, *coarse, *fine])]
            self._ends(pool, in_turn, lambda k: self.searches[k].leanest, found)
            if self.effort.brief and not found():
                return
        if not quick and 2 in self.effort.wanted:
            some = [*coarse, *fine] if small else self._quickest_of_forms()
            self._ends(pool, some, lambda k: self.searches[k].frugal)
        if not ends:
            self._tasks(pool, fine)

    def _quickest_of_forms(self) -> list[int]:
        """Of the networks of each form the one that is passed most quickly: what it finds within
        limits are plans and prices for the others."""
        first: dict[int, int] = {}
        for k in sorted(range(len(self.searches)), key=lambda k: self.searches[k].all.sweeping):
            first.setdefault(id(self.searches[k].mixtures), k)
        return sorted(first.values(), key=self._of_form)

    def _tasks(self, pool: ThreadPoolExecutor, networks: Sequence[int]) -> None:
        """Work where gaps of some networks are widest, until all work is spent."""
        while not self._over():
            tasks = self._next(networks)
            if not tasks:
                break
            before = [share(x.known, self._bound(x)) for x in tasks]
            most = (self.effort.work - self._spent()) / len(tasks)
            self._all(pool, [partial(self._work_on, x, most) for x in tasks])
            for x, was in zip(tasks, before, strict=True):
                now = share(self._known(x.level, x.limits), self._bound(x))
                times = self._tried[x] = self._tried.get(x, 0) + 1
                vain = times > self._turns(x) or (times == self._turns(x) and now > _VAIN * was)
                if now > self.effort.gap and vain:
                    self._vain.add(x)
                if now < was:
                    self._gained = time.perf_counter()

    def _turn(self, task: Task) -> int:
        """Which turn of a task is next; of large networks, whose turns are long, those with the
        least bounds come first."""
        return self._tried.get(task, 0) if self.searches[task.network].small else 0

    def _turns(self, task: Task) -> int:
        """After how many turns a task has had as much work at once as it ever gets."""
        deepest = round(math.log(_MOST_NODES / _NODES, _MORE))
        return 1 + deepest if self.searches[task.network].small else 1

    def _is_vain(self, task: Task) -> bool:
        """Whether a task was tried for nothing, or one at nearly the same limits."""
        if task in self._vain or self.searches[task.network].small:
            return task in self._vain
        return any(
            x.network == task.network
            and x.level == task.level
            and all(map(_is_near, x.pair, task.pair))
            for x in self._vain
        )

    def _work_on(self, task: Task, most: float) -> None:
        """Take up a task, with `most` units of work."""
        search, limits = self.searches[task.network], task.limits
        if search.small:
            nodes = min(_NODES * _MORE ** self._tried.get(task, 0), _MOST_NODES)
            search.close(limits, task.known, nodes, most)
        else:
            search.approach(limits, task.known, most)

    def _bound(self, task: Task) -> float:
        return self.searches[task.network].archive.bound(*task.pair)

    def _fastest(self, network: int) -> Call:
        """To begin with a network: with care where plans may be faster than those found so far on
        no more devices."""
        devices = 0 if self.devices is None else self.devices[network]
        left = self.effort.work * (_FOR_FASTEST if self.effort.front else 1.0)
        most = max(left - self._spent(), 0.0) / (len(self.searches) - len(self.begun))
        return partial(self.searches[network].fastest, self._known(devices, Limits()), most)

    def _of_form(self, network: int) -> tuple[float, int]:
        """Networks of forms that are known to be fast come first."""
        mixtures = self.searches[network].mixtures
        same = [s for s in self.searches if s.mixtures is mixtures]
        return min((c.seconds for s in same for c in s.archive.candidates), default=0.0), network

    def _ends(
        self,
        pool: ThreadPoolExecutor,
        networks: Sequence[int],
        end: Callable[[int], Call],
        found: Callable[[], bool] | None = None,
    ) -> None:
        """Look for the same end of the front in networks, some side by side, while there is work
        left or nothing is `found`: no plan, where nothing else is said."""
        found = found or self._any
        left = [k for k in networks if k not in self.begun or self.searches[k].archive.candidates]
        while left and (not self._over() or not found()):
            some: dict[int, int] = {}
            for k in left:
                if len(some) < _TOGETHER:
                    some.setdefault(id(self.searches[k].mixtures), k)
            left = [k for k in left if k not in some.values()]
            self._all(pool, [end(k) for k in some.values()])
            self.begun |= set(some.values())

    def _any(self) -> bool:
        return any(s.archive.candidates for s in self.searches)

    def _all(self, pool: ThreadPoolExecutor, calls: Sequence[Call]) -> None:
        """Work on networks of several forms side by side; all of it, whatever one raises."""
        failed = [e for e in pool.map(_tried, calls) if e is not None]
        for e in failed:  # a network may have no plan, where another has one
            if not self._any() or not isinstance(e, ExtractError):
                raise e
        if self.report is not None:
            self.report([s.archive for s in self.searches])

    def _next(self, networks: Sequence[int]) -> list[Task]:
        """The tasks of some networks with the widest gaps, each of another form; first turns come
        first."""
        gaps: list[tuple[int, float, Task]] = []
        for level in self._levels():
            mine = [k for k in self._of(level) if k in networks]
            for limits, known, weight in self._open(level, mine):
                rivals = [
                    (self._turn(task), bound, task)
                    for k in mine
                    for task in [Task(k, limits, level, known)]
                    for bound in [self.searches[k].archive.bound(*astuple(limits))]
                    if share(known, bound) > self.effort.gap and not self._is_vain(task)
                ]
                if rivals:
                    turn, bound, task = min(rivals, key=lambda x: x[:2])
                    gaps.append((turn, -weight * min(share(known, bound), _MOST_GAP), task))
        gaps.sort(key=lambda x: (*x[:2], x[2].network, x[2].pair))
        chosen: dict[int, Task] = {}
        for _, gap, task in gaps:
            small = self.searches[task.network].small
            if len(chosen) < _TOGETHER and (small or gap <= _NEARLY * gaps[0][1]):
                chosen.setdefault(id(self.searches[task.network].mixtures), task)
        return list(chosen.values())

    def _levels(self) -> list[int]:
        """Numbers of devices up to which networks are rivals: one where these do not count."""
        return sorted(set(self.devices)) if self.devices is not None else [0]

    def _of(self, level: int) -> list[int]:
        """The networks that have a plan, on no more devices."""
        return [
            k
            for k, s in enumerate(self.searches)
            if s.archive.candidates and (self.devices is None or self.devices[k] <= level)
        ]

    def _open(self, level: int, networks: Sequence[int]) -> list[tuple[Limits, float, float]]:
        """Limits at which something may be left to find in networks: the limits, what is known
        within them, and how much a gap there counts."""
        points = self._points(level)
        if self.limits is not None:
            inside = (points[:, 1] <= self.limits.peak) & (points[:, 2] <= self.limits.joules)
            if not inside.any() or not self.effort.front:
                return [(self.limits, float(points[inside, 0].min(initial=np.inf)), 1.0)]
            points = points[inside]
        elif not self.effort.front:
            return [(Limits(), float(points[:, 0].min(initial=np.inf)), 1.0)]
        corners = points[shown(points)]
        found = []
        for s, p, j in corners.tolist():
            peak = p if 1 in self.effort.wanted else np.inf
            fastest = self._known(level, Limits(peak))
            found.append((Limits(peak), fastest, 1.0))
            if 2 in self.effort.wanted and s > fastest:
                found.append((Limits(peak, j), s, 1.0))
        if 1 in self.effort.wanted:
            peaks = np.unique(corners[:, 1])[::-1].tolist()
            small = all(s.small for s in self.searches)
            least = min((self.searches[k].archive.least_peak() for k in networks), default=0.0)
            for high, low in zip(peaks, [*peaks[1:], 0.0], strict=True):
                below = high * _BELOW
                if low and high / low > _BETWEEN and not small:
                    below = math.sqrt(high * low)
                known, weight = self._known(level, Limits(below)), _HOLE
                if known == np.inf and not small and share(high, least) <= _LITTLE:
                    weight *= share(high, least) / _MOST_GAP
                found.append((Limits(below), known, weight))
        return found

    def _points(self, level: int) -> Floats:
        found = [c.costs for k in self._of(level) for c in self.searches[k].archive.candidates]
        return np.array(found).reshape(-1, 3)

    def _known(self, level: int, limits: Limits) -> float:
        """Seconds of the fastest plan known within limits; infinite if none is."""
        points = self._points(level)
        inside = (points[:, 1] <= limits.peak) & (points[:, 2] <= limits.joules)
        return float(points[inside, 0].min(initial=np.inf))

    def _satisfied(self) -> bool:
        return self.limits is None or self._known(self._levels()[-1], self.limits) < np.inf

    def _spent(self) -> float:
        """Units of work so far."""
        return sum(s.work.units for s in self.searches)

    def _over(self) -> bool:
        if self._spent() >= self.effort.work:
            return True
        now = time.perf_counter()
        late = now > self._begun + self.effort.seconds
        self.late |= late or now > self._gained + self.effort.patience
        return self.late


def _is_near(a: float, b: float) -> bool:
    return a == b or max(a, b) <= _NEAR * min(a, b)


#: Something to be done about a network.
Call = Callable[[], None]


def _tried(call: Call) -> Exception | None:
    """Make a call; what it raises."""
    try:
        call()
    except Exception as e:
        return e
    return None


@dataclass(frozen=True)
class Task:
    """Limits to work at in one network, and the seconds of the fastest plan known there among
    those on no more than `level` devices."""

    network: int
    limits: Limits
    level: int
    known: float = field(compare=False)

    @property
    def pair(self) -> tuple[float, float]:
        return self.limits.peak, self.limits.joules


def race(
    problems: Sequence[Problem],
    effort: Effort,
    limits: Limits | None = None,
    report: Report | None = None,
    forms: Sequence[int] | None = None,
) -> list[Archive]:
    """The archives of all problems, searched together; `forms` tells which are of one form."""
    searches = searches_of(problems, effort.gap, forms)
    Race(searches, effort, limits, report).run()
    return [s.archive for s in searches]


def searches_of(
    problems: Sequence[Problem], gap: float, forms: Sequence[int] | None = None
) -> list[Search]:
    """A search of every problem; those of one form share what they learn of prices."""
    of = range(len(problems)) if forms is None else forms
    shared: dict[tuple[int, int, int], Mixtures] = {}
    return [
        Search(p, gap, shared.setdefault(likeness(form, p), Mixtures(p.paths)), k)
        for k, (p, form) in enumerate(zip(problems, of, strict=True))
    ]
