"""Values that have arrays of their own: what is compared with the greatest or least of itself, and
what scattered elements were written into.

A compiler that computes a value inside both kernels that read it, the one that finds its maximum
and the one that looks for it, may round it in two ways (it fuses a product and a sum into one
operation in one of them). The maximum is then equal to no element: such a value has to exist once.

Over an array into which scattered elements were written where it lies XLA writes nothing. What it
was and what it is are two values of one buffer, and the simulator of XLA's heap
(`heap_simulator.cc`, jaxlib 0.10) has a buffer of several values shared with no kernel that goes
element by element. Sums that are scattered into zeros and then added to something XLA's simplifier
scatters into that instead, where it sees both at once: no kernel stands between the two, since
lowering has kernels wait for others behind barriers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .flatten import FlatProgram, Instance
from .schedules import Schedule


def stored_once(program: FlatProgram) -> frozenset[FlatId]:
    """Values that no kernel computes for itself: those that a barrier reads, and those that are
    compared with elements of themselves."""
    barred = {x.inputs[p] for x in program.instances for p in x.signature.stored}
    return self_compared(program) | barred


def self_compared(program: FlatProgram) -> frozenset[FlatId]:
    """Floats, computed element by element, that are compared with elements selected of them."""
    instances = program.instances
    compares = [x for x in instances if not x.port and _compares(x.signature)]
    compares = [x for x in compares if len({*x.inputs}) > 1]
    if not compares:
        return frozenset()
    maker = {v: x for x in instances for v in x.outputs}
    found: set[FlatId] = set()
    for x in compares:
        (one, one_selected), (other, other_selected) = (_sources(v, maker) for v in x.inputs)
        found |= (one & other_selected) | (other & one_selected)
    return frozenset(v for v in found if v in maker and _goes_by_elements(maker[v]))


def _compares(signature: OperationSignature) -> bool:
    """Whether an operation compares two floats, element by element: makes flags of them."""
    flags = all(t.dtype == "bool" for t in signature.output_types)
    floats = [_is_rounded(t.dtype) for t in signature.input_types]
    return signature.fusion == "loop" and flags and floats == [True, True]


def _sources(v: FlatId, maker: Mapping[FlatId, Instance]) -> tuple[set[FlatId], set[FlatId]]:
    """The values that elements of v are elements of, as they were computed; and those of them of
    which they were selected."""
    seen: set[tuple[FlatId, bool]] = set()
    found: tuple[set[FlatId], set[FlatId]] = set(), set()
    stack = [(v, False)]
    while stack:
        at = stack.pop()
        if at in seen:
            continue
        seen.add(at)
        v, selected = at
        x = maker.get(v)
        below = () if x is None else _elements_of(x)
        selects = x is not None and x.signature.elements == "selected"
        stack += [(w, selected or selects) for w in below]
        if not below:
            found[0].add(v)
            if selected:
                found[1].add(v)
    return found


def _elements_of(x: Instance) -> Sequence[FlatId]:
    """The operands of whose elements an operation's results consist; none where it computes."""
    if x.port:
        return ()
    if x.signature.elements == "computed":
        return ()
    given = zip(x.inputs, x.signature.input_types, strict=True)
    return [v for v, type_ in given if _is_rounded(type_.dtype)]


def _goes_by_elements(x: Instance) -> bool:
    return not x.port and x.signature.fusion == "loop" and len(x.outputs) == 1


def _is_rounded(dtype: str) -> bool:
    """Whether numbers of a type are rounded when they are computed."""
    return kind(dtype) in ("float", "complex")


def scattered_into(schedule: Schedule, within: Sequence[bool]) -> frozenset[FlatId]:
    """Results of scatters over which nothing is written; those that units compute `within` their
    readers are no kernels."""
    found = set[FlatId]()
    for u, unit in enumerate(schedule.units):
        root = schedule.program.instances[unit.root]
        if not root.port and root.signature.written_into is not None:
            if not _is_added_at_once(schedule, within, u):
                found.update(root.outputs)
    return frozenset(found)


def _is_added_at_once(schedule: Schedule, within: Sequence[bool], u: int) -> bool:
    """Whether unit u scatters sums into zeros, or other constants, and the next kernel, alone,
    adds them to something."""
    program, units = schedule.program, schedule.units
    root = program.instances[units[u].root]
    if not root.signature.adds or root.signature.initial != (0,):
        return False
    filled = units[schedule.producer[root.inputs[0]]]
    ports = [program.instances[units[schedule.producer[v]].root].port for *_, v in filled.reads]
    readers = schedule.readers[root.outputs[0]]
    if not ports or set(ports) != {"constant"} or len(readers) != 1:
        return False
    (r,) = readers
    reader = program.instances[units[r].root]
    between = any(_is_kernel(schedule, w) and not within[w] for w in range(u + 1, r))
    adds = not reader.port and reader.signature.adds and reader.signature.fusion == "loop"
    return adds and not between


def _is_kernel(schedule: Schedule, u: int) -> bool:
    root = schedule.program.instances[schedule.units[u].root]
    return not root.port and root.signature.fusion != "view"
