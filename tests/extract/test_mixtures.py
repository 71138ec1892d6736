"""Mixtures of labellings: their longest path, and what the prices that they give prove.

The seconds of every labelling are worked out by brute force, place by place.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from tapestry_egg.extract.search.balance import Mixture, Mixtures, between
from tapestry_egg.work import Work

from .test_timeline import TIMES, brute_seconds, random_timeline

LABELLINGS = 12


def drawn(rng: np.random.Generator) -> tuple[Mixtures, np.ndarray, np.ndarray, np.ndarray]:
    """Labellings of one timeline at random: lengths, profiles, joules."""
    timeline = random_timeline(rng, int(rng.integers(2, 6)), int(rng.integers(1, 6)))
    lengths = rng.random((LABELLINGS, len(timeline))) * (rng.random(len(timeline)) < 0.8)
    profiles = rng.integers(1, 9, (LABELLINGS, TIMES)) * 1.0
    joules = rng.integers(1, 9, LABELLINGS) * 1.0
    mixtures = Mixtures(timeline, Work())
    for k, (length, profile) in enumerate(zip(lengths, profiles, strict=True)):
        mixtures.add(np.array([k]), length, profile, float(joules[k]))
    return mixtures, lengths, profiles, joules


def settled(mixtures: Mixtures, peak: float, joules: float) -> Mixture | None:
    """The mixture once no path and no time is missing in its program."""
    found = mixtures.shortest(peak, joules)
    for _ in range(20):
        found = mixtures.shortest(peak, joules)
    return found


@pytest.mark.parametrize("seed", range(8))
def test_prices_of_a_mixture_prove_its_seconds_and_no_more(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(4):
        mixtures, lengths, profiles, joules = drawn(rng)
        most = float(rng.choice([np.inf, np.median(joules)]))
        peak = float(rng.choice([np.inf, np.median(profiles.max(axis=1))]))
        mixture = settled(mixtures, peak, most)
        brute = np.array([brute_seconds(x, mixtures.timeline) for x in lengths])
        within = (profiles.max(axis=1) <= peak) & (joules <= most)
        if mixture is None:
            assert not within.any()
            continue
        prices = mixture.prices
        assert prices.events is not None
        paid = lengths @ prices.events + profiles @ prices.bytes + joules * prices.joule
        limit = peak * prices.bytes.sum() if peak < np.inf else 0.0
        limit += most * prices.joule if most < np.inf else 0.0
        proven = paid.min() - limit
        # What is proven of all labellings is true of each within the limits, and meets the mixture.
        assert (brute[within] >= proven * (1 - 1e-9)).all()
        assert proven == pytest.approx(mixture.seconds, rel=1e-5)
        # Prices between these and others prove something true, too.
        other = mixtures.shortest(np.inf, np.inf)
        assert other is not None
        middle = between(prices, other.prices)
        assert middle.events is not None
        paid = lengths @ middle.events + profiles @ middle.bytes + joules * middle.joule
        limit = peak * middle.bytes.sum() if peak < np.inf else 0.0
        limit += most * middle.joule if most < np.inf else 0.0
        assert (brute[within] >= (paid.min() - limit) * (1 - 1e-9)).all()


def test_no_mixture_of_two_is_shorter() -> None:
    rng = np.random.default_rng(3)
    for _ in range(6):
        mixtures, lengths, profiles, _ = drawn(rng)
        peak = float(rng.choice([np.inf, np.median(profiles.max(axis=1))]))
        mixture = settled(mixtures, peak, np.inf)
        assert mixture is not None
        for i, j in combinations(range(LABELLINGS), 2):
            for share in (0.0, 0.25, 0.5, 0.75, 1.0):
                bytes_ = share * profiles[i] + (1 - share) * profiles[j]
                if bytes_.max() <= peak:
                    mixed = share * lengths[i] + (1 - share) * lengths[j]
                    assert brute_seconds(mixed, mixtures.timeline) >= mixture.seconds * (1 - 1e-6)


def test_what_mattered_is_remembered() -> None:
    rng = np.random.default_rng(5)
    mixtures, lengths, profiles, _ = drawn(rng)
    mixture = settled(mixtures, np.inf, np.inf)
    assert mixture is not None
    for k in range(300):
        slow = lengths.max(axis=0) + rng.random(lengths.shape[1])
        mixtures.add(np.array([100 + k]), slow, profiles[0], 1.0)
    again = mixtures.shortest(np.inf, np.inf)
    assert again is not None and again.seconds == pytest.approx(mixture.seconds)
    assert {int(x[0]) for x in again.parts} == {int(x[0]) for x in mixture.parts}
    assert len(mixtures.known) <= 120
