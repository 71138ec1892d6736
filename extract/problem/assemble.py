"""Assemble: from unit choices to an extraction problem.

A variable is a unit together with what becomes of the value it makes: a row says how the unit runs
and which copy of its output (if any) is *kept*: made at the first reader and shared by the readers
up to some last one, or there for a later one alone. In large programs not every kind of copy is
tried as a kept one. Readers that need another layout make a copy of their own, which lives while
they run. (A unit with several outputs that others share has a further variable for each output
after the first.)

`schedule/lifetimes.py` says what lives when, `memory.py` how many bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.joiner import UnitRows
from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.costs import copying_seconds, turning_seconds
from tapestry_egg.machine.energy import joules, turning_joules
from tapestry_egg.schedule.siblings import Shared

from .columns import Columns, Wanted
from .issue_places import IssuePlaces, Window
from .kept import Holding, Keeping, Kept, KeptCopies, distinct
from .latencies import SAVED, Latencies
from .memory import Count, Memory, ReaderBytes
from .mergeable import Mergeable, may_merge
from .problem import Floats, Ints, Pair, Problem, Span, Variable, merge_parallel
from .timeline import Events, Timeline


@dataclass(frozen=True)
class Weights:
    """What the problem minimises: a weighted sum of seconds, bytes sent and flops per device."""

    seconds: float = 1.0
    wire_bytes: float = 0.0
    flops: float = 0.0


@dataclass(frozen=True)
class Sharing:
    """What a variable's rows say of one value that several units read.

    Row r of `variable` produces it in `rows[r][0]` and keeps the copy `rows[r][1]`.
    """

    value: int
    variable: int
    rows: tuple[tuple[Layout, Kept], ...]
    readers: tuple[int, ...]  # units, in the program's order


@dataclass(frozen=True)
class PlanProblem:
    """The problem, and what its variables mean: unit u is variable u, `unit_row[u][r]` the row of
    the unit that row r of the variable runs. For `fewer_endings` values a kept copy can be dropped
    after fewer readers than it could be; for `fewer_copies` values not every copy that two
    readers could share may be kept, for `spared` ones none, as tables would be large. Its memory is
    counted in each of `counts`."""

    problem: Problem
    choices: UnitChoices
    unit_row: tuple[Ints, ...]  # per unit [rows of its variable]
    sharing: tuple[Sharing, ...]
    fewer_endings: int = 0
    fewer_copies: int = 0
    spared: int = 0
    keeping: Keeping | None = None  # by which the choice of kept copies was made
    counts: tuple[Count, ...] = (Count(),)


def assemble(
    choices: UnitChoices,
    weights: Weights | None = None,
    once: Once | None = None,
    keeping: Keeping | KeptCopies | None = None,
) -> PlanProblem:
    """Build the problem of the choices. Its "seconds" are what `weights` make of them; the rows
    are the same for all weights. What several problems of the same weights have in common is made
    `once`; which copies may be kept `keeping` says (None: as is fit for the program alone), or what
    was found by it with the same `once`."""
    return _Assembler(choices, weights or Weights(), once or Once(), keeping).build()


@dataclass(frozen=True, eq=False)
class _ReadTables:
    """What one reader of a value takes, [labels of the value, labels of the reader]: seconds,
    joules, bytes in each count, and, where its copies may be merged, what that may save, and the
    latency that a chain pays which leads to it, whoever makes the copy."""

    seconds: Floats
    joules: Floats
    held: list[ReaderBytes]
    late: tuple[Floats, Floats] | None


class _Assembler:
    def __init__(
        self,
        choices: UnitChoices,
        weights: Weights,
        once: Once,
        keeping: Keeping | KeptCopies | None,
    ) -> None:
        self.choices = choices
        self.weights = weights
        self.schedule = choices.schedule
        self.program = self.schedule.program
        known = keeping if isinstance(keeping, KeptCopies) else None
        self.columns = Columns(choices, once) if known is None else known.columns
        self.once = once
        self.memory = Memory(choices, self.columns)
        plain = weights == Weights()
        self.slots = Slots(self.columns) if plain and may_merge(choices) else None
        # Bytes and flops are additive, whatever runs beside what.
        slowdown = choices.target.slowdown if plain else None
        self.spans = None if slowdown is None else Spans(self.columns, slowdown)
        self.variables: list[Variable] = []
        self.pairs: list[Pair] = []
        self.sharing: list[Sharing] = []
        self.unit_row: list[Ints] = []
        self.holder: dict[int, Holding] = {}  # shared value -> rows of its variable
        self.variable_of: dict[int, int] = {}  # shared value -> that variable
        if isinstance(keeping, KeptCopies):
            self.kept = keeping
        else:
            self.kept = KeptCopies(self.columns, self.memory.lives, keeping)

    def build(self) -> PlanProblem:
        extra: list[int] = []
        for u, unit in enumerate(self.schedule.units):
            shared = [v for v in unit.outputs if len(self.columns.others(v)) > 1]
            self._unit(u, shared[0] if shared else None)
            extra.extend(shared[1:])
        for v in extra:
            self._separate(v)
        for v in range(len(self.program.types)):
            others = self.columns.others(v)
            if len(others) == 1:
                self._direct(v, self.schedule.producer[v], others[0])
            elif len(others) > 1:
                self._shared(v)
        for u in range(len(self.schedule.units)):
            for read in self.choices.traffic.shared(u):
                self._apart(u, read)
        variables = tuple(self.variables)
        pairs = merge_parallel(self.pairs, self.once)
        times, timeline = self.memory.moments, None
        if self.spans is not None:
            variables, pairs, timeline = self.spans.placed(variables, pairs)
        latencies = None if self.slots is None else self.slots.latencies
        problem = Problem(variables, pairs, times, timeline, latencies)
        return PlanProblem(
            problem,
            self.choices,
            tuple(self.unit_row),
            tuple(self.sharing),
            self.kept.fewer_endings,
            self.kept.fewer_copies,
            self.kept.spared,
            self.kept.keeping,
            self.memory.counts,
        )

    # Units

    def _unit(self, u: int, shared: int | None) -> None:
        unit, rows = self.schedule.units[u], self.choices.rows[u]
        root = self.program.instances[unit.root]
        weight = self.program.bodies[root.body].weight if not root.port else root.weight
        own = tuple(self._own_copy(u, v) for v in unit.outputs if u in self.schedule.readers[v])
        times = self.program.bodies[root.body].weight
        turned = tuple([x for v in unit.outputs if (x := self.memory.turned(v)) is not None])
        if shared is None:
            base: Ints = self.once(lambda: np.arange(len(rows)), "every row", rows)
            held: tuple[Floats, ...] = ()
        else:
            holding = self.kept.holding(shared, self.columns.gives(shared))
            base, held = holding.base, self._keeping(shared, u, holding)

        def costs() -> tuple[Floats, Floats]:
            w = self.weights
            seconds = w.seconds * rows.seconds + w.wire_bytes * rows.wire + w.flops * rows.flops
            seconds = seconds * weight
            for more in own:
                seconds = seconds + more
            energy = rows.joules * weight
            for amount in turned:  # before, and when it leaves
                twice = 2.0 * times * (amount > 0)
                target, devices = self.choices.target, self.choices.mesh.devices
                seconds = seconds + w.seconds * twice * turning_seconds(amount, target)
                energy = energy + twice * turning_joules(amount, devices, target)
            seconds, energy = seconds[base], energy[base]
            return (seconds + held[0], energy + held[1]) if held else (seconds, energy)

        seconds, energy = self.once(costs, "unit", rows, weight, own, base, held, turned, times)
        scratch = self.once(lambda: rows.scratch[base], "scratch", rows, base)
        parts = self.once(lambda: rows.parts[base], "parts", rows, base)
        uses = [use for v in unit.outputs for use in self.memory.produced(v, base, parts)]
        uses += self.memory.running(u, scratch, parts)
        if shared is not None:
            uses += self.memory.kept(shared, holding.have, holding.copy, holding.until)
        spans: list[Span] = []
        if self.spans is not None:
            spans = self.spans.of_unit(u, rows, weight, base)
            if shared is not None:
                turns = self.memory.turns(None, shared)
                spans += self.spans.of_kept(shared, holding.have, holding.copy, turns)
        if self.slots is not None:
            spans += [x for v in unit.outputs for x in self.slots.of_own(u, v, base)]
            spans += [] if shared is None else self.slots.of_kept(shared, holding)
        self.unit_row.append(base)
        name = f"unit {u} {root.signature.kernel}"
        self.variables.append(Variable(name, seconds, energy, tuple(uses), tuple(spans)))

    def _separate(self, v: int) -> None:
        """A variable of its own for a shared value, tied to its producer by the produced layout."""
        u = self.schedule.producer[v]
        given = self.columns.gives(v)
        number, haves = self.once(lambda: distinct(given), "distinct", given)
        holding = self.kept.holding(v, haves)
        variable = len(self.variables)
        seconds, energy = self._keeping(v, variable, holding)
        uses = self.memory.kept(v, holding.have, holding.copy, holding.until)
        turns = self.memory.turns(None, v)
        spans = self.spans.of_kept(v, holding.have, holding.copy, turns) if self.spans else []
        spans += self.slots.of_kept(v, holding) if self.slots else []
        self.variables.append(Variable(f"value {v}", seconds, energy, uses, tuple(spans)))
        rows = self.unit_row[u]

        def agreement() -> tuple[Ints, Floats, Floats]:
            used = np.unique(number[rows])
            agree = np.where(np.eye(len(haves), dtype=bool), 0.0, np.inf)[used]
            return np.searchsorted(used, number[rows]), agree, np.zeros_like(agree)

        labels, agree, free = self.once(agreement, "agreement", number, rows)
        self.pairs.append(Pair(u, variable, labels, holding.base, agree, free))

    def _own_copy(self, u: int, v: int) -> Floats:
        """Seconds, per row, of a port that reads what it makes itself: it copies within."""
        table, weight = self.columns.table(v), self.columns.copy_weight(u, v)
        given, wanted = self.columns.gives(v), self.columns.wanted(u, v)

        def copied() -> Floats:
            price = self._price(table)
            needs = [wanted.sets[k] for k in wanted.label]
            costs = [sum(price[a, b] for b in n) for a, n in zip(given, needs, strict=True)]
            return np.array(costs) * weight

        return self.once(copied, "own copy", given, wanted, weight)

    def _keeping(self, v: int, variable: int, holding: Holding) -> tuple[Floats, Floats]:
        """Costs of the kept copies; records what the variable's rows mean."""
        self.holder[v], self.variable_of[v] = holding, variable
        self.sharing.append(Sharing(v, variable, holding.rows, self.columns.others(v)))
        table = self.columns.table(v)
        weight = self.program.bodies[self.program.body_of[v]].weight
        turns = self.memory.turns(None, v)

        def costs() -> tuple[Floats, Floats]:
            have, holds = holding.have, holding.copy >= 0
            some = np.where(holds, holding.copy, have)
            (_, before), (_, first) = table.turning(*turns)
            price = self._price(table) + self.weights.seconds * before
            return (
                np.where(holds, price[have, some], 0.0) * weight,
                np.where(holds, (table.joules + first)[have, some], 0.0) * weight,
            )

        return self.once(costs, "keeping", table, holding, weight, turns)

    # What readers pay

    def _direct(self, v: int, producer: int, reader: int) -> None:
        """A value with one reader."""
        given, rows = self.columns.gives(v), self.unit_row[producer]

        def labels() -> tuple[Ints, Ints, Ints]:
            number, have = distinct(given[rows])
            return number, have, np.full(len(have), -1)

        number, have, none = self.once(labels, "direct", given, rows)
        self._read(v, producer, reader, number, have, none, none)

    def _shared(self, v: int) -> None:
        """A value with several readers: some are served by the copy that is kept."""
        every = self.kept.served(v, self.holder[v])
        for served, reader in zip(every, self.columns.others(v), strict=True):
            self._read(v, self.variable_of[v], reader, *served)

    def _read(
        self, v: int, holder: int, reader: int, labels: Ints, have: Ints, kept: Ints, holds: Ints
    ) -> None:
        """The pair between whoever holds v and one reader: copies that the reader makes itself."""
        table, weight = self.columns.table(v), self.columns.copy_weight(reader, v)
        wanted = self.columns.wanted(reader, v)
        label_r = self._labels(wanted, reader)
        turns, kind = self.memory.turns(reader, v), self.memory.kind(reader, v)
        merges = self.slots is not None and self.slots.merges(reader, v)

        def costs() -> tuple[Floats, Floats]:
            price, shape = self._price(table), (len(have), len(wanted.sets))
            (after, before), (turned, first) = table.turning(*turns)
            price, joules = price + self.weights.seconds * before, table.joules + first
            seconds, energy = np.zeros(shape), np.zeros(shape)
            a = have[:, None]
            for j, b in wanted.in_turn:
                there = (a == b) | (kept[:, None] == b)
                own = self.weights.seconds * after[a, b]
                seconds[:, j] += (np.where(there, 0.0, price[a, b]) + own) * weight
                own = turned[a, b]
                energy[:, j] += (np.where(there, 0.0, joules[a, b]) + own) * weight
            return seconds, energy

        def tables() -> _ReadTables:
            seconds, energy = self.once(costs, "read", table, have, kept, wanted, weight, turns)
            held = self.memory.bytes_of(kind, turns, v, have, kept, holds, wanted)
            late = self.slots.of_read(v, have, kept, wanted) if self.slots and merges else None
            return _ReadTables(seconds, energy, held, late)

        key = (table, have, kept, holds, wanted, weight, turns, kind, merges, self.memory.above)
        made = self.once(tables, "reader", *key)
        uses = self.memory.read(reader, v, made.held)
        spans = self.spans.of_read(reader, v, have, kept, wanted, turns) if self.spans else []
        if self.slots and made.late:
            saved, paid = made.late
            spans += self.slots.spans(SAVED, saved)
            spans += self.slots.spans(self.slots.reads[reader, v], paid)
        self.pairs.append(
            Pair(holder, reader, labels, label_r, made.seconds, made.joules, uses, tuple(spans))
        )

    def _apart(self, u: int, shared: Shared) -> None:
        """The pair between two units that read a value in one kernel: what it takes to read it
        again where the later one wants it otherwise."""
        unit, target, mesh = self.schedule.units[u], self.choices.target, self.choices.mesh
        *_, v = unit.reads[shared.read]
        weight = self.program.bodies[unit.body].weight
        first, then = self.columns.wanted(shared.unit, shared.value), self.columns.wanted(u, v)
        tables, tensor = [self.columns.table(w) for w in (shared.value, v)], self.program.types[v]

        def costs() -> tuple[Floats, Floats]:
            there, here = (
                [[table.layouts[k] for k in some] for some in wanted.sets]
                for table, wanted in zip(tables, (first, then), strict=True)
            )
            alike = [[{*b} <= {*a} for b in here] for a in there]
            sizes = [
                float(prod(b[0].local_shape(tensor.shape, mesh)) * tensor.itemsize) for b in here
            ]
            again = shared.share * np.array(sizes)
            seconds = copying_seconds(again, shared.launches, target)
            none = np.zeros(len(sizes))
            energy = joules(none, again, none, seconds, mesh.devices, target)
            apart = ~np.array(alike, dtype=np.bool_).reshape(len(first.sets), len(then.sets))
            return np.where(apart, seconds * weight, 0.0), np.where(apart, energy * weight, 0.0)

        key = (first, then, *tables, shared.share, shared.launches, weight)
        seconds, energy = self.once(costs, "apart", *key)
        if not seconds.any():
            return
        label_a, label_b = self._labels(first, shared.unit), self._labels(then, u)
        spans = (Span(u, seconds),) if self.spans is not None else ()
        self.pairs.append(
            Pair(
                shared.unit, u, label_a, label_b, self.weights.seconds * seconds, energy, (), spans
            )
        )

    def _labels(self, wanted: Wanted, u: int) -> Ints:
        """By the rows of a unit's variable, in which layouts it reads a value."""
        rows = self.unit_row[u]
        return self.once(lambda: wanted.label[rows], "labels", wanted, rows)

    def _price(self, table: CopyTable) -> Floats:
        """Weighted cost of every copy of one tensor type."""
        w = self.weights
        if not w.wire_bytes:
            return w.seconds * table.seconds
        return w.seconds * table.seconds + w.wire_bytes * table.wire


# Slots: to which reads the latencies of rows and pairs belong (`latencies.py`).


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

        return self.spans(SAVED, self.once(saved, "kept latency", holding, latency))

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
        return [*self.spans(SAVED, amount), *self.spans(event, amount)]

    def merges(self, reader: int, v: int) -> bool:
        """Whether copies of a value that one reader makes itself may be merged."""
        return (reader, v) in self.reads and self.mergeable.latency(v) is not None

    def of_read(self, v: int, have: Ints, kept: Ints, wanted: Wanted) -> tuple[Floats, Floats]:
        """What merging may take away of copies that a reader makes itself, and the latency that a
        chain pays which leads to it, whoever makes the copy: [labels of the value, labels of the
        reader]."""
        latency = self.mergeable.latency(v)
        assert latency is not None

        def made() -> tuple[Floats, Floats]:
            saved, paid = (np.zeros((len(have), len(wanted.sets))) for _ in range(2))
            a = have[:, None]
            for j, b in wanted.in_turn:
                own = latency[a, b]
                saved[:, j] += np.where(kept[:, None] == b, 0.0, own)
                paid[:, j] = np.maximum(paid[:, j], own)
            return saved, saved if (saved == paid).all() else paid

        return self.columns.once(made, "read latency", latency, have, kept, wanted)

    def spans(self, event: int, amount: Floats) -> list[Span]:
        """The span of an amount that was made once, where it is any."""
        return [Span(event, amount)] if self.once.some(amount) else []


# Spans: to which events of the timeline the seconds of rows and pairs belong.
#
# What a kernel takes is its unit's; what a copy takes over links is the event of its window
# (`extract/problem/issue_places.py`), and what it takes within a device is the unit's beside which
# it is made.


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
