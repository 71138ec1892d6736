"""Scratch that XLA takes for products of matrices: sums over many terms, made in parts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import itemsize
from tapestry_egg.machine.tables.gemm import Gemm

# Its compiler for GPUs cuts the summed dim of a product into s parts and stores s products of the
# result's size before it adds them up (`SplitkRewriter`, xla/service/gpu/transforms; as of jaxlib
# 0.10). It takes the first s of 1, 2, 4 ... 2048 of least cost, in units of its own, with constants
# per generation of GPUs: for products of m×k by k×n in tiles of at most 128 × 128 on c cores
#
#     larger of   2 · flop · tile · ceil(k / s) · waves, waves = tiles · tile / (128² · c) or 1
#                 byte · (bytes of both operands and of what is stored)
#     and if s > 1:  sum · (bytes of all parts and of the result) + launch


# As the formula above has them: a tile, and the most parts.
_TILE = 128
_LARGEST = 2048

# Columns of a matrix are added up by few threads where they are few. With more rows than the first
# it then pays to multiply first, in another kernel; with more than the second the compiler adds
# them up in two steps. Measured from modules for H100 (jaxlib 0.10) of 15 shapes of 32 to 2048
# columns, each with 257 to 12000 rows: the most columns per core for which they are stored.
_ROWS, _ROWS_AT_ONCE, _COLUMNS = 256, 4096, 12.0


@dataclass(frozen=True, slots=True)
class SplitK:
    """What the compiler takes parts to cost on one generation of GPUs with `cores` of them."""

    cores: int
    flop: float
    byte: float
    sum: float
    launch: float


def split_scratch(gemm: Gemm[NDArray[np.float64]], costs: SplitK) -> NDArray[np.float64]:
    """Bytes of the partial products of a contraction, per entry; 0 where it is not split.

    Integers are not split.
    """
    sizes = np.broadcast_arrays(gemm.batch, gemm.m, gemm.n, gemm.k)
    batch, m, n, k = [np.asarray(x, dtype=np.float64) for x in sizes]
    if "int" in gemm.lhs or gemm.lhs == "bool":
        return np.zeros(batch.shape)
    result, part = itemsize(gemm.out), max(itemsize(gemm.out), 4)
    tile = np.minimum(m, _TILE) * np.minimum(n, _TILE)
    tiles = np.ceil(m / _TILE) * np.ceil(n / _TILE) * batch
    operands = batch * k * (m * itemsize(gemm.lhs) + n * itemsize(gemm.rhs))
    best, parts = np.full(batch.shape, np.inf), np.ones(batch.shape)
    s = 1
    while s <= _LARGEST:
        waves = np.maximum(tiles * s * tile / (_TILE**2 * costs.cores), 1.0)
        compute = 2 * costs.flop * tile * np.ceil(k / s) * waves
        stored = batch * s * m * n * (part if s > 1 else result)
        cost = np.maximum(compute, costs.byte * (operands + stored))
        if s > 1:
            cost = cost + costs.sum * (stored + batch * m * n * result) + costs.launch
        parts = np.where(cost < best, s, parts)
        best = np.minimum(cost, best)
        s *= 2
    return np.where(parts > 1, parts * batch * m * n * part, 0.0)


def multiplied(gemm: Gemm[NDArray[np.float64]], costs: SplitK) -> NDArray[np.float64]:
    """Bytes of the products of all elements of a matrix and a vector, per entry: what the compiler
    stores before it adds them up, where it sums along columns, and few of them; else 0."""
    sizes = np.broadcast_arrays(gemm.batch, gemm.m, gemm.n, gemm.k)
    batch, m, n, k = [np.asarray(x, dtype=np.float64) for x in sizes]
    columns, most = batch * m * n, _COLUMNS * costs.cores * (1.0 - _ROWS / np.maximum(k, 1.0))
    stored = (k > _ROWS) & (k <= _ROWS_AT_ONCE) & (columns <= most)
    return np.where(stored, columns * k * itemsize(gemm.out), 0.0)
