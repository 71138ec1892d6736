"""Fronts as documents: their plans, and each graph that the plans share, once."""

from __future__ import annotations

import math
from dataclasses import asdict
from functools import cache, partial
from typing import Any

import msgspec

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import GraphError, PlanError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import Note, as_note
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.objectives import Objective
from tapestry_egg.plans.plan import Plan
from tapestry_egg.tracing.graph_documents import (
    GraphRecord,
    SourceRecord,
    SourceTable,
    convert,
    graph_from_record,
)

from .plan_documents import (
    OriginRecord,
    PlanRecord,
    origin_from_record,
    origin_record,
    plan_from_record,
    plan_record,
)


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
