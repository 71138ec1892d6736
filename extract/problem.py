"""The extraction problem: choose one row per variable; costs on variables and on pairs.

A weighted pairwise model (a cost function network) with several additive objectives and a memory
profile over time. Rows of a variable are grouped by *label* per pair, so that a pair's table is as
small as what the pair can tell apart. A finite `seconds` table entry is a legal combination.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Use:
    """Bytes that each row (or pair of labels) occupies from time `start` up to before `end`."""

    start: int
    end: int
    amount: Floats


@dataclass(frozen=True)
class Variable:
    """One choice to make; all arrays have one entry per row."""

    name: str
    seconds: Floats
    joules: Floats
    uses: tuple[Use, ...] = ()

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Pair:
    """Costs between two variables: tables over (label of a's row, label of b's row)."""

    a: int
    b: int
    label_a: Ints  # row of a -> label
    label_b: Ints
    seconds: Floats  # [labels of a, labels of b]; inf forbids
    joules: Floats
    uses: tuple[Use, ...] = ()  # amounts shaped like `seconds`


@dataclass(frozen=True)
class Problem:
    """Variables, pairs, and the memory that is occupied whatever is chosen."""

    variables: tuple[Variable, ...]
    pairs: tuple[Pair, ...]
    times: int
    constant: Floats = field(default_factory=lambda: np.zeros(0))  # bytes at each time

    def evaluate(self, rows: Ints) -> tuple[float, float, Floats]:
        """(seconds, joules, bytes at each time) of one row per variable."""
        seconds = joules = 0.0
        steps = np.zeros(self.times + 1)
        for v, r in zip(self.variables, rows, strict=True):
            seconds += v.seconds[r]
            joules += v.joules[r]
            for use in v.uses:
                steps[use.start] += use.amount[r]
                steps[use.end] -= use.amount[r]
        for p in self.pairs:
            i, j = p.label_a[rows[p.a]], p.label_b[rows[p.b]]
            seconds += p.seconds[i, j]
            joules += p.joules[i, j]
            for use in p.uses:
                steps[use.start] += use.amount[i, j]
                steps[use.end] -= use.amount[i, j]
        profile = np.cumsum(steps)[:-1] + self.constant
        return float(seconds), float(joules), profile


def label(keys: list[object]) -> tuple[Ints, list[object]]:
    """Number equal keys: (number per key, the distinct keys in order)."""
    numbers: dict[object, int] = {}
    out = np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)
    return out, list(numbers)
