"""The picture of a front: first as data, then as a well-formed drawing that shows that data."""

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import ExtractError
from tapestry_egg.show.chart import Box, Wish, fit_axis, front_svg, place_labels, text_width
from tapestry_egg.show.plot import FrontInfo, FrontPoint, info_of_points, plot_front
from tapestry_egg.show.terminal import front_terminal

SVG = "{http://www.w3.org/2000/svg}"
GIB = 2.0**30

positive = st.floats(min_value=1e-6, max_value=1e6)
points = st.lists(
    st.builds(
        FrontPoint,
        name=st.text(min_size=1, max_size=12),
        seconds=positive,
        peak_bytes=positive,
        joules=positive,
        gap=st.sampled_from([0.0, 0.01, math.inf]),
        mesh=st.sampled_from(["8x", "4x×2y", "2x×4y", "<&>"]),
    ),
    max_size=12,
)


def point(name: str, seconds: float, peak: float, joules: float = 1.0) -> FrontPoint:
    return FrontPoint(name, seconds, peak, joules, 0.01, "8x")


SMALL = [point("c", 1.0, 9 * GIB), point("a", 4.0, 1 * GIB), point("b", 1.5, 2 * GIB)]


def elements(info: FrontInfo, kind: str) -> list[ET.Element]:
    return list(ET.fromstring(front_svg(info)).iter(f"{SVG}{kind}"))


def words(info: FrontInfo) -> list[str]:
    return ["".join(e.itertext()) for e in elements(info, "text")]


def test_points_are_sorted_and_the_knee_is_the_corner_below_the_chord() -> None:
    info = info_of_points(SMALL, title="t")
    assert [p.name for p in info.points] == ["a", "b", "c"]
    assert info.stairs == (0, 1, 2)
    assert info.knee == 1


def test_a_point_that_only_its_energy_keeps_is_not_on_the_stairs() -> None:
    info = info_of_points([*SMALL, point("d", 3.0, 3 * GIB, joules=0.1)])
    assert [info.points[i].name for i in info.stairs] == ["a", "b", "c"]
    over_energy = info_of_points([*SMALL, point("d", 3.0, 3 * GIB, joules=0.1)], x="joules")
    assert [over_energy.points[i].name for i in over_energy.stairs] == ["d", "c"]


def test_two_points_have_no_knee() -> None:
    assert info_of_points(SMALL[:2]).knee is None


def test_a_cost_that_points_lack_is_refused() -> None:
    with pytest.raises(ExtractError, match="cannot be drawn over 'flops'"):
        info_of_points(SMALL, x="flops")


@pytest.mark.slow
@given(points)
def test_stairs_are_what_no_other_point_beats_on_both_axes(found: list[FrontPoint]) -> None:
    info = info_of_points(found)
    stairs = {(info.points[i].peak_bytes, info.points[i].seconds) for i in info.stairs}
    at = {(p.peak_bytes, p.seconds) for p in found}
    assert stairs == {
        (x, y) for x, y in at if not any(u <= x and v <= y and (u, v) != (x, y) for u, v in at)
    }


@pytest.mark.slow
@settings(deadline=None)
@given(points)
def test_any_front_is_drawn_as_wellformed_xml(found: list[FrontPoint]) -> None:
    info = info_of_points(found, title="a <b> & 'c'", original=found[0] if found else None)
    for scale in ("auto", "linear", "log"):
        root = ET.fromstring(front_svg(info, scale=scale))
        assert root.tag == f"{SVG}svg"
        circles = [e for e in root.iter(f"{SVG}circle") if e.get("r") in ("5.5", "4.5")]
        assert len(circles) == len(found) + len({p.mesh for p in found})


def test_the_drawing_shows_names_units_the_original_and_the_numbers_on_hovering() -> None:
    info = info_of_points(SMALL, title="gpt2 on h100:8", original=point("whole", 5.0, 8 * GIB))
    text = words(info)
    for word in ("gpt2 on h100:8", "a", "b", "c", "original", "8x", "3 plans"):
        assert any(word in line for line in text), word
    assert "time per step (s)" in text
    assert "peak memory per device (GiB)" in text
    titles = [e.text for e in elements(info, "title")]
    assert "b (8x): 1.5 s, 2 GiB, 1 J, gap 1 %" in titles
    assert len([e for e in elements(info, "rect") if e.get("class") == "hollow"]) == 1


def test_better_points_are_further_left_and_further_down() -> None:
    info = info_of_points(SMALL)
    dots = [e for e in elements(info, "g") if e.find(f"{SVG}circle") is not None]
    place = {}
    for dot in dots:
        title, circle = dot.find(f"{SVG}title"), dot.find(f"{SVG}circle")
        assert title is not None and title.text and circle is not None
        place[title.text[0]] = (float(circle.get("cx", "")), float(circle.get("cy", "")))
    assert place["a"][0] < place["b"][0] < place["c"][0]
    assert place["a"][1] < place["b"][1] < place["c"][1]  # y points down the page


def test_control_characters_in_names_do_not_break_the_file() -> None:
    info = info_of_points([point("a\x00\x1b<b>", 1.0, 1.0)])
    assert any("a<b>" in line for line in words(info))


def test_a_front_file_appears_whole_and_alone(tmp_path: Path) -> None:
    path = plot_front(info_of_points(SMALL), tmp_path / "deep" / "front.svg")
    assert [p.name for p in path.parent.iterdir()] == ["front.svg"]
    assert ET.parse(path).getroot().tag == f"{SVG}svg"


@given(
    st.lists(st.floats(min_value=0.0, max_value=1e12), min_size=1, max_size=9),
    st.sampled_from(["auto", "linear", "log"]),
    st.sampled_from(["seconds", "peak_bytes", "joules"]),
)
def test_axes_hold_every_value_and_have_a_few_round_ticks(
    values: list[float], scale: str, objective: str
) -> None:
    axis = fit_axis(objective, values, 0.0, 100.0, scale)
    assert axis.low <= min(values) and max(values) <= axis.high
    ticks = axis.ticks()
    assert 2 <= len(ticks) <= 9
    places = [axis.at(value) for value, _ in ticks]
    assert places == sorted(places)
    assert -1e-6 <= places[0] and places[-1] <= 100 + 1e-6


def test_an_axis_over_a_wide_range_is_logarithmic_and_a_narrow_one_is_not() -> None:
    assert fit_axis("seconds", [1.0, 100.0], 0.0, 100.0).log
    assert not fit_axis("seconds", [1.0, 2.0], 0.0, 100.0).log
    assert not fit_axis("seconds", [0.0, 100.0], 0.0, 100.0, "log").log


@given(
    st.lists(
        st.builds(
            Wish,
            rank=st.integers(0, 2),
            x=st.floats(20, 380),
            y=st.floats(20, 280),
            name=st.text("abcm-1", min_size=1, max_size=10),
        ),
        max_size=25,
    )
)
def test_labels_cover_neither_dots_nor_each_other_nor_leave_the_frame(wishes: list[Wish]) -> None:
    frame = Box(0, 0, 400, 300)
    dots = [Box(w.x - 7, w.y - 7, w.x + 7, w.y + 7) for w in wishes]
    boxes = []
    for label in place_labels(wishes, dots, frame):
        width = text_width(label.name)
        left = label.x - {"start": 0, "middle": width / 2, "end": width}[label.anchor]
        boxes.append(Box(left, label.y - 9, left + width, label.y + 2))
    assert all(box.within(frame) for box in boxes)
    assert not any(box.overlaps(dot) for box in boxes for dot in dots)
    assert not any(a.overlaps(b) for a, b in combinations(boxes, 2))


# The front in a terminal: every plan stands where its costs say, and no line is too long.


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
