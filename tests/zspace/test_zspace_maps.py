"""Sections and covers; and the defects of earlier Tapestry code."""

from __future__ import annotations

import itertools
import json
from math import prod

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.zspace import (
    Projection,
    ZRange,
    ZSpaceError,
    cover_fault,
)

integers = st.integers(-4, 4)


# Sections


@given(st.lists(st.tuples(integers, st.integers(0, 6), st.integers(1, 8)), max_size=3))
def test_sections_are_as_many_as_asked_and_cover(sides: list[tuple[int, int, int]]) -> None:
    box = ZRange(tuple(s for s, _, _ in sides), tuple(s + n for s, n, _ in sides))
    counts = tuple(c for _, _, c in sides)
    parts = box.sections(counts)
    assert len(parts) == prod(counts) and cover_fault(parts, box) is None
    for numbers, part in zip(itertools.product(*map(range, counts)), parts, strict=True):
        for j, (start, n, count), s, e in zip(numbers, sides, part.start, part.end, strict=True):
            step = -(-n // count)
            own = [x for x in range(start, start + n) if j * step <= x - start < (j + 1) * step]
            assert list(range(s, e)) == own


def test_counts_that_are_not_attainable_leave_empty_blocks_behind() -> None:
    five = ZRange.from_shape((5,))
    assert [p.shape[0] for p in five.sections((4,))] == [2, 2, 1, 0]
    assert [p.shape[0] for p in five.sections((7,))] == [1, 1, 1, 1, 1, 0, 0]
    for wrong in ((), (1, 1), (0,)):
        with pytest.raises(ZSpaceError):
            five.sections(wrong)


# Covers


@st.composite
def boxes(draw, rank: int) -> ZRange:
    start = tuple(draw(st.integers(-1, 3)) for _ in range(rank))
    return ZRange(start, tuple(s + draw(st.integers(0, 3)) for s in start))


def counted(them: list[ZRange], whole: ZRange) -> dict[tuple[int, ...], int]:
    count = {p: 0 for p in whole}
    for box in them:
        for p in box:
            count[p] = count.get(p, 0) + 1
    return count


@pytest.mark.slow
@settings(max_examples=300)
@given(st.data(), st.integers(0, 3))
def test_covers_against_counting(data, rank: int) -> None:
    whole = ZRange((0,) * rank, (4,) * rank)
    parts = [whole]
    for _ in range(data.draw(st.integers(0, 4))):
        if rank:
            part = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
            parts += part.split(data.draw(st.integers(0, rank - 1)), data.draw(st.integers(1, 3)))
    change = data.draw(st.integers(0, 3))
    if change == 1 and parts:
        parts.pop(data.draw(st.integers(0, len(parts) - 1)))
    elif change == 2:
        parts.append(data.draw(boxes(rank)))
    elif change == 3 and parts:
        at = data.draw(st.integers(0, len(parts) - 1))
        parts[at] = parts[at].translate(tuple(data.draw(st.integers(-1, 1)) for _ in range(rank)))
    seen = counted(parts, whole)
    exact = all(n == (p in whole) for p, n in seen.items())
    fault = cover_fault(parts, whole)
    assert (fault is None) == exact
    if fault is not None:
        assert seen.get(fault.point, 0) == len(fault.boxes) != (fault.point in whole)
        assert all(fault.point in box for box in fault.boxes)


def test_covers_agree_with_isl() -> None:
    isl = pytest.importorskip("islpy")
    rng = np.random.default_rng(1)

    def as_set(box: ZRange):
        sides = [
            f"{s} <= x{d} < {e}" for d, (s, e) in enumerate(zip(box.start, box.end, strict=True))
        ]
        return isl.Set(f"{{ [x0, x1, x2] : {' and '.join(sides)} }}")

    faults = 0
    for _ in range(60):
        whole = ZRange.from_shape(tuple(int(n) for n in rng.integers(1, 9, 3)))
        parts = [whole]
        for _ in range(4):
            part = parts.pop(int(rng.integers(len(parts))))
            parts += part.split(int(rng.integers(3)), int(rng.integers(1, 5)))
        if rng.random() < 0.6:
            at = int(rng.integers(len(parts)))
            parts[at] = parts[at].translate(tuple(int(x) for x in rng.integers(-1, 2, 3)))
        together, exact = isl.Set("{ [x0, x1, x2] : false }"), True
        for part in map(as_set, parts):
            exact = exact and together.is_disjoint(part)
            together = together.union(part)
        exact = exact and together.is_equal(as_set(whole))
        faults += not exact
        assert (cover_fault(parts, whole) is None) == exact
    assert 10 < faults < 50


# What earlier code got wrong


def test_overlaps_and_gaps_of_one_size_do_not_cancel() -> None:
    whole = ZRange.from_shape((4,))
    parts = [ZRange((0,), (2,)), ZRange((1,), (3,))]
    assert sum(p.size for p in parts) == whole.size
    assert str(cover_fault(parts, whole)) == "zr[0:2] and zr[1:3] overlap in zr[1:2]"
    assert str(cover_fault([parts[0]], whole)) == "point (2) of zr[0:4] is left out"
    assert str(cover_fault([ZRange((0,), (5,))], whole)) == "zr[0:5] is not inside zr[0:4]"
    assert cover_fault([whole, ZRange((9,), (9,))], whole) is None
    assert str(cover_fault([ZRange((), ())], whole)) == "zr[] is not inside zr[0:4]"


def test_matrices_are_stored_outputs_by_inputs() -> None:
    p = Projection(((1, 2, 3), (4, 5, 6)), (0, 0), (1, 1))
    assert (p.tensor_rank, p.index_rank) == (2, 3)
    assert json.loads(json.dumps(p.to_json()))["affineMap"]["projection"] == [[1, 2, 3], [4, 5, 6]]


def test_dtypes_are_not_two_only_and_have_their_own_sizes() -> None:
    sizes = {"bool": 1, "bfloat16": 2, "float8_e4m3fn": 1, "float64": 8, "complex64": 8}
    assert {d: TensorType((3,), d).nbytes for d in sizes} == {d: 3 * n for d, n in sizes.items()}
