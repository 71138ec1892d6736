"""Memory: the bytes that every choice occupies, on the time line of `lifetimes.py`.

What XLA's buffer assignment holds when the lowered plan runs in order: a value while it is read as
it was produced, a copy while it is made and read. Amounts are bytes of one device's block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..layout import Layout
from .copies import CopyTable
from .lifetimes import lifetimes
from .problem import Floats, Ints, Use
from .snapshot import Snapshot

Needs = Sequence[tuple[Layout, ...]]  # per label of a reader: the layouts in which it reads a value


class Memory:
    """Uses of memory for the variables and pairs of one snapshot's problem."""

    def __init__(self, snap: Snapshot) -> None:
        self.snap, self.plan, self.program = snap, snap.schedule, snap.schedule.program
        self.lives = lifetimes(snap.schedule)

    @property
    def times(self) -> int:
        return self.lives.times

    def produced(self, v: int, haves: Sequence[Layout]) -> tuple[Use, ...]:
        """The array of a value as its unit makes it, per layout."""
        if self.lives.free[v]:
            return ()
        table = self._table(v)
        return (Use(*self._span(v), np.array([_bytes(table, h) for h in haves])),)

    def kept(
        self, v: int, have: Ints, copy: Ints, endings: Sequence[tuple[Ints, Sequence[int]]]
    ) -> tuple[Use, ...]:
        """A copy that several readers share, per row; `copy` is -1 where none is kept.

        `endings` lists rows (as flags) with the readers that their copy serves. The produced array
        is dropped once it is copied; readers that go back to it are charged in `read`.
        """
        table, first = self._table(v), self.first(v)
        holds = copy >= 0
        some = np.where(holds, copy, have)
        size = np.where(holds, 1.0 * table.local_bytes[some], 0.0)
        uses = [Use(first, first + 1, np.where(holds, self._making(v, have, some), 0.0))]
        for rows, served in endings:
            stop = max(self._copy_ends(r, v) for r in served)
            uses.append(Use(first + 1, stop, np.where(rows, size, 0.0)))
        if self._passing(v):
            drop = np.where(holds, -1.0 * table.local_bytes[have], 0.0)
            uses.append(Use(first + 1, self._span(v)[1], drop))
        return _occupied(uses)

    def read(
        self, reader: int, v: int, have: Ints, kept: Ints, holds: Ints, needs: Needs
    ) -> tuple[Use, ...]:
        """What one reader adds, [labels of the value, labels of the reader].

        `kept` numbers the layout of the kept copy that serves this reader, or is -1; `holds` says
        whether some copy is kept at all.
        """
        table, shape = self._table(v), (len(have), len(needs))
        making, live = np.zeros(shape), np.zeros(shape)
        # A copy of a new state is made in the old one's place.
        state = self.program.instances[self.plan.units[reader].root].port == "state"
        takes, back = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        for j, layouts in enumerate(needs):
            for n in layouts:
                b = np.full(len(have), table.number[n])
                there = (have == b) | (kept == b)
                making[:, j] += np.where(there, 0.0, self._making(v, have, b))
                live[:, j] += np.where(there | state, 0.0, 1.0 * table.local_bytes[b])
                takes[:, j] |= have == b
                back[:, j] |= kept != b
        at = self.lives.reads_at[reader, v]
        ends = self.lives.reads_until[reader, v] + 1  # the tick of the last run that reads it
        uses = [Use(at, at + 1, making), Use(at + 1, self._copy_ends(reader, v), live)]
        if self._passing(v):
            own = np.broadcast_to(1.0 * table.local_bytes[have][:, None], shape)
            first, kept_some = self.first(v), (holds > 0)[:, None]
            uses.append(Use(first + 1, at + 1, np.where(kept_some & back, own, 0.0)))
            uses.append(Use(max(first, at) + 1, ends + 1, np.where(kept_some & takes, own, 0.0)))
            if self._reads_last(reader, v):  # copied away before its last reader runs
                begin, end = self._span(v)
                gone = np.where(~takes & ~kept_some, -own, 0.0)
                uses.append(Use(max(begin, at + 1, self._read_before(reader, v)), end, gone))
        return _occupied(uses)

    def first(self, v: int) -> int:
        """The tick of the first copy that could be made of a value."""
        producer = self.plan.producer[v]
        return min(self.lives.reads_at[r, v] for r in self.plan.readers[v] if r != producer)

    def _table(self, v: int) -> CopyTable:
        return self.snap.copies[self.program.types[v]]

    def _span(self, v: int) -> tuple[int, int]:
        """From when up to before when a value that is read as it was produced is in memory."""
        end = min(self.lives.last[v] + 2, self.times)
        return min(self.lives.made[v], end - 1), end

    def _reads_last(self, reader: int, v: int) -> bool:
        """Whether a unit alone is what a value is kept for in the end."""
        producer, last = self.plan.producer[v], self.lives.last[v]
        at = [r for r in self.plan.readers[v] if self.lives.reads_until[r, v] == last]
        return at == [reader] and reader != producer

    def _read_before(self, reader: int, v: int) -> int:
        """Before which tick everything else that reads a value is done with it."""
        others = [r for r in self.plan.readers[v] if r not in (reader, self.plan.producer[v])]
        return max((self.lives.reads_until[r, v] + 2 for r in others), default=0)

    def _passing(self, v: int) -> bool:
        """Whether a value has memory of its own that ends with its last reader."""
        return not self.lives.free[v] and self.lives.last[v] < self.times

    def _making(self, v: int, have: Ints, need: Ints) -> Floats:
        """Bytes beside the produced array while a copy of it is made.

        The copy and the largest block on the way; an all-reduce writes where it reads. Of a value
        that its readers compute for themselves also what is sent: for that it must exist.
        """
        table = self._table(v)
        wire = table.wire[have, need]
        legal, sent = np.isfinite(wire) & (have != need), np.isfinite(wire) & (wire > 0)
        extra = np.where(table.in_place[have, need], 0.0, 1.0 * table.local_bytes[need])
        extra = extra + np.where(legal, table.scratch[have, need], 0.0)
        if self.lives.free[v]:
            extra = extra + np.where(sent, 1.0 * table.local_bytes[have], 0.0)
        return np.where(legal, extra, 0.0)

    def _copy_ends(self, reader: int, v: int) -> int:
        """Before which tick a copy that a unit reads is no longer in memory."""
        root = self.program.instances[self.plan.units[reader].root]
        if root.port == "output":
            return self.times
        return min(self.lives.reads_until[reader, v] + 2, self.times)


def _bytes(table: CopyTable, layout: Layout) -> float:
    return float(table.local_bytes[table.number[layout]])


def _occupied(uses: Sequence[Use]) -> tuple[Use, ...]:
    return tuple(u for u in uses if u.start < u.end and u.amount.any())
