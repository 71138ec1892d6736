"""Metakernel templates: what stands for which kernels and operands, as read from a file.

`template_file.py` says how one is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels.signatures.signature import Fusion, InProducts, Meaning
from tapestry_egg.metakernels.signatures.values import Row

from .expressions import Expression, Origin, PassageText
from .faults import Fault
from .patterns import Pattern
from .positional import AugmentedRow, Diagonal, augmented_row, diagonal_rows, patch_rows, rows_of
from .scopes import Scope

# How a template writes a projection or a shape: as a text, part by part, as an edit, or in full.
#
#     "[..., 1, 0] :> [..., 1, $n]"                         a text; also a list of rows
#     {map: "[..., 1, 0]", offset: "[...]", shape: "[..., 1, $n]"}
#     {transform: insert, index: $axis, source: "[1...]", patch: "[0] :> [$n]"}
#     {transform: insertRow, index: $axis, source: "[1...]", row: "[0... | 0 | $n]"}
#     {affineMap: {projection: [[1, 0], [0, 0]], offset: [0, 0]}, shape: [1, $n]}
#
# A shape is a text, or an insertion: `{transform: insert, index: .., source: .., patch: "[$n]"}`.


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


# `$name`s of an expression, those that are there for every operation, and what makes or skips some.
_NAME = re.compile(r"\$(\w+)")
_OWN = ("params", "kernel", "index")
_CONDITIONAL = re.compile(r"\b(if|for|and|or|get)\b")


@dataclass(frozen=True, slots=True)
class Operand:
    """A declared operand: its name, how many tensors it stands for, and what they must be.

    `many` is any number of tensors, `optional` is one or none. `dtype` is `$name`, which binds the
    name, or gives the dtype, or a list of those allowed.
    """

    name: str
    many: bool = False
    optional: bool = False
    pattern: Pattern | None = None
    dtype: Expression | None = None


@dataclass(frozen=True, slots=True)
class Output:
    """A declared output; `count` is given when it stands for a number of tensors."""

    name: str
    count: Expression | None
    shape: ShapeForm
    dtype: Expression


@dataclass(frozen=True, slots=True)
class Reduction:
    """A dim of the inputs that becomes a reduced index dim.

    `over` maps operands to their dims (an expression each); None means the dims that the patterns
    call by the reduction's name.
    """

    monoid: Expression
    over: Mapping[str, Expression] | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """The values that a name may have, as words."""

    name: str
    allowed: tuple[str, ...]
    origin: Origin


@dataclass(frozen=True, eq=False)
class Template:
    """One entry of a template file. The docstring of `template_file.py` explains the fields.

    `index` maps groups of index dims to their extents, None standing for the elements of the first
    output; the dims of `reduce` come after them. `required` are parameters without a default.
    """

    kernels: tuple[str, ...]
    origin: Origin
    path: Path
    defaults: Mapping[str, Expression]
    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    reason: str = ""
    required: tuple[str, ...] = ()
    constraints: tuple[Constraint, ...] = ()
    when: Expression | None = None
    let: Mapping[str, Expression] = field(default_factory=dict)
    index: Mapping[str, Expression] | None = None
    roles: Mapping[str, Expression] = field(default_factory=dict)
    reduce: Mapping[str, Reduction] = field(default_factory=dict)
    project: Mapping[str, ProjectionForm] = field(default_factory=dict)
    passages: tuple[PassageText, ...] = ()
    initial: tuple[str, ...] = ()
    straight: tuple[str, ...] = ()
    moves: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    repeats: tuple[str, ...] = ()
    stored: tuple[str, ...] = ()
    writes: Mapping[str, str] = field(default_factory=dict)
    read_at: tuple[str, ...] = ()
    spelled: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    parts: Expression | None = None
    dilates: Expression | None = None
    adds: Expression | None = None
    rounds_as_one: Expression | None = None
    joins: tuple[str, ...] = ()
    carries: Mapping[str, Expression] = field(default_factory=dict)
    settled: Expression | None = None
    same_as: Expression | None = None
    outside: Mapping[str, Expression] = field(default_factory=dict)
    placed: Mapping[str, Expression] = field(default_factory=dict)
    skips: Mapping[str, Expression] = field(default_factory=dict)
    flops: Expression | None = None
    reads: Mapping[str, Expression] = field(default_factory=dict)
    measured: Expression | None = None
    spilled: Expression | None = None
    steps: Expression | None = None
    scattered: Mapping[str, Expression] = field(default_factory=dict)
    precision: Expression | None = None
    loses: Mapping[str, Expression] = field(default_factory=dict)
    promises: Mapping[str, Expression] = field(default_factory=dict)
    valid: Expression | None = None
    samples: Mapping[str, Expression] = field(default_factory=dict)
    scratch: Mapping[str, Expression] = field(default_factory=dict)
    blocks: Mapping[str, Expression] = field(default_factory=dict)
    fusion: Fusion = "kernel"
    in_products: InProducts = "never"
    elements: Expression | None = None
    commutes: bool = False
    means: Meaning = ""
    local: Mapping[str, Expression] = field(default_factory=dict)

    def error(self, what: str, hint: str = "") -> TemplateError:
        """An error about this entry as a whole."""
        return TemplateError(what, where=str(self.origin), hint=hint)

    def texts(self) -> Iterator[Expression]:
        """Every expression of the entry."""
        for f in fields(self):
            value, kind = getattr(self, f.name), str(f.type)
            if kind.startswith("Mapping[str, Expression]"):
                yield from (value or {}).values()
            elif kind == "Expression | None" and value is not None:
                yield value
        for form in self.project.values():
            yield from form.texts()
        for reduction in self.reduce.values():
            yield from (reduction.monoid, *(reduction.over or {}).values())
        for output in self.outputs:
            yield from output.shape.texts()
            yield from (e for e in (output.count, output.dtype) if e is not None)
        yield from (operand.dtype for operand in self.inputs if operand.dtype is not None)

    @cached_property
    def closeness(self) -> frozenset[str]:
        """The parameters that say how precise results are, and nothing of their types."""
        said = " ".join(text.text for text in self.loses.values())
        typed = " ".join(o.dtype.text for o in self.outputs)
        return frozenset(n for n in self.defaults if f"${n}" in said and f"${n}" not in typed)

    def unset(self, given: Collection[str]) -> tuple[str, ...]:
        """Parameters without a value that every operation must have, where those of the names
        `given` have one: what is required, and what shapes and dtypes of results are computed
        from. Empty where that cannot be told from the texts."""
        known = {*given, *self.defaults, *_OWN}
        known |= {o.name for o in self.inputs} | {o.name for o in self.outputs}
        known |= {"k" for o in self.outputs if o.count is not None}  # which of them
        found = dict.fromkeys(name for name in self.required if name not in known)
        todo = [e.text for o in self.outputs for e in (*o.shape.texts(), o.dtype)]
        seen: set[str] = set()
        while todo:
            text = todo.pop()
            if not _CONDITIONAL.search(text):
                names = dict.fromkeys(_NAME.findall(text))
                for name in names:
                    if name in self.let and name not in seen:
                        todo.append(self.let[name].text)
                    elif name not in self.let and name not in known:
                        found[name] = None
                seen |= names.keys()
        if found:  # patterns bind names, too
            patterns = [o.pattern for o in self.inputs if o.pattern is not None]
            bound = {n.lstrip("$@") for p in patterns for n in p.names()}
            bound |= {o.dtype.text.strip("$ ") for o in self.inputs if o.dtype is not None}
            found = {name: None for name in found if name not in bound}
        return tuple(found)

    def check(self) -> None:
        """Parse every text of the entry. Raises TemplateError with the place of the first fault."""
        for text in self.texts():
            text.check()
        for operand in self.inputs:
            if operand.pattern is not None:
                operand.pattern.axes()
        for passage in self.passages:
            passage.law()
