"""Metakernel templates as read from YAML: checked for their form, with the place of every text.

A file is a list of entries. An entry says for which kernels and operands it stands, and how the
output types, the index space, the projections and the laws follow:

    - kernels: [dot_general]
      reason: why the entry is as it is
      params: {preferred_element_type: none}      defaults of parameters that may be absent
      inputs: {lhs: "[$m, $k]", rhs: "[$k, $n]"}  operands in order, with shape patterns or nothing
      when: len($m) > 0                           a guard; without it the patterns alone decide
      let: {name: expression}                     names, evaluated when they are first used
      out: {shape: "[$m, $n]", dtype: $lhs.dtype} the output (or `outputs:`, a mapping of such)
      index: {m: $m, n: $n, k: $k}                index groups: an extent, or a list of extents
      roles: {k: reduce(sum)}                     map (the default), whole, reduce(·), scan(·)
      project: {lhs: "[@m, @k]"}                  rows per operand and output
      passages: [sum(lhs) -> sum]                 laws of partial values
      initial: [operand]                          operands that start the reduction
      outside: {operand: sum}                     what its boxes find outside it: see below
      flops: 2                                    per index point, or a polynomial in `@groups`
      reads: {operand: "@m"}                      elements read, where not the footprint
      fusion: kernel                              view | loop | reduce | kernel
      local: {shape: $out.shape}                  parameters that differ when run on local boxes

A name that ends in `...` (`xs...`) stands for any number of operands or outputs; expressions about
it are evaluated once for each, with `$each` the tensor and `$k` its place among them. Without
`index:` the index space is that of the first output's elements, as group `@i`; an operand or output
that `project:` does not mention is then aligned with it under broadcasting. The boxes of an operand
lie inside it, unless `outside:` says what they find elsewhere: the zero of a monoid (`sum`, `max`,
`min`, ...), or the element of a scalar operand (its name). In `local:` the names
of operands and outputs stand for the local boxes and everything else keeps its value. Parameters
are names too; `$params` holds them all, also where another name hides one, and `$kernel` is the
kernel's name. The language itself is described in `template.lark`.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from ..errors import TemplateError
from .language import Expression, Origin, PassageText, Pattern
from .signature import Fusion


@dataclass(frozen=True, slots=True)
class Operand:
    """A declared operand: its name, whether it stands for any number of tensors, its pattern."""

    name: str
    many: bool
    pattern: Pattern | None


@dataclass(frozen=True, slots=True)
class Output:
    """A declared output; `count` is given when it stands for a number of tensors."""

    name: str
    count: Expression | None
    shape: Expression
    dtype: Expression


@dataclass(frozen=True, eq=False)
class Template:
    """One entry of a template file. The module's docstring explains the fields."""

    kernels: tuple[str, ...]
    origin: Origin
    reason: str
    defaults: Mapping[str, Expression]
    inputs: tuple[Operand, ...]
    outputs: tuple[Output, ...]
    when: Expression | None = None
    let: Mapping[str, Expression] = field(default_factory=dict)
    index: Mapping[str, Expression] | None = None
    roles: Mapping[str, Expression] = field(default_factory=dict)
    project: Mapping[str, Expression] = field(default_factory=dict)
    passages: tuple[PassageText, ...] = ()
    initial: tuple[str, ...] = ()
    outside: Mapping[str, Expression] = field(default_factory=dict)
    flops: Expression | None = None
    reads: Mapping[str, Expression] = field(default_factory=dict)
    fusion: Fusion = "kernel"
    local: Mapping[str, Expression] = field(default_factory=dict)

    def error(self, what: str, hint: str = "") -> TemplateError:
        """An error about this entry as a whole."""
        where = f"{self.origin.file}:{self.origin.line}:{self.origin.column}"
        return TemplateError(what, where=where, hint=hint)

    def texts(self) -> tuple[Expression, ...]:
        """Every expression of the entry."""
        out = [*self.defaults.values(), *self.let.values(), *(self.index or {}).values()]
        for table in (self.roles, self.project, self.outside, self.reads, self.local):
            out.extend(table.values())
        for output in self.outputs:
            out.extend(e for e in (output.count, output.shape, output.dtype) if e is not None)
        out.extend(e for e in (self.when, self.flops) if e is not None)
        return tuple(out)

    def check(self) -> None:
        """Parse every text of the entry. Raises TemplateError with the place of the first fault."""
        for text in self.texts():
            text.check()
        for operand in self.inputs:
            if operand.pattern is not None:
                operand.pattern.axes()
        for passage in self.passages:
            passage.law()


def read_templates(path: Path) -> tuple[Template, ...]:
    """The entries of a template file. The texts in them are parsed only when they are first used.

    Raises TemplateError with `file:line:column` for a malformed file.
    """
    try:
        text = path.read_text("utf-8")
    except OSError as e:
        raise TemplateError(f"cannot be read: {e.strerror}", where=str(path)) from e
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        root = yaml.compose(text, Loader=loader)
    except yaml.MarkedYAMLError as e:
        mark = e.problem_mark or e.context_mark
        at = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise TemplateError(
            f"not YAML: {e.problem or e.context}",
            where=f"{path.name}{at}",
            hint="Texts that start with `[`, `{`, `@` or contain `: ` must be quoted.",
        ) from None
    if root is None:
        return ()
    file = _File(path.name)
    return tuple(_template(file, node) for node in file.sequence(root, "a list of entries"))


@dataclass(frozen=True, slots=True)
class _File:
    """Reads YAML nodes into texts that know where they stand."""

    name: str

    def origin(self, node: Any) -> Origin:
        start, end = node.start_mark, node.end_mark
        style = getattr(node, "style", None)
        if style == "|":
            # The indentation of block scalars is not in the node; two spaces is ours.
            return Origin(self.name, start.line + 2, 1)
        quoted = int(style in ('"', "'"))
        folded = start.line != end.line and end.column > 0
        return Origin(self.name, start.line + 1, start.column + 1 + quoted, folded)

    def error(self, node: Any, what: str, hint: str = "") -> TemplateError:
        origin = self.origin(node)
        return TemplateError(what, where=f"{self.name}:{origin.line}:{origin.column}", hint=hint)

    def sequence(self, node: Any, what: str) -> list[Any]:
        if not isinstance(node, yaml.SequenceNode):
            raise self.error(node, f"expected {what}")
        return list(node.value)

    def mapping(self, node: Any, what: str) -> dict[str, Any]:
        if not isinstance(node, yaml.MappingNode):
            raise self.error(node, f"expected {what}, a mapping")
        out: dict[str, Any] = {}
        for key, value in node.value:
            name = self.text(key, "a name")
            if name in out:
                raise self.error(key, f"{name!r} is given twice")
            out[name] = value
        return out

    def text(self, node: Any, what: str) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self.error(node, f"expected {what}", "Quote a text that starts with `[` or `{`.")
        return str(node.value)

    def expression(self, node: Any) -> Expression:
        return Expression(self.text(node, "an expression"), self.origin(node))

    def expressions(self, node: Any, what: str) -> dict[str, Expression]:
        return {k: self.expression(v) for k, v in self.mapping(node, what).items()}

    def words(self, node: Any, what: str) -> tuple[str, ...]:
        return tuple(self.text(n, "a name") for n in self.sequence(node, what))


_FIELDS = (
    "kernels reason params inputs when let out outputs index roles project passages initial "
    "outside flops reads fusion local"
).split()


def _template(file: _File, node: Any) -> Template:
    entry = file.mapping(node, "an entry")
    for name, value in entry.items():
        if name not in _FIELDS:
            near = difflib.get_close_matches(name, _FIELDS, 1)
            hint = f"Did you mean {near[0]!r}?" if near else f"Fields: {', '.join(_FIELDS)}."
            raise file.error(value, f"unknown field {name!r}", hint)
    for name in ("kernels", "inputs"):
        if name not in entry:
            raise file.error(node, f"the entry has no {name!r}")
    if ("out" in entry) == ("outputs" in entry):
        raise file.error(node, "the entry needs either `out` or `outputs`")

    fusion = file.text(entry["fusion"], "a word") if "fusion" in entry else "kernel"
    if fusion not in get_args(Fusion):
        hint = f"One of {', '.join(get_args(Fusion))}."
        raise file.error(entry["fusion"], f"unknown fusion {fusion!r}", hint)

    def table(name: str) -> dict[str, Expression]:
        return file.expressions(entry[name], f"`{name}`") if name in entry else {}

    def one(name: str) -> Expression | None:
        return file.expression(entry[name]) if name in entry else None

    outputs = {"out": entry["out"]} if "out" in entry else file.mapping(entry["outputs"], "outputs")
    template = Template(
        kernels=file.words(entry["kernels"], "a list of kernel names"),
        origin=file.origin(node),
        reason=file.text(entry["reason"], "a text") if "reason" in entry else "",
        defaults=table("params"),
        inputs=_operands(file, entry["inputs"]),
        outputs=tuple(_output(file, name, value) for name, value in outputs.items()),
        when=one("when"),
        let=table("let"),
        index=table("index") if "index" in entry else None,
        roles=table("roles"),
        project=table("project"),
        passages=_passages(file, entry["passages"]) if "passages" in entry else (),
        initial=file.words(entry["initial"], "a list of operands") if "initial" in entry else (),
        outside=table("outside"),
        flops=one("flops"),
        reads=table("reads"),
        fusion=cast(Fusion, fusion),
        local=table("local"),
    )
    _check_names(file, entry, template)
    return template


def _operands(file: _File, node: Any) -> tuple[Operand, ...]:
    out: list[Operand] = []
    for name, value in file.mapping(node, "`inputs`").items():
        many = name.endswith("...")
        empty = getattr(value, "tag", "") == "tag:yaml.org,2002:null"
        pattern = None if empty else Pattern(file.text(value, "a pattern"), file.origin(value))
        if many and any(o.many for o in out):
            raise file.error(value, "only one operand can stand for several")
        out.append(Operand(name.removesuffix("..."), many, pattern))
    return tuple(out)


def _output(file: _File, name: str, node: Any) -> Output:
    given = file.expressions(node, "an output")
    if not {"shape", "dtype"} <= set(given) <= {"shape", "dtype", "count"}:
        raise file.error(node, "an output has a `shape`, a `dtype` and, if `name...`, a `count`")
    if name.endswith("...") != ("count" in given):
        raise file.error(node, "an output has a `count` just when its name ends in `...`")
    return Output(name.removesuffix("..."), given.get("count"), given["shape"], given["dtype"])


def _passages(file: _File, node: Any) -> tuple[PassageText, ...]:
    return tuple(
        PassageText(file.text(n, "a passage"), file.origin(n))
        for n in file.sequence(node, "a list of passages")
    )


def _check_names(file: _File, entry: Mapping[str, Any], template: Template) -> None:
    operands = [o.name for o in template.inputs]
    ports = operands + [o.name for o in template.outputs]
    groups = ["i"] if template.index is None else list(template.index)
    for name, table, known in (
        ("project", template.project, ports),
        ("reads", template.reads, operands),
        ("outside", template.outside, operands),
        ("roles", template.roles, groups),
        ("initial", template.initial, operands),
    ):
        for key in table:
            if key not in known:
                near = difflib.get_close_matches(key, known, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are {', '.join(known)}."
                raise file.error(entry[name], f"{key!r} in `{name}` is not declared", hint)
    if len(set(ports)) < len(ports):
        raise file.error(entry["inputs"], "two operands or outputs have the same name")
    if template.index is not None:
        for port in ports:
            if port not in template.project:
                raise file.error(entry["index"], f"`project` says nothing of {port!r}")
