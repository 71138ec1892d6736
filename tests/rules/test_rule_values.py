"""Values that rules are tried on: they lie where laws fail, whatever the seed."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.rules.verify.samples import DTYPES, SIZES, Draw, drawable, propose
from tapestry_egg.rules.verify.values import (
    EXTREME,
    FINITE,
    MASKS,
    ROUNDED,
    around,
    beyond,
    drawn,
    mixtures,
)

MARKS = (0.0, 1.0, 10.0)
LONG = ("int64", "uint16", "uint64", "complex128")
REAL = ("float32", "bfloat16", "float16", "int8", "int32", "uint8", "uint32", "bool", "complex64")


@pytest.mark.parametrize("dtype", [*REAL, *LONG, "float8_e4m3fn", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2), (40,)])
def test_every_family_has_values_of_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for family in {*FINITE, *EXTREME, *MASKS, *ROUNDED}:
        x = drawn(TensorType(shape, dtype), family, rng, MARKS, dtype)
        assert x.shape == shape and x.dtype.name == dtype
        if family not in MASKS and dtype != "bool":
            assert np.isfinite(x.astype(np.complex128)).all(), family


def test_values_lie_at_beside_between_and_beyond_constants() -> None:
    near = set(around(MARKS).tolist())
    assert {10.0, -10.0, 5.5, 1.0, 0.0} <= near
    assert any(10 < v < 10.001 for v in near) and any(9.999 < v < 10 for v in near)
    assert beyond(MARKS).max() >= 1000 and beyond(MARKS).min() <= -1000


def test_integers_reach_the_ends_of_their_dtype() -> None:
    rng = np.random.default_rng(0)
    x = drawn(TensorType((400,), "int32"), "extremes", rng, MARKS, "int32")
    ends = np.iinfo(np.int32)
    assert {ends.min, ends.min + 1, -1, 0, 1, ends.max} <= set(x.tolist())


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_products_of_tiny_numbers_are_nothing(dtype: str) -> None:
    x = drawn(TensorType((40,), dtype), "tiny", np.random.default_rng(0), MARKS, dtype)
    assert 0 < np.count_nonzero(x) < x.size and not (x * x).any()


def test_the_only_number_of_a_tensor_is_masked_too() -> None:
    rng = np.random.default_rng(0)
    for family in ("below", "above"):
        assert all(
            np.isinf(drawn(TensorType((), "float32"), family, rng, MARKS, "float32"))
            for _ in range(20)
        )


def test_mixtures_bring_every_family_beside_every_other() -> None:
    families = FINITE
    turns = len(families) ** 2
    seen = {pair for turn in range(turns) for pair in mixtures(families, 2, turn, 1)}
    assert seen == set(product(families, repeat=2))


def test_every_kind_of_shapes_meets_every_dtype() -> None:
    turns = len(DTYPES) * len(SIZES)
    met = {(d.dtype, d.sizes.name) for t in range(turns) for d in [Draw(random.Random(0), t)]}
    assert met == {(dtype, sizes.name) for dtype in DTYPES for sizes in SIZES}


def drawn_params(kernel: str, dtype: str = "float32") -> list[dict[str, Any]]:
    turns = [k for k, d in enumerate(DTYPES * 40) if d == dtype][:300]
    found = [propose(kernel, PLACES[kernel], Draw(random.Random(k), k)) for k in turns]
    return [p[0] for p in found if p is not None]


PLACES: dict[str, list[None]] = {
    "reduce_window_max": [None],
    "pad": [None, None],
    "conv_general_dilated": [None, None],
}


def test_odd_parameters_are_drawn() -> None:
    """Windows in the padding and between elements, pads that cut off, batch groups."""
    windows = drawn_params("reduce_window_max")
    assert any(max(p["base_dilation"], default=1) > 1 for p in windows)
    assert any(max(p["window_dilation"], default=1) > 1 for p in windows)
    assert any(
        max(pad) >= w
        for p in windows
        for pad, w in zip(p["padding"], p["window_dimensions"], strict=True)
    )
    pads = [c for p in drawn_params("pad") for c in p["padding_config"]]
    assert any(low < 0 for low, _, _ in pads) and any(high < 0 for _, high, _ in pads)
    convolutions = drawn_params("conv_general_dilated")
    assert {p["batch_group_count"] for p in convolutions} == {1, 2}
    assert any(min(pad) < 0 for p in convolutions for pad in p["padding"])


SHEARED = """
- kernels: [sheared]
  inputs: {x: "[$rows, $columns]", y: , "zs...": }
  valid: $axis in range($x.rank)
  let: {length: "$x.shape[$axis]"}
  out: {shape: $x.shape, dtype: $x.dtype}
  project: {x: "@i", y: "[0 :+ $n for $n in $y.shape]", zs: "[0 :+ $n for $n in $each.shape]"}
  samples:
    $rows: 7
    x: "[float]"
    axis: range($x.rank)
    $more: between(1, 3)
    y.shape: "[$length, $more, $rows]"
    y: "[int]"
    zs.shape: "[$length + $more + chance(0.5)]"
    steps: "[$other.steps + 1] if $other != none else [0, 10]"
    unlike: "$axis if $other == none else [$axis, $other.axis]"
"""


def test_an_operation_is_drawn_as_its_template_says(tmp_path: Path) -> None:
    """Shapes and names row by row; what is known stays, and so do parameters that a rule fixes."""
    path = tmp_path / "sheared.yaml"
    path.write_text(SHEARED)
    registry.add_templates(path)
    assert "sheared" in drawable(5)
    steps, lengths = set(), set()
    for k in range(200):
        found = propose("sheared", [None] * 5, Draw(random.Random(k), k))
        assert found is not None
        params, (x, y, *zs) = found
        assert registry.valid("sheared", *found)
        assert x.shape[0] == 7 and kind(x.dtype) == "float" and kind(y.dtype) == "int"
        assert y.shape[0] == x.shape[params["axis"]] and 1 <= y.shape[1] <= 3 and y.shape[2] == 7
        assert {z.shape[0] - sum(y.shape[:2]) for z in zs} <= {0, 1}
        steps.add(params["steps"])
        lengths.add(len({z.shape for z in zs}))
    assert steps == {0, 10} and lengths == {1, 2}
    known = (TensorType((5, 4), "float16"), None, TensorType((1,), "float16"))
    for k in range(9):
        draw = Draw(random.Random(k), 0)
        made = propose("sheared", known, draw, {"axis": 1}, {"axis": 0, "steps": 10})
        assert made is not None and made[1][0] == known[0] and made[1][2] == known[2]
        assert made[0] == {"axis": 1, "steps": 11}
        assert made[1][1].shape[0] == 4 and made[1][1].shape[2] == 5
    assert registry.unlike("sheared", *made) == 1
    assert registry.unlike("sheared", *made, {"axis": 0}) == (1, 0)
    assert not registry.valid("sheared", {**made[0], "axis": 2}, made[1])
    assert propose("sheared", [TensorType((5,), "float32"), None], draw) is None  # no matrix
    assert propose("sheared", [None, TensorType((5, 2), "float32")], draw) is None  # no integers
