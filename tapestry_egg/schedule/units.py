"""Units: which instances run as one kernel, and what is materialised.

A model of what XLA's fusion does: views never move data, elementwise chains run inside their only
reader, reductions take their elementwise producers in, contractions and other kernels read and
write memory. Only what crosses units exists in memory, and only what exists in memory can be copied
to another layout. What a kernel would read along several of its dims, as rows and as columns, is
therefore no part of it: each read has its own layout.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from tapestry_egg.graph.ids import BodyId, FlatId, InstanceId
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .flatten import FlatProgram, Instance

#: A producer this many times smaller than what it expands to is cheaper to repeat than to store: a
#: reader then reads a quarter of the bytes at most. No measurement of the number is kept.
EXPANSION = 4


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

    @cached_property
    def root(self) -> InstanceId:
        return self.members[-1]


def is_view(program: FlatProgram, unit: Unit) -> bool:
    """Whether a unit only says how to see what lies in memory; no port does."""
    root = program.instances[unit.root]
    if root.port or root.signature.fusion != "view":
        return False
    return all([program.instances[i].signature.fusion == "view" for i in unit.members])


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
    seen: list[Dims] = [()] * len(instances)  # along which of its unit's dims each dim lies
    leaves = [i.port in ("state", "output") for i in instances]
    for i in range(len(instances) - 1, -1, -1):  # what asks how a result lies leaves with it
        if instances[i].signature.means == "layout":
            own = readers[instances[i].outputs[0]]
            leaves[i] = bool(own) and all([leaves[r] for r in own])
    for i in range(len(instances) - 1, -1, -1):
        u = _unit_to_fuse_into(program, i, readers, unit_of, roots, inline, leaves)
        ways: set[Dims] = set()
        if u >= 0:
            using = [r for r in readers[instances[i].outputs[0]] if not leaves[r]]
            ways = _seen_by(instances, i, using, seen)
        u = -1 if len(ways) > 1 else u
        seen[i] = ways.pop() if u >= 0 else _own_dims(instances[i], i)
        fusion = instances[i].signature.fusion
        if u >= 0:
            own = readers[instances[i].outputs[0]]
            unit_of[i] = u
            inline[i] = fusion == "loop" or all([inline[r] for r in own if not leaves[r]])
        else:
            # A value exists as it is asked for, however those beside it lie.
            asked = instances[i].signature.means == "layout"
            unit_of[i] = len(roots)
            roots.append(i)
            inline[i] = not instances[i].port and fusion in _LOOPS and not asked
    members: dict[int, list[InstanceId]] = defaultdict(list)
    for i, u in enumerate(unit_of):
        members[u].append(InstanceId(i))
    leaving = {v for i, leaf in zip(instances, leaves, strict=True) if leaf for v in i.inputs}
    units = [unit_with(program, members[u], leaving) for u in range(len(roots))]
    units.sort(key=lambda u: u.members[-1])
    return units


# What producers may run inside of, and what may run inside its readers.
_LOOPS, _INNER = ("loop", "reduce", "view"), ("loop", "view")


#: Per dim of a value, along which dims of its unit it lies, each by an instance and a number.
Dims = tuple[frozenset[tuple[int, int]], ...]


def _own_dims(instance: Instance, i: int) -> Dims:
    """The dims of what the root of a unit makes."""
    shape = instance.signature.output_types[0].shape if instance.outputs else ()
    return tuple([frozenset(((i, d),)) for d in range(len(shape))])


def _seen_by(
    instances: Sequence[Instance], i: int, using: Sequence[int], seen: Sequence[Dims]
) -> set[Dims]:
    """Along which dims of their unit some readers of an instance see what that makes."""
    (v,) = instances[i].outputs
    found = set()
    for r in using:
        reader, of = instances[r], seen[r]
        for p, w in enumerate(reader.inputs):
            if w == v:
                along = _along(reader.signature, p)
                found.add(of if along is None else tuple([_joined(of, r, d) for d in along]))
    return found


def _joined(of: Dims, r: int, dims: tuple[int, ...]) -> frozenset[tuple[int, int]]:
    """Along which dims of a unit some dims of its member r lie together."""
    if len(dims) == 1 and dims[0] >= 0:
        return of[dims[0]]
    return frozenset().union(*[of[d] if d >= 0 else ((r, d),) for d in dims])


def _along(signature: OperationSignature, p: int) -> tuple[tuple[int, ...], ...] | None:
    """Per dim of operand p, along which dims of the result it lies; -1 - e stands for an index dim
    e that the result has not. None where these are its own dims, in their order. The signature
    remembers it."""
    known: dict[int, tuple[tuple[int, ...], ...] | None]
    known = signature.__dict__.setdefault("_along", {})
    if p not in known:
        rows = signature.outputs[0].matrix if signature.outputs else ()
        at: dict[int, list[int]] = {}
        for d, row in enumerate(rows):
            for e, a in enumerate(row):
                if a:
                    at.setdefault(e, []).append(d)
        found = tuple(
            [
                tuple([d for e, a in enumerate(row) if a for d in at.get(e, [-1 - e])])
                if n > 1
                else ()
                for n, row in zip(
                    signature.input_types[p].shape, signature.inputs[p].matrix, strict=True
                )
            ]
        )
        known[p] = None if found == tuple([(d,) for d in range(len(rows))]) else found
    return known[p]


def _unit_to_fuse_into(
    program: FlatProgram,
    i: int,
    readers: Sequence[Sequence[int]],
    unit_of: Sequence[int],
    roots: Sequence[int],
    inline: Sequence[bool],
    leaves: Sequence[bool],
) -> int:
    """The unit of all readers of an instance, if it runs inside that unit; -1 if it is a root."""
    instances = program.instances
    instance = instances[i]
    if instance.port or len(instance.outputs) != 1 or not _may_fuse(instance.signature):
        return -1
    (v,) = instance.outputs
    everyone = readers[v]
    using = [r for r in everyone if not leaves[r]]
    if not using:
        return -1
    u, is_view = unit_of[using[0]], instance.signature.fusion == "view"
    for r in using:
        reader = instances[r]
        if reader.port or unit_of[r] != u or not (is_view or inline[r]):
            return -1
        signature = reader.signature
        if signature.stored or signature.means == "layout":  # it reads only what is in memory
            return -1
        if signature.writes and _is_written_into(program, i, r):
            return -1
        if signature.reads and _reads_a_part(reader, v):
            return -1
    if len(using) < len(everyone) and (
        is_view or not _same_loop(program, instance, instances[roots[u]])
    ):
        return -1
    return u


def _may_fuse(signature: OperationSignature) -> bool:
    """Whether an operation may run inside what reads it; the signature remembers it."""
    known: bool | None = signature.__dict__.get("_may_fuse")
    if known is None:
        apart = signature.means == "layout" or signature.dilates or _collapses(signature)
        known = signature.__dict__["_may_fuse"] = signature.fusion in _INNER and not apart
    return known


def _is_written_into(program: FlatProgram, i: int, r: int) -> bool:
    """Whether instance r writes a part into an array that instance i makes of others: in place,
    if that is in memory. What is filled with a number is filled as it is written."""
    maker, reader = program.instances[i], program.instances[r]
    into = [reader.inputs[p] for p in reader.signature.writes[:1]]
    made = maker.outputs[0] in into and maker.signature.fusion != "view"
    return made and any(program.types[v].shape for v in maker.inputs)


def _reads_a_part(reader: Instance, v: FlatId) -> bool:
    """Whether a loop reads few elements of a value: it computes these alone."""
    if reader.signature.fusion != "loop":
        return False
    parts = zip(reader.inputs, reader.signature.reads, strict=False)
    return any([p is not None and w == v for w, p in parts])


def two_kernels(program: FlatProgram, unit: Unit, value: FlatId) -> tuple[Unit, Unit] | None:
    """The kernel that makes a value inside a unit, with all that leads to it, and the rest; None
    where something else leads from the one to the other, or out of the first.

    What a kernel computes on the way is nowhere. Where a sum in the middle of it is left partial by
    its operands, it can so be written, combined over devices once, and read by the rest.
    """
    instances = program.instances
    maker = {v: i for i in unit.members for v in instances[i].outputs}
    if value not in maker or maker[value] == unit.root or value in unit.outputs:
        return None
    first, stack = set(), [maker[value]]
    while stack:
        i = stack.pop()
        if i not in first:
            first.add(i)
            stack += [maker[v] for v in instances[i].inputs if v in maker]
    made = {v for i in first for v in instances[i].outputs} - {value}
    rest = [i for i in unit.members if i not in first]
    if not made.isdisjoint(unit.outputs) or any(
        not made.isdisjoint(instances[i].inputs) for i in rest
    ):
        return None
    crossing = tuple(
        (i, p, v) for i in rest for p, v in enumerate(instances[i].inputs) if v == value
    )
    return (
        Unit(
            tuple(i for i in unit.members if i in first),
            tuple(r for r in unit.reads if r[0] in first),
            (value,),
            unit.body,
        ),
        Unit(
            tuple(rest),
            (*(r for r in unit.reads if r[0] not in first), *crossing),
            unit.outputs,
            unit.body,
        ),
    )


def _collapses(signature: OperationSignature) -> bool:
    """Whether an operation reduces what it reads to something much smaller.

    Such a value is cheap to hold, and where a cut reduce dim leaves it partial it must be, for it
    to be reduced before what follows.
    """
    return signature.reduces and signature.input_bytes >= EXPANSION * signature.output_bytes


def _same_loop(program: FlatProgram, one: Instance, other: Instance) -> bool:
    """Whether two instances can write their outputs from one loop."""
    shapes = {program.types[v].shape for v in (*one.outputs, *other.outputs)}
    return len(shapes) == 1 and other.signature.fusion == "loop"


def unit_with(program: FlatProgram, members: list[InstanceId], leaving: set[FlatId]) -> Unit:
    """The unit of some members, in program order; `leaving` are values that are materialised."""
    instances = program.instances
    root = instances[members[-1]]
    inside = {v for i in members[:-1] for v in instances[i].outputs}
    reads = tuple(
        [(i, p, v) for i in members for p, v in enumerate(instances[i].inputs) if v not in inside]
    )
    left = sorted(inside & leaving) if inside else ()
    return Unit(tuple(members), reads, (*root.outputs, *left), root.body)
