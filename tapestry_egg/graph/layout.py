"""Layouts: how a tensor lies over the axes of a device mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

from tapestry_egg.errors import TargetError

from .blockgraph import TensorType


@dataclass(frozen=True, slots=True)
class MeshAxes:
    """Ordered axes of devices with names and sizes. Axis numbers index both.

    Devices are laid row-major, so the last axis is the innermost (fastest links).
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.names) != len(self.sizes) or any(s < 1 for s in self.sizes):
            raise TargetError(f"mesh axes {self.names} do not fit sizes {self.sizes}")
        if len(set(self.names)) < len(self.names):
            raise TargetError(
                f"mesh axes {self.names}: two have one name",
                hint="Give each a name of its own, such as ('x', 'y').",
            )

    @property
    def devices(self) -> int:
        return prod(self.sizes)

    @property
    def size(self) -> dict[str, int]:
        """Axis name -> its size."""
        return dict(zip(self.names, self.sizes, strict=True))

    def __str__(self) -> str:
        return "×".join(f"{s}{n}" for n, s in zip(self.names, self.sizes, strict=True)) or "1"


@dataclass(frozen=True, slots=True)
class MeshShape(MeshAxes):
    """A logical device mesh, as a plan lays tensors over it."""

    def parts(self, axes: tuple[int, ...]) -> int:
        """Number of blocks that the given axes cut something into."""
        count = 1
        for a in axes:
            count *= self.sizes[a]
        return count


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the blocks of one tensor are, and whether they are partial values.

    `dims[k]` lists the mesh axes that cut tensor dim k, major to minor; `partial` lists the axes
    over which the devices hold partial values still to be combined with `monoid`. Axes in neither
    hold replicas. An axis occurs at most once.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()
    monoid: str | None = None

    @staticmethod
    def replicated(rank: int) -> Layout:
        return Layout(((),) * rank)

    @property
    def axes(self) -> tuple[int, ...]:
        """Every axis in use, sharded or partial."""
        return tuple(a for d in self.dims for a in d) + self.partial

    def local_shape(self, shape: tuple[int, ...], mesh: MeshShape) -> tuple[int, ...]:
        """Shape of a device's block: ⌈N/n⌉ per dim, the largest one where n does not divide."""
        return tuple([-(-n // mesh.parts(axes)) for n, axes in zip(shape, self.dims, strict=True)])

    def block(self, tensor: TensorType, mesh: MeshShape) -> TensorType:
        """What a device holds of a tensor: the largest block."""
        return TensorType(self.local_shape(tensor.shape, mesh), tensor.dtype)

    def divides(self, shape: tuple[int, ...], mesh: MeshShape) -> bool:
        """Whether every block has the same shape."""
        return all([n % mesh.parts(axes) == 0 for n, axes in zip(shape, self.dims, strict=True)])

    def show(self, mesh: MeshShape) -> str:
        """`[x, ., y] +sum(z)`: one entry per dim, `.` uncut, then the pending monoid."""
        body = ", ".join("·".join(mesh.names[a] for a in axes) or "." for axes in self.dims)
        tail = (
            f" +{self.monoid}({','.join(mesh.names[a] for a in self.partial)})"
            if self.partial
            else ""
        )
        return f"[{body}]{tail}"


def permuted_axes(source: Layout, target: Layout, mesh: MeshShape) -> tuple[int, ...]:
    """The axes over which permutes turn a layout into another of as many blocks, partial over the
    same axes: those that cut dims of `source` first, in their order, then others.

    A device's place along these axes, major to minor, is the place of the device that its block
    goes to along `permuted_to(axes, target.dims)`. Axes that keep their place are
    left out if blocks stay whole.
    """
    used, wanted = ([a for d in x.dims for a in d] for x in (source, target))
    free = [a for a in range(len(mesh.sizes)) if a not in (*used, *source.partial)]
    before = [*used, *(a for a in free if a in wanted), *(a for a in free if a not in wanted)]
    after = permuted_to(before, target.dims)

    def place(a: int, order: Sequence[int]) -> int:
        return mesh.parts(tuple(order[: order.index(a)]))

    whole = [mesh.parts(x) for x in source.dims] == [mesh.parts(x) for x in target.dims]
    cut = () if whole else (*used, *wanted)
    moved = [a for a in before if a in cut or place(a, before) != place(a, after)]
    return tuple(a for a in moved if mesh.sizes[a] > 1)


def pieces_moved(source: Layout, target: Layout, mesh: MeshShape) -> tuple[int, int] | None:
    """The dims between which permutes of pieces move a part of a mesh axis: the first is cut into
    that many times fewer blocks, the second into as many more. (-1, -1) if blocks stay whole; None
    if more dims change, or whole axes can move.
    """
    parts = [(mesh.parts(a), mesh.parts(b)) for a, b in zip(source.dims, target.dims, strict=True)]
    changed = [k for k, (a, b) in enumerate(parts) if a != b]
    if not changed:
        return -1, -1
    if len(changed) != 2:
        return None
    one, other = sorted(changed, key=lambda k: parts[k][1] - parts[k][0])
    (a, b), (c, d) = parts[one], parts[other]
    if a * c != b * d or a % b or mesh.devices == 1:
        return None
    axes = source.dims[one]
    some = (x for n in range(1, len(axes) + 1) for x in combinations(axes, n))
    return None if any(mesh.parts(x) == a // b for x in some) else (one, other)


def permuted_to(axes: Sequence[int], dims: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The axes of a permute in the order in which `dims` has them; others come last."""
    wanted = [a for d in dims for a in d if a in axes]
    return (*wanted, *(a for a in axes if a not in wanted))
