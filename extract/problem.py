"""The extraction problem: choose one row per variable; costs on variables and on pairs.

A weighted pairwise model (a cost function network) with several additive objectives and a memory
profile over time. Rows of a variable are grouped by *label* per pair, so that a pair's table is as
small as what the pair can tell apart. A finite `seconds` table entry is a legal combination.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

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
        f = self._flat
        at = f.row_start + rows
        pair = f.pair_start + f.label_a[f.a_start + rows[f.pair_a]] * f.width
        pair += f.label_b[f.b_start + rows[f.pair_b]]
        seconds = f.seconds[at].sum() + f.pair_seconds[pair].sum()
        joules = f.joules[at].sum() + f.pair_joules[pair].sum()
        own = f.use_amount[f.use_start + rows[f.use_of]]
        shared = f.pair_use_amount[f.pair_use_start + (pair - f.pair_start)[f.pair_use_of]]
        steps = np.bincount(f.begin, np.concatenate((own, shared)), self.times + 1)
        steps -= np.bincount(f.stop, np.concatenate((own, shared)), self.times + 1)
        profile = np.cumsum(steps)[: self.times] + self.constant
        return float(seconds), float(joules), profile

    @cached_property
    def _flat(self) -> _Flat:
        return _Flat(self)


class _Flat:
    """All tables of a problem end to end, so that one labelling is evaluated by a few gathers."""

    def __init__(self, problem: Problem) -> None:
        variables, pairs = problem.variables, problem.pairs
        self.seconds = _joined([v.seconds for v in variables])
        self.joules = _joined([v.joules for v in variables])
        self.row_start = _starts([len(v) for v in variables])
        self.pair_a = np.array([p.a for p in pairs], dtype=np.int64)
        self.pair_b = np.array([p.b for p in pairs], dtype=np.int64)
        self.label_a = _joined([p.label_a for p in pairs]).astype(np.int64)
        self.label_b = _joined([p.label_b for p in pairs]).astype(np.int64)
        self.a_start = _starts([len(p.label_a) for p in pairs])
        self.b_start = _starts([len(p.label_b) for p in pairs])
        self.width = np.array([p.seconds.shape[1] for p in pairs], dtype=np.int64)
        self.pair_seconds = _joined([p.seconds.ravel() for p in pairs])
        self.pair_joules = _joined([p.joules.ravel() for p in pairs])
        self.pair_start = _starts([p.seconds.size for p in pairs])
        own = [(i, u) for i, v in enumerate(variables) for u in v.uses]
        shared = [(i, u) for i, p in enumerate(pairs) for u in p.uses]
        self.use_of = np.array([i for i, _ in own], dtype=np.int64)
        self.use_amount = _joined([u.amount for _, u in own])
        self.use_start = _starts([u.amount.size for _, u in own])
        self.pair_use_of = np.array([i for i, _ in shared], dtype=np.int64)
        self.pair_use_amount = _joined([u.amount.ravel() for _, u in shared])
        self.pair_use_start = _starts([u.amount.size for _, u in shared])
        both = [u for _, u in (*own, *shared)]
        self.begin = np.array([u.start for u in both], dtype=np.int64)
        self.stop = np.array([u.end for u in both], dtype=np.int64)


def _joined(parts: Sequence[NDArray[Any]]) -> NDArray[Any]:
    return np.concatenate(parts) if parts else np.zeros(0)


def _starts(sizes: Sequence[int]) -> Ints:
    return np.concatenate(([0], np.cumsum(sizes)))[:-1].astype(np.int64)


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
        at = [np.ix_([k[i] for k in keys_a], [k[i] for k in keys_b]) for i in range(len(turned))]
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
        p.b,
        p.a,
        p.label_b,
        p.label_a,
        p.seconds.T,
        p.joules.T,
        tuple(Use(u.start, u.end, u.amount.T) for u in p.uses),
    )
