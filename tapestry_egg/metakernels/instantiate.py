"""From a template, parameters and operand types to an operation projection signature."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

from ..blockgraph import TensorType
from ..monoids import monoids, single_monoids
from ..zspace import Projection, ZRange
from .language import Expression
from .scopes import Inner, Names
from .signature import IndexDim, OperationSignature, Passage, Polynomial, Role
from .template import Template
from .values import Cost, RoleOf, Row, kind


@dataclass(frozen=True, eq=False, slots=True)
class Instance:
    """A template applied to one operation's parameters and types."""

    template: Template
    signature: OperationSignature
    names: Names

    def localize(
        self, inputs: Sequence[tuple[int, ...]], outputs: Sequence[tuple[int, ...]]
    ) -> dict[str, Any]:
        """The parameters that change when the kernel runs on boxes of the given shapes.

        Raises TemplateError where the kernel cannot run on such boxes.
        """
        if not self.template.local:
            return {}
        s = self.signature
        local_in = _with_shapes(s.input_types, inputs)
        local_out = _with_shapes(s.output_types, outputs)
        scope = Inner(self.names, _ports(self.template, local_in, local_out))
        return {name: plain(value(scope)) for name, value in self.template.local.items()}


def instantiate(
    template: Template,
    kernel: str,
    params: Mapping[str, Any],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType] | None,
) -> Instance | None:
    """The instance of `template` for one operation; None when its patterns or guard do not match.

    `params` is plain data. Raises TemplateError when the template contradicts `outputs` or itself.
    """
    names = _bind(template, kernel, params, inputs)
    if names is None or (template.when is not None and not template.when(names)):
        return None
    types = _output_types(template, names)
    if outputs is not None:
        _compare(template, kernel, types, outputs)
        types = tuple(outputs)
    names.update(_ports(template, inputs, types))
    index, groups = _index_space(template, names, types)
    rank = len(index)
    rows = Inner(names, {f"@{g}": _rows(dims, rank) for g, dims in groups.items()})
    outside = _outside(template, names, inputs)
    ins, outs = _projections(template, rows, index, inputs, types, outside)
    costs: dict[str, Any] = {f"@{g}": Cost(((1.0, _flat(d)),)) for g, d in groups.items()}
    costs["@all"] = Cost(((1.0, tuple(range(rank))),))
    priced = Inner(names, costs)
    signature = OperationSignature(
        kernel=kernel,
        index=index,
        inputs=ins,
        outputs=outs,
        input_types=tuple(inputs),
        output_types=types,
        passages=_passages(template, names, inputs, types),
        initial=tuple(p for name in template.initial for p in _places(template, name, len(inputs))),
        flops=() if template.flops is None else _polynomial(template.flops, priced),
        reads=_reads(template, priced, inputs),
        fusion=template.fusion,
        outside=outside,
    )
    return Instance(template, signature, names)


# Parameters


def plain(value: Any) -> Any:
    """A value of the language as plain parameter data: lists stand for tuples."""
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    return value


def readable(value: Any) -> Any:
    """A parameter as expressions see it: tuples, and dtypes, enums and primitives by name.

    Accepts the plain forms of `codec.py` and the Python objects that they stand for.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        for tag, read in _TAGS.items():
            if tag in value:
                return read(value)
        return {k: readable(v) for k, v in value.items() if k != "$class"}
    if isinstance(value, tuple | list):
        if hasattr(value, "_fields"):
            return {k: readable(getattr(value, k)) for k in value._fields}
        return tuple(readable(v) for v in value)
    if isinstance(value, np.dtype):
        return value.name
    if is_dataclass(value):
        return {f.name: readable(getattr(value, f.name)) for f in fields(value)}
    return value


_TAGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "$dtype": lambda v: v["$dtype"],
    "$scalar_type": lambda v: v["$scalar_type"],
    "$enum": lambda v: v["name"] if "name" in v else v["$enum"][-1],
    "$list": lambda v: readable(v["$list"]),
    "$int": lambda v: int(v["$int"]),
    "$float": lambda v: float(v["$float"]),
    "$primitive": lambda v: v["$primitive"],
}


def hashable(value: Any) -> Any:
    """A key that equal parameters share."""
    if isinstance(value, tuple | list):
        return tuple([hashable(v) for v in value])
    if isinstance(value, Mapping):
        return ("{}", *sorted((k, hashable(v)) for k, v in value.items()))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


# Matching


def _bind(
    template: Template, kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> Names | None:
    fixed = sum(not o.many for o in template.inputs)
    if len(inputs) < fixed or (len(inputs) > fixed and fixed == len(template.inputs)):
        return None
    names = Names({f"${name}": value for name, value in template.let.items()})
    given = {k: default(names) for k, default in template.defaults.items() if k not in params}
    given.update((k, readable(v)) for k, v in params.items())
    names.update((f"${k}", v) for k, v in given.items() if k not in template.let)
    names.update({"$params": given, "$kernel": kernel})
    bound: dict[str, Any] = {}
    for operand in template.inputs:
        for p in _places(template, operand.name, len(inputs)):
            if operand.pattern and not operand.pattern.match(inputs[p].shape, bound):
                return None
    names.update(bound)
    names.update(_ports(template, inputs, ()))
    return names


def _places(template: Template, name: str, count: int) -> range:
    """Positions that operand `name` takes among `count` operands."""
    at = 0
    for operand in template.inputs:
        width = count - len(template.inputs) + 1 if operand.many else 1
        if operand.name == name:
            return range(at, at + width)
        at += width
    raise template.error(f"there is no operand {name!r}")


def _ports(
    template: Template, inputs: Sequence[TensorType], outputs: Sequence[TensorType]
) -> dict[str, Any]:
    """Operand and output names -> their types (a tuple of types for `name...`)."""
    out: dict[str, Any] = {}
    for operand in template.inputs:
        own = tuple(inputs[p] for p in _places(template, operand.name, len(inputs)))
        out[f"${operand.name}"] = own if operand.many else own[0]
    at = 0
    for output in template.outputs if outputs else ():
        width = 1 if output.count is None else len(outputs) - len(template.outputs) + 1
        own = tuple(outputs[at : at + width])
        out[f"${output.name}"] = own[0] if output.count is None else own
        at += width
    return out


def _with_shapes(
    types: Sequence[TensorType], shapes: Sequence[tuple[int, ...]]
) -> tuple[TensorType, ...]:
    return tuple(TensorType(tuple(s), t.dtype, t.weak) for t, s in zip(types, shapes, strict=True))


# Types


def _output_types(template: Template, names: Names) -> tuple[TensorType, ...]:
    out = []
    for output in template.outputs:
        count = 1 if output.count is None else output.count(names)
        for k in range(count):
            scope = Inner(names, {"$k": k}) if output.count is not None else names
            shape, dtype = output.shape(scope), output.dtype(scope)
            if not isinstance(shape, tuple) or not all(map(_is_extent, shape)):
                raise output.shape.error(f"{shape!r} is not a shape")
            if not isinstance(dtype, str):
                raise output.dtype.error(f"{dtype!r} is not a dtype")
            out.append(TensorType(tuple(map(int, shape)), dtype))
    return tuple(out)


def _is_extent(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= 0)


def _compare(
    template: Template, kernel: str, derived: Sequence[TensorType], given: Sequence[TensorType]
) -> None:
    if [(t.shape, t.dtype) for t in derived] != [(t.shape, t.dtype) for t in given]:
        raise template.error(
            f"the template gives {_listed(derived)}, the operation {kernel} {_listed(given)}",
            hint="Correct the entry's outputs, or let `when:` leave such operations out.",
        )


def _listed(types: Iterable[TensorType]) -> str:
    return ", ".join(map(str, types)) or "nothing"


# The index space


def _index_space(
    template: Template, names: Names, outputs: Sequence[TensorType]
) -> tuple[tuple[IndexDim, ...], dict[str, int | tuple[int, ...]]]:
    """The index dims, and per group the number of its dim or the numbers of its dims."""
    if template.index is None:
        sizes: dict[str, Any] = {"i": outputs[0].shape}
    else:
        sizes = {g: size(names) for g, size in template.index.items()}
    plain_roles: dict[Any, Role] = {"map": "map", "whole": "whole"}
    index: list[IndexDim] = []
    groups: dict[str, int | tuple[int, ...]] = {}
    for group, given in sizes.items():
        extents = given if isinstance(given, tuple) else (given,)
        if not all(map(_is_extent, extents)):
            text = template.index[group] if template.index else None
            what = f"{given!r} are not extents of index group {group!r}"
            raise text.error(what) if text else template.error(what)
        role = template.roles[group](names) if group in template.roles else "map"
        roles = role if isinstance(role, tuple) else (role,) * len(extents)
        if len(roles) != len(extents):
            raise template.roles[group].error(f"{len(roles)} roles for {len(extents)} index dims")
        first = len(index)
        for k, (n, r) in enumerate(zip(extents, roles, strict=True)):
            name = group if len(extents) == 1 else f"{group}{k}"
            if isinstance(r, RoleOf):
                index.append(IndexDim(name, int(n), r.role, r.monoid))
            elif r in plain_roles:
                index.append(IndexDim(name, int(n), plain_roles[r]))
            else:
                raise template.roles[group].error(f"{r!r} is not a role")
        many = isinstance(given, tuple)
        groups[group] = tuple(range(first, len(index))) if many else first
    return tuple(index), groups


def _flat(dims: int | tuple[int, ...]) -> tuple[int, ...]:
    return dims if isinstance(dims, tuple) else (dims,)


def _rows(dims: int | tuple[int, ...], rank: int) -> Row | tuple[Row, ...]:
    if isinstance(dims, tuple):
        return tuple(Row(tuple(int(d == e) for e in range(rank))) for d in dims)
    return Row(tuple(int(dims == e) for e in range(rank)))


# Projections


_ALIGNED = Expression("aligned($each.shape, $sizes, @i)")


def _projections(
    template: Template,
    rows: Inner,
    index: tuple[IndexDim, ...],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    outside: Sequence[str | int | None],
) -> tuple[tuple[Projection, ...], tuple[Projection, ...]]:
    whole = ZRange.from_shape([d.size for d in index])
    found: tuple[list[Projection], list[Projection]] = ([], [])
    declared = [(o.name, o.many) for o in template.inputs]
    results = [(o.name, o.count is not None) for o in template.outputs]
    for side, (ports, types) in enumerate(((declared, inputs), (results, outputs))):
        at = 0
        for name, many in ports:
            text = template.project.get(name)
            width = len(types) - len(ports) + 1 if many else 1
            for k, tensor in enumerate(types[at : at + width]):
                if text is None:
                    sizes = tuple(d.size for d in index)
                    value = _ALIGNED(Inner(rows, {"$each": tensor, "$sizes": sizes}))
                elif many:
                    value = text(Inner(rows, {"$each": tensor, "$k": k}))
                else:
                    value = text(rows)
                projection = _projection(text or _ALIGNED, name, value, tensor, whole)
                if side == 1 or not outside or outside[at + k] is None:
                    _check_bounds(text or _ALIGNED, name, projection, tensor, whole, side == 1)
                found[side].append(projection)
            at += width
    return tuple(found[0]), tuple(found[1])


def _projection(
    text: Expression, name: str, value: Any, tensor: TensorType, whole: ZRange
) -> Projection:
    if not isinstance(value, tuple) or len(value) != tensor.rank:
        got = f"{len(value)} rows" if isinstance(value, tuple) else repr(value)
        raise text.error(f"{got} for {name}, a tensor of rank {tensor.rank}")
    matrix, offset, shape = [], [], []
    for row in value:
        row = Row((), row) if type(row) is int else row
        if not isinstance(row, Row):
            raise text.error(f"{row!r} is not a row of a projection")
        matrix.append(row.coefficients or (0,) * whole.rank)
        offset.append(row.offset)
        shape.append(row.extent)
    return Projection(tuple(matrix), tuple(offset), tuple(shape), index_rank=whole.rank)


def _check_bounds(
    text: Expression,
    name: str,
    projection: Projection,
    tensor: TensorType,
    whole: ZRange,
    produced: bool,
) -> None:
    if whole.is_empty or not tensor.size:
        return
    image = projection.image(whole)
    box = ZRange.from_shape(tensor.shape)
    if not box.contains(image):
        raise text.error(
            f"{projection} leaves {name}, {tensor}: it reaches {image}",
            "" if produced else "`outside:` can say what lies there.",
        )
    if produced and image != box:
        raise text.error(f"{projection} covers only {image} of {name}, {tensor}")


def _outside(
    template: Template, names: Names, inputs: Sequence[TensorType]
) -> tuple[str | int | None, ...]:
    """Per operand, the monoid or the number of the scalar operand that its `outside:` names."""
    if not template.outside:
        return ()
    out: list[str | int | None] = [None] * len(inputs)
    declared = [o.name for o in template.inputs]
    for name, text in template.outside.items():
        value: str | int | None = text(names)
        if value in declared:
            (value,) = _places(template, str(value), len(inputs))
            if inputs[value].rank:
                raise text.error(f"{inputs[value]} is not a scalar")
        elif value is not None and value not in single_monoids():
            raise text.error(
                f"{value!r} is neither a monoid nor an operand",
                f"Monoids are {', '.join(single_monoids())}.",
            )
        for p in _places(template, name, len(inputs)):
            out[p] = value
    return tuple(out)


# Laws and costs


def _passages(
    template: Template,
    names: Names,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
) -> tuple[Passage, ...]:
    found: dict[Passage, None] = {}
    known = monoids()
    for text in template.passages:
        law = text.law()
        ports: list[int] = []
        for port in law.ports:
            ports.extend(_places(template, port.removesuffix("..."), len(inputs)))
        for monoid, types in (
            (law.monoid_in, [inputs[p] for p in ports]),
            (law.monoid_out, outputs),
        ):
            wanted = known[monoid].kinds if monoid in known else ()
            if any(kind(t.dtype) not in wanted for t in types):
                break
        else:
            if text.holds(names):
                found[Passage(tuple(ports), law.monoid_in, law.monoid_out)] = None
    return tuple(found)


def _polynomial(text: Expression, scope: Mapping[str, Any]) -> Polynomial:
    value = text(scope)
    if isinstance(value, int | float):
        value = scope["@all"] * value
    if not isinstance(value, Cost):
        raise text.error(f"{value!r} is not a polynomial in index groups")
    merged: dict[tuple[int, ...], float] = {}
    for coefficient, dims in value.terms:
        key = tuple(sorted(dims))
        merged[key] = merged.get(key, 0.0) + coefficient
    return tuple((c, dims) for dims, c in merged.items() if c)


def _reads(
    template: Template, scope: Mapping[str, Any], inputs: Sequence[TensorType]
) -> tuple[Polynomial | None, ...]:
    out: list[Polynomial | None] = [None] * len(inputs)
    for name, text in template.reads.items():
        for p in _places(template, name, len(inputs)):
            out[p] = _polynomial(text, scope)
    return tuple(out)
