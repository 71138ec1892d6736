"""The mesh that the user names: a contract about what crosses the program's boundary.

A plan may divide a named axis further (`data` of 8 as `data0` of 2 and `data1` of 4), or take
neighbouring axes as one, since devices are laid row-major on both. At the boundary only layouts
count that the user's own axes can express: a plan's axes cut a dim there only as whole axes of the
user's, in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import prod

from tapestry_egg.graph.layout import Layout, MeshAxes, MeshShape

from .topology import factorizations

# A plan's mesh has at most so many axes where the user's has more: with each further axis a tensor
# has some six times as many layouts. The front's notes count the meshes that this leaves out.
MOST_AXES = 3

Dims = tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class MeshContract(MeshAxes):
    """The axes of a user's mesh, major to minor, those of size 1 included."""

    def blocks(self, mesh: MeshShape) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] | None:
        """Which of the user's axes are which of a plan's: (one name, its axes), or (names, one
        axis that they make together). None where the plan's mesh is not made of the user's axes."""
        return _blocks(self, mesh)

    def resolve(self, names: Sequence[str], mesh: MeshShape) -> tuple[int, ...] | None:
        """The plan's axes that cut a dim which the user's `names` cut, major to minor; None where
        the plan's mesh cannot tell them apart or has no such axis."""
        size = self.size
        if any(n not in size for n in names):
            return None
        blocks = self.blocks(mesh)
        left = [n for n in names if size[n] > 1]
        axes: tuple[int, ...] = ()
        while left and blocks is not None:
            own, theirs = next(b for b in blocks if left[0] in b[0])
            if tuple(left[: len(own)]) != own:
                return None
            axes, left = axes + theirs, left[len(own) :]
        return None if left else axes

    def express(self, layout: Layout, mesh: MeshShape) -> Dims | None:
        """A layout in the user's own axes; None where they cannot express it."""
        blocks = self.blocks(mesh)
        if blocks is None or layout.partial:
            return None
        first = {axes[0]: (names, axes) for names, axes in blocks if axes}
        dims = []
        for axes in layout.dims:
            left = axes
            names: tuple[str, ...] = ()
            while left:
                block = first.get(left[0])
                if block is None or left[: len(block[1])] != block[1]:
                    return None
                names, left = names + block[0], left[len(block[1]) :]
            dims.append(names)
        return tuple(dims)

    def meshes(self, most: int) -> tuple[MeshShape, ...]:
        """The meshes of a plan: the user's own first, then those that divide its axes into at most
        `most` in all, or, of more axes than a plan can have, those that join neighbours."""
        own = [(n, s) for n, s in zip(self.names, self.sizes, strict=True) if s > 1]
        if not own:
            return (MeshShape(self.names[:1] or ("x",), (1,)),)
        found = [MeshShape(tuple(n for n, _ in own), tuple(s for _, s in own))]
        if len(own) > MOST_AXES:
            found += [self._joined(own, ends) for ends in _cuts(len(own), MOST_AXES)]
        for ways in product(*(factorizations(s, max(1, most - len(own) + 1)) for _, s in own)):
            if len(own) < sum(map(len, ways)) <= most:
                found.append(self._divided(own, ways))
        return tuple(found)

    def _divided(
        self, own: Sequence[tuple[str, int]], ways: Sequence[tuple[int, ...]]
    ) -> MeshShape:
        mark = ""
        while any(f"{n}{mark}{k}" in self.names for n, _ in own for k in range(8)):
            mark += "_"
        names = [
            n if len(way) == 1 else f"{n}{mark}{k}"
            for (n, _), way in zip(own, ways, strict=True)
            for k in range(len(way))
        ]
        return MeshShape(tuple(names), tuple(s for way in ways for s in way))

    def _joined(self, own: Sequence[tuple[str, int]], ends: Sequence[int]) -> MeshShape:
        parts = [own[a:b] for a, b in zip((0, *ends), (*ends, len(own)), strict=True)]
        return MeshShape(
            tuple("_".join(n for n, _ in part) for part in parts),
            tuple(prod(s for _, s in part) for part in parts),
        )


def _cuts(n: int, parts: int) -> list[tuple[int, ...]]:
    """Where to cut n axes into so many runs of neighbours."""
    if parts == 1:
        return [()]
    return [(*c, k) for k in range(parts - 1, n) for c in _cuts(k, parts - 1)]


@lru_cache(maxsize=256)
def _blocks(
    contract: MeshContract, mesh: MeshShape
) -> tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] | None:
    left = [(n, s) for n, s in zip(contract.names, contract.sizes, strict=True) if s > 1]
    axes = [a for a, s in enumerate(mesh.sizes) if s > 1]
    found: list[tuple[tuple[str, ...], tuple[int, ...]]] = []
    while left and axes:
        names, mine = [left[0][0]], [axes[0]]
        theirs, ours = left.pop(0)[1], mesh.sizes[axes.pop(0)]
        while theirs != ours:
            if theirs < ours and left:
                name, size = left.pop(0)
                names, theirs = [*names, name], theirs * size
            elif ours < theirs and axes:
                mine, ours = [*mine, axes[0]], ours * mesh.sizes[axes.pop(0)]
            else:
                return None
        if len(names) > 1 and len(mine) > 1:
            return None
        found.append((tuple(names), tuple(mine)))
    return None if left or axes else tuple(found)
