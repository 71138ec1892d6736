"""Graphs and plans as text for people and as plain data for programs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from tapestry_egg.columns import (
    alike,
    columns,
    percent,
    readers_width,
    short_paths,
    shortened,
    starred,
    told_once,
    wrapped,
)
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.objectives import COSTS, PEAK_BYTES, SECONDS, WIRE_BYTES
from tapestry_egg.machine.topology import part
from tapestry_egg.metakernels.views import View, folded_views
from tapestry_egg.plans.cost_table import CostPart, cost_table
from tapestry_egg.plans.plan import BodyPlan, Plan, Strategy
from tapestry_egg.plans.utilization import Utilization
from tapestry_egg.printable import printable
from tapestry_egg.quantities import BYTES, OPERATIONS, TIME
from tapestry_egg.schedule.flatten import flatten

from .account import LEGEND, Account
from .parallelism import summary

# Outputs of an operation that are told one by one, and collectives of an update.
_FEW, _NUMBERS = 2, 8
# The argument that a path starts with, and every entry of one.
_HEAD, _ENTRIES = re.compile(r"\[\d+\]"), re.compile(r"\[")


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
    for operation in graph.walk():
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


# --- plans ----------------------------------------------------------------------------------------


def plan_text(plan: Plan, everything: bool = False, account: Account | None = None) -> str:
    """All about one plan: what every mesh axis does in an expert's words, what the plan costs and
    where that goes, how every tensor lies, and why every collective is there.

    Layouts are written as `Layout.show` does: one entry per dim, `.` where it is not cut. What is
    alike but for numbers in its name is told once, with a count, and operations that compilers run
    inside others are left out, but for `everything`. Lines are as wide as the terminal, or 80
    columns. `account` is that of the plan, where it is at hand.
    """
    numbers = [(o.title, o.format(o.value(plan))) for o in COSTS]
    bound = f"{SECONDS.format(plan.bound)}, gap {plan.gap_shown}" if plan.bound else "-"
    if plan.bound and not plan.is_proven:
        bound += " (of plans that merge no collectives: no proof)"
    numbers.insert(1, ("bound of the search", bound))
    if plan.costs.flops and plan.costs.seconds:
        k = next(k for k, o in enumerate(COSTS) if o.name == "flops") + 1
        rate = OPERATIONS.format(plan.costs.flops / plan.costs.seconds)
        numbers[k] = (numbers[k][0], f"{numbers[k][1]}, {rate}/s")
    if plan.origin is not None:
        numbers = _with_use(numbers, plan.utilization())
    if account is None and plan.origin is not None:
        account = Account(plan, "the costs")
    names = short_paths({op.source.file for op in plan.graph.walk()} - {""})
    operations, left_out = _operation_rows(plan, everything, names)
    inputs, outputs = (_boundary_rows(plan, side) for side in ("inputs", "outputs"))
    same = 0 if everything else sum(row in inputs for row in outputs)
    outputs = [row for row in outputs if everything or row not in inputs]
    inputs, beside = (inputs, []) if everything else _lying_as_others(inputs)
    parts = [
        f"plan {plan.name} of {plan.graph.name} on {plan.target}, mesh {plan.mesh}",
        *_part(plan),
        *(f"  {line}" for line in summary(plan).split("; ")),
        columns(numbers, "  "),
        *(where_costs_go(account) if account else []),
        "collectives, by kind",
        columns(_kind_rows(plan), "  ", right=(2, 3, 4)),
        "inputs",
        told_once(inputs, everything, paths=True),
        *beside,
        "outputs",
        told_once(outputs, everything, paths=True),
        *([f"  and {same} that leave as they entered"] if same else []),
        "operations",
        told_once(operations, everything),
        *([f"  and {left_out} that run inside these, or move nothing"] if left_out else []),
        "collectives",
        told_once(_collective_rows(plan, names), everything, right=(0, 3), header=True, first=0),
        *(_update_lines(account) if account else []),
    ]
    if plan.steps:
        parts += ["rules, step by step", *(f"  {k}. {s}" for k, s in enumerate(plan.steps, 1))]
    elif plan.rules:
        parts += ["rules", "\n".join(f"  {rule}" for rule in plan.rules)]
    parts.append(LEGEND)
    return printable(wrapped("\n".join(parts)))


def _with_use(numbers: list[tuple[str, str]], use: Utilization) -> list[tuple[str, str]]:
    """The costs with what they use of the machine: peak flops, memory, network."""
    shown = {PEAK_BYTES.title: use.memory_shown()}
    if any(use.sent.values()):
        several = len(use.sent) > 1
        sent = f"{dict(numbers)[WIRE_BYTES.title]}: " if several else ""
        shown[WIRE_BYTES.title] = f"{sent}{use.sent_shown()}"
    told = [(title, shown.get(title, said)) for title, said in numbers]
    return [*told[:2], ("share of peak flops", use.arithmetic_shown()), *told[2:]]


def _part(plan: Plan) -> list[str]:
    """Which devices a plan has that leaves some of the machine's unused."""
    machine = plan.origin.machine if plan.origin is not None else None
    if machine is None or plan.mesh.devices == machine.devices:
        return []
    own = "x".join(map(str, part(machine.shape, plan.mesh.devices)))
    others = "the others count as idle" if machine.idle_counted else "the others do not count"
    return [f"  {plan.mesh.devices} of {machine.devices} devices, the first {own}; {others}"]


def _lying_as_others(rows: Sequence[list[str]]) -> tuple[list[list[str]], list[str]]:
    """Rows of arguments without those that lie as another of the same path below its argument, as
    an optimizer's moments do as their weights; and what is said of these."""
    known: dict[str, tuple[str, list[str]]] = {}
    kept: list[list[str]] = []
    beside: dict[tuple[str, str], int] = {}
    for name, *rest in rows:
        head = _HEAD.match(name)
        tail = name[head.end() :] if head else ""
        other = next((t for t in _tails(name) if t in known and known[t][0] != name), "")
        if other and known[other][1] == rest:
            key = (name[: -len(other)], known[other][0][: -len(other)])
            beside[key] = beside.get(key, 0) + 1
            continue
        kept.append([name, *rest])
        if tail[:1] == "[" and "'" in tail:
            known.setdefault(tail, (name, rest))
    words = [
        f"  and {n} of {where} with the layouts of {as_}" for (where, as_), n in beside.items()
    ]
    return kept, words


def _tails(name: str) -> Iterator[str]:
    """The ends of a path from each of its entries on, longest first."""
    return (name[m.start() :] for m in _ENTRIES.finditer(name) if m.start())


def _boundary_rows(plan: Plan, side: str) -> list[list[str]]:
    values: Sequence[int] = getattr(plan.graph, side)
    names = getattr(plan.graph, side.removesuffix("s") + "_names") or [""] * len(values)
    layouts = plan.in_shardings if side == "inputs" else plan.out_shardings
    return [
        [name or f"%{value}", str(plan.graph.values[value]), layout.show(plan.mesh)]
        for value, name, layout in zip(values, names, layouts, strict=True)
    ]


def _operation_rows(
    plan: Plan, everything: bool, names: Mapping[str, str]
) -> tuple[list[list[str]], int]:
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
                    _at(op, names),
                    _cuts(strategy, plan),
                    ", ".join(types) if few else f"{len(types)} values",
                    ", ".join(layouts) if few else "",
                ]
            )
            for region, inner in enumerate(strategy.bodies):
                add(inner, number[at, k, region], depth + 1)

    add(plan.body, 0, 0)
    return rows, left_out


def _at(op: Operation, names: Mapping[str, str]) -> str:
    """`gpt2.py:118:9`, empty where it is not known."""
    place = op.source
    return f"{names[place.file]}:{place.line}:{place.column}" if place.file else ""


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
    merged: set[int] = set()
    for one in plan.collectives:
        total = totals.setdefault((one.kind, ",".join(one.axes)), [0.0, 0.0, 0.0])
        times = 0.0 if one.merged in merged else 1.0  # those that are one are made once
        merged |= {one.merged} - {0}
        for k, amount in enumerate((times, one.payload_bytes, one.wire_bytes)):
            total[k] += amount * one.count
    if not totals:
        return [["none"] + [""] * 4]
    rows = [["kind", "axes", "times", "payload", "sent"]]
    for (kind, axes), (times, payload, sent) in sorted(totals.items(), key=lambda x: -x[1][2]):
        rows.append([kind, axes, f"{times:g}", BYTES.format(payload), BYTES.format(sent)])
    return rows


def _collective_rows(plan: Plan, names: Mapping[str, str]) -> list[list[str]]:
    """What is sent, one by one; those of one number behind their kind are one collective."""
    times = any(one.count != 1 for one in plan.collectives)
    rows = [["#", "kind", "axes", *["times"][:times], "sent", "at", "of", "for"]]
    for k, one in enumerate(plan.collectives):
        sent = BYTES.format(one.wire_bytes * one.count)
        file, _, line = one.source.rpartition(":")
        told = (f"{names[file]}:{line}" if file else "", one.value, one.reader)
        kind = f"{one.kind} &{one.merged}" if one.merged else one.kind
        row = [kind, ",".join(one.axes), *[str(one.count)][:times], sent, *told]
        rows.append([str(k), *row])
    return rows if plan.collectives else [["none"]]


def _update_lines(account: Account) -> list[str]:
    """The numbers of collectives whose values become the next value of a leaf of the state, by the
    leaf; equal layers are one."""
    names = account.plan.graph.input_names
    if not names:
        return []
    leaf = account.updates
    found: dict[str, list[tuple[str, int]]] = {}
    for n, one in enumerate(account.moved):
        if one.fetch is not None:
            v = account.program.bodies[account.body_at(one.path)].values[one.fetch.value]
            if v in leaf:
                name = names[leaf[v]]
                found.setdefault(starred(name), []).append((name, n))
    rows = []
    for own in sorted(found.values(), key=lambda x: x[0][1]):
        numbers = ", ".join(str(n) for _, n in own[:_NUMBERS])
        more = f" and {len(own) - _NUMBERS} more" if len(own) > _NUMBERS else ""
        rows.append([alike([name for name, _ in own]), f"{numbers}{more}"])
    return (
        ["on the way to a new value of the state: collectives by number", columns(rows, "  ")]
        if rows
        else []
    )


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
        "proven": plan.is_proven,
        "utilization": None if plan.origin is None else plan.utilization().data(),
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


# Where a plan's time and memory go, in a few lines: what bounds it, dearest lines, the peak.


# Lines of the program, and arrays at the peak, that are told.
_LINES, _ARRAYS = 6, 5
# Columns that a line of the program has beside its costs, at least.
_CODE = 12


def where_costs_go(account: Account) -> list[str]:
    """Lines on where a plan's seconds and its peak come from."""
    parts = [p for p in (*account.kernels, *account.copies) if p.seconds > 0.0]
    return [*_time(account, parts), *account.peak.lines(account.near, _ARRAYS)]


def _time(account: Account, parts: list[CostPart]) -> list[str]:
    whole = sum(p.seconds for p in parts)
    if not whole:
        return ["time: none"]
    sums = {k: sum(p.seconds for p in parts if p.kind == k) for k in ("kernel", "collective")}
    hidden = sum(p.hidden for p in parts)
    overlap = f", {TIME.format(hidden)} of it beside kernels" if hidden else ""
    bounds: dict[str, float] = {}
    for p in parts:
        bounds[p.bound] = bounds.get(p.bound, 0.0) + p.seconds
    shares = sorted(bounds.items(), key=lambda x: -x[1])
    said = ", ".join(f"{name} {percent(x / whole)}" for name, x in shares)
    lines = [
        f"time: kernels {TIME.format(sums['kernel'])}, collectives and copies "
        f"{TIME.format(sums['collective'])}{overlap}; bound by {said}"
    ]
    texts = _texts(account.plan.graph)
    rows, code = [], []
    for r in list(cost_table(parts, "line"))[:_LINES]:
        work = OPERATIONS.format(r.flops) if r.flops else "-"
        sent = BYTES.format(r.wire_bytes) if r.wire_bytes else "-"
        took = (TIME.format(r.seconds), percent(r.share))
        rows.append([account.near(r.name) or "-", *took, r.bound, work, sent])
        code.append(texts.get(r.name, ""))
    heads = ["line", "seconds", "share", "bound", "flops", "sent"]
    table = columns([heads, *rows], "  ", right=(1, 2, 4, 5)).split("\n")
    wide = max(map(len, table))
    room = readers_width() - wide - 2
    if room >= _CODE and len(table) == 1 + len(rows):
        beside = ["", *(shortened(t, room) for t in code)]
        table = [f"{x:{wide}}  {t}".rstrip() for x, t in zip(table, beside, strict=True)]
    return [*lines, "\n".join(table)]


def _texts(graph: BlockGraph) -> dict[str, str]:
    """Lines of the source by `FILE:LINE`."""
    found: dict[str, str] = {}
    for op in graph.operations:
        found.setdefault(f"{op.source.file}:{op.source.line}", op.source.text)
        for region in op.regions:
            found |= {k: v for k, v in _texts(region).items() if k not in found}
    return found
