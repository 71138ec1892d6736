"""The operation projection signature: an index space, and how it projects into every tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import log2, prod
from typing import Literal

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.zspace import Projection, ZRange

# Amounts of an operation that follow from its index extents: polynomials, what it holds beside its
# operands while it runs, and what it reads or writes at scattered places.


#: A polynomial over index extents: sum over terms of coefficient × product of the named extents.
#: `((2.0, (0, 1, 2)),)` is 2·n0·n1·n2.
Polynomial = tuple[tuple[float, tuple[int, ...]], ...]
#: Bytes of the scores that kernels in blocks compute at a time: what caches hold beside operands,
#: so that a block that is stored between two products is not read from memory. On CPUs 4 MiB were
#: the fastest of 2 to 16.
ROOM = 4 << 20
#: The least extent of a block of scores along the dim that is cut into blocks: with fewer, what is
#: read for a product takes longer than the product.
LEAST = 256
#: Where attention has more than so many blocks they are larger, up to `MOST` bytes of scores: each
#: is so many kernels more. On an H100 a step of GPT-2 in blocks of 4 MiB took thrice as long.
BLOCKS, MOST = 16, 16 << 20


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a kernel takes beside operands and results while it runs, in bytes.

    Of one that runs in blocks of its scores a block holds what has `ROOM`, or where there are more
    than `BLOCKS` of them up to `MOST`, and one `row` at least; `blocks` of them are there at a
    time, `fused` where products compute what is made of them (`Target.epilogues`), and what
    `beside` says. Others have no blocks, and what `walked` says in the place of `beside` where
    products do that. All in index extents. Blocks lie along the longest of the index dims `along`,
    if there are any, and have `ROOM` and `LEAST` of it.
    """

    blocks: float
    scores: Polynomial
    row: Polynomial
    beside: Polynomial
    along: tuple[int, ...] = ()
    fused: float = 0.0
    walked: Polynomial = ()

    def bytes_at(self, extents: tuple[int, ...], epilogues: bool = False) -> float:
        """On a device whose part of the index space has these extents."""
        scores, least = evaluate(self.scores, extents), evaluate(self.row, extents)
        if self.along:
            least = LEAST * scores / max(extents[d] for d in self.along)
        else:
            least = max(least, min(scores / BLOCKS, float(MOST)))
        block = min(scores, max(float(ROOM), least))
        blocks = self.fused if epilogues else self.blocks
        beside = self.walked if epilogues else self.beside
        return blocks * block + evaluate(beside, extents)

    def block(self, extents: tuple[int, ...]) -> tuple[int, int]:
        """The index dim that blocks lie along, and the extent of one of them."""
        longest = max(self.along, key=lambda d: extents[d])
        row = evaluate(self.scores, extents) / max(1, extents[longest])
        fitting = 1 << max(0, int(ROOM // max(1.0, row)).bit_length() - 1)
        return longest, max(1, min(max(LEAST, fitting), extents[longest]))


@dataclass(frozen=True, slots=True)
class Blocks:
    """The kernels that each block of the scores of a kernel is (`Scratch`, with `along`) where a
    compiler stores what a product makes.

    `products` are the index dims (batch, m, n, k) of each product of matrices, whose operands are
    as wide as those of the kernel, and whose results are in float32 at least. Beside these there
    are so many `kernels` a block, which together move the bytes `moved` of all scores, and `again`
    for each block. All in index extents.
    """

    products: tuple[tuple[tuple[int, ...], ...], ...]
    moved: Polynomial
    again: Polynomial
    kernels: float


def evaluate(polynomial: Polynomial, extents: tuple[int, ...]) -> float:
    """Value of a polynomial at the given index extents."""
    total = 0.0
    for coefficient, dims in polynomial:
        term = coefficient
        for d in dims:
            term *= extents[d]
        total += term
    return total


@dataclass(frozen=True, slots=True)
class Scattered:
    """What a kernel reads, or adds to, at places that are data.

    Bytes of `elements`, each of `itemsize` bytes, count with those of operand `operand`; they are
    touched `times` times (2: read and written), in runs of `run` bytes that lie together, `unit`
    bytes by one instruction of its threads, each run anywhere among `within` bytes. `counted` says
    that memory's traffic has them already, once.
    """

    operand: int
    elements: Polynomial
    itemsize: int
    run: float
    unit: float
    within: float
    times: float
    counted: bool

    def bytes_at(self, extents: tuple[int, ...]) -> float:
        """Bytes of the elements themselves, once, where the index space has these extents."""
        return evaluate(self.elements, extents) * self.itemsize


Role = Literal["map", "reduce", "scan", "join", "whole"]
#: What a kernel is to those that read programs: a function of elements, a way to read or write
#: windows at places that are data, or a request that a plan answers.
Meaning = Literal[
    "", "sum", "difference", "product", "quotient", "negative", "power", "exponential", "choice",
    "comparison", "conversion", "count", "reading", "writing", "adding",
    "layout", "rounding", "name",
]  # fmt: skip
Fusion = Literal["view", "loop", "reduce", "kernel"]
Elements = Literal["computed", "kept", "selected"]
# Flops of an exponential, as templates say: XLA for GPUs counts as many for one on an H100, and
# more for powers, logarithms and the like (`hlo_op_profiles_data.h`: 79 cycles, an addition 7).
_DEAR = 10.0

InProducts = Literal["never", "not_in_bfloat16", "again", "one_of_stack", "always"]


@dataclass(frozen=True, slots=True)
class IndexDim:
    """One dim of the index space.

    `map` dims reach every output. If a `reduce` dim is cut, outputs that it does not reach are
    partial under `monoid`, and those that it reaches are made block by block. `whole` dims must not
    be cut. Devices that cut one of the other two exchange
    states of `monoid` at once: `scan` dims reach every output and are cumulative, so each device
    adds what the blocks before its own come to; `join` dims reach no output, and every device gets
    the result from the states of all, which are several arrays.
    """

    name: str
    size: int
    role: Role
    monoid: str | None = None


@dataclass(frozen=True, slots=True)
class Passage:
    """A law f(x•y) = f(x)•f(y): if the operands `inputs` are all partial under `monoid_in`, and
    all others replicated, the outputs are partial under `monoid_out`."""

    inputs: tuple[int, ...]
    monoid_in: str
    monoid_out: str


@dataclass(frozen=True, slots=True)
class GemmDims:
    """Index dims of a contraction, sorted as those of a batched product of matrices.

    `lhs` and `rhs` number the two operands; `batch` dims run through both and the output, `m` only
    through `lhs`, `n` only through `rhs`, `k` through both and no output (the places in the window
    of a convolution, too). At one index point `window` products are summed: of windows whose places
    are no index dims. Along the dims `moving` windows move over `lhs`; a plain product has none.
    """

    lhs: int
    rhs: int
    batch: tuple[int, ...]
    m: tuple[int, ...]
    n: tuple[int, ...]
    k: tuple[int, ...]
    window: int
    moving: frozenset[int] = frozenset()

    def shape(self, extents: Sequence[int]) -> tuple[int, int, int, int]:
        """(batch, m, n, k) at the given index extents."""
        dims = self.batch, self.m, self.n, self.k
        batch, m, n, k = [prod([extents[d] for d in x]) for x in dims]
        return batch, m, n, k * self.window


#: What lies outside an operand whose ends meet.
AROUND = "around"


@dataclass(frozen=True)
class OperationSignature:
    """What sharding, costs and execution need to know of one operation; derived from a template.

    `inputs[p]` and `outputs[q]` project index boxes to boxes of operand p and output q.

    **Bounds.** A box never leaves its tensor, unless `outside[p]` says what lies beyond operand p:
    the zero of a monoid (its name), the element of a scalar operand (its number), or the operand's
    other end (`AROUND`). Then the
    operand's box is the part of the image that lies in the tensor, and whoever runs the kernel
    fills the rest of the image; a window over a padded tensor thus needs no padded copy of it.
    Along dims that are not cut and where the image holds the whole tensor nothing is filled: there
    the kernel pads by itself, as its parameters say. Outputs never leave their tensors.

    `initial` lists operands that are the starting value of the reduction (scatter-add's operand):
    when a reduce dim is cut they must be partial, not replicated. `straight` lists operands that
    the kernel wants in memory as their dims are written, no dim turned; `moved` those of which
    elements go to other places, or some are left out: as they are, and each to one place; `takes`
    those of which the kernel, given all of a dim, itself takes the part that it reads; `repeats`
    those of which each element stands in many places; `stored` those that compilers have in memory
    before they run the kernel, computing nothing inside it. With `parts` the results are parts of
    the operand, one after another along the dim of which they have less. With `dilates` it puts
    something between the elements of an operand, with `adds` elements of the result are sums of
    those of the operands. One that `rounds_as_one` is off by roundings of its greatest element in
    all of them. Where there is `writes` it writes an operand into another, as it is: (into which,
    which, and scalars that say where, one for each dim). Operands `read_at` say where it reads.
    `flops` is a polynomial over the (local) index extents; `reads[p]` overrides the elements read
    of operand p, None meaning the footprint of its projection. Operands `carried` go each with
    the result of its place: what
    nobody reads of these can be left out. `fusion` says how compilers treat the kernel:
    `view` (no data movement needed), `loop` (elementwise), `reduce` (elementwise producers fuse
    into it), `kernel`; `in_products` whether XLA for GPUs computes it inside the product of
    matrices that reads its result. `elements` says what each element of the results is: `computed`,
    one of the operands' that is `kept`, or one that is `selected` among all of them. With
    `commutes` the two operands may change places. `means` is what the kernel is to those that read
    programs, such as the `sum` of its operands.
    `measured` are the coordinates at which tables of measured kernels hold its rate, if any do;
    where none does, each flop takes `spilled` bytes through memory and back, and `scratch` bytes
    are in memory while it runs; of one that runs in `blocks` these say what kernels each is. It
    takes so many `steps` that wait for one another, as columns of a
    decomposition do, and reads or writes elements that are `scattered`. Of a product `precision` is
    high or highest where one is asked for.
    Along the index dims `placed` the kernel's result depends on where its block lies, as that of a
    counter does: whoever runs it on a block must see to it. Along all others the kernel on the
    boxes of some index points gives what the whole has there.
    `skips[p]` are the dims of operand p in which the kernel goes by strides of its own: of a box
    there it leaves out what lies between the elements that the index points read. In all other dims
    it takes every element of a box.
    `opaque` marks the fallback for kernels without a template: one index point, nothing to cut.
    With `once` one device runs it for all, and sends them the outputs; with `calls` it does so
    because it calls into Python, and sends whether that failed, too.
    """

    kernel: str
    index: tuple[IndexDim, ...]
    inputs: tuple[Projection, ...]
    outputs: tuple[Projection, ...]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    passages: tuple[Passage, ...] = ()
    initial: tuple[int, ...] = ()
    straight: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()
    takes: tuple[int, ...] = ()
    repeats: tuple[int, ...] = ()
    stored: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()
    read_at: tuple[int, ...] = ()
    parts: bool = False
    dilates: bool = False
    adds: bool = False
    rounds_as_one: bool = False
    carried: tuple[int, ...] = ()
    flops: Polynomial = ()
    reads: tuple[Polynomial | None, ...] = ()
    fusion: Fusion = "kernel"
    in_products: InProducts = "never"
    elements: Elements = "computed"
    commutes: bool = False
    means: Meaning = ""
    measured: tuple[float, ...] | None = None
    spilled: float = 0.0
    steps: Polynomial = ()
    scattered: Scattered | None = None
    precision: str = ""
    scratch: Scratch | None = None
    blocks: Blocks | None = None
    opaque: bool = False
    outside: tuple[str | int | None, ...] = ()
    once: bool = False
    calls: bool = False
    placed: tuple[int, ...] = ()
    skips: tuple[frozenset[int], ...] = ()

    @cached_property
    def extents(self) -> tuple[int, ...]:
        return tuple([d.size for d in self.index])

    @cached_property
    def sent_types(self) -> tuple[TensorType, ...]:
        """What the device that runs it sends to the others; of a call, also whether it failed."""
        if not self.once:
            return ()
        flag = (TensorType((), "int32"),) if self.calls else ()
        return (*map(carried_type, self.output_types), *flag)

    @cached_property
    def whole_flops(self) -> float:
        """Flops of the whole operation, on one device."""
        return evaluate(self.flops, self.extents)

    def spilled_in(self, extents: Sequence[int]) -> float:
        """`spilled` at the given (local) index extents: a network that sorts less along a `join`
        dim takes fewer steps, as log2 squared of the extent."""
        share = 1.0
        for dim, n in zip(self.index, extents, strict=True):
            if self.spilled and dim.role == "join" and 1 < n < dim.size:
                share *= (log2(n) / log2(dim.size)) ** 2
        return self.spilled * share

    @cached_property
    def read_bytes(self) -> tuple[float, ...]:
        """Per operand, the bytes that the whole operation reads of it."""
        reads = self.reads or (None,) * len(self.input_types)
        return tuple(
            float(t.nbytes) if r is None else evaluate(r, self.extents) * t.itemsize
            for t, r in zip(self.input_types, reads, strict=True)
        )

    @cached_property
    def input_bytes(self) -> int:
        """Bytes of all operands together."""
        return sum(t.nbytes for t in self.input_types)

    @cached_property
    def output_bytes(self) -> int:
        """Bytes of all outputs together."""
        return sum(t.nbytes for t in self.output_types)

    @cached_property
    def reduces(self) -> bool:
        """Whether some index dim is reduced."""
        return any(d.role == "reduce" for d in self.index)

    @cached_property
    def keeps_fills(self) -> bool:
        """Whether outputs hold one number everywhere where every operand does: it computes the same
        at every index point, and of nothing but operands."""
        return (
            not self.placed
            and all(d.role in ("map", "reduce") for d in self.index)
            and all(n == 1 for projection in self.outputs for n in projection.shape)
            and all(self.beyond(p) is None for p in range(len(self.inputs)))
        )

    @cached_property
    def contracts(self) -> bool:
        """Whether a kernel sums products of two operands over some index dim (tensor cores apply):
        one that no output has, whether it may be cut or not."""
        if self.fusion != "kernel":
            return False
        return any(
            sum(any(row[d] for row in p.matrix) for p in self.inputs) >= 2
            for d, dim in enumerate(self.index)
            if dim.role in ("reduce", "whole")
            and not any(row[d] for p in self.outputs for row in p.matrix)
        )

    @cached_property
    def multiplies(self) -> bool:
        """Whether it is a product of its two operands and no more: what no output has, both have
        (dots, convolutions; no attention, nor products of groups of rows)."""
        if not self.contracts or len(self.inputs) != 2:
            return False
        kept = {d for p in self.outputs for row in p.matrix for d, a in enumerate(row) if a}
        return all(
            any(row[d] for row in p.matrix)
            for p in self.inputs
            for d, dim in enumerate(self.index)
            if dim.role in ("reduce", "whole") and d not in kept
        )

    @cached_property
    def gemm(self) -> GemmDims | None:
        """The contraction as a product of matrices: the first two operands that share a summed dim.

        Which dim is which follows from the projections alone; a convolution is its implicit
        product. None where nothing contracts, or a dim belongs to neither operand (an attention),
        but what counts positions with one of the first operand's (of a dilated one).
        """
        if not self.contracts:
            return None
        inside = [{d for row in p.matrix for d, a in enumerate(row) if a} for p in self.inputs]
        kept = {d for p in self.outputs for row in p.matrix for d, a in enumerate(row) if a}
        for lhs, rhs in combinations(range(len(inside)), 2):
            shared = inside[lhs] & inside[rhs]
            if shared <= kept:
                continue
            window = min(prod(self.inputs[p].shape) for p in (lhs, rhs))
            others = set(range(len(self.index))) - (inside[lhs] | inside[rhs])
            rows = [{d for d, a in enumerate(row) if a} for p in self.outputs for row in p.matrix]
            if any(not any(d in r and r & inside[lhs] - shared for r in rows) for d in others):
                return None
            if others:  # positions between those of a dilated operand, each with its share of it
                between = prod([self.index[d].size for d in others])
                window = max(1, prod(self.inputs[rhs].shape) // between)
            return GemmDims(
                lhs,
                rhs,
                tuple(sorted(shared & kept)),
                tuple(sorted((inside[lhs] - shared) | others)),
                tuple(sorted(inside[rhs] - shared)),
                tuple(sorted(shared - kept)),
                window,
                self._moving(lhs, shared & kept) | others,
            )
        return None

    def _moving(self, p: int, groups: set[int]) -> frozenset[int]:
        """Index dims along which windows move over operand p: those that place an element of it
        together, or a box of several. Channels of groups are such a pair, too, and move nothing."""
        moving: set[int] = set()
        for n, row in zip(self.inputs[p].shape, self.inputs[p].matrix, strict=True):
            dims = {d for d, a in enumerate(row) if a and self.index[d].size > 1}
            if len(dims) + (n > 1) > 1 and dims and not dims & groups:
                moving |= dims
        return frozenset(moving)

    def convolved(self, extents: Sequence[int]) -> tuple[int, float, float] | None:
        """(form, channels, padded) of a convolution at the given index extents, as `Convolved` has
        them; None where no window moves.

        The gradient of weights is a convolution, too: its window is the whole image, its results
        are as large as the weights' window, and what it calls the batch are channels.
        """
        dims = self.gemm
        if dims is None or not dims.moving:
            return None
        positions = prod([extents[d] for d in dims.m if d in dims.moving])
        places = dims.window * prod([extents[d] for d in dims.k if d in dims.moving])
        weights = places > positions
        read = prod([extents[d] for d in (dims.m if weights else dims.k) if d not in dims.moving])
        made = prod([extents[d] for d in dims.n])
        groups = prod([extents[d] for d in dims.batch])
        padded = evaluate(self.scratch.beside, tuple(extents)) if self.scratch else 0.0
        slid = [d for d in dims.m if d in dims.moving and self.index[d].size > 1]
        form = 4 if groups > 1 and not weights and len(slid) == 1 else 2 * (groups > 1) + weights
        return form, float(read * made) ** 0.5, padded

    @property
    def by_groups(self) -> bool:
        """Whether it is a product for every group of rows, which a third operand tells apart."""
        return self.gemm is not None and len(self.inputs) > 2 and self.is_product

    @property
    def is_product(self) -> bool:
        """Whether it is a plain product of matrices, or one for every group of rows: no window runs
        over both operands."""
        gemm = self.gemm
        if gemm is None or gemm.window > 1:
            return False
        long = {d for d, dim in enumerate(self.index) if dim.size > 1}
        moving = [
            {d for d in long if row[d]}
            for p in (gemm.lhs, gemm.rhs)
            for row in self.inputs[p].matrix
        ]
        return not any(len(dims) > 1 and dims & set(gemm.k) for dims in moving)

    @cached_property
    def reduces_rows(self) -> bool:
        """Whether a reduction goes along the last dim of what it reads, as that is written."""
        last = self.inputs[0].matrix[-1:] if self.inputs else ()
        return any(a and self.index[d].role == "reduce" for row in last for d, a in enumerate(row))

    @cached_property
    def scatters_once(self) -> bool:
        """Whether it adds one number, at most, to each element of what it starts from."""
        dims = [d for d in self.index if d.size > 1]
        return (
            bool(self.initial)
            and len(self.inputs) == 3
            and all(d.role == "map" for d in dims)
            and not any(n > 1 for p in self.inputs for n in p.shape)
            and prod(self.input_types[2].shape) < prod(self.output_types[0].shape)
        )

    @property
    def written_into(self) -> int | None:
        """The operand that the result is but for a part or elements at scattered places; None of
        others."""
        if self.writes:
            return self.writes[0]
        if self.scattered is None or self.scattered.operand == 0 or self.fusion != "kernel":
            return None
        return 0 if self.input_types[0].shape == self.output_types[0].shape else None

    @property
    def written_share(self) -> float:
        """How much of the result is written where it is written into an operand in place: a part;
        elements at scattered places are counted with the operand that has them."""
        if not self.writes or not self.output_types[0].size:
            return 0.0
        return self.input_types[self.writes[1]].size / self.output_types[0].size

    @property
    def written_over(self) -> tuple[int, ...]:
        """The operands in whose place the result may be: what a reduction starts from, and what it
        is written into."""
        into = self.written_into
        return self.initial if into is None or into in self.initial else (*self.initial, into)

    @property
    def into_rows(self) -> bool:
        """Whether it writes or adds to rows of something, as that is written, and multiplies
        nothing."""
        return bool(self.straight) and not self.multiplies

    @cached_property
    def permutation(self) -> tuple[int, ...] | None:
        """Of a view of one operand that puts its dims into another order: which of the operand's
        dims each dim of the result is. None for anything else, also where the order stays."""
        if self.fusion != "view" or len(self.inputs) != 1 or len(self.outputs) != 1:
            return None
        found = []
        for projection in (*self.inputs, *self.outputs):
            rows = [[(d, a) for d, a in enumerate(row) if a] for row in projection.matrix]
            plain = not any(projection.offset) and all(n == 1 for n in projection.shape)
            if not plain or any(len(row) != 1 or row[0][1] != 1 for row in rows):
                return None
            found.append([row[0][0] for row in rows])
        source, target = found
        if source == target or sorted(source) != sorted(target):
            return None
        return tuple(source.index(d) for d in target)

    @cached_property
    def window_dims(self) -> tuple[frozenset[int], ...]:
        """Of each operand and output the dims along which windows move: where one of them is read
        or written several elements at an index point that move with the index, or ones that several
        index dims place. Of what rows are added to, and of these, the dims that the other has not.
        """
        long = [d for d, dim in enumerate(self.index) if dim.size > 1]
        every = (*self.inputs, *self.outputs)
        rows = [[{d for d in long if row[d]} for row in p.matrix] for p in every]
        moving = {
            d
            for p, placed in zip(every, rows, strict=True)
            for n, dims in zip(p.shape, placed, strict=True)
            if len(dims) + (n > 1) > 1
            for d in dims
        }
        found = [{k for k, dims in enumerate(placed) if dims & moving} for placed in rows]
        if self.initial and len(self.inputs) == 3 and not self.scatters_once:
            into, _, added, _ = [set[int]().union(*placed) for placed in rows]
            for p, other in ((0, added), (2, into), (3, added)):
                found[p] |= {k for k, dims in enumerate(rows[p]) if dims - other}
        return tuple(map(frozenset, found))

    @cached_property
    def shares_read(self) -> tuple[float | None, ...]:
        """Per operand, how often its elements are read, on average; None where the result has the
        same index."""
        return tuple([self._share_read(p) for p in range(len(self.inputs))])

    def _share_read(self, p: int) -> float | None:
        if self.fusion != "loop" or len(self.outputs) != 1:
            return 1.0
        own, result = self.input_types[p], self.output_types[0]
        if own.shape == result.shape and p not in self.moved:
            return None
        return min(1.0, result.size / max(1, own.size))

    @cached_property
    def times_repeated(self) -> tuple[float, ...]:
        """Per operand, how often each element is in the result, where more than once."""
        if self.fusion != "loop" or len(self.outputs) != 1:
            return (1.0,) * len(self.inputs)
        size = self.output_types[0].size
        return tuple([max(1.0, size / max(1, own.size)) for own in self.input_types])

    @cached_property
    def is_dear(self) -> bool:
        """Whether an element takes as many flops as an exponential or more."""
        return self.fusion == "loop" and self.whole_flops >= _DEAR * self.output_types[0].size > 0

    @cached_property
    def by_vector(self) -> bool:
        """Whether it is a product of a matrix and a vector, or of two."""
        gemm = self.gemm
        return gemm is not None and min(gemm.shape(self.extents)[1:3]) == 1

    @cached_property
    def adds_columns(self) -> bool:
        """Whether it is such a product that does not sum along the last dim of the matrix."""
        gemm = self.gemm
        if gemm is None or not self.by_vector:
            return False
        matrix = self.inputs[gemm.lhs if gemm.shape(self.extents)[2] == 1 else gemm.rhs]
        return not any(matrix.matrix[-1][d] for d in gemm.k)

    def beyond(self, p: int) -> str | int | None:
        """What lies outside operand p; None where nothing may reach there."""
        return self.outside[p] if self.outside else None

    def operand_box(self, p: int, box: ZRange) -> ZRange:
        """The box of operand p that an index box reads: its image, less what lies outside. Along
        dims of which the kernel takes its part itself, and where the other end of the operand lies
        outside, that is all of the operand."""
        image = self.inputs[p].image(box)
        if self.beyond(p) is None:
            return image
        every = ZRange.from_shape(self.input_types[p].shape)
        inside = image.clip(every)
        own = self._taken(p, image)
        if self.beyond(p) == AROUND:
            each = zip(own, image.start, image.end, every.end, strict=True)
            own = tuple([o or a < 0 or b > n for o, a, b, n in each])
        if not any(own):
            return inside
        start = [0 if o else a for o, a in zip(own, inside.start, strict=True)]
        end = [n if o else b for o, n, b in zip(own, every.end, inside.end, strict=True)]
        return ZRange(tuple(start), tuple(end))

    def _taken(self, p: int, image: ZRange) -> tuple[bool, ...]:
        """Along which dims of operand p, of which it takes parts itself, a kernel has all."""
        if p not in self.takes:
            return (False,) * image.rank
        projection = self.inputs[p]
        whole = projection.image(ZRange.from_shape(self.extents))
        return tuple(
            [
                any(row) and (image.start[k], image.end[k]) == (whole.start[k], whole.end[k])
                for k, row in enumerate(projection.matrix)
            ]
        )

    def margins(self, p: int, box: ZRange) -> tuple[tuple[int, int], ...]:
        """Per dim of operand p, elements of an index box's image before and after `operand_box`.

        Zeros along dims where the box has the image of the whole index space and that holds all of
        the operand: the kernel itself pads there; and where it takes its part itself.
        """
        image = self.inputs[p].image(box)
        inside = image.clip(ZRange.from_shape(self.input_types[p].shape))
        taken = self._taken(p, image)
        whole = self.inputs[p].image(ZRange.from_shape(self.extents))
        out = []
        for k, n in enumerate(image.shape):
            uncut = (image.start[k], image.end[k]) == (whole.start[k], whole.end[k])
            holds = whole.start[k] <= 0 and self.input_types[p].shape[k] <= whole.end[k]
            if taken[k] or (uncut and holds):
                out.append((0, 0))
                continue
            before = min(max(inside.start[k] - image.start[k], 0), n - inside.shape[k])
            out.append((before, n - inside.shape[k] - before))
        return tuple(out)


def carried_type(type_: TensorType) -> TensorType:
    """The integers in which the bits of a tensor travel where devices add them up.

    A sum with zeros is exact for integers; of floats it would lose the sign of zeros.
    """
    name, shape = type_.dtype, type_.shape
    if name.startswith(("int", "uint")):
        return TensorType(shape, name if type_.itemsize > 1 else "int8")
    if name.startswith("complex"):
        return TensorType((*shape, 2), f"uint{type_.itemsize * 4}")
    if name.startswith("float4"):
        return TensorType(shape, "uint32")  # by way of float32, which has all of them
    return TensorType(shape, f"uint{type_.itemsize * 8}")
