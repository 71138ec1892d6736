"""Ranges and projections against brute force over points, and images against isl."""

from __future__ import annotations

import itertools
import json

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tapestry_egg.zspace import Projection, ZRange, ZSpaceError

quick = settings(max_examples=150, deadline=None)


# Oracles: sets of points only, nothing of the closed forms.


def points(box: ZRange) -> set[tuple[int, ...]]:
    spans = [range(s, e) for s, e in zip(box.start, box.end, strict=True)]
    return set(itertools.product(*spans))


def cells(p: Projection, i: tuple[int, ...]) -> set[tuple[int, ...]]:
    start = np.array(p.offset, int)
    if p.matrix and i:
        start = np.array(p.matrix) @ np.array(i) + start
    return {
        tuple(int(a + b) for a, b in zip(start, cell, strict=True)) for cell in np.ndindex(*p.shape)
    }


def hull(them: set[tuple[int, ...]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Least and greatest coordinates (inclusive) of a non-empty set of points."""
    array = np.array(sorted(them), int).reshape(len(them), -1)
    return tuple(array.min(0).tolist()), tuple(array.max(0).tolist())


def union(p: Projection, box: ZRange) -> set[tuple[int, ...]]:
    return set().union(*(cells(p, i) for i in points(box))) if not box.is_empty else set()


@st.composite
def ranges(draw, rank: int | None = None, low: int = 0, high: int = 4) -> ZRange:
    n = draw(st.integers(0, 3)) if rank is None else rank
    start = tuple(draw(st.integers(-5, 5)) for _ in range(n))
    return ZRange(start, tuple(s + draw(st.integers(low, high)) for s in start))


@st.composite
def projections(
    draw, index_rank: int | None = None, tensor_rank: int | None = None, least: int = 0
) -> Projection:
    p = draw(st.integers(0, 3)) if index_rank is None else index_rank
    k = draw(st.integers(0, 3)) if tensor_rank is None else tensor_rank
    return Projection(
        tuple(tuple(draw(st.integers(-3, 3)) for _ in range(p)) for _ in range(k)),
        tuple(draw(st.integers(-4, 4)) for _ in range(k)),
        tuple(draw(st.integers(least, 3)) for _ in range(k)),
        index_rank=p,
    )


@st.composite
def projected(draw, low: int = 0, least: int = 0) -> tuple[Projection, ZRange]:
    p = draw(projections(least=least))
    return p, draw(ranges(p.index_rank, low=low))


# ZRange


@quick
@given(ranges())
def test_a_range_is_its_points_row_major(box: ZRange) -> None:
    listed = list(box)
    assert listed == sorted(points(box)) and len(listed) == box.size
    assert box.is_empty == (not listed)
    assert all(box.contains(p) for p in listed)
    if listed:
        assert hull(set(listed)) == (box.start, box.inclusive_end)
    else:
        with pytest.raises(ZSpaceError):
            _ = box.inclusive_end


@quick
@given(st.integers(0, 3).flatmap(lambda n: st.tuples(ranges(n), ranges(n))))
def test_intersection_containment_and_bounds(pair: tuple[ZRange, ZRange]) -> None:
    a, b = pair
    common = a.intersection(b)
    assert (points(common) if common is not None else set()) == points(a) & points(b)
    assert a.intersection(b) == b.intersection(a)
    around = ZRange.bounding([a, b])
    assert around.contains(a) and around.contains(b)
    if points(a) and points(b):
        assert hull(points(a) | points(b)) == (around.start, around.inclusive_end)
        assert a.contains(b) == (points(b) <= points(a))
    assert all((q in a) == (q in points(a)) for q in points(around))


@quick
@given(ranges(3), st.integers(-3, 2), st.integers(1, 6), st.permutations([0, 1, 2]))
def test_parts_cover_disjointly(box: ZRange, dim: int, n: int, order: list[int]) -> None:
    for parts in (box.split(dim, n), box.blocks(dim, n)):
        seen = [p for part in parts for p in part]
        assert len(seen) == len(set(seen)) and set(seen) == points(box)
        if not box.is_empty:
            assert ZRange.bounding([q for q in parts if not q.is_empty]) == box
    assert len(box.blocks(dim, n)) == n
    if box.shape[dim]:
        assert not any(part.shape[dim] == 0 for part in box.split(dim, n))
    assert {tuple(p[d] for d in order) for p in box} == points(box.permute(order))
    moved = box.translate((1, -2, 3))
    assert {(a + 1, b - 2, c + 3) for a, b, c in box} == points(moved)


@quick
@given(ranges(), ranges())
def test_product_and_forms(a: ZRange, b: ZRange) -> None:
    assert points(a.product(b)) == {x + y for x in a for y in b}
    assert ZRange.parse(str(a)) == a
    assert ZRange(**json.loads(json.dumps(a.to_json()))) == a
    assert ZRange.from_start_shape(a.start, a.shape) == a and len({a, a.product(b)}) >= 1


def test_range_details() -> None:
    assert str(ZRange((0, -1), (3, 4))) == "zr[0:3, -1:4]" and str(ZRange((), ())) == "zr[]"
    scalar = ZRange((), ())
    assert scalar.size == 1 and list(scalar) == [()] and not scalar.is_empty
    assert scalar.contains(()) and scalar.contains(scalar)
    touching = ZRange((0,), (4,)).intersection(ZRange((4,), (6,)))
    assert touching == ZRange((4,), (4,)) and touching.is_empty
    assert ZRange((0,), (4,)).intersection(ZRange((5,), (6,))) is None
    assert ZRange((0,), (4,)).contains(ZRange((4,), (4,)))
    assert not ZRange((0,), (4,)).contains(ZRange((5,), (5,)))
    five = ZRange.from_shape((5,))
    assert [q.shape[0] for q in five.split(0, 3)] == [3, 2]  # ceiling, never q + r chunks
    assert [q.shape[0] for q in five.blocks(0, 4)] == [2, 2, 1, 0]
    assert ZRange.from_shape((0, 2)).split(0, 3) == (ZRange.from_shape((0, 2)),)
    assert isinstance(ZRange((np.int64(1),), (np.int64(2),)).start[0], int)
    sized = ZRange((-100, -100, 0), (10, 10, 10))
    assert sized.shape == (110, 110, 10)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: ZRange((0, 5), (3, 4)),  # dominance alone would let this pass
        lambda: ZRange((0,), (1, 2)),
        lambda: ZRange((0.5,), (1,)),  # type: ignore[arg-type]
        lambda: ZRange.bounding([]),
        lambda: ZRange.bounding([ZRange((), ()), ZRange((0,), (1,))]),
        lambda: ZRange((0,), (1,)).split(1, 1),
        lambda: ZRange((0,), (1,)).split(0, 0),
        lambda: ZRange((0,), (3,)).blocks(0, 0),
        lambda: ZRange((0, 0), (3, 3)).permute((0, 0)),
        lambda: ZRange((0,), (3,)).contains((1, 2)),
        lambda: ZRange((0,), (3,)).intersection(ZRange((), ())),
        lambda: ZRange((0,), (3,)).translate((1, 2)),
        lambda: ZRange.parse("zr[0:3"),
        lambda: ZRange.parse("zr[0:3,]"),
        lambda: ZRange.parse("[0:3]"),
        lambda: ZRange.parse(f"zr[0:{'9' * 5000}]"),
        lambda: ZRange.parse("zr[0:٩]"),
        lambda: Projection((), (), ()),  # how many index dims?
        lambda: Projection(((1,), (1, 0)), (0, 0), (1, 1)),
        lambda: Projection(((1,),), (0, 0), (1,)),
        lambda: Projection(((1,),), (0,), (-1,)),
        lambda: Projection(((1,),), (0,), (1,), index_rank=2),
        lambda: Projection.identity(2).point((1,)),
        lambda: Projection.identity(2).image(ZRange((0,), (1,))),
        lambda: Projection.identity(2).footprint((1,)),
        lambda: Projection.identity(2).marginal_stride(2),
        lambda: Projection.identity(2).compose(Projection.identity(1)),
        lambda: Projection.identity(2).translate((1,)),
        lambda: Projection.identity(2).images(np.zeros((4, 1)), np.ones((4, 1))),
        lambda: Projection.identity(1).images(np.ones((4, 1)), np.zeros((4, 1))),
    ],
)
def test_misuse_is_refused(wrong) -> None:
    with pytest.raises(ZSpaceError):
        wrong()


# Projection against brute force


@quick
@given(projected())
def test_image_is_the_hull_of_all_points(case: tuple[Projection, ZRange]) -> None:
    p, box = case
    touched, image = union(p, box), p.image(box)
    assert image.shape == p.footprint(box.shape)
    if touched:
        assert hull(touched) == (image.start, image.inclusive_end)
    elif p.tensor_rank:
        assert image.is_empty
    for i in box:
        assert points(p.point(i)) == cells(p, i)


@settings(max_examples=60, deadline=None)
@given(projections(), st.integers(0, 9), st.randoms(use_true_random=False))
def test_images_agree_with_image(p: Projection, n: int, random) -> None:
    starts = np.array(
        [[random.randint(-9, 9) for _ in range(p.index_rank)] for _ in range(n)], int
    ).reshape(n, p.index_rank)
    ends = starts + np.array(
        [[random.randint(0, 4) for _ in range(p.index_rank)] for _ in range(n)], int
    ).reshape(n, p.index_rank)
    low, high = p.images(starts, ends)
    assert low.shape == high.shape == (n, p.tensor_rank)
    for j in range(n):
        image = p.image(ZRange(tuple(starts[j]), tuple(ends[j])))
        assert (tuple(low[j]), tuple(high[j])) == (image.start, image.end)


def test_images_over_several_chunks() -> None:
    p = Projection(((1, -1), (2, 0)), (3, 4), (1, 2))
    starts = np.arange(80_000).reshape(-1, 2) % 97
    ends = starts + (np.arange(80_000).reshape(-1, 2) % 5)
    low, high = p.images(starts, ends)
    for j in range(0, 40_000, 619):
        image = p.image(ZRange(tuple(starts[j]), tuple(ends[j])))
        assert (tuple(low[j]), tuple(high[j])) == (image.start, image.end)


@settings(max_examples=40, deadline=None)
@given(projected(low=1, least=1))
def test_image_agrees_with_isl(case: tuple[Projection, ZRange]) -> None:
    isl = pytest.importorskip("islpy")
    p, box = case
    if not p.tensor_rank:
        return
    i = [f"i{d}" for d in range(p.index_rank)]
    t = [f"t{k}" for k in range(p.tensor_rank)]
    facts = [f"{s} <= {x} < {e}" for x, s, e in zip(i, box.start, box.end, strict=True)]
    for row, b, s, x in zip(p.matrix, p.offset, p.shape, t, strict=True):
        at = " + ".join([*(f"{a}{y}" for a, y in zip(row, i, strict=True)), f"{b}"])
        facts.append(f"{at} <= {x} < {at} + {s}")
    relation = isl.Map(f"{{ [{','.join(i)}] -> [{','.join(t)}] : {' and '.join(facts)} }}")
    touched, image = relation.range(), p.image(box)
    for k in range(p.tensor_rank):
        low = touched.dim_min_val(k).to_python()
        high = touched.dim_max_val(k).to_python()
        assert (low, high + 1) == (image.start[k], image.end[k])


@quick
@given(projections(), st.data())
def test_what_neighbours_share(p: Projection, data) -> None:
    if not p.index_rank:
        return
    d = data.draw(st.integers(0, p.index_rank - 1))
    column = p.marginal_stride(d)
    assert p.reaches(d) == tuple(k for k in range(p.tensor_rank) if column[k])
    for k in range(p.tensor_rank):
        mine = set(range(p.shape[k]))
        next_one = {x + column[k] for x in mine}
        assert p.marginal_overlap(d)[k] == len(mine & next_one)
        gap = p.marginal_waste(d)[k]
        assert gap == max(0, abs(column[k]) - p.shape[k])


@quick
@given(projected(), st.integers(1, 3), st.data())
def test_replication_cost_counts_what_is_read_again(
    case: tuple[Projection, ZRange], n: int, data
) -> None:
    p, box = case
    if not p.index_rank:
        return
    shards = box.split(data.draw(st.integers(0, p.index_rank - 1)), n)

    def read(r: ZRange) -> int:
        return 0 if r.is_empty else len(points(p.image(r)))

    assert p.replication_cost(shards) == sum(map(read, shards)) - read(box)
    assert p.replication_cost([box]) == 0


@quick
@given(
    st.integers(0, 3).flatmap(
        lambda j: st.tuples(projections(index_rank=j), projections(tensor_rank=j))
    ),
    st.data(),
)
def test_composition(pair: tuple[Projection, Projection], data) -> None:
    outer, inner = pair
    both = outer.compose(inner)
    box = data.draw(ranges(inner.index_rank, low=1, high=3))
    touched: set[tuple[int, ...]] = set()
    for i in box:
        middle = cells(inner, i)
        here = set().union(*(cells(outer, m) for m in middle)) if middle else set()
        touched |= here
        image = both.point(i)
        if here:
            assert hull(here) == (image.start, image.inclusive_end)
        elif outer.tensor_rank:
            assert image.is_empty
    if touched:
        tight = both.image(box)
        assert hull(touched) == (tight.start, tight.inclusive_end)
        assert outer.image(inner.image(box)).contains(tight)


def test_composition_bound_is_loose_only_where_terms_cancel() -> None:
    difference = Projection(((1, -1),), (0,), (1,))
    diagonal = Projection(((1,), (1,)), (0, 0), (1, 1))
    box = ZRange((0,), (4,))
    assert difference.compose(diagonal).image(box) == ZRange((0,), (1,))
    assert difference.image(diagonal.image(box)) == ZRange((-3,), (4,))
    total = Projection(((1, 1),), (0,), (1,))
    assert total.compose(diagonal).image(box) == total.image(diagonal.image(box))


@quick
@given(projections())
def test_forms_of_a_projection(p: Projection) -> None:
    form = json.loads(json.dumps(p.to_json()))
    matrix, offset = form["affineMap"]["projection"], form["affineMap"]["offset"]
    rank = form.get("indexRank", -1)
    assert Projection(matrix, offset, form["shape"], index_rank=rank) == p
    assert hash(Projection(p.matrix, p.offset, p.shape, index_rank=p.index_rank)) == hash(p)
    assert len(p.augmented().splitlines()) == max(1, p.tensor_rank)
    moved = p.translate((1,) * p.tensor_rank)
    i = (2,) * p.index_rank
    assert moved.point(i) == p.point(i).translate((1,) * p.tensor_rank)


def test_rank_zero_tensors_and_spaces() -> None:
    scalar = Projection((), (), (), index_rank=2)
    assert scalar.image(ZRange((0, 0), (3, 4))) == ZRange((), ())
    assert scalar.footprint((3, 4)) == () and scalar.reaches(1) == ()
    low, high = scalar.images(np.zeros((5, 2)), np.ones((5, 2)))
    assert low.shape == high.shape == (5, 0)
    once = Projection(((), ()), (1, 2), (3, 4))
    assert once.index_rank == 0 and once.image(ZRange((), ())) == ZRange((1, 2), (4, 6))
    assert Projection.identity(0).point(()) == ZRange((), ())
