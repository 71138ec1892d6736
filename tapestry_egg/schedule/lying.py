"""How values lie in memory: whose dims are in the order in which they are written, by who makes and
who reads them; along which dims windows move, where a machine has tiles; and what lies in a stack.

Kernels write their results as their dims are written. A transpose moves nothing, and operations on
elements leave the order as it is. Some kernels and the caller take no other order than that in
which dims are written: what lies otherwise is turned for them, a copy.

A loop *renews* a stack where a round reads its slice only to write a part of it anew, and stacks
what it has then: a decoder's loop over layers takes one layer's cache of keys, and writes one token
into it. What it fills is then what it takes slices from, with a few rows written: one array, as
lowering has it (`runtime/lower/regions.py`), where a compiler would fill another stack with zeros
and copy every slice into it. And slices that only kernels read which go element by element, or add
up, are read where they lie in the stack (XLA fuses a slice into such kernels, as it reads nothing
more then); libraries' kernels and products read a copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.ids import FlatId, InstanceId
from tapestry_egg.graph.loops import counts
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .flatten import FlatProgram, Instance
from .inlining import Fusion, read_as
from .schedules import Schedule
from .units import Unit, is_view

#: Results of fewer bytes have no place before they are made: where arrays are as small, compilers
#: order what they run as they like, and no peak is promised.
LEAST_PLACE = 16 << 10


def made_straight(schedule: Schedule, tiles: bool = False) -> frozenset[FlatId]:
    """What kernels make that want their operands straight, and leave their result so. In `tiles`,
    of XLA for TPUs, products by groups of rows: other kernels there write in any order."""
    instances = schedule.program.instances
    roots = [instances[unit.root] for unit in schedule.units]
    return frozenset(
        v
        for x in roots
        if (x.signature.by_groups if tiles else x.signature.straight)
        for v in x.outputs
    )


def read_straight(schedule: Schedule, tiles: bool = False) -> frozenset[tuple[int, int]]:
    """Units and what they read that must not be turned, dims in the order in which they are
    written: operands of kernels that say so (`straight`), and results. Contractions, slices of
    stacks and operations on elements take any order. In `tiles`, of XLA for TPUs, what products
    multiply whose results are groups of rows, and nothing else."""
    instances = schedule.program.instances
    found = set()
    for u, unit in enumerate(schedule.units):
        result = instances[unit.root].port == "output" and not tiles
        for i, p, v in unit.reads:
            signature = instances[i].signature
            own = _multiplied_by_groups(signature) if tiles else signature.straight
            if result or p in own:
                found.add((u, int(v)))
    return frozenset(found)


def _multiplied_by_groups(signature: OperationSignature) -> tuple[int, ...]:
    """The operands that a product multiplies for groups of rows of its result."""
    gemm = signature.gemm
    if gemm is None or not signature.by_groups:
        return ()
    summed = any(signature.index[d].role == "whole" for d in gemm.k)
    return () if summed else (gemm.lhs, gemm.rhs)


def computed_into_straight(graph: BlockGraph) -> frozenset[int]:
    """Values of a graph of which something is computed element by element that a convolution, or
    another library's product, then takes straight."""
    ends: set[int] = set()  # what such kernels take, and what leads to it
    found: set[int] = set()
    for op, signature in reversed(_plain(graph)):
        if signature.multiplies:
            ends.update(op.inputs[p] for p in signature.straight)
        elif signature.fusion == "loop" and not ends.isdisjoint(op.outputs):
            found.update(op.inputs)
            ends.update(op.inputs)
    return frozenset(found)


def products_read_straight(graph: BlockGraph) -> frozenset[int]:
    """Results of products that kernels take straight which are no products: rows that are added to
    a table."""
    made, taken = set[int](), set[int]()
    for op, signature in _plain(graph):
        if signature.multiplies:
            made.update(op.outputs)
        else:
            taken.update(op.inputs[p] for p in signature.straight)
    return frozenset(made & taken)


def _plain(graph: BlockGraph) -> list[tuple[Operation, OperationSignature]]:
    """Operations that have signatures, with these."""
    found = []
    for op in graph.operations:
        if not (op.regions or op.effectful):
            inputs, outputs = ([graph.values[v] for v in x] for x in (op.inputs, op.outputs))
            found.append((op, registry.signature_of(op, tuple(inputs), tuple(outputs))))
    return found


def renewed_outputs(body: BlockGraph, first: int, carries: int) -> Mapping[int, int]:
    """Of a loop's body, outputs that are stacked -> the inputs, slices of stacks, that they renew.

    `first` is the place of the first slice among the inputs, `carries` that of the first stacked
    output.
    """
    places = {v: p for p, v in enumerate(body.inputs) if p >= first}
    writing = {op.outputs[0]: op.inputs[own.writes[0]] for op, own in _plain(body) if own.writes}
    reads = Counter([*(v for op in body.operations for v in op.inputs), *body.outputs])
    leaves = Counter(body.outputs)
    apart = {v for op in body.operations if op.remat is not None for v in op.outputs}
    found = {}
    for q, v in enumerate(body.outputs):
        if q < carries or leaves[v] > 1 or v not in writing or v in apart:
            continue
        old = writing[v]
        if old in places and reads[old] == 1 and not body.values[v].dtype.startswith("key<"):
            found[q] = places[old]
    return found


def renewed(schedule: Schedule, epilogues: bool = False) -> Mapping[int, int]:
    """Units of stacks that are one array with what their loop takes slices from -> the units that
    take these; nothing else in the loop reads that array. None with `epilogues`, as XLA for TPUs
    copies such an array, so that lowering leaves stacks to it."""
    program = schedule.program
    if epilogues:
        return {}
    units = {unit.root: u for u, unit in enumerate(schedule.units)}
    found = {}
    for (b, k), (start, stop) in program.spans.items():
        op = program.bodies[b].graph.operations[k]
        if not op.is_scan:
            continue
        consts, carries = counts(op)
        pairs = renewed_outputs(op.regions[0], consts + carries, carries)
        if not pairs:
            continue
        ports = [InstanceId(i) for i in range(start, stop) if program.instances[i].body == b]
        read = Counter(v for i in ports for v in program.instances[i].inputs)
        streams = [i for i in ports if program.instances[i].port == "stream"]
        stacks = [i for i in ports if program.instances[i].port == "stack"]
        for q, p in pairs.items():
            stream, stack = streams[p - consts - carries], stacks[q - carries]
            (source,) = program.instances[stream].inputs
            if read[source] == 1:
                found[units[stack]] = units[stream]
    return found


def cut_inside(schedule: Schedule, fused: Fusion, epilogues: bool = False) -> frozenset[int]:
    """The units of ports whose slices of a stack are no arrays: cut out inside kernels that read
    them (with `epilogues` it is not known of which that holds), or of stacks that are renewed."""
    if epilogues:
        return frozenset()
    program, found = schedule.program, set()
    for u, unit in enumerate(schedule.units):
        if program.instances[unit.root].port != "stream":
            continue
        stack, kinds = list(unit.outputs), set[str]()
        while stack:
            for r in schedule.readers[stack.pop()]:
                reader = schedule.units[r]
                root = program.instances[reader.root]
                if fused.within[r] or is_view(program, reader):
                    stack += reader.outputs
                elif r != u:
                    kinds.add(root.port or root.signature.fusion)
        if kinds and kinds <= {"loop", "reduce"}:
            found.add(u)
    return frozenset({*found, *renewed(schedule).values()})


@dataclass(frozen=True, slots=True)
class Turned:
    """What may be turned for products that read it or `parts` of it: these, with their operands,
    and the dims of the operand in the order in which they lie. It is turned from value `first` on,
    while it is `renewed`, and back in the end; or a copy of it is, beside it."""

    operands: tuple[tuple[OperationSignature, int, tuple[int, ...]], ...]
    first: FlatId
    parts: frozenset[FlatId]
    renewed: bool = True

    def within(self, block: Sequence[int]) -> bool:
        """Whether a product wants a device's block in another order. What is read of the block has
        the last of its dims; of what has more dims than the block, all of it is asked."""
        for x, p, order in self.operands:
            own = None
            if (n := len(order)) <= len(block):
                extents = dict(zip(order, block[len(block) - n :], strict=True))
                own = [extents[d] for d in range(n)]
            if turned_for_product(x, p, order, own) is not None:
                return True
        return False


def turned_while_renewed(schedule: Schedule, epilogues: bool = False) -> Mapping[FlatId, Turned]:
    """What is renewed part by part, and may be turned all along since products read it so: carries
    that loops leave, and new states; as they are, or one of a stack.

    A model of XLA's layout assignment (xla/service/gpu/transforms/layout_assignment.cc, and
    xla/service/layout_assignment.cc): a product wants the dims of an operand that it runs through
    as a batch one next to the other in memory, so those that it sums and all others, and none of
    the batch last. What else is done takes any order; so it is turned once before the first part is
    written, or the loop begins, and once when it leaves. Dims of one element have no place in that
    order: heads that are cut over as many devices are no batch on one of them. With `epilogues`, of
    XLA for TPUs, it is not known.
    """
    if epilogues:
        return {}
    program = schedule.program
    readers: dict[FlatId, list[InstanceId]] = {}
    for i, x in enumerate(program.instances):
        for v in dict.fromkeys(x.inputs):
            readers.setdefault(v, []).append(InstanceId(i))
    slices = {schedule.units[u].root for u in renewed(schedule).values()}
    ports = {program.instances[i].inputs for i in slices}
    found = {}
    for port in program.instances:
        turned: Turned | None
        if port.port == "carry":
            new, turned = port.outputs[-1], _carried(port, program, readers, ports)
        elif port.port == "state":
            new, turned = port.inputs[0], _renewed_state(port, program, readers)
        else:
            continue
        if turned is not None and turned.within(program.types[new].shape):
            found[new] = turned
    return found


_Readers = Mapping[FlatId, Sequence[InstanceId]]
_Operands = list[tuple[OperationSignature, int, tuple[int, ...]]]


def _carried(
    carry: Instance, program: FlatProgram, readers: _Readers, slices: Collection[tuple[FlatId, ...]]
) -> Turned:
    """What products read of a carry, as it is or slice by slice, with parts of it written anew."""
    seen, todo, operands = set[FlatId](), list(carry.outputs[:-1]), _Operands()
    while todo:
        v = todo.pop()
        seen.add(v)
        for x in (program.instances[i] for i in readers.get(v, ())):
            sliced = x.port == "stream" and x.inputs in slices
            if sliced or _writes_into(x, v) or _is_part(x, program):
                todo += [w for w in x.outputs if w not in seen]
            else:
                operands += _multiplied(x, v)
    return Turned(tuple(operands), carry.outputs[-1], frozenset(seen))


def _renewed_state(state: Instance, program: FlatProgram, readers: _Readers) -> Turned | None:
    """What products read of a state from when a part of it is first written on, as it is, or one of
    a stack; None of one that is not renewed in place, part by part."""
    (new,), (v,) = state.inputs, state.outputs
    first, parts, operands = None, set[FlatId](), _Operands()
    while True:
        seen, todo, writes = [v], [v], list[InstanceId]()
        while todo:
            w = todo.pop()
            for i in readers.get(w, ()):
                x = program.instances[i]
                if x.port == "state":
                    continue
                if w == v and _writes_into(x, v):
                    writes.append(i)
                    continue
                if _is_part(x, program):
                    seen += x.outputs
                    todo += x.outputs
                elif first is not None:
                    operands += _multiplied(x, w)
        if first is not None:
            parts.update(seen)
        if v == new or len(writes) != 1:
            break
        (v,) = program.instances[writes[0]].outputs
        first = v if first is None else first
    return Turned(tuple(operands), first, frozenset(parts)) if v == new and first else None


def _writes_into(x: Instance, v: FlatId) -> bool:
    """Whether an instance writes a part into value v."""
    into = None if x.port else x.signature.written_into
    return into is not None and x.inputs[into] == v


def _multiplied(x: Instance, v: FlatId) -> _Operands:
    """As which operands a product reads value v; none of what is no product."""
    if x.port or not x.signature.is_product:
        return []
    return [
        (x.signature, p, tuple(range(x.signature.input_types[p].rank)))
        for p, w in enumerate(x.inputs)
        if w == v
    ]


def _is_part(x: Instance, program: FlatProgram) -> bool:
    """Whether an instance takes one of a stack, or leaves out dims of one element before others."""
    if x.port or len(x.inputs) != 1 or len(x.outputs) != 1:
        return False
    (whole,), (part,) = ([program.types[v].shape for v in vs] for vs in (x.inputs, x.outputs))
    if x.signature.fusion == "view":
        return whole == (1,) * (len(whole) - len(part)) + part
    return x.signature.in_products == "one_of_stack" and (1, *whole[1:]) == part


def turned_for_product(
    signature: OperationSignature,
    p: int,
    written: Sequence[int],
    block: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """The order in which a product has the dims of operand p laid, if it does not take the one in
    which they lie, `written`, both from major to minor: None where it does. Of a device's `block`
    of the operand where that is given.

    It takes what it runs through as a batch, what it sums and what it keeps each in a row, no batch
    last; else it has the batch first, then for its left operand what it keeps, for its right one
    what it sums.
    """
    gemm = signature.gemm
    if (
        not signature.is_product
        or signature.by_vector
        or gemm is None
        or p not in (gemm.lhs, gemm.rhs)
    ):
        return None
    kinds: dict[int, str] = {}
    extents = signature.input_types[p].shape if block is None else block
    for k, (row, n) in enumerate(zip(signature.inputs[p].matrix, extents, strict=True)):
        for d, a in enumerate(row):
            if a and n > 1:
                kinds[k] = "batch" if d in gemm.batch else "summed" if d in gemm.k else "kept"
    lying = [k for k in written if k in kinds]
    runs = [kind for kind, _ in groupby(kinds[k] for k in lying)]
    if len(runs) == len(set(runs)) and runs[-1:] != ["batch"]:
        return None
    wanted = ["batch", "kept", "summed"] if p == gemm.lhs else ["batch", "summed", "kept"]
    return tuple(k for kind in wanted for k in sorted(kinds) if kinds[k] == kind)


@dataclass(frozen=True, slots=True)
class TurnedRead:
    """What unit `unit` reads of value v, as operand `port` of one of its instances, and gives to
    its product as operand `operand`, whose dims lie in an `order`: a copy in a `wanted` one."""

    unit: int
    instance: InstanceId
    port: int
    value: FlatId
    signature: OperationSignature
    operand: int
    order: tuple[int, ...]
    wanted: tuple[int, ...]

    @property
    def copy(self) -> tuple[FlatId, tuple[int, ...]]:
        """What products that want one order share."""
        return self.value, tuple(self.order.index(k) for k in self.wanted)


def turned_reads(
    schedule: Schedule, inside: Sequence[bool], before: Collection[FlatId] = ()
) -> list[TurnedRead]:
    """The reads for which XLA for GPUs gives products a copy in another order, as libraries take
    matrices: attention's queries, written token by token and head by head, are read head by head.

    What the product would else compute of them, the units `inside` it, is computed for the copy.
    What is stored of what goes element by element is written so as it is made, and what products
    read of states may be turned `before`, for as long as these are renewed.
    """
    instances = schedule.program.instances
    found = []
    for u, unit in enumerate(schedule.units):
        root = instances[unit.root]
        if root.port or not root.signature.is_product:
            continue
        for i, p, v in unit.reads:
            if v in before or not _is_made_straight(schedule, v, inside):
                continue
            place, order = _as_operand(schedule, unit, i, p)
            wanted = turned_for_product(root.signature, place, order) if order else None
            if wanted is not None:
                given = root.signature, place, tuple(order), wanted
                found.append(TurnedRead(u, i, p, v, *given))
    return found


@dataclass(frozen=True, slots=True)
class TurnedCopy:
    """The copies in another order that products read of a value: what the value is `turned` for,
    the `values` that they read, the units that are its `readers`, products or ports by which a loop
    reads it, and the array that is its `source`."""

    turned: Turned
    values: frozenset[FlatId]
    readers: frozenset[int]
    source: FlatId


def turned_copies(
    schedule: Schedule, inside: Sequence[bool], before: Collection[FlatId] = ()
) -> Mapping[FlatId, TurnedCopy]:
    """By value, the copies for products. What a loop reads from outside is turned once, before it:
    all of a stack of which it takes slices (xla/service/layout_assignment.cc gives what enters a
    loop the order that its body wants)."""
    found: dict[FlatId, list[tuple[TurnedRead, int, FlatId]]] = {}
    for x in turned_reads(schedule, inside, before):
        value, reader, source = _read_from(schedule, x, inside)
        found.setdefault(value, []).append((x, reader, source))
    return {
        v: TurnedCopy(
            Turned(tuple((x.signature, x.operand, x.order) for x, *_ in of), v, frozenset(), False),
            frozenset(x.value for x, *_ in of),
            frozenset(u for _, u, _ in of),
            of[0][2],
        )
        for v, of in found.items()
    }


def _read_from(
    schedule: Schedule, x: TurnedRead, inside: Sequence[bool]
) -> tuple[FlatId, int, FlatId]:
    """What is turned for a read, the unit that reads it, and what that is a view of: a port of a
    loop if what is read comes from there, as it is or by what the product computes of it."""
    program, computed = schedule.program, False
    value, reader, v, source = x.value, x.unit, x.value, x.value
    while True:
        u = schedule.producer[v]
        unit = schedule.units[u]
        root = program.instances[unit.root]
        if root.port in ("stream", "invariant") and not program.loop_of(root).is_branch:
            reader, value = u, v if root.port == "invariant" else root.inputs[0]
            v, computed = root.inputs[0], False
        elif is_view(program, unit) or _is_part(root, program):
            v = unit.reads[0][-1]
        elif inside[u] and not root.port and len(alike := _read_alike(program, unit)) == 1:
            (v,), computed = alike, True
        else:
            smaller = program.sizes[v] < program.sizes[x.value]
            if smaller and reader == x.unit and len(schedule.readers[x.value]) == 1:
                return v, reader, v  # the product computes it of the copy
            return value, reader, source
        source = source if computed else v


def _read_alike(program: FlatProgram, unit: Unit) -> set[FlatId]:
    """What a unit reads of the shape that it writes, element by element."""
    shape = program.types[unit.outputs[0]].shape
    return {
        v
        for i, p, v in unit.reads
        if program.types[v].shape == shape
        and read_as(program.instances[i].signature, p) == (False, True)
    }


def _is_made_straight(schedule: Schedule, v: FlatId, inside: Sequence[bool]) -> bool:
    """Whether what products read of a value is written otherwise for them by a kernel of its own:
    of what a kernel leaves straight, or they would compute."""
    u = schedule.producer[v]
    unit = schedule.units[u]
    root = schedule.program.instances[unit.root]
    if root.port in ("invariant", "stream"):
        return _is_made_straight(schedule, root.inputs[0], inside)
    if is_view(schedule.program, unit) and all(
        not read_as(schedule.program.instances[i].signature, 0)[0] for i in unit.members
    ):
        return _is_made_straight(schedule, unit.reads[0][-1], inside)
    straight = ("kernel", "reduce", "input", "state")
    return inside[u] or (root.port or root.signature.fusion) in straight


def turned_operands(reads: Sequence[TurnedRead]) -> frozenset[tuple[InstanceId, int]]:
    """The reads, by instance and operand, that pay a copy in another order: products that want one
    order share it, and the first of them pays."""
    first = {x.copy: (x.instance, x.port) for x in reversed(reads)}
    return frozenset(first.values())


def _as_operand(schedule: Schedule, unit: Unit, i: InstanceId, p: int) -> tuple[int, list[int]]:
    """As which operand the last operation of a unit reads what instance i of it reads as its
    operand p, and the dims of that operand as they lie in memory, from major to minor; none where
    something else is between than transposes, and reshapes of what lies straight."""
    instances = schedule.program.instances
    order = list(range(instances[i].signature.input_types[p].rank))
    while i != unit.root:
        (v,) = instances[i].outputs
        signature = instances[i].signature
        if order == sorted(order) and read_as(signature, p) == (False, True):
            order = list(range(signature.output_types[0].rank))
        elif signature.permutation is not None:
            order = [signature.permutation.index(k) for k in order]
        else:
            return p, []
        reading = [
            (r, q) for r in unit.members for q, w in enumerate(instances[r].inputs) if w == v
        ]
        if len(reading) != 1:
            return p, []
        ((i, p),) = reading
    return p, order


def window_dims(program: FlatProgram, tiles: Tiles | None) -> Mapping[FlatId, frozenset[int]]:
    """The values over which windows move, along some of their dims, and those of the same shape
    that are computed from them, or they from those, element by element; what enters or leaves the
    program lies as it does outside. Of rows that are added to something, and what they are added
    to, no more than these lie so: a copy of what lies otherwise is turned for them."""
    if tiles is None:
        return {}
    outside = {
        v
        for i in program.instances
        if i.port in ("input", "state", "output")
        for v in (*i.inputs, *i.outputs)
    }
    beside: dict[FlatId, set[FlatId]] = {}
    found: dict[FlatId, frozenset[int]] = {}
    fresh: list[FlatId] = []
    for i in program.instances:
        signature = i.signature
        if i.port or signature.fusion == "view":
            continue
        values = (*i.inputs, *i.outputs)
        if signature.fusion == "loop":
            shape = program.types[i.outputs[0]].shape
            alike = {v for v in values if program.types[v].shape == shape} - outside
            for v in alike:
                beside.setdefault(v, set()).update(alike)
            continue
        for v, dims in zip(values, signature.window_dims, strict=True):
            if dims and v not in outside:
                found[v] = found.get(v, frozenset()) | dims
                if not signature.initial:
                    fresh.append(v)
    while fresh:
        v = fresh.pop()
        for w in beside.get(v, ()):
            dims = found.get(w, frozenset()) | found[v]
            if found.get(w) != dims:
                found[w] = dims
                fresh.append(w)
    return found
