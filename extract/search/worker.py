"""Searching several problems side by side, in parts and from several seeds, by any executor.

A problem travels to a worker as plain arrays, and nothing comes back but what improves its front:
candidates and cuts, while the search goes on and when it ends. A worker that is lost loses its own
search only: what it had told is kept, and the rest is searched once more, elsewhere and then here.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Problem
from tapestry_egg.extract.search.messages import dual
from tapestry_egg.parallel.executors import INTERRUPTED, Lost, Processes, capacity, completed
from tapestry_egg.parallel.serving import tell
from tapestry_egg.pareto import excess
from tapestry_egg.quantities import TIME
from tapestry_egg.work import Work

from . import elimination
from .archive import Archive, Candidate, shown
from .search import Search
from .settling import Effort, Limits
from .transport import archive_arrays, archive_from, packed, problem_arrays, problem_from, unpacked

# Of these numbers no measurement is kept.

# Problems with fewer rows than this are searched sooner than a process has started.
_SMALL = 4000
# So many about equal parts of the work are worth what it takes to begin each: as many on every
# machine, so that the front depends on no number of processors.
_PARTS = 2
# So much more than an equal part of the work, of which it is a share, is not divided once more.
_SPARE = 0.25
# Improvements are told of no more often than this, in seconds.
_OFTEN = 0.5

#: Takes the archives of all problems as they are, whenever one has improved.
Report = Callable[[Sequence[Archive]], None]


@dataclass(frozen=True)
class Searched:
    """What a search of several problems found, and what happened to it: lost workers, an
    interruption."""

    archives: list[Archive]
    notes: tuple[str, ...] = ()

    @property
    def interrupted(self) -> bool:
        return INTERRUPTED in self.notes


def search_all(
    problems: Sequence[Problem],
    effort: Effort,
    limits: Limits | None = None,
    report: Report | None = None,
    workers: int | None = None,
    executor: Executor | None = None,
    seeds: int = 1,
    rivals: Floats | None = None,
    begun: Sequence[Archive | None] | None = None,
    weights: Sequence[float] | None = None,
) -> Searched:
    """The archives of all problems, searched side by side on `workers` processors, or by an
    executor.

    Each is searched from `seeds` seeds, in parts if it is large. `effort.work` is what all of it
    may take together, `effort.seconds` by the clock: where that ends no search (`by_clock` of the
    archives), neither the number of workers nor what else they do matters. `limits` are of special
    interest, `rivals` are costs of plans that other problems have, as `Search` takes them. Where
    the search of a problem was `begun`, one goes on from there (`Search.go_on`), or, in a later
    `round`, searches all of it again and knows what was found before. `weights` divide the work
    among problems, whose searches in parts or from several seeds share it (default: `weight`, for
    each of these). An interruption (Ctrl-C) ends the search and keeps what was found; raises
    KeyboardInterrupt where that is nothing, and what `Search` raises.
    """
    room = capacity(executor) if executor is not None else workers or os.cpu_count() or 1
    rows = sum(len(v) for p in problems for v in p.variables)
    alone = executor is None and (room <= 1 or rows < _SMALL)
    before: Sequence[Archive | None] = begun or [None] * len(problems)
    divide = rows >= _SMALL
    parts = divided(problems, _PARTS / seeds, effort.work) if divide else [1] * len(problems)
    once = [b is not None and not effort.round for b in before]
    parts = [1 if o else n for n, o in zip(parts, once, strict=True)]
    kinds = [
        (k, seed, part)
        for k, n in enumerate(parts)
        for seed, part in product(range(1 if once[k] else seeds), range(n))
    ]
    searched = [problems[k] for k, *_ in kinds]
    each = [weight(p) for p in searched]
    if weights is not None:
        jobs_of = Counter(k for k, *_ in kinds)
        each = [weights[k] / jobs_of[k] for k, *_ in kinds]
    seconds, work = shares(each, 1 if alone else room, effort), works(each, effort)
    jobs = [
        _Job(
            k,
            replace(effort, seconds=t, work=w, seed=effort.seed + seed, part=part, parts=parts[k]),
        )
        for t, w, (k, seed, part) in zip(seconds, work, kinds, strict=True)
    ]
    known = np.zeros((0, 3)) if rivals is None else rivals
    found = _Found(len(problems), len(jobs), [job.problem for job in jobs], report)
    try:
        left = list(range(len(jobs)))
        if not alone:
            with nullcontext(executor) if executor is not None else Processes(room, True) as pool:
                left = _there(problems, jobs, limits, known, found, pool, before)
        for j in left:
            k = jobs[j].problem
            told = _here(problems[k], jobs[j].effort, limits, known, found.improve(j), before[k])
            found.own(j, told)
    except KeyboardInterrupt:
        if not any(archive.candidates for archive in found.archives()):
            raise
        found.notes.append(INTERRUPTED)
    return Searched(found.archives(), tuple(dict.fromkeys(found.notes)))


@dataclass(frozen=True)
class _Job:
    problem: int
    effort: Effort


class _Found:
    """What the jobs have found so far. Workers tell of it in threads of their own."""

    def __init__(
        self, problems: int, jobs: int, problem: Sequence[int], report: Report | None
    ) -> None:
        self.notes: list[str] = []
        self._count = problems
        self._problem = problem
        self._jobs = [Archive() for _ in range(jobs)]
        self._report = report
        self._reported = -math.inf
        self._lock = threading.Lock()

    def archives(self) -> list[Archive]:
        """Per problem, what all of its jobs have found."""
        joined = [Archive() for _ in range(self._count)]
        for k, archive in zip(self._problem, self._jobs, strict=True):
            joined[k].join(archive)
        return joined

    def add(self, j: int, data: bytes) -> None:
        """Take in what a job says while it runs."""
        with self._lock:
            self._jobs[j].join(archive_from(unpacked(data)))
            self._tell()

    def end(self, j: int, data: bytes) -> None:
        """Take in all that a job has found."""
        with self._lock:
            self._jobs[j] = archive_from(unpacked(data))
            self._tell()

    def own(self, j: int, archive: Archive) -> None:
        """Take in all that a search here has found: what a lost worker told it tells again."""
        self._jobs[j] = archive

    def improve(self, j: int) -> Callable[[Archive, float], None]:
        """What a search here reports to: its archive is shared from the first plan on."""
        before = self._jobs[j]

        def report(archive: Archive, _: float) -> None:
            joined = Archive([*before.candidates], [*before.cuts])
            joined.join(archive)
            self._jobs[j] = joined
            self._tell()

        return report

    def _tell(self) -> None:
        now = time.monotonic()
        if self._report is not None and now - self._reported >= _OFTEN:
            self._reported = now
            self._report(self.archives())


def _there(
    problems: Sequence[Problem],
    jobs: Sequence[_Job],
    limits: Limits | None,
    rivals: Floats,
    found: _Found,
    executor: Executor,
    begun: Sequence[Archive | None],
) -> list[int]:
    """Search by an executor, the longest searches first; the jobs that were lost in the end."""
    sent: dict[int, bytes] = {}
    for job in jobs:
        if job.problem not in sent:
            sent[job.problem] = packed(problem_arrays(problems[job.problem]))
    order = sorted(range(len(jobs)), key=lambda j: -jobs[j].effort.seconds)
    bounds = None if limits is None else [limits.peak, limits.joules]
    others = rivals.tolist()
    earlier = [begun[job.problem] for job in jobs]
    before = [b"" if x is None else packed(archive_arrays(x)) for x in earlier]
    calls = [
        (sent[jobs[j].problem], asdict(jobs[j].effort), bounds, others, before[j]) for j in order
    ]
    left: list[int] = []
    for n, told in completed(
        executor, search_part, calls, lambda n, data: found.add(order[n], data)
    ):
        if not isinstance(told, Lost):
            found.end(order[n], told)
            continue
        found.notes.append(f"a worker was lost, its search was done again: {told.reason}")
        if not told.again:
            left.append(order[n])
    return left


def divided(problems: Sequence[Problem], room: float, work: float = math.inf) -> list[int]:
    """In how many parts to search each problem, so that `room` workers have about equal ones; in no
    more than have as much of the `work` as it takes to begin each."""
    weights = [weight(p) for p in problems]
    each = sum(weights) / max(room, 1.0)
    parts = [max(1, math.ceil(w / each - _SPARE)) for w in weights]
    begins = [beginning(p) for p in problems]
    owns = [work * w / sum(weights) for w in weights]
    return [
        n if n * b <= own else max(1, int(own / b))
        for n, b, own in zip(parts, begins, owns, strict=True)
    ]


def beginning(problem: Problem) -> float:
    """Units of work, about, that a search of a problem takes before it has looked at anything."""
    work, count = Work(), len(problem.variables)
    work.add(dual.SET_UP * (count + len(problem.pairs)) + elimination.SET_UP * count, 0)
    return work.units


def shares(weights: Sequence[float], workers: int, effort: Effort) -> list[float]:
    """Seconds for each problem: those that one worker searches in turn, the largest first, divide
    `effort.seconds` by their weights."""
    order = sorted(range(len(weights)), key=lambda k: -weights[k])
    busy = [0.0] * max(workers, 1)
    worker = [0] * len(weights)
    for k in order:
        worker[k] = busy.index(min(busy))
        busy[worker[k]] += weights[k]
    return [effort.seconds * w / busy[n] for w, n in zip(weights, worker, strict=True)]


def works(weights: Sequence[float], effort: Effort) -> list[float]:
    """Each problem's share of `effort.work`."""
    return [effort.work * w / sum(weights) for w in weights]


def weight(problem: Problem) -> float:
    """How much of the time a problem should have, beside others: as a step takes, which passes
    through all variables, and through tables by many entries at once."""
    return len(problem.variables) + float(sum(q.seconds.size for q in problem.pairs)) ** 0.5 + 1.0


def _here(
    p: Problem,
    effort: Effort,
    limits: Limits | None,
    rivals: Floats,
    report: Callable[[Archive, float], None],
    begun: Archive | None = None,
) -> Archive:
    search = Search(p, effort, report, rivals)
    try:
        return _searched(search, limits, begun)
    finally:
        search.leave()
        report(search.archive, 0.0)


def _searched(search: Search, limits: Limits | None, begun: Archive | None) -> Archive:
    """A search, run as it is meant."""
    if begun is None:
        return search.run(limits)
    if not search.effort.round:
        return search.go_on(begun)
    search.take_up(begun)
    return search.run(limits)


def so_far(archives: Sequence[Archive]) -> str:
    """`front 7  best 1.2 ms  bound 1.19 ms  gap 0.84%`: the plans that a front shows, the seconds
    of the fastest, the least that any plan may take, and how far a plan of the front may be above
    the fastest of its peak and joules."""
    candidates = [c for archive in archives for c in archive.candidates]
    if not candidates:
        return ""
    points = [candidates[i] for i in shown(np.array([c.costs for c in candidates]))]
    best = min(c.seconds for c in candidates)
    bound = min(archive.bound(math.inf, math.inf) for archive in archives)
    gaps = [
        excess(c.seconds, max(0.0, min(a.bound(c.peak, c.joules) for a in archives)))
        for c in points
    ]
    gap = max(gaps)
    return "  ".join(
        [
            f"front {len(points)}",
            f"best {TIME.format(best)}",
            f"bound {TIME.format(min(best, bound)) if bound > 0 else '-'}",
            f"gap {f'{gap:.2%}' if gap < 1e3 else '-'}",
        ]
    )


# In a worker


def search_part(
    problem: bytes,
    effort: dict[str, Any],
    limits: Sequence[float] | None,
    rivals: Sequence[Sequence[float]] = (),
    begun: bytes = b"",
) -> bytes:
    """Search one problem: its arrays, the fields of `Effort`, those of `Limits`, costs of rivals,
    the arrays of the archive to go on from, if any; an archive.

    Tells of what has improved since it told last. An interruption ends it with what it has.
    """
    told: dict[int, Candidate] = {}
    cuts = 0
    last = 0.0

    def report(archive: Archive, _: float) -> None:
        nonlocal cuts, last
        now = time.monotonic()
        if now - last < _OFTEN:
            return
        new = [c for c in archive.candidates if id(c) not in told]
        tell(packed(archive_arrays(Archive(new, archive.cuts[cuts:]))))
        told.update((id(c), c) for c in new)
        cuts, last = len(archive.cuts), now

    others = np.array(rivals, dtype=np.float64).reshape(-1, 3)
    search = Search(problem_from(unpacked(problem)), Effort(**effort), report, others)
    try:
        before = archive_from(unpacked(begun)) if begun else None
        _searched(search, Limits(*limits) if limits else None, before)
    except KeyboardInterrupt:
        if not search.archive.candidates:
            raise
    search.leave()
    return packed(archive_arrays(search.archive))
