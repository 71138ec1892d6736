"""Contractions from a signature's projections alone: an oracle for `OperationSignature.gemm`."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod, sqrt

from tapestry_egg.machine.tables.gemm import Convolved, Gemm
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate
from tapestry_egg.zspace import Projection

_BATCH, _ROWS, _COLUMNS, _SUMMED, _NEITHER = range(5)


def is_contraction(signature: OperationSignature) -> bool:
    """Whether some dim that no output has runs through two operands, so that the matrix units can
    do it."""
    kept = _columns(signature.outputs)
    return any(
        d not in kept
        and dim.role in ("reduce", "whole")
        and sum(any(row[d] for row in p.matrix) for p in signature.inputs) > 1
        for d, dim in enumerate(signature.index)
    )


def gemm_of(signature: OperationSignature, extents: tuple[int, ...]) -> Gemm[float] | None:
    """A contraction's local product of matrices: between its first two operands that a dim runs
    through which no output has; None where another operand has dims of its own.

    Of a convolution over a dilated operand also what lies between its elements are rows, each with
    its share of the window.
    """
    kept = _columns(signature.outputs)
    columns = [_columns([p]) for p in signature.inputs]
    pairs = [(p, q) for p in range(len(columns)) for q in range(p + 1, len(columns))]
    p, q = next((p, q) for p, q in pairs if (columns[p] & columns[q]) - kept)
    # What one index point alone sums: a window whose places are no index dims, 1 elsewhere.
    points = [prod(signature.inputs[x].shape) for x in (p, q)]
    place = [_place(d in columns[p], d in columns[q], d in kept) for d in range(len(extents))]
    between = {d for d, x in enumerate(place) if x == _NEITHER}
    finer = set[int]()  # what counts on within the steps of a row
    for row in (row for made in signature.outputs for row in made.matrix):
        if any(a and place[d] == _ROWS for d, a in enumerate(row)):
            finer |= {d for d, a in enumerate(row) if a}
    if between - finer:
        return None
    summed = min(points)
    if between:
        summed = max(1, points[1] // prod(signature.index[d].size for d in between))
    sizes = [1.0, 1.0, 1.0, float(summed)]
    for d, size in enumerate(extents):
        sizes[_ROWS if d in between else place[d]] *= size
    lhs, rhs = signature.input_types[p].dtype, signature.input_types[q].dtype
    out = signature.output_types[0].dtype
    slid = _slid(signature.inputs[p], signature, {d for d, x in enumerate(place) if x == _BATCH})
    slid |= between
    convolved = _convolved(signature, extents, place, slid, summed) if slid else None
    asked = signature.precision
    return Gemm(sizes[0], sizes[1], sizes[2], sizes[3], lhs, rhs, out, convolved, asked)


def _place(left: bool, right: bool, kept: bool) -> int:
    """Where an index dim of a contraction belongs in its product of matrices."""
    if left and right:
        return _BATCH if kept else _SUMMED
    return _ROWS if left else _COLUMNS if right else _NEITHER


def _slid(read: Projection, signature: OperationSignature, batch: set[int]) -> set[int]:
    """Index dims that move windows over an operand: where they meet others in one of its dims, or
    move a box of several elements. Dims of the batch are groups of channels."""
    found = set[int]()
    for row, box in zip(read.matrix, read.shape, strict=True):
        long = _long((d for d, a in enumerate(row) if a), signature)
        if not long & batch and long and len(long) + box > 2:
            found |= long
    return found


def _convolved(
    signature: OperationSignature,
    extents: tuple[int, ...],
    place: list[int],
    slid: set[int],
    window: int,
) -> Convolved[float]:
    """What paces a convolution, as tables of measured ones have it."""

    def sizes(where: int, moving: bool) -> int:
        chosen = [d for d, x in enumerate(place) if x == where and (d in slid) == moving]
        return prod(extents[d] for d in chosen)

    results = sizes(_ROWS, True) * sizes(_NEITHER, True)  # of an image
    to_weights = sizes(_SUMMED, True) * window > results
    channels = sizes(_ROWS if to_weights else _SUMMED, False) * prod(
        n for n, x in zip(extents, place, strict=True) if x == _COLUMNS
    )
    grouped = prod(n for n, x in zip(extents, place, strict=True) if x == _BATCH) > 1
    beside = signature.scratch.beside if signature.scratch else ()
    form = float(to_weights) + (2.0 if grouped else 0.0)
    along = [d for d in slid if place[d] in (_ROWS, _NEITHER) and signature.index[d].size > 1]
    if form == 2.0 and len(along) == 1:
        form = 4.0
    return Convolved(form, sqrt(channels), evaluate(beside, extents))


def is_product(signature: OperationSignature) -> bool:
    """Whether a contraction sums products of single elements of its two operands, no windows: what
    it sums over runs along dims of their own."""
    kept = _columns(signature.outputs)
    columns = [_columns([p]) for p in signature.inputs]
    points = [prod(p.shape) for p in signature.inputs]
    sizes = signature.extents
    return any(
        (summed := (columns[p] & columns[q]) - kept)
        and 1 in (points[p], points[q])
        and all(
            sum(sizes[e] > 1 for e, b in enumerate(row) if b) < 2
            for x in (p, q)
            for row in signature.inputs[x].matrix
            if any(row[d] and sizes[d] > 1 for d in summed)
        )
        for p in range(len(columns))
        for q in range(p)
    )


def _long(dims: Iterable[int], signature: OperationSignature) -> set[int]:
    return {d for d in dims if signature.index[d].size > 1}


def _columns(projections: Iterable[Projection]) -> set[int]:
    """Index dims that some projection depends on."""
    return {d for p in projections for row in p.matrix for d, a in enumerate(row) if a}
