"""Problems as JSON: what is left to choose once a program has been saturated for one mesh.

    {"tapestry_egg": "problem", "version": 1, "name": .., "times": 7,
     "tables": [[..], [[..], ..], ..], "labels": [[..], ..],
     "variables": [{"name": .., "seconds": 0, "joules": 1, "uses": [[0, 3, 2]]}, ..],
     "pairs": [{"variables": [0, 1], "labels": [0, 1], "seconds": 3, "joules": 4, "uses": []}, ..]}

A variable is a unit of the program, its rows are the ways to run it. `seconds`, `joules` and the
third number of a use are indices into `tables`, so that what equal layers share is there once. A
variable's table has an entry per row. A pair's has one per label of the first variable's row and
label of the second's; `labels` are lists of one label per row. The entry `null` forbids. A use
[start, end, table] occupies that many bytes at the times from start to before end; a pair's may be
negative, where its two variables count too much. One row per variable is an answer: seconds and
joules are sums, the peak is the most bytes at any time. A file may have `constant`, bytes of each
time that are there whatever is chosen: read as one more variable, of one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Use, Variable

VERSION = 1


class VariableRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A variable: its name, and its tables by number."""

    name: str
    seconds: int
    joules: int
    uses: list[tuple[int, int, int]] = []


class PairRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two variables, the labels of their rows, and tables over them, by number."""

    variables: tuple[int, int]
    labels: tuple[int, int]
    seconds: int
    joules: int
    uses: list[tuple[int, int, int]] = []


class ProblemFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file."""

    tapestry_egg: Literal["problem"]
    version: Literal[1]
    name: str
    times: int
    tables: list[list[float | list[float | None] | None]]
    labels: list[list[int]]
    variables: list[VariableRecord]
    pairs: list[PairRecord]
    constant: list[float] = []


def recognises(document: Any) -> bool:
    """Whether a JSON document is of this format."""
    return isinstance(document, Mapping) and document.get("tapestry_egg") == "problem"


def write(problem: Problem, name: str = "") -> dict[str, Any]:
    """The document of a problem; equal arrays are written once.

    Raises ExtractError for a problem whose seconds are a longest path.
    """
    if problem.timeline is not None:
        raise ExtractError(
            "seconds are a longest path, which files of problems do not hold",
            where=name,
            hint="Save problems of Settings(overlap=False).",
        )
    known: dict[object, int] = {}
    tables: list[Any] = []
    labels: list[list[int]] = []

    def table(x: Floats) -> int:
        if id(x) not in known:
            known[id(x)] = known.setdefault((x.shape, x.tobytes()), len(tables))
            if known[id(x)] == len(tables):
                entries = x.astype(object)
                entries[~np.isfinite(x)] = None
                tables.append(entries.tolist())
        return known[id(x)]

    def line(x: Ints) -> int:
        if id(x) not in known:
            known[id(x)] = known.setdefault(x.tobytes(), len(labels))
            if known[id(x)] == len(labels):
                labels.append(x.tolist())
        return known[id(x)]

    def costs(part: Variable | Pair) -> dict[str, Any]:
        uses = [[u.start, u.end, table(u.amount)] for u in part.uses]
        return {"seconds": table(part.seconds), "joules": table(part.joules), "uses": uses}

    variables = [{"name": v.name, **costs(v)} for v in problem.variables]
    pairs = [
        {"variables": [p.a, p.b], "labels": [line(p.label_a), line(p.label_b)], **costs(p)}
        for p in problem.pairs
    ]
    return {
        "tapestry_egg": "problem",
        "version": VERSION,
        "name": name,
        "times": problem.times,
        "tables": tables,
        "labels": labels,
        "variables": variables,
        "pairs": pairs,
    }


def read(document: Any, source: str = "problem") -> Problem:
    """The problem of a document.

    Raises ExtractError, with the place in the document, where it is none: numbers that name no
    table, tables of a shape that does not fit, negative costs, missing bytes, times out of range.
    """
    try:
        file = msgspec.convert(document, ProblemFile)
        return _Reader(file).problem()
    except msgspec.ValidationError as e:
        what, _, place = str(e).partition(" - at ")
        raise ExtractError(what, where=f"{source}: {place.strip('`') or '$'}") from None
    except ExtractError as e:
        raise ExtractError(e.what, where=f"{source}: {e.where}", hint=e.hint) from None


def answer(problem: Problem, rows: Ints) -> dict[str, int]:
    """An answer as JSON: variable -> row, by number where names are not distinct."""
    names = [v.name for v in problem.variables]
    if len(set(names)) < len(names):
        names = [f"{i} {name}" for i, name in enumerate(names)]
    return dict(zip(names, rows.tolist(), strict=True))


class _Reader:
    """Checks a file's numbers one by one, and builds the problem of it."""

    def __init__(self, file: ProblemFile) -> None:
        self.file = file
        self.tables = [_array(t, f"$.tables[{i}]") for i, t in enumerate(file.tables)]
        self.labels = [np.array(x, dtype=np.int64) for x in file.labels]

    def problem(self) -> Problem:
        file = self.file
        _need(file.times >= 0, "$.times", "must not be negative")
        variables = tuple(
            self.variable(v, f"$.variables[{i}]") for i, v in enumerate(file.variables)
        )
        pairs = tuple(self.pair(p, variables, f"$.pairs[{i}]") for i, p in enumerate(file.pairs))
        return Problem((*variables, *self.fixed()), pairs, file.times)

    def fixed(self) -> tuple[Variable, ...]:
        """The variable of one row that holds what is there whatever is chosen, if anything is."""
        given = self.file.constant
        fits = len(given) in (0, self.file.times)
        _need(fits, "$.constant", f"{self.file.times} entries expected")
        _need(all(b >= 0 for b in given), "$.constant", "bytes must not be negative")
        uses = tuple(Use(t, t + 1, np.array([b])) for t, b in enumerate(given) if b)
        return (Variable("constant", np.zeros(1), np.zeros(1), uses),) if uses else ()

    def variable(self, record: VariableRecord, where: str) -> Variable:
        seconds, joules = self.costs(record, where)
        _need(seconds.ndim == 1 and len(seconds) > 0, f"{where}.seconds", "a list of rows expected")
        return Variable(record.name, seconds, joules, self.uses(record.uses, seconds.shape, where))

    def pair(self, record: PairRecord, variables: tuple[Variable, ...], where: str) -> Pair:
        for end in record.variables:
            _need(0 <= end < len(variables), f"{where}.variables", f"no variable {end}")
        a, b = record.variables
        _need(a != b, f"{where}.variables", "a pair of a variable with itself")
        seconds, joules = self.costs(record, where)
        _need(seconds.ndim == 2, f"{where}.seconds", "a table of two dims expected")
        lines = []
        for end, number, size in zip(record.variables, record.labels, seconds.shape, strict=True):
            at = f"{where}.labels"
            _need(0 <= number < len(self.labels), at, f"no list of labels {number}")
            line = self.labels[number]
            _need(len(line) == len(variables[end]), at, f"{len(variables[end])} labels expected")
            _need(bool(((0 <= line) & (line < size)).all()), at, f"labels from 0 to {size - 1}")
            lines.append(line)
        uses = self.uses(record.uses, seconds.shape, where)
        return Pair(a, b, lines[0], lines[1], seconds, joules, uses)

    def costs(self, record: VariableRecord | PairRecord, where: str) -> tuple[Floats, Floats]:
        seconds = self.table(record.seconds, None, f"{where}.seconds")
        joules = self.table(record.joules, seconds.shape, f"{where}.joules")
        for table, name in ((seconds, "seconds"), (joules, "joules")):
            _need(bool((table >= 0).all()), f"{where}.{name}", "costs must not be negative")
        return seconds, joules

    def uses(
        self, records: list[tuple[int, int, int]], shape: tuple[int, ...], where: str
    ) -> tuple[Use, ...]:
        found = []
        for k, (start, end, number) in enumerate(records):
            at = f"{where}.uses[{k}]"
            _need(0 <= start <= end <= self.file.times, at, f"times from 0 to {self.file.times}")
            amount = self.table(number, shape, at)
            _need(bool(np.isfinite(amount).all()), at, "bytes must be numbers")
            found.append(Use(start, end, amount))
        return tuple(found)

    def table(self, number: int, shape: tuple[int, ...] | None, where: str) -> Floats:
        _need(0 <= number < len(self.tables), where, f"no table {number}")
        table = self.tables[number]
        if shape is not None:
            _need(table.shape == shape, where, f"a table of shape {shape}, not {table.shape}")
        return table


def _array(entries: Any, where: str) -> NDArray[np.float64]:
    """A table, infinite where it forbids."""
    deep = [isinstance(row, list) for row in entries]
    _need(all(deep) or not any(deep), where, "rows and numbers are mixed")
    if any(deep):
        _need(len({len(row) for row in entries}) == 1, where, "rows of different lengths")
    table = np.array(entries, dtype=np.float64)  # None becomes not-a-number
    return np.where(np.isnan(table), np.inf, table)


def _need(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise ExtractError(what, where=where)
