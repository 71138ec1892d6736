"""The difference of two plans: which tensors lie otherwise, which collectives come and go, and what
that takes and saves, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tapestry_egg.columns import columns, shortened, told_once, wrapped
from tapestry_egg.machine.objectives import COSTS
from tapestry_egg.plans.cost_table import CostPart, totals
from tapestry_egg.plans.peak import KINDS, Peak
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, ENERGY, OPERATIONS, TIME
from tapestry_egg.schedule.value_numbers import ValueNumbers
from tapestry_egg.show.account import LEGEND, Account, sent_by_line

# Parts, tensors made and collectives that are told one by one, and the share of what changes in all
# below which a part is not.
_FEW, _SMALL = 12, 0.01
_NAME = 36  # characters of a name
_ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Lies:
    """A tensor that lies otherwise in the other plan."""

    name: str
    type: str
    one: str
    other: str
    made_by: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Moves:
    """Collectives of one kind, axes, tensor type and line: how often each plan runs them, and the
    bytes that they send of one device in all."""

    kind: str
    axes: str
    type: str
    source: str
    one: float
    other: float
    sent_one: float
    sent_other: float


@dataclass(frozen=True, slots=True)
class Part:
    """What changes from the one plan to the other in all kernels, or copies, of one name: amounts
    of the other less those of the one, of one device but joules of all."""

    kind: str  # kernel, collective
    name: str
    one: float  # seconds
    other: float
    seconds: float
    flops: float
    hbm_bytes: float
    wire_bytes: float
    joules: float


@dataclass(frozen=True, slots=True)
class Runs:
    """Operations of one kernel, on and to the same types, from one line of the program: how many of
    them each plan has that the other has not."""

    kernel: str
    reads: str
    makes: str
    source: str
    text: str  # the line itself, where it is known
    one: int
    other: int


@dataclass(frozen=True)
class Difference:
    """From one plan to another of the same program. `totals` are (objective, one, other); `memory`
    (kind, one, other) bytes at the peak. `same_form` says that both have the same operations in the
    same order, `same_values` that they compute the same values, in whatever order; `operations` are
    those that one has and the other has not. `made` are tensors made inside that both have in
    memory; `rules` are (only one, only other)."""

    one: str
    other: str
    mesh_one: str
    mesh_other: str
    same_form: bool
    totals: tuple[tuple[str, float, float], ...]
    lies: tuple[Lies, ...]
    made: tuple[Lies, ...]
    moves: tuple[Moves, ...]
    parts: tuple[Part, ...]
    memory: tuple[tuple[str, float, float], ...]
    rules: tuple[tuple[str, ...], tuple[str, ...]]
    same_values: bool = True
    operations: tuple[Runs, ...] = ()

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        a, b = self.one, self.other
        meshes = f"{a} on {self.mesh_one}, {b} on {self.mesh_other}"
        rows = [["", a, b, "change"]]
        for objective, (_, x, y) in zip(COSTS, self.totals, strict=True):
            if x or y:
                formats = (objective.format(x), objective.format(y))
                rows.append([objective.title, *formats, _change(x, y, objective.format)])
        parts = [f"from {meshes}", columns(rows, "  ", right=(1, 2, 3))]
        parts += self._seconds()
        kinds = {k: (x, y) for k, x, y in self.memory}
        if kinds:
            parts.append("memory, each at its own peak")
            cells = [
                [k, BYTES.format(x), BYTES.format(y), _change(x, y, BYTES.format)]
                for k, (x, y) in kinds.items()
            ]
            parts.append(columns([["", a, b, "change"], *cells], "  ", right=(1, 2, 3)))
        parts += self._operations()
        parts += self._layouts()
        parts += self._collectives()
        for name, rules in ((a, self.rules[0]), (b, self.rules[1])):
            if rules:
                parts.append(f"only {name} takes the rules {', '.join(rules)}")
        return printable(wrapped("\n".join([*parts, LEGEND])))

    def _seconds(self) -> list[str]:
        told = self.parts[:_FEW]
        most = max((abs(p.seconds) for p in self.parts), default=0.0)
        told = tuple(p for p in told if abs(p.seconds) > _SMALL * most or abs(p.joules))
        if not told:
            return ["kernels and collectives take the same"]
        rows = [["what", self.one, self.other, "seconds", "memory", "sent", "energy", "flops"]]
        for p in told:
            row = [shortened(p.name, _NAME), TIME.format(p.one), TIME.format(p.other)]
            row += [_signed(p.seconds, TIME.format), _signed(p.hbm_bytes, BYTES.format)]
            row += [_signed(p.wire_bytes, BYTES.format), _signed(p.joules, ENERGY.format)]
            rows.append([*row, _signed(p.flops, OPERATIONS.format)])
        rest = self.parts[len(told) :]
        lines = ["kernels and copies by name, each in all its runs, and what changes"]
        lines.append(columns(rows, "  ", right=range(1, 8)))
        if rest:
            seconds = _signed(sum(p.seconds for p in rest), TIME.format) or "0 s"
            lines.append(f"  and {len(rest)} more, {seconds} in all")
        return lines

    def _operations(self) -> list[str]:
        """In what the two forms of the program differ."""
        if self.same_form:
            return []
        if self.same_values:
            return ["the same operations, in another order"]
        if not self.operations:
            return ["the same operations of every line, some on other values"]
        rows = [["operation", "reads", "makes", "at", self.one, self.other, ""]]
        for o in self.operations[:_FEW]:
            counts = [f"{n}×" if n else _ABSENT for n in (o.one, o.other)]
            rows.append(
                [
                    o.kernel,
                    shortened(o.reads, _NAME),
                    shortened(o.makes, _NAME),
                    o.source,
                    *counts,
                    o.text,
                ]
            )
        lines = ["operations that only one of them has", columns(rows, "  ", right=(4, 5))]
        if rest := len(self.operations[_FEW:]):
            lines.append(f"  and {rest} kinds more")
        return lines

    def _layouts(self) -> list[str]:
        if not (self.lies or self.made):
            every = self.same_form or self.same_values
            return [
                "every tensor has the same layout"
                if every
                else "arguments and results have the same layouts"
            ]
        lines = []
        if self.lies:
            rows = [["argument or result", "", self.one, self.other]]
            rows += [[x.name, x.type, x.one, x.other] for x in self.lies]
            lines += ["arguments and results with another layout"]
            lines.append(told_once(rows, paths=True, header=True))
        else:
            lines.append("arguments and results have the same layouts")
        if self.made:
            rows = [["made by", "", self.one, self.other, "at"]]
            rows += [[x.made_by, x.type, x.one, x.other, x.source] for x in self.made]
            lines += ["tensors made inside with another layout", told_once(rows, header=True)]
        return lines

    def _collectives(self) -> list[str]:
        if not self.moves:
            return ["the same collectives"]
        rows = [["collective", "axes", "of", "at", self.one, self.other, "sent"]]
        for m in self.moves[:_FEW]:
            counts = [f"{n:g}×" if n else _ABSENT for n in (m.one, m.other)]
            sent = _signed(m.sent_other - m.sent_one, BYTES.format)
            rows.append([m.kind, m.axes, m.type, m.source, *counts, sent])
        lines = ["collectives that come and go", columns(rows, "  ", right=(4, 5, 6))]
        if rest := self.moves[_FEW:]:
            sent = _signed(sum(m.sent_other - m.sent_one for m in rest), BYTES.format) or "0 B"
            lines.append(f"  and {len(rest)} kinds more, {sent} in all")
        return lines


def _signed(amount: float, form: Callable[[float], str]) -> str:
    """`+3 MiB`, `-3 MiB`, nothing for nothing."""
    return f"{'+' if amount > 0 else '-'}{form(abs(amount))}" if amount else ""


def _change(x: float, y: float, form: Callable[[float], str]) -> str:
    said = _signed(y - x, form)
    return f"{said} ({y / x - 1:+.1%})" if said and x else said


def difference(one: Plan, other: Plan) -> Difference:
    """What changes from one plan to another of the same program.

    Raises ExtractError for plans of which it is not told what machine they were made for.
    """
    a, b = Account(one, "difference"), Account(other, "difference")
    same = same_form(one, other)
    shared = ValueNumbers()
    numbers = shared.of(a.program), shared.of(b.program)
    # Values that are what both compute are known by their place where forms are the same.
    inside = _inside(a, b, *([range(len(x)) for x in numbers] if same else numbers))
    totals = [(o.name, o.value(one), o.value(other)) for o in COSTS]
    return Difference(
        one=one.name,
        other=other.name,
        mesh_one=str(one.mesh),
        mesh_other=str(other.mesh),
        same_form=same,
        totals=tuple(totals),
        lies=tuple(_boundary(a, b)),
        made=tuple(inside),
        moves=_moves(a, b),
        parts=_parts([*a.kernels, *a.copies], [*b.kernels, *b.copies]),
        memory=_memory(a.peak, b.peak),
        rules=(
            tuple(sorted(set(one.rules) - set(other.rules))),
            tuple(sorted(set(other.rules) - set(one.rules))),
        ),
        same_values=set(numbers[0]) == set(numbers[1]),
        operations=() if same else _operations(a, b, *numbers),
    )


def same_form(one: Plan, other: Plan) -> bool:
    """Whether two plans have the same operations on the same values."""
    if one.graph is other.graph:
        return True
    a, b = one.graph, other.graph
    return a.values == b.values and [(o.kernel, o.inputs, o.outputs) for o in a.operations] == [
        (o.kernel, o.inputs, o.outputs) for o in b.operations
    ]


def _boundary(a: Account, b: Account) -> Iterable[Lies]:
    told = set()
    for side in ("inputs", "outputs"):
        one: Sequence[int] = getattr(a.plan.graph, side)
        names = getattr(a.plan.graph, f"{side[:-1]}_names") or [
            f"{side[:-1]} {k}" for k in range(len(one))
        ]
        layouts = zip(getattr(a.plan.body, side), getattr(b.plan.body, side), strict=True)
        for v, name, (x, y) in zip(one, names, layouts, strict=True):
            lies = Lies(name, str(a.plan.graph.values[v]), a.show(x), b.show(y))
            if lies.one != lies.other and lies not in told:
                told.add(lies)  # what feeds back leaves as it entered
                yield lies


def _inside(a: Account, b: Account, ours: Sequence[int], theirs: Sequence[int]) -> Iterable[Lies]:
    """Values in memory that both compute, by their numbers, and make otherwise."""
    stored: dict[int, list[int]] = {}
    for v, _ in _stored(b):
        stored.setdefault(theirs[v], []).append(v)
    for v, (body, maker) in _stored(a):
        x, others = a.show(a.walk.given[v]), stored.get(ours[v], [])
        lies = [b.show(b.walk.given[w]) for w in others]
        if lies and x not in lies:
            name, source = a.called(body, maker), a.line(body, maker)
            yield Lies(a.value(v), str(a.program.types[v]), x, lies[0], name, source)


def _stored(account: Account) -> Iterable[tuple[int, tuple[int, int]]]:
    """Values in memory that operations make, and which: the graph and the operation in it."""
    lives, bodies = account.walk.ground.lives, account.program.bodies
    producers = [body.graph.producers() for body in bodies]
    for unit in account.schedule.units:
        for v in unit.outputs:
            body = account.walk.body_of[v]
            maker = producers[body].get(account.walk.local[v], -1)
            if maker >= 0 and lives.owns_memory(v):
                yield v, (body, maker)


def _operations(
    a: Account, b: Account, ours: Sequence[int], theirs: Sequence[int]
) -> tuple[Runs, ...]:
    """Operations that make values that the other does not compute; those that are there as well,
    but for what they read, are left out. Those first of which there are most."""
    found: dict[tuple[str, str, str, str, str], list[int]] = {}
    for side, (account, own, known) in enumerate(((a, ours, set(theirs)), (b, theirs, set(ours)))):
        for x in account.program.instances:
            if x.port or not x.outputs or own[x.outputs[0]] in known:
                continue
            op = account.operation(int(x.body), x.operation)
            assert op is not None
            reads, makes = (
                ", ".join(str(account.program.types[v]) for v in values)
                for values in (x.inputs, x.outputs)
            )
            source = account.line(int(x.body), x.operation)
            key = (op.kernel, reads, makes, source, op.source.text.strip())
            found.setdefault(key, [0, 0])[side] += 1
    runs = [Runs(*key, n - min(n, m), m - min(n, m)) for key, (n, m) in found.items() if n != m]
    return tuple(sorted(runs, key=lambda r: -max(r.one, r.other)))


def _moves(a: Account, b: Account) -> tuple[Moves, ...]:
    ours, theirs = sent_by_line(a.plan, a.paths), sent_by_line(b.plan, b.paths)
    found = []
    for key in dict.fromkeys((*ours, *theirs)):
        (one, sent), (other, others) = ours.get(key, (0.0, 0.0)), theirs.get(key, (0.0, 0.0))
        if (one, sent) != (other, others):
            found.append(Moves(*key, one, other, sent, others))
    return tuple(sorted(found, key=lambda m: -abs(m.sent_other - m.sent_one)))


def _parts(one: Sequence[CostPart], other: Sequence[CostPart]) -> tuple[Part, ...]:
    """By kind and name, what changes most first; what does not change is left out."""
    fields = ("seconds", "flops", "hbm_bytes", "wire_bytes", "joules")

    def summed(parts: Sequence[CostPart]) -> Mapping[tuple[str, str], list[float]]:
        groups: dict[tuple[str, str], list[CostPart]] = {}
        for p in parts:
            groups.setdefault((p.kind, p.name), []).append(p)
        sums = {key: totals(group) for key, group in groups.items()}
        return {key: [total[name] for name in fields] for key, total in sums.items()}

    a, b = summed(one), summed(other)
    nothing = [0.0] * len(fields)
    found = []
    for kind, name in dict.fromkeys((*a, *b)):
        x, y = a.get((kind, name), nothing), b.get((kind, name), nothing)
        change = [q - p for p, q in zip(x, y, strict=True)]
        if any(abs(d) > 1e-9 * (abs(p) + abs(q)) for d, p, q in zip(change, x, y, strict=True)):
            found.append(Part(kind, name, x[0], y[0], *change))
    return tuple(sorted(found, key=lambda p: (-abs(p.seconds), p.kind, p.name)))


def _memory(a: Peak, b: Peak) -> tuple[tuple[str, float, float], ...]:
    x, y = a.by_kind(), b.by_kind()
    return tuple((k, x.get(k, 0.0), y.get(k, 0.0)) for k in KINDS if k in x or k in y)
