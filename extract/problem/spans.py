"""Spans: to which events of the timeline the seconds of rows and pairs belong.

What a kernel takes is its unit's; what a copy takes over links is the event of its window
(`extract/problem/issue_places.py`), and what it takes within a device is the unit's beside which it
is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.joiner import UnitRows
from tapestry_egg.graph.ids import FlatId

from .columns import Columns, Wanted
from .issue_places import IssuePlaces, Window
from .problem import Floats, Ints, Pair, Span, Variable
from .timeline import Events, Timeline

Parts = tuple[Floats, Floats, Floats]  # seconds of combining, of other sending, within the device


class Spans:
    """The spans of the variables and pairs of one problem, and its timeline."""

    def __init__(self, columns: Columns, slowdown: float) -> None:
        self.columns, self.once, self.slowdown = columns, columns.once, slowdown
        self.schedule, self.program = columns.schedule, columns.program
        self.places = IssuePlaces(self.schedule)
        self.events = Events(len(self.schedule.units))

    def of_unit(self, u: int, rows: UnitRows, weight: float, base: Ints) -> list[Span]:
        """What a unit takes that runs as rows `base` say, copies of its own results included."""
        kernel = self.once(
            lambda: _finite((rows.seconds * weight)[base]), "kernel", rows, weight, base
        )
        found = [Span(u, kernel)] if kernel.any() else []
        for v in self.schedule.units[u].outputs:
            if u in self.schedule.readers[v]:
                given, wanted = self.columns.gives(v), self.columns.wanted(u, v)
                parts = self._own(v, given, wanted, self.columns.copy_weight(u, v), base)
                found += self._spans(parts, [self.places.of_read(u, v, x) for x in (True, False)])
        return found

    def of_kept(self, v: int, have: Ints, copy: Ints, turns: tuple[bool, bool]) -> list[Span]:
        """What it takes to make the copy that is kept of a value, per row; -1 for none. `turns` as
        in `Memory.turns`."""
        table = self.columns.table(v)
        weight = self.program.bodies[self.program.body_of[v]].weight

        def seconds() -> Parts:
            holds = copy >= 0
            some = np.where(holds, copy, have)
            (_, before), _ = table.turning(*turns)
            *sent, local = self._matrices(table)
            every = (*sent, local + before)
            made = [np.where(holds, m[have, some], 0.0) * weight for m in every]
            return made[0], made[1], made[2]

        parts = self.once(seconds, "kept spans", table, have, copy, weight, turns)
        return self._spans(parts, [self.places.of_kept(FlatId(v), x) for x in (True, False)])

    def of_read(
        self,
        reader: int,
        v: int,
        have: Ints,
        kept: Ints,
        wanted: Wanted,
        turns: tuple[bool, bool],
    ) -> list[Span]:
        """What the copies take that one reader makes itself, [labels of the value, labels of the
        reader]; `kept` as in `Memory.read`, `turns` as in `Memory.turns`."""
        table, weight = self.columns.table(v), self.columns.copy_weight(reader, v)

        def seconds() -> Parts:
            made = [np.zeros((len(have), len(wanted.sets))) for _ in range(3)]
            (after, before), _ = table.turning(*turns)
            *sent, local = self._matrices(table)
            a = have[:, None]
            for j, b in wanted.in_turn:
                there = (a == b) | (kept[:, None] == b)
                for part, m in zip(made, (*sent, local + before), strict=True):
                    part[:, j] += np.where(there, 0.0, m[a, b]) * weight
                made[2][:, j] += after[a, b] * weight
            return made[0], made[1], made[2]

        parts = self.once(seconds, "read spans", table, have, kept, wanted, weight, turns)
        return self._spans(
            parts, [self.places.of_read(reader, FlatId(v), x) for x in (True, False)]
        )

    def placed(
        self, variables: Sequence[Variable], pairs: Sequence[Pair]
    ) -> tuple[tuple[Variable, ...], tuple[Pair, ...], Timeline]:
        """Variables and pairs with the final numbers of their events, and the timeline."""
        timeline, final = self.events.timeline(self.slowdown)

        def spans(part: Variable | Pair) -> tuple[Span, ...]:
            return tuple(Span(final.get(x.event, x.event), x.amount) for x in part.spans)

        return (
            tuple(replace(v, spans=spans(v)) for v in variables),
            tuple(replace(p, spans=spans(p)) if p.spans else p for p in pairs),
            timeline,
        )

    def _own(self, v: int, given: Ints, wanted: Wanted, weight: float, base: Ints) -> Parts:
        """Copies that a port makes of what it makes itself, per row."""
        table = self.columns.table(v)

        def seconds() -> Parts:
            needs = [wanted.sets[k] for k in wanted.label]
            made = [
                np.array([sum(m[a, b] for b in n) for a, n in zip(given, needs, strict=True)])
                for m in self._matrices(table)
            ]
            return made[0][base] * weight, made[1][base] * weight, made[2][base] * weight

        return self.once(seconds, "own spans", table, given, wanted, weight, base)

    def _spans(self, parts: Parts, windows: Sequence[Window]) -> list[Span]:
        found = []
        for amount, w in zip(parts, windows, strict=False):
            if amount.any():
                found.append(Span(self.events.collective(w.issue, w.arrive), amount))
        if parts[2].any():
            found.append(Span(windows[0].at, parts[2]))
        return found

    def _matrices(self, table: CopyTable) -> Parts:
        """[from, to] each: seconds of copies over links that combine partial values, of others over
        links, and within the device."""

        def made() -> Parts:
            local = _finite(table.local)
            links = _finite(table.seconds) - local
            combined = np.where(table.combines, links, 0.0)
            return combined, links - combined, local

        return self.once(made, "parts of copies", table)


def _finite(amounts: Floats) -> Floats:
    return np.where(np.isfinite(amounts), amounts, 0.0)
