"""Rows that another row beats, against a comparison of every row with every other."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry_egg.extract.places.joined_ways import unbeaten
from tapestry_egg.extract.problem.problem import Floats, Ints


def compared(features: Floats, group: Ints) -> list[int]:
    """The rows that no other of their group beats, of equal ones the first."""
    kept = []
    for r, own in enumerate(features):
        others = [s for s in range(len(features)) if s != r and group[s] == group[r]]
        beaten = any(
            (features[s] <= own).all() and ((features[s] < own).any() or s < r) for s in others
        )
        if not beaten:
            kept.append(r)
    return kept


@pytest.mark.parametrize("seed", range(40))
def test_rows_stay_that_no_other_of_their_group_beats(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 60)), int(rng.integers(1, 20))
    features = rng.integers(0, 4, shape).astype(np.float64)
    features[rng.random(shape) < 0.1] = np.inf
    group = rng.integers(0, rng.integers(1, 8), len(features))
    assert unbeaten(features, group).tolist() == compared(features, group)
    one = np.zeros_like(group)
    assert unbeaten(features).tolist() == compared(features, one)


def test_of_no_rows_none_stays() -> None:
    assert not len(unbeaten(np.zeros((0, 3))))
