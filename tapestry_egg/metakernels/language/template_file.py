"""Template files: YAML to templates, checked for their form, with the place of every text.

A file maps kernels to entries, or is a list of entries that name theirs. docs/template-language.md
says what every field means; a test holds its tables against `Template`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels.signatures.signature import Fusion, InProducts, Meaning
from tapestry_egg.yaml_nodes import YamlNode, compose_yaml, suggestion

from .expressions import Expression, Origin, PassageText, expressions
from .patterns import Pattern
from .template import (
    Constraint,
    Insertion,
    ListText,
    Matrix,
    Operand,
    Output,
    Parts,
    ProjectionForm,
    Reduction,
    RowsText,
    ShapeForm,
    ShapeInsertion,
    Template,
)


def read_templates(path: Path) -> tuple[Template, ...]:
    """The entries of a template file. The texts in them are parsed only when they are first used.

    Raises TemplateError with `file:line:column` for a malformed file.
    """
    root = compose_yaml(path, TemplateError)
    if root is None:
        return ()
    if root.is_mapping:
        keyed = root.entries("kernels").items()
        return tuple(_template(node, path, Origin.of(key), name) for name, (key, node) in keyed)
    entries = root.items("a list of entries, or kernels")
    return tuple(_template(node, path, Origin.of(node)) for node in entries)


def _word(node: YamlNode, known: Sequence[str]) -> str:
    if (found := node.text()) not in known:
        raise node.error(f"unknown {node.name} {found!r}", f"One of {', '.join(known)}.")
    return found


#: How a field of a template is read, by its type; those of other types are read together.
_READERS: Mapping[str, Callable[[YamlNode], Any]] = {
    "str": YamlNode.text,
    "bool": YamlNode.flag,
    "tuple[str, ...]": YamlNode.texts,
    "Expression | None": Expression.of,
    "Mapping[str, Expression]": expressions,
    "Mapping[str, str]": lambda node: _writes(node),
    "Mapping[str, tuple[str, ...]]": lambda node: _spelled(node),
    "Mapping[str, Reduction]": lambda node: _reductions(node),
    "tuple[Constraint, ...]": lambda node: _constraints(node),
    "tuple[PassageText, ...]": lambda node: tuple(
        map(PassageText.of, node.items("a list of passages"))
    ),
    "Fusion": lambda node: _word(node, get_args(Fusion)),
    "InProducts": lambda node: _word(node, get_args(InProducts)),
    "Meaning": lambda node: _word(node, get_args(Meaning)[1:]),
}
#: Of an entry itself, not written in a file; and what a file has instead.
_OWN = ("origin", "path", "defaults", "required")
_FIELDS = (*(f.name for f in fields(Template) if f.name not in _OWN), "params", "out")


def _template(node: YamlNode, path: Path, origin: Origin, name: str = "") -> Template:
    entry = node.fields("an entry", ("inputs",) if name else ("kernels", "inputs"), _FIELDS)
    if ("out" in entry) == ("outputs" in entry):
        raise node.error("the entry needs either `out` or `outputs`")
    params = entry["params"].mapping() if "params" in entry else {}
    index = _index(entry["index"]) if "index" in entry else None
    project: dict[str, ProjectionForm] = {}
    if "project" in entry:
        for port, value in entry["project"].mapping().items():
            project[port] = _projection(value, positional=False)
    inputs = _operands(entry["inputs"], project)
    results = {"out": entry["out"]} if "out" in entry else entry["outputs"].mapping()
    outputs = tuple(_output(n, v, project, index is not None) for n, v in results.items())
    given: dict[str, Any] = {
        "kernels": (name,),
        **{
            f.name: _READERS[str(f.type)](entry[f.name])
            for f in fields(Template)
            if f.name in entry and str(f.type) in _READERS
        },
    }
    template = Template(
        origin=origin,
        path=path,
        defaults={k: Expression.of(v) for k, v in params.items() if not v.is_null},
        required=tuple(k for k, v in params.items() if v.is_null),
        inputs=inputs,
        outputs=outputs,
        index=index,
        project=project,
        **given,
    )
    _check_parts(entry, template)
    _check_names(entry, template)
    return template


def _check_parts(entry: Mapping[str, YamlNode], template: Template) -> None:
    scratch, blocks, scattered = (
        set(x) for x in (template.scratch, template.blocks, template.scattered)
    )
    by_row, along = {"blocks", "scores", "row", "beside"}, {"blocks", "scores", "along", "beside"}
    if scratch and scratch - {"fused"} not in (by_row, along, {"beside"}):
        raise entry["scratch"].error(
            "`scratch`: beside, or blocks, scores, row or along too, or fused"
        )
    if blocks and blocks != {"products", "moved", "again", "kernels"}:
        raise entry["blocks"].error("`blocks` has the parts products, moved, again, kernels")
    if blocks and "along" not in scratch:
        raise entry["blocks"].error("`blocks` need a `scratch` with scores `along` some dims")
    parts = "of elements run within times"
    if scattered and scattered - {"unit"} != set(parts.split()):
        raise entry["scattered"].error(f"`scattered` has the parts {parts}, and perhaps unit")


def _writes(node: YamlNode) -> dict[str, str]:
    parts = ("into", "part", "at")
    given = node.fields("`writes`", parts)
    if tuple(given) != parts:
        raise node.error("`writes` has the parts into, part and at, in this order")
    return {name: value.text("an operand") for name, value in given.items()}


def _spelled(node: YamlNode) -> dict[str, tuple[str, ...]]:
    found = {kernel: value.texts() for kernel, value in node.mapping().items()}
    if any(len(said) != 2 for said in found.values()):
        raise node.error("`spelled` has a primitive and a parameter of it for each kernel")
    return found


def _operands(node: YamlNode, project: dict[str, ProjectionForm]) -> tuple[Operand, ...]:
    out: list[Operand] = []
    for written, value in node.mapping().items():
        name = written.removesuffix("...").removesuffix("?")
        many, optional = written.endswith("..."), written.endswith("?")
        if (many or optional) and any(o.many or o.optional for o in out):
            raise value.error("only one operand can stand for several, or be missing")
        pattern: Any = None if value.is_null else value
        dtype = None
        if value.is_mapping:
            given = value.fields("an operand", (), ("shape", "dtype", "ipf"))
            pattern = given.get("shape")
            dtype = Expression.of(given["dtype"]) if "dtype" in given else None
            if "ipf" in given:
                _put(project, name, given["ipf"])
        shape = None
        if pattern is not None:
            shape = Pattern.of(pattern)
        out.append(Operand(name, many, optional, shape, dtype))
    return tuple(out)


def _output(
    written: str,
    node: YamlNode,
    project: dict[str, ProjectionForm],
    indexed: bool,
) -> Output:
    given = node.fields("an output", (), ("shape", "dtype", "ipf", "count"))
    name = written.removesuffix("...")
    if "dtype" not in given or ("shape" not in given and not indexed):
        hint = "Without `index:` the index space follows from the shape of the first output."
        raise node.error("an output has a `dtype` and, without `index:`, a `shape`", hint)
    if written.endswith("...") != ("count" in given):
        raise node.error("an output has a `count` just when its name ends in `...`")
    if "ipf" in given:
        _put(project, name, given["ipf"])
    elif indexed and name not in project:
        project[name] = RowsText(Expression("[...] :> [...]", Origin.of(node)))
    shape: ShapeForm = Expression("[$.index...]", Origin.of(node))
    if "shape" in given:
        shape = _shape(given["shape"])
    count = Expression.of(given["count"]) if "count" in given else None
    return Output(name, count, shape, Expression.of(given["dtype"]))


def _put(project: dict[str, ProjectionForm], name: str, node: YamlNode) -> None:
    if name in project:
        raise node.error(f"{name!r} has an `ipf`, and is in `project` too")
    project[name] = _projection(node, positional=True)


def _projection(node: YamlNode, *, positional: bool, inside: bool = False) -> ProjectionForm:
    if not node.is_mapping:
        return RowsText(Expression.of(node), positional)
    given = node.mapping("a projection")
    if "transform" in given and not inside:
        return _insertion(node, given)
    if "affineMap" in given:
        whole = node.fields("a projection", ("affineMap", "shape"))
        affine = whole["affineMap"].fields("`affineMap`", ("projection", "offset"))
        rows = affine["projection"].items("a list of rows")
        return Matrix(
            tuple(map(_list_text, rows)),
            _list_text(affine["offset"]),
            _list_text(whole["shape"]),
        )
    given = node.fields("a projection", ("map",), ("offset", "shape"))
    parts = {name: Expression.of(value) for name, value in given.items()}
    return Parts(parts["map"], parts.get("offset"), parts.get("shape"))


def _insertion(node: YamlNode, given: Mapping[str, YamlNode]) -> Insertion:
    what = given["transform"].text("a transform")
    patch = {"insert": "patch", "insertRow": "row"}.get(what)
    if patch is None:
        known = ("insert", "insertRow")
        raise given["transform"].error(f"unknown transform {what!r}", suggestion(what, known))
    node.fields("a transform", ("transform", "index", "source", patch))
    source = _projection(given["source"], positional=True, inside=True)
    index, change = Expression.of(given["index"]), Expression.of(given[patch])
    return Insertion(index, source, change, single=what == "insertRow")


def _shape(node: YamlNode) -> ShapeForm:
    if not node.is_mapping:
        return Expression.of(node)
    parts = ("transform", "index", "source", "patch")
    given = node.fields("a shape", parts)
    if (what := given["transform"].text("a transform")) != "insert":
        raise given["transform"].error(f"{what!r} does not make a shape; write `insert`")
    return ShapeInsertion(*(Expression.of(given[name]) for name in parts[1:]))


_PLAIN = re.compile(r"\$[A-Za-z_][A-Za-z0-9_]*(\.\.\.)?")


def _index(node: YamlNode) -> dict[str, Expression]:
    """Groups of index dims: as given, one per entry of a list of names, or all as group `i`."""
    if node.is_mapping:
        return expressions(node)
    whole = Expression.of(node)
    text = whole.text.strip()
    groups: dict[str, Expression] = {}
    at = whole.text.find("[") + 1
    for part in text[1:-1].split(",") if text[:1] + text[-1:] == "[]" else ():
        name = part.strip()
        origin = whole.origin
        if _PLAIN.fullmatch(name) and not origin.folded and "\n" not in text:
            lead = at + len(part) - len(part.lstrip())
            origin = origin.inside(whole.text, lead)
            variable = name.removesuffix("...")
            if variable[1:] not in groups:
                groups[variable[1:]] = Expression(variable, origin)
                at += len(part) + 1
                continue
        return {"i": whole}
    return groups or {"i": whole}


def _reductions(node: YamlNode) -> dict[str, Reduction]:
    out: dict[str, Reduction] = {}
    for name, value in node.mapping().items():
        if not value.is_mapping:
            out[name] = Reduction(Expression.of(value))
            continue
        given = value.fields("a reduction", ("monoid",), ("over",))
        over = expressions(given["over"]) if "over" in given else None
        out[name] = Reduction(Expression.of(given["monoid"]), over)
    return out


def _constraints(node: YamlNode) -> tuple[Constraint, ...]:
    out = []
    for name, value in node.mapping().items():
        given = value.fields(f"the constraint of {name!r}", ("enum",))
        allowed = given["enum"].texts()
        out.append(Constraint(f"${name.removeprefix('$')}", allowed, Origin.of(value)))
    return tuple(out)


def _check_names(entry: Mapping[str, YamlNode], template: Template) -> None:
    operands = [o.name for o in template.inputs]
    ports = operands + [o.name for o in template.outputs]
    groups = ["i"] if template.index is None else list(template.index)
    known: Sequence[tuple[str, Any, Sequence[str]]] = (
        ("project", template.project, ports),
        ("reads", template.reads, operands),
        ("outside", template.outside, operands),
        ("roles", template.roles, groups),
        ("placed", template.placed, groups),
        ("skips", template.skips, operands),
        ("initial", template.initial, operands),
        ("straight", template.straight, operands),
        ("moves", template.moves, operands),
        ("takes", template.takes, operands),
        ("repeats", template.repeats, operands),
        ("stored", template.stored, operands),
        ("writes", template.writes.values(), operands),
        ("read_at", template.read_at, operands),
        ("spelled", template.spelled, template.kernels),
        ("joins", template.joins, operands),
        ("carries", template.carries, operands),
    )
    for field, table, names in known:
        for key in table:
            if key not in names:
                what = f"{key!r} in `{field}` is not declared"
                raise entry[field].error(what, suggestion(key, names))
    fixed = [o.name for o in template.inputs if not (o.many or o.optional)]
    for field, table in (("joins", template.joins), ("carries", template.carries)):
        for key in fixed:
            if key in table:
                hint = f"Where operands may be fewer, they are a list: `{key}...`."
                what = f"{key!r} in `{field}` is one operand, which is never left out"
                raise entry[field].error(what, hint)
    if template.commutes and (len(operands) != 2 or template.inputs[0].many):
        raise entry["commutes"].error("only a kernel of two operands commutes")
    if len(set(ports)) < len(ports):
        raise entry["inputs"].error("two operands or outputs have the same name")
    if template.index is not None:
        for port in ports:
            if port not in template.project:
                hint = "Give it an `ipf:`, or a place in `project:`."
                raise entry["index"].error(f"nothing is said of how {port!r} is read", hint)
    _check_reductions(entry, template, groups)


def _check_reductions(
    entry: Mapping[str, YamlNode], template: Template, groups: Sequence[str]
) -> None:
    operands = [o.name for o in template.inputs]
    bound = [n for o in template.inputs if o.pattern and template.reduce for n in o.pattern.names()]
    for name, reduction in template.reduce.items():
        if name in groups:
            raise entry["reduce"].error(f"{name!r} is an index group already")
        for operand in reduction.over or ():
            if operand not in operands:
                what = f"{operand!r} in `over` is no operand"
                raise entry["reduce"].error(what, suggestion(operand, operands))
        if reduction.over is None and f"${name}" not in bound:
            hint = suggestion(f"${name}", list(dict.fromkeys(bound)))
            what = f"no input has a dim ${name} to reduce"
            raise reduction.monoid.error(what, f"{hint} Or say `over: {{operand: dim}}`.")


def _list_text(node: YamlNode) -> ListText:
    """A list of expressions, or one expression that gives it."""
    if not node.is_list:
        whole = Expression.of(node)
        return ListText((whole,), whole, whole=True)
    entries = tuple(map(Expression.of, node.items("a list")))
    return ListText(entries, Expression("", Origin.of(node)))
