"""Which cuts are legal, against brute force over the shards: points to cells, one by one.

Nothing here uses `Projection.image`, the closed forms or the code under test but through `split`.
"""

from __future__ import annotations

from itertools import combinations
from math import prod
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature
from tapestry_egg.metakernels.signatures.splits import Blocks, split
from tapestry_egg.zspace import Projection, ZSpaceError
from tests.metakernels.brute_splits import brute
from tests.metakernels.cases import CASES, FAMILY, application
from tests.plans.plans import legal_dims

# Random signatures, drawn so that every kind of answer is common


def random_row(
    rng: Random, extents: tuple[int, ...], free: list[int]
) -> tuple[tuple[int, ...], int, int, int]:
    """One operand dim: coefficients, offset, box and extent. Mostly one index dim, or two as digits
    of it; windows, gaps, reversals, shifts, and tensors that begin or end elsewhere."""
    row = [0] * len(extents)
    box = rng.choice([1, 1, 1, 1, 2, 3])
    stride = rng.choice([1, 1, box])
    for _ in range(min(len(free), rng.choice([0, 1, 1, 1, 1, 2, 2]))):
        d = free.pop() if rng.random() < 0.8 else rng.choice(free)
        if rng.random() < 0.8:
            row[d] = stride
        else:
            row[d] = rng.choice([1, 2, 3, -1, -stride])
        stride = abs(row[d]) * extents[d]
    low = sum(min(0, a * (n - 1)) for a, n in zip(row, extents, strict=True))
    high = sum(max(0, a * (n - 1)) for a, n in zip(row, extents, strict=True)) + box
    before = behind = 0
    for _ in range(rng.choice([0, 0, 1])):
        before, behind = rng.choice([(-1, -1), (-1, 0), (0, 1), (1, 0), (1, 1), (2, 2), (1, -1)])
    if high - low + before + behind < 1:
        before = behind = 0
    return tuple(row), before - low, box, high - low + before + behind


def random_operand(rng: Random, extents: tuple[int, ...]) -> tuple[Projection, TensorType]:
    free = rng.sample(range(len(extents)), len(extents))
    found = [random_row(rng, extents, free) for _ in range(rng.choice([1, 1, 2, 2, 0]))]
    a, b, s, n = zip(*found, strict=True) if found else ((), (), (), ())
    return Projection(a, b, s, index_rank=len(extents)), TensorType(n, "float32")


def random_output(
    rng: Random, extents: tuple[int, ...], roles: list[str]
) -> tuple[Projection, TensorType]:
    """Mostly every map dim, and some reduce dims, on its own or as a digit, each point a few cells;
    sometimes anything."""
    apart = {"reduce": 0.7, "join": 0.97}
    maps = [d for d, r in enumerate(roles) if rng.random() >= apart.get(r, 0.0)]
    left, matrix, boxes, offsets, shape = rng.sample(maps, len(maps)), [], [], [], []
    while left:
        row, stride = [0] * len(extents), rng.choice([1, 1, 1, 2])
        boxes.append(stride)
        for d in [left.pop() for _ in range(min(len(left), rng.choice([1, 1, 2, 3])))]:
            row[d] = stride if rng.random() < 0.93 else rng.choice([-stride, 1, stride + 1])
            stride = abs(row[d]) * extents[d]
        low = sum(min(0, a * (n - 1)) for a, n in zip(row, extents, strict=True))
        high = sum(max(0, a * (n - 1)) for a, n in zip(row, extents, strict=True))
        matrix.append(tuple(row))
        offsets.append(-low)
        shape.append(high - low + boxes[-1])
    form = Projection(tuple(matrix), tuple(offsets), tuple(boxes), index_rank=len(extents))
    return form, TensorType(tuple(shape), "float32")


def random_signature(rng: Random) -> OperationSignature:
    extents = tuple(
        rng.choice([1, 2, 3, 4, 4, 5, 6, 7, 8]) for _ in range(rng.choice([1, 2, 2, 3]))
    )
    weights = {"map": 6, "reduce": 3, "whole": 1, "scan": 1, "join": 1}
    roles = rng.choices([*weights], [*weights.values()], k=len(extents))
    monoids = {"reduce": ["sum", "sum", "max"], "scan": ["sum"], "join": ["argmax"]}
    index = tuple(
        IndexDim(f"i{d}", n, r, rng.choice(monoids[r]) if r in monoids else None)
        for d, (n, r) in enumerate(zip(extents, roles, strict=True))
    )
    ins = [random_operand(rng, extents) for _ in range(rng.choice([1, 2, 3]))]
    outs = [random_output(rng, extents, roles) for _ in range(rng.choice([1, 1, 1, 2]))]
    return OperationSignature(
        "random",
        index,
        tuple(p for p, _ in ins),
        tuple(p for p, _ in outs),
        tuple(t for _, t in ins),
        tuple(t for _, t in outs),
        initial=(0,) if rng.random() < 0.1 else (),
    )


def random_axes(rng: Random, rank: int) -> dict[int, tuple[int, ...]]:
    """Axis sizes for some index dims: one list for most, two axes on a dim now and then."""
    dims = rng.sample(range(rank), min(rank, rng.choice([1, 1, 1, 2, 2, 3])))
    sizes = [(2,), (2,), (2,), (3,), (4,), (4,), (2, 2), (2, 3), (1,), (1, 2)]
    return {d: rng.choice(sizes) for d in dims}


@pytest.mark.slow
@settings(max_examples=30)
@given(st.integers(0, 2**32))
def test_exactly_what_brute_force_accepts(seed: int) -> None:
    rng = Random(seed)
    for _ in range(20):
        s = random_signature(rng)
        axes = random_axes(rng, len(s.index))
        parts = {d: prod(axes[d]) for d in sorted(axes) if prod(axes[d]) > 1}
        mine, theirs = split(s, axes), brute(s, parts)
        assert mine.legal == (theirs is not None), (s, axes, mine.refusal, theirs)
        assert mine.parts == parts
        if theirs is not None:
            assert (list(mine.inputs), list(mine.outputs)) == theirs, (s, axes)


# By hand


def op(
    index: dict[str, int | tuple[int, str]],
    inputs: list[tuple[Projection, tuple[int, ...]]],
    outputs: list[tuple[Projection, tuple[int, ...]]],
    initial: tuple[int, ...] = (),
) -> OperationSignature:
    """Index dims by name: an extent (map), or an extent and the monoid that it is reduced by."""
    dims = tuple(
        IndexDim(k, n, "map") if isinstance(n, int) else IndexDim(k, n[0], "reduce", n[1])
        for k, n in index.items()
    )
    return OperationSignature(
        "by hand",
        dims,
        tuple(p for p, _ in inputs),
        tuple(p for p, _ in outputs),
        tuple(TensorType(t, "float32") for _, t in inputs),
        tuple(TensorType(t, "float32") for _, t in outputs),
        initial=initial,
    )


def line(a: int, b: int = 0, s: int = 1) -> Projection:
    return Projection(((a,),), (b,), (s,))


def test_what_can_not_be_cut_says_why() -> None:
    column = Projection(((1, 0),), (0,), (1,))
    s = op({"i": 4, "j": 4}, [], [(column, (4,))])
    assert split(s, {1: (2,)}).refusal == "output 0 does not fall into blocks along j"
    assert split(op({"i": 1}, [], [(line(1), (1,))]), {0: (2,)}).refusal == (
        "index dim i has one point only"
    )
    assert split(op({"i": 0}, [], [(line(1), (0,))]), {0: (2,)}).refusal == (
        "the index space has no points"
    )
    whole = OperationSignature(
        "sort", (IndexDim("i", 4, "whole"),), (), (line(1),), (), (TensorType((4,), "float32"),)
    )
    assert split(whole, {0: (2,)}).refusal == "index dim i is a whole dim"
    assert split(whole, {0: (1, 1)}).legal  # one part: nothing is cut
    assert legal_dims(whole, 2) == ()
    for wrong in ({1: (2,)}, {-1: (2,)}, {0: (0,)}):
        with pytest.raises(ZSpaceError):
            split(whole, wrong)


def test_random_keys_fall_into_blocks_as_numbers_do() -> None:
    keys = TensorType((4,), "key<fry>")
    s = OperationSignature(
        "bits", (IndexDim("i", 4, "map"),), (line(1),), (line(1),), (keys,), (keys,)
    )
    found = split(s, {0: (2,)})
    assert found.inputs == ({0: Blocks(0)},) and found.outputs == ({0: Blocks(0)},)


# Which cuts of JAX's operations are legal by their templates: by brute force, and by hand.


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
