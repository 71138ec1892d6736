"""From a template, parameters and operand types to an operation projection signature."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.patterns import Span, bind
from tapestry_egg.metakernels.language.scopes import Inner, Names, Scope
from tapestry_egg.metakernels.language.template import (
    Operand,
    ProjectionForm,
    Reduction,
    RowsText,
    Template,
)
from tapestry_egg.metakernels.signatures.parameters import plain, readable
from tapestry_egg.metakernels.signatures.signature import (
    AROUND,
    Blocks,
    Elements,
    IndexDim,
    OperationSignature,
    Passage,
    Polynomial,
    Role,
    Scattered,
    Scratch,
)
from tapestry_egg.metakernels.signatures.values import MOST_DIMS, Cost, RoleOf, Row, is_extent
from tapestry_egg.monoids import monoids, single_monoids
from tapestry_egg.zspace import Projection, ZRange

_MOST_OUTPUTS = 4096


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
        scope = Inner(self.names, ports(self.template, local_in, local_out))
        return {name: plain(value(scope)) for name, value in self.template.local.items()}


def instantiate(
    template: Template,
    kernel: str,
    params: Mapping[str, Any],
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType] | None,
) -> Instance:
    """The instance of `template` for one operation.

    `params` is plain data. Raises Mismatch when the template does not stand for the operation
    (arity, shapes, dtypes, constraints, guard), TemplateError when it contradicts `outputs` or
    itself.
    """
    names, spans, types = _bound(template, kernel, params, inputs)
    if outputs is not None:
        _compare(template, kernel, types, outputs)
        types = tuple(outputs)
    names.update(ports(template, inputs, types))
    index = index_space(template, names, inputs, types, spans)
    outside = _outside(template, names, inputs)
    rows = Inner(names, index.rows())
    ins, outs = _projections(template, rows, index, inputs, types, outside)
    costs = {f"@{g}": Cost(((1.0, index.numbers(g)),)) for g in index.groups}
    costs["@all"] = Cost(((1.0, tuple(range(len(index.dims)))),))
    priced = Inner(names, costs)
    signature = OperationSignature(
        kernel=kernel,
        index=index.dims,
        inputs=ins,
        outputs=outs,
        input_types=tuple(inputs),
        output_types=types,
        passages=_passages(template, names, inputs, types),
        initial=_places(template, template.initial, inputs),
        straight=_places(template, template.straight, inputs),
        moved=_places(template, template.moves, inputs),
        takes=_places(template, template.takes, inputs),
        repeats=_places(template, template.repeats, inputs),
        stored=_places(template, template.stored, inputs),
        writes=_places(template, tuple(template.writes.values()), inputs),
        parts=_flag(template.parts, names),
        dilates=_flag(template.dilates, names),
        adds=_flag(template.adds, names),
        carried=_carried(template, names, inputs, types),
        flops=() if template.flops is None else polynomial(template.flops, priced),
        reads=_reads(template, priced, inputs),
        fusion=template.fusion,
        in_products=template.in_products,
        elements=_elements(template, names),
        commutes=template.commutes,
        means=template.means,
        measured=measured(template, names),
        spilled=spilled(template, names),
        steps=steps(template, priced),
        scattered=scattered(template, names, priced, inputs),
        precision=precision(template, names),
        scratch=scratch(template, names, priced),
        blocks=blocks(template, names, priced),
        outside=outside,
        placed=_placed(template, names, index),
        skips=_skips(template, names, inputs),
    )
    return Instance(template, signature, names)


def names_of(
    template: Template, kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> Names:
    """What the names of `instantiate` stand for, but for those of results.

    Raises Mismatch when the template does not stand for the operation.
    """
    return _bound(template, kernel, params, inputs)[0]


def types_given(
    template: Template, kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> tuple[TensorType, ...]:
    """The output types of `instantiate`, which are told before the rest is.

    Raises Mismatch when the template does not stand for the operation.
    """
    return _bound(template, kernel, params, inputs)[2]


def _bound(
    template: Template, kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> tuple[Names, Spans, tuple[TensorType, ...]]:
    names, spans = bind_names(template, kernel, params, inputs)
    if template.when is not None and not template.when(names):
        raise Mismatch(f"`when: {template.when.text}` does not hold")
    return names, spans, _output_types(template, names)


def _with_shapes(
    types: Sequence[TensorType], shapes: Sequence[tuple[int, ...]]
) -> tuple[TensorType, ...]:
    return tuple(TensorType(tuple(s), t.dtype, t.weak) for t, s in zip(types, shapes, strict=True))


# Types


def _output_types(template: Template, names: Names) -> tuple[TensorType, ...]:
    out: list[TensorType] = []
    for output in template.outputs:
        count = 1 if output.count is None else output.count(names)
        if output.count is not None and (
            type(count) is not int or not 0 <= count <= _MOST_OUTPUTS - len(out)
        ):
            raise output.count.error(f"{count!r} is not a number of outputs")
        for k in range(count):
            scope = Inner(names, {"$k": k}) if output.count is not None else names
            shape, dtype = output.shape(scope), output.dtype(scope)
            if not isinstance(shape, tuple) or not all(map(is_extent, shape)):
                raise output.shape.error(f"{shape!r} is not a shape")
            if len(shape) > MOST_DIMS:
                raise output.shape.error(f"a tensor of {len(shape)} dims")
            if not isinstance(dtype, str):
                raise output.dtype.error(f"{dtype!r} is not a dtype")
            out.append(TensorType(tuple(map(int, shape)), dtype))
    return tuple(out)


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


# Projections


ALIGNED = "aligned($each.shape, $sizes, @i)"


def _projections(
    template: Template,
    rows: Inner,
    index: IndexSpace,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    outside: Sequence[str | int | None],
) -> tuple[tuple[Projection, ...], tuple[Projection, ...]]:
    whole = ZRange.from_shape([d.size for d in index.dims])
    found: tuple[list[Projection], list[Projection]] = ([], [])
    # Faults of the text that stands for a missing projection are told of the whole entry.
    aligned = RowsText(Expression(ALIGNED, replace(template.origin, folded=True)))
    operands = [(o.name, o.many or o.optional, o.many) for o in template.inputs]
    results = [(o.name, o.count is not None, o.count is not None) for o in template.outputs]
    for side, (declared, types) in enumerate(((operands, inputs), (results, outputs))):
        at = 0
        for name, open_, many in declared:
            form = template.project.get(name, aligned)
            width = len(types) - len(declared) + 1 if open_ else 1
            for k, tensor in enumerate(types[at : at + width]):
                own: dict[str, Any] = {"$.shape": tensor.shape}
                if form is aligned:
                    own["$sizes"] = tuple(d.size for d in index.dims[: index.declared])
                if many or form is aligned:
                    own |= {"$each": tensor, "$k": k}
                made = form.rows(Inner(rows, own), tensor.rank, index.declared)
                if side == 0:
                    made = tuple(index.reduced(template, at + k, made, tensor))
                projection = _projection(made, whole)
                if side == 1 or not outside or outside[at + k] is None:
                    _check_bounds(form, name, projection, tensor, whole, side == 1)
                found[side].append(projection)
            at += width
    return tuple(found[0]), tuple(found[1])


def _projection(rows: Sequence[Row], whole: ZRange) -> Projection:
    return Projection(
        tuple(r.coefficients + (0,) * (whole.rank - len(r.coefficients)) for r in rows),
        tuple(r.offset for r in rows),
        tuple(r.extent for r in rows),
        index_rank=whole.rank,
    )


def _check_bounds(
    form: ProjectionForm,
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
        raise form.error(
            f"{projection} leaves {name}, {tensor}: it reaches {image}",
            "" if produced else "`outside:` can say what lies there.",
        )
    if produced and image != box:
        raise form.error(f"{projection} covers only {image} of {name}, {tensor}")


def _outside(
    template: Template, names: Names, inputs: Sequence[TensorType]
) -> tuple[str | int | None, ...]:
    """Per operand, the monoid or the number of the scalar operand that its `outside:` names."""
    if not template.outside:
        return ()
    out: list[str | int | None] = [None] * len(inputs)
    scalars = {o.name: places(template, o.name, len(inputs)) for o in template.inputs if not o.many}
    for name, text in template.outside.items():
        value: Any = text(names)
        if isinstance(value, str) and scalars.get(value):
            value = scalars[value][0]
            if inputs[value].rank:
                raise text.error(f"{inputs[value]} is not a scalar")
        elif value not in (None, AROUND) and value not in single_monoids():
            raise text.error(
                f"{value!r} is neither a monoid nor an operand, nor is it {AROUND!r}",
                f"Monoids are {', '.join(single_monoids())}.",
            )
        for p in places(template, name, len(inputs)):
            out[p] = value
    return tuple(out)


def _placed(template: Template, names: Names, index: IndexSpace) -> tuple[int, ...]:
    """The index dims along which the kernel's result depends on where its block lies."""
    found: list[int] = []
    for group, text in template.placed.items():
        dims, value = index.numbers(group), text(names)
        flags = value if isinstance(value, tuple) else (value,) * len(dims)
        if len(flags) != len(dims) or not all(isinstance(f, bool) for f in flags):
            raise text.error(f"{value!r} is not a flag for each of {len(dims)} index dims")
        found.extend(d for d, flag in zip(dims, flags, strict=True) if flag)
    return tuple(sorted(found))


def _skips(
    template: Template, names: Names, inputs: Sequence[TensorType]
) -> tuple[frozenset[int], ...]:
    """Per operand, the dims in which the kernel itself skips what lies between what it reads."""
    found = [frozenset[int]()] * len(inputs) if template.skips else []
    for name, text in template.skips.items():
        for p in places(template, name, len(inputs)):
            value = text(names)
            if not isinstance(value, tuple) or not set(value) <= set(range(inputs[p].rank)):
                raise text.error(f"{value!r} is no list of dims of {inputs[p]}")
            found[p] = frozenset(value)
    return tuple(found)


# Laws and costs


def _flag(text: Expression | None, names: Scope) -> bool:
    value = False if text is None else text(names)
    if text is not None and not isinstance(value, bool):
        raise text.error(f"{value!r} is neither true nor false")
    return bool(value)


def _places(
    template: Template, names: Sequence[str], inputs: Sequence[TensorType]
) -> tuple[int, ...]:
    """The places of operands that a template names."""
    return tuple(p for name in names for p in places(template, name, len(inputs)))


def _carried(
    template: Template,
    names: Names,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
) -> tuple[int, ...]:
    """Operands that are carried along, each to the result of its place."""
    found: list[int] = []
    for name, text in template.carries.items():
        if [(t.shape, t.dtype) for t in inputs] != [(t.shape, t.dtype) for t in outputs]:
            raise text.error("the results are not those of the operands' types, one for each")
        for k, p in enumerate(places(template, name, len(inputs))):
            if _flag(text, Inner(names, {"$each": inputs[p], "$k": k})):
                found.append(p)
    return tuple(sorted(found))


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
            ports.extend(places(template, port.removesuffix("..."), len(inputs)))
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


def _elements(template: Template, names: Names) -> Elements:
    text = template.elements
    if text is None:
        return "kept" if template.fusion == "view" else "computed"
    value = text(names)
    if value not in get_args(Elements):
        raise text.error(f"{value!r} is none of {', '.join(get_args(Elements))}")
    return cast(Elements, value)


def _reads(
    template: Template, scope: Mapping[str, Any], inputs: Sequence[TensorType]
) -> tuple[Polynomial | None, ...]:
    out: list[Polynomial | None] = [None] * len(inputs)
    for name, text in template.reads.items():
        for p in places(template, name, len(inputs)):
            out[p] = polynomial(text, scope)
    return tuple(out)


# The index space of one operation: declared index dims, and dims of the inputs to be reduced.


#: The number of a group's index dim, or the numbers of its index dims.
Group = int | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class IndexSpace:
    """Index dims in order: `declared` of them come from `index:`, the others from `reduce:`.

    `moved` says which dims of which operand a reduction runs over: operand -> dim -> index dim.
    """

    dims: tuple[IndexDim, ...]
    declared: int
    groups: Mapping[str, Group]
    moved: Mapping[int, Mapping[int, int]]

    def rows(self) -> dict[str, Row | tuple[Row, ...]]:
        """What `@group` stands for in a projection: the row, or the rows, that follow its dims."""
        return {
            f"@{name}": tuple(map(self._unit, group))
            if isinstance(group, tuple)
            else self._unit(group)
            for name, group in self.groups.items()
        }

    def numbers(self, name: str) -> tuple[int, ...]:
        """The index dims of a group."""
        group = self.groups[name]
        return group if isinstance(group, tuple) else (group,)

    def reduced(
        self, template: Template, p: int, rows: Sequence[Row], tensor: TensorType
    ) -> list[Row]:
        """The rows of operand `p`, with those of its reduced dims following their index dim.

        Raises TemplateError for such a dim whose row does not read it whole.
        """
        out = list(rows)
        for k, d in self.moved.get(p, {}).items():
            row = out[k]
            if any(row.coefficients) or row.offset or row.extent != tensor.shape[k]:
                name = next(g for g in template.reduce if d in self.numbers(g))
                raise template.reduce[name].monoid.error(
                    f"dim {k} of operand {p}, {tensor}, is not read whole: it cannot be reduced",
                    f"Each index point reads {row.extent} from {row.offset} on.",
                )
            out[k] = self._unit(d)
        return out

    def _unit(self, d: int) -> Row:
        return Row(tuple(int(d == e) for e in range(len(self.dims))))


def index_space(
    template: Template,
    names: Scope,
    inputs: Sequence[TensorType],
    outputs: Sequence[TensorType],
    spans: Spans,
) -> IndexSpace:
    """The index space of one operation. Raises TemplateError with the place of what is wrong."""
    dims, groups = _declared(template, names, outputs)
    declared = len(dims)
    moved: dict[int, dict[int, int]] = {}
    for name, reduction in template.reduce.items():
        monoid = reduction.monoid(names)
        if not isinstance(monoid, str) or (monoid != "whole" and monoid not in monoids()):
            hint = f"There are {', '.join(monoids())}, and `whole` for none."
            raise reduction.monoid.error(f"{monoid!r} is not a monoid", hint)
        reached, many = _reached(template, name, names, inputs, spans)
        extents = {p: tuple(inputs[p].shape[k] for k in own) for p, own in reached.items()}
        if len(set(extents.values())) > 1:
            shown = " and ".join(str(list(e)) for e in extents.values())
            raise reduction.monoid.error(f"the dims to reduce differ: {shown}")
        first = len(dims)
        for k, n in enumerate(next(iter(extents.values()), ())):
            dims.append(_reduced_dim(name if not many else f"{name}{k}", n, monoid))
        groups[name] = tuple(range(first, len(dims))) if many else first
        for p, own in reached.items():
            for d, k in enumerate(own, first):
                if moved.setdefault(p, {}).setdefault(k, d) != d:
                    raise reduction.monoid.error(f"dim {k} of operand {p} is reduced twice")
    if len(dims) > MOST_DIMS:
        raise template.error(f"an index space of more than {MOST_DIMS} dims")
    return IndexSpace(tuple(dims), declared, groups, moved)


def _reduced_dim(name: str, size: int, monoid: str) -> IndexDim:
    if monoid == "whole":
        return IndexDim(name, size, "whole")
    return IndexDim(name, size, "reduce", monoid)


def _declared(
    template: Template, names: Scope, outputs: Sequence[TensorType]
) -> tuple[list[IndexDim], dict[str, Group]]:
    """The dims of `index:`, and per group the number of its dim or the numbers of its dims."""
    if template.index is None:
        sizes: dict[str, Any] = {"i": outputs[0].shape if outputs else ()}
    else:
        sizes = {g: extents_of(template, g, names) for g in template.index}
    plain_roles: dict[Any, Role] = {"map": "map", "whole": "whole"}
    index: list[IndexDim] = []
    groups: dict[str, Group] = {}
    for group, given in sizes.items():
        extents = given if isinstance(given, tuple) else (given,)
        if len(index) + len(extents) > MOST_DIMS:
            raise template.error(f"an index space of more than {MOST_DIMS} dims")
        role = template.roles[group](names) if group in template.roles else "map"
        roles = role if isinstance(role, tuple) else (role,) * len(extents)
        if len(roles) != len(extents):
            raise template.roles[group].error(f"{len(roles)} roles for {len(extents)} index dims")
        first = len(index)
        for k, (n, r) in enumerate(zip(extents, roles, strict=True)):
            name = group if len(extents) == 1 else f"{group}{k}"
            if isinstance(r, RoleOf) and isinstance(r.monoid, str) and r.monoid in monoids():
                index.append(IndexDim(name, int(n), r.role, r.monoid))
            elif isinstance(r, str) and r in plain_roles:
                index.append(IndexDim(name, int(n), plain_roles[r]))
            else:
                raise template.roles[group].error(f"{r!r} is not a role")
        many = isinstance(given, tuple)
        groups[group] = tuple(range(first, len(index))) if many else first
    return index, groups


def _reached(
    template: Template,
    name: str,
    names: Scope,
    inputs: Sequence[TensorType],
    spans: Spans,
) -> tuple[dict[int, tuple[int, ...]], bool]:
    """Operand -> its dims that a reduction runs over, and whether it stands for a list of them."""
    reduction = template.reduce[name]
    if reduction.over is not None:
        return _reached_over(template, reduction, names, inputs)
    out: dict[int, tuple[int, ...]] = {}
    many = False
    for p, found in spans.items():
        own = [s for s in found if s.name == f"${name}"]
        if len(own) > 1:
            what = f"${name} stands for two dims of one input"
            raise reduction.monoid.error(what, "Say which with `over: {operand: dim}`.")
        if own:
            out[p] = tuple(range(own[0].start, own[0].stop))
            many = many or not own[0].single
    return out, many


def _reached_over(
    template: Template, reduction: Reduction, names: Scope, inputs: Sequence[TensorType]
) -> tuple[dict[int, tuple[int, ...]], bool]:
    out: dict[int, tuple[int, ...]] = {}
    many = False
    for operand, text in (reduction.over or {}).items():
        value = text(names)
        many = many or isinstance(value, tuple)
        dims = value if isinstance(value, tuple) else (value,)
        for p in places(template, operand, len(inputs)):
            rank = inputs[p].rank
            if not all(type(k) is int and -rank <= k < rank for k in dims):
                raise text.error(f"{value!r} is outside {operand}, {inputs[p]}")
            out[p] = tuple(k % rank for k in dims)
    return out, many


# Operands and parameters of one operation matched against a template: what its names stand for.


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


# What an operation is priced by, from the expressions of its template: amounts in index extents,
# coordinates of tables, waits, scattered elements and precisions.


#: Of presets of algorithms those that are not the default (jax.lax.DotAlgorithmPreset).
_PRESETS = {
    "F32_F32_F32": "highest",
    "TF32_TF32_F32_X3": "high",
    "BF16_BF16_F32_X3": "high",
    "BF16_BF16_F32_X6": "highest",
    "BF16_BF16_F32_X9": "highest",
}


def polynomial(text: Expression, scope: Mapping[str, Any]) -> Polynomial:
    """An amount as a polynomial over index extents; a number is one per index point."""
    value = text(scope)
    if isinstance(value, int | float):
        value = scope["@all"] * value
    if not isinstance(value, Cost):
        raise text.error(f"{value!r} is not a polynomial in index groups")
    return _terms(text, value)


def _terms(text: Expression, value: Cost) -> Polynomial:
    merged: dict[tuple[int, ...], float] = {}
    for coefficient, dims in value.terms:
        if not math.isfinite(coefficient):
            raise text.error(f"a coefficient is {coefficient}")
        key = tuple(sorted(dims))
        merged[key] = merged.get(key, 0.0) + coefficient
    return tuple((c, dims) for dims, c in merged.items() if c)


def measured(template: Template, names: Names) -> tuple[float, ...] | None:
    """The coordinates at which tables of measured kernels hold the rate."""
    text = template.measured
    if text is None:
        return None
    value = text(names)
    if not isinstance(value, tuple) or not all(isinstance(x, int | float) for x in value):
        raise text.error(f"{value!r} is not a list of numbers")
    return tuple(map(float, value))


def spilled(template: Template, names: Names) -> float:
    """Bytes that each flop takes through memory where no table holds the rate."""
    text = template.spilled
    value = 0.0 if text is None else text(names)
    if text is not None and (not isinstance(value, int | float) or not 0.0 <= value < math.inf):
        raise text.error(f"{value!r} is not a number of bytes")
    return float(value)


def scratch(template: Template, names: Names, scope: Mapping[str, Any]) -> Scratch | None:
    """What is in memory beside operands and results."""
    texts = template.scratch
    if not texts:
        return None
    beside = polynomial(texts["beside"], scope)
    if "blocks" not in texts:
        walked = polynomial(texts["fused"], scope) if "fused" in texts else beside
        return Scratch(0.0, (), (), beside, walked=walked)
    blocks = texts["blocks"](names)
    if not isinstance(blocks, int | float) or not 0.0 <= blocks < math.inf:
        raise texts["blocks"].error(f"{blocks!r} is not a number of blocks")
    fused = texts["fused"](names) if "fused" in texts else blocks
    if not isinstance(fused, int | float) or not 0.0 <= fused <= blocks:
        raise texts["fused"].error(f"{fused!r} is no number of blocks up to {blocks!r}")
    scores = polynomial(texts["scores"], scope)
    if "along" not in texts:
        row = polynomial(texts["row"], scope)
        return Scratch(float(blocks), scores, row, beside, (), float(fused), beside)
    along = polynomial(texts["along"], scope)
    if len(along) != 1:
        raise texts["along"].error("is no product of index dims")
    return Scratch(float(blocks), scores, (), beside, along[0][1], float(fused), beside)


def blocks(template: Template, names: Names, scope: Mapping[str, Any]) -> Blocks | None:
    """The kernels of each block; None where it has none, or one kernel does it all."""
    texts = template.blocks
    if not texts:
        return None
    text, kernels = texts["products"], texts["kernels"](names)
    found = text(scope)
    if not isinstance(found, tuple) or not all(isinstance(p, tuple) and len(p) == 4 for p in found):
        raise text.error(f"{found!r} is not a list of products [batch, m, n, k]")
    if not isinstance(kernels, int | float) or not 0.0 <= kernels < math.inf:
        raise texts["kernels"].error(f"{kernels!r} is not a number of kernels")
    if not found:
        return None
    products = tuple([tuple([_dims(text, side) for side in product]) for product in found])
    moved, again = (polynomial(texts[k], scope) for k in ("moved", "again"))
    return Blocks(products, moved, again, float(kernels))


def _dims(text: Expression, value: Any) -> tuple[int, ...]:
    """The index dims whose product an amount is."""
    terms = _terms(text, value) if isinstance(value, Cost) else ()
    if len(terms) != 1 or terms[0][0] != 1.0:
        raise text.error(f"{value!r} is no product of index dims")
    return terms[0][1]


def steps(template: Template, scope: Mapping[str, Any]) -> Polynomial:
    """Steps that wait for one another; a number is that of all of them."""
    text = template.steps
    if text is None:
        return ()
    value = text(scope)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = Cost(((float(value), ()),))
    if not isinstance(value, Cost):
        raise text.error(f"{value!r} is not a polynomial in index groups")
    return _terms(text, value)


def scattered(
    template: Template, names: Names, scope: Mapping[str, Any], inputs: Sequence[TensorType]
) -> Scattered | None:
    """What is read, or added to, at places that are data."""
    texts = template.scattered
    if not texts:
        return None
    name = texts["of"].text.strip()
    found = places(template, name, len(inputs))
    if len(found) != 1:
        raise texts["of"].error(f"{name!r} is not an operand")
    (p,) = found
    numbers = {k: texts[k](names) for k in ("run", "within", "times", "unit") if k in texts}
    for k, x in numbers.items():
        if not isinstance(x, int | float) or isinstance(x, bool) or not 0.0 <= x < math.inf:
            raise texts[k].error(f"{x!r} is not a number of elements")
    size = inputs[p].itemsize
    run = max(1.0, float(numbers["run"])) * size
    return Scattered(
        operand=p,
        elements=polynomial(texts["elements"], scope),
        itemsize=size,
        run=run,
        unit=max(1.0, float(numbers.get("unit", numbers["run"]))) * size,
        within=float(numbers["within"]) * size,
        times=float(numbers["times"]),
        counted=name in template.reads,
    )


def precision(template: Template, names: Names) -> str:
    """`high` or `highest` where a product asks for it, else nothing."""
    if template.precision is None:
        return ""
    value = template.precision(names)
    words = value if isinstance(value, tuple) else (value,)
    asked = {_PRESETS.get(str(w), str(w).lower()) for w in words}
    return next((w for w in ("highest", "high") if w in asked), "")
