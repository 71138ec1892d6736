"""Whether the emitted program does what its plan promised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import PlanError
from tapestry_egg.quantities import BYTES

from .equations import Program, Region, Step, all_sent, jaxprs
from .memory import PRODUCTS, Fused, Held, hands_on, held, is_opaque, places_of

if TYPE_CHECKING:
    from tapestry_egg.graph.layout import Layout
    from tapestry_egg.plans.plan import Plan

#: A promised peak is this share, and what small arrays add up to that compilers fold into others,
#: below what the program holds, at most. It is no more than so many times above that, and what
#: kernels may take beside their arrays: how much that is, is not known here.
BAND, OVER = 0.10, 4.0
SMALL, WORKSPACE = 64 << 10, 16 << 20
_HINT = (
    "The plan and the program made from it disagree: a defect of tapestry-egg, or an edited file."
)


def check(plan: Plan, jaxpr: Any, donated: Sequence[bool] | None = None) -> None:
    """Compare the promises of a plan with the program emitted for its target.

    `jaxpr` has the `shard_map` of the plan as its one equation of that name; `donated` says of each
    argument whether the program may reuse its memory (default: as the plan's graph has it). Raises
    PlanError for the first difference: layouts at the boundary and bytes on the wire must be equal,
    the peak within a band.
    """
    given = check_boundary(plan, jaxpr, donated)
    program, region = _read(plan, jaxpr)
    _check_wire(plan, program, region)
    _check_peak(plan, program, region, given)


def held_by(plan: Plan, jaxpr: Any) -> int:
    """The bytes that the ledger counts in memory at the peak of a plan's program."""
    program, region = _read(plan, jaxpr)
    return held(program, region, check_boundary(plan, jaxpr), *_compiler(plan))


def _read(plan: Plan, jaxpr: Any) -> tuple[Program, Region]:
    program = Program(dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True)))
    region = program.read(_shard_map(plan, jaxpr).params["jaxpr"])
    entering = sum(plan.graph.values[v].size > 0 for v in plan.graph.inputs)
    for v in region.inputs[: len(region.inputs) - entering]:
        program.bytes[v] = 0  # a constant: its executable has it, beside all that a step holds
    return program, region


def _compiler(plan: Plan) -> tuple[bool, float]:
    """Whether the compiler of the plan's machine holds memory for results before they are made, and
    from how many bytes of a device's result on a product may be a library's."""
    machine = plan.origin.machine if plan.origin else None
    if machine is None or machine.fusing is None:
        return machine is None or machine.reserves, float("inf")
    library = machine.fusing.library_bytes
    return machine.reserves, float("inf") if library is None else library / plan.mesh.devices


def _shard_map(plan: Plan, jaxpr: Any) -> Any:
    """The one `shard_map` of a program, wherever it stands in calls."""
    found, left = [], [getattr(jaxpr, "jaxpr", jaxpr)]
    while left:
        for equation in left.pop().eqns:
            if equation.primitive.name == "shard_map":
                found.append(equation)
            else:
                left += jaxprs(equation)
    if len(found) != 1:
        raise _refusal(plan, f"{len(found)} programs of devices", "one")
    return found[0]


def check_boundary(plan: Plan, jaxpr: Any, donated: Sequence[bool] | None = None) -> list[bool]:
    """Compare mesh, layouts and blocks of arguments and results, as `check` does first; of which
    inputs of the `shard_map` the plan counts on the memory: donated ones, and the state that
    results become, which the caller may give up later.
    """
    mapped = _shard_map(plan, jaxpr)
    graph, inner = plan.graph, mapped.params["jaxpr"]
    sizes = dict(zip(plan.mesh.names, plan.mesh.sizes, strict=True))
    devices = dict(mapped.params["mesh"].shape)
    # A user's mesh keeps its axes of one device, which divide nothing.
    if any(devices.get(a, 1) != sizes.get(a, 1) for a in {*devices, *sizes}):
        raise _refusal(plan, f"a mesh of {devices}", f"{sizes}")
    types = [graph.values[v] for v in graph.inputs]
    given = graph.donated or (False,) * len(types)
    if donated is not None and tuple(donated) != tuple(given):
        raise _refusal(plan, f"donated arguments {_numbers(donated)}", f"{_numbers(given)}")
    entering = [i for i, t in enumerate(types) if t.size]  # arrays without elements are made inside
    first = len(inner.invars) - len(entering)  # constants come before the arguments
    sides = (
        ("input", entering, plan.in_shardings, graph.inputs, "in_specs", inner.invars[first:]),
        ("output", None, plan.out_shardings, graph.outputs, "out_specs", inner.outvars),
    )
    for what, places, layouts, values, side, blocks in sides:
        specs = mapped.params[side][first if what == "input" else 0 :]
        numbers = range(len(values)) if places is None else places
        for i, spec, block in zip(numbers, specs, blocks, strict=True):
            wanted = _axes(layouts[i], plan)
            found = [(x,) if isinstance(x, str) else tuple(x or ()) for x in spec]
            found += [()] * (len(wanted) - len(found))
            shape = graph.values[values[i]].shape
            local = [
                n // prod(sizes[a] for a in axes) for n, axes in zip(shape, wanted, strict=True)
            ]
            if found != wanted or list(block.aval.shape) != local or layouts[i].partial:
                made = f"{what} {i} cut along {found} into blocks {list(block.aval.shape)}"
                raise _refusal(plan, made, f"{wanted} and {local}")
    states = {i for _, i in plan.origin.feedback} if plan.origin else ()
    return [False] * first + [given[i] or i in states for i in entering]


def _axes(layout: Layout, plan: Plan) -> list[tuple[str, ...]]:
    return [tuple(plan.mesh.names[a] for a in axes) for axes in layout.dims]


def _check_wire(plan: Plan, program: Program, region: Region) -> None:
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    wire = 0.0
    for sent, times in all_sent(region, program.axes):
        key = sent.kind, tuple(sorted(sent.axes))  # in whichever order devices are counted
        found[key] = found.get(key, 0) + sent.payload * times
        wire += sent.wire(program.axes) * times
    promised: dict[tuple[str, tuple[str, ...]], int] = {}
    for c in plan.collectives:
        key = c.kind, tuple(sorted(c.axes))
        promised[key] = promised.get(key, 0) + c.payload_bytes * c.count
    for kind, axes in sorted({*found, *promised}):
        made, said = found.get((kind, axes), 0), promised.get((kind, axes), 0)
        if made != said:
            over = f"bytes by {kind} over {', '.join(axes)}"
            raise _refusal(plan, f"{made:,} {over}", f"{said:,}")
    own = sum(c.wire_bytes * c.count for c in plan.collectives)
    for total in (own, plan.costs.wire_bytes):
        if abs(total - wire) > 1e-6 * wire:
            raise _refusal(plan, f"{wire:,.0f} bytes sent by a device", f"{total:,.0f}")


def _check_peak(plan: Plan, program: Program, region: Region, donated: Sequence[bool]) -> None:
    machine = plan.origin.machine if plan.origin else None
    said = plan.costs.peak_bytes
    reserves, library = _compiler(plan)
    padded = machine is not None and machine.tiles is not None
    if padded or is_opaque(program, region):
        # Compilers for tiles pad arrays, and store some of them in fewer bits; some kernel holds,
        # or writes over, what is not known here.
        return

    def counted(library: float, fused: Fused) -> int:
        return held(program, region, donated, reserves, library, fused)

    usual = counted(library, "some")
    if said < (1 - BAND) * usual - SMALL:
        least = min(usual, held_at_least(program, region, donated))
        if said < (1 - BAND) * least - SMALL:
            raise _refusal(plan, f"{BYTES.format(least)} in memory at least", BYTES.format(said))
    if said > OVER * usual + WORKSPACE:
        most = max(usual, counted(library, "none"))
        if said > OVER * most + WORKSPACE:
            raise _refusal(plan, f"{BYTES.format(most)} in memory at most", BYTES.format(said))


def _refusal(plan: Plan, made: str, said: str) -> PlanError:
    return PlanError(
        f"the program has {made}, the plan promised {said}",
        where=f"ledger of plan {plan.name} on {plan.mesh}",
        hint=_HINT,
    )


def _numbers(flags: Sequence[bool]) -> list[int]:
    return [i for i, flag in enumerate(flags) if flag]


# Bytes that a device holds whatever its compiler fuses, by cuts of the emitted program.
#
# While a step runs, its arrays are in memory, and whatever all later steps need is computed of: a
# compiler may compute element by element, or move elements, as often and as late as it likes, so
# that of the values that are there by then it holds those that are smallest together (a minimum
# cut); it computes nothing earlier than the program does. What cannot be computed again is made by
# the step that makes it: a product, a collective, a sum, a loop.


#: Steps of a region that are looked at: of those that hold most by plain liveness.
_STEPS = 8
_UNIT = 1 << 10  # bytes; flows are of 32 bits


def held_at_least(program: Program, region: Region, donated: Sequence[bool]) -> int:
    """The most bytes that a device must hold at some of the steps; `donated` says it of inputs."""
    usual = Held(program, region, float("inf"), "some")
    renewed = places_of(usual, donated)
    return sum(program.bytes[v] for v in region.inputs) + _beside(usual, renewed)


def _beside(usual: Held, renewed: Mapping[int, int]) -> int:
    """What a region holds beside its inputs, results that are `renewed` in the place of these; a
    product that reads what it renews has its result beside that."""
    program, region = usual.program, usual.region
    own = Held(program, region, float("inf"), "all")
    places = {own.root.get(v, v): old for v, old in renewed.items()}
    held = usual.profile()
    again = {v: s for s in region.steps if own.is_fused(s) for v in s.makes}
    order = [t for t, s in enumerate(region.steps) if not (own.is_fused(s) or hands_on(s))]
    most = 0
    for t in sorted(order, key=lambda t: -held[t])[:_STEPS]:
        step = region.steps[t]
        arrays = set() if own.computes_operands(step) else set(own.reads(step))
        computed = arrays & own.fused  # in the product
        arrays -= computed
        if not own.writes_over(step):
            arrays |= set(step.makes)
        read = {*own.reads(step)} if step.name in PRODUCTS else set()
        arrays -= {*region.inputs, *(v for v, old in places.items() if old not in read)}
        inside = 0
        for inner in step.inner:
            body = Held(program, inner, float("inf"), "some")
            ends = {v: -1 for v in inner.outputs if v >= 0}  # a branch's, in places outside
            gone = ends if step.name == "cond" else usual.carried(step, inner)
            inside = max(inside, _beside(body, gone))
        late = computed | {v for s in order if s > t for v in own.reads(region.steps[s])}
        late |= {own.root.get(v, v) for v in region.outputs if v >= 0}
        free = arrays | places.keys()
        over = {v for v in step.makes if v in own.over}  # in the place of one of `arrays`
        made = {v for s in region.steps[: t + 1] for v in s.makes} - over
        here = sum(program.bytes[v] for v in arrays)
        most = max(most, here + inside + _cut(own, again, late, made, free))
    return most


def _cut(own: Held, again: dict[int, Step], late: set[int], made: set[int], free: set[int]) -> int:
    """Bytes of the least values of which all that is needed `late` can be computed `again`, without
    what was `made` before; those that are `free` count nothing."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    number: dict[int, int] = {}
    edges: list[tuple[int, int, int]] = []
    endless = np.iinfo(np.int32).max // 4
    left = list(late)
    while left:
        v = left.pop()
        if v in number:
            continue
        k = number[v] = len(number)
        early = v in again and v not in made
        size = endless if early else 0 if v in free else own.program.bytes[v] // _UNIT
        edges.append((2 + 2 * k, 3 + 2 * k, min(size, endless)))
        if v in again:
            left += own.reads(again[v])
    for v, k in number.items():
        if v in made and v not in again:
            edges.append((0, 2 + 2 * k, endless))
        if v in late:
            edges.append((3 + 2 * k, 1, endless))
        for w in set(own.reads(again[v])) if v in again else ():
            edges.append((3 + 2 * number[w], 2 + 2 * k, endless))
    rows, columns, flows = np.array(edges, dtype=np.int32).reshape(-1, 3).T
    nodes = 2 + 2 * len(number)
    graph = csr_array((flows, (rows, columns)), shape=(nodes, nodes), dtype=np.int32)
    return int(maximum_flow(graph, 0, 1).flow_value) * _UNIT
