"""Memory: the bytes that every choice occupies, on the time line of `schedule/lifetimes.py`.

What XLA's buffer assignment holds when the lowered plan runs in order: a value while it is read as
it was produced, a copy while it is made and read; where collectives run beside kernels it is made
from where it is issued (`schedule/issue_places.py`). Amounts are bytes of one device's block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.tiles import stored_bytes
from tapestry_egg.schedule.issue_places import IssuePlaces
from tapestry_egg.schedule.lifetimes import lifetimes
from tapestry_egg.schedule.lying import made_straight, read_straight, window_dims

from .columns import Columns, Wanted
from .copies import CopyTable
from .problem import Floats, Ints, Use
from .unit_choices import UnitChoices


class Memory:
    """Uses of memory for the variables and pairs of one problem."""

    def __init__(self, choices: UnitChoices, columns: Columns | None = None) -> None:
        self.choices, self.schedule, self.program = (
            choices,
            choices.schedule,
            choices.schedule.program,
        )
        self.columns = columns or Columns(choices)
        self.once = self.columns.once
        schedule, epilogues = choices.schedule, choices.target.epilogues
        self.lives = self.once(lambda: lifetimes(schedule, epilogues), "lifetimes", schedule)
        beside = choices.target.slowdown is not None
        self.places = IssuePlaces(choices.schedule) if beside else None
        moving = window_dims(self.program, choices.target.tiles)
        self.windows: dict[int, frozenset[int]] = {int(v): dims for v, dims in moving.items()}
        rows = choices.target.tiles is None  # arrays lie row by row
        self.straight = read_straight(choices.schedule) if rows else frozenset()
        self.made_straight = made_straight(choices.schedule) if rows else frozenset()
        self._first: dict[int, int] = {}  # value -> the tick of the first copy of it
        self._alone: dict[int, int] = {}  # value -> the one unit that it is kept for in the end

    @property
    def times(self) -> int:
        return self.lives.times

    def turns(self, reader: int | None, v: int) -> tuple[bool, bool]:
        """Whether a unit, if it is one, reads a value straight, and whether it is made so."""
        return (reader, v) in self.straight, v in self.made_straight

    def produced(self, v: int, rows: Ints, parts: Floats) -> tuple[Use, ...]:
        """The array of a value as its unit makes it, where the unit runs as `rows` say; what is
        added up of `parts` is there a tick later."""
        if self.lives.free[v]:
            return ()
        table, gives = self.columns.table(v), self.columns.gives(v)

        size = self._sizes(v)

        def amounts() -> Floats:
            return size[gives[rows]].astype(np.float64)

        key = table, gives, rows, self.windows.get(v)
        begin, end = self._span(v)
        whole = self.once(amounts, "made", *key)
        if not parts.any():
            return (Use(begin, end, whole),)
        late = min(max(begin, 2 * self.schedule.producer[v] + 2), end - 1)
        at_once = self.once(lambda: np.where(parts > 0, 0.0, whole), "at once", parts, *key)
        return _occupied([Use(begin, late, at_once), Use(late, end, whole)])

    def running(self, u: int, scratch: Floats, parts: Floats) -> tuple[Use, ...]:
        """What a unit's kernel takes for itself while it runs, per row, and what it makes that is
        added up when its operands may be gone."""
        at = 2 * u + 1
        return _occupied([Use(at, at + 1, scratch), Use(at, at + 2, parts)])

    def kept(self, v: int, have: Ints, copy: Ints, until: Ints) -> tuple[Use, ...]:
        """A copy in layout `copy` that the readers up to `until` share, per row; -1 for none.

        The produced array is dropped once it is copied; readers that go back to it are charged in
        `read`.
        """
        table, first = self.columns.table(v), self.first(v)
        free, size = self.lives.free[v], self._sizes(v)

        def amounts() -> tuple[tuple[Floats, Floats], list[tuple[int, Floats]], Floats]:
            holds = copy >= 0
            some = np.where(holds, copy, have)
            held = np.where(holds, 1.0 * size[some], 0.0)
            lasting = [
                (e, np.where(until == e, held, 0.0)) for e in sorted(set(until[holds].tolist()))
            ]
            every = np.where(
                holds, _making(table, size, have, some, free, v in self.made_straight), 0.0
            )
            making = self._apart(table, have, some, every)
            return making, lasting, np.where(holds, -1.0 * size[have], 0.0)

        key = table, have, copy, until, free, v in self.made_straight, self.windows.get(v)
        making, lasting, drop = self.once(amounts, "kept", *key)
        uses = [
            Use(self._begin(None, v, combines, first), first + 1, part)
            for combines, part in zip((False, True), making, strict=True)
        ]
        readers = list(zip(self.columns.others(v), self.columns.ranks(v), strict=True))
        for e, part in lasting:
            stop = max(self._copy_ends(r, v) for r, place in readers if place <= readers[e][1])
            uses.append(Use(first + 1, stop, part))
        if self._passing(v):
            uses.append(Use(first + 1, self._span(v)[1], drop))
        return _occupied(uses)

    def read(
        self, reader: int, v: int, have: Ints, kept: Ints, holds: Ints, wanted: Wanted
    ) -> tuple[Use, ...]:
        """What one reader adds, [labels of the value, labels of the reader].

        `kept` numbers the layout of the kept copy that serves this reader, or is -1; `holds` says
        whether some copy is kept at all.
        """
        table, free, size = self.columns.table(v), self.lives.free[v], self._sizes(v)
        # A copy of a new state is made in the old one's place.
        state = self.program.instances[self.schedule.units[reader].root].port == "state"
        straight, made = self.turns(reader, v)

        def amounts() -> tuple[tuple[Floats, Floats], tuple[Floats, ...]]:
            shape = (len(have), len(wanted.sets))
            making, live = (np.zeros(shape), np.zeros(shape)), np.zeros(shape)
            beside = np.zeros(shape)
            takes, back = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
            for j, layouts in enumerate(wanted.sets):
                for n in layouts:
                    b = np.full(len(have), n)
                    there = (have == b) | (kept == b)
                    turned = 1.0 * size[b] * (straight & table.turned[have, b])
                    beside[:, j] += np.where(kept == b, turned, 0.0)
                    every = np.where(there, 0.0, _making(table, size, have, b, free, made) + turned)
                    for part, more in zip(making, self._apart(table, have, b, every), strict=True):
                        part[:, j] += more
                    live[:, j] += np.where(there | state, 0.0, 1.0 * size[b])
                    takes[:, j] |= have == b
                    back[:, j] |= kept != b
            own = np.broadcast_to(1.0 * size[have][:, None], shape)
            some = (holds > 0)[:, None]
            returns = np.where(some & back, own, 0.0), np.where(some & takes, own, 0.0)
            gone = np.where(~takes & ~some, -own, 0.0)
            left = np.where(takes, 0.0, -own)
            return making, (live, *returns, gone, np.where(takes, own, 0.0), left, beside)

        key = (
            table,
            have,
            kept,
            holds,
            wanted,
            free,
            state,
            straight,
            made,
            self.windows.get(v),
        )
        making, (live, returns, stays, gone, taken, left, beside) = self.once(
            amounts, "reads", *key
        )
        at = self.lives.reads_at[reader, v]
        ends = self.lives.reads_until[reader, v] + 1  # the tick of the last run that reads it
        uses = [
            Use(self._begin(reader, v, combines, at), at + 1, part)
            for combines, part in zip((False, True), making, strict=True)
        ]
        uses.append(Use(at + 1, self._copy_ends(reader, v), live))
        if straight:  # a copy that others share stays as it was gathered
            uses.append(Use(at + 1, ends + 1, beside))
        if (reader, v) in self.lives.copied:
            uses.append(Use(2 * reader + 1, self.times, taken))
        if reader in self.lives.leaving:  # it leaves as a copy
            source, until = self.lives.leaving[reader]
            if source == v or self.choices.target.tiles is None:
                uses.append(Use(until, self.times, left))
        if self._passing(v):
            first = self.first(v)
            uses.append(Use(first + 1, at + 1, returns))
            uses.append(Use(max(first, at) + 1, ends + 1, stays))
            if self._reads_last(reader, v):  # copied away before its last reader runs
                begin, end = self._span(v)
                uses.append(Use(max(begin, at + 1, self._read_before(reader, v)), end, gone))
        return _occupied(uses)

    def _sizes(self, v: int) -> Ints:
        """Bytes of a block of a value in memory, per layout."""
        table = self.columns.table(v)
        if (windows := self.windows.get(v)) is None:
            return table.held_bytes
        tensor, tiles, mesh = self.program.types[v], self.choices.target.tiles, self.choices.mesh

        def sizes() -> Ints:
            blocks = [x.local_shape(tensor.shape, mesh) for x in table.layouts]
            item = max(tensor.itemsize, 1)
            return np.array([stored_bytes(b, item, tiles, windows) for b in blocks], np.int64)

        return self.once(sizes, "in tiles", table, tensor, windows)

    def first(self, v: int) -> int:
        """The tick of the first copy that could be made of a value."""
        found = self._first.get(v)
        if found is None:
            producer, at = self.schedule.producer[v], self.lives.reads_at
            found = min(at[r, v] for r in self.schedule.readers[v] if r != producer)
            self._first[v] = found
        return found

    def _apart(
        self, table: CopyTable, have: Ints, need: Ints, making: Floats
    ) -> tuple[Floats, Floats]:
        """What copies take while they are made: those that combine no partial values, and those
        that do, if it matters."""
        if self.places is None:
            return making, np.zeros_like(making)
        combines = table.combines[have, need]
        return np.where(combines, 0.0, making), np.where(combines, making, 0.0)

    def _begin(self, reader: int | None, v: int, combines: bool, at: int) -> int:
        """The tick from which a copy is on its way that is made by tick `at`, for one reader or for
        several; what leaves is only then."""
        if self.places is None:
            return at
        value = FlatId(v)
        reader = self.places.first(value) if reader is None else reader
        if self.places.leaves(reader, value):
            return at
        return min(at, 2 * self.places.of_read(reader, value, combines).issue)

    def _span(self, v: int) -> tuple[int, int]:
        """From when up to before when a value that is read as it was produced is in memory."""
        end = min(self.lives.last[v] + 2, self.times)
        return min(self.lives.made[v], end - 1), end

    def _reads_last(self, reader: int, v: int) -> bool:
        """Whether a unit alone is what a value is kept for in the end."""
        if v not in self._alone:
            producer, last = self.schedule.producer[v], self.lives.last[v]
            at = [r for r in self.schedule.readers[v] if self.lives.reads_until[r, v] == last]
            self._alone[v] = at[0] if len(at) == 1 and at[0] != producer else -1
        return self._alone[v] == reader

    def _read_before(self, reader: int, v: int) -> int:
        """Before which tick everything else that reads a value is done with it."""
        others = [
            r for r in self.schedule.readers[v] if r not in (reader, self.schedule.producer[v])
        ]
        return max((self.lives.reads_until[r, v] + 2 for r in others), default=0)

    def _passing(self, v: int) -> bool:
        """Whether a value has memory of its own that ends with its last reader."""
        return not self.lives.free[v] and self.lives.last[v] < self.times

    def _copy_ends(self, reader: int, v: int) -> int:
        """Before which tick a copy that a unit reads is no longer in memory."""
        root = self.program.instances[self.schedule.units[reader].root]
        if root.port == "output":
            return self.times
        return min(self.lives.reads_until[reader, v] + 2, self.times)


def _making(
    table: CopyTable, size: Ints, have: Ints, need: Ints, free: bool, straight: bool
) -> Floats:
    """Bytes beside the produced array while a copy of it is made.

    The copy and the largest block on the way; an all-reduce writes where it reads. Of a value
    that has no memory of its own (`free`) also what is sent: it must exist for that, and as it is
    produced, not as it lies in the place of what it takes over; of one that lies `straight` what a
    scattered sum is turned to before.
    """
    wire = table.wire[have, need]
    legal, sent = np.isfinite(wire) & (have != need), np.isfinite(wire) & (wire > 0)
    extra = np.where(table.in_place[have, need], 0.0, 1.0 * size[need])
    extra = extra + np.where(legal, table.scratch[have, need], 0.0)
    if straight:
        extra = extra + np.where(table.turned_before[have, need], 1.0 * size[have], 0.0)
    if free:
        extra = extra + np.where(sent, 1.0 * size[have], 0.0)
    return np.where(legal, extra, 0.0)


def _occupied(uses: Sequence[Use]) -> tuple[Use, ...]:
    return tuple(u for u in uses if u.start < u.end and u.amount.any())
