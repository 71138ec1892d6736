"""The layouts at the ports of a flat program, read off a finished plan, and whether they may be so.

A port stands for a boundary: of the program, or of a loop or conditional in it. What a plan says of
a boundary stands in the region operation's strategy on the outside and in its bodies' plans inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tapestry_egg.graph.ids import BodyId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import BodyPlan
from tapestry_egg.schedule.flatten import FlatProgram, Instance

from .legality import Illegal, check_layout

Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class PortLayouts:
    """Per port instance: the layouts that it reads and those that it produces."""

    needs: dict[int, Layouts] = field(default_factory=dict)
    gives: dict[int, Layouts] = field(default_factory=dict)

    def put(self, instance: int, needs: Sequence[Layout], gives: Sequence[Layout]) -> None:
        self.needs[instance] = tuple(needs)
        self.gives[instance] = tuple(gives)


def port_layouts(program: FlatProgram, bodies: Sequence[BodyPlan]) -> PortLayouts:
    """The layouts at every port; `bodies[b]` is the plan of the program's body b."""
    out = PortLayouts()
    _boundary(program, bodies[0], out)
    for i, instance in enumerate(program.instances):
        if instance.port == "constant":
            out.put(i, (), [Layout.replicated(program.types[v].rank) for v in instance.outputs])
    for b, k in program.spans:
        _region(program, bodies, b, k, out)
    return out


def _boundary(program: FlatProgram, plan: BodyPlan, out: PortLayouts) -> None:
    """Ports of the program itself: they name the values, each of which enters or leaves once."""
    values = program.bodies[0].values
    entering = {values[v]: x for v, x in zip(plan.graph.inputs, plan.inputs, strict=True)}
    returning = {
        (values[plan.graph.inputs[i]], values[plan.graph.outputs[j]]): plan.outputs[j]
        for j, i in program.feedback.items()
    }
    leaving: dict[int, list[Layout]] = {}
    for j, v in enumerate(plan.graph.outputs):
        if j not in program.feedback:
            leaving.setdefault(values[v], []).append(plan.outputs[j])
    for i, instance in enumerate(program.instances):
        if instance.port == "input":
            out.put(i, (), [entering[v] for v in instance.outputs])
        elif instance.port == "state":
            (new,), (old,) = instance.inputs, instance.outputs
            out.put(i, [returning[old, new]], [entering[old]])
        elif instance.port == "output":
            out.put(i, [leaving[instance.inputs[0]].pop(0)], ())


def _region(
    program: FlatProgram, bodies: Sequence[BodyPlan], b: int, k: int, out: PortLayouts
) -> None:
    """Ports of one region operation, in JAX's order of operands and results."""
    op, outside = program.bodies[b].graph.operations[k], bodies[b].strategies[k]
    inside = [
        bodies[n]
        for n, body in enumerate(program.bodies)
        if (body.parent, body.operation) == (b, k)
    ]
    start, stop = program.spans[BodyId(b), k]
    ports: dict[str, list[int]] = {}
    for i in range(start, stop):
        instance = program.instances[i]
        if instance.port and instance.port != "constant" and instance.body == b:
            ports.setdefault(instance.port, []).append(i)
    needs, gives = outside.needs, outside.gives
    invariant, carry = ports.get("invariant", []), ports.get("carry", [])
    if op.is_scan:
        (body,) = inside
        n, m = int(op.params["num_consts"]), len(carry)
        for x, i in enumerate(invariant):
            out.put(i, [needs[x]], [body.inputs[x]])
        for x, i in enumerate(carry):
            out.put(i, [needs[n + x], body.outputs[x]], [body.inputs[n + x], gives[x]])
        for x, i in enumerate(ports.get("stream", [])):
            out.put(i, [needs[n + m + x]], [body.inputs[n + m + x]])
        for x, i in enumerate(ports.get("stack", [])):
            out.put(i, [body.outputs[m + x]], [gives[m + x]])
    elif op.is_while:
        test, body = inside
        a, c = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        for x, i in enumerate(invariant):
            out.put(i, [needs[x]], [test.inputs[x] if x < a else body.inputs[x - a]])
        for x, i in enumerate(carry):
            made = [test.inputs[a + x], body.inputs[c + x], gives[x]]
            out.put(i, [needs[a + c + x], body.outputs[x]], made)
        for i in ports.get("predicate", []):
            out.put(i, [test.outputs[0]], ())
    else:
        for i in ports.get("predicate", []):
            out.put(i, [needs[0]], ())
        for x, i in enumerate(invariant):
            out.put(i, [needs[1 + x]], [body.inputs[x] for body in inside])
        for x, i in enumerate(ports.get("branch", [])):
            out.put(i, [body.outputs[x] for body in inside], [gives[x]])


def check_port(instance: Instance, needs: Layouts, gives: Layouts, mesh: MeshShape) -> None:
    """A port is the identity: one layout, up to the stacked dim, which is never cut.

    Raises Illegal where it is not.
    """
    signature, kind = instance.signature, instance.port
    types = (*signature.input_types, *signature.output_types)
    layouts = (*needs, *gives)
    for tensor, layout in zip(types, layouts, strict=True):
        try:
            check_layout(layout, tensor.shape, tensor.dtype, mesh)
        except Illegal as e:
            raise Illegal(f"the {kind} port: {e}") from None
    outer = needs if kind == "stream" else gives if kind == "stack" else ()
    if any(layout.dims[0] for layout in outer):
        raise Illegal(f"the {kind} port cuts the dim that the loop runs over")
    plain = {
        Layout(x.dims[1:], x.partial, x.monoid) if k in range(*_outer(kind, needs)) else x
        for k, x in enumerate(layouts)
    }
    if len(plain) > 1:
        words = ", ".join(x.show(mesh) for x in plain)
        raise Illegal(f"the {kind} port changes the layout: {words}")
    if kind in ("input", "output", "state") and any(x.partial for x in layouts):
        raise Illegal(f"a partial value crosses the boundary at an {kind} port")
    if kind in ("constant", "predicate") and any(x.axes for x in layouts):
        raise Illegal(f"a {kind} is not replicated over every axis")


def _outer(kind: str, needs: tuple[Layout, ...]) -> tuple[int, int]:
    """Which of a port's layouts, needs first, have the stacked dim in front."""
    if kind == "stream":
        return 0, len(needs)
    if kind == "stack":
        return len(needs), len(needs) + 1
    return 0, 0
