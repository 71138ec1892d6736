"""Quantities in and out of words."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg.errors import ExtractError
from tapestry_egg.machine.objectives import OBJECTIVES_BY_NAME, amounts, named
from tapestry_egg.quantities import format_number


@pytest.mark.parametrize(
    ("text", "objective", "value"),
    [
        ("60GiB", "peak_bytes", 60 * 2**30),
        ("60 GB", "peak_bytes", 60e9),
        ("1024", "peak_bytes", 1024),
        (1024, "wire_bytes", 1024),
        ("2ms", "seconds", 0.002),
        ("5 µs", "seconds", 5e-6),
        ("1.5kJ", "joules", 1500),
        ("3e12", "flops", 3e12),
        ("2 TFLOP", "flops", 2e12),
        ("40", "devices", 40),
        (".5 s", "seconds", 0.5),
    ],
)
def test_amounts_are_read(text: str | float, objective: str, value: float) -> None:
    assert amounts({objective: text}) == {objective: pytest.approx(value)}


@pytest.mark.parametrize(
    ("text", "objective", "said"),
    [
        ("60 parsecs", "peak_bytes", "'parsecs' is not a unit of peak_bytes"),
        ("much", "seconds", "'much' is not an amount"),
        ("-1", "seconds", "'-1' is not an amount"),
        (math.nan, "seconds", "nan is not an amount"),
        (True, "seconds", "True is not an amount"),
        ("1 s", "speed", "unknown objective 'speed'"),
        ("60GiB", "seconds", "'GiB' is not a unit of seconds"),
    ],
)
def test_others_are_refused_with_what_to_write(
    text: str | float, objective: str, said: str
) -> None:
    with pytest.raises(ExtractError) as caught:
        amounts({objective: text})
    assert caught.value.what == said
    assert caught.value.hint


@given(
    st.sampled_from(sorted(OBJECTIVES_BY_NAME)),
    st.floats(min_value=1e-9, max_value=1e15),
)
def test_what_is_written_reads_back(objective: str, value: float) -> None:
    known = named(objective)
    assert known.parse(known.format(value, digits=6)) == pytest.approx(value, rel=1e-5)


@given(st.floats(min_value=1e-300, max_value=1e300))
def test_numbers_keep_their_digits(value: float) -> None:
    assert float(format_number(value, 4)) == pytest.approx(value, rel=1e-3)
