"""Assemble: from a snapshot to an extraction problem.

Variables are the units, and every value that more than one unit reads. A unit's row says how it
runs. A value's row says in which layout it is produced, and which copy of it (if any) is *kept*:
made at the first reader and shared by the readers up to some last one. Readers that need yet
another layout make a copy of their own, which lives while they run.

Memory: a value lives from the unit that makes it to its last reader; undonated inputs live
throughout, and so do donated inputs whose successor takes over their buffer; outputs live to the
end. Times are unit positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..blockgraph import TensorType
from ..layout import Layout
from .copies import CopyTable
from .problem import Floats, Ints, Pair, Problem, Use, Variable, label
from .snapshot import Snapshot

# Kept copies may end at the last reader or before one of the longest waits, at most this many.
_ENDINGS = 3
# Copies smaller than this are not worth a choice of how long to keep them.
_SMALL = 1 << 16

Kept = tuple[Layout, int] | None  # (layout, position of the last reader served)


@dataclass(frozen=True)
class ValueRows:
    """Rows of a value variable: produced layout and kept copy, and the value's readers."""

    value: int
    rows: tuple[tuple[Layout, Kept], ...]
    readers: tuple[int, ...]  # units, in order of time


@dataclass(frozen=True)
class Assembled:
    """The problem, and what its variables mean: units first, then shared values."""

    problem: Problem
    snapshot: Snapshot
    values: tuple[ValueRows, ...]
    variable_of_value: dict[int, int]


@dataclass(frozen=True)
class Lifetimes:
    """When each value is made and last read, on the time line of units."""

    made: tuple[int, ...]
    last: tuple[int, ...]
    reads_at: dict[tuple[int, int], int]  # (unit, value) -> time of the read
    free: tuple[bool, ...]  # takes no memory of its own (alias, view, constant)


def assemble(snap: Snapshot) -> Assembled:
    """Build the problem of one snapshot."""
    return _Assembler(snap).build()


def lifetimes(snap: Snapshot) -> Lifetimes:
    """Lifetimes of all values over the fixed order of the schedule."""
    plan = snap.schedule
    program = plan.program
    end = len(plan.units)
    made = [0] * len(program.types)
    last = [-1] * len(program.types)
    free = [False] * len(program.types)
    reads_at: dict[tuple[int, int], int] = {}
    starts = {e: s for s, e in _region_times(snap)}
    for u, unit in enumerate(plan.units):
        root = program.instances[unit.root]
        for v in unit.outputs:
            made[v] = u
            if root.port == "stack":
                made[v] = starts.get(_region_end(snap, unit.root), u)
            if root.port in ("constant", "invariant"):
                free[v] = True
    for u, unit in enumerate(plan.units):
        root = program.instances[unit.root]
        late = root.port in ("state", "output")
        for i, p, v in unit.reads:
            if late:
                reads_at[u, v] = made[v]
            elif root.port in ("carry", "stack", "branch") and program.instances[i].body != (
                _body_of(snap, v)
            ):
                reads_at[u, v] = made[v]
            else:
                reads_at[u, v] = u
            last[v] = max(last[v], reads_at[u, v])
            del p
    for v, t in enumerate(made):
        last[v] = max(last[v], t)
    for unit in reversed(plan.units):
        # A value that is only another view of something keeps that something alive instead.
        members = [program.instances[i] for i in unit.members]
        if not members[-1].port and all(m.signature.fusion == "view" for m in members):
            for v in unit.outputs:
                free[v] = True
                for _, _, source in unit.reads:
                    last[source] = max(last[source], last[v])
        if members[-1].port == "invariant":
            for v in unit.outputs:
                for _, _, source in unit.reads:
                    last[source] = max(last[source], last[v])
    for unit in plan.units:
        root = program.instances[unit.root]
        if root.port == "state":
            (new,), (old,) = root.inputs, root.outputs
            made[old], last[old] = 0, end - 1
            if new != old:
                free[new] = True
        elif root.port == "input":
            (v,) = root.outputs
            made[v] = 0
            graph = program.bodies[0].graph
            position = graph.inputs.index(program.bodies[0].values.index(v))
            if not (graph.donated and graph.donated[position]):
                last[v] = end - 1
        elif root.port == "output":
            (v,) = root.inputs
            last[v] = end - 1
    return Lifetimes(tuple(made), tuple(last), reads_at, tuple(free))


def _body_of(snap: Snapshot, value: int) -> int:
    producer = snap.schedule.producer[value]
    return snap.schedule.units[producer].body if producer >= 0 else 0


def _region_times(snap: Snapshot) -> list[tuple[int, int]]:
    """(first unit, last unit) of every region, by the instances that belong to it."""
    out = []
    for first, stop in snap.schedule.program.spans.values():
        units = [u for u, unit in enumerate(snap.schedule.units) if first <= unit.root < stop]
        if units:
            out.append((min(units), max(units)))
    return out


def _region_end(snap: Snapshot, instance: int) -> int:
    best = -1
    for (_, _), (first, stop) in snap.schedule.program.spans.items():
        if first <= instance < stop:
            units = [u for u, unit in enumerate(snap.schedule.units) if first <= unit.root < stop]
            end = max(units)
            best = end if best < 0 else min(best, end)
    return best


class _Assembler:
    def __init__(self, snap: Snapshot) -> None:
        self.snap = snap
        self.plan = snap.schedule
        self.program = self.plan.program
        self.lives = lifetimes(snap)
        self.variables: list[Variable] = []
        self.pairs: list[Pair] = []
        self.values: list[ValueRows] = []
        self.variable_of_value: dict[int, int] = {}

    def build(self) -> Assembled:
        for u in range(len(self.plan.units)):
            self.variables.append(self._unit(u))
        for v, readers in enumerate(self.plan.readers):
            u = self.plan.producer[v]
            if u < 0:
                continue
            others = [r for r in readers if r != u]
            if len(others) == 1:
                self._direct(v, u, others[0])
            elif len(others) > 1:
                self._shared(v, u, others)
        problem = Problem(
            tuple(self.variables),
            tuple(self.pairs),
            len(self.plan.units),
            np.zeros(len(self.plan.units)),
        )
        return Assembled(problem, self.snap, tuple(self.values), self.variable_of_value)

    # Units

    def _unit(self, u: int) -> Variable:
        unit, rows = self.plan.units[u], self.snap.rows[u]
        root = self.program.instances[unit.root]
        weight = self.program.bodies[root.body].weight if not root.port else root.weight
        seconds, energy = rows.seconds * weight, rows.joules * weight
        uses = []
        for q, v in enumerate(unit.outputs):
            if not self.lives.free[v]:
                table = self._table(v)
                amount = np.array(
                    [table.local_bytes[table.number[g[q]]] for g in rows.gives], dtype=float
                )
                uses.append(Use(self.lives.made[v], self.lives.last[v] + 1, amount))
        for v in unit.outputs:
            # A port that reads what it makes itself (a value carried unchanged) copies within.
            if u in self.plan.readers[v]:
                seconds = seconds + self._own_copy(u, v)
        return Variable(f"unit {u} {root.signature.kernel}", seconds, energy, tuple(uses))

    def _own_copy(self, u: int, v: int) -> Floats:
        table, weight = self._table(v), self._copy_weight(u, v)
        cost = []
        for needs, give in zip(self._needs(u, v), self._gives(v), strict=True):
            cost.append(sum(table.seconds[table.number[give], table.number[n]] for n in needs))
        return np.array(cost) * weight

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

    def _live_copy(self, u: int, v: int) -> tuple[int, int]:
        """When a copy that unit u makes of v for itself is live."""
        root = self.program.instances[self.plan.units[u].root]
        at = self.lives.reads_at[u, v]
        if root.port in ("output", "state"):
            return at, len(self.plan.units)
        if root.port == "invariant":
            (inner,) = root.outputs[:1]
            return at, self.lives.last[inner] + 1
        return at, at + 1

    # Values with one reader

    def _direct(self, v: int, producer: int, reader: int) -> None:
        table, weight = self._table(v), self._copy_weight(reader, v)
        label_a, haves = label(list(self._gives(v)))
        label_b, needs = label(list(self._needs(reader, v)))
        a = np.array([table.number[h] for h in haves])  # type: ignore[index]
        shape = (len(haves), len(needs))
        seconds, energy, live = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for j, wanted in enumerate(needs):
            for n in wanted:  # type: ignore[attr-defined]
                b = table.number[n]
                seconds[:, j] += table.seconds[a, b] * weight
                energy[:, j] += table.joules[a, b] * weight
                live[:, j] += np.where(a == b, 0.0, table.local_bytes[b] + 0.0)
        start, end = self._live_copy(reader, v)
        self.pairs.append(
            Pair(producer, reader, label_a, label_b, seconds, energy, (Use(start, end, live),))
        )

    # Values with several readers

    def _shared(self, v: int, producer: int, readers: list[int]) -> None:
        table = self._table(v)
        readers = sorted(readers, key=lambda r: (self.lives.reads_at[r, v], r))
        label_p, haves = label(list(self._gives(v)))
        wanted = [label(list(self._needs(r, v))) for r in readers]
        rows = self._value_rows(v, readers, haves, [w for _, w in wanted])
        have = np.array([table.number[h] for h, _ in rows])
        kept = np.array([table.number[k[0]] if k else -1 for _, k in rows])
        until = np.array([k[1] if k else -1 for _, k in rows])
        weight = self.program.bodies[_body_of(self.snap, v)].weight
        holds = kept >= 0
        some = np.where(holds, kept, have)
        seconds = np.where(holds, table.seconds[have, some], 0.0) * weight
        energy = np.where(holds, table.joules[have, some], 0.0) * weight
        first = self.lives.reads_at[readers[0], v]
        uses = []
        for ending in sorted(set(until[holds].tolist())):
            chosen = holds & (until == ending)
            stop = self._live_copy(readers[ending], v)[1]
            uses.append(Use(first, stop, np.where(chosen, table.local_bytes[some], 0.0)))
        variable = len(self.variables)
        self.variables.append(Variable(f"value {v}", seconds, energy, tuple(uses)))
        self.variable_of_value[v] = variable
        self.values.append(ValueRows(v, tuple(rows), tuple(readers)))
        label_v, produced = label([h for h, _ in rows])
        agree = np.array([[0.0 if h == g else np.inf for g in produced] for h in haves])
        self.pairs.append(
            Pair(producer, variable, label_p, label_v, agree, np.zeros_like(agree))
        )
        for position, (reader, (label_r, needs)) in enumerate(zip(readers, wanted, strict=True)):
            self._reading(v, variable, reader, position, have, kept, until, label_r, needs)

    def _reading(
        self,
        v: int,
        variable: int,
        reader: int,
        position: int,
        have: Ints,
        kept: Ints,
        until: Ints,
        label_r: Ints,
        needs: list[object],
    ) -> None:
        table, weight = self._table(v), self._copy_weight(reader, v)
        served = np.where((kept >= 0) & (until >= position), kept, -1)
        label_v, sources = label(list(zip(have.tolist(), served.tolist(), strict=True)))
        h = np.array([s[0] for s in sources])  # type: ignore[index]
        g = np.array([s[1] for s in sources])  # type: ignore[index]
        shape = (len(sources), len(needs))
        seconds, energy, live = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        for j, layouts in enumerate(needs):
            for n in layouts:  # type: ignore[attr-defined]
                b = table.number[n]
                there = (h == b) | (g == b)
                seconds[:, j] += np.where(there, 0.0, table.seconds[h, b]) * weight
                energy[:, j] += np.where(there, 0.0, table.joules[h, b]) * weight
                live[:, j] += np.where(there, 0.0, float(table.local_bytes[b]))
        start, end = self._live_copy(reader, v)
        self.pairs.append(
            Pair(variable, reader, label_v, label_r, seconds, energy, (Use(start, end, live),))
        )

    def _value_rows(
        self, v: int, readers: list[int], haves: list[object], needs: list[list[object]]
    ) -> list[tuple[Layout, Kept]]:
        """Produced layouts alone, then with every copy that two readers could share."""
        table = self._table(v)
        endings = self._endings(v, readers)
        wanting = [{n for combo in combos for n in combo} for combos in needs]  # type: ignore[attr-defined]
        rows: list[tuple[Layout, Kept]] = [(h, None) for h in haves]  # type: ignore[misc]
        for have in haves:
            a = table.number[have]  # type: ignore[index]
            for kept in table.layouts:
                b = table.number[kept]
                if a == b or kept.partial or not np.isfinite(table.seconds[a, b]):
                    continue
                if table.wire[a, b] == 0.0:
                    continue
                sharing = [k for k, w in enumerate(wanting) if kept in w]
                for ending in endings:
                    if sum(k <= ending for k in sharing) >= 2 and ending in sharing:
                        rows.append((have, (kept, ending)))  # type: ignore[arg-type]
        return rows

    def _endings(self, v: int, readers: list[int]) -> list[int]:
        """Positions of readers after which a kept copy may be dropped."""
        final = len(readers) - 1
        if self.program.types[v].nbytes < _SMALL or final <= 1:
            return [final]
        times = [self.lives.reads_at[r, v] for r in readers]
        waits = sorted(range(1, final), key=lambda k: times[k] - times[k + 1])
        return sorted({final, *waits[: _ENDINGS - 1]})
