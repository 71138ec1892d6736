"""Metakernel templates: what stands for which kernels and operands, as read from a file.

`template_file.py` says how one is written.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels.signatures.signature import Fusion, InProducts, Meaning

from .expressions import Expression, Origin, PassageText
from .patterns import Pattern
from .projections import ProjectionForm, ShapeForm

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
    reason: str
    defaults: Mapping[str, Expression]
    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]
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
    parts: Expression | None = None
    dilates: Expression | None = None
    adds: Expression | None = None
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
        yield from (*self.defaults.values(), *self.let.values(), *(self.index or {}).values())
        tables = [self.roles, self.outside, self.placed, self.skips, self.reads, self.scratch]
        tables += [self.blocks, self.scattered, self.carries, self.local]
        for table in (*tables, self.loses, self.promises, self.samples):
            yield from table.values()
        for form in self.project.values():
            yield from form.texts()
        for reduction in self.reduce.values():
            yield from (reduction.monoid, *(reduction.over or {}).values())
        for output in self.outputs:
            yield from output.shape.texts()
            yield from (e for e in (output.count, output.dtype) if e is not None)
        yield from (operand.dtype for operand in self.inputs if operand.dtype is not None)
        single = [self.when, self.elements, self.flops, self.measured, self.spilled]
        single += [
            self.parts,
            self.dilates,
            self.adds,
            self.settled,
            self.same_as,
            self.steps,
            self.precision,
        ]
        yield from (e for e in single if e is not None)

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
