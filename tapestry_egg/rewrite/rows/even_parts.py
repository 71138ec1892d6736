"""Even parts: dims that devices cannot share evenly, padded over a whole region of a program.

Six heads on four devices become eight. The region is what reads and makes rows along such a dim:
operations whose projections say that blocks of rows give blocks of what the whole gives (`cuts.py`)
run on more rows, each on its own, and the rows that were added hold whatever they hold. Before a
sum over rows they are overwritten with the monoid's neutral element. Windows that slide along rows
are of the region, too: where their steps do not make up the operand (254 rows of 256), they get as
many as make it up, and an operand whose rows were added is overwritten there with what lies outside
of it. What enters the region is padded with zeros, what leaves it is cut back. Every later stage
sees extents that divide, and prices the rows that were added like all others. Nothing is known of
any kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .padded import Region, may_grow, padded

# Of these numbers no measurement is kept.

#: Of the time that products take where all devices share them as evenly as they can, padding must
#: save this share: a program that devices can share is left alone.
_LEAST_GAIN = 0.2
#: Shares of time that differ by less are alike.
_ALIKE = 0.01
#: A product that makes so many times the bytes that it reads is not cut along what it sums.
_MUCH_MORE = 2
#: Products that dims to pad are taken from, those first that take longest; and dims, one after
#: another.
_SEEDS, _ROUNDS = 3, 3


def with_even_parts(graph: BlockGraph, parts: int) -> BlockGraph:
    """The program, its loops and branches too, with dims padded that so many devices cannot share;
    the same graph where they can share most of the work as it is."""
    graph = graph.map_regions(lambda region: with_even_parts(region, parts))
    for _ in range(_ROUNDS):
        found = _best(graph, parts) or _best(graph, parts, in_all=True)
        if found is None:
            break
        graph = padded(found)
    return graph


def _best(graph: BlockGraph, parts: int, in_all: bool = False) -> Region | None:
    """The region that saves most, if one saves enough; `in_all` as for `shared`."""
    work = _Work(graph, parts, in_all)
    if in_all and all(len(_of_large_tensors(s)) == len(s.index) for s in work.signatures.values()):
        return None  # the same again
    given = work.seconds(None)
    best: Region | None = None
    least = (1.0 - _LEAST_GAIN) * given
    for k, index, extent in work.candidates():
        region = Region(graph)
        if not region.grown(k, index, extent):
            continue
        seconds = work.seconds(region)
        if seconds < least:
            best, least = region, seconds
    return best


class _Work:
    """What products of a program take, in flops of one device, when devices share them evenly."""

    def __init__(self, graph: BlockGraph, parts: int, in_all: bool = False) -> None:
        self.graph, self.parts, self.in_all = graph, parts, in_all
        self.signatures = {
            k: sig
            for k, op in enumerate(graph.operations)
            if may_grow(graph, op) and (sig := registry.signature_in(graph, op)).contracts
        }

    def seconds(self, region: Region | None) -> float:
        """The flops of all products on the device that has most, some of them in a region."""
        total = 0.0
        for k, sig in self.signatures.items():
            extents = list(sig.extents)
            waste = 1.0
            if region is not None and k in region.inside:
                index, size = region.inside[k].index, region.inside[k].size
                waste = size / extents[index]
                extents[index] = size
            total += sig.whole_flops * waste / self._shared(sig, extents)
        return total

    def _shared(self, sig: OperationSignature, extents: Sequence[int]) -> int:
        return shared(sig, extents, self.parts, self.in_all)

    def candidates(self) -> Iterator[tuple[int, int, int]]:
        """Products, an index dim of each, and the extent to which it may be padded."""

        def alone(k: int) -> float:
            sig = self.signatures[k]
            return sig.whole_flops / self._shared(sig, sig.extents)

        uneven = [k for k, s in self.signatures.items() if self._shared(s, s.extents) < self.parts]
        for k in sorted(uneven, key=lambda k: (-alone(k), k))[:_SEEDS]:
            sig = self.signatures[k]
            for index, dim in enumerate(sig.index):
                if dim.size < 2 or dim.role not in ("map", "reduce"):
                    continue
                extent = self._padded(sig, index)
                if extent > dim.size:
                    yield k, index, extent

    def _padded(self, sig: OperationSignature, index: int) -> int:
        """The extent of an index dim with which a product takes least on every device: with it a
        window's steps make up the operand."""
        size = sig.extents[index]
        least = max([size, *_steps(sig, index)])
        best = size, 1.0 / self._shared(sig, sig.extents)
        for n in range(2, self.parts + 1):
            if self.parts % n:
                continue
            extents = list(sig.extents)
            extents[index] = -(-least // n) * n
            took = extents[index] / size / self._shared(sig, extents)
            if took < (1.0 + _ALIKE) * best[1]:  # more parts of one dim need no second mesh axis
                best = extents[index], took
        return best[0]


def _steps(sig: OperationSignature, index: int) -> Iterator[int]:
    """How many steps along an index dim make up the dims of operands that it moves along."""
    for projection, type_ in zip(sig.inputs, sig.input_types, strict=True):
        for row, extent in zip(projection.matrix, type_.shape, strict=True):
            if row[index] > 0:
                yield -(-extent // row[index])


def shared(
    sig: OperationSignature, extents: Sequence[int], parts: int, in_all: bool = False
) -> int:
    """How many of `parts` devices can share an operation in equal parts, whatever dims are cut.

    With `in_all`, dims that not all large tensors have are not cut, as every device would hold one
    of them whole: of a product with windows, and of one that makes much more than it reads.
    """
    left = parts
    own = _of_large_tensors(sig) if in_all else range(len(sig.index))
    for d, (dim, extent) in enumerate(zip(sig.index, extents, strict=True)):
        if dim.role in ("map", "reduce") and d in own:
            while (common := gcd(extent, left)) > 1:
                left //= common
                extent //= common
    return parts // left


def _of_large_tensors(sig: OperationSignature) -> set[int]:
    """The index dims of an operation that all its large tensors have."""
    own = set(range(len(sig.index)))
    read, made = (sum(t.nbytes for t in ts) for ts in (sig.input_types, sig.output_types))
    if sig.gemm is None or (sig.is_product and made < _MUCH_MORE * read):
        return own
    projections = (*sig.inputs, *sig.outputs)
    sizes = [t.nbytes for t in (*sig.input_types, *sig.output_types)]
    for projection, size in zip(projections, sizes, strict=True):
        if 2 * size >= max(sizes):
            own &= {d for row in projection.matrix for d, a in enumerate(row) if a}
    return own
