"""The order that a plan promises, as ties between operations that XLA must keep.

A plan's peak holds for one order of its kernels. XLA's schedulers choose among orders of their own
(on GPUs the least of a greedy list, a depth-first and a post-order schedule): left alone they put
off every weight gradient to the end, and combine gathers of many layers into one, all of whose
results are then live at once. So each large kernel waits for the large results before it: both
pass through one optimization barrier. The barrier moves nothing; it is dropped after scheduling.

Where a plan counts on collectives that run beside kernels, they are left the windows that it
promises (`extract/problem/issue_places.py`): what a kernel collects may be on its way once the
large kernel before it may begin, what combines partial values as soon as these are there, and
what leaves while the next large kernels run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.machine.split_products import SplitK, split_scratch
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import Fusion, OperationSignature
from tapestry_egg.plans.fetch import Fetch, produced_layouts
from tapestry_egg.plans.plan import BodyPlan
from tapestry_egg.schedule.flatten import FlatProgram
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.own_arrays import self_compared
from tapestry_egg.schedule.schedules import Schedule, operation_groups
from tapestry_egg.schedule.units import Unit, is_view
from tapestry_egg.schedule.value_numbers import ValueNumbers

#: Local bytes below which order matters little for the peak, while XLA's combining of collectives
#: and fusing across kernels saves launches.
SMALL = 1 << 14

#: So many large kernels run beside a copy that leaves, at most, before one waits for it. Were none
#: to wait, XLA's scheduler, which works from the end on and has one collective on its way at a
#: time, would find nothing but copies there, and put all of them at the end, beside nothing.
BESIDE = 2

Reads = Sequence[Sequence[Fetch]]


@dataclass(frozen=True, slots=True)
class Tie:
    """What an operation reads (`held`), and what the large kernel after it collects (`ahead`), is
    let go only when the values `done` are there; with `arrived` the operation itself waits, not
    what it collects. What is held is read in a checkpoint `region`, or in none."""

    held: tuple[Fetch, ...]
    done: tuple[int, ...]
    ahead: tuple[Fetch, ...] = ()
    arrived: bool = False
    region: int | None = None


def last_reads(reads: Reads, sources: Mapping[int, Sequence[int]]) -> dict[int, int]:
    """Value -> its last reader in any layout, the body's outputs last; a reader of a value that is
    computed on the fly reads its `sources`."""
    return {v: k for k, found in enumerate(reads) for f in found for v in _with(f.value, sources)}


def _with(v: int, sources: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    return (v, *sources.get(v, ()))


def ties(
    body: BodyPlan,
    reads: Reads,
    mesh: MeshShape,
    sources: Mapping[int, Sequence[int]],
    schedule: Schedule,
    stored: frozenset[int],
    beside: bool = False,
    rounds: bool = False,
) -> dict[int, Tie]:
    """The ties of a body, by the operation that they precede; `reads` as `fetches` gives them,
    `schedule` is that of the body's graph, `sources` of values that are computed on the fly are
    what they are computed from, `stored` those that are in memory as they are: a barrier on others
    would have them stored. With `beside` collectives run beside kernels."""
    graph, program = body.graph, schedule.program
    units = sorted(schedule.units, key=lambda unit: unit.root)
    kernels = _made_by(program, units, ("kernel",))
    solid = kernels | (_made_by(program, units, ("reduce",)) & stored)
    if rounds:
        solid |= rounded_by_kernels(graph, kernels.difference(graph.inputs))
    by_kernels = solid.difference(graph.inputs)
    layouts = produced_layouts(body)
    last_read = last_reads(reads, sources)

    def local(v: int, layout: Layout) -> int:
        return layout.block(graph.values[v], mesh).nbytes

    out: dict[int, Tie] = {}
    large: tuple[int, tuple[Fetch, ...]] | None = None  # the kernel before, and what it may wait by
    done: dict[int, None] = {}
    # Values that something large is read for and that no kernel waits for yet: the large operand
    # stays in memory until they are computed, so small ones count as well.
    pending: set[int] = set()
    for members in operation_groups(program, units):
        made = [v for k in members for v in graph.operations[k].outputs]
        outside = [f for k in members for f in reads[k] if f.value not in made]
        operands = [local(f.value, f.need) for f in outside]
        results = [local(v, layouts[v]) for v in made if v in kernels]
        if results and max(operands + results) >= SMALL:
            begin = min(members)
            moved = [f for f in outside if f.origin == "copy" and f.moves]
            moved = [f for f in moved if local(f.value, f.need) >= SMALL]
            there = [f for f in outside if f not in moved] if beside else outside
            held = _held(there, solid, stored, sources, by_kernels, () if beside else moved)
            taken = {f.value for f in held}
            waited = tuple(v for v in done if last_read.get(v, -1) >= begin and v not in taken)
            ahead = tuple(f for f in moved if not f.have.partial)
            if beside and large and ahead:
                at, own = large
                alone = Tie((), tuple(f.value for f in own))
                out[at] = replace(out.get(at, alone), ahead=ahead)
            if (held or (beside and moved)) and waited:
                of = {f.value for f in held}
                some = [k for k in members if not of.isdisjoint(graph.operations[k].inputs)]
                region = graph.operations[max(some or members)].remat
                out[begin] = Tie(held, waited, arrived=not held, region=region)
                done.clear()
                pending.clear()
            large = begin, held
        if max(operands, default=0) >= SMALL or any(f.value in pending for f in outside):
            pending.update(made)
        for v in made:
            if (v in solid or v in graph.outputs) and (
                v in pending or local(v, layouts[v]) >= SMALL
            ):
                done[v] = None
    return out


def rounded_by_kernels(graph: BlockGraph, kernels: set[int]) -> set[int]:
    """Values that the kernels of products round for other products, and leave in no other form."""
    readers = Counter([*(v for op in graph.operations for v in op.inputs), *graph.outputs])
    return {
        op.outputs[0]
        for op in graph.operations
        if registry.meaning(op.kernel) == "rounding"
        and op.inputs[0] in kernels
        and readers[op.inputs[0]] == 1
    }


def written_late(
    body: BodyPlan,
    reads: Reads,
    mesh: MeshShape,
    sources: Mapping[int, Sequence[int]],
    first: int,
    count: int,
) -> tuple[int, ...]:
    """Of the `count` values that a loop carries, inputs of its body from place `first` on, those of
    some size that a round computes, where one is made before the last reader of what it replaces.

    XLA places copies of carries before it orders kernels. Unless all next values are there when the
    first is written, it copies such an old value for its late reader, and the next one as well.
    """
    graph = body.graph
    made = {v: k for k, op in enumerate(graph.operations) for v in op.outputs}
    last = last_reads(reads[:-1], sources)
    found, late = [], False
    for q, (old, v) in enumerate(
        zip(graph.inputs[first : first + count], graph.outputs[:count], strict=True)
    ):
        if v in made and body.outputs[q].block(graph.values[v], mesh).nbytes >= SMALL:
            found.append(q)
            late |= last.get(old, -1) > made[v]
    return tuple(found) if late and len(found) > 1 else ()


def stored(
    plan: Schedule,
    reads: Reads,
    fusing: FusionCosts | None = None,
    epilogues: bool = False,
) -> frozenset[int]:
    """Values of a scheduled graph that kernels write to memory, by the model of fusion of a
    target with `epilogues` where these are asked for; not zeros into which sums are scattered only
    to be added to something, as they are: XLA scatters into that, if it sees that they are zeros.
    """
    number = {v: k for k, v in enumerate(plan.program.bodies[0].values)}
    within = fusion(plan, epilogues, fusing).within
    found = {
        number[v]
        for unit, inside in zip(plan.units, within, strict=True)
        if not inside and not is_view(plan.program, unit)
        for v in unit.outputs
        if v in number
    }
    return frozenset(found - _never_filled(plan.program.bodies[0].graph, reads))


def made_once(program: FlatProgram) -> frozenset[int]:
    """Values of a graph that have to exist once: they are compared with the greatest of them."""
    once = self_compared(program)
    return frozenset(k for k, v in enumerate(program.bodies[0].values) if v in once)


def made_for_all(
    body: BodyPlan,
    plan: Schedule,
    stored: frozenset[int],
    mesh: MeshShape,
    costs: SplitK | None,
    fusing: FusionCosts | None = None,
) -> frozenset[int]:
    """Operations with results in memory that a compiler would make again for some readers.

    XLA for GPUs stores for products and the like what they read, and lets kernels that go element
    by element compute it again where these need something that is computed of it first; so what it
    is made of is held for them. It so adds up the parts of a product (`machine/split_products.py`)
    in every such kernel, and holds them until the last: a plan has them for as long as their sum is
    made. What the very next kernel alone reads is gone with it; what devices combine is added up
    for that.
    """
    program, layouts = plan.program, produced_layouts(body)
    place = {v: k for k, v in enumerate(program.bodies[0].values)}
    within = fusion(plan, costs=fusing).within
    kernels = [
        not inside and not is_view(program, unit)
        for inside, unit in zip(within, plan.units, strict=True)
    ]
    found = set()
    for u, unit in enumerate(plan.units):
        root = program.instances[unit.root]
        if root.body or root.port or len(unit.outputs) != 1:
            continue
        v, x, k = place[unit.outputs[0]], root.signature, root.operation
        readers = _kernels_behind(plan, unit.outputs[0], kernels)
        loops = {r for r in readers if _goes_by_elements(plan, r)}
        others = readers - loops
        if not loops:
            continue
        if x.fusion == "loop":
            if loops.isdisjoint(_behind(plan, readers, max(loops))):
                continue  # one kernel makes it, and what is computed of it
            amount = layouts[v].block(body.graph.values[v], mesh).nbytes
            made = {program.instances[plan.units[r].root].signature.fusion for r in others}
            if v in stored and "kernel" in made and amount >= SMALL:
                found.add(k)
        elif others and not loops <= _behind(plan, others, max(loops)):
            continue
        elif costs is not None and x.is_product and not x.by_vector and not layouts[v].partial:
            following = next((r for r in range(u + 1, len(kernels)) if kernels[r]), None)
            if readers != {following} and _parts(x, body, k, mesh, costs) >= SMALL:
                found.add(k)
    return frozenset(found)


def made_of_larger(
    body: BodyPlan, reads: Reads, stored: frozenset[int], mesh: MeshShape
) -> frozenset[int]:
    """Operations with results in memory, element by element of something larger that is collected
    for them, as rows of a table are: XLA for GPUs computes such results again where they are read,
    and holds the larger until the last of these."""
    graph = body.graph
    layouts = produced_layouts(body)
    readers = Counter(f.value for found in reads for f in found)
    collected: dict[int, int] = {}  # value that is not stored -> bytes of the largest

    def local(v: int, layout: Layout) -> int:
        return layout.block(graph.values[v], mesh).nbytes

    found = set()
    for k, op in enumerate(graph.operations):
        most = max(
            [local(f.value, f.need) if f.moves else collected.get(f.value, 0) for f in reads[k]],
            default=0,
        )
        if op.regions or op.effectful or len(op.outputs) != 1:
            continue
        (v,) = op.outputs
        if v not in stored:
            collected[v] = most
            continue
        if readers[v] < 2 or most < SMALL or most <= local(v, layouts[v]):
            continue
        types = tuple([graph.values[u] for u in op.inputs])
        if registry.signature_of(op, types, (graph.values[v],)).fusion == "loop":
            found.add(k)
    return frozenset(found)


def _behind(plan: Schedule, units: set[int], last: int) -> set[int]:
    """The units up to the last one that need something of what some units make."""
    found = set[int]()
    for u in range(min(units) + 1, last + 1):
        makers = {plan.producer[v] for *_, v in plan.units[u].reads}
        if not makers.isdisjoint(units | found):
            found.add(u)
    return found


def _parts(
    signature: OperationSignature, body: BodyPlan, k: int, mesh: MeshShape, costs: SplitK
) -> float:
    """Bytes of the parts that a compiler makes of product k on one device; 0 of none."""
    dims = signature.gemm
    if dims is None:
        return 0.0
    cuts = body.strategies[k].cuts
    sizes = [n // mesh.parts(c) for n, c in zip(signature.extents, cuts, strict=True)]
    batch, m, n, depth = [np.array(float(x)) for x in dims.shape(sizes)]
    lhs, rhs = (signature.input_types[p].dtype for p in (dims.lhs, dims.rhs))
    gemm = Gemm(batch, m, n, depth, lhs, rhs, signature.output_types[0].dtype)
    return float(split_scratch(gemm, costs))


def _kernels_behind(plan: Schedule, v: FlatId, apart: Sequence[bool]) -> set[int]:
    """The units whose kernels read a value, by views of it and what is computed of it inside them;
    `apart` says which units are kernels."""
    found, stack = set[int](), [v]
    while stack:
        for r in plan.readers[stack.pop()]:
            if apart[r]:
                found.add(r)
            else:
                stack += plan.units[r].outputs
    return found


def _goes_by_elements(plan: Schedule, u: int) -> bool:
    root = plan.program.instances[plan.units[u].root]
    return not root.port and root.signature.fusion in ("loop", "reduce")


def _never_filled(graph: BlockGraph, reads: Reads) -> set[int]:
    """Values, of constants alone, that only a scatter that adds reads; its sums, an addition, where
    they lie as they were made, and not to other such sums."""
    readers: dict[int, list[int]] = {v: [-1] for v in graph.outputs}
    filled: set[int] = set()
    for k, op in enumerate(graph.operations):
        for v in op.inputs:
            readers.setdefault(v, []).append(k)
        if op.inputs and graph.constants.keys() >= set(op.inputs):
            filled.update(op.outputs)
    found: dict[int, int] = {}  # of an addition, one
    for v in filled:
        match [graph.operations[k] for k in readers.get(v, ()) if k >= 0]:
            case [Operation(inputs=(into, *_), outputs=(added,)) as op] if _scatters_sums(
                graph, op
            ):
                k, *more = readers.get(added, [-1])
                adds = k >= 0 and _adds(graph, graph.operations[k])
                there = all(f.have == f.need for f in reads[k] if f.value == added)
                if into == v and adds and there and not more and -1 not in readers[v]:
                    found[k] = v
    return set(found.values())


def _scatters_sums(graph: BlockGraph, op: Operation) -> bool:
    own = None if op.regions else _signature(graph, op)
    return own is not None and own.adds and own.initial == (0,)


def _adds(graph: BlockGraph, op: Operation) -> bool:
    own = None if op.regions else _signature(graph, op)
    return own is not None and own.adds and own.fusion == "loop"


def _signature(graph: BlockGraph, op: Operation) -> OperationSignature:
    return registry.signature_in(graph, op)


def repeats(
    body: BodyPlan, plan: Schedule, stored: frozenset[int], mesh: MeshShape
) -> dict[int, tuple[int, ...]]:
    """What stores an array of some size that was stored before, of the same values: the first
    operation that makes it, and what that kernel reads.

    What is cheap to make is made for every reader (`schedule/repeated.py`), which a compiler sees
    to be the same: it would hold what it makes first for the last reader.
    """
    graph = body.graph
    program, layouts = plan.program, produced_layouts(body)
    place = {v: k for k, v in enumerate(program.bodies[0].values)}
    numbers, seen = ValueNumbers().of(program), set[int]()
    found: dict[int, tuple[int, ...]] = {}
    for unit in plan.units:
        members = [program.instances[i] for i in unit.members]
        plain = all(not m.port and m.signature.fusion in ("loop", "view") for m in members)
        if not plain or len(unit.outputs) != 1 or place.get(unit.outputs[0]) not in stored:
            continue
        v = place[unit.outputs[0]]
        first = min(m.operation for m in members)
        again = numbers[unit.outputs[0]] in seen and graph.operations[first].remat is None
        seen.add(numbers[unit.outputs[0]])
        if again and layouts[v].block(graph.values[v], mesh).nbytes >= SMALL:
            found[first] = tuple(place[w] for *_, w in unit.reads if w in place)
    return found


def fills(
    body: BodyPlan,
    stored: frozenset[int],
    mesh: MeshShape,
    waited_for: frozenset[int] = frozenset(),
) -> frozenset[int]:
    """Operations that fill an array of some size in memory (`stored`) from constants alone. What
    sums are scattered into is, too, where kernels wait for these: XLA sees no addition behind a
    barrier. It would make one array of such zeros and all others, and hold that to the end."""
    graph = body.graph
    stored |= {
        op.inputs[0]
        for op in graph.operations
        if not waited_for.isdisjoint(op.outputs) and _scatters_sums(graph, op)
    }
    made, found = set(graph.constants), set()
    layouts = produced_layouts(body)
    for k, op in enumerate(graph.operations):
        if op.regions or op.effectful or not op.inputs or not made.issuperset(op.inputs):
            continue
        made.update(op.outputs)
        if len(op.outputs) == 1 and op.outputs[0] in stored:
            (v,) = op.outputs
            if layouts[v].block(graph.values[v], mesh).nbytes >= SMALL:
                found.add(k)
    return frozenset(found)


def _made_by(program: FlatProgram, units: Sequence[Unit], fusions: tuple[Fusion, ...]) -> set[int]:
    """Values of the graph that are in memory as they are: inputs, what kernels of a kind give."""
    number = {v: k for k, v in enumerate(program.bodies[0].values)}
    found: set[int] = set()
    for unit in units:
        root = program.instances[unit.root]
        if root.port in ("input", "state", "carry", "stack", "branch") or (
            not root.port and root.signature.fusion in fusions
        ):
            found.update(number[v] for v in root.outputs if v in number)
    return found


def _held(
    outside: Sequence[Fetch],
    solid: set[int],
    stored: frozenset[int],
    sources: Mapping[int, Sequence[int]],
    made: set[int],
    moved: Sequence[Fetch],
) -> tuple[Fetch, ...]:
    """Which of its operands an operation is made to wait for.

    All that it collects from other devices (`moved`), so that no copy exists before its time; else
    what is in memory anyway, or what a kernel made (`made`) of which an operand is computed on the
    fly, inside the kernels that read it: a barrier on such an operand makes it exist. Else what is
    stored. Nor is it an argument any more behind one, as XLA wants a bias that products add.
    """
    ready = [f for f in outside if f.value in solid]
    below = [replace(f, value=u) for f in outside for u in sources.get(f.value, ()) if u in made]
    there = [f for f in outside if f.value in stored]
    found = moved or ready[-1:] or below[-1:] or there[-1:] or outside[-1:]
    return tuple({f.value: f for f in found}.values())
