"""Copies: the cheapest way from any layout of a tensor to any other, for every tensor type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.arrays import kind as kind_of
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import (
    LOCAL,
    carried_as,
    collective_seconds,
    collective_wire_bytes,
    turning_seconds,
)
from tapestry_egg.machine.energy import collective_joules, turning_joules
from tapestry_egg.machine.target import Target
from tapestry_egg.machine.tiles import stored_bytes
from tapestry_egg.plans.collectives import turns
from tapestry_egg.plans.plan import Change
from tapestry_egg.shard.strategies import ChangeRow

Matrix = NDArray[np.float64]
#: What in float32 is more than so many times another is more than it: sums of two are off by three
#: roundings of 2**-24, what they are compared with by two.
_ROUGHLY = np.float32(1 + 2**-20)
#: The parts of what is known of a copy's collectives: their number, and of which kinds there are.
_COUNT, _GATHERED, _SCATTERED = 2**16 - 1, 2**16, 2**17


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
    held_bytes: NDArray[np.int64]  # [layouts], the same in the target's tiles
    seconds: Matrix  # [from, to]
    local: Matrix  # [from, to], seconds
    joules: Matrix  # [from, to], of all devices
    wire: Matrix  # [from, to], bytes per device
    scratch: Matrix  # [from, to], bytes on one device
    # [layouts]: seconds, and joules of all devices, of a kernel that turns a block's dims
    turn_seconds: Matrix
    turn_joules: Matrix
    following: NDArray[np.int64]  # [from, to], next layout on the path
    step_of: dict[tuple[int, int], Change]

    @cached_property
    def number(self) -> dict[Layout, int]:
        return {layout: i for i, layout in enumerate(self.layouts)}

    @cached_property
    def _sums(self) -> tuple[NDArray[np.int64], list[frozenset[int]]]:
        """[layouts]: the number of what each is partial over, and what that is."""
        number = {x: k for k, x in enumerate(dict.fromkeys(x.partial for x in self.layouts))}
        sums = np.array([number[x.partial] for x in self.layouts], dtype=np.int64)
        return sums, [frozenset(x) for x in number]

    @cached_property
    def in_place(self) -> NDArray[np.bool_]:
        """[a, b]: whether b is a with partial values reduced, nothing else: XLA's all-reduce may
        write where it reads."""
        dims = {x: k for k, x in enumerate(dict.fromkeys(x.dims for x in self.layouts))}
        own = np.array([dims[x.dims] for x in self.layouts], dtype=np.int64)
        sums, over = self._sums
        fewer = np.array([[b < a for b in over] for a in over], dtype=np.bool_)
        return np.asarray((own[:, None] == own) & fewer[sums[:, None], sums])

    @cached_property
    def combines(self) -> NDArray[np.bool_]:
        """[a, b]: whether partial values of a are combined on the way to b."""
        sums, over = self._sums
        some = np.array([[bool(a - b) for b in over] for a in over], dtype=np.bool_)
        return np.asarray(some[sums[:, None], sums])

    @cached_property
    def sends(self) -> NDArray[np.int64]:
        """[a, b]: of how many collectives the cheapest copy is made; 0 where there is none."""
        return self._on_the_way & _COUNT

    @cached_property
    def turned(self) -> NDArray[np.bool_]:
        """[a, b]: whether something is gathered on the way along a dim that is not the first: what
        devices have comes one after another in memory, and so that dim first."""
        return (self._on_the_way & _GATHERED) > 0

    @cached_property
    def turned_before(self) -> NDArray[np.bool_]:
        """[a, b]: whether a sum is scattered on the way along a dim that is not the first."""
        return (self._on_the_way & _SCATTERED) > 0

    @cached_property
    def _on_the_way(self) -> NDArray[np.int64]:
        """[a, b]: how many collectives the cheapest copy takes, and whether such as turn are among
        them, each a part of the number; 0 where there is none."""
        count, turning = np.zeros_like(self.following), np.zeros_like(self.following)
        for (a, b), step in self.step_of.items():
            count[a, b] = step.kind not in LOCAL
            if turns(step, self.tensor.shape):
                turning[a, b] = _GATHERED
            elif turns(step, self.tensor.shape, "reduce_scatter"):
                turning[a, b] = _SCATTERED
        found: NDArray[np.int64] = np.zeros_like(self.following)
        to = np.broadcast_to(np.arange(len(self.layouts)), self.following.shape)
        at = np.where(self.following < 0, to, to.T)
        left = np.flatnonzero(at != to)
        at, to = at.reshape(-1)[left], to.reshape(-1)[left]
        flat = found.reshape(-1)
        while left.size:
            after = self.following[at, to]
            flat[left] = (flat[left] + count[at, after]) | turning[at, after]
            more = after != to
            left, at, to = left[more], after[more], to[more]
        return found

    def turning(self, straight: bool, made: bool) -> tuple[tuple[Matrix, Matrix], ...]:
        """(seconds, joules), [a, b] each: of turning what is gathered for a reader that wants it
        `straight`, its own copy or one that is kept; and of turning what lies straight when it is
        `made`, before a sum is scattered."""
        after, before = straight & self.turned, made & self.turned_before
        return tuple(
            (np.where(after, x[None, :], 0.0), np.where(before, x[:, None], 0.0))
            for x in (self.turn_seconds, self.turn_joules)
        )

    @cached_property
    def collects(self) -> NDArray[np.bool_]:
        """[a, b]: whether all that is done on the way from a to b is that what is spread out over
        devices is gathered, or combined and perhaps left in parts."""
        every = dict.fromkeys(d for x in self.layouts for d in x.dims)
        cuts = {axes: k for k, axes in enumerate(every)}
        sums, over = self._sums
        fits = np.array(
            [
                [
                    [
                        fewer == axes[: len(fewer)]
                        or (fewer[: len(axes)] == axes and combined.issuperset(fewer[len(axes) :]))
                        for fewer in cuts
                    ]
                    for axes in cuts
                ]
                for combined in over
            ],
            dtype=np.bool_,
        ).reshape(len(over), len(cuts), len(cuts))  # a scalar has no dims
        whole = np.array([not x.partial for x in self.layouts], dtype=np.bool_)
        found = np.broadcast_to(whole[None, :], (len(self.layouts),) * 2).copy()
        for k in range(len(self.tensor.shape)):
            at = np.array([cuts[x.dims[k]] for x in self.layouts], dtype=np.int64)
            found &= fits[sums[:, None], at[:, None], at[None, :]]
        return found

    def making(
        self,
        size: NDArray[np.int64],
        have: NDArray[np.int64],
        need: NDArray[np.int64],
        free: bool,
        straight: bool,
    ) -> Matrix:
        """Bytes beside the produced array while a copy of it is made, blocks being of `size`.

        The copy and the largest block on the way; an all-reduce writes where it reads. Of a value
        that has no memory of its own (`free`) also what is sent: it must exist for that, and as it
        is produced, not as it lies in the place of what it takes over; of one that lies `straight`
        what a scattered sum is turned to before.
        """
        wire = self.wire[have, need]
        legal, sent = np.isfinite(wire) & (have != need), np.isfinite(wire) & (wire > 0)
        extra = np.where(self.in_place[have, need], 0.0, 1.0 * size[need])
        extra = extra + np.where(legal, self.scratch[have, need], 0.0)
        if straight:
            extra = extra + np.where(self.turned_before[have, need], 1.0 * size[have], 0.0)
        if free:
            extra = extra + np.where(sent, 1.0 * size[have], 0.0)
        return np.where(legal, extra, 0.0)

    def of(self, tensor: TensorType) -> CopyTable:
        """The same for another tensor, in arrays of its own: parts of a problem are known by
        theirs."""
        every = {x.name: getattr(self, x.name) for x in fields(self)}
        own: dict[str, Any] = {
            name: x.copy() for name, x in every.items() if isinstance(x, np.ndarray)
        }
        return replace(self, tensor=tensor, **own)

    def path(self, source: Layout, target: Layout) -> tuple[Change, ...]:
        """The elementary steps of the cheapest copy."""
        a, b = self.number[source], self.number[target]
        steps = []
        while a != b:
            nxt = int(self.following[a, b])
            steps.append(self.step_of[a, nxt])
            a = nxt
        return tuple(steps)


@dataclass(frozen=True)
class _Steps:
    """Changes of layout as steps of plans, from and to which places among the layouts, -1 where
    they are none of these."""

    changes: Sequence[ChangeRow]
    steps: tuple[Change, ...]
    source: NDArray[np.int64]  # [changes]
    target: NDArray[np.int64]  # [changes]


@dataclass
class StepCosts:
    """What single changes of layout cost on a machine, each worked out once; and tables of them,
    of which tensors of equal blocks have equal ones."""

    mesh: MeshShape
    target: Target
    tables: dict[tuple[object, ...], CopyTable] = field(default_factory=dict)
    _seconds: dict[tuple[str, float, tuple[int, ...]], float] = field(default_factory=dict)
    _joules: dict[tuple[str, float, tuple[int, ...]], float] = field(default_factory=dict)
    _steps: dict[int, _Steps] = field(default_factory=dict)

    def steps(
        self, layouts: Sequence[Layout], changes: Sequence[ChangeRow], monoids: Sequence[str]
    ) -> _Steps:
        """The changes among some layouts, all tensors of which have the very same lists."""
        found = self._steps.get(id(changes))
        if found is None:
            place = {layout: k for k, layout in enumerate(layouts)}
            ends = [(place.get(c.source, -1), place.get(c.target, -1)) for c in changes]
            source, target = np.array(ends, dtype=np.int64).reshape(-1, 2).T
            steps = tuple(_step(c, monoids) for c in changes)
            found = self._steps[id(changes)] = _Steps(changes, steps, source, target)
        return found

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
    places = [
        k
        for k, x in enumerate(layouts)
        if len(x.dims) == tensor.rank and x.divides(tensor.shape, mesh)
    ]
    usable = tuple(layouts[k] for k in places)
    blocks = [x.local_shape(tensor.shape, mesh) for x in usable]
    item, tiles = max(tensor.itemsize, 1), costs.target.tiles
    local = np.array([prod(b) * item for b in blocks], dtype=np.int64)
    held = np.array([stored_bytes(b, item, tiles) for b in blocks], dtype=np.int64)
    key = (usable, kind_of(tensor.dtype), local.tobytes(), held.tobytes())
    if key in costs.tables:
        return costs.tables[key].of(tensor)
    n = len(usable)
    seconds, inside, joules, wire, scratch = (np.full((n, n), np.inf) for _ in range(5))
    for matrix in (seconds, inside, joules, wire, scratch):
        np.fill_diagonal(matrix, 0.0)
    step_of: dict[tuple[int, int], Change] = {}
    every, number = costs.steps(layouts, changes, monoids), np.full(len(layouts) + 1, -1)
    number[places] = np.arange(n)
    source, target = number[every.source], number[every.target]
    within = np.flatnonzero((source >= 0) & (target >= 0))
    ends = zip(source[within].tolist(), target[within].tolist(), strict=True)
    carried: dict[tuple[str, str | None], str] = {}
    sizes = local.astype(np.float64).tolist()
    for c, (a, b) in zip(within.tolist(), ends, strict=True):
        step = every.steps[c]
        how = step.kind, step.monoid
        if how not in carried:
            carried[how] = carried_as(*how, tensor.dtype)
        kind = carried[how]
        cost = costs.seconds(kind, sizes[a], step.axes)
        if cost < seconds[a, b]:
            seconds[a, b] = cost
            inside[a, b] = cost if kind in LOCAL else 0.0
            wire[a, b] = collective_wire_bytes(kind, sizes[a], mesh.parts(step.axes))
            joules[a, b] = costs.joules(kind, sizes[a], step.axes)
            scratch[a, b] = 0.0
            step_of[a, b] = step
    following = np.where(np.isfinite(seconds), np.arange(n)[None, :], -1)
    found = (seconds, inside, joules, wire, scratch)
    _shorten(*found, following, held)
    amounts = local.astype(np.float64)
    turned = (
        turning_seconds(amounts, costs.target),
        turning_joules(amounts, mesh.devices, costs.target),
    )
    table = CopyTable(tensor, usable, local, held, *found, *turned, following, step_of)
    costs.tables[key] = table
    return table


def _shorten(
    seconds: Matrix,
    inside: Matrix,
    joules: Matrix,
    wire: Matrix,
    scratch: Matrix,
    following: NDArray[np.int64],
    held: NDArray[np.int64],
) -> None:
    """Make single steps into shortest paths, in place, by way of one layout after the other (Floyd
    and Warshall); ties in seconds go to fewer wire bytes.

    Most ways through a layout are longer than what is known, and only their seconds are looked at,
    in float32. Layouts of small blocks come first: most shortest paths lead through these, so that
    few ways are found that others beat later (of meshes of three axes in three quarters of the
    time).
    """
    n = len(seconds)
    # What is less than the first takes less, than the second no more, but for rounding.
    less, most = 1 - 1e-12, 1 + 1e-12
    # In half the bytes and time all ways are looked at that may be as short, and others as well.
    rough = seconds.astype(np.float32)
    limit = np.where(np.isfinite(rough), rough * _ROUGHLY, np.finfo(np.float32).max)
    through, near = np.empty_like(rough), np.empty((n, n), dtype=np.bool_)
    # By place, a * n + b; all are views.
    time, about, least, sent = (x.reshape(-1) for x in (seconds, rough, limit, wire))
    own, energy, block, first = (x.reshape(-1) for x in (inside, joules, scratch, following))
    for k in np.argsort(held, kind="stable").tolist():
        np.add(rough[:, k, None], rough[None, k, :], out=through)
        np.less_equal(through, limit, out=near)
        near[k, :] = near[:, k] = False
        here = np.flatnonzero(near)
        if not here.size:
            continue
        left = here // n
        to, onward = left * n + k, here + (k - left) * n
        now, more = time[to] + time[onward], sent[to] + sent[onward]
        known = time[here]
        better = (now < known * less) | ((now <= known * most) & (more < sent[here] * less))
        if not better.any():
            continue
        here, now, more, to, onward = (x[better] for x in (here, now, more, to, onward))
        time[here], sent[here] = now, more
        about[here] = now
        least[here] = about[here] * _ROUGHLY
        own[here] = own[to] + own[onward]
        energy[here] = energy[to] + energy[onward]
        block[here] = np.maximum(np.maximum(block[to], block[onward]), float(held[k]))
        first[here] = first[to]


def _step(change: ChangeRow, monoids: Sequence[str]) -> Change:
    dim = change.dim if change.dim >= 0 else None
    if change.kind in ("all_reduce", "reduce_scatter", "to_partial"):
        return Change(change.kind, change.axes, dim, monoid=monoids[change.other])
    other = change.other if change.other >= 0 else None
    return Change(change.kind, change.axes, dim, other)
