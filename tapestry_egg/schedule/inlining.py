"""Inlining: what XLA for GPUs computes inside its readers, instead of storing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection

from .flatten import FlatProgram, Instance
from .own_arrays import scattered_into, stored_once
from .schedules import Schedule
from .units import Unit, is_view


@dataclass(frozen=True)
class Fusion:
    """What XLA computes inside the readers instead of storing it.

    `within[u]`: what unit u makes never exists in memory, every reader computes it for itself.
    `aligned[u]`: the stored values that unit u therefore reads in the end, all of them only at the
    places in memory that it writes: in the place of one it may write its result. A kernel that
    turns something goes through tiles, and writes over nothing. Nor does anything write over
    `elements`: what leaves a kernel beside something else, as a convolution's or a large product's
    result does beside the library's workspace. XLA's buffers (`IsUserOf`, in its heap_simulator.cc)
    let a kernel take the place only of what it reads as that leaves another, not of elements of a
    tuple. Nor does a kernel that goes element by element write over `aliased`: an array into which
    scattered elements were written (`own_arrays.py`). What a unit reads, in memory, and its
    kernel is not to make, is `apart` from it (`inlining.py`). What is reduced along rows of which
    sums of few elements are computed in its kernel is `behind` a barrier to units that compute
    these sums, too: of both XLA makes one kernel else, which reads the sums from memory.
    """

    within: tuple[bool, ...]
    aligned: tuple[frozenset[FlatId], ...]
    elements: frozenset[FlatId] = frozenset()
    aliased: frozenset[FlatId] = frozenset()
    apart: frozenset[tuple[int, FlatId]] = frozenset()
    behind: frozenset[tuple[int, FlatId]] = frozenset()


def fusion(schedule: Schedule, epilogues: bool = False, costs: FusionCosts | None = None) -> Fusion:
    """Which units are computed again inside each of their readers.

    A model of XLA's priority fusion for GPUs (xla/service/gpu/transforms/priority_fusion.cc): an
    elementwise producer is fused into all of its readers at once, or into none. That needs readers
    that are elementwise or reductions themselves (not contractions, collectives or the program's
    boundary), and must not cost more memory traffic: apart, the producer's operands are read, its
    result is written and read by every reader; within, every reader reads the operands instead,
    where it does not read them already. The largest are tried first. So GELU's steps are recomputed
    in the backward pass from one product, while a sum of two stored values with four readers is
    stored too. Nor must it cost time by XLA's estimate of what is computed (`kernel_estimates`), of
    readers between the same two kernels: behind each lowering has what is not stored computed anew.
    So steps of a scan are stored that many of its later steps would each compute again. What a part
    is written into is stored, unless that is one number. Products of matrices take in what they can
    (`read_by_products`), whatever that costs. What is compared with the greatest of itself is
    stored for both, which lowering sees to.

    With `epilogues` as XLA for TPUs has it, read off the modules that it compiled. Products and
    convolutions take in all that is computed of their operands element by element, but what
    several of them read, and what a product makes for one, where that is not there to be computed
    from anyway. Then readers take in a product, if they are elementwise or sums of all of it, and
    can run in its kernel, before the next product does. What reads windows takes in nothing, nor
    does what takes elements to other places or leaves some out (slices, pads, what joins arrays):
    they run inside their readers, but what they read is stored. What holes are put into is, too,
    and what a gather takes from places that are data and reads: it is a kernel of its own.
    A scatter that puts one element into each row is computed element by element.
    """

    def find() -> Fusion:
        found = _Fusing(schedule, epilogues, costs)
        found.views()
        found.loops()
        if epilogues:
            found.products()
        return found.fusion

    return schedule.once(find, "fusion", epilogues, costs)


class _Fusing:
    """What the units of a schedule read, and who reads it, as one after another is taken in."""

    def __init__(self, schedule: Schedule, epilogues: bool, costs: FusionCosts | None) -> None:
        self.schedule, self.epilogues, self.costs = schedule, epilogues, costs
        self.library_bytes = costs.library_bytes if costs else None
        self.program, self.units = schedule.program, schedule.units
        self.operands = [{v for _, _, v in unit.reads} for unit in self.units]
        read = [_read_elsewhere(self.program, u) for u in self.units]
        self.elsewhere, self.turns = [x for x, _ in read], [turned for _, turned in read]
        self.readers: list[set[int]] = [set() for _ in self.program.types]
        for u, unit in enumerate(self.units):
            for _, _, v in unit.reads:
                self.readers[v].add(u)
        self.within = [False] * len(self.units)
        self.moves = [moved(self.program, u) if epilogues else set[FlatId]() for u in self.units]
        self.multiply = [
            u for u, unit in enumerate(self.units) if epilogues and _multiplies(self.program, unit)
        ]
        self.multiplying = frozenset(self.multiply)
        self.once = stored_once(self.program)
        self.few = set[int]()
        self.by_products = read_by_products(schedule, epilogues, self.library_bytes)
        self.estimates: dict[int, KernelEstimate] = {}
        self.alone: dict[int, KernelEstimate] = {}  # with nothing taken in

    @property
    def fusion(self) -> Fusion:
        aligned = [
            frozenset() if turned else frozenset(x - y)
            for x, y, turned in zip(self.operands, self.elsewhere, self.turns, strict=True)
        ]
        elements, inside = frozenset[FlatId](), frozenset[FlatId]()
        if not self.epilogues:
            given = self.program, self.library_bytes
            leaving = [unit.outputs for unit in self.units if _leaves_a_tuple(unit, *given)]
            elements = elements.union(*leaving)
            inside = scattered_into(self.schedule, self.within)
        apart, behind = self._apart(), self._behind()
        return Fusion(tuple(self.within), tuple(aligned), elements, inside, apart, behind)

    def _behind(self) -> frozenset[tuple[int, FlatId]]:
        """Units that compute sums of few elements, each with what is reduced of the same sums."""
        few: list[frozenset[int]] = []  # by unit, the sums that its kernel computes
        for unit in self.units:
            makers = {self.schedule.producer[v] for *_, v in unit.reads}
            inside = [m for m in makers if m >= 0 and self.within[m]]
            few.append(frozenset().union(*(few[m] | ({m} & self.few) for m in inside)))
        return frozenset(
            (r, v)
            for u, unit in enumerate(self.units)
            if few[u] and self._kind(u) == "reduce"
            for v in unit.outputs
            for r in self.readers[v]
            if few[r] & few[u]
        )

    def _apart(self) -> frozenset[tuple[int, FlatId]]:
        """Sums along columns that are not within others, each with a value that a kernel makes
        element by element and that it would read too much for."""
        if self.costs is None:
            return frozenset()
        maker = self.schedule.producer
        return frozenset(
            (u, v)
            for u in range(len(self.units))
            if self._adds_columns(u) and not self.within[u]
            for v in self.operands[u]
            if self._kind(maker[v]) == "loop" and self._is_too_much(u, v)
        )

    def views(self) -> None:
        """Views, into their readers, where all of these can take them in: before anything else, so
        that what makes the viewed value meets those readers themselves. Of others the value is
        stored."""
        for u in reversed(range(len(self.units))):
            if is_view(self.program, self.units[u]):
                self._try_to_take_in(u)

    def loops(self) -> None:
        """What goes element by element, into its readers. XLA for GPUs begins with what it expects
        to save most by: with what is largest."""
        size, order = self.program.sizes, list(range(len(self.units)))
        if self.costs is not None:
            order.sort(key=lambda u: -sum(size[v] for v in self.units[u].outputs))
        for u in order:
            if self._reduces_few(u):
                self.few.add(u)
            if not is_view(self.program, self.units[u]) and self._kind(u) in ("loop", "view"):
                self._try_to_take_in(u)

    def _try_to_take_in(self, u: int) -> None:
        """A unit that makes one value into all of its readers, where they can and it is cheap."""
        size, unit, (products_of, inside) = self.program.sizes, self.units[u], self.by_products
        if len(unit.outputs) != 1:
            return
        (v,) = unit.outputs
        using = self.readers[v]
        if not using or any(self.units[r].body != unit.body for r in using) or v in self.once:
            return
        taking = products_of.get(v, set())
        others = using - taking
        loop = self._kind(u) == "loop"
        if loop and ((taking and u not in inside) or any(v in self.moves[r] for r in using)):
            return
        if not all(self._computes(r) for r in others):
            return
        filled = not any(self.program.types[w].shape for w in self.operands[u])
        if not filled and any(self._writes_into(r, v) for r in using):
            return
        apart = sum(size[w] for w in self.operands[u]) + size[v] * (1 + len(others))
        again = sum(size[w] for r in others for w in self.operands[u] - self.operands[r])
        if again > apart or self._is_stored_for_products(u):
            return
        if self.costs is not None and any(
            self._adds_columns(r) and self._is_too_much(r, v) for r in others
        ):
            return
        if self.costs is None or self._is_cheap_again(u, others, self.costs):
            self._take_in(u, using)

    def products(self) -> None:
        """Products, into what is made of them at once."""
        for n, u in enumerate(self.multiply):
            (v, *more), body = self.units[u].outputs, self.units[u].body
            using = self.readers[v]
            following = self.multiply[n + 1] if n + 1 < len(self.multiply) else len(self.units)
            if (
                using
                and not more
                and max(using) <= following
                and all(self.units[r].body == body for r in using)
                and all(self._kind(r) in ("loop", "reduce") for r in using)
                and not any(self._cuts_out(r, v) for r in using)
                and self._are_apart(using)
            ):
                self._take_in(u, using)

    def _is_cheap_again(self, u: int, using: set[int], costs: FusionCosts) -> bool:
        """Whether it takes no longer to compute a unit in each of some readers than to store it,
        between any two kernels where several read it, or one at several places."""
        (v,) = self.units[u].outputs
        size = self.program.sizes
        if not self.program.types[v].shape or self._kind(u) == "view":
            return True
        between: dict[int, list[int]] = {}
        for r in using:
            between.setdefault(self.kernels_before[r], []).append(r)
        for readers in between.values():
            own = self._estimate(u)
            taken = [self._estimate(r) for r in readers]
            once = len(readers) == 1 and sum(taken[0].uses[v].values()) <= 1.0
            if once and not (self._adds_columns(readers[0]) and taken[0].repeats(v, own)):
                continue
            if own.is_dear and self._reduce_both_ways(readers):
                return False
            apart = costs.launch_bytes + own.bytes_taken(size, size[v], costs)
            again = 0.0
            for r, reader in zip(readers, taken, strict=True):
                written = sum(size[w] for w in self.units[r].outputs)
                apart += reader.bytes_taken(size, written, costs)
                each = self._adds_columns(r)
                again += reader.with_inside(v, own, each).bytes_taken(size, written, costs)
            if again > apart:
                return False
        return True

    def _reduce_both_ways(self, readers: Sequence[int]) -> bool:
        """Whether some units reduce rows of what they read, and others columns: no kernel does
        both, and each would compute what is long to compute."""
        reducing = [r for r in readers if self._kind(r) == "reduce"]
        return len({self._adds_columns(r) for r in reducing}) > 1

    @cached_property
    def kernels_before(self) -> tuple[int, ...]:
        """How many units up to each are kernels that nothing is taken into."""
        roots = (self.program.instances[unit.root] for unit in self.units)
        return tuple(accumulate(not x.port and x.signature.fusion == "kernel" for x in roots))

    def _estimate(self, u: int) -> KernelEstimate:
        """What a unit computes and reads, with all that was taken into it."""
        waiting = [] if u in self.estimates else [u]
        while waiting:
            unit = self.units[waiting[-1]]
            makers = {v: self.schedule.producer[v] for *_, v in unit.reads}
            inside = {v: m for v, m in makers.items() if self.within[m]}
            missing = [m for m in inside.values() if m not in self.estimates]
            waiting += missing
            if not missing:
                last = waiting.pop()
                if last not in self.alone:
                    self.alone[last] = estimate(self.program, unit)
                found = self.alone[last]
                for v, m in inside.items():
                    found = found.with_inside(v, self.estimates[m])
                self.estimates[last] = found
        return self.estimates[u]

    def _adds_columns(self, u: int) -> bool:
        return adds_columns(self.program.instances[self.units[u].root].signature)

    def _is_too_much(self, u: int, v: FlatId) -> bool:
        """Whether a sum along columns is to read value v, not to compute it."""
        made = self._estimate(self.schedule.producer[v])
        return reads_too_much(self._estimate(u), v, made, self.program.types)

    def _cuts_out(self, u: int, v: FlatId) -> bool:
        """Whether a unit goes element by element over parts of value v, not over all of it."""
        types = self.program.types
        sizes = [types[w].size for w in self.units[u].outputs]
        return self._kind(u) == "loop" and min(sizes, default=0) < types[v].size

    def _take_in(self, u: int, using: set[int]) -> None:
        """A unit into all of its readers."""
        (v,) = self.units[u].outputs
        self.within[u] = True
        self._forget(v)
        product = u in self.multiplying
        for r in using:
            self.turns[r] |= self.turns[u] and not product
            # All that a product reads is read elsewhere: it has a dim that is summed.
            away = v in self.elsewhere[r]
            self.elsewhere[r] |= self.operands[u] if away else self.elsewhere[u]
            self.operands[r] = (self.operands[r] - {v}) | self.operands[u]
            self.moves[r] |= self.operands[u] if v in self.moves[r] else self.moves[u]
        for w in self.operands[u]:
            self.readers[w] = (self.readers[w] - {u}) | using

    def _computes(self, u: int) -> bool:
        """Whether a unit can compute what it reads: a view that is stored only names it."""
        kind = self._kind(u)
        return kind in ("loop", "reduce") or (
            kind == "view" and not is_view(self.program, self.units[u])
        )

    def _writes_into(self, u: int, v: FlatId) -> bool:
        """Whether a unit writes a part into value v: in place, if that is in memory."""
        root = self.program.instances[self.units[u].root]
        return not root.port and any(root.inputs[p] == v for p in root.signature.writes[:1])

    def _forget(self, v: FlatId) -> None:
        """Estimate anew what a value is computed in, by way of what is inside that."""
        for r in self.schedule.readers[v]:
            known = self.estimates.pop(r, None)
            if self.within[r] and known is not None:
                self._forget(self.units[r].outputs[0])

    def _reduces_few(self, u: int) -> bool:
        """Whether readers compute a unit that reduces few elements: of arrays that are stored, no
        more than it makes. Larger ones XLA does not read again for each of its results."""
        if self.costs is None or not reduces_few(self.program.instances[self.units[u].root]):
            return False
        types = self.program.types
        read = sum(types[v].nbytes for v in self.operands[u])
        return read <= types[self.units[u].outputs[0]].nbytes

    def _kind(self, u: int) -> str:
        root = self.program.instances[self.units[u].root]
        signature = root.signature
        if self.epilogues and not root.port:
            if signature.fusion == "reduce" and any(signature.window_dims):
                return "kernel"
            if signature.scatters_once:
                return "loop"
            if signature.dilates or (signature.scattered and signature.fusion == "loop"):
                return "kernel"
        if u in self.few:
            return "loop"
        return root.port or signature.fusion

    def _is_stored_for_products(self, u: int) -> bool:
        """Whether products read a unit, several of them or what one made for it alone, and what it
        is computed from is not held until the last of them; not one of a stack."""
        (v,) = self.units[u].outputs
        root = self.program.instances[self.units[u].root]
        if not root.port and root.signature.in_products == "one_of_stack":
            return False
        using, maker = self.readers[v], self.schedule.producer
        direct = self.multiplying & using
        alone = (maker[w] for w in self.operands[u] if self.readers[w] == {u})
        if len(direct) < 2 and not (direct and not self.multiplying.isdisjoint(alone)):
            return False
        return not all(
            self._kind(maker[w]) in ("loop", "view", "reduce", "kernel")
            and any(r >= max(using) for r in self.readers[w] - {u})
            for w in self.operands[u]
            if self.program.types[w].shape
        )

    def _are_apart(self, units: set[int]) -> bool:
        """Whether none of some units needs what another one makes."""
        reached: set[int] = set()
        for u in range(min(units), max(units) + 1):
            needs = any(self.schedule.producer[v] in reached for _, _, v in self.units[u].reads)
            if u in units and needs:
                return False
            if u in units or needs:
                reached.add(u)
        return True


def moved(program: FlatProgram, unit: Unit) -> set[FlatId]:
    """The values from outside of which a unit takes elements to other places, or parts; what it
    computes of a value first is not that value."""
    makers = {v: i for i in unit.members for v in program.instances[i].outputs}
    inside: set[int] = set()
    found: set[FlatId] = set()
    for i in reversed(unit.members):
        instance = program.instances[i]
        passes = i in inside and instance.signature.fusion == "view"
        for p, v in enumerate(instance.inputs):
            if passes or p in instance.signature.moved:
                if v in makers:
                    inside.add(makers[v])
                else:
                    found.add(v)
    return found


def read_in_place(program: FlatProgram, unit: Unit) -> frozenset[FlatId]:
    """The values from outside that a kernel reads only at the places in memory that it writes; none
    where it turns something."""
    elsewhere, turns = _read_elsewhere(program, unit)
    return frozenset() if turns else frozenset({v for _, _, v in unit.reads} - elsewhere)


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
            turned, aligned = read_as(instance.signature, p)
            turns |= turned
            if i in moved or not aligned:
                if v in makers:
                    moved.add(makers[v])
                else:
                    found.add(v)
    return found, turns


def read_as(signature: OperationSignature, p: int) -> tuple[bool, bool]:
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


def moves_last(signature: OperationSignature, p: int) -> bool:
    """Whether an operation only moves the dims of operand p, and puts another one last."""
    if len(signature.outputs) != 1 or read_as(signature, p)[1]:
        return False
    types = signature.input_types[p], signature.output_types[0]
    if types[0].size != types[1].size:
        return False
    long = [d.size > 1 for d in signature.index]
    before, after = (
        [step == 1 for step, n in zip(_places(x, t.shape), long, strict=False) if n]
        for x, t in zip((signature.inputs[p], signature.outputs[0]), types, strict=True)
    )
    return before != after


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


#: Bytes of the widest floats whose products XLA for GPUs computes operands of.
_WIDEST = 4


def read_by_products(
    schedule: Schedule, all_of_them: bool = False, library_bytes: int | None = None
) -> tuple[dict[FlatId, set[int]], frozenset[int]]:
    """The products that read each value, themselves or by what they compute; and the units that
    the products among their readers compute: `all_of_them` that go element by element, or
    those that XLA for GPUs takes into them.

    A model of XLA's GEMM fusion for GPUs (xla/backends/gpu/transforms/gemm_fusion.cc), which comes
    before all other fusion. From a product it goes towards what it reads, and takes in what reads
    no more from memory than is read of it: operations on one array whose elements are no smaller
    than what they give; on two where one is a number, or an argument of the program that is
    repeated; and the slice that is one of a stack in the program's own memory. So a rectifier of a
    product and a bias is computed by every product that reads it.
    A library's products, of results of `library_bytes` or more, compute nothing of their operands,
    nor does XLA into products of integers, of complex numbers, or of floats of 64 bits.
    """
    program, units = schedule.program, schedule.units
    is_product = _multiplies if all_of_them else _is_product
    products = {u for u, unit in enumerate(units) if is_product(program, unit)}
    whole = {u for u in products if _reads_arrays(units[u], program, library_bytes)}
    read: dict[FlatId, set[int]] = {}
    inside: set[int] = set()
    for u in reversed(range(len(units))):
        unit = units[u]
        by = {u} if u in products else set[int]()
        view = is_view(program, unit)
        fits = _goes_by_elements if all_of_them else _fits
        if view or (len(unit.outputs) == 1 and fits(program, unit)):
            by = read.get(unit.outputs[0], set()) if unit.outputs else set()
            if not view:
                by = set() if by & whole else by
                inside |= {u} if by else set()
        for v in {v for _, _, v in unit.reads} if by else ():
            read.setdefault(v, set()).update(by)
    return read, frozenset(inside)


def _goes_by_elements(program: FlatProgram, unit: Unit) -> bool:
    root = program.instances[unit.root]
    return not root.port and (root.signature.fusion == "loop" or root.signature.scatters_once)


def _multiplies(program: FlatProgram, unit: Unit) -> bool:
    """Whether a unit is a product of matrices, or a convolution."""
    root = program.instances[unit.root]
    straight = bool(root.signature.straight)  # a library's kernel, whatever it multiplies
    return _is_product(program, unit) or (not root.port and root.signature.multiplies and straight)


def _leaves_a_tuple(unit: Unit, program: FlatProgram, library_bytes: int | None) -> bool:
    """Whether a unit is a kernel of several results, or a library's, which has a workspace; that is
    who makes products whose results are large enough (`machine/compiler_choices.py`)."""
    root = program.instances[unit.root]
    library = root.signature.multiplies and bool(root.signature.straight)
    several = root.signature.fusion == "kernel" and len(root.outputs) > 1
    own = _is_the_library_s(unit, program, library_bytes)
    return not root.port and (library or several or own)


def _is_the_library_s(unit: Unit, program: FlatProgram, library_bytes: int | None) -> bool:
    """Whether a unit is a product of matrices that the library makes, where it makes any: those of
    complex numbers are all its."""
    if library_bytes is None or not _is_product(program, unit):
        return False
    made = program.types[unit.outputs[0]]
    return made.nbytes >= library_bytes or "complex" in made.dtype


def _reads_arrays(unit: Unit, program: FlatProgram, library_bytes: int | None) -> bool:
    """Whether nothing that a product of matrices reads is computed by its kernel."""
    types = program.instances[unit.root].signature.input_types
    kept = all("float" in t.dtype and t.itemsize <= _WIDEST for t in types)
    return not kept or _is_the_library_s(unit, program, library_bytes)


def is_a_compiler_s_product(unit: Unit, program: FlatProgram, library_bytes: int | None) -> bool:
    """Whether a unit is a product of matrices that XLA makes itself, as no library does."""
    return _is_product(program, unit) and not _is_the_library_s(unit, program, library_bytes)


def _is_product(program: FlatProgram, unit: Unit) -> bool:
    """Whether a unit is a product of matrices: XLA multiplies vectors element by element, and
    outer products."""
    root = program.instances[unit.root]
    signature = root.signature
    plain = signature.multiplies and not signature.straight
    return not root.port and plain and not signature.by_vector


def _fits(program: FlatProgram, unit: Unit) -> bool:
    """Whether all that a unit computes can run inside a product."""
    members = [program.instances[i] for i in unit.members]
    if members[-1].port or not program.types[unit.outputs[0]].shape:
        return False
    spread = {
        m.outputs[0]
        for m in members
        if m.signature.repeats
        and all([_is_given(program, m.inputs[p]) for p in m.signature.repeats])
    }
    return all(_is_taken(program, m, spread) for m in members)


def _is_given(program: FlatProgram, v: FlatId) -> bool:
    """Whether a value is a number, or one that the program is given."""
    return not program.types[v].shape or v in program.given


def _is_taken(program: FlatProgram, instance: Instance, spread: set[FlatId]) -> bool:
    """Whether a product takes an operation in. It widens and rounds for some in bfloat16, and takes
    nothing in that rounds."""
    signature, types = instance.signature, program.types
    if instance.outputs[0] in spread or signature.fusion == "view":
        return True
    result = types[instance.outputs[0]]
    if signature.in_products == "one_of_stack":
        (stack,) = instance.inputs
        one = result.shape[:1] == (1,) and result.shape[1:] == types[stack].shape[1:]
        return one and stack in program.renewing
    words = ("always",) if result.dtype == "bfloat16" else ("always", "not_in_bfloat16")
    if signature.in_products not in words:
        return False
    if len(instance.inputs) == 1:
        return types[instance.inputs[0]].itemsize <= result.itemsize
    rest = [v for v in instance.inputs if v not in spread and types[v].shape]
    return len(instance.inputs) == 2 and len(rest) == 1


# What XLA for GPUs takes a kernel to cost before it decides what to compute within readers.
#
# Its estimate of a kernel (xla/service/gpu/model/gpu_performance_model.cc,
# gpu_hlo_cost_analysis.cc) is what it computes or what it moves, whichever takes longer. What is
# computed counts as often as it is: where an array is read at several places, each of them computes
# what it reads. A launch is a microsecond more. How large the arrays of one device are is not known
# here: of those that are not cut a launch is the least, in proportion, that it may be. So what is
# small is computed again, and a repeated element is taken to be computed once: XLA counts it for
# every copy, which launches outweigh in vectors beside arrays of some MiB. XLA also adds a
# twentieth of the lesser of both.
#
# It does not look at registers. Columns it adds up in blocks of 1024 threads, each of which goes
# from row to row (xla/backends/gpu/codegen/emitters/reduction.cc). Of all that such a kernel reads
# the place, which moves along with the rows, is kept in two of a thread's registers. A GPU of
# NVIDIA's has 65536 of them in a core and runs 2048 threads there: 32 for each, the places of
# `PLACES` arrays. What does not fit goes through memory for every row: the gradient of a scan of a
# state-space model, of 20 arrays, took 252 ms on an H100 for a kernel that moves 37 GB. Sums along
# rows are made in blocks of 256 threads or less, mostly without such a loop. So what would make a
# sum along columns read at more places is stored before it, by a kernel of its own, which goes
# element by element and has registers enough. Plans count it so, and lowering keeps the two apart.
# What pads and joins take beside (a condition for each) is not counted, and of products with
# vectors, which XLA may add up along columns as well, nothing is.


#: Registers of a core (65536) for each of its threads (2048), two for the place of an array.
PLACES = 65536 // 2048 // 2


@dataclass(frozen=True)
class KernelEstimate:
    """What one kernel computes and reads.

    `flops` are of arrays that are not cut. `uses[v]` says how often the elements of v are read,
    on average, as a sum of shares: `None`, where the results are written; else the value at whose
    own places they are. Equal places share what they read.

    A kernel `is_dear` that computes exponentials or the like. If such are computed of v, or it is
    what one makes, and that is then repeated a few times, it is computed as often: `repeated[v]`,
    and `more[v]` are the flops of what the kernel itself computes so, beside the first time.
    """

    flops: float
    uses: Mapping[FlatId, Mapping[FlatId | None, float]]
    repeated: Mapping[FlatId, float] = field(default_factory=dict)
    more: Mapping[FlatId, float] = field(default_factory=dict)
    is_dear: bool = False

    def repeats(self, v: FlatId, made: KernelEstimate) -> bool:
        """Whether what another kernel makes is computed a few times where this one reads it."""
        often = self.repeated.get(v, 1.0)
        return 1.0 < often < OFTEN and (made.is_dear or self.more.get(v, 0.0) > 0.0)

    def with_inside(self, v: FlatId, made: KernelEstimate, each: bool = False) -> KernelEstimate:
        """The kernel that computes a value, which another one makes, where this one reads it, and
        for `each` time that it is repeated, if those are few and it is dear."""
        at = self.uses[v]
        times = sum(at.values())
        uses = {w: dict(places) for w, places in self.uses.items() if w != v}
        for w, places in made.uses.items():
            own = uses.setdefault(w, {})
            for place, share in places.items():
                if place is None:
                    own.update(at)
                else:
                    own[place] = own.get(place, 0.0) + share * times
        often, more = self.repeated.get(v, 1.0), self.more.get(v, 0.0)
        again = each and self.repeats(v, made)
        flops = self.flops + (often if again else 1.0) * times * made.flops + more * again
        repeated = {w: max(x * often, self.repeated.get(w, 1.0)) for w, x in made.repeated.items()}
        dear = self.is_dear or made.is_dear
        return KernelEstimate(flops, uses, {**self.repeated, **repeated}, self.more, dear)

    def bytes_taken(self, sizes: Sequence[int], written: int, costs: FusionCosts) -> float:
        """The bytes that memory moves in the time of the kernel, which writes `written`: what it
        reads again comes from caches."""
        read = sum(min(1.0, sum(x.values())) * sizes[v] for v, x in self.uses.items())
        return max(self.flops * costs.bytes_per_flop, read + written)


def estimate(program: FlatProgram, unit: Unit) -> KernelEstimate:
    """What a unit computes and reads, if all that it reads is stored."""
    places: dict[FlatId, dict[FlatId | None, float]] = {v: {None: 1.0} for v in unit.outputs}
    repeated, more = dict.fromkeys(unit.outputs, 1.0), dict.fromkeys(unit.outputs, 0.0)
    flops, dear = 0.0, False
    for i in reversed(unit.members):
        instance = program.instances[i]
        signature, outputs = instance.signature, instance.outputs
        if len(outputs) == 1:
            (v,) = outputs
            own, often, beside = places.get(v, {}), repeated.get(v, 0.0), more.get(v, 0.0)
        else:
            own = {}
            for v in outputs:
                own |= places.get(v, {})
            often, beside = (max([x.get(v, 0.0) for v in outputs]) for x in (repeated, more))
        times = sum(own.values())
        flops += times * signature.whole_flops
        if signature.is_dear:
            dear = True
            beside += (often - 1.0) * signature.whole_flops if often < OFTEN else 0.0
        of_reads = zip(
            instance.inputs, signature.times_repeated, signature.shares_read, strict=True
        )
        for v, n, share in of_reads:
            if v not in repeated:
                repeated[v], more[v], places[v] = 1.0, 0.0, {}
            repeated[v] = max(repeated[v], often * n)
            more[v] = max(more[v], beside)
            read = places[v]
            if share is None:
                read |= own
            else:
                read[v] = read.get(v, 0.0) + times * share
    uses = {v: places[v] for *_, v in unit.reads}
    return KernelEstimate(
        flops, uses, {v: repeated[v] for v in uses}, {v: more[v] for v in uses}, dear
    )


#: What is repeated so often is small beside the result, and taken to be computed once.
OFTEN = 16.0

#: XLA for GPUs reduces fewer elements than these one by one, wherever the result is read (measured:
#: jaxlib 0.10, for one H100).
FEW = 16


def reduces_few(instance: Instance) -> bool:
    """Whether each result of a sum, or the like, is of few elements, so that readers compute it."""
    signature = instance.signature
    if instance.port or signature.fusion != "reduce" or len(signature.outputs) > 1:
        return False
    reduced = [dim.size for dim in signature.index if dim.role == "reduce"]
    other = any(dim.role not in ("map", "reduce") for dim in signature.index)
    return bool(reduced) and prod(reduced) < FEW and not (other or any(signature.window_dims))


def adds_columns(signature: OperationSignature) -> bool:
    """Whether an operation reduces dims of an array of which the last is none."""
    if signature.fusion != "reduce" or not signature.inputs[0].matrix:
        return False
    last = signature.inputs[0].matrix[-1]
    roles = {signature.index[d].role for d, a in enumerate(last) if a}
    return any(dim.role == "reduce" for dim in signature.index) and "reduce" not in roles


def reads_too_much(
    kernel: KernelEstimate, v: FlatId, made: KernelEstimate, types: Sequence[TensorType]
) -> bool:
    """Whether the kernel of a sum along columns would read arrays at more places than its threads
    have registers for, and at more than now, if it computed value v, which another kernel makes;
    `types` are all values'."""
    now, then = (
        sum(len(places) for w, places in x.uses.items() if types[w].shape)
        for x in (kernel, kernel.with_inside(v, made))
    )
    return then > max(now, PLACES)
