"""What is predicted of a run: its program traced, its layouts pinned, planned, and read off."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.plans.plan import Plan, PlannedCollective

from . import programs
from .programs import Cut, arguments, pins, train_step
from .rows import Run

#: What fused attention is called, forward and backward.
ATTENTION = ("flash_attention", "flash_attention_backward")

#: Above any memory, so that what does not fit is predicted, too.
_NO_LIMIT = {"peak_bytes": 1e15}


@dataclass(frozen=True)
class Prediction:
    """Of one step: seconds on the devices, peak bytes of one, joules of all, operations that an
    eager framework's host would dispatch to each, and collectives.

    Of the seconds, `data_seconds` are those of collectives over data parallel groups, and
    `reducing_seconds` those of them that sum gradients. `ring_seconds` is how much longer the
    residual stream takes among tensor parallel devices by the all-gathers and reduce-scatters that
    ran, where the plan has all-reduces or all-to-alls. Where scores are stored, `softmax_seconds`
    are those of the kernels between the scores and the weights of attention, and
    `fused_softmax_seconds` what one kernel for all of them takes (`fused_softmax`). Fused attention
    takes `attention_seconds`, for so many flops forward and backward on one device.
    """

    seconds: float
    serial_seconds: float
    peak_bytes: float
    joules: float
    wire_bytes: float
    dispatches: float
    collectives: float
    data_seconds: float = 0.0
    reducing_seconds: float = 0.0
    ring_seconds: float = 0.0
    softmax_seconds: float = 0.0
    fused_softmax_seconds: float = 0.0
    attention_seconds: float = 0.0
    attention_flops: float = 0.0
    attention_backward_flops: float = 0.0

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


def predict(run: Run) -> Prediction:
    """The fastest plan within a run's pins, by the product's own model."""
    import tapestry_egg as te
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.pipeline.settings import Settings
    from tapestry_egg.plans.planned import planned_collectives

    cut = Cut(run.data, run.tensor, run.sequence_parallel)
    batch = run.data * run.micro_batch
    given = arguments(run.model, cut, batch, run.micro_batches)
    step = train_step(run.model, cut, run.remat)
    program = te.trace(step, *given, donate_argnums=(0, 1))
    front = te.optimize(
        program,
        target=eager(run.target),
        objectives=("seconds",),
        mesh_shapes=[MeshShape(("d", "t"), (run.data, run.tensor))],
        pins=pins(run.model, cut, run.zero),
        books=("sharding", "collectives"),  # the program as it is written, no other form of it
        settings=Settings(workers=1, front=False, recompute=0),
        limits=_NO_LIMIT,
    )
    plan = front.best("seconds", limits=_NO_LIMIT)
    costs = plan.costs
    moved = planned_collectives(plan)
    over_data = [(c.kind, seconds_of(c, plan)) for c in moved if c.axes == ("d",)]
    forward, backward = (kernels(plan, name) for name in ATTENTION)
    reduced = [s for kind, s in over_data if kind in ("all_reduce", "reduce_scatter")]
    return Prediction(
        seconds=costs.seconds,
        serial_seconds=getattr(costs, "serial_seconds", costs.seconds),
        peak_bytes=costs.peak_bytes,
        joules=costs.joules,
        wire_bytes=costs.wire_bytes,
        dispatches=dispatches(program.graph, run.model.layers),
        collectives=float(sum(c.count for c in moved)),
        data_seconds=sum(s for _, s in over_data),
        reducing_seconds=sum(reduced),
        ring_seconds=by_rings(run, moved, plan) if run.sequence_parallel else 0.0,
        softmax_seconds=softmax(plan) if run.model.stored else 0.0,
        fused_softmax_seconds=fused_softmax(run) if run.model.stored else 0.0,
        attention_seconds=forward[0] + backward[0],
        attention_flops=forward[1],
        attention_backward_flops=backward[1],
    )


def eager(spec: str) -> Target:
    """A machine under a framework that compiles nothing: values are computed in kernels of their
    own, whoever reads them, and layers are in no stacks."""
    return replace(load_target(spec), fuses=False, rows=0, slices=False)


def kernels(plan: Plan, name: str) -> tuple[float, float]:
    """Seconds and flops, on one device, of all kernels that end with an operation of a name."""
    parts = [x for x in plan.costs_by("kernel").parts if x.kind == "kernel"]
    named = [x for x in parts if x.name.rpartition(" + ")[2] == name]
    return sum(x.seconds for x in named), sum(x.flops for x in named)


def softmax(plan: Plan) -> float:
    """Seconds of the kernels that come from the lines of attention with stored scores, its products
    apart."""
    lines, first = inspect.getsourcelines(programs._stored_attention)
    found = 0.0
    for part in plan.costs_by("kernel").parts:
        file, _, line = part.source.rpartition(":")
        if (
            part.kind == "kernel"
            and file.endswith("programs.py")
            and "dot_general" not in part.name
        ):
            found += part.seconds if first <= int(line) < first + len(lines) else 0.0
    return found


def fused_softmax(run: Run) -> float:
    """Seconds of Megatron's kernel for scale, mask and softmax in all layers and micro-batches: it
    reads scores and writes weights in bfloat16, and reads weights and their gradient and writes the
    scores' (Megatron-LM, fused_kernels/scaled_upper_triang_masked_softmax), each once at the
    rate that memory sustains. With recomputation the first runs twice."""
    target, model = load_target(run.target), run.model
    scores = 2.0 * run.micro_batch * (model.heads // run.tensor) * model.sequence**2
    forward = 1 if run.remat == "none" else 2
    passes = 2 * forward + 3
    each = passes * scores / target.hbm_bytes_per_second + (forward + 1) * target.launch_seconds
    return model.layers * run.micro_batches * each


def by_rings(run: Run, moved: Sequence[PlannedCollective], plan: Plan) -> float:
    """Seconds by which the stream takes longer gathered and scattered than as planned."""
    ran = {"all_reduce": "reduce_scatter", "all_to_all": "all_gather"}
    stream = 2.0 * run.micro_batch * run.model.sequence * run.model.width
    other = [c for c in moved if c.kind in ran and c.axes == ("t",) and c.payload_bytes >= stream]
    return sum(seconds_of(replace(c, kind=ran[c.kind]), plan) - seconds_of(c, plan) for c in other)


def seconds_of(moved: PlannedCollective, plan: Plan) -> float:
    """Seconds of a collective in all its runs of a step."""
    from tapestry_egg.machine.costs import collective_seconds

    assert plan.origin is not None, "it was planned here"
    block = moved.payload_bytes / (moved.group if moved.kind == "all_gather" else 1)
    axes = tuple(plan.mesh.names.index(a) for a in moved.axes)
    machine = plan.origin.machine
    return moved.count * float(collective_seconds(moved.kind, block, axes, plan.mesh, machine))


def dispatches(graph: BlockGraph, layers: int = 0) -> float:
    """Operations of a program, loops unrolled, as an eager framework's host dispatches them: views,
    too; one per layer for arrays that stack those of `layers`, which it holds one by one."""
    total = 0.0
    for op in graph.operations:
        if op.regions:
            own = 0 if op.params.get("length") == layers else layers
            inner = sum(dispatches(region, own) for region in op.regions)
            total += inner * float(op.params.get("length", 1))
        elif op.kernel != "sharding_constraint":
            made = graph.values[op.outputs[0]]
            total += layers if layers and made.rank > 1 and made.shape[0] == layers else 1
    return total
