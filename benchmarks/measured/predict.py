"""What is predicted of a run: its program traced, its layouts pinned, planned, and read off."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from tapestry_egg.graph.blockgraph import BlockGraph

from .programs import Cut, arguments, pins, train_step
from .rows import Run

#: Above any memory, so that what does not fit is predicted, too.
_NO_LIMIT = {"peak_bytes": 1e15}


@dataclass(frozen=True)
class Prediction:
    """Of one step: seconds on the devices, peak bytes of one, joules of all, operations that an
    eager framework's host would dispatch to each, and collectives."""

    seconds: float
    serial_seconds: float
    peak_bytes: float
    joules: float
    wire_bytes: float
    dispatches: float
    collectives: float

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
        target=run.target,
        objectives=("seconds",),
        mesh_shapes=[MeshShape(("d", "t"), (run.data, run.tensor))],
        pins=pins(run.model, cut, run.zero),
        books=("sharding", "collectives"),  # the program as it is written, no other form of it
        settings=Settings(workers=1, front=False, recompute=0),
        limits=_NO_LIMIT,
    )
    plan = front.best("seconds", limits=_NO_LIMIT)
    costs = plan.costs
    return Prediction(
        seconds=costs.seconds,
        serial_seconds=getattr(costs, "serial_seconds", costs.seconds),
        peak_bytes=costs.peak_bytes,
        joules=costs.joules,
        wire_bytes=costs.wire_bytes,
        dispatches=dispatches(program.graph, run.model.layers),
        collectives=float(sum(c.count for c in planned_collectives(plan))),
    )


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
