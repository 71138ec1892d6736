"""Graphs and plans as text for people and as plain data for programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.objectives import COSTS, SECONDS
from tapestry_egg.metakernels.views import View, folded_views
from tapestry_egg.plans.plan import BodyPlan, Plan, Strategy
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES

from .parallelism import summary


def columns(rows: Sequence[Sequence[str]], indent: str = "", right: Iterable[int] = ()) -> str:
    """Rows of cells as aligned text; the columns in `right` are flush right.

    >>> print(columns([["name", "ms"], ["a", "12"]], right=[1]))
    name  ms
    a     12
    """
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    flush = set(right)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if i in flush else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def percent(share: float) -> str:
    """A share as a percentage, `-` where it is not known.

    >>> percent(0.0123), percent(float("inf"))
    ('1.2 %', '-')
    """
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


# --- graphs ---------------------------------------------------------------------------------------


def graph_text(graph: BlockGraph) -> str:
    """A block graph in the manner of a jaxpr: one line per operation, with its place in the source.

    Regions of control flow are indented below their operation. Views say which element of which
    tensor they read at the indices i0, i1, ...: `transpose(%2) = %0[i1, 2i0]`.
    """
    head = (
        f"{graph.name}: {len(graph.operations)} operations, {len(graph.values)} values, "
        f"{len(graph.inputs)} inputs, {len(graph.outputs)} outputs"
    )
    return printable("\n".join([head, *_graph_lines(graph, "  ")]))


def _graph_lines(graph: BlockGraph, indent: str) -> Iterator[str]:
    names = graph.input_names or ("",) * len(graph.inputs)
    donated = graph.donated or (False,) * len(graph.inputs)
    for value, name, gone in zip(graph.inputs, names, donated, strict=True):
        notes = "  ".join(part for part in (name, "donated" if gone else "") if part)
        yield f"{indent}%{value} {graph.values[value]} = input  {notes}".rstrip()
    for value in graph.constants:
        yield f"{indent}%{value} {graph.values[value]} = constant"
    views = folded_views(graph)
    for operation in graph.operations:
        yield indent + _operation_text(graph, operation, views)
        for number, region in enumerate(operation.regions):
            yield f"{indent}  region {number} ({region.name})"
            yield from _graph_lines(region, indent + "    ")
    yield f"{indent}return {', '.join(f'%{v}' for v in graph.outputs)}"


def _operation_text(
    graph: BlockGraph, operation: Operation, views: Mapping[int, tuple[int, View]]
) -> str:
    out = ", ".join(f"%{v} {graph.values[v]}" for v in operation.outputs)
    arguments = ", ".join(f"%{v}" for v in operation.inputs)
    place = f"  # {operation.source}" if operation.source.file else ""
    read = ""
    if operation.outputs[:1] and operation.outputs[0] in views:
        base, view = views[operation.outputs[0]]
        read = f" = %{base}{view.show()}"
    return f"{out} = {operation.kernel}({arguments}){read}{place}"


def graph_data(graph: BlockGraph) -> dict[str, Any]:
    """What a block graph holds, in numbers: operations by kernel, regions included."""
    kernels: dict[str, int] = {}
    for operation in _operations(graph):
        kernels[operation.kernel] = kernels.get(operation.kernel, 0) + 1
    return {
        "name": graph.name,
        "operations": sum(kernels.values()),
        "values": len(graph.values),
        "inputs": [str(graph.values[v]) for v in graph.inputs],
        "input_names": list(graph.input_names),
        "outputs": [str(graph.values[v]) for v in graph.outputs],
        "kernels": dict(sorted(kernels.items(), key=lambda item: (-item[1], item[0]))),
    }


def _operations(graph: BlockGraph) -> Iterator[Operation]:
    for operation in graph.operations:
        yield operation
        for region in operation.regions:
            yield from _operations(region)


# --- plans ----------------------------------------------------------------------------------------


def plan_text(plan: Plan) -> str:
    """All about one plan: what every mesh axis does in an expert's words, what the plan costs, how
    every tensor lies, and why every collective is there.

    Layouts are written as `Layout.show` does: one entry per dim, `.` where it is not cut.
    """
    numbers = [(o.title, o.format(o.value(plan))) for o in COSTS]
    bound = f"{SECONDS.format(plan.bound)}, gap {percent(plan.gap)}" if plan.bound else "-"
    numbers.insert(1, ("proven bound", bound))
    numbers.insert(2, ("one after another", SECONDS.format(plan.costs.serial_seconds)))
    parts = [
        f"plan {plan.name} of {plan.graph.name} on {plan.target}, mesh {plan.mesh}",
        *(f"  {line}" for line in summary(plan).split("; ")),
        columns(numbers, "  "),
        "inputs",
        _boundary(plan, plan.graph.inputs, plan.graph.input_names, plan.in_shardings),
        "outputs",
        _boundary(plan, plan.graph.outputs, plan.graph.output_names, plan.out_shardings),
        "operations",
        columns(list(_body_rows(plan.body, plan, 0)) or [["none"]], "  "),
        "collectives",
        columns(_collective_rows(plan), "  ", right=(2, 3, 4, 5)),
    ]
    if plan.steps:
        parts += ["rules, step by step", *(f"  {k}. {s}" for k, s in enumerate(plan.steps, 1))]
    elif plan.rules:
        parts += ["rules", "\n".join(f"  {rule}" for rule in plan.rules)]
    return printable("\n".join(parts))


def _boundary(
    plan: Plan, values: Sequence[int], names: Sequence[str], layouts: Sequence[Any]
) -> str:
    rows = [
        [name or f"%{value}", str(plan.graph.values[value]), layout.show(plan.mesh)]
        for value, name, layout in zip(values, names or [""] * len(values), layouts, strict=True)
    ]
    return columns(rows, "  ") if rows else "  none"


def _body_rows(body: BodyPlan, plan: Plan, depth: int) -> Iterator[list[str]]:
    for operation, strategy in zip(body.graph.operations, body.strategies, strict=True):
        yield [
            "  " * depth + operation.kernel,
            _cuts(strategy, plan),
            ", ".join(str(body.graph.values[v]) for v in operation.outputs),
            ", ".join(layout.show(plan.mesh) for layout in strategy.gives),
            str(operation.source) if operation.source.file else "",
        ]
        for inner in strategy.bodies:
            yield from _body_rows(inner, plan, depth + 1)


def _cuts(strategy: Strategy, plan: Plan) -> str:
    """Which index dims are cut, by which mesh axes: `0/x 2/y`; `whole` where none is."""
    cut = [
        f"{dim}/{'·'.join(plan.mesh.names[a] for a in axes)}"
        for dim, axes in enumerate(strategy.cuts)
        if axes
    ]
    return "regions" if strategy.bodies else " ".join(cut) or "whole"


def _collective_rows(plan: Plan) -> list[list[str]]:
    rows = [["kind", "axes", "group", "times", "payload", "sent", "of", "for", "at"]]
    for one in plan.collectives:
        rows.append(
            [
                one.kind,
                ",".join(one.axes),
                str(one.group),
                str(one.count),
                BYTES.format(one.payload_bytes),
                BYTES.format(one.wire_bytes * one.count),
                one.value,
                one.reader,
                one.source,
            ]
        )
    return rows if plan.collectives else [["none"] + [""] * 5]


def plan_data(plan: Plan) -> dict[str, Any]:
    """One plan as plain data: costs, boundary layouts, collectives and rules."""
    names: Mapping[str, Sequence[str]] = {
        "inputs": plan.graph.input_names or [f"%{v}" for v in plan.graph.inputs],
        "outputs": plan.graph.output_names or [f"%{v}" for v in plan.graph.outputs],
    }
    layouts = {"inputs": plan.in_shardings, "outputs": plan.out_shardings}
    return {
        "name": plan.name,
        "graph": plan.graph.name,
        "target": plan.target,
        "mesh": str(plan.mesh),
        "devices": plan.mesh.devices,
        "summary": summary(plan),
        **asdict(plan.costs),
        "bound": plan.bound,
        "gap": plan.gap,
        **{
            side: [
                {"name": name, "layout": layout.show(plan.mesh)}
                for name, layout in zip(names[side], layouts[side], strict=True)
            ]
            for side in names
        },
        "collectives": [asdict(one) for one in plan.collectives],
        "rules": list(plan.rules),
        "steps": [asdict(step) for step in plan.steps],
    }
