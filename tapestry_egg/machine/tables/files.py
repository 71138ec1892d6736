"""Files of measured times: small tables of comma-separated values, read cell by cell.

Lines that begin with `#` say where the figures come from; the first other line names the columns.
Packaged ones lie in this folder; a user's lie beside the target file that names them, in the same
form. What is read is numbers and names of dtypes, nothing else.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from math import isfinite

from tapestry_egg.errors import TargetError

_LARGEST = 4 << 20  # bytes of a table


@dataclass(frozen=True, slots=True)
class TableFile:
    """A file of measured times by name and digest; of a user's file also its text.

    A plan says by which tables it was priced. Those of the package are known by their digest, so
    that a plan stays small; a user's travel with it.
    """

    name: str
    digest: str
    own_text: str = ""

    @property
    def text(self) -> str:
        """What the file holds. Raises TargetError where it is not what the digest says."""
        text = self.own_text or _packaged_text(self.name)
        if digest_of(text) != self.digest:
            raise TargetError(
                "is not the table that costs were counted by",
                where=self.name,
                hint="Tables of another version of tapestry-egg; search again.",
            )
        return text


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a table, with its place."""

    where: str
    columns: tuple[str, ...]
    cells: tuple[str, ...]

    def text(self, column: str) -> str:
        return self.cells[self.columns.index(column)]

    def count(self, column: str) -> int:
        """A positive whole number."""
        value = self._number(column)
        if value != int(value):
            raise self.error(column, "it must be a whole number")
        return int(value)

    def seconds(self, column: str) -> float | None:
        """A time given in microseconds, in seconds; None where the cell is empty."""
        return self._number(column) * 1e-6 if self.text(column) else None

    def _number(self, column: str) -> float:
        try:
            value = float(self.text(column))
        except ValueError:
            raise self.error(column, "it must be a number") from None
        if not isfinite(value) or not 0 < value < 1e15:
            raise self.error(column, "it must be above 0")
        return value

    def error(self, column: str, what: str) -> TargetError:
        return TargetError(f"{column} is {self.text(column)!r:.40}, {what}", where=self.where)


def rows(file: TableFile, leading: Sequence[str]) -> Iterator[Row]:
    """The lines of a table whose first columns are `leading`.

    Raises TargetError, with file and line, for another header, a line of another length, and no
    lines at all.
    """
    columns: tuple[str, ...] = ()
    seen = False
    for number, line in enumerate(file.text.splitlines(), start=1):
        if line.startswith("#") or not line.strip():
            continue
        where = f"{file.name}:{number}"
        cells = tuple(x.strip() for x in line.split(","))
        if not columns:
            columns = cells
            if columns[: len(leading)] != tuple(leading) or len(columns) <= len(leading):
                raise TargetError(
                    f"the columns are not {', '.join(leading)} and others", where=where
                )
            if len(set(columns)) < len(columns):
                raise TargetError("a column occurs twice", where=where)
            continue
        if len(cells) != len(columns):
            raise TargetError(f"has {len(cells)} cells, not {len(columns)}", where=where)
        seen = True
        yield Row(where, columns, cells)
    if not seen:
        raise TargetError("has no rows", where=file.name)


def packaged_table(name: str) -> TableFile | None:
    """A table that comes with the package; None where there is none of that name."""
    folder = resources.files("tapestry_egg.machine.tables")
    if "/" in name or not name.endswith(".csv") or not (folder / name).is_file():
        return None
    return TableFile(name, digest_of(_packaged_text(name)))


def users_table(name: str, data: bytes) -> TableFile:
    """A table of the user's, from the bytes of its file. Raises TargetError for what is no text."""
    if len(data) > _LARGEST:
        raise TargetError(f"has {len(data)} bytes, at most {_LARGEST} are read", where=name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as e:
        line = data.count(b"\n", 0, e.start) + 1
        raise TargetError(f"not UTF-8: {e.reason}", where=f"{name}:{line}") from None
    if not text.strip():
        raise TargetError("has no rows", where=name)
    return TableFile(name, digest_of(text), text)


def digest_of(text: str) -> str:
    """The first half of a text's SHA-256, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _packaged_text(name: str) -> str:
    file = resources.files("tapestry_egg.machine.tables") / name
    if "/" in name or not name.endswith(".csv") or not file.is_file():
        raise TargetError(
            "there is no such table in the package",
            where=f"{name:.80}",
            hint="Tables of another version of tapestry-egg; search again.",
        )
    return file.read_text("utf-8")
