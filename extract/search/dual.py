"""Dual bounds of the extraction problem by sequential tree-reweighted message passing.

For given prices (joules in seconds, bytes at each time in seconds) the priced problem is an
ordinary pairwise model. Messages reparametrise it; every sweep yields a lower bound on its optimum
(Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", 2006) and a
labelling by sequential decoding, which `elimination.py` improves. A bound at given prices bounds
the constrained problem at *any* limits: seconds ≥ D − Σ_t price_t · peak − price_J · joules.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.problem.once import Once
from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Variable
from tapestry_egg.work import Work

from .batches import Batch, Side, Slot, batches, picked
from .folding import Folding
from .leaves import Leaves
from .pricing import Tables
from .products import dot

# Relative error of a bound, a sum of some thousand terms of a pass, twice over.
_ROUNDING = 1e-12

# So many sums are made at once.
_TOGETHER = 1 << 16

# Calls per variable and pair that it takes to set up message passing, and those per batch and slot
# of a pass, and per slot that gives messages.
_SET_UP, _PER_BATCH, _PER_SLOT, _PER_MESSAGE = 30, 6, 3, 10

Messages = list[tuple[Floats, Floats]]  # per kind of pair: to first variables and to second ones


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
        self.to_a = [np.zeros((len(k.members), k.shape[0])) for k in self.tables.kinds]
        self.to_b = [np.zeros((len(k.members), k.shape[1])) for k in self.tables.kinds]
        parts: list[Variable | Pair] = [*problem.variables, *problem.pairs]
        once = Once()

        def most(amounts: Floats) -> float:
            return once(lambda: float(amounts[np.isfinite(amounts)].max(initial=0.0)), amounts)

        self.most_seconds = sum(most(p.seconds) for p in parts)
        self.most_joules = sum(most(p.joules) for p in parts)
        uses = [(u.start, u.end, most(u.amount)) for p in parts for u in p.uses]
        self.most_bytes = np.array(uses).reshape(-1, 3)
        self.costs = self.rows.flat.copy()  # of all rows, leaves folded in
        self.rows_of = self._rows_of(self.batches)
        self.folding = Folding(problem, self.edges, self.batches, self.tables)
        self.folded_rows_of = self._rows_of(self.folding.batches)
        self.sums = np.empty(0)
        self.beliefs = [np.zeros(at.shape) for at in self.rows_of]
        self.work.add(_SET_UP * (n + len(problem.pairs)), 0)
        self._pass_work = self._work_of(self.batches)
        self._rehearsal_work = self._work_of(self.folding.batches)
        self._price_work = self._work_of_prices()
        self.price(Prices(0.0, np.zeros(problem.times)))

    def _rows_of(self, batches: Sequence[Batch]) -> list[Ints]:
        """Where the rows of all members lie: [members, rows] for every batch."""
        sizes = [len(self.problem.variables[b.members[0]]) for b in batches]
        return [
            self.row_start[b.members, None] + np.arange(size)
            for b, size in zip(batches, sizes, strict=True)
        ]

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
        self.work.add(*self._price_work)

    def messages(self) -> Messages:
        """The state of message passing."""
        return [(a.copy(), b.copy()) for a, b in zip(self.to_a, self.to_b, strict=True)]

    def resume(self, messages: Messages) -> None:
        """Go on from an earlier state."""
        for a, b, (to_a, to_b) in zip(self.to_a, self.to_b, messages, strict=True):
            a[:], b[:] = to_a, to_b

    def rehearse(self, sweeps: int) -> None:
        """Pass messages among the few layers that stand for all, if there are such, and copy them:
        a start for `sweep` that would take it as many passes. Bounds nothing."""
        if not self.folding.worth:
            return
        for _ in range(sweeps):
            for forward in (True, False):
                self._pass(self.folding.batches, self.folded_rows_of, forward)
            self.work.add(*self._rehearsal_work)
        for messages in (self.to_a, self.to_b):
            for message, stands in zip(messages, self.folding.stands, strict=True):
                message[:] = message[stands]

    def sweep(self) -> Cut:
        """One forward and one backward pass; returns the bound that the backward pass proves."""
        self._pass(self.batches, self.rows_of, True)
        value, self.beliefs = self._pass(self.batches, self.rows_of, False)
        self.work.add(*self._pass_work)
        value += self.constant
        return Cut(value, float(self.prices.bytes.sum()), self.prices.joule)

    def _pass(
        self, batches: Sequence[Batch], rows_of: Sequence[Ints], forward: bool
    ) -> tuple[float, list[Floats]]:
        """Pass messages through batches, in order or in reverse; the bound that this proves if they
        are all, and beliefs on their rows, kept for their order alone."""
        bound = 0.0
        beliefs = [np.zeros(0)] * len(batches)
        numbers = range(len(batches))
        for n in numbers if forward else reversed(numbers):
            batch = batches[n]
            belief = beliefs[n] = self.costs.take(rows_of[n])
            giving = False
            for s in batch.slots:
                belief += self._side(s).spread(self._incoming(s)[s.at])
                giving = giving or s.later == forward
            least = np.minimum.reduce(belief, axis=1)
            bound += float(np.add.reduce(least))
            belief -= least[:, None]
            if not giving:
                continue
            given = belief * batch.share
            for s in batch.slots:
                if s.later != forward:
                    continue
                outgoing = self._side(s).least(given) - self._incoming(s)[s.at]
                message = self._through(self.tables.kinds[s.kind].table[s.at], outgoing, s.is_a)
                low = np.minimum.reduce(message, axis=1)
                message -= low[:, None]
                (self.to_b if s.is_a else self.to_a)[s.kind][s.at] = message
                bound += float(np.add.reduce(low))
        return bound, beliefs

    def _through(self, tables: Floats, outgoing: Floats, is_a: bool) -> Floats:
        """What the other ends of pairs get: per label the least of table and outgoing message.

        Some tables at a time, so that the sums stay in the processor's cache.
        """
        members, la, lb = tables.shape
        outgoing = outgoing[:, :, None] if is_a else outgoing[:, None, :]
        count = max(1, _TOGETHER // (la * lb))
        if self.sums.size < count * la * lb:
            self.sums = np.empty(count * la * lb)
        if members <= count:
            whole = self.sums[: tables.size].reshape(tables.shape)
            np.add(outgoing, tables, out=whole)
            return np.asarray(np.minimum.reduce(whole, axis=1 if is_a else 2))
        message = np.empty((members, lb if is_a else la))
        for k in range(0, members, count):
            some = slice(k, min(k + count, members))
            sums = self.sums[: (some.stop - k) * la * lb].reshape(-1, la, lb)
            np.add(outgoing[some], tables[some], out=sums)
            np.minimum.reduce(sums, axis=1 if is_a else 2, out=message[some])
        return message

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
        for batch, at in zip(self.batches, self.rows_of, strict=True):
            cost = self.costs.take(at)
            for s in batch.slots:
                if s.later:
                    cost += self._side(s).spread(self._incoming(s)[s.at])
                else:
                    labels = self.sides[s.kind][1 if s.is_a else 0].labels[rows[s.others]]
                    table = self.tables.kinds[s.kind].table[s.at]
                    cost += self._side(s).spread(picked(table, labels, not s.is_a))
            rows[batch.members] = cost.argmin(axis=1)
        return self.complete(rows)

    def _side(self, slot: Slot) -> Side:
        return self.sides[slot.kind][0 if slot.is_a else 1]

    def _incoming(self, slot: Slot) -> Floats:
        return (self.to_a if slot.is_a else self.to_b)[slot.kind]

    def complete(self, rows: Ints) -> Ints:
        """A labelling of the core, with the best rows of what was folded away."""
        return self.leaves.complete(rows, self.costs)
