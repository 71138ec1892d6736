"""Copies: the cheapest way from any layout of a tensor to any other, for every tensor type."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
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
from tapestry_egg.machine.tiles import Tiles, stored_bytes
from tapestry_egg.plans.collectives import turns
from tapestry_egg.plans.plan import Change
from tapestry_egg.shard.strategies import ChangeRow

from .shortest import Ints, Matrix, between, shorten

#: The parts of what is known of a copy's collectives: their number, and of which kinds there are.
_COUNT, _GATHERED, _SCATTERED = 2**16 - 1, 2**16, 2**17


@dataclass(frozen=True)
class CopyTable:
    """Shortest copies of one tensor type between the numbered layouts `layouts`, which may lead
    `through` others, numbered after them.

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
    following: NDArray[np.int64]  # [from and through, to], next layout on the path
    step_of: dict[tuple[int, int], Change]  # from and to any of them, through others included
    mesh: MeshShape
    tiles: Tiles | None
    through: tuple[Layout, ...] = ()

    def single(self) -> Iterator[tuple[int, int, Change]]:
        """The elementary steps between two of the layouts."""
        n = len(self.layouts)
        return ((a, b, step) for (a, b), step in self.step_of.items() if a < n and b < n)

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
        """[a, b]: whether something is gathered on the way along a dim that is not the first, and
        not in whole tiles: what devices have comes one after another in memory, and so that dim
        first."""
        return (self._on_the_way & _GATHERED) > 0

    @cached_property
    def turned_before(self) -> NDArray[np.bool_]:
        """[a, b]: whether a sum is scattered on the way along a dim that is not the first, and not
        in whole tiles."""
        return (self._on_the_way & _SCATTERED) > 0

    @cached_property
    def _on_the_way(self) -> NDArray[np.int64]:
        """[a, b]: how many collectives the cheapest copy takes, and whether such as turn are among
        them, each a part of the number; 0 where there is none."""
        every, layouts = len(self.following), (*self.layouts, *self.through)
        by_kind = {"all_gather": _GATHERED, "reduce_scatter": _SCATTERED}
        count, turning = (np.zeros((every, every), dtype=np.int64) for _ in range(2))
        for (a, b), step in self.step_of.items():
            count[a, b] = step.kind not in LOCAL
            if step.kind in by_kind:
                k = step.dim or 0
                cut = layouts[a if step.kind == "all_gather" else b].dims[k]
                block = self.tensor.shape[k] // self.mesh.parts(cut)
                turned = turns(step, self.tensor.shape, step.kind, block, self.tiles)
                turning[a, b] = by_kind[step.kind] if turned else 0
        n = len(self.layouts)
        found: NDArray[np.int64] = np.zeros((n, n), dtype=np.int64)
        to = np.broadcast_to(np.arange(n), (n, n))
        at = np.where(self.following[:n] < 0, to, to.T)
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
    """Changes between the layouts of one rank as steps of plans, in the order of where they lead
    from and to; and into how many parts each layout cuts every dim."""

    changes: Sequence[ChangeRow]
    parts: Ints  # [layouts, dims]
    steps: tuple[Change, ...]  # [changes]
    given: Ints  # [changes], the place of each among all that were given
    source: Ints  # [changes], a place among the layouts
    target: Ints  # [changes]
    # kind, monoid, axes, pieces
    kinds: tuple[tuple[str, str | None, tuple[int, ...], int], ...]
    kind: Ints  # [changes], the number of its kind


@dataclass
class StepCosts:
    """What single changes of layout cost on a machine, each worked out once; and tables of them,
    of which tensors of equal blocks have equal ones."""

    mesh: MeshShape
    target: Target
    tables: dict[tuple[object, ...], CopyTable] = field(default_factory=dict)
    _costs: dict[tuple[str, float, tuple[int, ...]], tuple[float, float, float, float]] = field(
        default_factory=dict
    )
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
            given = np.lexsort((target, source))
            given = given[(source[given] >= 0) & (target[given] >= 0)]
            steps = tuple([_step(changes[c], monoids, self.mesh) for c in given.tolist()])
            kinds: dict[tuple[str, str | None, tuple[int, ...], int], int] = {}
            kind = [
                kinds.setdefault((s.kind, s.monoid, s.axes, s.pieces or 1), len(kinds))
                for s in steps
            ]
            cuts = [self.mesh.parts(axes) for x in layouts for axes in x.dims]
            parts = np.array(cuts, dtype=np.int64).reshape(len(layouts), -1 if cuts else 0)
            found = self._steps[id(changes)] = _Steps(
                changes,
                parts,
                steps,
                given,
                source[given],
                target[given],
                tuple(kinds),
                np.array(kind, dtype=np.int64),
            )
        return found

    def of(
        self, kind: str, local_bytes: float, axes: tuple[int, ...]
    ) -> tuple[float, float, float, float]:
        """Of a collective that is given blocks of so many bytes: its seconds, those that pass
        within a device, its joules, and the bytes that a device sends."""
        key = kind, local_bytes, axes
        found = self._costs.get(key)
        if found is None:
            seconds = collective_seconds(*key, self.mesh, self.target)
            found = self._costs[key] = (
                seconds,
                seconds if kind in LOCAL else 0.0,
                collective_joules(*key, self.mesh, self.target),
                collective_wire_bytes(kind, local_bytes, self.mesh.parts(axes)),
            )
        return found


def copy_table(
    tensor: TensorType,
    layouts: Sequence[Layout],
    changes: Sequence[ChangeRow],
    monoids: Sequence[str],
    costs: StepCosts,
    used: Collection[Layout] | None = None,
) -> CopyTable:
    """All-pairs shortest copies over the elementary changes that the rules derived; where it is
    told which layouts are `used`, between these alone.

    All layouts are of its rank, and only those that divide it evenly take part. Ties in seconds go
    to fewer wire bytes.
    """
    every, shape = costs.steps(layouts, changes, monoids), np.array(tensor.shape, dtype=np.int64)
    places = np.flatnonzero((shape % every.parts == 0).all(axis=1))
    usable = [layouts[k] for k in places.tolist()]
    blocks = shape // every.parts[places]
    item, tiles = max(tensor.itemsize, 1), costs.target.tiles
    local = blocks.prod(axis=1) * item
    held = local
    if tiles is not None:
        held = np.array([stored_bytes(b, item, tiles) for b in blocks.tolist()], dtype=np.int64)
    own = np.array([k for k, x in enumerate(usable) if used is None or x in used], dtype=np.int64)
    arrays = (places, local, held, own)
    key = (id(every), kind_of(tensor.dtype), *(x.tobytes() for x in arrays))
    if key in costs.tables:
        return costs.tables[key].of(tensor)
    steps = _single(tensor, places, local, every, costs)
    costs.tables[key] = _table(tensor, usable, (local, held), every, steps, own, costs)
    return costs.tables[key]


@dataclass(frozen=True)
class _Single:
    """The quickest steps between two of some layouts each, by number, in the order in which such
    were given."""

    source: Ints  # [steps]
    target: Ints  # [steps]
    costs: Matrix  # [steps, 4], as of `StepCosts.of`
    number: Ints  # [steps], among those that are known of the rank

    def among(self, places: Ints, count: int) -> _Single:
        """Those between some of so many layouts, which are numbered anew."""
        number = np.full(count, -1)
        number[places] = np.arange(len(places))
        source, target = number[self.source], number[self.target]
        own = (source >= 0) & (target >= 0)
        return _Single(source[own], target[own], self.costs[own], self.number[own])


def _single(
    tensor: TensorType, places: Ints, local: Ints, every: _Steps, costs: StepCosts
) -> _Single:
    """The quickest steps between layouts at some places of those of the rank, with local blocks of
    so many bytes; of those that take the same time the first given."""
    number = np.full(len(every.parts), -1)
    number[places] = np.arange(len(places))
    source, target = number[every.source], number[every.target]
    within = np.flatnonzero((source >= 0) & (target >= 0) & (source != target))
    source, target = source[within], target[within]
    # Many steps are of one kind, and of blocks of one size.
    sizes, size = np.unique(local.astype(np.float64), return_inverse=True)
    alike, like = np.unique(every.kind[within] * len(sizes) + size[source], return_inverse=True)
    price = np.empty((len(alike), 4))
    for k, (kind, n) in enumerate(zip(*np.divmod(alike, len(sizes) or 1), strict=True)):
        name, monoid, axes, count = every.kinds[kind]
        one = costs.of(carried_as(name, monoid, tensor.dtype), float(sizes[n]) / count, axes)
        price[k] = count * np.array(one)

    new = np.diff(source * len(places) + target, prepend=-1) > 0  # they are in this order
    seconds, begin, group = price[like, 0], np.flatnonzero(new), np.cumsum(new) - 1
    least = np.minimum.reduceat(seconds, begin) if len(begin) else seconds
    quick = np.flatnonzero(seconds == least[group])
    best = quick[np.diff(group[quick], prepend=-1) > 0]
    best = best[np.argsort(every.given[within[begin]])]
    return _Single(source[best], target[best], price[like[best]], within[best])


def _table(
    tensor: TensorType,
    usable: Sequence[Layout],
    block: tuple[Ints, Ints],
    every: _Steps,
    steps: _Single,
    used: Ints,
    costs: StepCosts,
) -> CopyTable:
    """The table of those usable layouts that are `used`, by number; `block` is the bytes of each,
    also as held."""
    taken = np.arange(len(usable))
    if len(used) < len(usable):
        taken = between(steps.source, steps.target, steps.costs[:, 0], used, len(usable))
        steps = steps.among(taken, len(usable))
    n, ends = len(taken), (steps.source, steps.target)
    seconds, inside, joules, wire, scratch = (np.full((n, n), np.inf) for _ in range(5))
    for matrix, column in zip((seconds, inside, joules, wire), steps.costs.T, strict=True):
        matrix[ends] = column
    scratch[ends] = 0.0
    for matrix in (seconds, inside, joules, wire, scratch):
        np.fill_diagonal(matrix, 0.0)
    following = np.where(np.isfinite(seconds), np.arange(n)[None, :], -1)
    shorten(seconds, inside, joules, wire, scratch, following, block[1][taken])

    # Those that are used come first, and others that ways lead through after them.
    own = np.searchsorted(taken, used)
    order = np.concatenate([own, np.setdiff1d(np.arange(n), own)])
    place = np.full(n + 1, -1)
    place[order] = np.arange(n)
    square, names = np.ix_(own, own), [usable[k] for k in taken[order].tolist()]
    local, held = (x[used] for x in block)
    sizes = local.astype(np.float64)
    numbers = zip(*(place[x].tolist() for x in ends), strict=True)
    return CopyTable(
        tensor=tensor,
        layouts=tuple(names[: len(own)]),
        local_bytes=local,
        held_bytes=held,
        seconds=seconds[square],
        local=inside[square],
        joules=joules[square],
        wire=wire[square],
        scratch=scratch[square],
        turn_seconds=turning_seconds(sizes, costs.target),
        turn_joules=turning_joules(sizes, costs.mesh.devices, costs.target),
        following=place[following[np.ix_(order, own)]],
        step_of=dict(zip(numbers, [every.steps[k] for k in steps.number.tolist()], strict=True)),
        mesh=costs.mesh,
        tiles=costs.target.tiles,
        through=tuple(names[len(own) :]),
    )


def _step(change: ChangeRow, monoids: Sequence[str], mesh: MeshShape) -> Change:
    dim = change.dim if change.dim >= 0 else None
    if change.kind in ("all_reduce", "reduce_scatter", "to_partial"):
        return Change(change.kind, change.axes, dim, monoid=monoids[change.other])
    if dim is None and change.kind in ("permute", "slice"):
        return Change(change.kind, change.axes, dims=change.target.dims)
    other = change.other if change.other >= 0 else None
    if change.kind == "permute":
        blocks, fewer = (mesh.parts(x.dims[change.dim]) for x in (change.source, change.target))
        pieces, dims = blocks // fewer, change.target.dims
        return Change(change.kind, change.axes, dim, other, dims=dims, pieces=pieces)
    return Change(change.kind, change.axes, dim, other)
