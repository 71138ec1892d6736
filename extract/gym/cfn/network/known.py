"""What is known of a front of cost against a limit: answers, bounds, and where it may still be.

An answer that needs so much memory is one within every limit from there on. A bound that was proven
at prices of memory is one for every limit: it falls by the sum of the prices per unit (the
Lagrangian is linear in the limit). A bound that was proven otherwise holds for all smaller limits.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from dataclasses import dataclass, field

import numpy as np

from .network import Floats, Ints

# With more answers than so many, those are dropped without which little is missing.
_MANY = 512

# A limit between two answers is looked for among so many.
_CELLS = 24

# What float64 may have added to a bound, as a share of what the limit makes of it.
_ROUNDING = 2.0**-48


@dataclass(frozen=True, order=True)
class Answer:
    """Rows, the least limit that they keep, and their cost."""

    need: int
    value: float
    rows: Ints = field(compare=False)


@dataclass(frozen=True)
class Open:
    """A limit at which the front may be nearer to the origin than what is known, by a share."""

    limit: int
    epsilon: float
    after: int  # the answer's need that is known below


class Known:
    """Answers and bounds for limits from `low` to `top`, below which nothing fits."""

    def __init__(self, low: int, top: int) -> None:
        self.low, self.top = low, top
        self.answers: list[Answer] = []  # by rising need and falling value
        self.lines: list[tuple[float, float]] = []  # (bound at the limit `top`, fall per unit)
        self.steps: list[tuple[int, float]] = []  # (limit, bound there)
        self._grid = np.unique(np.linspace(low, top, 65)).astype(np.float64)
        self._at_grid = np.full(len(self._grid), -math.inf)

    def add(self, need: int, value: float, rows: Ints) -> bool:
        """Keep an answer, unless another is as good; says whether it was kept."""
        need = max(need, self.low)
        best = self.best(need)
        if best is not None and best.value <= value:
            return False
        self.answers = [a for a in self.answers if a.need < need or a.value < value]
        insort(self.answers, Answer(need, value, rows.astype(np.int32)))
        if len(self.answers) > _MANY:
            self.answers = self.thinned(_MANY // 2)
        return True

    def best(self, limit: int) -> Answer | None:
        """The best answer within a limit."""
        at = bisect_right(self.answers, limit, key=lambda a: a.need)
        return self.answers[at - 1] if at else None

    def line(self, limit: int, bound: float, slope: float) -> None:
        """Keep a bound that was proven for a limit at prices of this sum."""
        spread = slope * (self.top - self.low)
        at_top = bound - slope * (self.top - limit) - _ROUNDING * (abs(bound) + spread)
        along = at_top + slope * (self.top - self._grid)
        if not (along > self._at_grid).any():
            return
        self._at_grid = np.maximum(self._at_grid, along)
        self.lines.append((at_top, slope))
        if len(self.lines) > 2 * len(self._grid):
            a, b = np.array(self.lines).T
            best = (a[:, None] + b[:, None] * (self.top - self._grid)).argmax(axis=0)
            self.lines = [self.lines[k] for k in np.unique(best).tolist()]

    def step(self, limit: int, bound: float) -> None:
        """Keep a bound that was proven for a limit, whatever led to it."""
        if bound > self.bound(limit):
            self.steps.append((limit, bound))

    def bound(self, limit: int) -> float:
        """The best bound on answers within a limit."""
        return float(self._bounds(np.array([limit], dtype=np.int64))[0])

    def _bounds(self, limits: Ints) -> Floats:
        out = np.full(len(limits), -math.inf)
        if self.lines:
            a, b = np.array(self.lines).T
            out = (a + b * (self.top - limits)[:, None]).max(axis=1)
        for most, bound in self.steps:
            out = np.where(limits <= most, np.maximum(out, bound), out)
        return out

    def opens(self, step: float = 0.0) -> list[Open]:
        """Per answer, the limit before the next at which most may be missing; widest first.

        Values differ by `step` at least. An answer that needs more than this one, and less than the
        next, is dominated by a known one if its cost and its need grow by the share that is told.
        Before the first answer, one of infinite cost is thought of that needs `low`.
        """
        need = [a.need for a in self.answers]
        value = [a.value for a in self.answers]
        if not need or need[0] > self.low:
            need, value = [self.low, *need], [math.inf, *value]
        begins, values = np.array(need), np.array(value)[:, None]
        until = np.append(begins[1:], self.top + 1)
        at = np.linspace(begins, until, _CELLS + 1, axis=1).astype(np.int64)
        begin, end = at[:, :-1], at[:, 1:]
        bound = self._bounds(end.ravel() - 1).reshape(end.shape)
        share = np.full(begin.shape, math.inf)
        with np.errstate(divide="ignore", invalid="ignore"):
            for k in (0, 1, 2, 4, 8):  # the answer itself, and later ones
                rest = len(begins) - k
                if rest <= 0:
                    break
                more = np.where(bound[:rest] > 0, values[k:] / bound[:rest] - 1.0, math.inf)
                if k:
                    larger = begins[k:, None] / begin[:rest] - 1.0
                    more = np.maximum(more, np.where(begin[:rest] > 0, larger, math.inf))
                share[:rest] = np.minimum(share[:rest], more)
        closed = (bound > values - max(step, 1e-12)) | (bound == math.inf)
        share = np.where((begin >= end) | closed, 0.0, np.maximum(share, 0.0))
        widest = share.argmax(axis=1)
        found = [
            Open(int(end[k, w]) - 1, float(share[k, w]), need[k])
            for k, w in enumerate(widest.tolist())
            if share[k, w] > 0
        ]
        return sorted(found, key=lambda o: -o.epsilon)

    def thinned(self, most: int) -> list[Answer]:
        """At most so many of the answers: those without which most would be missing."""
        kept = list(self.answers)
        while len(kept) > max(most, 1):
            lost = [math.inf] + [
                min(_share(a.value, b.value), c.need / max(b.need, 1) - 1.0)
                for a, b, c in zip(kept, kept[1:], [*kept[2:], None], strict=False)
                if c is not None
            ]
            lost += [math.inf] * (len(kept) - len(lost))
            drop = max(1, (len(kept) - most) // 4)
            gone = set(sorted(range(len(kept)), key=lost.__getitem__)[:drop])
            kept = [a for k, a in enumerate(kept) if k not in gone]
        return kept


def _share(more: float, less: float) -> float:
    """By what share the first is above the second."""
    return (more - less) / max(abs(less), 1e-300)
