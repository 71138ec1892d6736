"""How well a plan uses its machine, as counted from its operations and its collectives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tapestry_egg.errors import ExtractError
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.costs import wire_shares
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.parameters import hashable
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.utilization import Products, Utilization
from tapestry_egg.schedule.flatten import FlatProgram, Instance, flatten

from .contractions import gemm_of, is_contraction

# Bytes of a constant that is known by what it holds; a larger one is known by which array it is.
_SMALL = 1024


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
    before, as those of recomputation (`jax.checkpoint`) do.

    Values are numbered by what computes them, whatever the layouts; a slice of a stack is what was
    stacked, so that a loop backwards knows what the one forwards has computed. What a loop carries
    is known to no other loop.
    """
    numbers: dict[object, int] = {}
    of: dict[FlatId, int] = {}

    def number(key: object) -> int:
        return numbers.setdefault(key, len(numbers))

    def read(v: FlatId) -> int:
        return of.setdefault(v, number(("value", v)))

    stacked: dict[int, int] = {}  # the number of a stack -> that of its slice
    constants = _constants(program)
    for k, instance in enumerate(program.instances):
        inputs = [read(v) for v in instance.inputs if instance.port not in ("state", "carry")]
        key: object
        match instance.port:
            case "invariant":
                of |= {v: inputs[0] for v in instance.outputs}
                continue
            case "stream":
                (out,) = instance.outputs
                inner = stacked.get(inputs[0])
                of[out] = number(("slice", inputs[0])) if inner is None else inner
                continue
            case "stack":
                (out,) = instance.outputs
                of[out] = number(("stack", inputs[0], instance.signature.output_types))
                stacked[of[out]] = inputs[0]
                continue
            case "constant":
                (out,) = instance.outputs
                of[out] = number(constants[out])
                continue
            case "":
                op = program.bodies[instance.body].graph.operations[instance.operation]
                plain = not (op.effectful or instance.signature.opaque)
                key = (op.kernel, hashable(op.params), *inputs) if plain else ("alone", k)
            case port:
                key = (port, k)
        fresh = (key, 0) not in numbers
        for place, v in enumerate(instance.outputs):
            of[v] = number((key, place))
        signature = instance.signature
        product = not instance.port and signature.fusion == "kernel"
        if fresh and product and is_contraction(signature):
            yield instance


def _constants(program: FlatProgram) -> Mapping[FlatId, object]:
    found: dict[FlatId, object] = {}
    for body in program.bodies:
        for v, array in body.graph.constants.items():
            what = array.tobytes() if array.nbytes <= _SMALL else id(array)
            found[body.values[v]] = ("constant", str(array.dtype), array.shape, what)
    return found
