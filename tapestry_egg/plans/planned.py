"""The collectives that a plan moves, read off its layouts: kinds, groups and bytes."""

from __future__ import annotations

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels import registry

from .collectives import after, traffic, wire_bytes
from .fetch import fetches
from .plan import BodyPlan, Plan, PlannedCollective


def planned_collectives(plan: Plan, rounds: bool = True) -> tuple[PlannedCollective, ...]:
    """Every collective that lowering the plan emits, in program order, loops multiplied out.

    A scan counts by its length, a while loop once, a conditional by the branch that moves most.
    Compiled for a platform that `rounds` no operands (`runtime/lower/precision.py`), those that the
    target's matrix units round move as they are.
    Raises PlanError where the plan does not fit its graph.
    """
    return tuple(_of_body(plan.body, plan.mesh, 1, rounds))


def _of_body(body: BodyPlan, mesh: MeshShape, times: int, rounds: bool) -> list[PlannedCollective]:
    graph = body.graph
    wide = {
        op.outputs[0]: graph.values[op.inputs[0]]
        for op in graph.operations
        if op.kernel == "round_operand" and not rounds
    }
    found: list[PlannedCollective] = []
    for k, reads in enumerate(fetches(body)):
        op = graph.operations[k] if k < len(graph.operations) else None
        for f in reads:
            layout, type_ = f.have, wide.get(f.value, graph.values[f.value])
            for step in f.steps:
                if moved := traffic(step, layout, type_, mesh):
                    group = mesh.parts(moved.axes)
                    found.append(
                        PlannedCollective(
                            kind=moved.kind,
                            axes=tuple(mesh.names[a] for a in moved.axes),
                            group=group,
                            payload_bytes=moved.payload_bytes,
                            wire_bytes=wire_bytes(moved.kind, moved.payload_bytes, group),
                            count=times,
                            value=f"%{f.value} {type_}",
                            reader=f"{op.kernel} #{k}" if op else "output",
                            source=f"{op.source.file}:{op.source.line}"
                            if op and op.source.file
                            else "",
                        )
                    )
                layout = after(step, layout)
        if op is not None and registry.runs_once(op) and not op.regions and mesh.devices > 1:
            found += _sent(k, op, graph, mesh, times)
        if op is None or not op.regions:
            continue
        bodies = body.strategies[k].bodies
        if op.kernel == "cond":
            branches = [_of_body(b, mesh, times, rounds) for b in bodies]
            found += max(branches, key=lambda b: sum(c.wire_bytes * c.count for c in b))
        else:
            length = op.params["length"] if op.kernel == "scan" else 1
            for b in bodies:
                found += _of_body(b, mesh, times * length, rounds)
    return found


def _sent(
    k: int, op: Operation, graph: BlockGraph, mesh: MeshShape, times: int
) -> list[PlannedCollective]:
    """What the one device that runs an operation for all sends to the others."""
    found = []
    signature = registry.opaque(op.kernel, (), [graph.values[v] for v in op.outputs], once=True)
    for q, tensor in enumerate(signature.sent_types):
        payload = tensor.nbytes
        found.append(
            PlannedCollective(
                kind="all_reduce",
                axes=tuple(n for n, size in zip(mesh.names, mesh.sizes, strict=True) if size > 1),
                group=mesh.devices,
                payload_bytes=payload,
                wire_bytes=wire_bytes("all_reduce", payload, mesh.devices),
                count=times,
                value=f"%{op.outputs[q]} {tensor}" if q < len(op.outputs) else "whether it failed",
                reader=f"{op.kernel} #{k}",
                source=f"{op.source.file}:{op.source.line}" if op.source.file else "",
            )
        )
    return found
