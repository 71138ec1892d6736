"""Values that rules are tried on: they lie where laws fail, whatever the seed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from tapestry_egg.blockgraph import TensorType
from tapestry_egg.rules.draws import DTYPES, SIZES, Draw
from tapestry_egg.rules.values import (
    EXTREME,
    FINITE,
    MASKS,
    MODERATE,
    around,
    beyond,
    drawn,
    mixtures,
)

MARKS = (0.0, 1.0, 10.0)
REAL = ("float32", "bfloat16", "float16", "int8", "int32", "uint8", "uint32", "bool", "complex64")


@pytest.mark.parametrize("dtype", [*REAL, "float8_e4m3fn", "float64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 1, 2), (40,)])
def test_every_family_has_values_of_every_dtype(dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    for family in {*FINITE, *EXTREME, *MASKS, *MODERATE}:
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
