"""Mergeable collectives: what of a copy's seconds merging may take away, and what it never does.

Collectives of one kind over the same devices that need not wait for each other can be one, which
has one latency. How many there will be is not known to a sum. But along a chain of units, each of
which reads what the one before it makes, every collective that is read on the way waits for those
before it: these are never merged with one another. So all collectives that may be merged are priced
without their latencies, but for those read along chains, which have a share of theirs. Such a sum
is no more than what any merging of a labelling takes, whatever the chains; and of those in which
the labelling's latencies are most, little less.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.machine.costs import MOVING, carried_as, collective_seconds

from .columns import Columns
from .copies import CopyTable
from .once import Once
from .problem import Floats, Ints
from .unit_choices import UnitChoices

if TYPE_CHECKING:
    from .assemble import PlanProblem

#: A read: of a value, by a unit.
Read = tuple[int, int]


@dataclass(frozen=True)
class Chains:
    """Which share of the latency of its collective is paid at each read (value, unit), and at all
    others: with none there it is a bound."""

    shares: Mapping[Read, float]
    others: float = 0.0

    def at(self, read: Read) -> float:
        """The share that is paid at a read."""
        return max(self.shares.get(read, 0.0), self.others)


def mean(chains: Sequence[Chains], others: float = 0.0) -> Chains:
    """The mixture of some chains, and another share of latencies elsewhere."""
    shares: dict[Read, float] = {}
    for one in chains:
        for read, share in one.shares.items():
            shares[read] = shares.get(read, 0.0) + share / len(chains)
    return Chains(shares, others)


# Amounts, between none and all that one collective may have, at which its seconds are looked at.
_POINTS = 1 << 15


@dataclass(frozen=True, eq=False)
class Mergeable:
    """Which of the copies of one program's values may be merged, and with which shares of their
    latencies they are priced: those that are read along `chains`."""

    columns: Columns
    chains: Chains = Chains({})

    def saved(self, v: int) -> Floats | None:
        """[from, to]: seconds of the copies of a value that merging may take away; None where it
        takes away nothing."""
        if self.columns.program.body_of[v]:
            return None
        table = self.columns.table(v)
        return self.columns.once(lambda: self._saved(table), "mergeable", table)

    def less(self, v: int) -> Floats | None:
        """[from, to]: what copies of a value are cheaper by, wherever they are read."""
        saved = self.saved(v)
        if saved is None or not self.chains.others:
            return saved
        part = 1.0 - self.chains.others
        return self.columns.once(lambda: part * saved, "less", saved, part)

    def more(self, v: int, reader: int) -> float:
        """Which share of `saved` is paid all the same where a unit reads the value."""
        return self.chains.at((v, reader)) - self.chains.others

    def _saved(self, table: CopyTable) -> Floats | None:
        choices = self.columns.choices
        combiner, dtype = choices.target.combiner, table.tensor.dtype
        if combiner is None or dtype.startswith("key<"):
            return None
        found = np.zeros_like(table.seconds)
        for (a, b), step in table.step_of.items():
            kind = step.kind
            if int(table.following[a, b]) != b or kind not in MOVING or kind not in combiner.kinds:
                continue
            if choices.mesh.parts(step.axes) < 2 or carried_as(kind, step.monoid, dtype) != kind:
                continue
            least = self._least(kind, step.axes, float(table.local_bytes[a]))
            found[a, b] = max(0.0, float(table.seconds[a, b]) - least)
        return found if found.any() else None

    def _least(self, kind: str, axes: tuple[int, ...], size: float) -> float:
        """Seconds that so many bytes add at least to those of any collective that they join."""
        target = self.columns.choices.target
        combiner = target.combiner
        assert combiner is not None
        step, times = self._times(kind, axes)
        steps = int(size / step)
        if steps >= _POINTS:
            return np.inf
        # From x bytes to x + size, whatever x is between two points: seconds rise with bytes.
        more = max(0.0, float((times[steps:-1] - times[1 : _POINTS - steps]).min(initial=np.inf)))
        if kind in combiner.contiguous:
            more += 4.0 * size / target.hbm_bytes_per_second
        return more

    def _times(self, kind: str, axes: tuple[int, ...]) -> tuple[float, Floats]:
        """Seconds of collectives of all amounts that one may have, from nothing to the most, at
        equal steps; and how many bytes a step is."""
        choices = self.columns.choices
        mesh, target = choices.mesh, choices.target
        assert target.combiner is not None
        whole = mesh.parts(axes) if kind == "all_gather" else 1
        amounts = np.linspace(0.0, target.combiner.bytes / whole, _POINTS)

        def times() -> Floats:
            return np.asarray(collective_seconds(kind, amounts, axes, mesh, target))

        return float(amounts[1]), self.columns.once(times, "times", kind, axes)


def may_merge(choices: UnitChoices) -> bool:
    """Whether seconds are a sum in which collectives may be merged."""
    target = choices.target
    return target.combiner is not None and target.slowdown is None and choices.mesh.devices > 1


def most_saved(assembled: PlanProblem, rows: Ints, once: Once) -> float:
    """Seconds that merging the collectives of a labelling saves at most."""
    paid = _latencies(assembled, rows, once)
    return sum(paid.values()) - _longest(assembled, paid)[0]


def chain_of(assembled: PlanProblem, rows: Ints, once: Once) -> Chains:
    """The reads along a chain of units on which the collectives of a labelling that may be merged
    have the longest latencies together, each with its whole one."""
    return Chains(dict.fromkeys(_longest(assembled, _latencies(assembled, rows, once))[1], 1.0))


def _longest(assembled: PlanProblem, paid: Mapping[Read, float]) -> tuple[float, list[Read]]:
    """The longest chain, by what is paid at each read: all of that, and its reads from the last."""
    schedule = assembled.choices.schedule
    reads = [tuple(dict.fromkeys(v for _, _, v in unit.reads)) for unit in schedule.units]
    total = [0.0] * len(reads)  # of the longest chain to each unit
    last: list[Read | None] = [None] * len(reads)
    for u, values in enumerate(reads):
        for v in values:
            maker = schedule.producer[v]
            if 0 <= maker < u:  # others leave the program, or go round
                here = total[maker] + paid.get((v, u), 0.0)
                if last[u] is None or here > total[u]:
                    total[u], last[u] = here, (v, u)
    end: tuple[float, Read | None] = (0.0, None)
    for u, values in enumerate(reads):
        for v in values:
            maker = schedule.producer[v]
            here = total[maker] + paid.get((v, u), 0.0) if maker >= 0 else 0.0
            if here > end[0]:
                end = here, (v, u)
    chain: list[Read] = []
    read = end[1]
    while read is not None:
        chain.append(read)
        read = last[schedule.producer[read[0]]]
    return end[0], chain


def _latencies(assembled: PlanProblem, rows: Ints, once: Once) -> dict[Read, float]:
    """Of the reads (value, unit) in another layout than a labelling makes the value in: what
    merging may save of the collective."""
    choices = assembled.choices
    mergeable = Mergeable(Columns(choices, once))
    made = [choices.rows[u].gives[int(r[rows[u]])] for u, r in enumerate(assembled.unit_row)]
    have = {
        v: layout
        for unit, gives in zip(choices.schedule.units, made, strict=True)
        for v, layout in zip(unit.outputs, gives, strict=True)
    }
    found: dict[Read, float] = {}
    for u, unit in enumerate(choices.schedule.units):
        needs = choices.rows[u].needs[int(assembled.unit_row[u][rows[u]])]
        for need, (_, _, v) in zip(needs, unit.reads, strict=True):
            if v not in have or need == have[v] or (saved := mergeable.saved(v)) is None:
                continue
            number = choices.table(v).number
            seconds = float(saved[number[have[v]], number[need]])
            found[v, u] = max(found.get((v, u), 0.0), seconds)
    return found
