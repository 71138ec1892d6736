"""Values that rules are tried on: they lie where laws fail, whatever the seed."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.rules.verify.proposals import propose
from tapestry_egg.rules.verify.samples import DTYPES, SIZES, Draw
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
    import random

    turns = len(DTYPES) * len(SIZES)
    met = {(d.dtype, d.sizes.name) for t in range(turns) for d in [Draw(random.Random(0), t)]}
    assert met == {(dtype, sizes.name) for dtype in DTYPES for sizes in SIZES}


def drawn_params(kernel: str, dtype: str = "float32") -> list[dict[str, Any]]:
    import random

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
