"""Mergeable collectives: what merging may take away of what the copies of a plan take.

Collectives of one kind over the same devices that need not wait for each other can be one, which
has one latency. How many there will be is not known to a sum. Two things are:

- One collective of x bytes takes T(x) seconds, and no more than M bytes are made one. Of every
  line below T, T(x) >= l + b x for all x up to M, this follows: those that the copies of one kind
  are merged into take l for each, and b for each of the bytes of all copies. With l = 0 it says
  what bytes take in the fullest collectives that there may be.
- Along a chain of units, each of which reads what the one before it makes, every collective that is
  read on the way waits for those before it: these are never merged with one another. So there are
  no fewer collectives of a kind than are read along any chain, and each kind may have its own.

So each kind is priced by a line and a chain: every copy by its bytes, those that are read along the
chain by l besides. Or all kinds have one chain: what is read along it pays its own collective, and
all else what its bytes add, at least, to those of any collective that they join. Either is a sum,
and no more than what any merging of any labelling takes, whatever the lines and chains; of those
that are best for a labelling, it is little less than what merging that labelling takes. Means of
such prices are no more than that either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.collective_lines import (
    FINELY,
    Line,
    collective_times,
    lines_below,
    steepest_below,
)
from tapestry_egg.machine.combiner import type_together
from tapestry_egg.machine.costs import MOVING, carried_as
from tapestry_egg.schedule.schedules import Schedule, read_position

from .columns import Columns
from .problem import Floats, Ints

if TYPE_CHECKING:
    from .assemble import PlanProblem

#: A read: of a value, by a unit.
Read = tuple[int, int]
#: What all copies have in common that may be one collective: kind, axes, monoid, of sums the type.
Kind = tuple[str, tuple[int, ...], str | None, str | None]


@dataclass(frozen=True)
class Paid:
    """How the copies of one kind are paid: each by its bytes, and those at `reads` along a chain by
    a latency besides."""

    line: Line
    reads: frozenset[Read] = frozenset()


@dataclass(frozen=True)
class Prices:
    """What is paid for the copies of every kind: of a kind that is not here the steepest line. With
    a `chain`, all that its reads take, and elsewhere what bytes add at least to any collective."""

    kinds: Mapping[Kind, Paid] = field(default_factory=dict)
    chain: frozenset[Read] | None = None


@dataclass(frozen=True)
class Chains:
    """The mean of some prices, by weights that are one together. `others` is a share of what
    merging may take away that is paid all the same: with none it is a bound."""

    prices: tuple[tuple[float, Prices], ...] = ((1.0, Prices()),)
    others: float = 0.0


@dataclass(frozen=True, eq=False)
class Mergeable:
    """Which of the copies of one program's values may be merged, and what they cost at some
    prices."""

    columns: Columns
    chains: Chains = Chains()
    _known: dict[int, Floats | None] = field(default_factory=dict, init=False)  # value -> saved
    _known_lines: dict[Kind, tuple[tuple[float, float, float], ...]] = field(
        default_factory=dict, init=False
    )

    def saved(self, v: int) -> Floats | None:
        """[from, to]: seconds of the copies of a value that merging may take away, but for those
        that are paid along chains; None where it takes away nothing."""
        if v not in self._known:
            self._known[v] = self._saved(v)
        return self._known[v]

    def _saved(self, v: int) -> Floats | None:
        moves = self.moves(v)
        if not moves:
            return None
        table = self.columns.table(v)
        lines = tuple((k, self._lines(k)) for k in moves)

        def saved() -> Floats:
            found = np.zeros_like(table.seconds)
            for kind, own in lines:
                at = moves[kind]
                size = table.local_bytes[at[0]]
                for w, latency, each in own:
                    if each < 0.0:
                        paid = self.added(table, kind, at)
                    else:
                        paid = np.minimum(each * size, table.seconds[at] - latency)
                    found[at] += w * np.maximum(0.0, table.seconds[at] - paid)
            return found

        return self.columns.once(saved, "saved", table, lines)

    def added(self, table: CopyTable, kind: Kind, at: tuple[Ints, Ints]) -> Floats:
        """Seconds that some copies of one kind add at least to those of any collective that they
        join."""

        def added() -> Floats:
            return np.array([self.least(kind, float(table.local_bytes[a])) for a in at[0]])

        return self.columns.once(added, "added", table, kind)

    def less(self, v: int) -> Floats | None:
        """[from, to]: what copies of a value are cheaper by, wherever they are read."""
        saved = self.saved(v)
        if saved is None or not self.chains.others:
            return saved
        part = 1.0 - self.chains.others
        return self.columns.once(lambda: part * saved, "less", saved, part)

    def more(self, v: int, reader: int) -> Floats | None:
        """[from, to]: what is paid of `less` all the same where a unit reads the value; None for
        nothing."""
        saved, read = self.saved(v), (v, reader)
        whole, by_kind = self._along_chains.get(read, 0.0), self._by_lines.get(read)
        if saved is None or not (whole or by_kind):
            return None
        moves = self.moves(v)
        paid = tuple((by_kind or {}).get(k, 0.0) for k in moves)
        if not (whole or any(paid)):
            return None
        table, others = self.columns.table(v), self.chains.others

        def more() -> Floats:
            found = np.zeros_like(saved)
            for seconds, (kind, at) in zip(paid, moves.items(), strict=True):
                every = np.full(len(at[0]), seconds)
                if whole:
                    added = self.added(table, kind, at)
                    every += whole * np.maximum(0.0, table.seconds[at] - added)
                found[at] = np.maximum(0.0, every - others * saved[at])
            return found

        return self.columns.once(more, "more", saved, paid, whole, others)

    def moves(self, v: int) -> dict[Kind, tuple[Ints, Ints]]:
        """The copies of a value that may be merged, by their kinds: (from, to) of each."""
        if self.columns.program.body_of[v]:
            return {}
        table = self.columns.table(v)
        return self.columns.once(lambda: self._moves(table), "moves", table)

    def kinds(self, v: int) -> Mapping[tuple[int, int], Kind]:
        """The kind of each copy of a value that may be merged, by (from, to)."""
        moves = self.moves(v)

        def kinds() -> dict[tuple[int, int], Kind]:
            every = [
                (k, zip(at[0].tolist(), at[1].tolist(), strict=True)) for k, at in moves.items()
            ]
            return {ends: k for k, own in every for ends in own}

        return self.columns.once(kinds, "kinds", self.columns.table(v), bool(moves))

    def _moves(self, table: CopyTable) -> dict[Kind, tuple[Ints, Ints]]:
        choices = self.columns.choices
        combiner, dtype = choices.target.combiner, table.tensor.dtype
        found: dict[Kind, list[tuple[int, int]]] = {}
        if combiner is None or dtype.startswith("key<"):
            return {}
        for a, b, step in table.single():
            name = step.kind
            kind = (name, step.axes, step.monoid, type_together(name, dtype))
            if int(table.following[a, b]) != b or name not in MOVING or name not in combiner.kinds:
                continue
            if choices.mesh.parts(step.axes) < 2 or carried_as(name, step.monoid, dtype) != name:
                continue
            if float(table.local_bytes[a]) <= self.most(kind):
                found.setdefault(kind, []).append((a, b))
        return {k: (np.array(x)[:, 0], np.array(x)[:, 1]) for k, x in found.items()}

    def most(self, kind: Kind) -> float:
        """The most bytes that may enter one collective."""
        combiner = self.columns.choices.target.combiner
        assert combiner is not None
        whole = self.columns.choices.mesh.parts(kind[1]) if kind[0] == "all_gather" else 1
        return combiner.bytes / whole

    @cached_property
    def _along_chains(self) -> dict[Read, float]:
        """The weights of the chains along which all that a read takes is paid."""
        found: dict[Read, float] = {}
        for w, p in self.chains.prices:
            for read in p.chain or ():
                found[read] = found.get(read, 0.0) + w
        return found

    @cached_property
    def _by_lines(self) -> dict[Read, dict[Kind, float]]:
        """The latencies that are paid by lines where a copy of a kind is read."""
        found: dict[Read, dict[Kind, float]] = {}
        for w, p in self.chains.prices:
            for kind, paid in p.kinds.items() if p.chain is None else ():
                for read in paid.reads:
                    own = found.setdefault(read, {})
                    own[kind] = own.get(kind, 0.0) + w * paid.line.latency
        return found

    def _lines(self, kind: Kind) -> tuple[tuple[float, float, float], ...]:
        """Weights, latencies and seconds for each byte, less than none where that is what bytes add
        at least."""
        if kind not in self._known_lines:
            self._known_lines[kind] = self._weighed(kind)
        return self._known_lines[kind]

    def _weighed(self, kind: Kind) -> tuple[tuple[float, float, float], ...]:
        steepest = Paid(self.steepest(kind))
        found: dict[tuple[float, float], float] = {}
        for w, p in self.chains.prices:
            if p.chain is None:
                paid = p.kinds.get(kind, steepest).line
                line = paid.latency, paid.per_byte
                found[line] = found.get(line, 0.0) + w
        rest = 1.0 - sum(found.values())
        if any(p.chain is not None for _, p in self.chains.prices):
            found[0.0, -1.0] = rest
        return tuple((w, *line) for line, w in found.items())

    def least(self, kind: Kind, size: float) -> float:
        """Seconds that so many bytes, no more than one may have, add at least to those of any
        collective that they join."""
        choices = self.columns.choices
        combiner = choices.target.combiner
        assert combiner is not None
        name, axes, *_ = kind
        most = self.most(kind)
        seconds = collective_times(name, axes, choices.mesh, choices.target, most, FINELY)
        steps = int(size / (most / (FINELY - 1)))
        # From x bytes to x + size, whatever x is between two points: seconds rise with bytes.
        least = (seconds[steps:-1] - seconds[1 : FINELY - steps]).min(initial=np.inf)
        more = max(0.0, float(least))
        if name in combiner.contiguous:
            more += 4.0 * size / choices.target.hbm_bytes_per_second
        return more

    def line(self, kind: Kind, each: float) -> Line:
        """The line of what collectives of a kind take that is the highest where each has so many
        bytes; where that is more than one may have, the one of bytes alone."""
        steepest, *others = self.hull(kind)
        if each >= self.most(kind):
            return steepest
        return max((steepest, *others), key=lambda x: x.latency + x.per_byte * each)

    def steepest(self, kind: Kind) -> Line:
        """The line of what bytes alone take, nowhere above the seconds of one collective."""
        choices = self.columns.choices
        return steepest_below(kind[0], kind[1], choices.mesh, choices.target, self.most(kind))

    def hull(self, kind: Kind) -> tuple[Line, ...]:
        """Lines that are nowhere above the seconds of one collective, whatever may enter it: the
        steepest that has no latency, and those along the hull."""
        choices = self.columns.choices
        return lines_below(kind[0], kind[1], choices.mesh, choices.target, self.most(kind))


def may_merge(choices: UnitChoices) -> bool:
    """Whether seconds are a sum in which collectives may be merged."""
    target = choices.target
    return target.combiner is not None and target.slowdown is None and choices.mesh.devices > 1


@dataclass(frozen=True)
class Copy:
    """A copy that may be merged: bytes that enter it, seconds alone, and where it is read."""

    bytes: float
    seconds: float
    reads: set[Read]


#: The copies of a labelling that may be merged, by their kinds; a kept one is read several times.
Copies = Mapping[Kind, Sequence[Copy]]


def copies_of(assembled: PlanProblem, rows: Ints, mergeable: Mergeable) -> Copies:
    """What a labelling reads in another layout than it is made in, where that may be merged."""
    choices = assembled.choices
    made = [choices.rows[u].gives[int(r[rows[u]])] for u, r in enumerate(assembled.unit_row)]
    have = {
        v: layout
        for unit, gives in zip(choices.schedule.units, made, strict=True)
        for v, layout in zip(unit.outputs, gives, strict=True)
    }
    kept = _kept(assembled, rows)
    found: dict[Kind, dict[tuple[int, int, int], Copy]] = {}
    for u, unit in enumerate(choices.schedule.units):
        needs = choices.rows[u].needs[int(assembled.unit_row[u][rows[u]])]
        for need, (_, _, v) in zip(needs, unit.reads, strict=True):
            if v not in have or need == have[v]:
                continue
            table = choices.table(v)
            a, b = table.number[have[v]], table.number[need]
            kind = mergeable.kinds(v).get((a, b))
            if kind is not None:
                layout, until = kept.get(v, (None, -1))
                served = need == layout and read_position(choices.schedule, u, v) <= until
                own, which = found.setdefault(kind, {}), (v, b, -1 if served else u)
                if which not in own:
                    bytes_, seconds = float(table.local_bytes[a]), float(table.seconds[a, b])
                    own[which] = Copy(bytes_, seconds, set())
                own[which].reads.add((v, u))
    return {kind: [*own.values()] for kind, own in found.items()}


def _kept(assembled: PlanProblem, rows: Ints) -> dict[int, tuple[Layout, int]]:
    """Value -> the layout of its kept copy, and the place of the last reader that it serves."""
    schedule, found = assembled.choices.schedule, {}
    for value in assembled.sharing:
        v, (_, kept) = value.value, value.rows[int(rows[value.variable])]
        if kept is not None:
            layout, ending = kept
            found[v] = layout, read_position(schedule, value.readers[ending], v)
    return found


def paid_for(copies: Copies, prices: Prices, mergeable: Mergeable) -> float:
    """Seconds that all copies of a labelling have at some prices."""
    total = 0.0
    if prices.chain is not None:
        for kind, own in copies.items():  # as large as one may be, they join no other
            total += sum(min(mergeable.least(kind, c.bytes), c.seconds) for c in own)
        saved = _saved(copies, mergeable)
        return total + sum(saved[read] for read in saved.keys() & prices.chain)
    for kind, own in copies.items():
        paid = prices.kinds.get(kind) or Paid(mergeable.steepest(kind))
        latency, each = paid.line.latency, paid.line.per_byte
        total += sum(min(each * c.bytes, c.seconds - latency) for c in own)
        if latency:
            total += latency * len(set().union(*[c.reads & paid.reads for c in own]))
    return total


def _saved(copies: Copies, mergeable: Mergeable) -> dict[Read, float]:
    """By read, the seconds of a copy but for those that its bytes add at least."""
    found: dict[Read, float] = {}
    for kind, own in copies.items():
        for c in own:
            saved = max(0.0, c.seconds - mergeable.least(kind, c.bytes))
            for read in c.reads:
                found[read] = max(found.get(read, 0.0), saved)
    return found


def most_saved(assembled: PlanProblem, rows: Ints, once: Once) -> float:
    """Seconds that merging the collectives of a labelling saves at most."""
    mergeable = Mergeable(Columns(assembled.choices, once))
    copies = copies_of(assembled, rows, mergeable)
    alone = sum(c.seconds for own in copies.values() for c in own)
    return alone - paid_for(copies, best_prices(assembled, [(1.0, copies)], mergeable), mergeable)


def best_prices(
    assembled: PlanProblem, some: Sequence[tuple[float, Copies]], mergeable: Mergeable
) -> Prices:
    """The prices at which the mean of some labellings, by their weights, takes most."""
    found: dict[Kind, Paid] = {}
    for kind in dict.fromkeys(k for _, copies in some for k in copies):
        counted: dict[Read, float] = {}
        amount = 0.0
        for weight, copies in some:
            for c in copies.get(kind, ()):
                amount += weight * c.bytes
                for read in c.reads:
                    counted[read] = counted.get(read, 0.0) + weight
        count, chain = _longest(assembled, counted)
        # Round the loop of a state alone they may all be one.
        line = mergeable.line(kind, amount / count if count else np.inf)
        found[kind] = Paid(line, chain if line.latency else frozenset())
    return Prices(found)


def chain_of(assembled: PlanProblem, copies: Copies, mergeable: Mergeable) -> Prices:
    """The prices that are paid along the chain on which the copies of a labelling, whatever their
    kinds, take most."""
    counted = _saved(copies, mergeable)
    return Prices(chain=_longest(assembled, counted)[1])


def in_turn(copies: Sequence[Copy], mergeable: Mergeable) -> int:
    """How many of some copies of one kind, at most, wait for each other: along a chain of units."""
    schedule = mergeable.columns.choices.schedule
    counted = {read for c in copies for read in c.reads}
    total = [0] * len(schedule.units)
    for u, v, maker in mergeable.columns.once(lambda: _reads(schedule), "reads"):
        total[u] = max(total[u], total[maker] + ((v, u) in counted))
    return max(total, default=0)


def _reads(schedule: Schedule) -> list[tuple[int, int, int]]:
    """All reads in order, but for those round a loop: the unit, the value, and what makes it."""
    return [
        (u, v, maker)
        for u, unit in enumerate(schedule.units)
        for v in dict.fromkeys(v for _, _, v in unit.reads)
        if 0 <= (maker := schedule.producer[v]) < u
    ]


def _longest(
    assembled: PlanProblem, counted: Mapping[Read, float]
) -> tuple[float, frozenset[Read]]:
    """The reads along a chain of units on which some count most together, and how much."""
    schedule = assembled.choices.schedule
    reads = [tuple(dict.fromkeys(v for _, _, v in unit.reads)) for unit in schedule.units]
    total = [0.0] * len(reads)  # of the chain to each unit that counts most
    last: list[Read | None] = [None] * len(reads)
    end: tuple[float, Read | None] = (0.0, None)
    for u, values in enumerate(reads):
        for v in values:
            maker = schedule.producer[v]
            if not 0 <= maker < u:  # round a loop
                continue
            here = total[maker] + counted.get((v, u), 0.0)
            if last[u] is None or here > total[u]:
                total[u], last[u] = here, (v, u)
            if here > end[0]:
                end = here, (v, u)
    chain: list[Read] = []
    read = end[1]
    while read is not None:
        chain.append(read)
        read = last[schedule.producer[read[0]]]
    return end[0], frozenset(chain)
