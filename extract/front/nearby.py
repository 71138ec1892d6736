"""Strategies on a mesh of more axes that lie near plans of fewer.

A mesh that divides an axis of another has all layouts of that one, and so many others that tables
of all of them are too large. Of these the ones are kept that differ from what some plan does in
where one of the axes goes: the others stay as they are there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Ints
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.shard.strategies import Saturated, StrategyRow

#: For each axis of a mesh, the axes of another that it is divided into, major to minor.
Division = tuple[tuple[int, ...], ...]


def division(coarse: MeshShape, fine: MeshShape) -> Division | None:
    """How a mesh divides the axes of another, in their order; None where it does not."""
    found: list[tuple[int, ...]] = []
    at = 0
    for size in coarse.sizes:
        own: list[int] = []
        parts = 1
        while parts < size and at < len(fine.sizes):
            parts *= fine.sizes[at]
            own.append(at)
            at += 1
        if parts != size:
            return None
        found.append(tuple(own))
    return tuple(found) if at == len(fine.sizes) else None


def nearby(
    found: Saturated, plans: Sequence[tuple[PlanProblem, Ints]], mesh: MeshShape
) -> Saturated:
    """Of what was derived on a mesh, the strategies near those of plans on meshes that it divides,
    each a problem and its labelling. `found` is of the same schedule as the problems."""
    axes, others = range(len(mesh.sizes)), _Others()
    near: list[set[tuple[int, object]]] = [set() for _ in found.strategies]
    for posed, rows in plans:
        parts = division(posed.choices.mesh, mesh)
        if parts is None:
            continue
        for i, row in _strategies(posed, rows):
            which, own = found.encoding.signature_of[i], _divided(row, parts)
            near[which] |= {(a, others.of(own, a)) for a in axes}
    kept = tuple(
        tuple(row for row in rows if any((a, others.of(row, a)) in wanted for a in axes)) or rows
        for rows, wanted in zip(found.strategies, near, strict=True)
    )
    return replace(found, strategies=kept, some=True)


def _strategies(posed: PlanProblem, rows: Ints) -> Iterator[tuple[int, StrategyRow]]:
    """What a labelling does with every instance."""
    choices = posed.choices
    for u, unit in enumerate(choices.schedule.units):
        row = int(posed.unit_row[u][rows[u]])
        for m, i in enumerate(unit.members):
            yield i, choices.strategy(i, int(choices.rows[u].choice[row, m]))


def _divided(row: StrategyRow, parts: Division) -> StrategyRow:
    """The same strategy over the axes that others are divided into."""

    def axes(before: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(b for a in before for b in parts[a])

    return StrategyRow(
        tuple(axes(cut) for cut in row.cuts),
        tuple((group, axes(over)) for group, over in row.passes),
        tuple(
            Layout(tuple(axes(d) for d in x.dims), tuple(sorted(axes(x.partial))), x.monoid)
            for x in row.layouts
        ),
    )


class _Others:
    """What strategies do with all axes but one; of layouts, which many strategies share, each told
    once, and numbered."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[Layout, int], int] = {}
        self._number: dict[object, int] = {}

    def of(self, row: StrategyRow, axis: int) -> object:
        return (
            tuple([_but(cut, axis) for cut in row.cuts]),
            tuple([self._layout(x, axis) for x in row.layouts]),
        )

    def _layout(self, layout: Layout, axis: int) -> int:
        found = self._layouts.get((layout, axis))
        if found is None:
            told = tuple(_but(d, axis) for d in layout.dims), _but(layout.partial, axis)
            found = self._number.setdefault(told, len(self._number))
            self._layouts[layout, axis] = found
        return found


def _but(axes: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return tuple([a for a in axes if a != axis]) if axis in axes else axes
