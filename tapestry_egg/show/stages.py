"""What the passes of the pipeline make, in words: a few lines for each entry, or for one tensor.

A tensor is named by its path (`[0]['up']`, or an end of it that no other has), or by its number in
the program (`%9`). What is said of operations is said of one that reads it, or of the one that
makes it where nothing does; what is said of meshes, of one entry of the stage.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from tapestry_egg.columns import columns
from tapestry_egg.errors import GraphError
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Variable
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import FlatId, InstanceId, UnitId
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, TIME
from tapestry_egg.rewrite.form import Form
from tapestry_egg.schedule.flatten import FlatProgram, close_paths
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.encode import Encoding
from tapestry_egg.shard.strategies import Saturated, StrategyRow

from .text import graph_text


def stage_text(name: str, value: Any) -> str:
    """The value of a stage, such as `forms` or `strategies`, as text."""
    return printable("\n".join(_IN_SHORT[name](value)))


def _shapes(shapes: Sequence[MeshShape]) -> Iterator[str]:
    yield f"{len(shapes)} mesh shapes: {', '.join(map(str, shapes))}"


def _forms(forms: Sequence[Form]) -> Iterator[str]:
    for k, form in enumerate(forms):
        made = ", ".join(form.rules) or "as given"
        yield f"form {k + 1} ({made}): {graph_text(form.graph)}"


def _schedules(schedules: Sequence[Schedule]) -> Iterator[str]:
    for k, schedule in enumerate(schedules):
        yield f"form {k + 1}: {len(schedule.units)} units"
        yield from map(unit_line, [schedule] * len(schedule.units), range(len(schedule.units)))


def unit_line(schedule: Schedule, u: int) -> str:
    """A unit in a line: `u7 dot_general + max: reads 3 7, makes 9`."""
    unit = schedule.units[u]
    instances = [schedule.program.instances[m] for m in unit.members]
    kernels = " + ".join(i.port or i.signature.kernel for i in instances)
    reads = " ".join(str(v) for _, _, v in unit.reads)
    makes = " ".join(f"{v} {schedule.program.types[v]}" for v in unit.outputs)
    ends = [f"reads {reads}" if reads else "", f"makes {makes}" if makes else ""]
    return f"  u{u} {kernels}: {', '.join(filter(None, ends))}"


def _networks(networks: Sequence[Any]) -> Iterator[str]:
    for n in networks:
        every = ("encoding", "strategies", "choices", "problem", "search")
        known = ", ".join(k for k in every if getattr(n, k) is not None)
        yield f"{n}: {len(n.schedule.units)} units; {known or 'nothing made yet'}"


def _encodings(encodings: Sequence[Encoding]) -> Iterator[str]:
    for e in encodings:
        count = sum(map(len, e.facts.values()))
        kernels = Counter(s.kernel for s in e.signatures)
        yield f"{e.algebra.mesh}: {len(e.program.instances)} operations and ports, " + (
            f"{len(e.signatures)} signatures, {len(e.algebra.layouts)} layouts, {count} facts"
        )
        yield "  " + ", ".join(f"{n}× {kernel}" for kernel, n in sorted(kernels.items()))


def _strategies(found: Sequence[Saturated]) -> Iterator[str]:
    for s in found:
        end = "to the fixpoint" if s.saturated else "to a budget"
        yield f"{s.encoding.algebra.mesh}: {s.rows} rows in {s.iterations} iterations, {end}"
        for signature, rows in zip(s.encoding.signatures, s.strategies, strict=True):
            types = ", ".join(str(t) for t in signature.input_types)
            yield f"  {signature.kernel}({types}): {len(rows)} strategies"


def _choices(every: Sequence[UnitChoices]) -> Iterator[str]:
    for c in every:
        rows = sum(map(len, c.rows))
        cut = f", rows left out of {sum(c.truncated)} units" if any(c.truncated) else ""
        yield f"{c.mesh}: {rows} rows for {len(c.rows)} units{cut}"


def _problems(problems: Sequence[PlanProblem]) -> Iterator[str]:
    for p in problems:
        rows = sum(map(len, p.problem.variables))
        yield f"{p.choices.mesh}: {len(p.problem.variables)} variables of {rows} rows, " + (
            f"{len(p.problem.pairs)} pairs, {p.problem.times} moments"
        )


def _results(results: Sequence[NetworkResult]) -> Iterator[str]:
    for r in results:
        best = min(r.archive.candidates, key=lambda c: c.costs, default=None)
        words = "nothing" if best is None else f"from {TIME.format(best.seconds)}"
        yield f"{r.assembled.choices.mesh}: {len(r.archive.candidates)} labellings {words}, " + (
            f"{len(r.archive.cuts)} bounds"
        )


def _front(front: Front) -> Iterator[str]:
    yield str(front)


_IN_SHORT: dict[str, Callable[[Any], Iterator[str]]] = {
    "shapes": _shapes,
    "forms": _forms,
    "schedules": _schedules,
    "networks": _networks,
    "encodings": _encodings,
    "strategies": _strategies,
    "choices": _choices,
    "problems": _problems,
    "results": _results,
    "front": _front,
}


# --- one tensor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asked:
    """What to tell: the tensor's name, which of its readers, and how many lines of a long list."""

    name: str
    reader: int = 0
    most: int = 8


def tensor_text(stage: str, value: Any, asked: Asked, entry: int = 0) -> str:
    """What an entry of a stage holds of one tensor.

    Raises GraphError for a name that no tensor has, or several, and for an entry or a reader that
    there is not.
    """
    several = stage not in ("shapes", "front")
    if several and not 0 <= entry < len(value):
        raise GraphError(f"there are {len(value)} entries", where=f"entry {entry} of {stage}")
    return printable("\n".join(_OF_TENSOR[stage](value[entry] if several else value, asked)))


def value_named(graph: BlockGraph, name: str) -> int:
    """The number of the value that a path, an end of one, or `%9` names. Raises GraphError."""
    if name[:1] == "%" and name[1:].isdigit() and int(name[1:]) < len(graph.values):
        return int(name[1:])
    named = dict(zip(graph.output_names or (), graph.outputs, strict=False))
    named.update(zip(graph.input_names or (), graph.inputs, strict=False))
    if name in named:
        return named[name]
    found = [v for path, v in named.items() if name and path.endswith(name)]
    if len(found) == 1:
        return found[0]
    what = "no tensor has" if not found else f"{len(found)} tensors have"
    hint = f"Tensors are named by their paths, {close_paths(name, tuple(named))}, or numbers: %0."
    raise GraphError(f"{what} this name", where=repr(name), hint=hint)


def mentions(graph: BlockGraph, value: int) -> Iterator[str]:
    """The lines of a program that a value occurs in, below its head."""
    head, *rest = graph_text(graph).splitlines()
    yield head
    for line in rest:
        words, _, _ = line.partition("  # ")
        if f"%{value}" in words.replace(",", " ").replace("(", " ").replace(")", " ").split():
            yield words


@dataclass(frozen=True)
class Place:
    """A value in a flat program, and the operation that is told of: it reads or makes the value at
    `port`, counted over its operands and results."""

    program: FlatProgram
    value: int
    flat: FlatId
    instance: InstanceId
    port: int

    @staticmethod
    def of(program: FlatProgram, asked: Asked) -> Place:
        graph = program.bodies[0].graph
        value = value_named(graph, asked.name)
        flat = program.bodies[0].values[value]
        plain = [k for k, i in enumerate(program.instances) if not i.port]
        using = [k for k in plain if flat in program.instances[k].inputs]
        using = using or [k for k in plain if flat in program.instances[k].outputs]
        if not 0 <= asked.reader < len(using):
            raise GraphError(
                f"{len(using)} operations read it, numbered from 0",
                where=f"reader {asked.reader} of {asked.name!r}",
            )
        instance = program.instances[using[asked.reader]]
        port = (*instance.inputs, *instance.outputs).index(flat)
        return Place(program, value, flat, InstanceId(using[asked.reader]), port)

    def shown(self, flat: FlatId) -> str:
        """A value as the program's listing calls it; those that scheduling has added, by `·`."""
        values = self.program.bodies[0].values
        return f"%{values.index(flat)}" if flat in values else f"·{flat}"


def _shapes_of(shapes: Sequence[MeshShape], _: Asked) -> Iterator[str]:
    yield f"mesh shapes are of all tensors: {', '.join(map(str, shapes))}"


def _forms_of(form: Form, asked: Asked) -> Iterator[str]:
    steps = "; ".join(f"{', '.join(s.rules)}: {s.made}" for s in form.steps) or "as given"
    yield steps
    yield from mentions(form.graph, value_named(form.graph, asked.name))


def _schedules_of(schedule: Schedule, asked: Asked) -> Iterator[str]:
    place = Place.of(schedule.program, asked)
    maker = schedule.producer[place.flat]
    units = [*([maker] if maker >= 0 else []), *schedule.readers[place.flat]]
    if maker < 0:  # made and read inside one unit
        every = map(UnitId, range(len(schedule.units)))
        units = [u for u in every if place.instance in schedule.units[u].members]
    yield from (unit_line(schedule, u).strip() for u in units)


def _networks_of(network: Any, asked: Asked) -> Iterator[str]:
    yield f"{network}:"
    yield from _schedules_of(network.schedule, asked)


_OF_SIGNATURE = ("kernel", "extent", "map-dim", "reduce-dim")
_OF_PORT = ("tensor", "coefficient")


def _encodings_of(encoding: Encoding, asked: Asked) -> Iterator[str]:
    place = Place.of(encoding.program, asked)
    number = encoding.signature_of[place.instance]
    for name in (*_OF_SIGNATURE, *_OF_PORT):
        rows = [row for row in encoding.facts.get(name, []) if row[0] == number]
        if name in _OF_PORT:
            rows = [row for row in rows if row[1] == place.port and row[-1]]
        if rows:
            yield " ".join(f"({name} {' '.join(map(str, row))})" for row in rows)


def _strategies_of(found: Saturated, asked: Asked) -> Iterator[str]:
    encoding = found.encoding
    place = Place.of(encoding.program, asked)
    mesh, number = encoding.algebra.mesh, encoding.signature_of[place.instance]
    instance = encoding.program.instances[place.instance]
    reads = len(instance.inputs)
    dims = [d.name for d in encoding.signatures[number].index]
    rows = found.strategies[number]
    whole = [r for r in rows if not any(x.partial for x in r.layouts[:reads])]
    kernel = encoding.signatures[number].kernel
    yield f"{len(rows)} strategies of {kernel} on {mesh}; {len(whole)} read no partial values:"

    def cut(row: StrategyRow) -> str:
        named = zip(dims, row.cuts, strict=True)
        ways = (f"{d}/{'·'.join(mesh.names[a] for a in axes)}" for d, axes in named if axes)
        return " ".join(ways) or "uncut"

    names = [place.shown(v) for v in (*instance.inputs, *instance.outputs)]
    table = [
        [cut(row)]
        + [
            f"{'-> ' if port == reads else ''}{name} {layout.show(mesh)}"
            for port, (name, layout) in enumerate(zip(names, row.layouts, strict=True))
        ]
        for row in whole[: asked.most]
    ]
    yield from columns(table).splitlines()
    yield from _more(len(whole) - asked.most)


def _choices_of(choices: UnitChoices, asked: Asked) -> Iterator[str]:
    place = Place.of(choices.schedule.program, asked)
    unit = next(u for u, x in enumerate(choices.schedule.units) if place.instance in x.members)
    words = f"u{unit} has {len(choices.rows[unit])} rows"
    table = choices.copies.get(choices.schedule.program.types[place.flat])
    mesh, shape = choices.mesh, choices.schedule.program.types[place.flat].shape
    every = () if table is None else table.layouts
    cut = [x for x in every if not x.partial and x.local_shape(shape, mesh) != shape]
    if table is None or not cut:
        yield words
        return
    layout = cut[0]
    a = table.number[layout]
    yield f"{words}; copies of {table.tensor} from {layout.show(mesh)}:"
    lines = [["to", "seconds", "sent", "by"]]
    for b, to in enumerate(table.layouts):
        if a != b and table.seconds[a, b] < float("inf"):
            steps = [
                f"{s.kind}({','.join(mesh.names[x] for x in s.axes)})"
                for s in table.path(layout, to)
            ]
            cost = [TIME.format(table.seconds[a, b]), BYTES.format(table.wire[a, b])]
            lines.append([to.show(mesh), *cost, " then ".join(steps)])
    yield from columns(lines[: asked.most + 1], right=(1, 2)).splitlines()
    yield from _more(len(lines) - asked.most - 1)


def _more(count: int, what: str = "") -> Iterator[str]:
    if count > 0:
        yield f"... and {count} more{what}"


def _maker(choices: UnitChoices, asked: Asked) -> tuple[UnitId, int]:
    """The unit that makes a tensor, or that holds what does, and which of its results it is."""
    place = Place.of(choices.schedule.program, asked)
    unit = choices.schedule.producer[place.flat]
    if unit < 0:
        raise GraphError(
            "exists only inside an operation that others are fused with",
            where=repr(asked.name),
            hint="The stage of schedules tells which: nothing is to be chosen for it alone.",
        )
    return unit, choices.schedule.units[unit].outputs.index(place.flat)


def _problems_of(posed: PlanProblem, asked: Asked) -> Iterator[str]:
    unit, at = _maker(posed.choices, asked)
    variable = posed.problem.variables[unit]
    yield f"variable {unit} ({variable.name}): {len(variable)} rows"
    mesh, flat = posed.choices.mesh, posed.choices.schedule.units[unit].outputs[at]
    shared = {s.value: s.rows for s in posed.sharing if s.variable == unit}.get(flat)
    lines = [["row", "made as", "copy kept", "seconds", "held at most"]]
    for r, row in enumerate(posed.unit_row[unit].tolist()[: asked.most]):
        have = posed.choices.rows[unit].gives[row][at].show(mesh)
        kept = None if shared is None else shared[r][1]
        costs = [TIME.format(variable.seconds[r]), BYTES.format(_most_held(variable, r))]
        lines.append([str(r), have, "none" if kept is None else kept[0].show(mesh), *costs])
    yield from columns(lines, right=(0, 3, 4)).splitlines()
    yield from _more(len(variable) - asked.most, " rows")
    pairs = [p.b if p.a == unit else p.a for p in posed.problem.pairs if unit in (p.a, p.b)]
    yield "pairs with " + (", ".join(posed.problem.variables[u].name for u in pairs) or "none")


def _most_held(variable: Variable, row: int) -> float:
    """The most bytes that a row of a variable holds at any moment, on one device."""
    changes: defaultdict[int, float] = defaultdict(float)
    for use in variable.uses:
        changes[use.start] += use.amount[row]
        changes[use.end] -= use.amount[row]
    return max(accumulate(changes[time] for time in sorted(changes)), default=0.0)


def _results_of(found: NetworkResult, asked: Asked) -> Iterator[str]:
    posed = found.assembled
    unit, at = _maker(posed.choices, asked)
    for c in found.archive.corners()[: asked.most]:
        row = int(posed.unit_row[unit][c.rows[unit]])
        have = posed.choices.rows[unit].gives[row][at].show(posed.choices.mesh)
        bound = found.archive.bound(c.peak, c.joules)
        costs = f"{TIME.format(c.seconds)}, peak {BYTES.format(c.peak)}"
        yield f"{costs}: {have}, proven {TIME.format(bound)}"
    yield from _more(len(found.archive.corners()) - asked.most)


def _front_of(front: Front, asked: Asked) -> Iterator[str]:
    rows = [["plan", "seconds", "peak", "layout", "is moved by"]]
    for plan in front:
        value = value_named(plan.graph, asked.name)
        own = [c for c in plan.collectives if c.value.startswith(f"%{value} ")]
        moved = [
            f"{c.kind} over {'·'.join(c.axes)}, payload {BYTES.format(c.payload_bytes)}"
            for c in own
        ]
        costs = [TIME.format(plan.costs.seconds), BYTES.format(plan.costs.peak_bytes)]
        rows.append([plan.name, *costs, _layout(plan, value), "; ".join(moved)])
    yield from columns(rows, right=(1, 2)).splitlines()


def _layout(plan: Plan, value: int) -> str:
    """How a plan lays out what it is given, or has made."""
    if value in plan.graph.inputs:
        return plan.in_shardings[plan.graph.inputs.index(value)].show(plan.mesh)
    for op, strategy in zip(plan.graph.operations, plan.body.strategies, strict=True):
        if value in op.outputs:
            return strategy.gives[op.outputs.index(value)].show(plan.mesh)
    return "a constant"


_OF_TENSOR: dict[str, Callable[[Any, Asked], Iterator[str]]] = {
    "shapes": _shapes_of,
    "forms": _forms_of,
    "schedules": _schedules_of,
    "networks": _networks_of,
    "encodings": _encodings_of,
    "strategies": _strategies_of,
    "choices": _choices_of,
    "problems": _problems_of,
    "results": _results_of,
    "front": _front_of,
}
