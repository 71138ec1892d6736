"""Where the costs of a plan's step come from, kernel by kernel and copy by copy, as recounted.

What is told here adds up to what the certificate says of the plan: both walk the same units and
copies.
"""

from __future__ import annotations

from collections.abc import Iterator

from tapestry_egg.errors import ExtractError
from tapestry_egg.graph.groups import layers
from tapestry_egg.machine.costs import LOCAL, carried_as, collective_seconds, wire_shares
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.cost_table import CostPart
from tapestry_egg.plans.peak import Peak, PeakPart
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.utilization import Products, Utilization
from tapestry_egg.schedule.flatten import FlatProgram, Instance, flatten
from tapestry_egg.schedule.one_device import gemm_of
from tapestry_egg.schedule.value_numbers import ValueNumbers

from .certificate import walked
from .longest_path import Step, line
from .moves import turned_for
from .recount import Move, Walk
from .verdict import Certificate


def cost_parts(plan: Plan) -> tuple[CostPart, ...]:
    """Every kernel and change of layout of a step that takes time, or energy, as what is computed
    within others does; kernels first.

    Raises ExtractError for a plan of which it is not told what machine it was made for.
    """
    kernels, copies = parts_of(*walked(plan, "costs"))
    return tuple(p for p in (*kernels, *copies) if p.seconds > 0.0 or p.joules > 0.0)


def parts_of(walk: Walk, found: Certificate) -> tuple[tuple[CostPart, ...], tuple[CostPart, ...]]:
    """A part for every unit of the schedule, and one for every copy, whether or not it costs."""
    layers = _Layers(walk)
    hidden = _hidden(found.step)
    return (
        tuple(_kernel(walk, u, layers) for u in range(len(walk.schedule.units))),
        tuple(_copy(walk, m, hidden.get(k, 0.0), layers) for k, m in enumerate(walk.moves)),
    )


def _kernel(walk: Walk, u: int, layers: _Layers) -> CostPart:
    unit = walk.schedule.units[u]
    instances = [walk.program.instances[i] for i in unit.members]
    root = instances[-1]
    work, times = walk.kernel(unit), walk.times[root.body]
    return CostPart(
        kind="kernel",
        name=" + ".join(dict.fromkeys(x.port or x.signature.kernel for x in instances)),
        count=times,
        flops=times * work.flops,
        hbm_bytes=times * work.hbm_bytes,
        wire_bytes=times * work.wire_bytes,
        seconds=times * work.seconds,
        hidden=0.0,
        joules=times * work.joules,
        bound=work.bound,
        layer=layers.of(root.body, root.operation),
        source=line(walk.program, root.body, root.operation),
        value=", ".join(str(walk.program.types[v]) for v in unit.outputs),
    )


def _copy(walk: Walk, move: Move, hidden: float, layers: _Layers) -> CostPart:
    body, local = walk.body_of[move.value], walk.local[move.value]
    seconds, joules, wire, inside = walk.copy(move)
    for _, took, more in turned_for(walk, move):
        seconds, joules, inside = seconds + took, joules + more, inside + took
    times = walk.times[body]
    steps = walk.bodies[body].copies[local, move.have, move.need]
    tensor = walk.program.types[move.value]
    delay, names = 0.0, []
    for step in steps:
        kind = carried_as(step.kind, step.monoid, tensor.dtype)
        if kind not in LOCAL:
            wait = collective_seconds(kind, 0.0, step.axes, walk.mesh, walk.target)
            delay += (step.pieces or 1) * wait
        names.append(f"{step.kind}({','.join(walk.mesh.names[a] for a in step.axes)})")
    spent = {"memory": inside, "launch": delay, "link": seconds - inside - delay}
    return CostPart(
        kind="collective",
        name=" then ".join(names),
        count=times,
        flops=0.0,
        hbm_bytes=0.0,
        wire_bytes=times * wire,
        seconds=times * seconds,
        hidden=hidden,
        joules=times * joules,
        bound=max(spent, key=lambda k: spent[k]),
        layer=layers.of(*move.reader),
        source=line(walk.program, *move.reader),
        value=f"%{local} {tensor}",
    )


def _hidden(step: Step) -> dict[int, float]:
    """Seconds of every flight during which some kernel runs; kernels run one after another."""
    found: dict[int, float] = {}
    for k, begin, end in step.flights:
        beside = (min(end, b) - max(begin, a) for _, a, b in step.runs)
        found[k] = found.get(k, 0.0) + sum(x for x in beside if x > 0.0)
    return found


class _Layers:
    """The layer that every operation belongs to, by whose weights were read last before it."""

    def __init__(self, walk: Walk) -> None:
        self._walk = walk
        graph = walk.program.bodies[0].graph
        self._found = {0: layers(graph)}

    def of(self, body: int, operation: int) -> str:
        """The layer of an operation, with the loops around it; empty where none is known."""
        bodies = self._walk.program.bodies
        if body:
            outer = self.of(bodies[body].parent, bodies[body].operation)
            at = bodies[body].parent, bodies[body].operation
            kernel = bodies[at[0]].graph.operations[at[1]].kernel
            return f"{outer} {kernel} at {line(self._walk.program, *at) or 'a loop'}".strip()
        layers = self._found[0]
        return layers[operation] if 0 <= operation < len(layers) else ""


# What is in memory at a plan's peak, array by array, as recounted.


def peak(plan: Plan) -> Peak:
    """What is in memory when most is.

    Raises ExtractError for a plan of which it is not told what machine it was made for.
    """
    return peak_of(*walked(plan, "the peak"))


def peak_of(walk: Walk, found: Certificate) -> Peak:
    """The same of a plan that has been gone through; the first moment of several."""
    profile = found.profile
    tick = max(range(len(profile)), key=lambda t: profile[t]) if profile else 0
    begins = [begin for _, begin, _ in found.step.runs] or [0.0]
    (at,) = walk.ground.streams.at(found.step, [begins[min(tick // 2, len(begins) - 1)]])
    parts = []
    for v, x in walk.lying:
        if not (x.begin <= tick < x.end and x.amount):
            continue
        body, local = walk.body_of[v], walk.local[v]
        graph = walk.program.bodies[body].graph
        maker = graph.producers().get(local, -1) if body or local not in graph.inputs else -1
        op = graph.operations[maker] if maker >= 0 else None
        entering = body == 0 and local in graph.inputs
        name = f"%{local}"
        if entering and graph.input_names:
            name = graph.input_names[graph.inputs.index(local)] or name
        parts.append(
            PeakPart(
                name=name,
                type=str(walk.program.types[v]),
                layout=x.layout.show(walk.mesh),
                kind="argument" if entering and x.role == "made" else x.role,
                bytes=x.amount,
                made_by=op.kernel if op else "",
                source=line(walk.program, body, maker),
            )
        )
    root = walk.program.instances[walk.schedule.units[min(tick // 2, len(begins) - 1)].root]
    running = f"the {root.port} port" if root.port else root.signature.kernel
    source = line(walk.program, root.body, root.operation)
    order = sorted(parts, key=lambda p: (-p.bytes, p.name))
    return Peak(max(profile, default=0.0), at, running, source, tuple(order))


# How well a plan uses its machine, as counted from its operations and its collectives.


def utilization(plan: Plan) -> Utilization:
    """What a plan uses of its machine.

    Raises ExtractError for a plan of which it is not told what machine it was made for.
    """
    if plan.origin is None:
        raise ExtractError(
            "it is not told what machine the plan was made for",
            where=f"utilization of plan {plan.name}",
            hint="Plans of a front know it, and those that were loaded from a file.",
        )
    machine = plan.origin.machine
    flops: dict[str, float] = {}
    for instance in useful(flatten(plan.graph, dict(plan.origin.feedback))):
        dtype = _dtype(instance)
        amount = instance.weight * instance.signature.whole_flops
        flops[dtype] = flops.get(dtype, 0.0) + amount
    products = [Products(d, n, machine.peak_rate(d, True)) for d, n in flops.items() if n]
    return Utilization(
        seconds=plan.costs.seconds,
        devices=plan.mesh.devices,
        products=tuple(sorted(products, key=lambda p: (-p.flops, p.dtype))),
        peak_bytes=plan.costs.peak_bytes,
        usable_bytes=machine.usable_bytes,
        sent=_sent(plan, machine),
    )


def _dtype(instance: Instance) -> str:
    """The dtype that a product is computed in, as kernels are priced."""
    gemm = gemm_of(instance.signature, instance.signature.extents)
    return gemm.dtype if gemm else instance.signature.output_types[0].dtype


def _sent(plan: Plan, machine: Target) -> dict[str, float]:
    every = machine.spans(plan.mesh, tuple(range(len(plan.mesh.sizes))))
    found = {span.level: 0.0 for span in every}
    for one in plan.collectives:
        axes = tuple(plan.mesh.names.index(name) for name in one.axes)
        for level, share in wire_shares(one.kind, machine.spans(plan.mesh, axes)).items():
            found[level] = found.get(level, 0.0) + share * one.wire_bytes * one.count
    return found


def useful(program: FlatProgram) -> Iterator[Instance]:
    """The products of a program, but for those that compute a value which another one has computed
    before, as those of recomputation (`jax.checkpoint`) do."""
    number = ValueNumbers().of(program)
    seen: set[int] = set()
    for instance in program.instances:
        if not instance.port and instance.signature.contracts:
            made = number[instance.outputs[0]]
            if made not in seen:
                yield instance
            seen.add(made)
