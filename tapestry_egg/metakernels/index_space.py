"""The index space of one operation: declared index dims, and dims of the inputs to be reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.scopes import Scope
from tapestry_egg.metakernels.language.template import (
    Reduction,
    Template,
)
from tapestry_egg.metakernels.signatures.signature import (
    IndexDim,
    Role,
)
from tapestry_egg.metakernels.signatures.values import MOST_DIMS, RoleOf, Row
from tapestry_egg.monoids import monoids

from .binding import Spans, extents_of, places

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
