"""Layouts as JAX spells them: a `PartitionSpec` over the names of a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tapestry_egg.graph.layout import Layout, MeshShape

if TYPE_CHECKING:
    from jax.sharding import PartitionSpec


def partition_spec(layout: Layout, mesh: MeshShape) -> PartitionSpec:
    """JAX's spelling of a layout without partial values."""
    return spec_of([tuple(mesh.names[a] for a in axes) for axes in layout.dims])


def plain_spec(layout: Layout, mesh: MeshShape) -> list[str | list[str] | None]:
    """The entries of a `PartitionSpec` as JSON has them, so that `P(*entries)` is one."""
    cut = [[mesh.names[a] for a in axes] for axes in layout.dims]
    return [axes if len(axes) > 1 else axes[0] if axes else None for axes in cut]


def spec_of(dims: Sequence[tuple[str, ...]], typed: bool = False) -> PartitionSpec:
    """JAX's spelling of the names that cut each dim. Where layouts are parts of types it has an
    entry for every dim, elsewhere none for uncut ones at the end."""
    from jax.sharding import PartitionSpec

    return PartitionSpec(*map(_entry, dims if typed else _short(dims)))


def _entry(names: tuple[str, ...]) -> str | tuple[str, ...] | None:
    return names if len(names) > 1 else names[0] if names else None


def _short(dims: Sequence[tuple[str, ...]]) -> Sequence[tuple[str, ...]]:
    """Without the uncut dims at the end."""
    count = max((k + 1 for k, names in enumerate(dims) if names), default=0)
    return dims[:count]
