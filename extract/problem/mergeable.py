"""Mergeable: which copies of a problem may be made together with others, and who waits for whom.

Those that one collective makes of a value of the program itself, not of a region's, of a kind that
the target's compiler merges. What `extract/certify` asks of merged collectives besides, as that
each is made but once, is left out: bounds hold for more than there is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.seconds.merging import Merging
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.costs import MOVING, carried_as, collective_seconds
from tapestry_egg.machine.energy import idle_joules

from .columns import Columns, Wanted
from .copies import CopyTable
from .memory import Memory
from .problem import Floats, Ints, Sent, label

Kind = tuple[str, tuple[int, ...], str | None]

# Of more copies than this it is not told which wait for which: prices of so many lead to worse
# plans, and wider gaps, than prices of each alone. Three layers that are fully connected have 42.
_SLOTS = 128
# Points between which seconds of a group are interpolated, and of which its envelope is made.
_POINTS = 384
# What may be between them.
_BETWEEN = 2e-5
# Bounds that are lower by such shares of what measured times lack to be concave are compared.
_LOWERED = (0.0, 0.1, 0.3, 0.6, 1.0)


@dataclass(frozen=True)
class _Slot:
    """A copy of one value: its maker, the units that may read it, when it is there, when a copy of
    it is made alone, and before when what that is made of may be in memory all the same."""

    maker: int
    readers: tuple[int, ...]
    made: int
    read: int
    until: int


@dataclass(frozen=True, eq=False)
class _Ways:
    """The copies of one table that may be merged: `way[a, b]` numbers them, -1 for all others."""

    way: Ints  # [from, to]
    kinds: tuple[Kind, ...]  # [ways]
    bytes: tuple[float, ...]  # [ways]
    held: tuple[float, ...]  # [ways]
    alone: tuple[float, ...]  # [ways]
    layouts: tuple[int, ...]  # [ways], numbers of those that copies lead to


class MergingBuilder:
    """The collectives of one problem that may be made with others, as they are met."""

    def __init__(self, columns: Columns, memory: Memory) -> None:
        self.columns, self.once, self.memory = columns, columns.once, memory
        self.schedule, self.program = columns.schedule, columns.program
        self.mesh, self.target = columns.choices.mesh, columns.choices.target
        self.kinds: dict[Kind, int] = {}
        self.slots: list[_Slot] = []
        self.slot: list[int] = []
        self.kind: list[int] = []
        self.bytes: list[float] = []
        self.held: list[float] = []
        self.alone: list[float] = []
        self.copies: list[tuple[int, Layout]] = []  # which value's copy, in which layout

    def of_kept(self, v: int, have: Ints, copy: Ints) -> tuple[Sent, ...]:
        """What makes the copy that is kept of a value, per row; -1 for none."""
        ways = self._ways(v)
        if ways is None:
            return ()

        def which() -> tuple[Ints, Ints]:
            some = np.where(copy >= 0, copy, have)
            return _numbered(ways.way[have, some])

        found = self.once(which, "merged kept", ways, have, copy)
        return self._sent(v, self.columns.others(v), ways, *found)

    def of_read(
        self, reader: int, v: int, have: Ints, kept: Ints, wanted: Wanted
    ) -> tuple[Sent, ...]:
        """What makes the copies that one reader makes itself, [labels of the value, labels of the
        reader]; `kept` as in `Memory.read`."""
        ways = self._ways(v)
        if ways is None:
            return ()
        found: tuple[Sent, ...] = ()
        for place in range(max(map(len, wanted.sets), default=0)):

            def which(place: int = place) -> tuple[Ints, Ints]:
                table = np.full((len(have), len(wanted.sets)), -1, dtype=np.int64)
                for j, layouts in enumerate(wanted.sets):
                    if place < len(layouts):
                        b = layouts[place]
                        there = (have == b) | (kept == b)
                        table[:, j] = np.where(there, -1, ways.way[have, b])
                return _numbered(table)

            some = self.once(which, "merged read", ways, have, kept, wanted, place)
            found += self._sent(v, (reader,), ways, *some)
        return found

    def _sent(
        self, v: int, readers: tuple[int, ...], ways: _Ways, used: Ints, which: Ints
    ) -> tuple[Sent, ...]:
        if not len(used):
            return ()
        first = len(self.slot)
        for w in used.tolist():
            self.slot.append(len(self.slots))
            self.kind.append(self.kinds.setdefault(ways.kinds[w], len(self.kinds)))
            self.bytes.append(ways.bytes[w])
            self.held.append(ways.held[w])
            self.alone.append(ways.alone[w])
            self.copies.append((v, self.columns.table(v).layouts[ways.layouts[w]]))
        self.slots.append(self._slot(v, readers))
        return (Sent(np.arange(first, len(self.slot)), which),)

    def _slot(self, v: int, readers: tuple[int, ...]) -> _Slot:
        made, until, read = self.memory.copied(v, readers)
        return _Slot(self.schedule.producer[v], readers, made, read, until)

    def _ways(self, v: int) -> _Ways | None:
        """What makes copies of a value, if any of it may be merged."""
        if self.program.body_of[v]:
            return None
        table = self.columns.table(v)
        return self.once(lambda: self._ways_of(table), "ways", table)

    def _ways_of(self, table: CopyTable) -> _Ways | None:
        combiner, dtype = self.target.combiner, table.tensor.dtype
        assert combiner is not None
        way = np.full(table.seconds.shape, -1, dtype=np.int64)
        numbers: dict[tuple[Kind, float, float, float, int], int] = {}
        for (a, b), step in table.step_of.items():
            if int(table.following[a, b]) != b or step.kind not in combiner.kinds:
                continue
            if step.kind not in MOVING or self.mesh.parts(step.axes) < 2:
                continue
            if dtype.startswith("key<") or carried_as(step.kind, step.monoid, dtype) != step.kind:
                continue
            kind = (step.kind, step.axes, step.monoid)
            size = float(table.local_bytes[a])
            if not 0 < size <= self._most(kind):
                continue
            held = float(table.local_bytes[b if step.kind == "all_gather" else a])
            key = (kind, size, held, float(table.seconds[a, b]), b)
            way[a, b] = numbers.setdefault(key, len(numbers))
        if not numbers:
            return None
        kinds, sizes, waiting, alone, layouts = zip(*numbers, strict=True)
        return _Ways(way, kinds, sizes, waiting, alone, layouts)

    def _most(self, kind: Kind) -> float:
        """The most bytes that enter one collective of several, on a device."""
        assert self.target.combiner is not None
        whole = self.mesh.parts(kind[1]) if kind[0] == "all_gather" else 1
        return self.target.combiner.bytes / whole

    def built(self) -> Merging | None:
        """All of it; None where nothing may be merged, or too much."""
        if len(self.slots) < 2 or self.too_many:
            return None
        kind, sizes, alone = np.array(self.kind), np.array(self.bytes), np.array(self.alone)
        most = np.array([self._at_most(n, k) for k, n in self.kinds.items()])
        curves = [
            self._curve(k, m, np.unique(sizes[kind == n]))
            for (k, n), m in zip(self.kinds.items(), most.tolist(), strict=True)
        ]
        amounts, times, envelope = (np.array(x) for x in zip(*curves, strict=True))
        least = envelope[kind, -1] / most[kind] * sizes
        watts = float(idle_joules(1.0, self.mesh.devices, self.target))
        ticks = np.array([(x.made, x.read, x.until) for x in self.slots], dtype=np.int64)
        return Merging(
            np.array(self.slot),
            label(self.copies)[0],
            kind,
            sizes,
            np.array(self.held),
            alone,
            -watts * np.maximum(alone - least, 0.0),
            self._before(),
            ticks[:, 0].copy(),
            ticks[:, 1].copy(),
            ticks[:, 2].copy(),
            np.array([k == "all_gather" for k, *_ in self.kinds]),
            most,
            amounts,
            times,
            envelope,
        )

    @property
    def too_many(self) -> bool:
        """Whether there are more copies than are told which of them wait for which."""
        return len(self.slots) > _SLOTS

    def _at_most(self, number: int, kind: Kind) -> float:
        """The most bytes that one collective of a kind may have here."""
        largest: dict[int, float] = {}
        for slot, own, size in zip(self.slot, self.kind, self.bytes, strict=True):
            if own == number:
                largest[slot] = max(largest.get(slot, 0.0), size)
        return min(self._most(kind), sum(largest.values()) or 1.0)

    def _curve(self, kind: Kind, most: float, sizes: Floats) -> tuple[Floats, Floats, Floats]:
        """(bytes, seconds, a concave bound on seconds) of groups of one kind, at some points; the
        bound is nearest for collectives of such sizes."""
        amounts = np.append(0.0, np.geomspace(min(64.0, 0.5 * most), most, _POINTS))
        some = np.maximum(amounts, 1.0)
        times = np.array(
            [float(collective_seconds(kind[0], x, kind[1], self.mesh, self.target)) for x in some]
        )
        least = times - _BETWEEN * times[-1]
        over = float((_upper_hull(amounts, least) - least).max())
        found = [_concave(amounts, least, share * over) for share in _LOWERED]
        near = [float(np.interp(sizes, amounts, x).sum()) for x in found]
        return amounts, times, np.maximum(found[int(np.argmax(near))], 0.0)

    def _before(self) -> NDArray[np.bool_]:
        """[slots, slots]: whether all readers of one run before the other's value is made, or make
        it."""
        units = self.schedule.units
        leads = np.eye(len(units), dtype=np.bool_)  # [unit, unit that it is made from, or itself]
        for u, unit in enumerate(units):
            for _, _, v in unit.reads:
                if self.schedule.producer[v] < u:
                    leads[u] |= leads[self.schedule.producer[v]]
        there = leads[[x.maker for x in self.slots]]  # [slots, units]
        found = np.zeros((len(self.slots), len(self.slots)), dtype=np.bool_)
        for a, x in enumerate(self.slots):
            if min(x.readers) > x.maker:  # what leaves the program is read at its end
                found[a] = there[:, list(x.readers)].all(axis=1)
        return found


def _numbered(ways: Ints) -> tuple[Ints, Ints]:
    """The ways that occur, and where: their places among these, or how many there are for none."""
    used = np.unique(ways[ways >= 0])
    return used, np.where(ways >= 0, np.searchsorted(used, ways), len(used))


def _concave(xs: Floats, ys: Floats, lower: float) -> Floats:
    """A concave function that is nowhere more, and so much less at the first point."""
    out = np.empty(len(xs))
    out[0], slope = ys[0] - lower, np.inf
    for k in range(len(xs) - 1):
        ahead = (ys[k + 1 :] - out[k]) / (xs[k + 1 :] - xs[k])
        slope = min(slope, float(ahead.min()))
        out[k + 1] = out[k] + slope * (xs[k + 1] - xs[k])
    return out


def _upper_hull(xs: Floats, ys: Floats) -> Floats:
    """The least concave function that is nowhere less, at the same points."""
    kept: list[int] = []
    for k in range(len(xs)):
        while len(kept) > 1:
            a, b = kept[-2], kept[-1]
            if (ys[b] - ys[a]) * (xs[k] - xs[a]) > (ys[k] - ys[a]) * (xs[b] - xs[a]):
                break
            kept.pop()
        kept.append(k)
    return np.asarray(np.interp(xs, xs[kept], ys[kept]))
