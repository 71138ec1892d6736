"""The collectives that a plan moves, read off its layouts: kinds, groups and bytes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.graph.loops import stacked, taken
from tapestry_egg.metakernels import registry

from .collectives import Traffic, after, traffic, wire_bytes
from .exchanges import Exchange, Reader, exchanges_of, rounds, together
from .fetch import Fetch, fetches
from .plan import BodyPlan, Change, Plan, PlannedCollective


@dataclass(frozen=True, slots=True)
class Moved:
    """A planned collective and where it is: `step` of what reader `reader` fetches, of a block that
    lies as `layout`, in the graph that `path` leads to, by (operation, region) pairs. What the one
    device sends that runs an operation for all is no fetch, nor what neighbours `exchange`: of
    that, `rows` say which way it goes, (to the next device, to the one before)."""

    planned: PlannedCollective
    path: tuple[tuple[int, int], ...]
    reader: int  # number of operations: the outputs
    fetch: Fetch | None = None
    step: Change | None = None
    layout: Layout | None = None
    exchange: Exchange | None = None
    rows: tuple[int, int] = (0, 0)


def planned_collectives(plan: Plan, rounds: bool = True) -> tuple[PlannedCollective, ...]:
    """Every collective that lowering the plan emits, in program order, loops multiplied out.

    A scan counts by its length, a while loop once, a conditional by the branch that moves most.
    Compiled for a platform that `rounds` no operands (`runtime/lower/precision.py`), those that the
    target's matrix units round move as they are, and so does what only moves them on.
    Raises PlanError where the plan does not fit its graph.
    """
    return tuple(m.planned for m in moved_by(plan, rounds))


def moved_by(plan: Plan, rounds: bool = True) -> tuple[Moved, ...]:
    """The same, each with where it is. Raises PlanError where the plan does not fit its graph."""
    numbers = count(len(plan.body.merged) + 1)
    return tuple(_of_body(plan.body, plan.mesh, 1, rounds, (), {}, numbers)[0])


def _of_body(
    body: BodyPlan,
    mesh: MeshShape,
    times: int,
    rounds: bool,
    path: tuple[tuple[int, int], ...],
    given: Mapping[int, str],
    numbers: Iterator[int],
) -> tuple[list[Moved], dict[int, str]]:
    """What a body moves of which inputs, by place, come as they are in the dtypes `given`, not
    rounded, and which outputs leave so. `numbers` are those of collectives of several values."""
    graph = body.graph
    wide: dict[int, TensorType] = {}  # what is not rounded here -> as what it is there
    for place, dtype in given.items():
        wide[graph.inputs[place]] = replace(graph.values[graph.inputs[place]], dtype=dtype)
    found: list[Moved] = []
    exchanges = [exchanges_of(body, k, mesh) for k in range(len(graph.operations))]
    groups = {group[0].operation: group for group in together(body, exchanges)}
    for k, reads in enumerate(fetches(body)):
        op = graph.operations[k] if k < len(graph.operations) else None
        for f in reads:
            layout, type_ = f.have, wide.get(f.value, graph.values[f.value])
            for step in f.steps:
                if moved := traffic(step, layout, type_, mesh):
                    value = f"%{f.value} {type_}"
                    planned = _planned(moved, value, k, op, mesh, times, f.merged)
                    found.append(Moved(planned, path, k, f, step, layout))
                layout = after(step, layout)
        if op is not None and registry.runs_once(op) and not op.regions and mesh.devices > 1:
            found += [Moved(c, path, k) for c in _sent(k, op, graph, mesh, times)]
        if op is not None and not op.regions:
            if k in groups:
                found += _rows(groups[k], body, wide, mesh, times, path, numbers)
            found += _states(k, body, exchanges[k], mesh, times, path)
        if op is None:
            continue
        if not op.regions:
            if not rounds and (left_as := _left_wide(op, graph, wide)):
                wide[op.outputs[0]] = replace(graph.values[op.outputs[0]], dtype=left_as)
            continue
        bodies = body.strategies[k].bodies
        if op.is_branch:
            branches = [
                _of_body(b, mesh, times, rounds, (*path, (k, r)), {}, numbers)[0]
                for r, b in enumerate(bodies)
            ]
            found += max(
                branches, key=lambda b: sum(m.planned.wire_bytes * m.planned.count for m in b)
            )
            continue
        length = op.rounds
        enter = {q: wide[op.inputs[p]].dtype for p, q in taken(op).items() if op.inputs[p] in wide}
        for r, b in enumerate(bodies):
            own = enter if r == len(bodies) - 1 else {}
            inner = (*path, (k, r))
            moved_there, left = _of_body(b, mesh, times * length, rounds, inner, own, numbers)
            found += moved_there
        for q in stacked(op):
            if q in left:
                wide[op.outputs[q]] = replace(graph.values[op.outputs[q]], dtype=left[q])
    return found, {q: wide[v].dtype for q, v in enumerate(graph.outputs) if v in wide}


def _left_wide(op: Operation, graph: BlockGraph, wide: Mapping[int, TensorType]) -> str | None:
    """The dtype of what an operation makes where operands are not rounded; None where that is its
    own. Contractions read such operands, and what only moves them on keeps them as they are."""
    if registry.meaning(op.kernel) == "rounding":
        (v,) = op.inputs
        return wide.get(v, graph.values[v]).dtype
    if len(op.outputs) != 1 or "precision" in op.params:
        return None
    own = graph.values[op.outputs[0]].dtype
    data = [v for v in op.inputs if graph.values[v].dtype == own and v in wide]
    return wide[data[0]].dtype if data else None


def _rows(
    group: Sequence[Reader],
    body: BodyPlan,
    wide: Mapping[int, TensorType],
    mesh: MeshShape,
    times: int,
    path: tuple[tuple[int, int], ...],
    numbers: Iterator[int],
) -> list[Moved]:
    """The rows of operands that devices send to their neighbours for operations that send together,
    `wide` values as they are: one for each block whose rows a permute carries."""
    operations, values, found = body.graph.operations, body.graph.values, []

    def sent(k: int, e: Exchange) -> TensorType:
        v = operations[k].inputs[e.operand]
        return wide.get(v, values[v])

    every = rounds(group, mesh, lambda k, e: sent(k, e).dtype)
    for permute in (p for x in every for p in x.permutes):
        merged = next(numbers) if len(permute.pieces) > 1 else 0
        for piece in permute.pieces:
            k, e = piece.reader, piece.exchange
            v, type_ = operations[k].inputs[e.operand], sent(k, e)
            payload = piece.nbytes // max(values[v].itemsize, 1) * max(type_.itemsize, 1)
            moved = Traffic("permute", e.axes, payload, mesh.parts(e.axes))
            value = f"%{v} {type_}"
            planned = _planned(moved, value, k, operations[k], mesh, times, merged)
            layout, rows = body.strategies[k].needs[e.operand], (piece.low, piece.high)
            found.append(Moved(planned, path, k, layout=layout, exchange=e, rows=rows))
    return found


def _states(
    k: int,
    body: BodyPlan,
    exchanges: Sequence[Exchange],
    mesh: MeshShape,
    times: int,
    path: tuple[tuple[int, int], ...],
) -> list[Moved]:
    """The states that devices gather or exchange for an operation."""
    op, found = body.graph.operations[k], []
    for e in exchanges:
        v, group = op.inputs[e.operand], mesh.parts(e.axes)
        value = f"%{v} {body.graph.values[v]}"
        for kind, n in e.states:
            moved = Traffic(kind, e.axes, n * (group if kind == "all_gather" else 1), group)
            planned = _planned(moved, value, k, op, mesh, times)
            layout = body.strategies[k].needs[e.operand]
            found.append(Moved(planned, path, k, layout=layout, exchange=e))
    return found


def _sent(
    k: int, op: Operation, graph: BlockGraph, mesh: MeshShape, times: int
) -> list[PlannedCollective]:
    """What the one device that runs an operation for all sends to the others."""
    found = []
    signature = registry.opaque(op.kernel, (), [graph.values[v] for v in op.outputs], once=True)
    for q, tensor in enumerate(signature.sent_types):
        moved = Traffic("all_reduce", tuple(range(len(mesh.sizes))), tensor.nbytes, mesh.devices)
        value = f"%{op.outputs[q]} {tensor}" if q < len(op.outputs) else "whether it failed"
        found.append(_planned(moved, value, k, op, mesh, times))
    return found


def _planned(
    moved: Traffic,
    value: str,
    k: int,
    op: Operation | None,
    mesh: MeshShape,
    times: int,
    merged: int = 0,
) -> PlannedCollective:
    """What moves of a value for operation `k`, or for the outputs, if that runs so many times."""
    return PlannedCollective(
        kind=moved.kind,
        axes=tuple(mesh.names[a] for a in moved.axes if mesh.sizes[a] > 1),
        group=moved.group,
        payload_bytes=moved.payload_bytes,
        wire_bytes=wire_bytes(moved.kind, moved.payload_bytes, moved.group),
        count=times * moved.count,
        value=value,
        reader=f"{op.kernel} #{k}" if op else "output",
        source=f"{op.source.file}:{op.source.line}" if op and op.source.file else "",
        merged=merged,
    )
