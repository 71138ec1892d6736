"""A cost function network with memory over time, as flat arrays.

Variables are numbered 0..V-1 and have rows (the values to choose from). All rows of all variables
lie end to end; so do the cells of all tables. A table between a and b is kept twice, once per end,
so that the costs of all rows of one end, the other end's row being fixed, are a contiguous stretch:
these are half-edges, number e seen from a and E + e seen from b.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

#: Sums of amounts up to here are exact in 64 bits with room for differences.
WIDE = 1 << 61


def ranges(starts: Ints, lengths: Ints) -> Ints:
    """`arange(start, start + length)` of every pair, end to end."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    ends = np.cumsum(lengths)
    out = np.arange(int(ends[-1]), dtype=np.int64)
    out += np.repeat(starts - (ends - lengths), lengths)
    return out


def offsets(lengths: Ints | Sequence[int]) -> Ints:
    """Where stretches of these lengths begin, and where the last ends."""
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)


@dataclass(frozen=True)
class Uses:
    """Stretches of time in which variables occupy memory.

    Use u belongs to `variable[u]` and lasts for times `lower[u] <= t < upper[u]`; `amount` has one
    entry per row of the variable, from `start[u]` on. At time t no more than `room[t]` is free.
    """

    variable: Ints  # [uses], ascending
    lower: Ints  # [uses]
    upper: Ints  # [uses]
    start: Ints  # [uses + 1]
    amount: Ints  # [entries], not negative
    room: Ints  # [times]

    def __len__(self) -> int:
        return len(self.variable)


@dataclass(frozen=True)
class Network:
    """Variables with costs of rows, tables between two variables, and uses of memory."""

    sizes: Ints  # [V] rows per variable
    cost: Floats  # [rows]
    first: Ints  # [E]
    second: Ints  # [E]
    cells: Floats  # tables [first's rows, second's rows] end to end; inf forbids
    uses: Uses
    constant: float = 0.0
    rows: Ints = field(init=False)  # [V + 1]

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", offsets(self.sizes))

    def __len__(self) -> int:
        return len(self.sizes)

    @cached_property
    def half(self) -> Half:
        """The half-edges."""
        return Half(self)

    @cached_property
    def use_rows(self) -> Ints:
        """The row that each amount belongs to."""
        v = self.uses.variable
        return ranges(self.rows[v], self.sizes[v])

    @cached_property
    def of_variable(self) -> Ints:
        """Uses of variable i are those from `of_variable[i]` up to `of_variable[i + 1]`."""
        return np.searchsorted(self.uses.variable, np.arange(len(self) + 1))

    @cached_property
    def wide(self) -> bool:
        """Whether sums of amounts may not fit into 64 bits."""
        if not len(self.uses):
            return False
        most = np.maximum.reduceat(self.uses.amount, self.uses.start[:-1])
        return sum(most.tolist()) > WIDE

    def value(self, x: Ints) -> float:
        """The cost of one row per variable; inf where a table forbids it."""
        half, e = self.half, len(self.first)
        cells = half.start[:e] + x[self.second] * self.sizes[self.first] + x[self.first]
        total = float(self.cost[self.rows[:-1] + x].sum()) + self.constant
        at = half.cells[cells]
        if len(at) and bool((at >= half.forbidden).any()):
            return float("inf")
        return total + float(at.sum())

    def over(self, x: Ints) -> Floats:
        """At every time, how much more is used than there is; exact in its sign."""
        uses = self.uses
        amount = uses.amount[uses.start[:-1] + x[uses.variable]]
        if not self.wide:
            return (self._sums(amount) - uses.room).astype(np.float64)
        high = self._sums(amount >> 31) - (uses.room >> 31)
        low = self._sums(amount & (2**31 - 1)) - (uses.room & (2**31 - 1))
        return (high + (low >> 31)) * float(1 << 31) + (low & (2**31 - 1))

    def slack(self, x: Ints) -> Ints:
        """Free memory at every time, for sums that are not `wide`."""
        uses = self.uses
        return uses.room - self._sums(uses.amount[uses.start[:-1] + x[uses.variable]])

    def fits(self, x: Ints) -> bool:
        """Whether no limit is exceeded."""
        return not bool((self.over(x) > 0).any())

    def _sums(self, amount: Ints) -> Ints:
        steps = np.zeros(len(self.uses.room) + 1, dtype=np.int64)
        np.add.at(steps, self.uses.lower, amount)
        np.subtract.at(steps, self.uses.upper, amount)
        return np.cumsum(steps[:-1])

    def priced(self, price: Floats) -> Floats:
        """Costs of rows with what they occupy paid at a price per unit and time: [rows]."""
        uses = self.uses
        until = np.concatenate(([0.0], np.cumsum(price)))
        paid = until[uses.upper] - until[uses.lower]
        seen = np.flatnonzero(paid > 0)
        lengths = np.diff(uses.start)[seen]
        entries = ranges(uses.start[seen], lengths)
        added = np.repeat(paid[seen], lengths) * uses.amount[entries]
        return self.cost + np.bincount(self.use_rows[entries], added, len(self.cost))


class Half:
    """Half-edges of a network: number h is owned by `owner[h]` and looks at `other[h]`.

    Its table lies in `cells` from `start[h]` on, one stretch over the owner's rows for each row of
    the other. What is forbidden costs `forbidden`, more than any two legal cells differ by, and
    finite so that sums can be taken back.
    """

    def __init__(self, net: Network) -> None:
        edges = len(net.first)
        self.owner = np.concatenate((net.first, net.second))
        self.other = np.concatenate((net.second, net.first))
        self.reverse = np.concatenate((np.arange(edges) + edges, np.arange(edges)))
        a, b = net.sizes[net.first], net.sizes[net.second]
        start = offsets(a * b)
        self.start = np.concatenate((start[:-1], start[:-1] + start[-1]))
        finite = np.isfinite(net.cells)
        most = float(np.abs(net.cells[finite]).max(initial=0.0))
        costs = net.cost[np.isfinite(net.cost)]
        self.forbidden = 64.0 * max(most, float(np.abs(costs).max(initial=0.0)), 1.0)
        cells = np.where(finite, net.cells, self.forbidden)
        # Transposed, for the half-edges seen from a.
        turned = np.empty_like(cells)
        for k in np.unique(a).tolist():
            for m in np.unique(b[a == k]).tolist():
                at = start[:-1][(a == k) & (b == m)][:, None] + np.arange(k * m)
                block = cells[at].reshape(-1, k, m).transpose(0, 2, 1)
                turned[at] = block.reshape(len(at), k * m)
        self.cells = np.concatenate((turned, cells))
        self.by_owner = np.argsort(self.owner, kind="stable")
        self.owned = np.searchsorted(self.owner[self.by_owner], np.arange(len(net) + 1))

    def degree(self) -> Ints:
        """The number of neighbours of every variable."""
        return np.diff(self.owned)


def least_in(values: Floats, starts: Ints, lengths: Ints) -> Ints:
    """In each stretch of `values`, the place of the first least entry, counted from its start."""
    if not len(starts):
        return np.zeros(0, dtype=np.int64)
    least = np.minimum.reduceat(values, starts)
    at = np.flatnonzero(values == np.repeat(least, lengths))
    first = at[np.searchsorted(at, starts)]
    return first - starts


def joined(parts: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """Arrays end to end; empty of the given type if there are none."""
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype=dtype)


def dot(a: Floats, b: Floats) -> float:
    """The sum of products, in this thread: a second process needs the other processor."""
    return float(np.einsum("i,i", a, b))
