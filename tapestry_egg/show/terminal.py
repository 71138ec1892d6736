"""The picture of a front in a terminal: plans as dots in lines of text, joined by their stairs."""

from __future__ import annotations

from itertools import pairwise

from .chart import Axis, fit_axis
from .plot import FrontInfo, Scale

#: Columns and lines that a picture takes at least; in fewer there is none.
LEAST = (60, 8)


def front_terminal(
    info: FrontInfo, width: int = 80, height: int = 16, *, scale: Scale = "auto"
) -> str:
    """A front as `height` lines of at most `width` columns; empty where that is too small, or the
    front has no plans.

    A plan is `●`, one above a device's memory `○`, the program as it came `□`, with its name beside
    it where there is room. Between the plans that no other beats on both axes run the stairs: what
    is below and left of them no plan reaches. Axes are those of the drawn picture.
    """
    if width < LEAST[0] or height < LEAST[1] or not info.points:
        return ""
    shown = [*info.points, *([info.original] if info.original else [])]
    top, bottom = 0, height - 4  # the first and last row of the picture itself
    upwards = fit_axis(info.y, [p.value(info.y) for p in shown], bottom, top, scale)
    marks = {round(upwards.at(value)): text for value, text in upwards.ticks()}
    margin = max(map(len, marks.values())) + 1
    across = fit_axis(info.x, [p.value(info.x) for p in shown], 0, width - margin - 2, scale)
    cells = [[" "] * (width - margin - 1) for _ in range(bottom + 1)]

    def place(x: float, y: float) -> tuple[int, int]:
        return round(upwards.at(y)), round(across.at(x))

    corners = [info.points[i] for i in info.stairs]
    for one, two in pairwise((p.value(info.x), p.value(info.y)) for p in corners):
        (row, column), (low, turn) = place(*one), place(*two)
        for c in range(column, turn):
            cells[row][c] = "─"
        for r in range(row, low):
            cells[r][turn] = "│"
        if row < low and column < turn:
            cells[row][turn] = "┐"
    spots = [place(p.value(info.x), p.value(info.y)) for p in shown]
    for (row, column), p in zip(reversed(spots), reversed(shown), strict=True):
        cells[row][column] = "□" if p is info.original else "●" if p.fits else "○"
    for (row, column), p in zip(spots, shown, strict=True):
        if not _write(cells[row], column + 1, f" {p.name} "):
            _write(cells[row], column - len(p.name) - 1, p.name)
    lines = [
        f"{marks.get(row, ''):>{margin - 1}} {'┤' if row in marks else '│'}{''.join(line)}"
        for row, line in enumerate(cells)
    ]
    words = f"{upwards.label} over {across.label}"
    return "\n".join(x.rstrip() for x in [words, *lines, *_below(across, margin, width)])


def _write(line: list[str], at: int, text: str) -> bool:
    """Write over what is free or stairs, if there is room, and say whether there was."""
    room = at >= 0 and at + len(text.rstrip()) <= len(line)
    if room := room and all(c in " ─" for c in line[at : at + len(text)]):
        line[at : at + len(text)] = text[: len(line) - at]
    return room


def _below(axis: Axis, margin: int, width: int) -> list[str]:
    """The lower axis with its marks, and what they say; of two that would touch, the first."""
    line, said = ["─"] * (width - margin - 1), [" "] * width
    free = 0
    for value, text in axis.ticks():
        at = round(axis.at(value))
        begin = margin + 1 + at - len(text) // 2
        line[at] = "┴"
        if free <= begin and begin + len(text) <= width:
            said[begin : begin + len(text)] = text
            free = begin + len(text) + 1
    return [" " * margin + "└" + "".join(line), "".join(said)]
