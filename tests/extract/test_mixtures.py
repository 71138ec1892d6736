"""Mixtures of labellings: their longest path, and what the prices that they give prove.

The seconds of every labelling are worked out by brute force: where all are added up, where
collectives run beside kernels, and where latencies count along chains alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np
import pytest

from tapestry_egg.extract.engine.archive import Limits, Prices
from tapestry_egg.extract.engine.mixtures import Mixture, Mixtures
from tapestry_egg.extract.engine.search import _toward
from tapestry_egg.extract.problem.latencies import Latencies
from tapestry_egg.extract.problem.timeline import Timeline
from tapestry_egg.work import Work
from tests.tiers import tiers

from .test_timeline import TIMES, brute_seconds, random_timeline

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
