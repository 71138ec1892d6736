"""Searches of a program's problems: which first, for how long, and for which objectives."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.extract.search.archive import Archive, shown
from tapestry_egg.extract.search.race import is_beaten
from tapestry_egg.extract.search.settling import Effort, Limits
from tapestry_egg.machine.objectives import PEAK_BYTES
from tapestry_egg.machine.target import Target
from tapestry_egg.parallel.executors import INTERRUPTED
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.rewrite.recompute import RULE

from . import omissions

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.extract.search.worker import Searched
    from tapestry_egg.files.search_file import SearchFile

    from .settings import Settings
    from .state import Question

# When bytes and flops are objectives: seconds break ties, and flops weigh more than what their
# arithmetic takes, so that work is divided evenly before bytes are saved.
_TIE = 0.02
_EVEN = 20.0
# How much more work than others is spent on forms that compute values twice: they reach from the
# middle of the front to its end, where the search takes longest.
_TWICE = 2.0
# The share of the work that problems may take which are raced against others, and of it what the
# race itself may take.
_RACED, _ENDS = 0.4, 0.3
# The share of the work that is spent on each problem without what others of its turn find; all of
# it where integer programs settle some, or there are fewer units.
_FIRST, _MUCH = 0.6, 40.0
# In so many turns the rest is spent where gaps are widest, and in as many more what these leave of
# it; each time on the problems whose gaps are more than this share of the widest; on none any more
# whose gaps together are still more than the last share of what they were.
_TURNS, _WIDE, _VAIN = 4, 0.5, 0.98
# So many times what an integer program is expected to take is enough for one and what comes before.
_ENOUGH = 2.0


def heeded(q: Question) -> Limits | None:
    """The user's limits on what speed is exchanged for, and what a device has of memory."""
    bounds = dict(q.limits)
    if q.machine.usable_bytes is not None:
        bounds.setdefault(PEAK_BYTES.name, float(q.machine.usable_bytes))
    return Limits.of(bounds)


def search_in_turn(
    problems: Sequence[PlanProblem],
    limits: Limits | None,
    settings: Settings,
    executor: Executor | None,
    tell: Progress,
    raced: Sequence[int] = (),
    wanted: Sequence[int] = (0, 1, 2),
    by_devices: bool = False,
    kept: SearchFile | None = None,
) -> Searched:
    """Search forms that compute values twice, then all others for what is better than those.

    The others' plans of small peaks, which take long to find, are then not looked for. The problems
    numbered `raced` come last. Of them only the ends are searched at first; those of which bounds
    prove that they hold nothing better in the objectives `wanted` are not searched any further.
    `by_devices`, all this is done for problems of the fewest devices first, then for those of more:
    there only what is better than all on fewer devices is looked for, here also what is worse than
    on more. What was found before and is `kept` is gone on with.
    """
    from tapestry_egg.extract.search.worker import Searched, weight

    turns = [p.choices.mesh.devices if by_devices else 0 for p in problems]
    total = sum(weight(p.problem) for p in problems)
    archives = known_before(kept, problems)
    notes: tuple[str, ...] = ()
    beaten = 0
    for n in sorted(set(turns)):
        mine = [k for k, own in enumerate(turns) if own == n]
        own = part_of(settings, sum(weight(problems[k].problem) for k in mine) / total)
        late = [mine.index(k) for k in raced if k in mine]
        some, known = [problems[k] for k in mine], _known(archives)
        before = [archives[k] for k in mine]
        try:
            found, others = _in_turn(
                some, limits, own, executor, tell, late, wanted, known, before, kept
            )
        except KeyboardInterrupt:  # it may come where nothing of a turn is found yet
            if not any(archive.candidates for archive in archives):
                raise
            notes += (INTERRUPTED,)
            break
        notes, beaten = notes + found.notes, beaten + others
        for k, archive in zip(mine, found.archives, strict=True):
            archives[k] = archive
        if found.interrupted:
            break
    return Searched(archives, tuple(dict.fromkeys(notes)) + omissions.of_race(beaten))


def _in_turn(
    problems: Sequence[PlanProblem],
    limits: Limits | None,
    settings: Settings,
    executor: Executor | None,
    tell: Progress,
    raced: Sequence[int],
    wanted: Sequence[int],
    beside: Floats,
    archives: Sequence[Archive],
    kept: SearchFile | None = None,
) -> tuple[Searched, int]:
    """One turn of `search_in_turn`, for what is better than plans of costs `beside` [plans, 3] that
    other problems have, from what is in the archives; and how many problems were not searched to
    their end."""
    from tapestry_egg.extract.search.exact import small
    from tapestry_egg.extract.search.worker import Searched, weight

    twice = [RULE in p.choices.schedule.program.rules for p in problems]
    weights = [
        weight(p.problem) * (_TWICE if t else 1.0) for p, t in zip(problems, twice, strict=True)
    ]
    begun = [begins(archive, limits, settings) for archive in archives]
    notes: tuple[str, ...] = ()
    late = min(_RACED, sum(weights[k] for k in raced) / sum(weights))
    closer = settings.front and len(problems) > 1
    some_small = any(small(p.problem) for p in problems)
    much = _MUCH <= settings.most_work < math.inf
    first = _FIRST if closer and much and not some_small else 1.0

    def turn(mine: Sequence[int], share: float, ends: bool = False) -> None:
        """Search some problems for what is better than all that is known, with that share of the
        work."""
        nonlocal notes
        if not mine or INTERRUPTED in notes:
            return
        rivals = np.concatenate([beside, _known(archives)])
        own, some = part_of(settings, first * share), [problems[k] for k in mine]
        before = [begun[k] for k in mine]

        def take(found: Searched) -> None:
            nonlocal notes
            notes += found.notes
            for k, archive in zip(mine, found.archives, strict=True):
                archives[k].join(archive)

        search(some, limits, own, executor, tell, rivals, ends, before, kept=kept, take=take)

    whole = [k for k in range(len(problems)) if k not in raced]
    total = sum(weights[k] for k in whole)
    for again in (True, False):
        mine = [k for k in whole if twice[k] == again]
        turn(mine, (1.0 - late) * sum(weights[k] for k in mine) / total)
    turn(raced, _ENDS * late, ends=True)
    points = np.concatenate([beside, _known(archives)])
    left = [k for k in raced if not is_beaten(archives[k], points, settings.gap, wanted)]
    turn(left, (1.0 - _ENDS) * late)
    if closer and INTERRUPTED not in notes:
        notes += _closer(
            problems, weights, archives, limits, settings, executor, tell, beside, kept
        )
    return Searched([*archives], notes), len(raced) - len(left)


def part_of(settings: Settings, share: float) -> Settings:
    """The settings with a share of the work, and of the time."""
    return replace(settings, seconds=settings.most_seconds * share, work=settings.most_work * share)


def _closer(
    problems: Sequence[PlanProblem],
    weights: Sequence[float],
    archives: Sequence[Archive],
    limits: Limits | None,
    settings: Settings,
    executor: Executor | None,
    tell: Progress,
    beside: Floats,
    kept: SearchFile | None = None,
) -> tuple[str, ...]:
    """Go on with the problems whose gaps are widest, all of what is known counted, with the work
    that all searches have left over; what is to be said of it. The archives take in what is found.

    Where integer programs settle problems, no more of them have a turn than have the work for one
    each: without it a turn closes nothing, and does not show that none would.
    """
    notes: tuple[str, ...] = ()
    vain: set[int] = set()
    needs = [_program(p) for p in problems]
    for turn in range(2 * _TURNS):
        points = np.concatenate([beside, _known(archives)])
        if limits is not None and (points[:, 1:] <= (limits.peak, limits.joules)).all(1).any():
            points = points[(points[:, 1:] <= (limits.peak, limits.joules)).all(1)]
        each = [gaps_of(archive, points) for archive in archives]
        gaps = [min(max(own, default=0.0), 1.0) for own in each]
        left = settings.most_work - sum(a.spent for a in archives)
        late = left == math.inf or any(a.by_clock for a in archives)
        mine = _widest(gaps, [k for k in range(len(gaps)) if k not in vain], settings.gap)
        if not mine or left <= 0 or late or INTERRUPTED in notes:
            break
        work = max(left / max(1, _TURNS - turn), min(left, needs[mine[0]]))
        mine = _affordable(mine, needs, work)
        wide = [weights[k] * gaps[k] for k in mine]
        more = max(0.0, work - sum(needs[k] for k in mine))
        found = search(
            [problems[k] for k in mine],
            limits,
            replace(settings, work=work),
            executor,
            tell,
            points,
            begun=[archives[k] for k in mine],
            weights=[needs[k] + more * w / sum(wide) for k, w in zip(mine, wide, strict=True)],
            kept=kept,
        )
        notes += found.notes
        for k, archive in zip(mine, found.archives, strict=True):
            archives[k].join(archive)
            if _sum(gaps_of(archives[k], points)) >= _VAIN * _sum(each[k]):
                vain.add(k)
    return notes


def _program(posed: PlanProblem) -> float:
    """Units of work that are enough to settle a problem within one pair of limits; none where it is
    too large for that."""
    from tapestry_egg.extract.search import exact

    return _ENOUGH * exact.units_below(posed.problem) if exact.small(posed.problem) else 0.0


def _widest(gaps: Sequence[float], some: Sequence[int], enough: float) -> list[int]:
    """Those of some problems whose gaps are near the widest of them, and more than is good enough;
    the widest first."""
    enough = max(enough, _WIDE * max((gaps[k] for k in some), default=0.0))
    return sorted((k for k in some if gaps[k] > enough), key=lambda k: -gaps[k])


def _affordable(mine: Sequence[int], needs: Sequence[float], work: float) -> list[int]:
    """The first of some problems, as far as the work has what all of them need."""
    needed = np.cumsum([needs[k] for k in mine])
    return [
        k for n, (k, sum_) in enumerate(zip(mine, needed, strict=True)) if not n or sum_ <= work
    ]


def gaps_of(archive: Archive, points: Floats) -> list[float]:
    """By which share each of some plans [plans, 3], of those that a front would show, may be slower
    than the best of a problem within its peak and joules."""
    from tapestry_egg.extract.search.settling import share

    corners = points[shown(points)].tolist()
    return [share(s, archive.bound(peak, joules)) for s, peak, joules in corners]


def _sum(gaps: Sequence[float]) -> float:
    """All of some gaps, the widest of which count no more than a plan twice as slow."""
    return sum(min(gap, 1.0) for gap in gaps)


def _known(archives: Sequence[Archive]) -> Floats:
    """Costs of the plans that a front of all archives would show."""
    return np.array([c.costs for a in archives for c in a.corners()]).reshape(-1, 3)


def ended_by_clock(settings: Settings, archives: Sequence[Archive]) -> tuple[str, ...]:
    """What a front says of a search that time ended before its work was done."""
    if not any(archive.by_clock for archive in archives):
        return ()
    from tapestry_egg.extract.search.settling import LONGEST

    ends = f"the time limit of {settings.most_seconds:.4g} s"
    if settings.most_seconds > LONGEST:
        ends += f", or of {LONGEST:.4g} s for one integer program,"
    if settings.patience < math.inf:
        ends += f", or {settings.patience:.4g} s without gain,"
    return (f"{ends} ended the search; another run may give another front",)


def search(
    problems: Sequence[PlanProblem],
    limits: Limits | None,
    settings: Settings,
    executor: Executor | None,
    tell: Progress,
    rivals: Floats | None = None,
    ends: bool = False,
    begun: Sequence[Archive | None] | None = None,
    weights: Sequence[float] | None = None,
    kept: SearchFile | None = None,
    take: Callable[[Searched], None] | None = None,
    proofs: bool = True,
) -> Searched:
    """Search all problems, side by side where processors allow; what was `begun` is gone on with,
    `weights` divide the work, and what is found is `kept`, and given to `take` before it is told:
    an interruption may come there. Without `proofs` it is plans that are wanted, and no bounds."""
    from tapestry_egg.extract.search.worker import search_all, so_far

    begin = time.perf_counter()

    def report(archives: Sequence[Archive]) -> None:
        spent = (time.perf_counter() - begin) / min(settings.most_work, settings.most_seconds)
        tell(Phase("extract", so_far(archives), min(0.99, spent)))
        if kept is not None:
            kept.note(each, archives, ended=False)

    each = [p.problem for p in problems]
    runs = 0 if kept is None or weights is not None else kept.runs
    effort = Effort(
        settings.prices,
        settings.steps,
        seconds=settings.most_seconds,
        gap=settings.gap,
        seed=settings.seed + runs * settings.seeds,
        patience=settings.patience,
        front=settings.front,
        work=settings.most_work,
        ends=ends,
        proofs=proofs,
        round=runs,
    )
    found = search_all(
        each,
        effort,
        limits,
        report,
        settings.workers,
        executor,
        settings.seeds,
        rivals,
        begun,
        weights,
    )
    if take is not None:
        take(found)
    if kept is not None:
        kept.note(each, found.archives, ended=True)
    words = "  ".join([so_far(found.archives), *found.notes])
    tell(Phase("extract", words, 1.0))
    return found


def known_before(kept: SearchFile | None, problems: Sequence[PlanProblem]) -> list[Archive]:
    """What earlier searches that are kept have found of problems."""
    found = [None if kept is None else kept.known(p.problem) for p in problems]
    return [Archive() if archive is None else archive for archive in found]


def begins(archive: Archive, limits: Limits | None, settings: Settings) -> Archive | None:
    """What a search goes on from: what is known of its problem; None where that is no plan that is
    asked for."""
    meant = any(limits is None or limits.hold(c) for c in archive.candidates)
    return archive if meant and settings.front else None


def for_traffic(problems: Sequence[PlanProblem], machine: Target) -> list[PlanProblem]:
    """The same rows for few bytes sent and few flops, as if launches and latencies were free."""
    from tapestry_egg.extract.problem.assemble import Weights, assemble

    found = []
    for choices, keeping in ((p.choices, p.keeping) for p in problems):
        link = machine.link(choices.mesh, tuple(range(len(choices.mesh.sizes))))
        weights = Weights(
            seconds=_TIE,
            wire_bytes=1.0 / link.bytes_per_second,
            flops=_EVEN / machine.rate("bfloat16", True),
        )
        found.append(assemble(choices, weights, keeping=keeping))
    return found
