"""How a template writes a projection or a shape: as a text, part by part, as an edit, or in full.

    "[..., 1, 0] :> [..., 1, $n]"                         a text; also a list of rows
    {map: "[..., 1, 0]", offset: "[...]", shape: "[..., 1, $n]"}
    {transform: insert, index: $axis, source: "[1...]", patch: "[0] :> [$n]"}
    {transform: insertRow, index: $axis, source: "[1...]", row: "[0... | 0 | $n]"}
    {affineMap: {projection: [[1, 0], [0, 0]], offset: [0, 0]}, shape: [1, $n]}

A shape is a text, or an insertion: `{transform: insert, index: .., source: .., patch: "[$n]"}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels.signatures.values import Row

from .expressions import Expression
from .faults import Fault
from .positional import AugmentedRow, Diagonal, augmented_row, diagonal_rows, patch_rows, rows_of
from .scopes import Scope


class ProjectionForm(Protocol):
    """Any of the ways to write a projection."""

    def rows(self, scope: Scope, rank: int, index_rank: int) -> tuple[Row, ...]:
        """One row per dim of a tensor of `rank`, over `index_rank` index dims.

        Raises TemplateError with the place of what does not fit.
        """

    def texts(self) -> Iterator[Expression]:
        """Every expression in it."""

    def error(self, what: str, hint: str = "") -> TemplateError:
        """An error about the projection as a whole."""


@dataclass(frozen=True, slots=True)
class RowsText:
    """A text; `positional` says that a list of bare numbers is a map, not a list of starts."""

    text: Expression
    positional: bool = False

    def rows(self, scope: Scope, rank: int, index_rank: int) -> tuple[Row, ...]:
        value = self.text(scope)
        try:
            rows = rows_of(value, rank, index_rank, positional=self.positional)
        except Fault as fault:
            raise self.text.fault(fault) from None
        if len(rows) != rank:
            raise self.text.error(f"{len(rows)} rows for a tensor of rank {rank}")
        return rows

    def texts(self) -> Iterator[Expression]:
        yield self.text

    def error(self, what: str, hint: str = "") -> TemplateError:
        return self.text.error(what, hint)


@dataclass(frozen=True, slots=True)
class Parts:
    """The long form: the map, the offset and the shape each on its own."""

    map: Expression
    offset: Expression | None
    shape: Expression | None

    def rows(self, scope: Scope, rank: int, index_rank: int) -> tuple[Row, ...]:
        diagonal = self.map(scope)
        if isinstance(diagonal, tuple):
            diagonal = Diagonal(diagonal)
        if not isinstance(diagonal, Diagonal):
            raise self.map.error(f"{diagonal!r} is not a map", "Write a list, `[..., 1, 0]`.")
        for name, text in (("offset", self.offset), ("shape", self.shape)):
            if text is None:
                continue
            if getattr(diagonal, name) is not None:
                raise text.error(f"the map already has an {name}")
            part = _list(text, scope)
            diagonal = (
                replace(diagonal, shape=part) if name == "shape" else replace(diagonal, offset=part)
            )
        try:
            return diagonal_rows(diagonal, rank, index_rank)
        except Fault as fault:
            raise self.map.fault(fault) from None

    def texts(self) -> Iterator[Expression]:
        yield from (t for t in (self.map, self.offset, self.shape) if t is not None)

    def error(self, what: str, hint: str = "") -> TemplateError:
        return self.map.error(what, hint)


@dataclass(frozen=True, slots=True)
class Insertion:
    """`source` with rows put in before its row `index`: those of `patch`, or the one `row`."""

    index: Expression
    source: ProjectionForm
    patch: Expression
    single: bool  # whether `patch` is one augmented row

    def rows(self, scope: Scope, rank: int, index_rank: int) -> tuple[Row, ...]:
        value = self.patch(scope)
        try:
            if not self.single:
                new = patch_rows(value, index_rank)
            elif isinstance(value, AugmentedRow):
                new = (augmented_row(value, index_rank),)
            else:
                raise Fault(0, f"{value!r} is not a row", "Write `[A... | B | S]`.")
        except Fault as fault:
            raise self.patch.fault(fault) from None
        if len(new) > rank:
            raise self.patch.error(f"{len(new)} rows for a tensor of rank {rank}")
        rows = self.source.rows(scope, rank - len(new), index_rank)
        at = _place(self.index, scope, len(rows))
        return (*rows[:at], *new, *rows[at:])

    def texts(self) -> Iterator[Expression]:
        yield from (self.index, *self.source.texts(), self.patch)

    def error(self, what: str, hint: str = "") -> TemplateError:
        return self.source.error(what, hint)


@dataclass(frozen=True, slots=True)
class Matrix:
    """A, B and S in full; a row, or any of the three, may also be an expression."""

    matrix: Sequence[ListText]
    offset: ListText
    shape: ListText

    def rows(self, scope: Scope, rank: int, index_rank: int) -> tuple[Row, ...]:
        if len(self.matrix) != rank:
            raise self.error(f"{len(self.matrix)} rows for a tensor of rank {rank}")
        coefficients = [row.integers(scope, index_rank) for row in self.matrix]
        starts, extents = self.offset.integers(scope, rank), self.shape.integers(scope, rank)
        for n in extents:
            if n < 0:
                raise self.shape.error(f"{n} is not an extent")
        return tuple(map(Row, coefficients, starts, extents))

    def texts(self) -> Iterator[Expression]:
        for part in (*self.matrix, self.offset, self.shape):
            yield from part.entries

    def error(self, what: str, hint: str = "") -> TemplateError:
        return self.shape.error(what, hint)


@dataclass(frozen=True, slots=True)
class ListText:
    """A list in YAML, an expression per entry, or (`whole`) one expression for all of it."""

    entries: tuple[Expression, ...]
    at: Expression  # what errors about the list as a whole point at
    whole: bool = False

    def integers(self, scope: Scope, size: int) -> tuple[int, ...]:
        """The entries' values. Raises TemplateError unless they are `size` integers."""
        values = _list(self.at, scope) if self.whole else tuple(e(scope) for e in self.entries)
        for k, v in enumerate(values):
            if type(v) is not int:
                raise (self.at if self.whole else self.entries[k]).error(f"{v!r} is not an integer")
        if len(values) != size:
            raise self.error(f"{len(values)} entries where {size} are needed")
        return values

    def error(self, what: str, hint: str = "") -> TemplateError:
        return self.at.error(what, hint)


@dataclass(frozen=True, slots=True)
class ShapeInsertion:
    """A shape: the list `source` with the entries of `patch` put in before its entry `index`."""

    index: Expression
    source: Expression
    patch: Expression

    def __call__(self, scope: Scope) -> Any:
        source, patch = _list(self.source, scope), _list(self.patch, scope)
        at = _place(self.index, scope, len(source))
        return (*source[:at], *patch, *source[at:])

    def texts(self) -> Iterator[Expression]:
        yield from (self.index, self.source, self.patch)

    def error(self, what: str, hint: str = "") -> TemplateError:
        return self.source.error(what, hint)


ShapeForm = Expression | ShapeInsertion


def _list(text: Expression, scope: Scope) -> tuple[Any, ...]:
    value = text(scope)
    if not isinstance(value, tuple):
        raise text.error(f"{value!r} is not a list")
    return value


def _place(text: Expression, scope: Scope, size: int) -> int:
    """Where to insert among `size` entries; negative places count from behind the last one."""
    at = text(scope)
    if type(at) is not int or not -size - 1 <= at <= size:
        raise text.error(f"{at!r} is not a place among {size} entries")
    return at if at >= 0 else at + size + 1
