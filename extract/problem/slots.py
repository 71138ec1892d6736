"""Slots: to which reads the latencies of rows and pairs belong (`latencies.py`)."""

from __future__ import annotations

import numpy as np

from .columns import Columns, Wanted
from .kept import Holding
from .latencies import SAVED, Latencies
from .mergeable import Mergeable
from .problem import Floats, Ints, Span


class Slots:
    """The latencies of the variables and pairs of one problem, by the reads that pay them."""

    def __init__(self, columns: Columns) -> None:
        self.columns, self.once = columns, columns.once
        self.mergeable = Mergeable(columns)
        schedule = columns.schedule
        end = len(schedule.units)  # what a port sends that it makes itself arrives after all units
        found: list[tuple[int, int, int, int]] = []  # (reader, maker, unit, value)
        for u, unit in enumerate(schedule.units):
            for v in dict.fromkeys(v for _, _, v in unit.reads):
                maker = schedule.producer[v]
                # Round a loop nothing is read before it is made. Reads are those of the program,
                # whatever the mesh: networks of one form have the same ones.
                once = not columns.program.body_of[v] and columns.copy_weight(u, v) == 1.0
                if once and 0 <= maker <= u:
                    found.append((end if maker == u else u, maker, u, v))
        found.sort()
        self.reads = {(u, v): SAVED + 1 + k for k, (_, _, u, v) in enumerate(found)}  # events
        ends = np.array([(r, m) for r, m, _, _ in found], dtype=np.int64).reshape(-1, 2)
        self.latencies = Latencies(ends[:, 1].copy(), ends[:, 0].copy(), end)

    def of_kept(self, v: int, holding: Holding) -> list[Span]:
        """What merging may take away of the copy that is kept of a value, per row."""
        latency = self.mergeable.latency(v)
        if latency is None:
            return []

        def saved() -> Floats:
            some = np.where(holding.copy >= 0, holding.copy, holding.have)
            return np.where(holding.copy >= 0, latency[holding.have, some], 0.0)

        return _spans(SAVED, self.once(saved, "kept latency", holding, latency))

    def of_own(self, u: int, v: int, base: Ints) -> list[Span]:
        """The same of copies that a port makes of what it makes itself, per row."""
        latency, event = self.mergeable.latency(v), self.reads.get((u, v))
        if latency is None or event is None or self.columns.schedule.producer[v] != u:
            return []
        given, wanted = self.columns.gives(v), self.columns.wanted(u, v)

        def saved() -> Floats:
            needs = [wanted.sets[k] for k in wanted.label]
            every = [sum(latency[a, b] for b in n) for a, n in zip(given, needs, strict=True)]
            return np.array(every)[base]

        amount = self.once(saved, "own latency", given, wanted, latency, base)
        return [*_spans(SAVED, amount), *_spans(event, amount)]

    def of_read(self, reader: int, v: int, have: Ints, kept: Ints, wanted: Wanted) -> list[Span]:
        """What merging may take away of copies that one reader makes itself, and the latency that a
        chain pays which leads to it, whoever makes the copy: [labels of the value, labels of the
        reader]."""
        latency, event = self.mergeable.latency(v), self.reads.get((reader, v))
        if latency is None or event is None:
            return []

        def made() -> tuple[Floats, Floats]:
            saved, paid = (np.zeros((len(have), len(wanted.sets))) for _ in range(2))
            a = have[:, None]
            for j, b in wanted.in_turn:
                own = latency[a, b]
                saved[:, j] += np.where(kept[:, None] == b, 0.0, own)
                paid[:, j] = np.maximum(paid[:, j], own)
            return saved, saved if (saved == paid).all() else paid

        saved, paid = self.once(made, "read latency", latency, have, kept, wanted)
        return [*_spans(SAVED, saved), *_spans(event, paid)]


def _spans(event: int, amount: Floats) -> list[Span]:
    return [Span(event, amount)] if amount.any() else []
