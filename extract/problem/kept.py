"""Kept: which copies of a value its readers may share, and which of them each copy serves.

A copy that is kept is made at its first reader and serves the readers up to some last one. Which
there are decides how large tables are: in large programs not every kind of copy is tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.once import Plain
from tapestry_egg.graph.layout import Layout
from tapestry_egg.schedule.lifetimes import Lifetimes

from .columns import Columns, Wanted
from .problem import Ints, label

# Kept copies may end at the last reader or before one of the longest waits, at most this many:
# each ending multiplies the rows of a value by its kept layouts. Nothing was measured for it; where
# it leaves endings out, the front's notes say so.
_ENDINGS = 3
# Copies of smaller values are kept to the last reader, which spares the rows of scales and biases.
# No measurement behind it either, and it is told of like the other.
_SMALL = 1 << 16
# Programs with no more values of several readers than this try every copy as one that is kept.
# With 31 such values on 2x4 devices the tables of pairs would be six times as large as with gathers
# alone, and searches of equal work would prove less.
_FEW = 3
# With no more than this, copies by one collective on meshes of several axes too: on 2x4 devices the
# tables of a transformer of 12 layers (305 such values) grow by half, on 8 by a ninth.
_SOME = 64

Kept = tuple[Layout, int] | None  # (layout, position of the last reader served)


@dataclass(frozen=True)
class Keeping:
    """Which copies may be kept: as is fit for a program of which several units read so many values
    (`shared`), and none of a value for whose tables they would make more than so many `entries`."""

    shared: int
    entries: float = inf


@dataclass(frozen=True, eq=False)
class Holding:
    """Rows of a variable that decides what becomes of a value: row r stands for entry `base[r]` of
    what it was made from, produces layout number `have[r]` and keeps a copy in layout `copy[r]`
    until reader `until[r]`, both -1 where it keeps none."""

    base: Ints  # [rows]
    have: Ints  # [rows]
    copy: Ints  # [rows]
    until: Ints  # [rows], a place among the readers
    rows: tuple[tuple[Layout, Kept], ...]


#: Per row a label, and per label: the layout made, the copy that serves, whether one is kept.
Served = tuple[Ints, Ints, Ints, Ints]


class KeptCopies:
    """The copies of the values of one program that may be kept. For `fewer_endings` values one can
    be dropped after fewer readers than it could be; for `fewer_copies` not every copy that two
    readers could share may be kept, and for `spared` none for what their tables would take."""

    def __init__(self, columns: Columns, lives: Lifetimes, keeping: Keeping | None = None) -> None:
        self.columns, self.once, self.lives = columns, columns.once, lives
        self.keeping = keeping or Keeping(count_shared(columns))
        self.fewer_endings = self.fewer_copies = self.spared = 0
        self._held: dict[tuple[int, int], tuple[Ints, Holding]] = {}

    def holding(self, v: int, haves: Ints) -> Holding:
        """Rows once without a kept copy, then with each that two readers could share, or that one
        could have made before its turn."""
        key = v, id(haves)  # its object beside it, as its identity is the key
        if key not in self._held:
            self._held[key] = haves, self._holding(v, haves)
        return self._held[key][1]

    def _holding(self, v: int, haves: Ints) -> Holding:
        table, readers = self.columns.table(v), self.columns.others(v)
        ranks = self.columns.ranks(v)
        wanting = tuple(self.columns.wanted(r, v) for r in readers)
        shared = self.once(
            lambda: _shared_layouts(table, wanting, ranks), "shared", table, wanting, ranks
        )
        endings = tuple(self._endings(v, readers, who) for _, who in shared)
        every = zip(shared, endings, strict=True)
        copies = Plain([(b, e) for (b, _), ends in every for e in ends])
        worth = self._worth(v, haves, shared)
        # A copy that the value's first reader alone reads is its own.
        self.fewer_endings += any(
            len(ends) < len(_later(who, ranks)) and worth[haves, b].any()
            for (b, who), ends in zip(shared, endings, strict=True)
        )
        if copies and not self._fits(v, haves, copies, worth):
            self.spared += 1
            copies = Plain()
        return self._rows(table, haves, copies, worth)

    def _fits(
        self,
        v: int,
        haves: Ints,
        copies: Plain,
        worth: NDArray[np.bool_],
    ) -> bool:
        """Whether a value's tables have no more entries than they may, or no kept copies at all."""
        most = self.keeping.entries
        if most == inf:
            return True
        kept = int(worth[np.ix_(haves, np.array([b for b, _ in copies], dtype=np.int64))].sum())
        if not kept or len(haves) + kept > most:  # what is too much is not made to be counted
            return not kept
        return self.size(v, self._rows(self.columns.table(v), haves, copies, worth)) <= most

    def size(self, v: int, holding: Holding) -> int:
        """The rows that decide what becomes of a value, and the entries of the tables of its pairs
        with all readers."""
        return len(holding.base) + sum(
            [
                len(have) * len(self.columns.wanted(reader, v).sets)
                for (_, have, *_), reader in zip(
                    self.served(v, holding), self.columns.others(v), strict=True
                )
            ]
        )

    def served(self, v: int, holding: Holding) -> tuple[Served, ...]:
        """What each reader of a value is served by, in their order."""
        ranks = self.columns.ranks(v)

        def every() -> tuple[Served, ...]:
            of = {rank: self._serving(holding, ranks, rank) for rank in set(ranks)}
            return tuple([of[rank] for rank in ranks])

        return self.once(every, "served", holding, ranks)

    def _serving(self, holding: Holding, ranks: tuple[int, ...], rank: int) -> Served:
        """What readers of that rank are served by."""
        holds = holding.copy >= 0
        reaches = holds & (np.array(ranks)[holding.until] >= rank)
        served = np.where(reaches, holding.copy, -1)
        number, first = _number_rows(holding.have, served, holds)
        same, some = self.once.same, holds[first].astype(np.int64)
        return same(number), same(holding.have[first]), same(served[first]), same(some)

    def _rows(
        self,
        table: CopyTable,
        haves: Ints,
        copies: Plain,
        worth: NDArray[np.bool_],
    ) -> Holding:
        def rows() -> Holding:
            options = {a: [(b, e) for b, e in copies if worth[a, b]] for a in set(haves.tolist())}
            made = [
                (r, a, b, e)
                for r, a in enumerate(haves.tolist())
                for b, e in ((-1, -1), *options[a])
            ]
            base, have, copy, until = np.array(made, dtype=np.int64).reshape(-1, 4).T
            names = table.layouts
            records = tuple((names[a], None if b < 0 else (names[b], e)) for _, a, b, e in made)
            return Holding(base.copy(), have.copy(), copy.copy(), until.copy(), records)

        return self.once(rows, "holding", table, haves, copies, worth)

    def _worth(self, v: int, haves: Ints, shared: Plain) -> NDArray[np.bool_]:
        """[have, kept]: copies of a value that may be kept."""
        table, most = self.columns.table(v), self._collectives(v)
        fewer, some = self.once(
            lambda: self._copies(table, most, haves, shared), "worth", table, most, haves, shared
        )
        self.fewer_copies += fewer
        return some

    def _copies(
        self, table: CopyTable, most: float, haves: Ints, shared: Plain
    ) -> tuple[bool, NDArray[np.bool_]]:
        """Whether there are others, too, and the copies that may be kept."""
        every, some = (self.columns.sharable(table, n) for n in (np.inf, most))
        if most < np.inf and (alone := [b for b, who in shared if len(who) < 2]):
            some = some.copy()
            some[:, alone] = False
            some = self.once.same(some)
        kept = [b for b, _ in shared]
        others = (every & ~some)[np.ix_(np.unique(haves), np.array(kept, dtype=np.int64))]
        return bool(others.any()), some

    def _collectives(self, v: int) -> float:
        """By how many collectives a kept copy of a value may be made that no gathers make.

        Such copies lead to most layouts that there are. In large programs only those are tried that
        one collective makes of what a kernel or a reduction made: an elementwise result is made in
        whatever layout its operands are read.
        """
        shared, schedule = self.keeping.shared, self.columns.schedule
        if shared <= _FEW:
            return np.inf
        several = sum(size > 1 for size in self.columns.choices.mesh.sizes) > 1
        if several and shared > _SOME:
            return 0.0
        program = schedule.program
        root = program.instances[schedule.units[schedule.producer[v]].root]
        made = not root.port and root.signature.fusion not in ("loop", "view")
        return 1.0 if made and program.types[v].nbytes >= _SMALL else 0.0

    def _endings(self, v: int, readers: Sequence[int], sharing: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of readers after which a kept copy that `sharing` can use may be dropped."""
        later = _later(sharing, self.columns.ranks(v))
        if self.columns.program.types[v].nbytes < _SMALL or len(later) < 2:
            return sharing[-1:]
        if self.keeping.shared <= _FEW:
            return later[-_ENDINGS:]
        times = [self.lives.reads_at[readers[k], v] for k in sharing]
        waits = sorted(range(1, len(sharing) - 1), key=lambda k: times[k] - times[k + 1])
        return tuple(sorted({sharing[-1], *(sharing[k] for k in waits[: _ENDINGS - 1])}))


def count_shared(columns: Columns) -> int:
    """How many values of a program several units read."""
    every = range(len(columns.program.types))
    return sum(len(columns.others(v)) > 1 for v in every)


def distinct(numbers: Ints) -> tuple[Ints, Ints]:
    """Label per entry in order of first occurrence, and the entry of each label."""
    labels, values = label(numbers.tolist())
    return labels, np.array(values, dtype=np.int64)


def _shared_layouts(table: CopyTable, wanting: Sequence[Wanted], ranks: tuple[int, ...]) -> Plain:
    """Layouts that two readers or more can use, or one that is not the first: its copy can be made
    before what others make is in memory too. Each with the places of those readers."""
    found = []
    for b in range(len(table.layouts)):
        who = tuple(k for k, w in enumerate(wanting) if w.anywhere[b])
        if len(who) >= 2 or _later(who, ranks):
            found.append((b, who))
    return Plain(found)


@lru_cache(maxsize=1 << 14)
def _later(who: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Of some readers the last at each place, but those that read before all others."""
    last = {ranks[k]: k for k in who if ranks[k] > 0}
    return tuple(last[place] for place in sorted(last))


def _number_rows(*columns: NDArray[Any]) -> tuple[Ints, Ints]:
    """Label per row of several columns in order of first occurrence, and each label's first row."""
    labels, keys = label(list(zip(*(c.tolist() for c in columns), strict=True)))
    first = np.zeros(len(keys), dtype=np.int64)
    first[labels[::-1]] = np.arange(len(labels))[::-1]
    return labels, first
