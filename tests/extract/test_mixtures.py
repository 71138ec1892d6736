"""Steps in which collectives run beside kernels: their seconds, and bounds on them, by brute force.

Every labelling of small random problems is tried, and its seconds are worked out here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise, product

import numpy as np
import pytest

from tapestry_egg.extract.engine.archive import Limits, Prices
from tapestry_egg.extract.engine.mixtures import Mixture, Mixtures
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.engine.search import _toward
from tapestry_egg.extract.engine.transport import problem_arrays
from tapestry_egg.extract.problem.latencies import Latencies
from tapestry_egg.extract.problem.problem import Pair, Problem, Span, Use, Variable
from tapestry_egg.extract.problem.timeline import Timeline
from tapestry_egg.work import Work
from tests.extract.random_problems import problem_from
from tests.tiers import tiers

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


# Mixtures of labellings: their longest path, and what the prices that they give prove. The
# seconds of every labelling are worked out by brute force: where all are added up, where
# collectives run beside kernels, and where latencies count along chains alone.


LABELLINGS = 12
KINDS = ("sum", "beside", "merged")


def brute_chains(lengths: np.ndarray, latencies: Latencies) -> float:
    """All seconds but latencies, and those of the longest chain, of all there are."""
    most = 0.0
    ends = list(zip(latencies.maker, latencies.reader, lengths[2:], strict=True))
    for n in range(len(ends) + 1):
        for chain in combinations(ends, n):  # readers rise, and so do those of a chain
            if all(a[1] == b[0] for a, b in pairwise(chain)):
                most = max(most, sum(x for *_, x in chain))
    return float(lengths[0] - lengths[1] + most)


@dataclass
class Drawn:
    """Labellings at random: the seconds of their sum and events, bytes at each time, and joules."""

    kind: str
    rng: np.random.Generator

    def __post_init__(self) -> None:
        rng = self.rng
        self.longest: Timeline | Latencies | None = None
        events = np.zeros((LABELLINGS, 0))
        if self.kind == "beside":
            self.longest = random_timeline(rng, int(rng.integers(2, 6)), int(rng.integers(1, 6)))
            events = rng.random((LABELLINGS, len(self.longest)))
            events *= rng.random(len(self.longest)) < 0.8
        if self.kind == "merged":
            ends = np.sort(rng.integers(0, 5, (int(rng.integers(1, 7)), 2)), axis=1)
            ends[:, 1] += 1
            ends = ends[np.lexsort(ends.T[::-1][[0]])]
            self.longest = Latencies(ends[:, 0].copy(), ends[:, 1].copy(), 6)
            each = rng.random((LABELLINGS, len(ends))) * (rng.random(len(ends)) < 0.8)
            events = np.column_stack((each.sum(axis=1), each))
        own = events[:, 0] if self.kind == "merged" else events.sum(axis=1)
        self.lengths = np.column_stack((rng.random(LABELLINGS) + own, events))
        self.profiles = rng.integers(1, 9, (LABELLINGS, TIMES)) * 1.0
        self.joules = rng.integers(1, 9, LABELLINGS) * 1.0
        self.mixtures = Mixtures(self.longest)
        for k in range(LABELLINGS):
            self.add(k, self.lengths[k])

    def add(self, k: int, lengths: np.ndarray) -> None:
        at = k % LABELLINGS
        rows = np.array([k])
        self.mixtures.add(0, rows, lengths, self.profiles[at], float(self.joules[at]))

    def seconds(self, lengths: np.ndarray) -> float:
        if isinstance(self.longest, Timeline):
            return brute_seconds(lengths[1:], self.longest)
        if isinstance(self.longest, Latencies):
            return brute_chains(lengths, self.longest)
        return float(lengths[0])

    def shortest(self, limits: Limits, times: int = 20) -> Mixture:
        """The mixture once no path and no time is missing in its program."""
        for _ in range(times):
            found = self.mixtures.shortest(0, limits, Work())
        assert found is not None
        return found

    def proven(self, prices: Prices, limits: Limits) -> float:
        """What prices prove of all labellings within limits."""
        events = np.ones(1) if prices.events is None else prices.events
        paid = self.lengths @ events + self.profiles @ prices.bytes + self.joules * prices.joule
        value = float(paid.min())
        if limits.peak < np.inf:
            value -= limits.peak * float(prices.bytes.sum())
        return value - limits.joules * prices.joule if limits.joules < np.inf else value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", tiers(range(8), usual=4, fast=4))
def test_prices_of_a_mixture_prove_its_seconds_and_no_more(seed: int, kind: str) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        drawn = Drawn(kind, rng)
        most = float(rng.choice([np.inf, np.median(drawn.joules)]))
        peak = float(rng.choice([np.inf, np.median(drawn.profiles.max(axis=1))]))
        limits = Limits(peak, most)
        mixture = drawn.shortest(limits)
        brute = np.array([drawn.seconds(x) for x in drawn.lengths])
        within = (drawn.profiles.max(axis=1) <= peak) & (drawn.joules <= most)
        proven = drawn.proven(mixture.prices, limits)
        # What is proven of all labellings is true of each within the limits, and meets the mixture.
        assert (brute[within] >= proven * (1 - 1e-9)).all()
        if within.any():
            assert proven == pytest.approx(mixture.seconds, rel=1e-5)
        # Prices between these and others prove something true, too.
        middle = _toward(mixture.prices, drawn.shortest(Limits()).prices, 0.5)
        assert (brute[within] >= drawn.proven(middle, limits) * (1 - 1e-9)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_mixture_of_two_is_shorter(kind: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(6):
        drawn = Drawn(kind, rng)
        peak = float(rng.choice([np.inf, np.median(drawn.profiles.max(axis=1))]))
        mixture = drawn.shortest(Limits(peak))
        for i, j in combinations(range(LABELLINGS), 2):
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                held = share * drawn.profiles[i] + (1 - share) * drawn.profiles[j]
                if held.max() <= peak:
                    mixed = share * drawn.lengths[i] + (1 - share) * drawn.lengths[j]
                    assert drawn.seconds(mixed) >= mixture.seconds * (1 - 1e-6)


def test_what_mattered_is_remembered() -> None:
    drawn = Drawn("beside", np.random.default_rng(5))
    mixture = drawn.shortest(Limits())
    slow = drawn.lengths.max(axis=0)
    for k in range(300):
        drawn.add(LABELLINGS * (k + 9), slow + drawn.rng.random(len(slow)))
    again = drawn.shortest(Limits(), 1)
    assert again.seconds == pytest.approx(mixture.seconds)
    assert {int(x[0]) for x in again.parts} == {int(x[0]) for x in mixture.parts}
    assert len(drawn.mixtures.known) <= 120


def test_networks_share_what_they_know_and_take_only_their_own_parts() -> None:
    """A labelling of another network balances prices, but is none of this one."""
    drawn = Drawn("sum", np.random.default_rng(1))
    fast = np.full(1, 1e-3)
    drawn.mixtures.add(1, np.array([99]), fast, drawn.profiles[0], 1.0)
    assert drawn.shortest(Limits()).seconds == pytest.approx(1e-3)
    assert drawn.shortest(Limits()).parts == ()
    other = drawn.mixtures.shortest(1, Limits(), Work())
    assert other is not None and [int(x[0]) for x in other.parts] == [99]


def test_nothing_known_or_allowed_has_no_mixture() -> None:
    assert Mixtures(None).shortest(0, Limits(), Work()) is None
    drawn = Drawn("sum", np.random.default_rng(1))
    for limits in (Limits(0.0), Limits(1.0, 0.0)):
        assert drawn.mixtures.shortest(0, limits, Work()) is None
