"""Operands and parameters of one operation matched against a template: what its names stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.patterns import Span, bind
from tapestry_egg.metakernels.language.scopes import Inner, Names, Scope
from tapestry_egg.metakernels.language.template import (
    Operand,
    Template,
)
from tapestry_egg.metakernels.signatures.parameters import readable
from tapestry_egg.metakernels.signatures.values import is_extent

Spans = dict[int, tuple[Span, ...]]  # operand -> where the names of its pattern stand


def bind_names(
    template: Template, kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> tuple[Names, Spans]:
    """The names of one operation, and where those of the patterns stand.

    Raises Mismatch where the operation is not one of the template's, TemplateError for a fault of
    the template.
    """
    fixed = sum(not (o.many or o.optional) for o in template.inputs)
    most = fixed + sum(o.optional for o in template.inputs)
    if len(inputs) < fixed or (len(inputs) > most and not any(o.many for o in template.inputs)):
        declared = ", ".join(map(written, template.inputs)) or "none"
        raise Mismatch(f"operands given: {len(inputs)}, declared: {declared}")
    names = Names({f"${name}": value for name, value in template.let.items()})
    given = {k: default(names) for k, default in template.defaults.items() if k not in params}
    given.update((k, readable(v)) for k, v in params.items())
    missing = [name for name in template.required if name not in given]
    if missing:
        raise Mismatch(f"the parameter {missing[0]!r} is missing")
    names.update((f"${k}", v) for k, v in given.items() if k not in template.let)
    names.update({"$params": given, "$kernel": kernel})
    names.update(ports(template, inputs, ()))
    names.let = {**names.let, "$.index": lambda scope: _declared_index(template, scope)}
    if "$index" not in names:
        names.let.setdefault("$index", lambda scope: scope["$.index"])
    bound: dict[str, Any] = {}
    spans: Spans = {}
    scope = Inner(names, bound)
    for operand in template.inputs:
        own = places(template, operand.name, len(inputs))
        if operand.pattern is not None:
            scope.update(bound)
            shapes = [inputs[p].shape for p in own]
            try:
                found = bind([(operand.pattern, shapes)], bound, scope)[0]
            except Mismatch as e:
                raise Mismatch(f"{operand.name}: {e}") from None
            spans.update(zip(own, found, strict=True))
        _bind_dtype(operand, [inputs[p].dtype for p in own], given, bound)
    names.update(bound)
    names.update(ports(template, inputs, ()))
    _constrain(template, names, inputs)
    return names, spans


def written(operand: Operand) -> str:
    """The operand's name as a template file writes it."""
    return f"{operand.name}{'...' if operand.many else '?' if operand.optional else ''}"


def _name_of(text: Expression | None) -> str:
    """The name that a dtype `$name` binds; "" for any other text."""
    name = text.text.strip() if text is not None else ""
    return name if name[:1] == "$" and name[1:].isidentifier() else ""


def _bind_dtype(
    operand: Operand, dtypes: Sequence[str], given: Mapping[str, Any], bound: dict[str, Any]
) -> None:
    name = _name_of(operand.dtype)
    for dtype in dtypes if name else ():
        want = given.get(name[1:], dtype)
        if bound.setdefault(name, want) != dtype:
            raise Mismatch(f"{operand.name}: the dtype is {dtype}, and {name} is {bound[name]}")


def _constrain(template: Template, names: Names, inputs: Sequence[TensorType]) -> None:
    """What can be checked only when all names are known: dtypes given in words, constraints."""
    for operand in template.inputs:
        if operand.dtype is None or _name_of(operand.dtype):
            continue
        want = operand.dtype(names)
        for p in places(template, operand.name, len(inputs)):
            if inputs[p].dtype not in (want if isinstance(want, tuple) else (want,)):
                raise Mismatch(f"{operand.name}: the dtype is {inputs[p].dtype}, not {want}")
    for constraint in template.constraints:
        try:
            value = names[constraint.name]
        except KeyError:
            raise TemplateError(
                f"{constraint.name} is not a name here",
                where=str(constraint.origin),
                hint="Constraints are on names of patterns, dtypes and parameters.",
            ) from None
        if str(value) not in constraint.allowed:
            raise Mismatch(f"{constraint.name} is {value}, not {' or '.join(constraint.allowed)}")


def _declared_index(template: Template, scope: Scope) -> tuple[Any, ...]:
    """`$.index`: the extents of the declared index dims."""
    if template.index is None:
        return tuple(scope[f"${template.outputs[0].name}"].shape)
    out: list[Any] = []
    for group in template.index:
        value = extents_of(template, group, scope)
        out.extend(value if isinstance(value, tuple) else (value,))
    return tuple(out)


def extents_of(template: Template, group: str, scope: Scope) -> Any:
    """The extent of a declared index group, or the list of them. Raises TemplateError."""
    text = (template.index or {})[group]
    value = text(scope)
    if not all(map(is_extent, value if isinstance(value, tuple) else (value,))):
        raise text.error(f"{value!r} are not extents of index group {group!r}")
    return value


def places(template: Template, name: str, count: int) -> range:
    """Positions that operand `name` takes among `count` operands."""
    at = 0
    for operand in template.inputs:
        width = count - len(template.inputs) + 1 if operand.many or operand.optional else 1
        if operand.name == name:
            return range(at, at + width)
        at += width
    raise template.error(f"there is no operand {name!r}")


def ports(
    template: Template, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> dict[str, Any]:
    """Operand and output names -> their types (a tuple of types for `name...`)."""
    out: dict[str, Any] = {}
    for operand in template.inputs:
        own = tuple(inputs[p] for p in places(template, operand.name, len(inputs)))
        out[f"${operand.name}"] = own if operand.many else own[0] if own else None
    at = 0
    for output in template.outputs if outputs else ():
        width = 1 if output.count is None else len(outputs) - len(template.outputs) + 1
        own = tuple(outputs[at : at + width])
        out[f"${output.name}"] = own[0] if output.count is None else own
        at += width
    return out
