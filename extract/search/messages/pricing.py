"""Pricing: what every row and every pair of labels costs at given prices, all at once.

Parts made of the same arrays are one *kind*: their costs are one matrix product, of what each part
pays for seconds, joules and every use of memory with these arrays. Where there is a timeline, a
second has the price of the event that it belongs to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Variable
from tapestry_egg.products import matrix_product


class Kind:
    """Parts that differ only in when they use memory: `members` of the list they come from.

    `table` is a stretch of the priced costs: [members, rows], or [members, labels, labels].
    """

    def __init__(self, parts: Sequence[Variable | Pair], members: Sequence[int]) -> None:
        first = parts[members[0]]
        never = ~np.isfinite(first.seconds)
        self.members = np.array(members, dtype=np.int64)
        self.shape = first.seconds.shape
        self.size = first.seconds.size
        amounts = [np.where(np.isfinite(u.amount), u.amount, 0.0) for u in first.uses]
        rows = [np.where(never, 0.0, first.seconds), np.where(never, 0.0, first.joules)]
        rows += [never * 1.0] if never.any() else []
        self.forbids = never.any()
        self.fixed = len(rows)
        spans = [x.amount for x in first.spans]
        self.amounts = np.array([*rows, *spans, *amounts]).reshape(-1, self.size)
        self.event = np.array([[x.event for x in parts[k].spans] for k in members], dtype=np.int64)
        self.start = np.array([[u.start for u in parts[k].uses] for k in members], dtype=np.int64)
        self.end = np.array([[u.end for u in parts[k].uses] for k in members], dtype=np.int64)
        self.table: Floats = np.zeros((0, *self.shape))

    def price(
        self, second: float, joule: float, until: Floats, forbidden: float, events: Floats | None
    ) -> None:
        """Price all members at what a second and a joule cost; `until[t]` is what a byte costs from
        the start up to before t, `events` what a second of every event costs, if that differs."""
        paid = np.empty((len(self.members), len(self.amounts)))
        paid[:, 0], paid[:, 1] = second if events is None else 0.0, joule
        uses, spans = self.start.shape[1], self.event.shape[1]
        if self.forbids:
            paid[:, 2] = forbidden
        if spans:
            paid[:, self.fixed : self.fixed + spans] = 0.0 if events is None else events[self.event]
        if uses:
            paid[:, -uses:] = until[self.end] - until[self.start]
        matrix_product(paid, self.amounts, self.table.reshape(len(paid), -1))


class Tables:
    """The priced costs of some variables or pairs, kind after kind in one array."""

    def __init__(self, parts: Sequence[Variable | Pair]) -> None:
        numbers: dict[tuple[int, ...], list[int]] = {}
        for k, p in enumerate(parts):
            numbers.setdefault(_made_of(p), []).append(k)
        self.kinds = [Kind(parts, members) for members in numbers.values()]
        self.kind_of = np.zeros(len(parts), dtype=np.int64)
        self.place = np.zeros(len(parts), dtype=np.int64)  # among the members of its kind
        self.start = np.zeros(len(parts), dtype=np.int64)  # in `flat`
        self.flat = np.zeros(sum(len(k.members) * k.size for k in self.kinds))
        at = 0
        for n, kind in enumerate(self.kinds):
            end = at + len(kind.members) * kind.size
            kind.table = self.flat[at:end].reshape(-1, *kind.shape)
            self.kind_of[kind.members] = n
            self.place[kind.members] = np.arange(len(kind.members))
            self.start[kind.members] = np.arange(at, end, max(kind.size, 1))[: len(kind.members)]
            at = end

    def of(self, k: int) -> NDArray[np.float64]:
        """The priced costs of one part."""
        return self.kinds[self.kind_of[k]].table[self.place[k]]

    def price(
        self,
        second: float,
        joule: float,
        until: Floats,
        forbidden: float,
        events: Floats | None = None,
    ) -> None:
        """Price all entries, as `Kind.price` does."""
        for kind in self.kinds:
            kind.price(second, joule, until, forbidden, events)


def _made_of(part: Variable | Pair) -> tuple[int, ...]:
    """What parts of one kind have in common: the arrays themselves.

    Identity, not content: equal layers were given the very same arrays (`extract/choices/once.py`),
    so their parts are found without reading a table. Arrays that are equal by chance make two
    kinds, which costs time and nothing else. Parts hold on to their arrays, so no number is used
    twice.
    """
    arrays: list[NDArray[Any]] = [part.seconds, part.joules, *(u.amount for u in part.uses)]
    arrays += [x.amount for x in part.spans]
    if isinstance(part, Pair):
        arrays += [part.label_a, part.label_b]
    return (*map(id, arrays), len(part.uses), len(part.spans))


def places(numbers: Ints) -> slice | Ints:
    """An index that reads what lies in equal steps, up or down, without a copy."""
    first, count = int(numbers[0]), len(numbers)
    step = int(numbers[1]) - first if count > 1 else 1
    if step == 0 or (numbers != first + step * np.arange(count)).any():
        return numbers
    stop = first + step * count
    return slice(first, stop if stop >= 0 else None, step)
