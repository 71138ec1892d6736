"""The schedule: which operations run as one kernel, in which order, and what is materialised.

A model of what XLA's fusion does: views never move data, elementwise chains run inside their only
reader, reductions take their elementwise producers in, contractions and other kernels read and
write memory. A *unit* is such a group of instances; only what crosses units exists in memory, and
only what exists in memory can be copied to another layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.graph.ids import BodyId, FlatId, InstanceId, UnitId
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.tracing.constraints import KERNEL as CONSTRAINT

from .flatten import FlatProgram, Instance, flatten

# A producer this many times smaller than what it expands to is cheaper to repeat than to store: a
# reader then reads a quarter of the bytes at most. No measurement of the number is kept.
_EXPANSION = 4
# Bytes that must be freed for an operation to run before its turn; no measurement of the number is
# kept. The updates of biases and
# scales stay together at the end, so that the compiler can merge their collectives.
_SMALL = 1 << 16

#: Sets of values that are sent at once.
Together = Sequence[Collection[FlatId]]


@dataclass(frozen=True)
class Unit:
    """Instances that run as one kernel.

    The root's outputs are materialised, and those of members that leave the program on the way
    (an optimizer's new moments, made in the same loop as the new parameters). `reads` lists what
    comes from outside as (instance, operand port, value).
    """

    members: tuple[InstanceId, ...]  # in program order; the root is last
    reads: tuple[tuple[InstanceId, int, FlatId], ...]
    outputs: tuple[FlatId, ...]
    body: BodyId

    @property
    def root(self) -> InstanceId:
        return self.members[-1]


@dataclass(frozen=True)
class Schedule:
    """Units in the order they run. `readers[v]` are the units that read value v, in that order."""

    program: FlatProgram
    units: tuple[Unit, ...]
    producer: tuple[UnitId, ...]  # value -> unit that makes it, -1 inside a unit or never
    readers: tuple[tuple[UnitId, ...], ...]


def repeat_cheap(graph: BlockGraph) -> BlockGraph:
    """Give every reader its own copy of views and of expansions of something small.

    Compilers repeat such operations inside each reading kernel instead of storing them; making
    the copies explicit lets each reader choose its own layout for them. Values are unchanged.
    """
    signatures = [_signature(graph, op) for op in graph.operations]
    cheap = _cheap(graph, signatures)
    last_reader_is_output = set(graph.outputs)
    values = list(graph.values)
    pending: dict[int, list[Operation]] = defaultdict(list)  # operation -> copies placed before it
    operations = [
        replace(op, regions=tuple(repeat_cheap(r) for r in op.regions)) if op.regions else op
        for op in graph.operations
    ]
    producers = graph.producers()
    order: list[Operation] = []
    first_reader: dict[int, int] = {}
    for i, op in enumerate(operations):
        for v in op.inputs:
            first_reader.setdefault(v, i)

    def own_copy(v: int, reader: int, made: dict[int, int]) -> int:
        """The value that `reader` should read instead of v: a copy of v's cheap producer chain."""
        p = producers.get(v)
        if p is None or not cheap[p]:
            return v
        if v in made:
            return made[v]
        op = operations[p]
        inputs = tuple(own_copy(u, reader, made) for u in op.inputs)
        if first_reader.get(v) == reader and inputs == op.inputs and v not in last_reader_is_output:
            made[v] = v
            return v
        values.append(values[v])
        made[v] = len(values) - 1
        pending[reader].append(_reading(op, inputs, (made[v],)))
        return made[v]

    rewritten: list[Operation] = []
    for i, op in enumerate(operations):
        if cheap[i]:
            rewritten.append(op)
            continue
        made: dict[int, int] = {}
        inputs = tuple([own_copy(v, i, made) for v in op.inputs])
        rewritten.append(op if inputs == op.inputs else _reading(op, inputs, op.outputs))
    for i, op in enumerate(rewritten):
        order.extend(pending.get(i, ()))
        order.append(op)
    return without_unread(replace(graph, values=tuple(values), operations=tuple(order)))


def _reading(op: Operation, inputs: tuple[int, ...], outputs: tuple[int, ...]) -> Operation:
    """The same operation on other values of the same types."""
    other = replace(op, inputs=inputs, outputs=outputs)
    registry.remember(other, op)
    return other


def _signature(graph: BlockGraph, op: Operation) -> OperationSignature | None:
    if op.regions:
        return None
    return registry.signature_of(
        op,
        tuple([graph.values[v] for v in op.inputs]),
        tuple([graph.values[v] for v in op.outputs]),
    )


def _cheap(graph: BlockGraph, signatures: Sequence[OperationSignature | None]) -> list[bool]:
    source: dict[int, int] = {}  # value -> bytes it takes to make it again
    cheap = []
    for op, s in zip(graph.operations, signatures, strict=True):
        is_cheap = False
        if s is not None and s.fusion in ("view", "loop") and not op.effectful:
            need = sum(
                [source[v] if v in source else graph.values[v].nbytes for v in set(op.inputs)]
            )
            is_cheap = s.fusion == "view" or need * _EXPANSION <= s.output_bytes
            # What a constraint asks for exists once: a copy for each reader would move it for each.
            is_cheap = is_cheap and len(op.outputs) == 1 and op.kernel != CONSTRAINT
        cheap.append(is_cheap)
        if is_cheap:
            source[op.outputs[0]] = need
    return cheap


def schedule(program: FlatProgram, together: Together = ()) -> Schedule:
    """Group the instances of a flat program into units and order them.

    Who reads one of the values that are sent `together` waits for all of them. Raises PlanError
    where some of these are made from what reads others.
    """
    return _arranged(program, _eager(program, fuse(program), together))


def scheduled(graph: BlockGraph, feedback: Mapping[int, int]) -> Schedule:
    """The schedule of a program whose cheap operations are repeated and which is in its order, as
    plans have it; `feedback` as `feedback_pairs` gives."""
    return schedule(flatten(in_order(repeat_cheap(graph), feedback), feedback))


def in_order(graph: BlockGraph, feedback: Mapping[int, int]) -> BlockGraph:
    """The same program with its operations in the order in which the schedule runs them.

    Plans count time in operations, and lowering emits them one after another; after this the
    positions in the graph and those in the schedule agree, unit by unit.
    """
    order = order_of(flatten(graph, feedback))
    return replace(graph, operations=tuple(graph.operations[k] for k in order))


def order_of(program: FlatProgram, together: Together = ()) -> list[int]:
    """The operations of a program itself (not of its regions) in the order of `schedule`."""
    units = _eager(program, fuse(program), together)
    return [k for group in operation_groups(program, units) for k in group]


def operation_groups(program: FlatProgram, units: Sequence[Unit]) -> list[list[int]]:
    """Operations of the program itself (not of its regions) that run together, in order."""
    region: dict[int, int] = {}
    for (body, operation), (start, stop) in program.spans.items():
        if body == 0:
            region.update(dict.fromkeys(range(start, stop), operation))
    groups: list[list[int]] = []
    seen: set[int] = set()
    for unit in units:
        group = []
        for i in unit.members:
            instance = program.instances[i]
            k = region.get(i, instance.operation if instance.body == 0 else -1)
            if k >= 0 and k not in seen:
                seen.add(k)
                group.append(k)
        if group:
            groups.append(group)
    return groups


def fuse(program: FlatProgram) -> list[Unit]:
    """The units of a flat program, in program order."""
    instances = program.instances
    readers: list[list[int]] = [[] for _ in program.types]
    for i, instance in enumerate(instances):
        for v in dict.fromkeys(instance.inputs):
            readers[v].append(i)
    unit_of = [-1] * len(instances)
    inline = [False] * len(instances)  # may a producer's loop run inside this instance?
    roots: list[int] = []
    leaves = [i.port in ("state", "output") for i in instances]
    for i in range(len(instances) - 1, -1, -1):  # what asks how a result lies leaves with it
        if instances[i].signature.kernel == CONSTRAINT:
            own = readers[instances[i].outputs[0]]
            leaves[i] = bool(own) and all([leaves[r] for r in own])
    for i in range(len(instances) - 1, -1, -1):
        instance = instances[i]
        fusion = instance.signature.fusion
        using: list[int] = []
        inner = not instance.port and len(instance.outputs) == 1 and fusion in ("view", "loop")
        # A value exists as it is asked for, however those beside it lie.
        asked = instance.signature.kernel == CONSTRAINT
        inner = inner and not asked
        if inner:
            everyone = readers[instance.outputs[0]]
            using = [r for r in everyone if not leaves[r]]
            inner = bool(using) and not any([instances[r].port for r in using])
            inner = inner and len({unit_of[r] for r in using}) == 1
            if inner and len(using) < len(everyone):
                root = instances[roots[unit_of[using[0]]]]
                inner = fusion == "loop" and _same_loop(program, instance, root)
            inner = inner and not any([instances[r].signature.kernel == CONSTRAINT for r in using])
            inner = inner and (fusion == "view" or all([inline[r] for r in using]))
            inner = inner and not _collapses(instance.signature)
        if inner:
            unit_of[i] = unit_of[using[0]]
            inline[i] = fusion == "loop" or all([inline[r] for r in using])
        else:
            unit_of[i] = len(roots)
            roots.append(i)
            inline[i] = not instance.port and fusion in ("loop", "reduce", "view") and not asked
    members: dict[int, list[InstanceId]] = defaultdict(list)
    for i, u in enumerate(unit_of):
        members[u].append(InstanceId(i))
    leaving = {v for i, leaf in zip(instances, leaves, strict=True) if leaf for v in i.inputs}
    units = [_unit(program, members[u], leaving) for u in range(len(roots))]
    units.sort(key=lambda u: u.root)
    return units


def _eager(program: FlatProgram, units: Sequence[Unit], together: Together = ()) -> list[Unit]:
    """Program order, except that a unit that frees more than it makes runs as soon as it can.

    Memory-aware compilers order so too: an optimizer step that consumes a gradient and writes into
    donated buffers runs when the gradient is there, not after all the others. A region's units
    stay together. What reads one of several values that are sent `together` waits for them all.
    """
    groups, group_of = _groups(program, units)
    maker = {v: group_of[u] for u, unit in enumerate(units) for v in unit.outputs}
    late = ("state", "output")
    reads: list[set[FlatId]] = []
    for group in groups:
        ports = [program.instances[units[u].root].port in late for u in group]
        reads.append(
            {
                v
                for u, port in zip(group, ports, strict=True)
                if not port
                for _, _, v in units[u].reads
            }
        )
    # How many other groups each must wait for; at nought it may run before its turn.
    sent = {v: values for values in together for v in values}
    after = [
        {maker[v] for v in vs if v in maker} - {g}
        | {maker[w] for v in vs for w in sent.get(v, ()) if w in maker and w != v}
        for g, vs in enumerate(reads)
    ]
    waiting = [len(others) for others in after]
    followers: dict[int, set[int]] = defaultdict(set)
    users: dict[int, set[int]] = defaultdict(set)
    for g, (vs, others) in enumerate(zip(reads, after, strict=True)):
        for v in vs:
            users[v].add(g)
        for other in others:
            followers[other].add(g)
    # A state port holds the state that enters and the value that takes its place in the end. The
    # new one is no growth once the last reader of the old one has run: it is written over it.
    renewed = {
        program.instances[u.root].inputs[0]: program.instances[u.root].outputs[0]
        for u in units
        if program.instances[u.root].port == "state"
    }
    # What is in memory from beginning to end, or must be there at the end: no reader frees it.
    resident = {
        v
        for u in units
        if program.instances[u.root].port in ("state", "input", "constant")
        for v in u.outputs
    }
    leaving = {
        v for u in units if program.instances[u.root].port == "output" for _, _, v in u.reads
    }
    left = {v: len(gs) for v, gs in users.items()}  # readers that have not run yet
    done = [False] * len(groups)
    order: list[Unit] = []

    def change(g: int) -> int:
        """Bytes alive after group g, less those alive before."""
        made = {v for u in groups[g] for v in units[u].outputs}
        grown = sum(
            program.sizes[v]
            for v in made
            # A new state takes the old one's place, once nothing else reads the old one.
            if (left.get(v) and v not in renewed)
            or (v in renewed and left.get(renewed[v], 0) > (renewed[v] in reads[g]))
        )
        freed = sum(
            program.sizes[v]
            for v in reads[g]
            if left[v] == 1 and v not in resident and v not in leaving
        )
        return grown - freed

    def run(g: int) -> None:
        # Group g, then whatever can free memory now, then what those enable, before the next group
        # in program order. Only groups that free are moved, and only to an earlier place, so all
        # else keeps the user's order.
        stack = [g]
        while stack:
            now = stack.pop()
            if done[now]:
                continue
            done[now] = True
            order.extend(units[u] for u in groups[now])
            for v in reads[now]:
                left[v] -= 1
            ready = []
            for f in sorted(followers[now], reverse=True):
                waiting[f] -= 1
                if waiting[f] == 0 and not done[f]:
                    ready.append(f)
            freeing = [f for f in ready if f in overdue or change(f) < -_SMALL]
            # What became ready earlier may free memory now that another reader is gone.
            for v in reads[now]:
                if left[v] == 1:
                    (last,) = [u for u in users[v] if not done[u]] or [now]
                    if not done[last] and waiting[last] == 0 and change(last) < -_SMALL:
                        freeing.append(last)
            stack.extend(dict.fromkeys(freeing))

    overdue: set[int] = set()  # groups whose turn came before what is sent with what they read
    for g in range(len(groups)):
        if waiting[g]:
            overdue.add(g)
        else:
            run(g)
    if not all(done):
        raise PlanError("values that are sent together are made from what reads others of them")
    return order


def _groups(program: FlatProgram, units: Sequence[Unit]) -> tuple[list[list[int]], list[int]]:
    """Units that must stay together, in order: those of one outermost region, others alone."""
    outermost = sorted(
        span for (body, _), span in program.spans.items() if program.bodies[body].parent < 0
    )
    groups: list[list[int]] = []
    group_of: list[int] = []
    region: dict[tuple[int, int], int] = {}
    for u, unit in enumerate(units):
        span = next(((a, b) for a, b in outermost if a <= unit.root < b), None)
        if span is None or span not in region:
            groups.append([])
            if span is not None:
                region[span] = len(groups) - 1
        g = region[span] if span is not None else len(groups) - 1
        groups[g].append(u)
        group_of.append(g)
    return groups, group_of


@dataclass(frozen=True)
class Fusion:
    """What XLA computes inside the readers instead of storing it.

    `within[u]`: what unit u makes never exists in memory, every reader computes it for itself.
    `operands[u]`: the stored values that unit u therefore reads in the end.
    """

    within: tuple[bool, ...]
    operands: tuple[frozenset[FlatId], ...]


def fusion(schedule: Schedule) -> Fusion:
    """Which units are computed again inside each of their readers.

    A model of XLA's priority fusion for GPUs (xla/service/gpu/transforms/priority_fusion.cc): an
    elementwise producer is fused into all of its readers at once, or into none. That needs readers
    that are elementwise or reductions themselves (not contractions, collectives or the program's
    boundary), and must not cost more memory traffic: apart, the producer's operands are read, its
    result is written and read by every reader; within, every reader reads the operands instead,
    where it does not read them already. So GELU's steps are recomputed in the backward pass from
    one product, while a sum of two stored values with four readers is stored too.
    """
    program, units = schedule.program, schedule.units
    size = program.sizes
    operands = [{v for _, _, v in unit.reads} for unit in units]
    readers: list[set[int]] = [set() for _ in program.types]
    for u, unit in enumerate(units):
        for _, _, v in unit.reads:
            readers[v].add(u)
    within = [False] * len(units)

    def kind(u: int) -> str:
        root = program.instances[units[u].root]
        return root.port or root.signature.fusion

    for u, unit in enumerate(units):
        if len(unit.outputs) != 1 or kind(u) not in ("loop", "view"):
            continue
        (v,) = unit.outputs
        using = readers[v]
        if not using or any(
            kind(r) not in ("loop", "view", "reduce") or units[r].body != unit.body for r in using
        ):
            continue
        apart = sum(size[w] for w in operands[u]) + size[v] * (1 + len(using))
        inside = sum(size[w] for r in using for w in operands[u] - operands[r])
        if inside > apart:
            continue
        within[u] = True
        for r in using:
            operands[r] = (operands[r] - {v}) | operands[u]
        for w in operands[u]:
            readers[w] = (readers[w] - {u}) | using
    return Fusion(tuple(within), tuple(frozenset(x) for x in operands))


def _collapses(signature: OperationSignature) -> bool:
    """Whether an operation reduces what it reads to something much smaller.

    Such a value is cheap to hold, and where a cut reduce dim leaves it partial it must be, for it
    to be reduced before what follows.
    """
    return signature.reduces and signature.input_bytes >= _EXPANSION * signature.output_bytes


def _same_loop(program: FlatProgram, one: Instance, other: Instance) -> bool:
    """Whether two instances can write their outputs from one loop."""
    shapes = {program.types[v].shape for v in (*one.outputs, *other.outputs)}
    return len(shapes) == 1 and other.signature.fusion == "loop"


def _unit(program: FlatProgram, members: list[InstanceId], leaving: set[FlatId]) -> Unit:
    inside = {v for i in members[:-1] for v in program.instances[i].outputs}
    reads = tuple(
        (i, p, v)
        for i in members
        for p, v in enumerate(program.instances[i].inputs)
        if v not in inside
    )
    root = program.instances[members[-1]]
    outputs = (*root.outputs, *(v for v in sorted(inside) if v in leaving))
    return Unit(tuple(members), reads, outputs, root.body)


def _arranged(program: FlatProgram, units: Sequence[Unit]) -> Schedule:
    producer = [UnitId(-1)] * len(program.types)
    readers: list[list[UnitId]] = [[] for _ in program.types]
    for k, unit in enumerate(units):
        u = UnitId(k)
        for v in unit.outputs:
            producer[v] = u
        for v in dict.fromkeys(v for _, _, v in unit.reads):
            readers[v].append(u)
    return Schedule(program, tuple(units), tuple(producer), tuple(tuple(r) for r in readers))
