"""Steps in which collectives run beside kernels: their seconds, and bounds on them, by brute force.

Every labelling of small random problems is tried, and its seconds are worked out here.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.engine.transport import (
    problem_arrays,
)
from tapestry_egg.extract.problem.problem import Pair, Problem, Span, Use, Variable
from tapestry_egg.extract.problem.timeline import Timeline
from tests.extract.random_problems import problem_from

TIMES = 4


def brute_seconds(lengths: np.ndarray, timeline: Timeline) -> float:
    """A unit runs when all before it have, and when the links have had the time for all that was
    issued since any earlier place and is needed by now."""
    sent = list(zip(timeline.issue, timeline.arrive, lengths[timeline.units :], strict=True))
    ready, clock = [], 0.0
    for place in range(timeline.units + 1):
        ready.append(clock)
        for begin, when in enumerate(ready):
            within = sum(d for i, a, d in sent if i >= begin and a <= place)
            clock = max(clock, when + within)
        if place < timeline.units:
            clock += lengths[place]
    return (1 - timeline.slowdown) * clock + timeline.slowdown * float(lengths.sum())


def random_timeline(rng: np.random.Generator, units: int, events: int) -> Timeline:
    issue = np.sort(rng.integers(0, units + 1, events))
    arrive = np.array([rng.integers(i, units + 1) for i in issue], dtype=np.int64)
    return Timeline(units, issue, arrive, float(rng.choice([0.0, 0.13])))


def random_problem(rng: np.random.Generator) -> Problem:
    """A chain of variables, some with more pairs; each adds to events at random."""
    timeline = random_timeline(rng, 6, 5)
    sizes = rng.integers(2, 4, 6).tolist()

    def spans(shape: tuple[int, ...], events: list[int]) -> tuple[Span, ...]:
        amounts = [rng.integers(0, 6, shape) * rng.integers(0, 2, shape) * 1.0 for _ in events]
        return tuple(Span(e, a) for e, a in zip(events, amounts, strict=True))

    def part(shape: tuple[int, ...], events: list[int]) -> tuple[tuple[Span, ...], np.ndarray]:
        made = spans(shape, events)
        return made, np.sum([x.amount for x in made], axis=0)

    variables, pairs = [], []
    for i, size in enumerate(sizes):
        made, seconds = part((size,), [i, 6 + int(rng.integers(5))])
        start = int(rng.integers(TIMES))
        use = Use(start, int(rng.integers(start + 1, TIMES + 1)), rng.integers(1, 9, size) * 1.0)
        variables.append(Variable(f"v{i}", seconds, np.zeros(size), (use,), made))
    for a, b in [(i, i + 1) for i in range(5)] + [(0, 3), (2, 5)]:
        shape = (sizes[a], sizes[b])
        made, seconds = part(shape, [6 + int(k) for k in rng.integers(0, 5, 2)])
        seconds = np.where(rng.random(shape) < 0.1, np.inf, seconds)
        made = tuple(Span(x.event, np.where(np.isinf(seconds), 0.0, x.amount)) for x in made)
        labels = np.arange(sizes[a]), np.arange(sizes[b])
        pairs.append(Pair(a, b, *labels, seconds, np.zeros(shape), (), made))
    return Problem(tuple(variables), tuple(pairs), TIMES, timeline)


def every_labelling(problem: Problem) -> list[tuple[float, float]]:
    """(seconds, peak) of all that is legal."""
    found = []
    timeline = problem.timeline
    assert timeline is not None
    for rows in product(*(range(len(v)) for v in problem.variables)):
        lengths, profile = np.zeros(len(timeline)), np.zeros(problem.times)
        legal = True
        for v, r in zip(problem.variables, rows, strict=True):
            for s in v.spans:
                lengths[s.event] += s.amount[r]
            for u in v.uses:
                profile[u.start : u.end] += u.amount[r]
        for p in problem.pairs:
            at = p.label_a[rows[p.a]], p.label_b[rows[p.b]]
            legal &= bool(np.isfinite(p.seconds[at]))
            for s in p.spans:
                lengths[s.event] += s.amount[at]
        if legal:
            found.append((brute_seconds(lengths, timeline), float(profile.max())))
    return found


def test_seconds_are_a_longest_path_and_shares_add_up_to_them() -> None:
    """The sum of all seconds comes first, and counts for nothing."""
    rng = np.random.default_rng(1)
    for _ in range(300):
        timeline = random_timeline(rng, int(rng.integers(1, 9)), int(rng.integers(0, 9)))
        events = rng.random(len(timeline)) * (rng.random(len(timeline)) < 0.6)
        lengths = np.append(rng.random(), events)
        seconds = timeline.seconds(lengths)
        assert seconds == pytest.approx(brute_seconds(events, timeline))
        assert float(timeline.shares(lengths) @ lengths) == pytest.approx(seconds)
        for other in (timeline.evenly(), timeline.shares(rng.random(1 + len(timeline)))):
            assert float(other @ lengths) <= seconds * (1 + 1e-12) + 1e-15
            assert (other >= 0).all() and (other <= 1).all() and other[0] == 0.0


@pytest.mark.slow
def test_bounds_hold_and_the_best_is_found(problems: int = 60) -> None:
    rng = np.random.default_rng(7)
    limits = found = reached = 0
    for _ in range(problems):
        problem = random_problem(rng)
        every = every_labelling(problem)
        if not every:
            continue
        (archive,) = race([problem], Effort(work=0.3, gap=1e-4))
        for limit in sorted({peak for _, peak in every})[::3]:
            best = min((s for s, peak in every if peak <= limit), default=np.inf)
            bound = archive.bound(limit, np.inf)
            assert bound <= best * (1 + 1e-6) + 1e-12
            fastest = archive.best(limit)
            assert fastest is None or fastest.seconds >= best * (1 - 1e-9)
            limits += 1
            found += fastest is not None and fastest.seconds <= best * (1 + 1e-6)
            reached += bound >= best * (1 - 1e-3)
    assert limits > 3 * problems
    # Most bounds meet the best there is, within this little work.
    assert reached >= 0.4 * limits
    assert found >= 0.9 * limits


def test_a_problem_with_a_timeline_travels() -> None:
    problem = random_problem(np.random.default_rng(3))
    other = problem_from(problem_arrays(problem))
    rows = np.zeros(len(problem.variables), dtype=np.int64)
    assert other.timeline is not None and problem.timeline is not None
    assert other.lengths(rows).tolist() == problem.lengths(rows).tolist()
    assert other.evaluate(rows)[0] == problem.evaluate(rows)[0]
