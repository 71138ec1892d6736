"""How well a plan uses its machine, as counted from its operations and its collectives."""

from __future__ import annotations

from collections.abc import Iterator

from tapestry_egg.errors import ExtractError
from tapestry_egg.machine.costs import wire_shares
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.utilization import Products, Utilization
from tapestry_egg.schedule.flatten import FlatProgram, Instance, flatten
from tapestry_egg.schedule.one_device import gemm_of
from tapestry_egg.schedule.value_numbers import ValueNumbers


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
