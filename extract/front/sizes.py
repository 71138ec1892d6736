"""Sizes: how large the tables of a problem are, and those of one on a mesh of more axes.

Over a axes of which each may cut one of m dims, in any order, a tensor has
Σ_j C(a, j)·m·(m + 1)···(m + j - 1) layouts: 4, 19, 106 for three dims. Each further axis multiplies
them, and so the entries of tables, by somewhat more than the last one did.

The tables of pairs are nearly all of a problem: an entry has seconds, joules, and some three
amounts of bytes in memory. How many there are grows by some twenty times with each axis of a mesh,
most of all with the copies that may be kept: two GPT-2 layers' train step on 2x2x2 devices has 40
million, 5 million without any. So what is too much is told before it is made. A problem may have
half of the room that those before it left; where it would have more, values whose tables would be
largest keep no copies, and where that is not enough, it is not made. The first one is made without
any copies if memory alone has room for it, because there is no plan without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.problem.columns import Columns
from tapestry_egg.extract.problem.kept import Holding, Keeping, KeptCopies, count_shared, distinct
from tapestry_egg.extract.problem.problem import Ints
from tapestry_egg.schedule.lifetimes import lifetimes

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.extract.problem.problem import Problem

#: Entries that all tables of a question may have together, equal ones counted once. With that many
#: the search of the step above took 6.5 GB in its main process. Meshes of two axes need less: the
#: steps of two GPT-2 layers and of Llama-8B on 8x8 devices have 3.6 and 3.4 million.
ENTRIES = 12_000_000

#: A table, by what it is made of, and its entries.
_Tables = dict[tuple[int, ...], int]
# By how much the third axis multiplies more than the second did: from 1.38 to 2.04 in programs of
# two products, their gradients and train step, and of attention, on meshes of 8 and 64.
_FASTER = 1.7
# What the entries of a pair on one axis are of those on two, as a power: 0.42 to 0.47 in the same.
_ROOT = 0.45


def entries(problem: Problem) -> int:
    """The entries of all tables of pairs of a problem."""
    return sum(pair.seconds.size for pair in problem.pairs)


def entries_of_three_axes(problems: Sequence[PlanProblem]) -> float:
    """About how many entries a problem of three axes would have, told from those of one program on
    meshes of one and two axes: entries(2)² / entries(1), and some.

    Infinite where none has two; where none has one, a pair of as many entries as the mean one
    stands for all.
    """
    by_axes: dict[int, int] = {}
    for p in problems:
        axes = len(p.choices.mesh.sizes)
        by_axes[axes] = max(by_axes.get(axes, 0), entries(p.problem))
    two = by_axes.get(2)
    if not two:
        return float("inf")
    pairs = max(len(p.problem.pairs) for p in problems)
    one = by_axes.get(1) or pairs * (two / pairs) ** _ROOT
    return _FASTER * two**2 / one


@dataclass
class Room:
    """The entries that are `left` for problems of which equal tables are made `once`; memory has
    room for `most`."""

    once: Once = field(default_factory=Once)
    left: float = ENTRIES
    most: float = ENTRIES
    _made: set[tuple[int, ...]] = field(default_factory=set)

    def keeping(self, choices: UnitChoices) -> KeptCopies | None:
        """Which copies may be kept so that there is room for the tables, for which it is taken;
        None where there is none even without them."""
        columns = Columns(choices, self.once)
        shared, most = count_shared(columns), self.left / 2
        direct = self._direct(columns)
        copies = self._copies(columns, Keeping(shared, most))
        sizes, kept = self._shared(copies)
        if sum(self._new(direct, *kept).values()) <= most and inf not in sizes:
            copies.keeping = Keeping(shared)  # it has left out none
            return self._taken(self._new(direct, *kept), copies)
        _, bare = self._shared(self._copies(columns, Keeping(shared, 0.0)))
        for limit in (*(n - 1.0 for n in sorted(set(sizes), reverse=True) if 1.0 < n < inf), 0.0):
            values = [k if n <= limit else b for n, k, b in zip(sizes, kept, bare, strict=True)]
            tables = self._new(direct, *values)
            if sum(tables.values()) <= most or (not limit and self._first(tables)):
                return self._taken(tables, self._copies(columns, Keeping(shared, limit)))
        return None

    def _first(self, tables: _Tables) -> bool:
        """Whether tables are those of the first problem, and not too many for memory."""
        return not self._made and sum(tables.values()) <= self.most / 2

    def _new(self, *parts: _Tables) -> _Tables:
        """Those of some tables that are not made yet."""
        every = {key: n for some in parts for key, n in some.items()}
        return {key: n for key, n in every.items() if key not in self._made}

    def _taken(self, tables: _Tables, copies: KeptCopies) -> KeptCopies:
        self.left -= sum(tables.values())
        self._made.update(tables)
        return copies

    def _direct(self, columns: Columns) -> _Tables:
        """The tables of values that one unit reads."""
        found: _Tables = {}
        for v in range(len(columns.program.types)):
            others = columns.others(v)
            if len(others) == 1:
                given, wanted = columns.gives(v), columns.wanted(others[0], v)
                found[id(given), id(wanted)] = len(np.unique(given)) * len(wanted.sets)
        return found

    def _copies(self, columns: Columns, keeping: Keeping) -> KeptCopies:
        schedule, target = columns.schedule, columns.choices.target
        of = target.epilogues, target.fusing
        lives = self.once(lambda: lifetimes(schedule, *of), "lifetimes", schedule)
        return KeptCopies(columns, lives, keeping)

    def _shared(self, copies: KeptCopies) -> tuple[list[float], list[_Tables]]:
        """Of every value that several read: its entries, infinitely many where its copies are not
        kept as they are too many, and its tables."""
        columns, (sizes, tables) = copies.columns, (list[float](), list[_Tables]())
        for unit in columns.schedule.units:
            own = [v for v in unit.outputs if len(columns.others(v)) > 1]
            for k, v in enumerate(own):
                given, before = columns.gives(v), copies.spared
                holding = copies.holding(v, self._distinct(given) if k else given)
                sizes.append(inf if copies.spared > before else float(copies.size(v, holding)))
                tables.append(self._tables(copies, v, holding))
        return sizes, tables

    def _distinct(self, given: Ints) -> Ints:
        """The distinct layouts of those that rows give."""
        return self.once(lambda: distinct(given), "distinct", given)[1]

    def _tables(self, copies: KeptCopies, v: int, holding: Holding) -> _Tables:
        columns = copies.columns
        found: _Tables = {(id(holding),): len(holding.base)}
        table = id(columns.table(v))
        every = zip(copies.served(v, holding), columns.others(v), strict=True)
        for (_, have, kept, holds), reader in every:
            wanted = columns.wanted(reader, v)
            key = (table, id(have), id(kept), id(holds), id(wanted))
            found[key] = len(have) * len(wanted.sets)
        return found
