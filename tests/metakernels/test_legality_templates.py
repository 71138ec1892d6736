"""Which cuts of JAX's operations are legal by their templates: by brute force, and by hand."""

from __future__ import annotations

from itertools import combinations
from math import prod
from typing import Any

import pytest

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.splits import Blocks, legal_dims, split
from tests.metakernels.brute_splits import brute
from tests.metakernels.cases import CASES, FAMILY, application

#: Points of an index space beyond which brute force takes too long.
MOST = 150
KERNELS = [k for k in CASES if FAMILY[k] != "elementwise" or k in ("add", "clamp", "select_n")]


@pytest.mark.parametrize("kernel", KERNELS)
def test_operations_are_cut_as_brute_force_says(kernel: str) -> None:
    signatures = [application(kernel, seed).signature for seed in range(8)]
    for s in [s for s in signatures if s.index and prod(s.extents) <= MOST][:3]:
        dims = range(len(s.index))
        cuts = [{d: (n,)} for d in dims for n in (2, 3, 4)]
        cuts += [{d: (2,), e: (n,)} for d, e in combinations(dims, 2) for n in (2, 3)]
        for axes in cuts:
            mine, theirs = split(s, axes), brute(s, {d: prod(n) for d, n in axes.items()})
            assert mine.legal == (theirs is not None), (s, axes, mine.refusal)
            if theirs is not None:
                assert (list(mine.inputs), list(mine.outputs)) == theirs, (s, axes)


def test_reshapes_are_cut_by_their_digits() -> None:
    params = {"new_sizes": [12, 4], "dimensions": None, "sharding": None}
    merged = registry.signature("reshape", params, (TensorType((3, 4, 4), "float32"),))
    assert [d.size for d in merged.index] == [3, 4, 4]
    assert legal_dims(merged, 3) == (0, 2)
    both = split(merged, {0: (3,), 1: (2,)})
    assert both.inputs == ({0: Blocks(0), 1: Blocks(1)},)
    assert both.outputs == ({0: Blocks(0), 1: Blocks(0, above=(0,))},)


@pytest.mark.parametrize(
    ("kernel", "params", "dims"),
    [
        ("cumsum", {"axis": 1, "reverse": False}, (0, 1)),
        ("argmax", {"axes": [1], "index_dtype": {"$dtype": "int32"}}, (0, 1)),
        ("top_k", {"k": 2, "axis": 1, "operand": None}, (0, 1)),
        ("sort", {"dimension": 1, "is_stable": True, "num_keys": 1}, (0,)),
    ],
)
def test_what_runs_along_a_dim_leaves_the_others_free(
    kernel: str, params: dict[str, Any], dims: tuple[int, ...]
) -> None:
    """The dim itself is cut where devices combine states of what they have of it."""
    s = registry.signature(kernel, params, (TensorType((4, 6), "float32"),))
    assert legal_dims(s, 2) == dims
    if 1 not in dims:
        assert split(s, {1: (2,)}).refusal.startswith("index dim i1 is a ")
