"""Inlining: what XLA for GPUs computes inside its readers, instead of storing it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection

from .flatten import FlatProgram, Instance
from .schedules import Schedule
from .units import Unit

#: Operations on elements that its kernels of products know.
_ONE = frozenset(
    "abs cbrt ceil convert_element_type cos erf exp expm1 floor log log1p neg rsqrt sin sqrt tan"
    " tanh".split()
)
_TWO = frozenset("add atan2 div max min mul pow rem sub".split())
#: Those that it computes in bfloat16 as they are: it widens and rounds for all others, and what
#: rounds is not taken in.
_SHORT = frozenset("abs add max min mul neg sub".split())


@dataclass(frozen=True)
class Fusion:
    """What XLA computes inside the readers instead of storing it.

    `within[u]`: what unit u makes never exists in memory, every reader computes it for itself.
    `aligned[u]`: the stored values that unit u therefore reads in the end, all of them only at the
    places in memory that it writes: in the place of one it may write its result. A kernel that
    turns something goes through tiles, and writes over nothing.
    """

    within: tuple[bool, ...]
    aligned: tuple[frozenset[FlatId], ...]


def fusion(schedule: Schedule) -> Fusion:
    """Which units are computed again inside each of their readers.

    A model of XLA's priority fusion for GPUs (xla/service/gpu/transforms/priority_fusion.cc): an
    elementwise producer is fused into all of its readers at once, or into none. That needs readers
    that are elementwise or reductions themselves (not contractions, collectives or the program's
    boundary), and must not cost more memory traffic: apart, the producer's operands are read, its
    result is written and read by every reader; within, every reader reads the operands instead,
    where it does not read them already. So GELU's steps are recomputed in the backward pass from
    one product, while a sum of two stored values with four readers is stored too. Products of
    matrices take in what they can (`read_by_products`), whatever that costs.
    """
    program, units = schedule.program, schedule.units
    size = program.sizes
    operands = [{v for _, _, v in unit.reads} for unit in units]
    elsewhere, turns = (
        list(x) for x in zip(*(_read_elsewhere(program, u) for u in units), strict=True)
    )
    readers: list[set[int]] = [set() for _ in program.types]
    for u, unit in enumerate(units):
        for _, _, v in unit.reads:
            readers[v].add(u)
    within = [False] * len(units)
    products, inner = read_by_products(schedule)

    def kind(u: int) -> str:
        root = program.instances[units[u].root]
        return root.port or root.signature.fusion

    for u, unit in enumerate(units):
        if len(unit.outputs) != 1 or kind(u) not in ("loop", "view"):
            continue
        (v,) = unit.outputs
        using = readers[v]
        if not using or any(units[r].body != unit.body for r in using):
            continue
        taking = products.get(v, set())
        others = using - taking
        if (taking and kind(u) == "loop" and u not in inner) or any(
            kind(r) not in ("loop", "view", "reduce") for r in others
        ):
            continue
        apart = sum(size[w] for w in operands[u]) + size[v] * (1 + len(others))
        inside = sum(size[w] for r in others for w in operands[u] - operands[r])
        if inside > apart:
            continue
        within[u] = True
        for r in using:
            turns[r] |= turns[u]
            elsewhere[r] |= operands[u] if v in elsewhere[r] else elsewhere[u]
            operands[r] = (operands[r] - {v}) | operands[u]
        for w in operands[u]:
            readers[w] = (readers[w] - {u}) | using
    aligned = [
        frozenset() if turned else frozenset(x - y)
        for x, y, turned in zip(operands, elsewhere, turns, strict=True)
    ]
    return Fusion(tuple(within), tuple(aligned))


def _read_elsewhere(program: FlatProgram, unit: Unit) -> tuple[set[FlatId], bool]:
    """The values from outside that a unit reads at other places in memory than it writes, and
    whether it reads something with dims in another order."""
    makers = {v: i for i in unit.members for v in program.instances[i].outputs}
    moved: set[int] = set()  # members of which something is read elsewhere
    found: set[FlatId] = set()
    turns = False
    for i in reversed(unit.members):
        instance = program.instances[i]
        for p, v in enumerate(instance.inputs):
            turned, aligned = _read_as(instance.signature, p)
            turns |= turned
            if i in moved or not aligned:
                if v in makers:
                    moved.add(makers[v])
                else:
                    found.add(v)
    return found, turns


def _read_as(signature: OperationSignature, p: int) -> tuple[bool, bool]:
    """Whether operand p has its dims permuted, and whether it is read where the result is written;
    the signature remembers it, as equal operations have the same one."""
    known: dict[int, tuple[bool, bool]] = signature.__dict__.setdefault("_read_as", {})
    if p not in known:
        known[p] = _turns(signature, p), _aligned(signature, p)
    return known[p]


def _turns(signature: OperationSignature, p: int) -> bool:
    """Whether an operation permutes the dims of operand p."""
    if len(signature.outputs) != 1:
        return False
    shapes = signature.input_types[p].shape, signature.output_types[0].shape
    before, after = (
        _places(x, shape)
        for x, shape in zip((signature.inputs[p], signature.outputs[0]), shapes, strict=True)
    )
    return before != after and sorted(before) == sorted(after)


def _aligned(signature: OperationSignature, p: int) -> bool:
    """Whether an operation reads all of operand p where its result has the same index, both
    row-major; so do reshapes, and operations on elements."""
    if len(signature.outputs) != 1:
        return False
    reads, writes = signature.inputs[p], signature.outputs[0]
    if {*reads.shape, *writes.shape} - {1}:
        return False
    own, result = signature.input_types[p], signature.output_types[0]
    return own.size == result.size and _places(reads, own.shape) == _places(writes, result.shape)


def _places(projection: Projection, shape: tuple[int, ...]) -> tuple[int, ...]:
    """By how much the place in a row-major array grows with each index dim; where it begins."""
    steps = [prod(shape[k + 1 :]) for k in range(len(shape))]
    grows = [
        sum(s * x for s, x in zip(steps, c, strict=True))
        for c in zip(*projection.matrix, strict=True)
    ]
    return *grows, sum(s * x for s, x in zip(steps, projection.offset, strict=True))


def read_by_products(schedule: Schedule) -> tuple[dict[FlatId, set[int]], frozenset[int]]:
    """The products that read each value, themselves or by what they compute; and the units that
    the products among their readers compute.

    A model of XLA's GEMM fusion for GPUs (xla/backends/gpu/transforms/gemm_fusion.cc), which comes
    before all other fusion. From a product it goes towards what it reads, and takes in what reads
    no more from memory than is read of it: operations on one array whose elements are no smaller
    than what they give, and on two where one is a number, or an argument of the program that is
    repeated. So a rectifier of a product and a bias is computed by every product that reads it.
    """
    program, units = schedule.program, schedule.units
    products = {u for u, unit in enumerate(units) if _is_product(program, unit)}
    read: dict[FlatId, set[int]] = {}
    inside: set[int] = set()
    for u in reversed(range(len(units))):
        unit = units[u]
        by = {u} if u in products else set[int]()
        view = _is_view(program, unit)
        if view or (len(unit.outputs) == 1 and _fits(program, unit)):
            by = read.get(unit.outputs[0], set()) if unit.outputs else set()
            if by and not view:
                inside.add(u)
        for v in {v for _, _, v in unit.reads} if by else ():
            read.setdefault(v, set()).update(by)
    return read, frozenset(inside)


def _is_product(program: FlatProgram, unit: Unit) -> bool:
    """Whether a unit is a product of matrices: XLA multiplies vectors element by element."""
    root = program.instances[unit.root]
    return not root.port and root.signature.kernel == "dot_general" and not root.signature.by_vector


def _is_view(program: FlatProgram, unit: Unit) -> bool:
    members = [program.instances[i] for i in unit.members]
    return not members[-1].port and all(m.signature.fusion == "view" for m in members)


def _fits(program: FlatProgram, unit: Unit) -> bool:
    """Whether all that a unit computes can run inside a product."""
    members = [program.instances[i] for i in unit.members]
    if members[-1].port or not program.types[unit.outputs[0]].shape:
        return False
    spread = {
        m.outputs[0]
        for m in members
        if m.signature.kernel == "broadcast_in_dim" and _is_given(program, m.inputs[0])
    }
    return all(_is_taken(program, m, spread) for m in members)


def _is_given(program: FlatProgram, v: FlatId) -> bool:
    """Whether a value is a number, or one that the program is given."""
    return not program.types[v].shape or v in _entering(program)


def _entering(program: FlatProgram) -> frozenset[FlatId]:
    graph, values = program.bodies[0].graph, program.bodies[0].values
    return frozenset(values[v] for v in graph.inputs)


def _is_taken(program: FlatProgram, instance: Instance, spread: set[FlatId]) -> bool:
    signature, types = instance.signature, program.types
    if instance.outputs[0] in spread or signature.fusion == "view":
        return True
    result = types[instance.outputs[0]]
    if result.dtype == "bfloat16" and signature.kernel not in _SHORT:
        return False
    if signature.kernel in _ONE:
        return types[instance.inputs[0]].itemsize <= result.itemsize
    rest = [v for v in instance.inputs if v not in spread and types[v].shape]
    return signature.kernel in _TWO and len(rest) == 1
