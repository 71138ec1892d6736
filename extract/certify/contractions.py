"""Contractions as the certificate sees them, from a signature's projections alone.

It shares nothing with `OperationSignature.gemm`, which the search reads.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection


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
    through which no output has; None where another operand has dims of its own."""
    kept = _columns(signature.outputs)
    columns = [_columns([p]) for p in signature.inputs]
    pairs = [(p, q) for p in range(len(columns)) for q in range(p + 1, len(columns))]
    p, q = next((p, q) for p, q in pairs if (columns[p] & columns[q]) - kept)
    # What one index point alone sums: a window whose places are no index dims, 1 elsewhere.
    points = [prod(signature.inputs[x].shape) for x in (p, q)]
    sizes = [1.0, 1.0, 1.0, float(min(points))]  # batch, m, n, k
    for d, size in enumerate(extents):
        left, right = d in columns[p], d in columns[q]
        if not (left or right):
            return None
        sizes[(0 if d in kept else 3) if left and right else 1 if left else 2] *= size
    lhs, rhs = signature.input_types[p].dtype, signature.input_types[q].dtype
    out = signature.output_types[0].dtype
    return Gemm(sizes[0], sizes[1], sizes[2], sizes[3], lhs, rhs, out)


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


def sums_columns(signature: OperationSignature) -> bool:
    """Whether a product of a matrix and a vector sums along another dim than the matrix's last."""
    kept = _columns(signature.outputs)
    matrix = max(signature.inputs, key=lambda p: len(_long(_columns([p]), signature)))
    last = {d for d, a in enumerate(matrix.matrix[-1]) if a}
    return not _long(last, signature) - kept


def _long(dims: Iterable[int], signature: OperationSignature) -> set[int]:
    return {d for d in dims if signature.index[d].size > 1}


def _columns(projections: Iterable[Projection]) -> set[int]:
    """Index dims that some projection depends on."""
    return {d for p in projections for row in p.matrix for d, a in enumerate(row) if a}
