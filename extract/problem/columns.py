"""Columns: what the rows of a unit give and need, as layout numbers, once per kind of unit.

Units of equal structure share their rows (`extract/choices/joiner.py`), so what follows from the
rows alone is worked out once, however deep the program is: equal units get the very same arrays
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.once import Once, Plain
from tapestry_egg.extract.choices.unit_choices import UnitChoices, UnitRows
from tapestry_egg.schedule.schedules import read_position

from .problem import Ints, label


@dataclass(frozen=True, eq=False)
class Wanted:
    """In which layouts the rows of a unit read one value: per row a label, per label the numbers
    of the distinct layouts; `anywhere` says of each layout whether some row wants it."""

    label: Ints  # [rows]
    sets: tuple[tuple[int, ...], ...]
    anywhere: NDArray[np.bool_]  # [layouts]

    @cached_property
    def in_turn(self) -> tuple[tuple[Ints, Ints], ...]:
        """The layouts of all sets that have one, then the second ones, and so on: which sets have
        such, and the layout of each."""
        most = max(map(len, self.sets), default=0)
        some = [[(j, x[k]) for j, x in enumerate(self.sets) if k < len(x)] for k in range(most)]
        return tuple([(which, layout) for which, layout in (np.array(x).T for x in some)])


#: The units that read a value, in the program's order, and the rank of each.
_Readers = tuple[tuple[int, ...], Plain]


class Columns:
    """Layout numbers of the units of one program, and who reads what in which order."""

    def __init__(self, choices: UnitChoices, once: Once | None = None) -> None:
        self.choices, self.schedule, self.program = (
            choices,
            choices.schedule,
            choices.schedule.program,
        )
        self.once = once or Once()
        self._tables: dict[int, CopyTable] = {}
        self._wanted: dict[tuple[int, int], Wanted] = {}
        self._gives: dict[int, Ints] = {}
        # Who reads what in which order is the same on all meshes.
        readers = self.schedule.once(dict[int, _Readers], "readers in order")
        self._others: dict[int, _Readers] = readers

    def table(self, v: int) -> CopyTable:
        """The copies between the layouts of a value's type."""
        found = self._tables.get(v)
        if found is None:
            found = self._tables[v] = self.choices.table(v)
        return found

    def others(self, v: int) -> tuple[int, ...]:
        """Units other than its producer that read a materialised value, in the program's order."""
        return self._reading(v)[0]

    def ranks(self, v: int) -> Plain:
        """Which of the `others` read before which: equal numbers for equal places."""
        return self._reading(v)[1]

    def gives(self, v: int) -> Ints:
        """Per row of its producer: the number of the layout in which a value is made."""
        found = self._gives.get(v)
        if found is None:
            found = self._gives[v] = self._given(v)
        return found

    def _given(self, v: int) -> Ints:
        u = self.schedule.producer[v]
        q = self.schedule.units[u].outputs.index(v)
        rows, table = self.choices.rows[u], self.table(v)
        return self.once(
            lambda: np.array([table.number[g[q]] for g in rows.gives], dtype=np.int64),
            "gives",
            rows,
            q,
            table,
        )

    def wanted(self, u: int, v: int) -> Wanted:
        """The layouts in which the rows of unit u read value v."""
        found = self._wanted.get((u, v))
        if found is None:
            self._wanted.update(self._read(u))
            found = self._wanted[u, v]
        return found

    def _read(self, u: int) -> dict[tuple[int, int], Wanted]:
        """The same for all values that unit u reads: equal units read theirs alike."""
        ports: dict[int, list[int]] = {}
        for k, (_, _, v) in enumerate(self.schedule.units[u].reads):
            ports.setdefault(v, []).append(k)
        rows, tables = self.choices.rows[u], tuple([self.table(v) for v in ports])

        def every() -> list[Wanted]:
            return [
                self._layouts(rows, own, table)
                for own, table in zip(ports.values(), tables, strict=True)
            ]

        found = self.once(every, "wanted", rows, tables)
        return {(u, v): wanted for v, wanted in zip(ports, found, strict=True)}

    def _layouts(self, rows: UnitRows, ports: Sequence[int], table: CopyTable) -> Wanted:
        number = table.number
        needs = [tuple(dict.fromkeys([number[n[k]] for k in ports])) for n in rows.needs]
        labels, sets = label(needs)
        anywhere = np.zeros(len(table.layouts), dtype=np.bool_)
        anywhere[[n for s in sets for n in s]] = True
        return Wanted(labels, tuple(sets), anywhere)

    def copy_weight(self, u: int, v: int) -> float:
        """How often unit u makes a copy of value v in one run of the program."""
        for i, p, w in self.schedule.units[u].reads:
            if w == v:
                instance = self.program.instances[i]
                return instance.input_weights[p] if instance.input_weights else instance.weight
        return 1.0

    def sharable(self, table: CopyTable, collectives: float) -> NDArray[np.bool_]:
        """[have, kept]: whether keeping the copy for several readers is worth a choice: it sends
        something, and only gathers or combines what the produced value has spread out, or is made
        by no more than so many collectives of any kind. Of infinitely many: every copy."""

        def compare() -> NDArray[np.bool_]:
            reached = np.isfinite(table.seconds) & ~np.eye(len(table.layouts), dtype=np.bool_)
            if collectives == np.inf:
                return reached
            whole = np.array([not x.partial for x in table.layouts], dtype=np.bool_)
            few = whole[None, :] & (table.sends <= collectives)
            return reached & (table.wire > 0) & (table.collects | few)

        return self.once(compare, "sharable", table, collectives)

    def _reading(self, v: int) -> _Readers:
        found = self._others.get(v)
        if found is None:
            u = self.schedule.producer[v]
            if u < 0:
                return (), Plain()
            places = {
                r: read_position(self.schedule, r, v) for r in self.schedule.readers[v] if r != u
            }
            order = sorted(places, key=lambda r: (places[r], r))
            distinct = sorted(set(places.values()))
            found = self._others[v] = (
                tuple(order),
                Plain([distinct.index(places[r]) for r in order]),
            )
        return found
