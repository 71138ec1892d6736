"""The worked examples of Tapestry's documents, by number: projections and what they touch."""

from __future__ import annotations

from math import prod

from tapestry_egg.zspace import Projection, ZRange


def test_x1_point() -> None:
    p = Projection(((1, 0), (0, 2)), (-1, 0), (1, 2))
    assert str(p.point((4, 3))) == "zr[3:4, 6:8]"
    assert p.augmented() == "(  1  0 | -1 |  1 )\n(  0  2 |  0 |  2 )"
    assert p.show(("x", "y")) == "[x-1, 2y:+2]"


def test_x2_range() -> None:
    p = Projection(((1, 0), (0, 1), (1, 1)), (10, 20, 30), (4, 4, 1))
    assert p.point((5, 6)).start == (15, 26, 41)
    image = p.image(ZRange((5, 6), (7, 8)))
    assert (image.start, image.shape) == ((15, 26, 41), (5, 5, 3))
    assert p.image(ZRange((5, 6), (5, 8))).shape == (0, 0, 0)
    mixed = Projection(((1, -1),), (0,), (1,))  # two corners alone would say zr[0:1]
    assert str(mixed.image(ZRange((0, 0), (3, 3)))) == "zr[-2:3]"


def test_x3_negative_stride() -> None:
    p = Projection(((-2, 0), (0, 1), (1, 1)), (-1, -1, 0), (1, 1, 1))
    assert str(p.image(ZRange((1, 1), (3, 2)))) == "zr[-5:-2, 0:1, 2:4]"


def test_x4_marginals() -> None:
    p = Projection(((1, 0), (0, 2), (1, 1)), (0, 0, 0), (1, 1, 4))
    assert [p.marginal_stride(d) for d in (0, 1)] == [(1, 0, 1), (0, 2, 1)]
    assert [p.marginal_overlap(d) for d in (0, 1)] == [(0, 1, 3), (1, 0, 3)]
    assert [p.marginal_waste(d) for d in (0, 1)] == [(0, 0, 0), (0, 1, 0)]
    back = Projection(((-1,),), (0,), (3,))
    assert back.marginal_overlap(0) == (2,)  # a negative stride does not add overlap


def test_x5_matmul_in_four() -> None:
    x = Projection(((1, 0), (0, 0)), (-10, 0), (1, 5))
    y = Projection(((0, 0), (0, 1)), (0, 0), (5, 1))
    index = ZRange.from_shape((10, 12))
    assert str(x.image(index)) == "zr[-10:0, 0:5]" and str(y.image(index)) == "zr[0:5, 0:12]"
    shards = [b for a in index.split(0, 5) for b in a.split(1, 6)]
    assert [[str(p.image(s)) for p in (x, y, Projection.identity(2))] for s in shards] == [
        ["zr[-10:-5, 0:5]", "zr[0:5, 0:6]", "zr[0:5, 0:6]"],
        ["zr[-10:-5, 0:5]", "zr[0:5, 6:12]", "zr[0:5, 6:12]"],
        ["zr[-5:0, 0:5]", "zr[0:5, 0:6]", "zr[5:10, 0:6]"],
        ["zr[-5:0, 0:5]", "zr[0:5, 6:12]", "zr[5:10, 6:12]"],
    ]


def test_x6_matmul_then_row_sum() -> None:
    x = Projection(((1, 0), (0, 0)), (-10, 4), (1, 4))
    y = Projection(((0, 0), (0, 1)), (0, 0), (4, 1))
    index = ZRange.from_shape((3, 5))
    assert str(x.image(index)) == "zr[-10:-7, 4:8]" and str(y.image(index)) == "zr[0:4, 0:5]"
    assert [str(y.image(s)) for s in index.split(1, 2)] == [
        "zr[0:4, 0:2]",
        "zr[0:4, 2:4]",
        "zr[0:4, 4:5]",
    ]
    row_sum = Projection(((1,), (0,)), (0, 0), (1, 5))
    assert [str(row_sum.image(s)) for s in ZRange.from_shape((3,)).split(0, 2)] == [
        "zr[0:2, 0:5]",
        "zr[2:3, 0:5]",
    ]


def test_x7_linear_and_relu() -> None:
    index = ZRange.from_shape((100, 32))
    x = Projection(((1, 0), (0, 0)), (-40, 20), (1, 12))
    w = Projection(((0, 0), (0, 1)), (0, 0), (12, 1))
    b = Projection(((0, 1),), (0,), (1,))
    z = Projection.identity(2)
    shards = [part for rows in index.split(0, 50) for part in rows.split(1, 16)]
    assert [str(x.image(s)) for s in shards] == 2 * ["zr[-40:10, 20:32]"] + 2 * ["zr[10:60, 20:32]"]
    assert str(w.image(shards[1])) == "zr[0:12, 16:32]" and str(b.image(shards[1])) == "zr[16:32]"
    reads = [sum(p.image(s).size for s in shards) for p in (x, w, b, z)]
    assert reads == [2400, 768, 64, 3200]
    assert [p.replication_cost(shards) for p in (x, w, b, z)] == [1200, 384, 32, 0]


def test_x10_add_with_offset_and_broadcast() -> None:
    t1 = Projection.identity(2).translate((200, 50))
    assert [str(t1.image(s)) for s in ZRange.from_shape((10, 5)).split(0, 5)] == [
        "zr[200:205, 50:55]",
        "zr[205:210, 50:55]",
    ]
    b = Projection(((0, 0, 0), (0, 0, 1)), (0, 0), (1, 1))
    assert str(b.image(ZRange.from_shape((10, 10, 10)))) == "zr[0:1, 0:10]"


def test_x13_convolution_has_a_halo() -> None:
    index = ZRange.from_shape((100, 128, 8, 8))
    x = Projection(
        ((1, 0, 0, 0), (0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)), (0, 0, 0, 0), (1, 1, 3, 3)
    )
    assert x.image(index) == ZRange.from_shape((100, 1, 10, 10))
    top, bottom = index.split(2, 4)
    assert x.image(top).start[2:3] + x.image(top).end[2:3] == (0, 6)
    assert x.image(bottom).start[2:3] + x.image(bottom).end[2:3] == (4, 10)
    assert prod(x.image(index).shape) == 10000
    assert x.replication_cost((top, bottom)) == 2000
    padded = Projection(((1, 0), (0, 1)), (-1, -1), (3, 3))
    assert padded.point((0, 0)).start == (-1, -1)
