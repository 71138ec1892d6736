"""Graphs and plans as text for people and as plain data for programs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.objectives import COSTS, SECONDS
from tapestry_egg.metakernels.views import View, folded_views
from tapestry_egg.plans.plan import BodyPlan, Plan, Strategy
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES
from tapestry_egg.schedule.flatten import flatten

from .parallelism import summary

#: Columns of a line that tells of a plan.
WIDTH = 120
# Outputs of an operation that are told one by one.
_FEW = 2
# Numbers that tell equal things apart: of a value or an operation, or in a path of a pytree.
_NUMBERS = re.compile(r"(?<=[%#])\d+")
_PATHS = re.compile(r"(?<=\[)\d+(?=\])|(?<=[_a-z])\d+(?=')")


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


def plan_text(plan: Plan, everything: bool = False) -> str:
    """All about one plan: what every mesh axis does in an expert's words, what the plan costs, how
    every tensor lies, and why every collective is there.

    Layouts are written as `Layout.show` does: one entry per dim, `.` where it is not cut. What is
    alike but for numbers in its name is told once, with a count, and operations that compilers run
    inside others are left out, but for `everything`. No line is longer than 120 columns.
    """
    numbers = [(o.title, o.format(o.value(plan))) for o in COSTS]
    bound = f"{SECONDS.format(plan.bound)}, gap {percent(plan.gap)}" if plan.bound else "-"
    numbers.insert(1, ("proven bound", bound))
    operations, left_out = _operation_rows(plan, everything)
    inputs, outputs = (_boundary_rows(plan, side) for side in ("inputs", "outputs"))
    same = 0 if everything else sum(row in inputs for row in outputs)
    outputs = [row for row in outputs if everything or row not in inputs]
    parts = [
        f"plan {plan.name} of {plan.graph.name} on {plan.target}, mesh {plan.mesh}",
        *(f"  {line}" for line in summary(plan).split("; ")),
        columns(numbers, "  "),
        "collectives, by kind",
        columns(_kind_rows(plan), "  ", right=(2, 3, 4)),
        "inputs",
        _told_once(inputs, everything, paths=True),
        "outputs",
        _told_once(outputs, everything, paths=True),
        *([f"  and {same} that leave as they entered"] if same else []),
        "operations",
        _told_once(operations, everything),
        *([f"  and {left_out} that run inside these, or move nothing"] if left_out else []),
        "collectives",
        _told_once(_collective_rows(plan), everything, right=(2, 3, 4), header=True),
    ]
    if plan.steps:
        parts += ["rules, step by step", *(f"  {k}. {s}" for k, s in enumerate(plan.steps, 1))]
    elif plan.rules:
        parts += ["rules", "\n".join(f"  {rule}" for rule in plan.rules)]
    return printable("\n".join(_shortened(line) for line in "\n".join(parts).split("\n")))


def _told_once(
    rows: Sequence[Sequence[str]],
    everything: bool,
    paths: bool = False,
    right: Iterable[int] = (),
    header: bool = False,
) -> str:
    """Rows as text; those alike but for the numbers in them are one, with their count in front. The
    first column has `paths` into the user's pytrees, where told so."""
    head, body = (list(rows[:1]), rows[1:]) if header else ([], rows)
    if not body:
        return "  none"
    if everything:
        return columns(rows, "  ", right)
    names = [_PATHS if paths and not k else _NUMBERS for k in range(len(rows[0]))]
    alike: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in body:
        alike.setdefault(
            tuple(n.sub("*", cell) for n, cell in zip(names, row, strict=True)), []
        ).append(row)
    counted = [
        [
            f"{len(group)}×" if len(group) > 1 else "",
            *map(_common, zip(*group, strict=True), names),
        ]
        for group in alike.values()
    ]
    if all(len(group) == 1 for group in alike.values()):
        return columns(rows, "  ", right)
    return columns([*(["", *h] for h in head), *counted], "  ", [0, *(k + 1 for k in right)])


def _common(cells: Sequence[str], names: re.Pattern[str]) -> str:
    """Cells that are alike, with `*` for the numbers in which they differ."""
    numbers = zip(*(names.findall(cell) for cell in cells), strict=True)
    kept = iter([group[0] if len(set(group)) == 1 else "*" for group in numbers])
    return names.sub(lambda _: next(kept), cells[0])


def _shortened(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3].rstrip() + "..."


def _boundary_rows(plan: Plan, side: str) -> list[list[str]]:
    values: Sequence[int] = getattr(plan.graph, side)
    names = getattr(plan.graph, side.removesuffix("s") + "_names") or [""] * len(values)
    layouts = plan.in_shardings if side == "inputs" else plan.out_shardings
    return [
        [name or f"%{value}", str(plan.graph.values[value]), layout.show(plan.mesh)]
        for value, name, layout in zip(values, names, layouts, strict=True)
    ]


def _operation_rows(plan: Plan, everything: bool) -> tuple[list[list[str]], int]:
    """A row for every operation that is a kernel of its own, and how many others there are."""
    program = flatten(plan.graph)
    alone = {(i.body, i.operation) for i in program.instances if i.signature.fusion == "kernel"}
    number = {(int(b.parent), b.operation, b.region): k for k, b in enumerate(program.bodies)}
    rows: list[list[str]] = []
    left_out = 0

    def add(body: BodyPlan, at: int, depth: int) -> None:
        nonlocal left_out
        for k, (op, strategy) in enumerate(
            zip(body.graph.operations, body.strategies, strict=True)
        ):
            if not (everything or strategy.bodies or (at, k) in alone):
                left_out += 1
                continue
            types = [str(body.graph.values[v]) for v in op.outputs]
            layouts = [layout.show(plan.mesh) for layout in strategy.gives]
            few = everything or len(types) <= _FEW
            rows.append(
                [
                    "  " * depth + op.kernel,
                    _cuts(strategy, plan),
                    ", ".join(types) if few else f"{len(types)} values",
                    ", ".join(layouts) if few else "",
                    str(op.source) if op.source.file else "",
                ]
            )
            for region, inner in enumerate(strategy.bodies):
                add(inner, number[at, k, region], depth + 1)

    add(plan.body, 0, 0)
    return rows, left_out


def _cuts(strategy: Strategy, plan: Plan) -> str:
    """Which index dims are cut, by which mesh axes: `0/x 2/y`; `whole` where none is."""
    cut = [
        f"{dim}/{'·'.join(plan.mesh.names[a] for a in axes)}"
        for dim, axes in enumerate(strategy.cuts)
        if axes
    ]
    return "regions" if strategy.bodies else " ".join(cut) or "whole"


def _kind_rows(plan: Plan) -> list[list[str]]:
    """What is sent in all, by kind of collective and axes; most first."""
    totals: dict[tuple[str, str], list[float]] = {}
    for one in plan.collectives:
        total = totals.setdefault((one.kind, ",".join(one.axes)), [0.0, 0.0, 0.0])
        for k, amount in enumerate((1.0, one.payload_bytes, one.wire_bytes)):
            total[k] += amount * one.count
    if not totals:
        return [["none"] + [""] * 4]
    rows = [["kind", "axes", "times", "payload", "sent"]]
    for (kind, axes), (times, payload, sent) in sorted(totals.items(), key=lambda x: -x[1][2]):
        rows.append([kind, axes, f"{times:g}", BYTES.format(payload), BYTES.format(sent)])
    return rows


def _collective_rows(plan: Plan) -> list[list[str]]:
    rows = [["kind", "axes", "group", "times", "sent", "at", "of", "for"]]
    for one in plan.collectives:
        sent = BYTES.format(one.wire_bytes * one.count)
        names = (one.source, one.value, one.reader)
        rows.append([one.kind, ",".join(one.axes), str(one.group), str(one.count), sent, *names])
    return rows if plan.collectives else [["none"]]


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
