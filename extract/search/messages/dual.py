"""Dual bounds of the extraction problem by sequential tree-reweighted message passing.

For given prices (joules in seconds, bytes at each time in seconds) the priced problem is an
ordinary pairwise model. Messages reparametrise it; every sweep yields a lower bound on its optimum
(Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", 2006) and a
labelling by sequential decoding, which `extract/search/elimination.py` improves. A bound at given
prices bounds the constrained problem at *any* limits:
seconds ≥ D − Σ_t price_t · peak − price_J · joules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Variable
from tapestry_egg.products import dot
from tapestry_egg.work import Work

from .batches import Batch, Side, batches, picked
from .folding import Folding
from .leaves import Leaves
from .pricing import Tables
from .sweeps import State, Sweeps

# Relative error of a bound, a sum of some thousand terms of a sweep, twice over.
_ROUNDING = 1e-12

# Calls per variable and pair that it takes to set up message passing, and those per batch and slot
# of a sweep, and per slot that gives messages, where each array is gathered by a call of its own:
# `sweeps.py` takes about half of them.
SET_UP, _PER_BATCH, _PER_SLOT, _PER_MESSAGE = 30, 6, 3, 10

Messages = Floats  # all of them, one after the other (`sweeps.State`)


@dataclass(frozen=True)
class Prices:
    """What a joule and a byte at each time cost, in seconds, and what a second does: nothing where
    only bytes count. `events` are the shares of a second of each event of the timeline, where there
    is one."""

    joule: float
    bytes: Floats  # [times]
    second: float = 1.0
    events: Floats | None = None  # [events]


@dataclass(frozen=True)
class Cut:
    """One valid inequality: seconds ≥ value − bytes_price·peak − joule_price·joules.

    It holds for plans whose peak is at most `peak` and whose joules are at most `joules`; an
    infinite value says that there are none.
    """

    value: float
    bytes_price: float
    joule_price: float
    peak: float = float("inf")
    joules: float = float("inf")

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """What it is made of, in the order above."""
        return self.value, self.bytes_price, self.joule_price, self.peak, self.joules

    def at(self, peak: float, joules: float) -> float:
        """The bound on seconds of any plan within these limits."""
        if peak > self.peak or joules > self.joules:
            return 0.0
        if self.value == np.inf:
            return np.inf
        taken = self.bytes_price * peak if self.bytes_price else 0.0
        taken += self.joule_price * joules if self.joule_price else 0.0
        # At very high prices two large numbers are subtracted: what rounding may have added goes.
        return self.value - taken - _ROUNDING * (abs(self.value) + taken)

    @property
    def least_peak(self) -> float:
        """Bytes that every peak has at least, of an inequality in which seconds cost nothing."""
        return self.value * (1 - _ROUNDING) / self.bytes_price


def bounds_at(cuts: Floats, peak: float, joules: float) -> Floats:
    """`Cut.at` of many, by their numbers: [cuts, 5] to [cuts]."""
    value, byte, joule, most_bytes, most_joules = cuts.T
    taken = np.multiply(byte, peak, out=np.zeros(len(cuts)), where=byte != 0.0)
    taken += np.multiply(joule, joules, out=np.zeros(len(cuts)), where=joule != 0.0)
    with np.errstate(invalid="ignore"):  # infinite values
        found = value - taken - _ROUNDING * (np.abs(value) + taken)
    found[value == np.inf] = np.inf
    found[(peak > most_bytes) | (joules > most_joules)] = 0.0
    return found


def _sides(pair: Pair) -> tuple[Side, Side]:
    a, b = pair.seconds.shape
    return Side(pair.label_a, a), Side(pair.label_b, b)


class Dual:
    """Message state over one problem; prices may change between sweeps, messages stay warm.

    What is done is added to `work`.
    """

    def __init__(self, problem: Problem, work: Work | None = None) -> None:
        self.problem = problem
        self.work = work or Work()
        n = len(problem.variables)
        self.tables = Tables(problem.pairs)
        self.sides = [_sides(problem.pairs[k.members[0]]) for k in self.tables.kinds]
        self.rows = Tables(problem.variables)
        self.row_start = self.rows.start
        self.leaves = Leaves(problem, self.tables, self.sides, self.row_start)
        self.core = np.array([i for i in range(n) if i not in self.leaves.folded], dtype=np.int64)
        self.edges = [
            k
            for k, p in enumerate(problem.pairs)
            if p.a not in self.leaves.folded and p.b not in self.leaves.folded
        ]  # pairs of the core
        self.batches = batches(problem, self.core, self.edges, self.tables)
        parts: list[Variable | Pair] = [*problem.variables, *problem.pairs]
        once = Once()

        def most(amounts: Floats) -> float:
            return once(lambda: float(amounts[np.isfinite(amounts)].max(initial=0.0)), amounts)

        self.most_seconds = sum(most(p.seconds) for p in parts)
        self.most_joules = sum(most(p.joules) for p in parts)
        uses = [(u.start, u.end, most(u.amount)) for p in parts for u in p.uses]
        self.most_bytes = np.array(uses).reshape(-1, 3)
        self.state = State(self.rows.flat.size, self.tables)
        self.costs = self.state.costs  # of all rows, leaves folded in
        self.folding = Folding(problem, self.edges, self.batches, self.tables)
        self.sweeps = self._sweeps(self.batches)
        self.folded = self._sweeps(self.folding.batches)
        self.beliefs = [np.zeros(at.shape) for at in self.sweeps.rows_of]
        self.work.add(SET_UP * (n + len(problem.pairs)), 0)
        self._sweep_work = self._work_of(self.batches)
        self._rehearsal_work = self._work_of(self.folding.batches)
        self._price_work = self._work_of_prices()
        self.price(Prices(0.0, np.zeros(problem.times)))

    def _sweeps(self, batches: Sequence[Batch]) -> Sweeps:
        """Sweeps through batches, whose rows lie one after the other."""
        rows_of = [
            self.row_start[b.members, None] + np.arange(len(self.problem.variables[b.members[0]]))
            for b in batches
        ]
        return Sweeps(batches, rows_of, self.state, self.tables, self.sides)

    def _work_of(self, batches: Sequence[Batch]) -> tuple[int, int]:
        """Calls and entries of a pass both ways."""
        calls = entries = 0
        for b in batches:
            rows = len(b.members) * len(self.problem.variables[b.members[0]])
            slots = len(b.slots)
            calls += 2 * (_PER_BATCH + _PER_SLOT * slots) + _PER_MESSAGE * slots
            entries += rows * (8 + 6 * slots)
            for s in b.slots:
                entries += 3 * len(b.members) * self.tables.kinds[s.kind].size
        return calls, entries

    def _work_of_prices(self) -> tuple[int, int]:
        """Calls and entries of setting prices."""
        kinds = [*self.rows.kinds, *self.tables.kinds]
        leaves = len(self.leaves.first) + len(self.leaves.groups)
        entries = sum(len(k.members) * k.size * len(k.amounts) for k in kinds)
        return 8 * len(kinds) + 12 * leaves, entries + self.tables.flat.size

    def price(self, prices: Prices) -> None:
        """Set the prices; costs of rows and pairs follow."""
        self.prices = prices
        total = np.concatenate(([0.0], np.cumsum(prices.bytes)))
        start, end = self.most_bytes[:, :2].astype(np.int64).T
        most = prices.second * self.most_seconds + prices.joule * self.most_joules
        most += dot(total[end] - total[start], self.most_bytes[:, 2])
        # More than any legal labelling costs at these prices, so that none that is not legal pays.
        self.forbidden = 4.0 * most + 1e-6
        events = None
        if self.problem.timeline is not None and prices.second:
            shares = self.problem.timeline.evenly() if prices.events is None else prices.events
            events = prices.second * shares
        self.rows.price(prices.second, prices.joule, total, self.forbidden, events)
        self.tables.price(prices.second, prices.joule, total, self.forbidden, events)
        np.copyto(self.costs, self.rows.flat)
        self.constant = self.leaves.fold(self.costs)
        self.state.settle()
        self.work.add(*self._price_work)

    def messages(self) -> Messages:
        """The state of message passing."""
        return self.state.messages.copy()

    def resume(self, messages: Messages) -> None:
        """Go on from an earlier state."""
        self.state.messages[:] = messages

    def rehearse(self, sweeps: int) -> None:
        """Pass messages among the few layers that stand for all, if there are such, and copy them:
        a start for `sweep` that would take as many of them. Bounds nothing."""
        if not self.folding.worth:
            return
        for _ in range(sweeps):
            for forward in (True, False):
                self.folded.go(forward)
            self.work.add(*self._rehearsal_work)
        for messages in (self.state.to_a, self.state.to_b):
            for message, stands in zip(messages, self.folding.stands, strict=True):
                message[:] = message[stands]

    def sweep(self) -> Cut:
        """One sweep forward and one back; returns the bound that the one back proves."""
        self.sweeps.go(True)
        value, self.beliefs = self.sweeps.go(False)
        self.work.add(*self._sweep_work)
        value += self.constant
        return Cut(value, float(self.prices.bytes.sum()), self.prices.joule)

    def promising(self, keep: int) -> Ints:
        """Of every variable of the core the `keep` rows of least belief, in this order; the first
        again where it has fewer: [variables, keep]."""
        out = np.zeros((len(self.problem.variables), keep), dtype=np.int64)
        for batch, belief in zip(self.batches, self.beliefs, strict=True):
            each = np.arange(len(belief))[:, None]
            count = len(belief[0])
            best: Ints = np.broadcast_to(np.arange(count), belief.shape)
            if count > keep:
                best = belief.argpartition(keep, axis=1)[:, :keep]
            best = best[each, belief[each, best].argsort(axis=1, kind="stable")]
            out[batch.members] = best[:, [k if k < count else 0 for k in range(keep)]]
        return out

    def decode(self) -> Ints:
        """A labelling: in order, the best row given earlier choices and later ones' messages."""
        rows = np.zeros(len(self.problem.variables), dtype=np.int64)
        for batch, at in zip(self.batches, self.sweeps.rows_of, strict=True):
            cost = self.costs.take(at)
            for s in batch.slots:
                if s.later:
                    cost += self.sides[s.kind][0 if s.is_a else 1].spread(self.state.of(s)[s.at])
                else:
                    labels = self.sides[s.kind][1 if s.is_a else 0].labels[rows[s.others]]
                    table = self.tables.kinds[s.kind].table[s.at]
                    found = picked(table, labels, not s.is_a)
                    cost += self.sides[s.kind][0 if s.is_a else 1].spread(found)
            rows[batch.members] = cost.argmin(axis=1)
        return self.complete(rows)

    def complete(self, rows: Ints) -> Ints:
        """A labelling of the core, with the best rows of what was folded away."""
        return self.leaves.complete(rows, self.costs)
