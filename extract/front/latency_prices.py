"""Latency prices: at which mean of prices a network is known to take most, however merged.

Prices of chains and lines (`extract/problem/mergeable.py`) are best for one labelling each, and at
those of one another takes little: a bound is the least of all labellings at one mean of prices.
That is a game of two: one player has prices, the other labellings. Of the labellings that were met
its value is found by a linear program, prices that are best for their mixture joining it until none
raise it; the search at the mean that it ends with meets another labelling (Kelley's cutting planes,
half of the way from the mean that has proven most).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.mergeable import (
    Chains,
    Copies,
    Mergeable,
    Prices,
    best_prices,
    chain_of,
    copies_of,
    paid_for,
)
from tapestry_egg.extract.problem.problem import Floats, Ints

# So many prices join at most for each labelling that is met; those that raise the value by less
# than this share do not.
_RESPONSES, _RAISED = 6, 1e-4
# So far the next mean is from the one that has proven most, towards that of the program.
_STEP = 0.5
# Weights below this share are nothing: each price makes tables of its own.
_LEAST = 0.005


@dataclass
class LatencyPrices:
    """The labellings of one problem that were met, and the prices that join."""

    assembled: PlanProblem
    once: Once
    every: list[Prices] = field(default_factory=lambda: [Prices()])
    met: list[tuple[float, Copies]] = field(default_factory=list)
    value: float = np.inf  # no mean of prices proves more of the labellings that were met
    least: float = 0.0  # what the best one has proven
    _best: Floats = field(default_factory=lambda: np.ones(1))
    _last: Floats = field(default_factory=lambda: np.ones(1))
    _paid: dict[tuple[int, int], float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.mergeable = Mergeable(Columns(self.assembled.choices, self.once))

    def meet(self, rows: Ints, by_lines: bool) -> None:
        """Take in a labelling; if not by lines, with the prices along its chain."""
        copies = copies_of(self.assembled, rows, self.mergeable)
        alone = sum(c.seconds for own in copies.values() for c in own)
        seconds = self.assembled.problem.evaluate(rows)[0]
        self.met.append((seconds - alone, copies))
        if not by_lines:
            self.every.append(chain_of(self.assembled, copies, self.mergeable))

    def proven(self, seconds: float) -> None:
        """Take in what the mean that was given last has proven."""
        if seconds > self.least:
            self.least, self._best = seconds, self._last

    def along_chains(self) -> Chains:
        """The mean of prices along the chains of the labellings that were met; where none was, what
        bytes take alone."""
        chained = np.array([float(prices.chain is not None) for prices in self.every])
        if not chained.any():
            chained[:] = 1.0
        self._last = chained / chained.sum()
        return self._mean(self._last)

    def next(self) -> Chains:
        """The mean of prices that is to be tried next."""
        weights = self._balanced()
        before = np.zeros(len(weights))
        before[: len(self._best)] = self._best
        weights = _STEP * weights + (1.0 - _STEP) * before
        weights = np.where(weights < _LEAST, 0.0, weights)
        self._last = weights / weights.sum()
        return self._mean(self._last)

    def by_lines(self) -> Chains:
        """Of the mean of prices that has proven most those by lines; or what bytes take alone."""
        lines = [
            w if p.chain is None else 0.0 for w, p in zip(self._best, self.every, strict=False)
        ]
        weights = np.array(lines if any(lines) else [1.0])
        return self._mean(weights / weights.sum())

    def _mean(self, weights: Floats) -> Chains:
        mixed = zip(weights.tolist(), self.every, strict=False)
        return Chains(tuple((w, prices) for w, prices in mixed if w))

    def _balanced(self) -> Floats:
        """The weights of prices at which the least of the labellings met is most; prices that are
        best for the mixture of these join."""
        for k in range(_RESPONSES + 1):
            self.value, weights, mixture = _solved(self._table())
            some = [(w, copies) for w, (_, copies) in zip(mixture, self.met, strict=True)]
            prices = best_prices(self.assembled, [x for x in some if x[0] > _LEAST], self.mergeable)
            worth = [paid_for(copies, prices, self.mergeable) for _, copies in self.met]
            raised = float(mixture @ (np.array(worth) + [rest for rest, _ in self.met]))
            if k == _RESPONSES or raised <= self.value * (1.0 + _RAISED):
                break
            self.every.append(prices)
        return weights

    def _table(self) -> Floats:
        """[prices, labellings]: seconds."""
        for i, prices in enumerate(self.every):
            for j, (rest, copies) in enumerate(self.met):
                if (i, j) not in self._paid:
                    self._paid[i, j] = rest + paid_for(copies, prices, self.mergeable)
        found = np.empty((len(self.every), len(self.met)))
        for (i, j), seconds in self._paid.items():
            found[i, j] = seconds
        return found


def _solved(table: Floats) -> tuple[float, Floats, Floats]:
    """The value of a game [rows, columns], and how both players mix: rows for much, columns for
    little."""
    from scipy.optimize import linprog

    scale = float(np.abs(table).max(initial=0.0)) or 1.0
    rows, columns = table.shape
    found = linprog(
        np.append(np.zeros(rows), -1.0),
        A_ub=np.column_stack([-table.T / scale, np.ones(columns)]),
        b_ub=np.zeros(columns),
        A_eq=np.append(np.ones(rows), 0.0)[None],
        b_eq=[1.0],
        bounds=[(0.0, 1.0)] * rows + [(None, None)],
        method="highs",
    )
    weights = np.maximum(found.x[:rows], 0.0)
    mixture = np.maximum(-found.ineqlin.marginals, 0.0)
    return -found.fun * scale, weights / weights.sum(), mixture / mixture.sum()
