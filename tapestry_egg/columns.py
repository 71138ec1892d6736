"""Rows as aligned text that fits a terminal, with what is alike told once."""

from __future__ import annotations

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

#: Columns of a line where no terminal says more, and at most.
WIDTH, WIDEST = 80, 120
# What `lines_of` asks for.
_SET: ContextVar[int] = ContextVar("columns", default=0)
# Columns of words that a table never makes narrower, and of a terminal that text is fitted to.
_NARROW, _LEAST = 12, 60
# Columns of a name, such as `train.py:17`, that is broken last of all.
_NAME = 24
# Before columns of a row that stand below the others.
_BELOW = "    "
# One layout or several, as `Layout.show` writes them: `[x·y, .] +sum(z), [.]`.
_ONE = r"\[(?:(?:[^\W\d][\w·]*|\.)(?:, )?)*\](?: \+\w+\([^)]*\))*"
_TYPE = r"\w+\[[\d, ]*\]"
_WHOLE, _KEPT = re.compile(f"{_TYPE}|{_ONE}"), "\0"
# Cells of which no word is broken.
_FIXED = re.compile(f".*{_TYPE}.*|{_ONE}(?:, {_ONE})*")
# Numbers that tell equal things apart: of a value or an operation, or in a path of a pytree.
_NUMBERS = re.compile(r"(?<=[%#])\d+")
_PATHS = re.compile(r"(?<=\[)\d+(?=\])|(?<=[_a-z])\d+(?=')|(?<=^%)\d+")


def columns(
    rows: Sequence[Sequence[str]], indent: str = "", right: Iterable[int] = (), width: int = 0
) -> str:
    """Rows of cells as aligned text; the columns in `right` are flush right. If rows are longer
    than `width` (0: the reader's), the widest columns of words go on below. If that is not enough,
    the last columns of every row stand on a line of their own. Layouts, numbers and words stay
    whole, unless one alone is longer than a line.

    >>> print(columns([["name", "ms"], ["a", "12"]], right=[1]))
    name  ms
    a     12
    >>> print(columns([["[x·y, .]", "made by the program"]], width=23))
    [x·y, .]  made by the
              program
    >>> print(columns([["[x·y, .]", "12 ms", "f32[8, 4]"], ["[.]", "7 ms", "s32[]"]], width=20))
    [x·y, .]  12 ms
        f32[8, 4]
    [.]       7 ms
        s32[]
    """
    flush = set(right)
    width = width or readers_width()
    table = [list(column) for column in zip(*rows, strict=True)]
    blocks: list[list[list[str]]] = []
    first, lead = 0, indent
    for last in _line_ends(table, flush, len(indent), width):
        own = {k - first for k in flush if first <= k < last}
        blocks.append(_aligned(table[first:last], lead, own, width))
        first, lead = last, indent + _BELOW
    rows_of_lines = zip(*blocks, strict=True)
    lines = [x for row in rows_of_lines for k, part in enumerate(row) for x in part if x or not k]
    return "\n".join(lines)


def _line_ends(
    table: Sequence[Sequence[str]], flush: set[int], indent: int, width: int
) -> Iterator[int]:
    """The columns before which a new line begins, and the end: a line has all columns that fit."""
    room = width - indent
    for k, column in enumerate(table):
        least = max(map(len, column))
        if k not in flush:
            least = min(least, max(_NARROW, _words(column)[1]))
        room -= least + 2 * (k > 0)
        if room < 0 < k:
            yield k
            room = width - indent - len(_BELOW) - least
    yield len(table)


def _words(column: Sequence[str]) -> tuple[int, int, int]:
    """Widths of a column that break no word, none but long names, and none that is fixed."""
    longest = max(map(_longest, column))
    fixed = longest if any(_FIXED.fullmatch(cell) for cell in column) else 0
    return longest, max(fixed, min(longest, _NAME)), fixed


def _aligned(
    table: Sequence[Sequence[str]], indent: str, flush: set[int], width: int
) -> list[list[str]]:
    """The lines of every row of some columns that stand beside each other."""
    widths = [max(len(cell) for cell in column) for column in table]
    words = [k for k in range(len(table)) if k not in flush]
    spare = width - len(indent) - 2 * (len(widths) - 1) - sum(widths)
    # Between words first, and where that is not enough, within them.
    for least in zip(*map(_words, table), strict=True):
        floors = [max(_NARROW, n) for n in least]
        while spare < 0 and (wide := [k for k in words if widths[k] > floors[k]]):
            k = max(wide, key=lambda k: widths[k])
            # The next widest goes on below, too, once they are as wide.
            others = [widths[j] for j in wide if widths[j] < widths[k]]
            cut = min(-spare, widths[k] - max([floors[k], *others]))
            widths[k], spare = widths[k] - cut, spare + cut
    found = []
    for row in zip(*table, strict=True):
        parts = [
            _folded(cell, w) if len(cell) > w else [cell]
            for cell, w in zip(row, widths, strict=True)
        ]
        lines = []
        for n in range(max(map(len, parts), default=0)):
            cells = [
                (part[n] if n < len(part) else "").rjust(w)
                if i in flush
                else (part[n] if n < len(part) else "").ljust(w)
                for i, (part, w) in enumerate(zip(parts, widths, strict=True))
            ]
            lines.append((indent + "  ".join(cells)).rstrip())
        found.append(lines)
    return found


def _folded(text: str, width: int) -> list[str]:
    """Words on lines of a width, as they are indented."""
    lead = text[: len(text) - len(text.lstrip())][: width // 2]
    lines = textwrap.wrap(
        _joined(text.strip()),
        width,
        initial_indent=lead,
        subsequent_indent=lead,
        break_on_hyphens=False,
    )
    return [line.replace(_KEPT, " ") for line in lines] or [""]


def _joined(text: str) -> str:
    """Text whose types, such as `f32[8, 4]`, and layouts are one word each."""
    return _WHOLE.sub(lambda found: found[0].replace(" ", _KEPT), text)


def _longest(text: str) -> int:
    """The length of the longest word."""
    return max(map(len, _joined(text).split(" ")))


def shortened(text: str, most: int) -> str:
    """A text of at most so many characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def percent(share: float) -> str:
    """A share as a percentage, `-` where it is not known.

    >>> percent(0.0123), percent(float("inf"))
    ('1.2 %', '-')
    """
    return f"{100 * share:.1f} %" if math.isfinite(share) else "-"


def told_once(
    rows: Sequence[Sequence[str]],
    everything: bool = False,
    paths: bool = False,
    right: Iterable[int] = (),
    header: bool = False,
    first: int | None = None,
    most: int | None = None,
) -> str:
    """Rows as text; those alike but for the numbers in them are one, with their count in front. The
    first column has `paths` into the user's pytrees, where told so. Of those that are one, column
    `first` tells what the first has there."""
    head, body = (list(rows[:1]), rows[1:]) if header else ([], rows)
    if not body:
        return "  none"
    if everything:
        return columns(rows, "  ", right)
    names = [_PATHS if paths and not k else _NUMBERS for k in range(len(rows[0]))]
    alike: dict[tuple[str, ...], list[Sequence[str]]] = {}
    for row in body:
        cells = (n.sub("*", cell) for n, cell in zip(names, row, strict=True))
        key = tuple("" if k == first else cell for k, cell in enumerate(cells))
        alike.setdefault(key, []).append(row)
    told = list(alike.values())[:most]
    rest = len(alike) - len(told)
    more = f"\n  and {rest} kinds more" if rest else ""
    if all(len(group) == 1 for group in told):
        return columns([*head, *(group[0] for group in told)], "  ", right) + more
    counted = [
        [
            f"{len(group)}×" if len(group) > 1 else "",
            *(
                cells[0] if k == first else _common(cells, name)
                for k, (cells, name) in enumerate(zip(zip(*group, strict=True), names, strict=True))
            ),
        ]
        for group in told
    ]
    lines = columns([*(["", *h] for h in head), *counted], "  ", [0, *(k + 1 for k in right)])
    return lines + more


def _common(cells: Sequence[str], names: re.Pattern[str]) -> str:
    """Cells that are alike, with `*` for the numbers in which they differ."""
    numbers = zip(*(names.findall(cell) for cell in cells), strict=True)
    kept = iter([group[0] if len(set(group)) == 1 else "*" for group in numbers])
    return names.sub(lambda _: next(kept), cells[0])


def starred(path: str) -> str:
    """A path into a pytree without the numbers that tell equal layers apart.

    >>> starred("[0]['layers'][3]['w']")
    "[*]['layers'][*]['w']"
    """
    return _PATHS.sub("*", path)


def alike(paths: Sequence[str]) -> str:
    """Paths that are the same but for numbers as one.

    >>> alike(["[0]['layers'][3]['w']", "[0]['layers'][5]['w']"])
    "[0]['layers'][*]['w']"
    """
    return _common(paths, _PATHS)


def short_paths(files: Iterable[str]) -> Mapping[str, str]:
    """Each file by the shortest end of its path that no other has.

    >>> short_paths(["/home/me/gpt2.py", "optax/update.py", "haiku/update.py"])["/home/me/gpt2.py"]
    'gpt2.py'
    """
    split = {file: file.replace(os.sep, "/").split("/") for file in files}
    found = {}
    for file, parts in split.items():
        n = 1
        while n < len(parts) and sum(p[-n:] == parts[-n:] for p in split.values()) > 1:
            n += 1
        found[file] = "/".join(parts[-n:])
    return found


def short_places(places: Iterable[str]) -> Mapping[str, str]:
    """Each `FILE:LINE` with its file as `short_paths` calls it; others as they are.

    >>> short_places(["/home/me/gpt2.py:12", ""])["/home/me/gpt2.py:12"]
    'gpt2.py:12'
    """
    split = {place: place.rpartition(":") for place in places}
    short = short_paths({file for file, _, _ in split.values()} - {""})
    return {p: f"{short[file]}:{line}" if file else p for p, (file, _, line) in split.items()}


def wrapped(text: str, width: int = 0) -> str:
    """Text whose lines are no longer than a width (0: the reader's): they go on below, indented
    further.

    >>> print(wrapped("in plans of the front\\n  of a mesh", 14))
    in plans of
      the front
      of a mesh
    """
    width = width or readers_width()
    lines: list[str] = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        own = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line.strip(),
            width,
            initial_indent=own,
            subsequent_indent=f"{own}  ",
            break_on_hyphens=False,
        )
    return "\n".join(lines)


@contextmanager
def lines_of(width: int) -> Iterator[None]:
    """Text that is made in the block has lines of so many columns, whatever the terminal has."""
    before = _SET.set(width)
    try:
        yield
    finally:
        _SET.reset(before)


def readers_width() -> int:
    """Columns of the terminal that is written to, or those that the environment's `COLUMNS` says,
    `WIDEST` at most; `WIDTH` if neither says any."""
    if _SET.get():
        return _SET.get()
    in_terminal = sys.stdout is not None and sys.stdout.isatty()
    if not in_terminal and not os.environ.get("COLUMNS"):
        return WIDTH
    return max(_LEAST, min(WIDEST, shutil.get_terminal_size((WIDTH, 24)).columns))
