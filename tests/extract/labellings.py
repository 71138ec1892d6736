"""Labellings of one problem of several programs, each held against its own program's problem."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tapestry_egg.extract.places.programs import Patched, Ways
from tapestry_egg.extract.problem.assemble import PlanProblem


def agreeing(made: Patched, times: int) -> Iterator[tuple[Ways, PlanProblem, bool]]:
    """Labellings drawn at random, which cost the same in both: by which ways each computes places,
    its program's problem, and whether it is legal."""
    rng = np.random.default_rng(0)
    sizes = [len(v) for v in made.problem.variables]
    for _ in range(times):
        rows = rng.integers(0, sizes)
        for group in made.groups:  # what other ways have is absent
            way = int(group.way[rows[group.variable]])
            for other, members in enumerate(group.members):
                for v, row in members.values():
                    if row is None:
                        last = sizes[v] - 1
                        rows[v] = rng.integers(0, last) if other == way else last
        posed, own = made.own(rows)
        one, other = made.problem.evaluate(rows), posed.problem.evaluate(own)
        np.testing.assert_allclose(one[:2], other[:2], rtol=1e-9)
        assert one[2].max() == pytest.approx(other[2].max(), rel=1e-9)
        yield made.ways(rows), posed, bool(np.isfinite(one[0]))
