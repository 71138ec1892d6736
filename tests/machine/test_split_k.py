"""Products whose sum XLA's compiler for GPUs splits, against what it chose."""

from __future__ import annotations

import numpy as np
import pytest

from tapestry_egg.machine.split_products import split_scratch
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.target import load_target

#: Batch, m, n, k, dtype, and into how many parts jaxlib 0.10.2 splits k, compiling for an H100
#: ahead of time (the shapes before and after its pass splitk-rewriter).
CHOSEN = [
    (1, 1024, 256, 128, "float32", 1),
    (8, 512, 176, 768, "bfloat16", 1),
    (2, 768, 1024, 4096, "float32", 1),
    (1, 4096, 512, 16384, "float32", 1),
    (1, 2048, 128, 352, "bfloat16", 2),
    (1, 768, 2048, 8192, "bfloat16", 2),
    (2, 128, 4096, 8192, "float32", 2),
    (1, 512, 16, 352, "float32", 4),
    (1, 4096, 64, 1024, "float32", 4),
    (2, 256, 1024, 16384, "float32", 4),
    (1, 320, 256, 1408, "float32", 8),
    (8, 320, 64, 16384, "bfloat16", 8),
    (1, 512, 176, 3072, "float32", 16),
    (2, 128, 64, 4096, "bfloat16", 32),
    (1, 64, 64, 8192, "float32", 64),
    (1, 16, 64, 16384, "bfloat16", 64),
]


def scratch(target: str, *rows: tuple[int, int, int, int, str, int]) -> list[float]:
    costs = load_target(target).split_k
    assert costs is not None
    found = []
    for b, m, n, k, dtype, _ in rows:
        sizes = (np.array(float(x)) for x in (b, m, n, k))
        found.append(float(split_scratch(Gemm(*sizes, dtype, dtype, dtype), costs)))
    return found


def test_parts_are_those_that_the_compiler_makes() -> None:
    """Parts are stored in float32."""
    wanted = [parts * b * m * n * 4.0 * (parts > 1) for b, m, n, _, _, parts in CHOSEN]
    assert scratch("h100:8", *CHOSEN) == wanted


def test_many_products_at_once_are_as_each_alone() -> None:
    costs = load_target("h100:8").split_k
    rows = [r for r in CHOSEN if r[4] == "float32"]
    sizes = np.array([r[:4] for r in rows], dtype=float).T
    dtypes = ("float32",) * 3
    assert costs is not None
    assert split_scratch(Gemm(*sizes, *dtypes), costs).tolist() == scratch("h100:8", *rows)


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_integers_are_not_split(dtype: str) -> None:
    assert scratch("h100:8", (1, 64, 64, 8192, dtype, 1)) == [0.0]


@pytest.mark.parametrize("target", ["v5e:2x4", "cpu:8"])
def test_other_compilers_split_nothing(target: str) -> None:
    assert load_target(target).split_k is None
