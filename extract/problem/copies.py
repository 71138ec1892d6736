"""Copies: the cheapest way from any layout of a tensor to any other, for every tensor type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import (
    LOCAL,
    carried_as,
    collective_seconds,
    collective_wire_bytes,
)
from tapestry_egg.machine.energy import collective_joules
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Change
from tapestry_egg.shard.strategies import ChangeRow

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class CopyTable:
    """Shortest copies of one tensor type between the numbered layouts `layouts`.

    `seconds[a, b]`, `joules`, `wire` (bytes sent per device) of the cheapest path by seconds, inf
    where there is none; `local` of its seconds pass within a device. `scratch[a, b]`: bytes of the
    largest intermediate block on the way.
    """

    tensor: TensorType
    layouts: tuple[Layout, ...]
    local_bytes: NDArray[np.int64]  # [layouts], on one device
    seconds: Matrix  # [from, to]
    local: Matrix  # [from, to], seconds
    joules: Matrix  # [from, to], of all devices
    wire: Matrix  # [from, to], bytes per device
    scratch: Matrix  # [from, to], bytes on one device
    following: NDArray[np.int64]  # [from, to], next layout on the path
    step_of: dict[tuple[int, int], Change]

    @cached_property
    def number(self) -> dict[Layout, int]:
        return {layout: i for i, layout in enumerate(self.layouts)}

    @cached_property
    def in_place(self) -> NDArray[np.bool_]:
        """[a, b]: whether b is a with partial values reduced, nothing else: XLA's all-reduce may
        write where it reads."""
        return np.array(
            [
                [a.dims == b.dims and set(b.partial) < set(a.partial) for b in self.layouts]
                for a in self.layouts
            ],
            dtype=np.bool_,
        ).reshape(len(self.layouts), len(self.layouts))

    @cached_property
    def combines(self) -> NDArray[np.bool_]:
        """[a, b]: whether partial values of a are combined on the way to b."""
        return np.array(
            [[bool(set(a.partial) - set(b.partial)) for b in self.layouts] for a in self.layouts],
            dtype=np.bool_,
        ).reshape(len(self.layouts), len(self.layouts))

    def path(self, source: Layout, target: Layout) -> tuple[Change, ...]:
        """The elementary steps of the cheapest copy."""
        a, b = self.number[source], self.number[target]
        steps = []
        while a != b:
            nxt = int(self.following[a, b])
            steps.append(self.step_of[a, nxt])
            a = nxt
        return tuple(steps)


@dataclass
class StepCosts:
    """What single changes of layout cost on a machine, each worked out once."""

    mesh: MeshShape
    target: Target
    _seconds: dict[tuple[str, float, tuple[int, ...]], float] = field(default_factory=dict)
    _joules: dict[tuple[str, float, tuple[int, ...]], float] = field(default_factory=dict)

    def seconds(self, kind: str, local_bytes: float, axes: tuple[int, ...]) -> float:
        key = (kind, local_bytes, axes)
        if key not in self._seconds:
            self._seconds[key] = collective_seconds(*key, self.mesh, self.target)
        return self._seconds[key]

    def joules(self, kind: str, local_bytes: float, axes: tuple[int, ...]) -> float:
        key = (kind, local_bytes, axes)
        if key not in self._joules:
            self._joules[key] = collective_joules(*key, self.mesh, self.target)
        return self._joules[key]


def copy_table(
    tensor: TensorType,
    layouts: Sequence[Layout],
    changes: Sequence[ChangeRow],
    monoids: Sequence[str],
    costs: StepCosts,
) -> CopyTable:
    """All-pairs shortest copies over the elementary changes that the rules derived.

    Only layouts that divide the tensor evenly take part. Ties in seconds go to fewer wire bytes.
    """
    mesh = costs.mesh
    usable = tuple(
        x for x in layouts if len(x.dims) == tensor.rank and x.divides(tensor.shape, mesh)
    )
    number = {layout: i for i, layout in enumerate(usable)}
    n = len(usable)
    local = np.array(
        [int(np.prod(x.local_shape(tensor.shape, mesh), dtype=np.int64)) for x in usable],
        dtype=np.int64,
    ).reshape(n) * max(tensor.itemsize, 1)
    seconds, inside, joules, wire, scratch = (np.full((n, n), np.inf) for _ in range(5))
    for matrix in (seconds, inside, joules, wire, scratch):
        np.fill_diagonal(matrix, 0.0)
    step_of: dict[tuple[int, int], Change] = {}
    for change in changes:
        a, b = number.get(change.source), number.get(change.target)
        if a is None or b is None:
            continue
        step = _step(change, monoids)
        kind = carried_as(step.kind, step.monoid, tensor.dtype)
        cost = costs.seconds(kind, float(local[a]), change.axes)
        if cost < seconds[a, b]:
            seconds[a, b] = cost
            inside[a, b] = cost if kind in LOCAL else 0.0
            group = mesh.parts(change.axes)
            wire[a, b] = collective_wire_bytes(kind, float(local[a]), group)
            joules[a, b] = costs.joules(kind, float(local[a]), change.axes)
            scratch[a, b] = 0.0
            step_of[a, b] = step
    following = np.where(np.isfinite(seconds), np.arange(n)[None, :], -1)
    for k in range(n):
        through = seconds[:, k, None] + seconds[None, k, :]
        via = np.maximum(np.maximum(scratch[:, k, None], scratch[None, k, :]), float(local[k]))
        equal = np.isfinite(seconds) & (through <= seconds * (1 + 1e-12))
        more = wire[:, k, None] + wire[None, k, :]
        better = (through < seconds * (1 - 1e-12)) | (equal & (more < wire * (1 - 1e-12)))
        better[k, :] = better[:, k] = False
        if not better.any():
            continue
        seconds[better] = through[better]
        inside[better] = (inside[:, k, None] + inside[None, k, :])[better]
        wire[better] = more[better]
        joules[better] = (joules[:, k, None] + joules[None, k, :])[better]
        scratch[better] = via[better]
        following[better] = np.broadcast_to(following[:, k, None], (n, n))[better]
    found = (seconds, inside, joules, wire, scratch)
    return CopyTable(tensor, usable, local, *found, following, step_of)


def _step(change: ChangeRow, monoids: Sequence[str]) -> Change:
    dim = change.dim if change.dim >= 0 else None
    if change.kind in ("all_reduce", "reduce_scatter", "to_partial"):
        return Change(change.kind, change.axes, dim, monoid=monoids[change.other])
    other = change.other if change.other >= 0 else None
    return Change(change.kind, change.axes, dim, other)
