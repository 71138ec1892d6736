"""The layout algebra of one mesh: every layout numbered, and how layouts compose and change.

What the rules reason with is here as plain relations over numbers, per tensor rank:

* an *axis list* is an ordered choice of mesh axes, `(x)`, `(y)`, `(x, y)`, `(y, x)`, ...;
* `sharded(rank, k, list)`, `pending(rank, monoid, list)` and `replicated(rank)` name layouts;
* `compose(l1, l2)` puts the axes of two layouts with disjoint axes onto one tensor. Undefined when
  both cut the same dim (the blocks of such a composition are not one box per device in general) or
  are partial under different monoids;
* `cut(l, k, list, base)` says that l is base with `list` appended minor-most to dim k, and
  `partial(l, monoid, list, base)` that l is base with `list` pending under the monoid;
* `cut-several(l, list, base)` says that l is base with the axes of `list` appended to several dims,
  in the order of the dims;
* `same-blocks(l1, l2, list, -1, -1)` says that every block of l2 is a block of l1, held by as many
  devices, which one permute over `list` brings to those that hold it in l2; with two dims in place
  of -1, that permutes of pieces do so, which move a part of a mesh axis from one dim to another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, permutations, product
from math import comb, prod

from .ids import LayoutId
from .layout import Layout, MeshShape, permuted_axes, pieces_moved

Row = tuple[int, ...]


def count_layouts(axes: int, rank: int, monoids: int = 1) -> int:
    """How many layouts a tensor has on a mesh of so many axes: some of them cut its dims, in any
    order, and others may be partial under one monoid."""
    return sum(
        comb(axes, cut)
        * prod(rank + i for i in range(cut))
        * (1 + monoids * (2 ** (axes - cut) - 1))
        for cut in range(axes + 1)
    )


@dataclass(frozen=True)
class LayoutAlgebra:
    """All layouts of tensors of the given ranks on one mesh, numbered from 0."""

    mesh: MeshShape
    ranks: tuple[int, ...]
    monoids: tuple[str, ...]

    @cached_property
    def axis_lists(self) -> tuple[tuple[int, ...], ...]:
        """Every ordered non-empty choice of mesh axes, shorter ones first."""
        n = len(self.mesh.sizes)
        return tuple(p for size in range(1, n + 1) for p in permutations(range(n), size))

    @cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts by number, rank by rank; the replicated layout of a rank comes first."""
        found: list[Layout] = []
        for rank in self.ranks:
            found.extend(self._of_rank(rank))
        return tuple(found)

    def _of_rank(self, rank: int) -> list[Layout]:
        axes = range(len(self.mesh.sizes))
        out: dict[Layout, None] = {}
        states = [-2, -1, *range(rank)]  # -2 replicated, -1 partial, k cut
        for order in permutations(axes):
            for choice in product(states, repeat=len(order)):
                dims: list[tuple[int, ...]] = [()] * rank
                pending = []
                for axis, state in zip(order, choice, strict=True):
                    if state >= 0:
                        dims[state] = (*dims[state], axis)
                    elif state == -1:
                        pending.append(axis)
                for monoid in self.monoids if pending else (None,):
                    out[Layout(tuple(dims), tuple(sorted(pending)), monoid)] = None
        return list(out)

    @cached_property
    def number(self) -> dict[Layout, LayoutId]:
        """Layout -> its number."""
        return {layout: LayoutId(i) for i, layout in enumerate(self.layouts)}

    @cached_property
    def monoid_number(self) -> dict[str, int]:
        return {m: i for i, m in enumerate(self.monoids)}

    def mask(self, axes: tuple[int, ...]) -> int:
        return sum(1 << a for a in axes)

    def facts(self) -> dict[str, list[Row]]:
        """The algebra as rows of integers, one list per relation of `rules/language/schema.egg`."""
        lists = self.axis_lists
        axes_rows: list[Row] = [(i, self.mesh.parts(a), self.mask(a)) for i, a in enumerate(lists)]
        replicated: list[Row] = []
        sharded: list[Row] = []
        pending: list[Row] = []
        for rank in self.ranks:
            whole = Layout.replicated(rank)
            replicated.append((rank, self.number[whole]))
            for i, axes in enumerate(lists):
                for k in range(rank):
                    cut = Layout(whole.dims[:k] + (axes,) + whole.dims[k + 1 :])
                    sharded.append((rank, k, i, self.number[cut]))
                for m in self.monoids:
                    part = Layout(whole.dims, tuple(sorted(axes)), m)
                    pending.append((rank, self.monoid_number[m], i, self.number[part]))
        return {
            "axes": axes_rows,
            "replicated": replicated,
            "sharded": sharded,
            "pending": pending,
            "compose": list(self._compositions()),
            "cut": list(self._cuts()),
            "partial": list(self._partials()),
            "cut-several": list(self._cuts_of_several()),
            "same-blocks": list(self._same_blocks()),
        }

    def _by_rank(self) -> dict[int, list[Layout]]:
        groups: dict[int, list[Layout]] = {rank: [] for rank in self.ranks}
        for layout in self.layouts:
            groups[len(layout.dims)].append(layout)
        return groups

    def _compositions(self) -> set[tuple[LayoutId, LayoutId, LayoutId]]:
        rows = set()
        for group in self._by_rank().values():
            used = [self.mask(x.axes) for x in group]
            cut = [sum(1 << k for k, axes in enumerate(x.dims) if axes) for x in group]
            told = [(x, self.number[x], u, c) for x, u, c in zip(group, used, cut, strict=True)]
            for (one, a, axes, dims), (two, b, others, their) in product(told, repeat=2):
                if axes & others or dims & their:
                    continue
                if one.monoid and two.monoid and one.monoid != two.monoid:
                    continue
                both = Layout(
                    tuple([x or y for x, y in zip(one.dims, two.dims, strict=True)]),
                    tuple(sorted(one.partial + two.partial)),
                    one.monoid or two.monoid,
                )
                rows.add((a, b, self.number[both]))
        return rows

    def _cuts(self) -> set[tuple[LayoutId, int, int, LayoutId]]:
        rows = set()
        for layout in self.layouts:
            for k, axes in enumerate(layout.dims):
                for keep in range(len(axes)):
                    base = Layout(
                        layout.dims[:k] + (axes[:keep],) + layout.dims[k + 1 :],
                        layout.partial,
                        layout.monoid,
                    )
                    which = self.axis_lists.index(axes[keep:])
                    rows.add((self.number[layout], k, which, self.number[base]))
        return rows

    def _partials(self) -> set[tuple[LayoutId, int, int, LayoutId]]:
        rows = set()
        for layout in self.layouts:
            if layout.monoid is None:
                continue
            for which, axes in enumerate(self.axis_lists):
                if not set(axes) <= set(layout.partial):
                    continue
                rest = tuple(a for a in layout.partial if a not in axes)
                base = Layout(layout.dims, rest, layout.monoid if rest else None)
                rows.add(
                    (
                        self.number[layout],
                        self.monoid_number[layout.monoid],
                        which,
                        self.number[base],
                    )
                )
        return rows

    def _cuts_of_several(self) -> Iterator[tuple[LayoutId, int, LayoutId]]:
        which = {axes: i for i, axes in enumerate(self.axis_lists)}
        for x in self.layouts:
            for kept in product(*(range(len(axes) + 1) for axes in x.dims)):
                cut = [axes[n:] for axes, n in zip(x.dims, kept, strict=True)]
                if sum(map(bool, cut)) > 1:
                    dims = tuple(axes[:n] for axes, n in zip(x.dims, kept, strict=True))
                    base = Layout(dims, x.partial, x.monoid)
                    yield self.number[x], which[tuple(chain(*cut))], self.number[base]

    def _same_blocks(self) -> Iterator[tuple[LayoutId, LayoutId, int, int, int]]:
        alike: dict[object, list[Layout]] = {}
        for x in self.layouts:
            key = len(x.dims), prod(map(self.mesh.parts, x.dims)), x.partial, x.monoid
            alike.setdefault(key, []).append(x)
        which = {axes: i for i, axes in enumerate(self.axis_lists)}
        for group in alike.values():
            for a, b in permutations(group, 2):
                dims = pieces_moved(a, b, self.mesh)
                if dims and (axes := permuted_axes(a, b, self.mesh)):
                    yield self.number[a], self.number[b], which[axes], *dims
