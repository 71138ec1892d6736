"""The front in a terminal: every plan stands where its costs say, and no line is too long."""

from __future__ import annotations

import itertools

import pytest

from tapestry_egg.show.plot import FrontPoint, info_of_points
from tapestry_egg.show.terminal import front_terminal

POINTS = [
    FrontPoint(f"p{k}", seconds, peak, 1.0, 0.0, "8x", fits)
    for k, (seconds, peak, fits) in enumerate(
        [(1e-3, 80e9, False), (2e-3, 40e9, True), (3e-3, 30e9, True), (8e-3, 10e9, True)]
    )
]


@pytest.mark.parametrize(("width", "height"), [(60, 8), (80, 16), (120, 30)])
def test_plans_stand_in_the_order_of_their_costs(width: int, height: int) -> None:
    lines = front_terminal(info_of_points(POINTS), width, height).split("\n")
    assert len(lines) <= height and max(map(len, lines)) <= width
    places = [
        (column, row)
        for row, line in enumerate(lines)
        for column, c in enumerate(line)
        if c in "●○"
    ]
    assert len(places) == 4
    # Smaller peaks are further left, and there the slower plans, which are higher.
    assert [x for x, _ in sorted(places)] == sorted({x for x, _ in places})
    assert all(y <= z for (_, y), (_, z) in itertools.pairwise(sorted(places)))
    fastest = max(places)
    assert lines[fastest[1]][fastest[0]] == "○"  # what no device holds is hollow


def test_names_axes_and_stairs_are_told() -> None:
    text = front_terminal(info_of_points(POINTS), 100, 20)
    assert "time per step (ms)" in text and "GiB" in text
    assert all(p.name in text for p in POINTS)
    assert "┐" in text and "┤" in text and "┴" in text


def test_a_single_plan_and_none() -> None:
    assert front_terminal(info_of_points(POINTS[:1]), 60, 12).count("○") == 1
    assert front_terminal(info_of_points([]), 60, 12) == ""
    assert front_terminal(info_of_points(POINTS), 50, 12) == ""
