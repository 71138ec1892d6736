"""The extraction problem: choose one row per variable; costs on variables and on pairs.

A weighted pairwise model (a cost function network) with several additive objectives and a memory
profile over time. Rows of a variable are grouped by *label* per pair, so that a pair's table is as
small as what the pair can tell apart. A finite `seconds` table entry is a legal combination.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
K = TypeVar("K", bound=Hashable)


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


def label(keys: Sequence[K]) -> tuple[Ints, list[K]]:
    """Number equal keys: (number per key, the distinct keys in order)."""
    numbers: dict[K, int] = {}
    out = np.array([numbers.setdefault(k, len(numbers)) for k in keys], dtype=np.int64)
    return out, list(numbers)


def merge_parallel(pairs: Sequence[Pair]) -> tuple[Pair, ...]:
    """One pair per two variables: parallel pairs become a table over combinations of labels."""
    groups: dict[tuple[int, int], list[Pair]] = {}
    for p in pairs:
        groups.setdefault((min(p.a, p.b), max(p.a, p.b)), []).append(p)
    merged = []
    for (a, b), group in groups.items():
        if len(group) == 1:
            merged.append(group[0])
            continue
        turned = [p if p.a == a else _transposed(p) for p in group]
        label_a, keys_a = label(list(zip(*(p.label_a.tolist() for p in turned), strict=True)))
        label_b, keys_b = label(list(zip(*(p.label_b.tolist() for p in turned), strict=True)))
        at = [
            np.ix_([k[i] for k in keys_a], [k[i] for k in keys_b]) for i in range(len(turned))
        ]
        uses = [
            Use(use.start, use.end, use.amount[ix])
            for p, ix in zip(turned, at, strict=True)
            for use in p.uses
        ]
        merged.append(
            Pair(
                a,
                b,
                label_a,
                label_b,
                np.sum([p.seconds[ix] for p, ix in zip(turned, at, strict=True)], axis=0),
                np.sum([p.joules[ix] for p, ix in zip(turned, at, strict=True)], axis=0),
                tuple(uses),
            )
        )
    return tuple(merged)


def _transposed(p: Pair) -> Pair:
    return Pair(
        p.b, p.a, p.label_b, p.label_a, p.seconds.T, p.joules.T,
        tuple(Use(u.start, u.end, u.amount.T) for u in p.uses),
    )
