"""What measured tables say of one kernel or collective, for numbers or arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from .collectives import collective_table, errors_by_kind
from .files import TableFile
from .gemm import Gemm
from .matmuls import errors_by_dtype, matmul_table

Amount = TypeVar("Amount", float, NDArray[np.float64])


def measured_gemm(gemm: Gemm[Amount], file: TableFile, launch: float) -> Amount | None:
    """Seconds of a product of matrices by a table; None where it holds none of such dtypes.

    `launch` is what any kernel takes.
    """
    column = matmul_table(file).column(gemm.lhs, gemm.rhs, gemm.out)
    if column is None:
        return None
    shape = (gemm.batch, gemm.m, gemm.n, gemm.k)
    if isinstance(gemm.batch, np.ndarray):
        array = np.stack([np.asarray(x, np.float64) for x in shape])
        few, back = np.unique(array, axis=1, return_inverse=True)
        found = matmul_table(file).time(few, column, launch)
        out: Amount = found[back.reshape(-1)]
        return out
    one = tuple(float(x) for x in shape)
    return _gemm_once(file, column, one, launch)


def measured_collective(
    file: TableFile, kind: str, nbytes: Amount, group: int, devices: int
) -> Amount | None:
    """Seconds of a collective in groups of `group` by a table; None where it has none of the kind.

    `nbytes` as the table counts them, `devices` those that the level joins.
    """
    table = collective_table(file)
    if not table.has(kind):
        return None
    if isinstance(nbytes, np.ndarray):
        return table.time(kind, "", nbytes, group, devices)
    return _collective_once(file, kind, float(nbytes), group, devices)


@dataclass(frozen=True, slots=True)
class TableError:
    """How well a table foretells its own rows, each left out in turn: relative errors."""

    what: str  # a kind of collective, or the dtypes of a product
    rows: int
    median: float
    high: float  # 90th percentile


def table_errors(
    matmuls: TableFile | None, collectives: TableFile | None
) -> tuple[TableError, ...]:
    """The errors of both tables of a target, by dtypes and by kind."""
    found = []
    if matmuls is not None:
        for d, rows, median, high in errors_by_dtype(matmul_table(matmuls)):
            found.append(TableError(str(d), rows, median, high))
    if collectives is not None:
        for kind, dtype, rows, median, high in errors_by_kind(collective_table(collectives)):
            found.append(TableError(f"{kind} {dtype}", rows, median, high))
    return tuple(found)


@lru_cache(maxsize=1 << 16)
def _gemm_once(file: TableFile, column: int, shape: tuple[float, ...], floor: float) -> float:
    sizes = np.array(shape).reshape(4, 1)
    return float(matmul_table(file).time(sizes, column, floor)[0])


@lru_cache(maxsize=1 << 16)
def _collective_once(file: TableFile, kind: str, nbytes: float, group: int, devices: int) -> float:
    return float(collective_table(file).time(kind, "", np.array([nbytes]), group, devices)[0])
