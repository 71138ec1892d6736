"""Siblings: kernels that read the same, of which XLA for GPUs makes one.

Its fusion of several outputs (xla/service/gpu/transforms/multi_output_fusion.cc, `FuseSiblings`;
gpu_fusible.cc, `ShapesCompatibleForMultiOutputFusion`) comes after all other fusion, and goes from
what is read to those that read it: any two of these become one kernel that go over as many
elements, one by one or to add them up, and of which neither needs what the other makes. Sums in
one kernel have the same dims. So a gradient of a mean squared error is made where its squares are
added up, and both gradients of a gated unit are made at once; modules compiled for H100 show it
(tests/schedule/test_traffic.py), as does one H100: x + 1 and 2 x of 256 MiB take 281 us, of which
two kernels would take 359.

Counted are those of which the later could run where the earlier one does, what both read at the
places that they go over. XLA merges some more: where the earlier one could wait, where both read
turned. Kernels that are custom to it, products of matrices that no library makes, softmax and norms
along rows, it merges with nothing, nor what reads the same of them alone; nor two operations that
nothing has been fused into. Whether two kernels read a value as it lies alike on
each device is for every plan to choose: where they do not, each reads its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .flatten import FlatProgram
from .inlining import read_as
from .schedules import Schedule
from .units import Unit


@dataclass(frozen=True)
class Shared:
    """What a unit reads by its read number `read` first, and what the kernel of an earlier `unit`
    has at hand, which reads `value` there, if both lie alike. Else it is read again: so many bytes
    as a `share` of its own, by so many kernels more."""

    read: int
    unit: int
    value: FlatId
    share: float
    launches: float


@dataclass(frozen=True)
class Reader:
    """A unit that reads `value`; `fused`: it is more than one operation."""

    unit: int
    value: FlatId
    fused: bool


@dataclass
class _Group:
    """Units that are one kernel: the elements it goes over, and who reads first what it reads
    there."""

    first: int
    elements: int
    sums: tuple[int, bool] | None  # how many are made by adding up, and whether along the last dims
    reads: dict[FlatId, Reader] = field(default_factory=dict)

    def has(self, values: Collection[FlatId], fused: bool) -> Reader | None:
        """Who reads all of some values, as one, and may be merged with who reads them."""
        readers = {self.reads.get(v) for v in values}
        (reader,) = readers if len(readers) == 1 else (None,)
        return reader if reader is not None and (fused or reader.fused) else None


def siblings(
    schedule: Schedule,
    kernels: Collection[int],
    inside: Sequence[bool],
    beside: Mapping[int, int],
    sources: Mapping[int, Collection[FlatId]],
    alone: Collection[int],
) -> dict[int, dict[FlatId, Reader]]:
    """The units that run in the kernel of an earlier one which reads the same: what they read of
    it, each with who has read it, or what that is computed from in the same places.

    `kernels` are those that may be merged: units that go element by element or add up, and are
    kernels of their own; those of all units are `inside` others that their readers compute;
    `beside` says which of the kernels have a sum in them; `sources` what each reads from memory.
    What those that are `alone` make leads nobody to who else reads it.
    """
    program, units = schedule.program, schedule.units
    groups: dict[tuple[int, FlatId], list[_Group]] = {}  # by body, and what they read
    found: dict[int, dict[FlatId, Reader]] = {}
    made_of = _made_of(schedule, inside)
    readers = Counter(v for u in kernels for v in sources[u] if program.types[v].shape)
    for u in sorted(kernels):
        unit = units[u]
        if not any(readers[v] > 1 for v in sources[u]):
            continue
        signature = program.instances[unit.root].signature
        elements = _elements(program, unit)
        sums = _sums(program.instances[units[beside[u]].root].signature) if u in beside else None
        if signature.fusion == "reduce":
            sums = _sums(signature)
        own = {
            v: made_of[v]
            for v in sorted(read_at_its_places(program, unit))
            if program.types[v].size == elements
        }
        ready = max((schedule.producer[v] for v in sources[u]), default=-1)
        fused = u in beside or _is_fused(program, unit, sources[u])
        candidates = {
            id(group): group
            for values in own.values()
            for w in values
            for group in groups.get((unit.body, w), ())
        }
        most, taken, chosen = 0, {}, _Group(u, elements, sums)
        for group in candidates.values():
            if ready >= group.first or elements != group.elements:
                continue
            if sums is not None and group.sums not in (None, sums):
                continue
            read = {v: group.has(values, fused) for v, values in own.items()}
            shared = {v: r for v, r in read.items() if r is not None and _is_alike(program, v, r)}
            if all(schedule.producer[w] in alone for v in shared for w in own[v]):
                continue
            size = sum(program.types[v].nbytes for v in shared)
            if size > most:
                most, taken, chosen = size, shared, group
        if taken:
            found[u] = taken
            chosen.sums = chosen.sums or sums
        for v, values in own.items():
            for w in values - chosen.reads.keys():
                chosen.reads[w] = Reader(u, v, fused)
                groups.setdefault((unit.body, w), []).append(chosen)
    return found


def may_merge(program: FlatProgram, unit: Unit) -> bool:
    """Whether a kernel may be one with others: it goes element by element, or adds up one array in
    one pass."""
    root = program.instances[unit.root].signature
    if root.fusion == "loop":
        sizes = {program.types[v].size for v in unit.outputs}
        return len(sizes) == 1 and root.written_into is None
    adds = root.fusion == "reduce" and len(root.input_types) == len(root.output_types) == 1
    return adds and not any(root.window_dims) and not adds_exponentials(root)


def adds_exponentials(signature: OperationSignature) -> bool:
    """Whether a reduction needs the greatest of all that it adds up before it adds."""
    return signature.fusion == "reduce" and any(
        d.role == "reduce" and d.monoid == "logaddexp" for d in signature.index
    )


def _is_alike(program: FlatProgram, v: FlatId, reader: Reader) -> bool:
    """Whether two values have the same dims, so that it can be told whether they lie alike."""
    return program.types[v].shape == program.types[reader.value].shape


def _made_of(schedule: Schedule, inside: Sequence[bool]) -> list[frozenset[FlatId]]:
    """What lies in memory that every value is computed from by its readers, element by element, all
    in arrays of its own dims; the value itself where it is more than that."""
    program = schedule.program
    found = [frozenset({FlatId(v)}) for v in range(len(program.types))]
    for u, unit in enumerate(schedule.units):
        if not inside[u] or len(unit.outputs) != 1:
            continue
        (v,) = unit.outputs
        shape = program.types[v].shape
        read = {w for *_, w in unit.reads if program.types[w].shape}
        here = read_at_its_places(program, unit)
        if read and read <= here and all(program.types[w].shape == shape for w in read):
            found[v] = frozenset().union(*(found[w] for w in read))
    return found


def read_at_its_places(program: FlatProgram, unit: Unit) -> frozenset[FlatId]:
    """The values from outside that a unit reads nowhere but at the places that it goes over, one
    after another: those of what it makes, or of what it adds up."""
    makers = {v: i for i in unit.members for v in program.instances[i].outputs}
    moved: set[int] = set()
    here, elsewhere = set[FlatId](), set[FlatId]()
    for i in reversed(unit.members):
        instance = program.instances[i]
        adds = i == unit.root and instance.signature.fusion == "reduce"
        for p, v in enumerate(instance.inputs):
            turned, aligned = (False, True) if adds else read_as(instance.signature, p)
            if not turned and aligned and i not in moved:
                here.add(v)
            elif v in makers:
                moved.add(makers[v])
            else:
                elsewhere.add(v)
    return frozenset(here - elsewhere - makers.keys())


def _elements(program: FlatProgram, unit: Unit) -> int:
    signature = program.instances[unit.root].signature
    if signature.fusion == "reduce":
        return signature.input_types[0].size
    return program.types[unit.outputs[0]].size


def _sums(signature: OperationSignature) -> tuple[int, bool]:
    return signature.output_types[0].size, ends_in_sums(signature)


def ends_in_sums(signature: OperationSignature) -> bool:
    """Whether the dims that a reduction sums are the last ones of what it reads."""
    summed = [
        any(a and signature.index[d].role == "reduce" for d, a in enumerate(row))
        for row in signature.inputs[0].matrix
    ]
    return summed == sorted(summed)


def _is_fused(program: FlatProgram, unit: Unit, sources: Collection[FlatId]) -> bool:
    """Whether a kernel is more than one operation on arrays; one on an array and a number repeats
    that first."""
    root = program.instances[unit.root]
    alone = len(unit.members) == 1 and set(sources) == set(root.inputs)
    return not alone or any(not program.types[v].shape for v in root.inputs)
