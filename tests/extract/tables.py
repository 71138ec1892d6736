"""Every plan of a small program, by tables: what each unit and each value adds to its costs.

A plan's seconds are those of its kernels and copies, its bytes at a moment those of its arrays. So
each way to run a unit, and each way in which a value is made, read and kept, adds what it adds
whatever the rest does, and so do two units that read a value in one kernel, or apart. That is told
once for each by the certificate of a plan in which all else is replicated, and added up for all
combinations, tens of thousands at a time. Nothing is left out but
what plainly cannot be in the front: of ways of one unit (or to keep one value) that look the same
from outside those that take no less at any moment than another; and sums that take more already
than a plan that is known. Knows of the network no more than `brute.py` does.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.moves import read_again, turned_for
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Refused
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Kept
from tapestry_egg.schedule.schedules import Schedule

from .brute import Choice, Plans

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Option = tuple[Choice, ...]  # of every member of a unit
T = TypeVar("T")
Said = tuple[object, ...]  # what a value's readers see of a unit's option, or of its maker's

#: Combinations that are added up at a time.
CHUNK = 20_000
# Sums are compared with what is known, but for rounding.
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Added:
    """What one option of a unit, or of a value, adds: seconds, and bytes at every moment."""

    seconds: float
    bytes: Floats

    def costs(self) -> Floats:
        return np.concatenate(([self.seconds], self.bytes))


@dataclass(frozen=True)
class Ways:
    """Ways to run a unit that look different from outside, or are better there than others."""

    options: tuple[Option, ...]
    seconds: Floats  # [options]
    bytes: Floats  # [options, moments]


@dataclass(frozen=True)
class Keeping:
    """Ways to keep one value, for every label of the units that make and read it; those that a
    label has fewer of than others are filled up with infinite seconds."""

    units: tuple[int, ...]
    label: tuple[Ints, ...]  # of each of those units, by its option
    kept: tuple[tuple[Kept | None, ...], ...]  # by the labels' number
    seconds: Floats  # [labels, ways]
    bytes: Floats  # [labels, ways, moments]
    count: Ints  # [labels]
    sizes: tuple[int, ...]  # labels of each of the units


@dataclass(frozen=True)
class Point:
    """A plan of the front: its costs, the option of every unit, and what is kept of every value."""

    peak: float
    seconds: float
    options: tuple[int, ...]
    kept: tuple[Kept | None, ...]


class Tables:
    """All plans of a program without regions on one mesh."""

    def __init__(self, schedule: Schedule, mesh: MeshShape, target: Target) -> None:
        assert target.slowdown is None, "seconds are a sum"
        self.plans = Plans(schedule, mesh, target)
        self.ground = Ground(schedule, target)
        self.schedule, self.program = schedule, schedule.program
        self.moments = self.ground.lives.end
        self.values = sorted(self.plans.outer)
        self.maker = {v: u for u, unit in enumerate(schedule.units) for v in unit.outputs}
        self.readers = {
            v: [u for u, x in enumerate(schedule.units) if any(w == v for *_, w in x.reads)]
            for v in self.values
        }

    @property
    def combinations(self) -> int:
        """How many there are before copies are kept."""
        return prod(len(self.plans.options[i]) for i in self.plans.order)

    @property
    def rows(self) -> int:
        """How many of them are added up, as ways of one unit that look alike are beaten."""
        return prod(len(w.options) for w in self.ways)

    # What each adds

    @cached_property
    def _replicated(self) -> list[Option]:
        """Of every unit the option in which nothing is cut."""
        found = []
        for unit in self.schedule.units:
            option = []
            for i in unit.members:
                option.append(
                    next(
                        c
                        for c in self.plans.options[i]
                        if not any(x.axes for x in (*c.needs, *c.gives))
                        and (c.strategy is None or not any(c.strategy.cuts))
                    )
                )
            found.append(tuple(option))
        return found

    def chosen(self, options: Sequence[Option]) -> dict[int, Choice]:
        """The choice of every instance."""
        return {
            i: c
            for unit, option in zip(self.schedule.units, options, strict=True)
            for i, c in zip(unit.members, option, strict=True)
        }

    def but(self, units: Sequence[int], some: Sequence[Option]) -> list[Option]:
        """Options of all units, but for some the one in which nothing is cut."""
        options = list(self._replicated)
        for u, option in zip(units, some, strict=True):
            options[u] = option
        return options

    def walked(self, options: Sequence[Option], kept: Mapping[int, Kept] | None = None) -> Walk:
        """A plan of these options, gone through. Raises Refused where it is not legal."""
        walk = Walk(self.plans.plan(self.chosen(options), kept or {}), self.ground)
        walk.find_moves()
        return walk

    @cached_property
    def ways(self) -> list[Ways]:
        """Of every unit the ways to run it."""
        return [self._ways(u) for u in range(len(self.schedule.units))]

    def _ways(self, u: int) -> Ways:
        by_look: dict[object, list[tuple[Option, Added]]] = {}
        members = self.schedule.units[u].members
        for own in self.plans.chosen(members, inside=True):
            option = tuple(own[i] for i in members)
            try:
                walk = self.walked(self.but([u], [option]))
            except Refused as e:
                assert "copied inside a kernel" in str(e), e
                continue
            look = tuple(self._said(u, option, v) for v in self.values if self._near(u, v))
            by_look.setdefault(look, []).append((option, self._of_unit(walk, u)))
        kept = [x for same in by_look.values() for x in _unbeaten(same)]
        return Ways(
            tuple(option for option, _ in kept),
            np.array([a.seconds for _, a in kept]),
            np.array([a.bytes for _, a in kept]),
        )

    def _near(self, u: int, v: int) -> bool:
        return u == self.maker[v] or u in self.readers[v]

    def _said(self, u: int, option: Option, v: int) -> Said:
        """What a unit's option says of a value: how it is made, and whether late; how each of the
        unit's operations reads it."""
        unit = self.schedule.units[u]
        reads = []
        made: Layout | None = None
        for i, c in zip(unit.members, option, strict=True):
            instance = self.program.instances[i]
            reads += [n for w, n in zip(instance.inputs, c.needs, strict=True) if w == v]
            for w, g in zip(instance.outputs, c.gives, strict=True):
                made = g if w == v else made
        late = made is not None and self._is_late(u, option)
        return (made, late, *reads)

    def _is_late(self, u: int, option: Option) -> bool:
        """Whether what a unit makes is added up of parts, which is known from what is in memory in
        its stead."""
        known = self._late.get((u, option))
        if known is None:
            walk = self.walked(self.but([u], [option]))
            known = self._late[u, option] = any(
                x.role == "scratch" and x.begin == 2 * u + 1 and x.end == 2 * u + 3
                for v, x in walk.held()
                if v in self.schedule.units[u].outputs
            )
        return known

    @cached_property
    def _late(self) -> dict[tuple[int, Option], bool]:
        return {}

    def _of_unit(self, walk: Walk, u: int) -> Added:
        unit = self.schedule.units[u]
        seconds = walk.kernel(unit).seconds - sum(w.seconds for w in read_again(walk, u))
        seconds += sum(walk.copy(m)[0] for m in walk.moves if m.inner and m.unit == u)
        change = np.zeros(self.moments + 1)
        for v, x in walk.held():
            scratch = x.role == "scratch" and v in unit.outputs
            inner = v not in self.plans.outer and x.begin // 2 == u
            if scratch or inner:
                change[x.begin] += x.amount
                change[x.end] -= x.amount
        return Added(seconds, np.cumsum(change)[:-1])

    def _of_value(self, walk: Walk, v: int) -> Added:
        seconds = 0.0
        for move in walk.moves:
            if move.value == v and not move.inner:
                seconds += walk.copy(move)[0] + sum(s for _, s, _ in turned_for(walk, move))
        change = np.zeros(self.moments + 1)
        for w, x in walk.held():
            if w == v and x.role != "scratch":
                change[x.begin] += x.amount
                change[x.end] -= x.amount
        return Added(seconds, np.cumsum(change)[:-1])

    @cached_property
    def apart(self) -> list[tuple[int, int, Floats]]:
        """Two units that may read a value in one kernel, and the seconds that the second takes to
        read it again, [options, options]."""
        found = []
        for u in range(len(self.schedule.units)):
            for first in sorted({x.unit for x in self.ground.traffic.shared(u)}):
                known: dict[object, float] = {}
                table = np.zeros((len(self.ways[first].options), len(self.ways[u].options)))
                for a, one in enumerate(self.ways[first].options):
                    for b, other in enumerate(self.ways[u].options):
                        reads = tuple(c.needs for c in (*one, *other))
                        if reads not in known:
                            walk = self.walked(self.but([first, u], [one, other]))
                            again = read_again(walk, u, first)
                            known[reads] = sum(w.seconds for w in again)
                        table[a, b] = known[reads]
                found.append((first, u, table))
        return found

    @cached_property
    def keepings(self) -> list[Keeping]:
        """Of every value the ways to keep it."""
        return [self._keeping(v) for v in self.values]

    def _seen(self, v: int) -> dict[int, tuple[int, ...]]:
        """By unit the values whose layouts there say how long value v is in memory, and where it is
        copied: itself; and what leaves, as a copy or as it is, where that is a view of it."""
        seen = {u: (v,) for u in sorted({self.maker[v], *self.readers[v]})}
        left = self.ground.left.get(v)
        if left is not None and left.read != v:
            for u in (self.maker[left.read], left.unit):
                seen[u] = (*seen.get(u, ()), left.read)
        return dict(sorted(seen.items()))

    def _keeping(self, v: int) -> Keeping:
        seen_of = self._seen(v)
        units = tuple(seen_of)
        labels: list[Ints] = []
        first: list[list[Option]] = []  # of each label an option that says it
        for u in units:
            seen: dict[Said, int] = {}
            own: list[Option] = []
            label = []
            for option in self.ways[u].options:
                said = tuple(self._said(u, option, w) for w in seen_of[u])
                if said not in seen:
                    seen[said] = len(own)
                    own.append(option)
                label.append(seen[said])
            labels.append(np.array(label))
            first.append(own)
        table: list[list[tuple[Kept | None, Added]]] = []
        for some in product(*first):
            options = self.but(units, some)
            chosen = self.chosen(options)
            found: list[tuple[Kept | None, Added]] = []
            if self.plans.leaves_alike(chosen):
                for kept in self.plans.keepings(chosen, v):
                    walk = self.walked(options, {} if kept is None else {v: kept})
                    found.append((kept, self._of_value(walk, v)))
            table.append(_unbeaten(found))
        widest = max(1, *map(len, table))
        seconds = np.full((len(table), widest), np.inf)
        held = np.zeros((len(table), widest, self.moments))
        for k, ways in enumerate(table):
            for w, (_, added) in enumerate(ways):
                seconds[k, w], held[k, w] = added.seconds, added.bytes
        return Keeping(
            units,
            tuple(labels),
            tuple(tuple(kept for kept, _ in ways) for ways in table),
            seconds,
            held,
            np.array(list(map(len, table))),
            tuple(map(len, first)),
        )

    # All combinations

    def front(self) -> list[Point]:
        """The plans that no other beats in peak and seconds, from the least peak on."""
        total = self.rows
        some = np.array(sorted(random.Random(0).sample(range(total), min(total, CHUNK))))
        known = self._better([], some)
        for begin in range(0, total, CHUNK):
            known = self._better(known, np.arange(begin, min(total, begin + CHUNK)))
        return known

    def _better(self, known: list[Point], numbers: Ints) -> list[Point]:
        """What is known with the best of some combinations."""
        sizes = tuple(len(w.options) for w in self.ways)
        options = np.array(np.unravel_index(numbers, sizes))  # [units, rows]
        seconds = np.zeros(len(numbers))
        held = np.zeros((len(numbers), self.moments))
        for w, own in zip(self.ways, options, strict=True):
            seconds += w.seconds[own]
            held += w.bytes[own]
        for one, other, table in self.apart:
            seconds += table[options[one], options[other]]
        kept = np.zeros((0, len(numbers)), dtype=np.int64)  # [values so far, rows]
        for keeping in self.keepings:
            stays = _is_open(known, held.max(1), seconds)
            options, kept = options[:, stays], kept[:, stays]
            seconds, held = seconds[stays], held[stays]
            at = self._labels(keeping, options)
            count = keeping.count[at]
            rows = np.repeat(np.arange(len(at)), count)
            way = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
            options, kept = options[:, rows], np.vstack((kept[:, rows], way))
            seconds = seconds[rows] + keeping.seconds[at[rows], way]
            held = held[rows] + keeping.bytes[at[rows], way]
        peaks = held.max(1)
        stays = _is_open(known, peaks, seconds)
        found = list(known)
        for r in np.flatnonzero(stays)[np.lexsort((seconds[stays], peaks[stays]))]:
            if _is_open(found, peaks[r : r + 1], seconds[r : r + 1])[0]:
                found = [f for f in found if not (f.peak >= peaks[r] and f.seconds >= seconds[r])]
                ways = tuple(
                    k.kept[int(self._labels(k, options[:, r : r + 1])[0])][int(kept[j, r])]
                    for j, k in enumerate(self.keepings)
                )
                point = Point(
                    float(peaks[r]), float(seconds[r]), tuple(options[:, r].tolist()), ways
                )
                found = sorted([*found, point], key=lambda f: f.peak)
        return found

    @staticmethod
    def _labels(keeping: Keeping, options: Ints) -> Ints:
        own = tuple(x[options[u]] for u, x in zip(keeping.units, keeping.label, strict=True))
        return np.asarray(np.ravel_multi_index(own, keeping.sizes))

    # Held against certificates

    def certified(self, point: Point) -> tuple[float, float]:
        """The peak and seconds of a plan, all of it gone through at once."""
        options = [w.options[o] for w, o in zip(self.ways, point.options, strict=True)]
        kept = {v: k for v, k in zip(self.values, point.kept, strict=True) if k is not None}
        walk = Walk(self.plans.plan(self.chosen(options), kept), self.ground)
        found = walk.certificate()
        return float(found.peak_bytes), found.seconds

    def drawn(self, count: int) -> Iterator[Point]:
        """Plans drawn at random, with what the tables say of them."""
        rng = np.random.default_rng(0)
        for _ in range(count):
            options = np.array([[rng.integers(len(w.options))] for w in self.ways])
            seconds = sum(float(w.seconds[o[0]]) for w, o in zip(self.ways, options, strict=True))
            seconds += sum(float(t[options[a, 0], options[b, 0]]) for a, b, t in self.apart)
            held = np.zeros(self.moments)
            for w, o in zip(self.ways, options, strict=True):
                held += w.bytes[o[0]]
            kept = []
            for k in self.keepings:
                at = int(self._labels(k, options)[0])
                if not k.count[at]:
                    break
                way = int(rng.integers(k.count[at]))
                seconds, held = seconds + float(k.seconds[at, way]), held + k.bytes[at, way]
                kept.append(k.kept[at][way])
            else:
                yield Point(float(held.max()), seconds, tuple(options[:, 0].tolist()), tuple(kept))


def _is_open(known: Sequence[Point], peaks: Floats, seconds: Floats) -> NDArray[np.bool_]:
    """Whether sums may still become a plan that is better than all that are known."""
    if not known:
        return np.ones(len(peaks), dtype=bool)
    limits = np.array([f.peak for f in known])
    least = np.array([np.inf, *(f.seconds for f in known)])
    return seconds < least[np.searchsorted(limits, peaks, "right")] * (1.0 - _ROUNDING)


def _unbeaten(found: Sequence[tuple[T, Added]]) -> list[tuple[T, Added]]:
    """Those that take less than each other somewhere; the first of equal ones."""
    stays: list[tuple[T, Added]] = []
    for one in found:
        own = one[1].costs()
        if any((other.costs() <= own).all() for _, other in stays):
            continue
        stays = [s for s in stays if not (own <= s[1].costs()).all()] + [one]
    return stays
