"""Plans as documents: layouts by number, each nested body beside the operation that it runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any

import msgspec

from tapestry_egg.collector import rarely_collected
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import GraphError, PlanError, TargetError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import Note, as_note
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.objectives import Objective
from tapestry_egg.machine.target import Target, check_machine
from tapestry_egg.plans.plan import (
    CHANGE_FIELDS,
    BodyPlan,
    Change,
    Costs,
    Kept,
    Origin,
    Plan,
    PlannedCollective,
    RuleStep,
    Strategy,
)
from tapestry_egg.printable import brief
from tapestry_egg.tracing.graph_documents import (
    GraphRecord,
    SourceRecord,
    SourceTable,
    check_names,
    convert,
    graph_from_record,
    graph_record,
    program_of,
)
from tapestry_egg.tracing.trace import Program

#: A number that may be infinite: JSON has no infinity, so it is then written as "inf".
Number = int | float | str


class MeshRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mesh axes in order."""

    names: list[str]
    sizes: list[int]


class LayoutRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """A layout; its place in the table of layouts is the number that everything refers to."""

    dims: list[list[int]]
    partial: list[int] = []
    monoid: str | None = None


class StrategyRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """How one operation runs; layouts by number."""

    cuts: list[list[int]]
    needs: list[int]
    gives: list[int]
    bodies: list[BodyRecord] = []


class BodyRecord(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True
):
    """Layouts and strategies of one graph: of the plan's, or of a region in it."""

    inputs: list[int]
    outputs: list[int]
    strategies: list[StrategyRecord]
    kept: dict[str, tuple[int, int]] = {}
    copies: list[tuple[int, int, int, list[Change]]] = []
    groups: list[int] = []
    merged: list[list[tuple[int, int, int]]] = []  # value, layout, the how manieth such copy


class OriginRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What plans were made for: the program as it was given with its pytrees, the machine, the
    outputs that feed back as (output, input), and rule books of the user's own by path."""

    program: GraphRecord
    in_tree: Any
    out_tree: Any
    machine: Target | None
    feedback: list[tuple[int, int]] = []
    books: list[str] = []
    parameters: list[str] = []


class PlanRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A plan; `graph` is the form of the program that it runs."""

    name: str
    target: str
    mesh: MeshRecord
    costs: dict[str, Number]
    bound: Number
    merged_too: bool = False
    rules: list[str]
    steps: list[RuleStep] = []
    collectives: list[PlannedCollective]
    layouts: list[LayoutRecord]
    graph: GraphRecord
    body: BodyRecord


@dataclass
class _Writer:
    sources: SourceTable
    layouts: dict[Layout, int] = field(default_factory=dict)

    def layout(self, layout: Layout) -> int:
        return self.layouts.setdefault(layout, len(self.layouts))

    def body(self, body: BodyPlan, graph: BlockGraph) -> BodyRecord:
        """The record of a body of `graph`, which the reader knows."""
        if body.graph is not graph and self.graph(body.graph) != self.graph(graph):
            raise ValueError(f"the body of {graph.name} is of another graph")
        return BodyRecord(
            inputs=[self.layout(x) for x in body.inputs],
            outputs=[self.layout(x) for x in body.outputs],
            strategies=[
                StrategyRecord(
                    cuts=[list(c) for c in s.cuts],
                    needs=[self.layout(x) for x in s.needs],
                    gives=[self.layout(x) for x in s.gives],
                    bodies=[
                        self.body(inner, region)
                        for inner, region in zip(s.bodies, op.regions, strict=True)
                    ],
                )
                for s, op in zip(body.strategies, body.graph.operations, strict=True)
            ],
            kept={str(v): (self.layout(k.layout), k.until) for v, k in body.kept.items()},
            copies=[
                (v, self.layout(source), self.layout(target), list(steps))
                for (v, source, target), steps in body.copies.items()
            ],
            groups=list(body.groups),
            merged=[[(v, self.layout(x), n) for v, x, n in members] for members in body.merged],
        )

    def graph(self, graph: BlockGraph) -> GraphRecord:
        return graph_record(graph, self.sources)


def plan_record(plan: Plan, sources: SourceTable) -> PlanRecord:
    """The record of a plan.

    Raises PlanError where the plan does not fit its graph, GraphError where the graph holds
    objects of this process.
    """
    writer = _Writer(sources)
    graph = writer.graph(plan.graph)
    try:
        body = writer.body(plan.body, plan.graph)
    except ValueError as e:
        raise PlanError(f"the plan does not fit its graph: {e}", where=plan.name) from e
    for i, collective in enumerate(plan.collectives):
        if not math.isfinite(collective.wire_bytes):
            raise PlanError(f"collective {i} moves {collective.wire_bytes} bytes", where=plan.name)
    return PlanRecord(
        name=plan.name,
        target=plan.target,
        mesh=MeshRecord(list(plan.mesh.names), list(plan.mesh.sizes)),
        costs={name: _number(value) for name, value in asdict(plan.costs).items()},
        bound=_number(plan.bound),
        merged_too=plan.merged_too,
        rules=list(plan.rules),
        steps=list(plan.steps),
        collectives=list(plan.collectives),
        layouts=[
            LayoutRecord(dims=[list(d) for d in x.dims], partial=list(x.partial), monoid=x.monoid)
            for x in writer.layouts
        ],
        graph=graph,
        body=body,
    )


@dataclass
class _Reader:
    mesh: MeshShape
    layouts: list[Layout] = field(default_factory=list)

    def layout(self, number: int, where: str, rank: int | None = None) -> Layout:
        if not 0 <= number < len(self.layouts):
            raise GraphError(f"there is no layout {number}", where=where)
        found = self.layouts[number]
        if rank is not None and len(found.dims) != rank:
            raise PlanError(
                f"layout {found.show(self.mesh)} for a tensor of {rank} dims", where=where
            )
        return found

    def all(
        self, numbers: Sequence[int], values: Sequence[int], graph: BlockGraph, where: str
    ) -> tuple[Layout, ...]:
        """One layout per value, each with as many dims as the value has."""
        if len(numbers) != len(values):
            raise PlanError(f"{len(numbers)} layouts for {len(values)} values", where=where)
        return tuple(
            self.layout(n, f"{where}[{i}]", graph.values[v].rank)
            for i, (n, v) in enumerate(zip(numbers, values, strict=True))
        )

    def axes(self, axes: Sequence[int], where: str) -> tuple[int, ...]:
        for a in axes:
            if not 0 <= a < len(self.mesh.sizes):
                raise PlanError(f"the mesh {self.mesh} has no axis {a}", where=where)
        return tuple(axes)

    def read_layouts(self, records: Sequence[LayoutRecord], where: str) -> None:
        for i, r in enumerate(records):
            at = f"{where}[{i}]"
            dims = tuple(self.axes(d, f"{at}.dims[{k}]") for k, d in enumerate(r.dims))
            layout = Layout(dims, self.axes(r.partial, f"{at}.partial"), r.monoid)
            if len(set(layout.axes)) != len(layout.axes):
                raise PlanError("an axis occurs twice in a layout", where=at)
            if bool(layout.partial) != (layout.monoid is not None):
                raise PlanError("partial axes and a monoid belong together", where=at)
            self.layouts.append(layout)

    def body(self, record: BodyRecord, graph: BlockGraph, where: str) -> BodyPlan:
        if len(record.strategies) != len(graph.operations):
            raise PlanError(
                f"{len(record.strategies)} strategies for {len(graph.operations)} operations",
                where=f"{where}.strategies",
            )
        strategies = tuple(
            self.strategy(s, graph, i, f"{where}.strategies[{i}]")
            for i, s in enumerate(record.strategies)
        )
        kept = {}
        for key, (number, until) in record.kept.items():
            v = self.value(key, graph, f"{where}.kept")
            if v in kept:
                raise GraphError(f"value {v} is kept twice", where=f"{where}.kept.{key}")
            if not 0 <= until <= len(graph.operations):  # the last: the graph's outputs
                raise GraphError(f"there is no operation {until}", where=f"{where}.kept.{key}")
            rank = graph.values[v].rank
            kept[v] = Kept(self.layout(number, f"{where}.kept.{key}", rank), until)
        if record.groups and len(record.groups) != len(graph.operations):
            raise PlanError(
                f"{len(record.groups)} groups for {len(graph.operations)} operations",
                where=f"{where}.groups",
            )
        copies = {}
        for i, (v, source, target, steps) in enumerate(record.copies):
            at = f"{where}.copies[{i}]"
            rank = graph.values[self.value(str(v), graph, at)].rank
            for n, step in enumerate(steps):
                self.axes(step.axes, f"{at}[3][{n}].axes")
                for d in step.dims or ():
                    self.axes(d, f"{at}[3][{n}].dims")
                given = ("dim", "to_dim", "monoid", "dims", "pieces")
                said = frozenset(k for k in given if getattr(step, k) is not None)
                if said not in CHANGE_FIELDS.get(step.kind, ()):
                    raise PlanError(f"{step.kind} with {sorted(said)}", where=f"{at}[3][{n}]")
            key_ = (v, self.layout(source, at, rank), self.layout(target, at, rank))
            if key_ in copies:
                raise PlanError("the same copy occurs twice", where=at)
            copies[key_] = tuple(steps)
        return BodyPlan(
            graph=graph,
            inputs=self.all(record.inputs, graph.inputs, graph, f"{where}.inputs"),
            outputs=self.all(record.outputs, graph.outputs, graph, f"{where}.outputs"),
            strategies=strategies,
            kept=kept,
            copies=copies,
            groups=tuple(record.groups),
            merged=tuple(
                tuple(self.copied(key, graph, f"{where}.merged[{i}]") for key in members)
                for i, members in enumerate(record.merged)
            ),
        )

    def copied(
        self, key: tuple[int, int, int], graph: BlockGraph, where: str
    ) -> tuple[int, Layout, int]:
        """A copy that is made with others: its value, the layout made, the how manieth it is."""
        v, layout, time = key
        rank = graph.values[self.value(str(v), graph, where)].rank
        return v, self.layout(layout, where, rank), time

    def strategy(
        self, record: StrategyRecord, graph: BlockGraph, index: int, where: str
    ) -> Strategy:
        op = graph.operations[index]
        if len(record.bodies) != len(op.regions):
            raise PlanError(
                f"{len(record.bodies)} bodies for {len(op.regions)} regions of {op.kernel}",
                where=f"{where}.bodies",
            )
        return Strategy(
            cuts=tuple(self.axes(c, f"{where}.cuts[{d}]") for d, c in enumerate(record.cuts)),
            needs=self.all(record.needs, op.inputs, graph, f"{where}.needs"),
            gives=self.all(record.gives, op.outputs, graph, f"{where}.gives"),
            bodies=tuple(
                self.body(body, region, f"{where}.bodies[{r}]")
                for r, (body, region) in enumerate(zip(record.bodies, op.regions, strict=True))
            ),
        )

    def value(self, key: str, graph: BlockGraph, where: str) -> int:
        if not key.isascii() or not key.isdigit() or int(key) >= len(graph.values):
            raise GraphError(f"there is no value {key}", where=where)
        return int(key)


def plan_from_record(
    record: PlanRecord,
    graph: Callable[[], BlockGraph],
    program: Program,
    origin: Origin | None,
    where: str = "$",
    late: bool = False,
) -> Plan:
    """The plan of a record, on the form `graph` of a program; `late`, of one that is known to be
    sound, its body is read when it is first asked for.

    Raises GraphError for a fault in the file, PlanError for layouts and strategies that do not fit
    the graph or the mesh; both with the JSON path.
    """
    try:
        mesh = MeshShape(tuple(record.mesh.names), tuple(record.mesh.sizes))
    except TargetError as e:
        raise PlanError(e.what, where=f"{where}.mesh") from None

    def body() -> BodyPlan:
        with rarely_collected():
            reader = _Reader(mesh)
            reader.read_layouts(record.layouts, f"{where}.layouts")
            return reader.body(record.body, graph(), f"{where}.body")

    plan = Plan.with_late_body(
        body,
        name=record.name,
        mesh=mesh,
        target=record.target,
        costs=_costs(record.costs, f"{where}.costs"),
        bound=_float(record.bound, f"{where}.bound"),
        merged_too=record.merged_too,
        collectives=tuple(record.collectives),
        rules=tuple(record.rules),
        steps=tuple(record.steps),
        program=program,
        origin=origin,
    )
    assert late or plan.body, "read at once"
    return plan


def origin_record(plan: Plan, sources: SourceTable) -> OriginRecord:
    """What a plan was made for; of a plan made by hand, its own graph and no machine."""
    program = plan.program or Program.of(plan.graph)
    origin = plan.origin
    return OriginRecord(
        program=graph_record(program.graph, sources),
        in_tree=program.in_tree,
        out_tree=program.out_tree,
        machine=origin.machine if origin else None,
        feedback=list(origin.feedback) if origin else [],
        books=list(origin.books) if origin else [],
        parameters=list(program.parameters),
    )


def origin_from_record(
    record: OriginRecord, sources: Sequence[SourceRecord], where: str
) -> tuple[Program, Origin | None]:
    """The program of a record, and what else plans were made for; None where it holds no machine.

    Raises GraphError with the JSON path.
    """
    graph = graph_from_record(record.program, sources, f"{where}.program")
    program = program_of(graph, record.in_tree, record.out_tree, where)
    check_names(program, where)
    program = replace(program, parameters=tuple(record.parameters))
    for k, (j, i) in enumerate(record.feedback):
        at = f"{where}.feedback[{k}]"
        if not (0 <= j < len(graph.outputs) and 0 <= i < len(graph.inputs)):
            raise GraphError(f"there is no output {j} or input {i}", where=at)
        a, b = graph.values[graph.inputs[i]], graph.values[graph.outputs[j]]
        if not graph.same_type(graph.inputs[i], graph.outputs[j]):
            raise GraphError(f"output {j}, {b}, cannot become input {i}, {a}", where=at)
    for side in zip(*record.feedback, strict=True):
        if len(set(side)) != len(side):
            raise GraphError("an output or input feeds back twice", where=f"{where}.feedback")
    if record.machine is None:
        return program, None
    place = f"{where}.machine"
    try:
        check_machine(record.machine, place)
    except TargetError as e:  # one of a table says where in the table
        at = e.where if e.where.startswith(place) else f"{place}, {e.where}"
        raise PlanError(e.what, where=at, hint=e.hint) from None
    return program, Origin(record.machine, tuple(record.feedback), tuple(record.books))


def _costs(given: dict[str, Number], where: str) -> Costs:
    known = {f.name: f for f in fields(Costs)}
    required = {n for n, f in known.items() if f.default is MISSING}
    if not required <= given.keys() <= known.keys():
        raise GraphError(f"expected {', '.join(known)}", where=where)
    numbers = {name: _float(value, f"{where}.{name}") for name, value in given.items()}
    for name in numbers:
        if known[name].type == "int" and math.isfinite(numbers[name]):
            exact = given[name]
            if not isinstance(exact, int):
                raise GraphError(f"{brief(exact)} is not a whole number", where=f"{where}.{name}")
            numbers[name] = exact
    return Costs(**numbers)  # type: ignore[arg-type]


def _number(value: float) -> Number:
    return value if math.isfinite(value) else str(float(value))


def _float(value: Number, where: str) -> float:
    if isinstance(value, str):
        if value not in ("inf", "-inf", "nan"):
            raise GraphError(f"{value!r} is not a number", where=where)
        return float(value)
    try:
        return float(value)
    except OverflowError:
        raise GraphError("is larger than any float", where=where) from None


# Fronts as documents: their plans, and each graph that the plans share, once.


class FrontPlanRecord(PlanRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A plan of a front; its graph by its place in the front's table of graphs."""

    graph: int  # type: ignore[assignment]


class FrontRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A front. `epsilon` is null where nothing is proven of the front as a whole."""

    graph_name: str
    target: str
    objectives: list[str]
    epsilon: float | None
    saturated: bool
    graphs: list[GraphRecord]
    plans: list[FrontPlanRecord]
    origin: OriginRecord
    sources: list[SourceRecord] = []
    notes: list[Note | str] = []  # a sentence in files of earlier versions
    timeline: list[Tick] = []
    usable_bytes: int | None = None
    original: FrontPlanRecord | None = None
    searched: tuple[int, int] | None = None


def front_document(front: Front) -> dict[str, Any]:
    """The front as plain data.

    Raises PlanError where a plan does not fit its graph or an objective is a function of the
    user's own, GraphError where a graph holds objects of
    this process.
    """
    sources = SourceTable()
    # All plans of a front run the same program.
    if not front.plans:
        raise PlanError("a front without plans cannot be saved", where=front.graph_name)
    for each in front.objectives:
        if isinstance(each, Objective) and not each.formula:
            raise PlanError(
                f"the objective {each.name} of one's own cannot be saved: it is a function",
                where=front.graph_name,
                hint="Give it as a formula: 'seconds * joules'.",
            )
    origin = msgspec.to_builtins(origin_record(front.plans[0], sources))
    graphs: list[dict[str, Any]] = []
    places: dict[int, int] = {}

    def numbered(plan: Plan) -> dict[str, Any]:
        record = msgspec.to_builtins(plan_record(plan, sources))
        if id(plan.graph) not in places:
            if record["graph"] not in graphs:
                graphs.append(record["graph"])
            places[id(plan.graph)] = graphs.index(record["graph"])
        return {**record, "graph": places[id(plan.graph)]}

    plans = [numbered(plan) for plan in front.plans]
    original = numbered(front.original) if front.original else None
    return {
        "graph_name": front.graph_name,
        "target": front.target,
        "objectives": [x.formula if isinstance(x, Objective) else x for x in front.objectives],
        "epsilon": front.epsilon if math.isfinite(front.epsilon) else None,
        "saturated": front.saturated,
        "notes": [asdict(note) for note in front.notes],
        "searched": front.searched,
        # What a run took is not part of what it found: another one writes the same file.
        "timeline": [
            {k: v for k, v in msgspec.to_builtins(tick).items() if k != "seconds"}
            for tick in front.timeline
        ],
        "usable_bytes": front.usable_bytes,
        "original": original,
        "plans": plans,
        "graphs": graphs,
        "origin": origin,
        "sources": [list(row) for row in sources.rows],
    }


def front_from_document(document: dict[str, Any], where: str = "$") -> Front:
    """The front of a document.

    Raises GraphError for a fault in the document, PlanError for a plan that does not fit its graph
    or mesh; both with the JSON path.
    """
    return front_from_record(convert(document, FrontRecord, where), where)


def front_from_record(file: FrontRecord, where: str = "$", late: bool = False) -> Front:
    """The front of a record; `late`, of one that is known to be sound, graphs and bodies are read
    when they are first asked for. Raises as `front_from_document` does."""
    if not file.plans:
        raise GraphError("holds no plan", where=f"{where}.plans")

    @cache
    def graph(k: int) -> BlockGraph:
        return graph_from_record(file.graphs[k], file.sources, f"{where}.graphs[{k}]")

    for k in range(0 if late else len(file.graphs)):
        graph(k)
    program, origin = origin_from_record(file.origin, file.sources, f"{where}.origin")

    def plan(record: FrontPlanRecord, at: str) -> Plan:
        if not 0 <= record.graph < len(file.graphs):
            raise GraphError(f"there is no graph {record.graph}", where=f"{at}.graph")
        return plan_from_record(record, partial(graph, record.graph), program, origin, at, late)

    return Front(
        plans=tuple(plan(r, f"{where}.plans[{i}]") for i, r in enumerate(file.plans)),
        objectives=tuple(file.objectives),
        target=file.target,
        graph_name=file.graph_name,
        epsilon=math.inf if file.epsilon is None else file.epsilon,
        saturated=file.saturated,
        notes=tuple(map(as_note, file.notes)),
        searched=file.searched,
        timeline=tuple(file.timeline),
        usable_bytes=file.usable_bytes,
        original=plan(file.original, f"{where}.original") if file.original else None,
    )
