"""Assemble: from a snapshot to an extraction problem.

A variable is a unit together with what becomes of the value it makes: a row says how the unit runs
and which copy of its output (if any) is *kept*: made at the first reader and shared by the readers
up to some last one. A kept copy gathers or combines what the value has spread out. Readers that
need another layout make a copy of their own, which lives while they run. (A unit with several
outputs that others share has a further variable for each output after the first.)

`lifetimes.py` says what lives when, `memory.py` how many bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..blockgraph import TensorType
from ..layout import Layout
from .copies import CopyTable
from .memory import Memory
from .order import read_position
from .problem import Floats, Ints, Pair, Problem, Use, Variable, label, merge_parallel
from .snapshot import Snapshot

# Kept copies may end at the last reader or before one of the longest waits, at most this many.
_ENDINGS = 3
# Copies smaller than this are not worth a choice of how long to keep them.
_SMALL = 1 << 16

Kept = tuple[Layout, int] | None  # (layout, position of the last reader served)


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
class Assembled:
    """The problem, and what its variables mean: unit u is variable u, `unit_row[u][r]` the row of
    the unit that row r of the variable runs."""

    problem: Problem
    snapshot: Snapshot
    unit_row: tuple[Ints, ...]
    sharing: tuple[Sharing, ...]


def assemble(snap: Snapshot, weights: Weights | None = None) -> Assembled:
    """Build the problem of one snapshot. Its "seconds" are what `weights` make of them; the rows
    are the same for all weights."""
    return _Assembler(snap, weights or Weights()).build()


class _Assembler:
    def __init__(self, snap: Snapshot, weights: Weights) -> None:
        self.snap = snap
        self.weights = weights
        self.plan = snap.schedule
        self.program = self.plan.program
        self.memory = Memory(snap)
        self.variables: list[Variable] = []
        self.pairs: list[Pair] = []
        self.sharing: list[Sharing] = []
        self.unit_row: list[Ints] = []
        # value -> (variable that decides its copies, produced and kept layout per row)
        self.holder: dict[int, Sharing] = {}

    def build(self) -> Assembled:
        extra: list[int] = []
        for u, unit in enumerate(self.plan.units):
            shared = [v for v in unit.outputs if len(self._others(v)) > 1]
            self._unit(u, shared[0] if shared else None)
            extra.extend(shared[1:])
        for v in extra:
            self._separate(v)
        for v in range(len(self.program.types)):
            others = self._others(v)
            if len(others) == 1:
                self._direct(v, self.plan.producer[v], others[0])
            elif len(others) > 1:
                self._shared(self.holder[v])
        problem = Problem(
            tuple(self.variables),
            merge_parallel(self.pairs),
            self.memory.times,
            np.zeros(self.memory.times),
        )
        return Assembled(problem, self.snap, tuple(self.unit_row), tuple(self.sharing))

    def _others(self, v: int) -> list[int]:
        """Units other than its producer that read a materialised value, in the program's order."""
        u = self.plan.producer[v]
        if u < 0:
            return []
        others = [r for r in self.plan.readers[v] if r != u]
        return sorted(others, key=lambda r: (read_position(self.plan, r, v), r))

    # Units

    def _unit(self, u: int, shared: int | None) -> None:
        unit, rows = self.plan.units[u], self.snap.rows[u]
        root = self.program.instances[unit.root]
        weight = self.program.bodies[root.body].weight if not root.port else root.weight
        seconds = self.weights.seconds * rows.seconds + self.weights.flops * rows.flops
        seconds, energy = seconds * weight, rows.joules * weight
        for v in unit.outputs:
            # A port that reads what it makes itself (a value carried unchanged) copies within.
            if u in self.plan.readers[v]:
                seconds = seconds + self._own_copy(u, v)
        base = np.arange(len(rows))
        kept: list[Kept] = [None] * len(rows)
        if shared is not None:
            base, kept = self._with_copies(shared, self._gives(shared))
        self.unit_row.append(base)
        uses: list[Use] = []
        for q, v in enumerate(unit.outputs):
            uses += self.memory.produced(v, [rows.gives[r][q] for r in base])
        seconds, energy = seconds[base], energy[base]
        if shared is not None:
            haves = [self._gives(shared)[r] for r in base]
            more = self._hold(shared, u, haves, kept)
            seconds, energy = seconds + more.seconds, energy + more.joules
            uses += more.uses
        name = f"unit {u} {root.signature.kernel}"
        self.variables.append(Variable(name, seconds, energy, tuple(uses)))

    def _separate(self, v: int) -> None:
        """A variable of its own for a shared value, tied to its producer by the produced layout."""
        haves = list(dict.fromkeys(self._gives(v)))
        base, kept = self._with_copies(v, haves)
        produced = [haves[r] for r in base]
        variable = len(self.variables)
        self.variables.append(self._hold(v, variable, produced, kept))
        u = self.plan.producer[v]
        label_v = np.array(base)
        number = {h: i for i, h in enumerate(haves)}
        label_u = np.array([number[g] for g in self._gives(v)])[self.unit_row[u]]
        agree = np.where(np.eye(len(haves), dtype=bool), 0.0, np.inf)
        used = np.unique(label_u)
        label_u = np.searchsorted(used, label_u)
        self.pairs.append(
            Pair(u, variable, label_u, label_v, agree[used], np.zeros_like(agree[used]))
        )

    def _with_copies(self, v: int, haves: list[Layout]) -> tuple[Ints, list[Kept]]:
        """Rows once without a kept copy, then with each that two readers could share."""
        readers = self._others(v)
        options = self._copies_worth_keeping(v, readers, haves)
        base, kept = [], []
        for r, have in enumerate(haves):
            for option in (None, *options[have]):
                base.append(r)
                kept.append(option)
        return np.array(base, dtype=np.int64), kept

    def _hold(self, v: int, variable: int, haves: list[Layout], kept: list[Kept]) -> Variable:
        """Costs of the kept copies, and the record of what the rows mean."""
        readers = self._others(v)
        rows = tuple(zip(haves, kept, strict=True))
        table = self._table(v)
        have = np.array([table.number[h] for h, _ in rows])
        copy = np.array([table.number[k[0]] if k else -1 for _, k in rows])
        until = np.array([k[1] if k else -1 for _, k in rows])
        weight = self.program.bodies[self.program.body_of[v]].weight
        holds = copy >= 0
        some = np.where(holds, copy, have)
        places = [read_position(self.plan, r, v) for r in readers]
        endings = [
            (
                holds & (until == e),
                [r for r, at in zip(readers, places, strict=True) if at <= places[e]],
            )
            for e in sorted(set(until[holds].tolist()))
        ]
        record = Sharing(v, variable, rows, tuple(readers))
        self.sharing.append(record)
        self.holder[v] = record
        return Variable(
            f"value {v}",
            np.where(holds, self._price(table)[have, some], 0.0) * weight,
            np.where(holds, table.joules[have, some], 0.0) * weight,
            self.memory.kept(v, have, copy, endings),
        )

    def _own_copy(self, u: int, v: int) -> Floats:
        table, weight = self._table(v), self._copy_weight(u, v)
        price = self._price(table)
        cost = []
        for needs, give in zip(self._needs(u, v), self._gives(v), strict=True):
            cost.append(sum(price[table.number[give], table.number[n]] for n in needs))
        return np.array(cost) * weight

    def _price(self, table: CopyTable) -> Floats:
        """Weighted cost of every copy of one tensor type."""
        w = self.weights
        if not w.wire_bytes:
            return w.seconds * table.seconds
        return w.seconds * table.seconds + w.wire_bytes * table.wire

    def _table(self, v: int) -> CopyTable:
        tensor: TensorType = self.program.types[v]
        return self.snap.copies[tensor]

    def _needs(self, u: int, v: int) -> list[tuple[Layout, ...]]:
        """Per row of unit u: the distinct layouts in which it reads value v."""
        ports = [k for k, (_, _, w) in enumerate(self.plan.units[u].reads) if w == v]
        return [tuple(dict.fromkeys(n[k] for k in ports)) for n in self.snap.rows[u].needs]

    def _gives(self, v: int) -> list[Layout]:
        u = self.plan.producer[v]
        q = self.plan.units[u].outputs.index(v)
        return [g[q] for g in self.snap.rows[u].gives]

    def _copy_weight(self, u: int, v: int) -> float:
        for i, p, w in self.plan.units[u].reads:
            if w == v:
                instance = self.program.instances[i]
                return instance.input_weights[p] if instance.input_weights else instance.weight
        return 1.0

    # Values with one reader

    def _direct(self, v: int, producer: int, reader: int) -> None:
        table = self._table(v)
        gives, wanted = self._gives(v), self._needs(reader, v)
        label_a, haves = label([gives[r] for r in self.unit_row[producer]])
        label_b, needs = label([wanted[r] for r in self.unit_row[reader]])
        h = np.array([table.number[x] for x in haves])
        none = np.full(len(h), -1)
        self._read(v, producer, reader, label_a, h, none, none, label_b, needs)

    # Values with several readers

    def _shared(self, shared: Sharing) -> None:
        v = shared.value
        table = self._table(v)
        have = [table.number[h] for h, _ in shared.rows]
        places = [read_position(self.plan, r, v) for r in shared.readers]
        for place, reader in zip(places, shared.readers, strict=True):
            served = [
                table.number[k[0]] if k is not None and places[k[1]] >= place else -1
                for _, k in shared.rows
            ]
            holds = [int(k is not None) for _, k in shared.rows]
            label_v, sources = label(list(zip(have, served, holds, strict=True)))
            wanted = self._needs(reader, v)
            label_r, needs = label([wanted[r] for r in self.unit_row[reader]])
            h, g, held = (np.array(column) for column in zip(*sources, strict=True))
            self._read(v, shared.variable, reader, label_v, h, g, held, label_r, needs)

    def _read(
        self,
        v: int,
        holder: int,
        reader: int,
        label_v: Ints,
        have: Ints,
        kept: Ints,
        holds: Ints,
        label_r: Ints,
        needs: list[tuple[Layout, ...]],
    ) -> None:
        """The pair between whoever holds v and one reader: copies that the reader makes itself."""
        table, weight = self._table(v), self._copy_weight(reader, v)
        price = self._price(table)
        shape = (len(have), len(needs))
        seconds, energy = np.zeros(shape), np.zeros(shape)
        for j, layouts in enumerate(needs):
            for n in layouts:
                b = table.number[n]
                there = (have == b) | (kept == b)
                seconds[:, j] += np.where(there, 0.0, price[have, b]) * weight
                energy[:, j] += np.where(there, 0.0, table.joules[have, b]) * weight
        uses = self.memory.read(reader, v, have, kept, holds, needs)
        self.pairs.append(Pair(holder, reader, label_v, label_r, seconds, energy, uses))

    def _copies_worth_keeping(
        self, v: int, readers: list[int], haves: list[Layout]
    ) -> dict[Layout, list[Kept]]:
        table = self._table(v)
        wanting = [{n for combo in self._needs(r, v) for n in combo} for r in readers]
        endings = {}
        for kept in table.layouts:
            sharing = [k for k, w in enumerate(wanting) if kept in w]
            if len(sharing) >= 2 and not kept.partial:
                endings[kept] = self._endings(v, readers, sharing)
        options: dict[Layout, list[Kept]] = {}
        for have in haves:
            a = table.number[have]
            options[have] = []
            for kept in endings:
                b = table.number[kept]
                costly = a != b and np.isfinite(table.seconds[a, b]) and table.wire[a, b] > 0
                if costly and _collects(have, kept):
                    options[have] += [(kept, e) for e in endings[kept]]
        return options

    def _endings(self, v: int, readers: list[int], sharing: list[int]) -> list[int]:
        """Positions of readers after which a kept copy that `sharing` can use may be dropped."""
        if len(sharing) < 2:
            return []
        if self.program.types[v].nbytes < _SMALL or len(sharing) == 2:
            return [sharing[-1]]
        times = [self.memory.lives.reads_at[readers[k], v] for k in sharing]
        waits = sorted(range(1, len(sharing) - 1), key=lambda k: times[k] - times[k + 1])
        return sorted({sharing[-1], *(sharing[k] for k in waits[: _ENDINGS - 1])})


def _collects(have: Layout, kept: Layout) -> bool:
    """Whether the kept copy only gathers or combines what the produced value has spread out."""
    if kept.partial:
        return False
    combined = set(have.partial)
    return all(
        fewer == axes[: len(fewer)]
        or (fewer[: len(axes)] == axes and set(fewer[len(axes) :]) <= combined)
        for axes, fewer in zip(have.dims, kept.dims, strict=True)
    )
