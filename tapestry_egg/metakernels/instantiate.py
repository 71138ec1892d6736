"""From a template, parameters and operand types to an operation projection signature."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.scopes import Inner, Names, Scope
from tapestry_egg.metakernels.language.template import (
    ProjectionForm,
    RowsText,
    Template,
)
from tapestry_egg.metakernels.signatures.parameters import plain
from tapestry_egg.metakernels.signatures.signature import (
    AROUND,
    Elements,
    OperationSignature,
    Passage,
    Polynomial,
)
from tapestry_egg.metakernels.signatures.values import MOST_DIMS, Cost, Row, is_extent
from tapestry_egg.monoids import monoids, single_monoids
from tapestry_egg.zspace import Projection, ZRange

from .binding import Spans, bind_names, places, ports
from .index_space import IndexSpace, index_space
from .pricing import blocks, measured, polynomial, precision, scattered, scratch, spilled, steps

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
        read_at=_places(template, template.read_at, inputs),
        parts=_flag(template.parts, names),
        dilates=_flag(template.dilates, names),
        adds=_flag(template.adds, names),
        rounds_as_one=_flag(template.rounds_as_one, names),
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
    return _fitting(template, kernel, params, inputs)[0]


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
    names, spans = _fitting(template, kernel, params, inputs)
    return names, spans, _output_types(template, names)


def _fitting(
    template: Template, kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> tuple[Names, Spans]:
    names, spans = bind_names(template, kernel, params, inputs)
    if template.when is not None and not template.when(names):
        raise Mismatch(f"`when: {template.when.text}` does not hold")
    return names, spans


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
