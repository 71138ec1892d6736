"""Peaks: what a plan holds whose collectives are merged, in the order in which its units then run.

What takes a merged copy waits for all that it is made with, and what it reads stays alive until
then (`schedule/schedules.py`). Arrays are those of the certificate (`extract/certify/buffers.py`).
Most of them keep their place between the same units: where those that say how long a value is there
come one after another as before, so does it. The others are worked out anew, once for all orders
in which those units come alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import TypeVar

import numpy as np

from tapestry_egg.extract.certify.buffers import buffers, in_places, may_have_places
from tapestry_egg.extract.certify.kernel_work import held_bytes, kernel_scratch
from tapestry_egg.extract.certify.merging import Key, copied_apart
from tapestry_egg.extract.certify.moves import Move, copy_in_memory
from tapestry_egg.extract.certify.verdict import Buffer, Copied
from tapestry_egg.extract.problem.problem import Floats, Ints
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.plan import Merged
from tapestry_egg.schedule.lifetimes import Lives, left_as_results
from tapestry_egg.schedule.schedules import orders_of

from .members import Candidates, Member, units_of

T = TypeVar("T", bound=int)

#: A value, and which of its copies are made with others: when, and whether apart from it.
_Made = tuple[int, tuple[tuple[int, int, bool], ...]]
#: Arrays, and the values that they are.
_Held = Sequence[tuple[FlatId, Buffer]]
#: Units that come one after another, and the arrays of a value wherever they do.
_Variant = tuple[Sequence[int], _Held]

# Ticks of one unit where it is noted which unit a tick is of: no answer is so many ticks later.
_APART = 8


# What is true of units in whatever order they run, and takes long to find.
_IN_ANY_ORDER = (
    "_fused",
    "_turned",
    "_renewing",
    "_cut_inside",
    "_rounds",
    "doubled",
    "_given",
    "_passing",
)


class _InAnyOrder(Lives):
    """Lives that know what does not depend on the order of units."""

    def __init__(self, given: Lives) -> None:
        for name in _IN_ANY_ORDER:
            getattr(given, name)
        self.__dict__.update(given.__dict__)
        self._known, self._ends = {}, {}
        self.__dict__.pop("leaving", None)
        if given.program.spans:  # what a loop begins with depends on the order
            self.__dict__.pop("_renewed", None)

    def _begun_with(
        self, v: int, old: tuple[int, ...], over: Callable[[int], set[int]]
    ) -> list[int]:
        """Nothing in any order, but where v is left by a loop or written into something."""
        root = self.root(u := self.maker[v])
        begun = root.port == "carry" or u in self._renewing
        begun = begun or (not root.port and root.signature.written_into is not None)
        return super()._begun_with(v, old, over) if begun else []


class _Noted(_InAnyOrder):
    """The lives of values where unit u runs at `place[u]`, ticks far between units, with the groups
    of units on whose places each answer depends. Units of one region keep their order, side by
    side, so each answer depends on the place of the region alone: `first` has the first unit of the
    group of each."""

    def __init__(self, given: Lives, first: Sequence[int], place: Sequence[int]) -> None:
        super().__init__(given)
        self.end = _APART * (len(place) + 2)
        self.seen: set[int] = set()
        self.first, self.place = first, place
        self._needs: dict[tuple[str, int], set[int]] = {}
        #: what new states take the place of, if that depends on the order: all answers do on it
        self.renews: tuple[tuple[int, ...], ...] = ()
        if given.program.spans:
            self.renews = tuple([(v, *olds) for v, olds in self._renewed.items()])

    def tick(self, u: int) -> int:
        self.seen.add(self.first[u])
        return _APART * (self.place[u] + 1)

    def _last_within(self, start: int, stop: int) -> int:
        inside = self._within(start, stop)  # of one region
        return self.tick(inside[-1]) if inside else -1

    def once(self, work: Callable[[Lives, int], T], v: int) -> T:
        key = work.__name__, v
        if key not in self._known:
            outer, self.seen = self.seen, set()
            self._known[key] = work(self, v)
            self._needs[key], self.seen = self.seen, outer
        self.seen |= self._needs[key]
        found: T = self._known[key]
        return found


class _Sizes(dict[Layout, float]):
    """The bytes of a block in each layout, computed when first asked for."""

    def __init__(self, of: Callable[[Layout], float]) -> None:
        super().__init__()
        self._of = of

    def __missing__(self, layout: Layout) -> float:
        found = self[layout] = self._of(layout)
        return found


@dataclass(frozen=True, slots=True)
class _Value:
    """A value, the unit that makes it, who reads it, the copies that are made of it, and bytes of
    its blocks."""

    number: FlatId
    unit: int
    needs: Mapping[int, Sequence[Layout]]
    back: Sequence[int]
    copies: Sequence[tuple[Move, Copied]]
    size: Callable[[Layout], float]
    inside: Callable[[Layout], float]
    late: bool


@dataclass(frozen=True, slots=True)
class _Arrays:
    """All arrays of a plan whose units run in this order: the ticks from which and until which each
    is there, its bytes, and its value, by its place, -1 for none."""

    order: list[int]
    begin: Ints
    end: Ints
    amount: Floats
    value: Ints
    ticks: int

    def profile(self) -> Floats:
        """[ticks]: bytes alive."""
        change: Floats = np.bincount(self.begin, self.amount, self.ticks + 1).astype(np.float64)
        change -= np.bincount(self.end, self.amount, self.ticks + 1)
        return np.cumsum(change)[:-1]

    def of_values(self, tick: int, values: int) -> Floats:
        """[values]: the bytes of each that are alive at a tick."""
        there = (self.begin <= tick) & (tick < self.end) & (self.value >= 0)
        found = np.bincount(self.value[there], self.amount[there], values)
        return found.astype(np.float64)


class Peaks:
    """What the plan of some candidates holds, whichever of these are merged."""

    def __init__(self, candidates: Candidates) -> None:
        self.walk = walk = candidates.walk
        self._orders = orders_of(walk.schedule)
        self._members: dict[Key, tuple[Member, bool]] = {
            m.key: (m, copied_apart(kind, 1.0, walk.target) > 0.0)
            for kind, own in candidates.members.items()
            for m in own
        }
        self._takers = {
            key: (FlatId(m.move.value), self._operations(m.readers))
            for key, (m, _) in self._members.items()
        }
        self._places = walk.target.reserves and may_have_places(walk.schedule, walk.target)
        of = walk.program, walk.bodies, walk.mesh, walk.target
        self._scratch = [kernel_scratch(unit, *of) for unit in walk.schedule.units]
        self._values = list(self._of_values())
        self._number = {x.number: k for k, x in enumerate(self._values)}
        # By what new states take the place of, as all answers depend on that.
        self._variants: dict[tuple[tuple[int, ...], ...], dict[_Made, list[_Variant]]] = {}
        # When these are gone depends on more units.
        self._leave = {*walk.ground.left, *left_as_results(walk.schedule)}
        self._note()

    def profile(self, merged: Sequence[Merged]) -> Floats:
        """[ticks]: bytes alive with some copies merged and no others.

        Raises PlanError where some wait for each other.
        """
        return self._arrays(merged).profile()

    def waiting(
        self, merged: Sequence[Merged], held: float
    ) -> tuple[float, list[tuple[float, list[float]]]]:
        """The peak with some copies merged, and the times at which the plan exceeds `held` bytes:
        by how many bytes at most, and how many of them each group adds.

        A group adds the values of its members that are alive then, and are not when the same unit
        runs in the plan without merging. Raises PlanError if some groups wait for each other.
        """
        now, values = self._arrays(merged), len(self._values)
        profile = now.profile()
        own = [[self._number[self._takers[key][0]] for key in keys] for keys in merged]
        found = []
        above = np.concatenate([[False], profile > held, [False]])
        for begin, end in np.flatnonzero(above[1:] != above[:-1]).reshape(-1, 2).tolist():
            tick = begin + int(profile[begin:end].argmax())
            unit = now.order[min(tick // 2, len(now.order) - 1)]
            before = 2 * self._plain.order.index(unit) + tick % 2
            more = now.of_values(tick, values) - self._plain.of_values(before, values)
            more = np.maximum(more, 0.0)
            found.append((float(profile[tick]) - held, [float(more[x].sum()) for x in own]))
        return float(profile.max(initial=0.0)), found

    @cached_property
    def _plain(self) -> _Arrays:
        return self._arrays(())

    def _arrays(self, merged: Sequence[Merged]) -> _Arrays:
        """All arrays with some copies merged and no others."""
        together = [[self._takers[key] for key in keys] for keys in merged]
        order = self._orders.taken(together)
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        lives = _Noted(self._noted, self._orders.first, place.tolist())
        joined = self._joined(lives, merged)
        anew = set(self._owner[place[self._before] > place[self._after]].tolist())
        anew |= {self._number[FlatId(move.value)] for move in joined}
        if lives.renews != self._noted.renews:
            anew = set(range(len(self._values)))
        known = self._variants.setdefault(lives.renews, {})
        fresh = [(k, x) for k in anew for x in self._variant(k, lives, order, joined, known)]
        held = [x for _, (_, x) in fresh]
        stays = ~np.isin(self._of, list(anew))
        of = np.append(self._of[stays], np.array([k for k, _ in fresh], dtype=np.int64))
        amount = np.append(self._amount[stays], [x.amount for x in held])
        begin, end = (
            self._ticks(np.append(noted[stays], np.array(some, dtype=np.int64)), place)
            for noted, some in (
                (self._begin, [x.begin for x in held]),
                (self._end, [x.end for x in held]),
            )
        )
        last = self.walk.ground.lives.end
        if self._places:
            kept = [self._buffers[k] for k in np.flatnonzero(stays).tolist()]
            every = [
                (v, replace(x, begin=int(a), end=int(b)))
                for (v, x), a, b in zip([*kept, *(x for _, x in fresh)], begin, end, strict=True)
            ]
            # Of arrays that are alike that one takes a place which the certificate meets first.
            unit = [*self._unit[stays].tolist(), *(self._values[k].unit for k, _ in fresh)]
            turn = np.lexsort((of, of < 0, place[unit]))
            found = in_places([every[k] for k in turn.tolist()], lives.staying, last)
            begin, end = (
                np.array([getattr(x, name) for _, x in found], dtype=np.int64)
                for name in ("begin", "end")
            )
            amount = np.array([x.amount for _, x in found])
            of = np.array([self._number.get(v, -1) for v, _ in found], dtype=np.int64)
        return _Arrays(order, begin, np.clip(end, begin, last), amount, of, last)

    def _variant(
        self,
        k: int,
        lives: _Noted,
        order: Sequence[int],
        joined: Mapping[Move, tuple[int, bool]],
        variants: dict[_Made, list[_Variant]],
    ) -> _Held:
        """The arrays of value k, as they are noted, in another order of units. What was found in
        one order is true in all in which the units that it depends on come one after the other as
        there, as long as the same copies are made beside the same units."""
        x, place = self._values[k], lives.place
        at = [(n, *joined[move]) for n, (move, _) in enumerate(x.copies) if move in joined]
        made = tuple([(n, _noted(tick, order), apart) for n, tick, apart in at])
        known = variants.setdefault((k, made), [])
        for chain, held in known:
            if all(place[a] < place[b] for a, b in pairwise(chain)):
                return held
        units = [order[n] for _, tick, _ in at if 0 <= (n := tick // _APART - 1) < len(order)]
        lives.seen = {lives.first[u] for u in units}
        held = [
            (v, replace(b, begin=_noted(b.begin, order), end=_noted(b.end, order)))
            for v, b in self._held(x, lives, joined)
        ]
        if x.number not in self._leave:
            known.append((sorted(lives.seen, key=place.__getitem__), held))
        return held

    def _operations(self, readers: int) -> tuple[int, ...]:
        """The operations of some units, a bit for each."""
        units, of = self.walk.schedule.units, self.walk.program.operation_of
        return tuple(of[i] for u in units_of(readers) for i in units[u].members)

    def _of_values(self) -> Sequence[_Value]:
        walk = self.walk
        moves: dict[int, list[Move]] = {}
        for move in walk.moves:
            moves.setdefault(move.value, []).append(move)
        found: list[_Value] = []
        # By type and by what slices of it are read of: equal layers have the same types.
        known: dict[tuple[TensorType, frozenset[int]], Callable[[Layout], float]] = {}
        held = partial(held_bytes, mesh=walk.mesh, tiles=walk.target.tiles)

        def sizes(type_: TensorType, windows: Collection[int]) -> Callable[[Layout], float]:
            key = type_, frozenset(windows)
            if key not in known:
                known[key] = _Sizes(partial(held, type_, windows=key[1])).__getitem__
            return known[key]

        for u, unit in enumerate(walk.schedule.units):
            _, parts = self._scratch[u]
            for v in unit.outputs:
                type_, windows = walk.program.types[v], walk.ground.windows.get(v, ())
                size, inside = sizes(type_, windows), sizes(type_, ())
                copies = [(m, walk.copied(m)) for m in moves.get(v, ())]
                needs, back = walk.readers(u, v)
                found.append(_Value(v, u, needs, back, copies, size, inside, parts > 0.0))
        return found

    def _joined(self, lives: Lives, merged: Sequence[Merged]) -> dict[Move, tuple[int, bool]]:
        """Per merged copy the tick at which it is made, and whether apart from what it is of."""
        found: dict[Move, tuple[int, bool]] = {}
        for keys in merged:
            own = [self._members[key] for key in keys]
            made = max(lives.made(m.move.value) + 1 for m, _ in own)
            at = max(made, min(_read_at(lives, m.move) for m, _ in own))
            found.update({m.move: (at, apart) for m, apart in own})
        return found

    def _held(
        self, x: _Value, lives: Lives, joined: Mapping[Move, tuple[int, bool]]
    ) -> list[tuple[FlatId, Buffer]]:
        """The arrays of a value and its copies."""
        walk, copies = self.walk, list[Copied]()
        for move, one in x.copies:
            if move in joined:
                at, apart = joined[move]
                copies.append(replace(one, begin=at, at=at, joined=True, apart=apart))
            else:
                at = _read_at(lives, move)
                begin = at if one.begin == one.at else min(at, lives.tick(one.begin // 2))
                copies.append(replace(one, begin=begin, at=at))
        have, left = walk.given[x.number], self._left(x.number, lives)
        ends = left, walk.turned(lives, x.number)
        read = x.needs, x.back, copies, x.size, x.inside, x.late, *ends
        return [(x.number, b) for b in buffers(lives, x.number, have, *read)]

    def _left(self, v: FlatId, lives: Lives) -> int | None:
        """As `Walk.held` has it, in another order."""
        walk, known = self.walk, self.walk.ground.left.get(v)
        if known is None or not known.copied(walk.given, walk.needed):
            return None
        return next((x.until for x in lives.leaving.values() if x.source == v), None)

    def _note(self) -> None:
        """Note of all arrays of what unit they are there from, until, and on what that depends."""
        walk = self.walk
        target, given = walk.target, walk.ground.lives
        of_lives = target.epilogues, target.fusing
        given_order = given, self._orders.first, range(len(walk.schedule.units))
        self._noted = lives = walk.schedule.once(lambda: _Noted(*given_order), "noted", *of_lives)
        self._buffers: list[tuple[FlatId, Buffer]] = []
        of: list[int] = []
        made: list[int] = []  # in which units
        pairs: list[tuple[int, int, int]] = []
        for k, x in enumerate(self._values):
            lives.seen = set()
            held = self._held(x, lives, {})
            self._buffers += held
            of += [k] * len(held)
            made += [x.unit] * len(held)
            units = sorted(lives.seen)
            pairs += [(a, b, k) for a, b in pairwise(units)]
        for u, unit in enumerate(walk.schedule.units):
            scratch, parts = self._scratch[u]
            beside = walk.exchanged(unit)
            scratch += 0.0 if beside is None else beside.held
            at = _APART * (u + 1) + 1
            for amount, ticks in ((scratch, 1), (parts, 2)):
                if amount:
                    v = unit.outputs[0]
                    one = Buffer(at, at + ticks, amount, walk.given[v], "scratch")
                    self._buffers.append((v, one))
            if u in walk.in_two:
                more = _APART * (u + 1) - 2 * u
                self._buffers += [
                    (v, replace(b, begin=b.begin + more, end=b.end + more))
                    for v, b in copy_in_memory(walk.ground, walk.in_two[u], walk.mesh)
                ]
            made += [u] * (len(self._buffers) - len(made))
        for first, last, amount in walk.rows_ahead:
            v, begin, end = walk.schedule.units[first].outputs[0], first + 1, last + 1
            one = Buffer(_APART * begin + 2, _APART * end + 2, amount, walk.given[v], "scratch")
            self._buffers.append((v, one))
            made.append(first)
        self._of = np.array([*of, *[-1] * (len(self._buffers) - len(of))], dtype=np.int64)
        self._unit = np.array(made, dtype=np.int64)
        self._begin, self._end = (
            np.array([getattr(x, name) for _, x in self._buffers], dtype=np.int64)
            for name in ("begin", "end")
        )
        self._amount = np.array([x.amount for _, x in self._buffers])
        self._before, self._after, self._owner = np.array(pairs, dtype=np.int64).reshape(-1, 3).T

    def _ticks(self, noted: Ints, place: Ints) -> Ints:
        """Ticks of another order, as the lives of values that were noted have them."""
        units, rest = noted // _APART - 1, noted % _APART
        inside = (units >= 0) & (units < len(place))
        found = np.where(inside, 2 * place[np.where(inside, units, 0)] + rest, noted)
        return np.where(units >= len(place), self.walk.ground.lives.end, found)


def _noted(tick: int, order: Sequence[int]) -> int:
    """A tick of a unit in another order, as that unit's in the order of the schedule."""
    at = tick // _APART - 1
    return _APART * (order[at] + 1) + tick % _APART if 0 <= at < len(order) else tick


def _read_at(lives: Lives, move: Move) -> int:
    """As `Walk.read_at` has it, in another order."""
    return lives.first_read(move.value) if move.unit < 0 else lives.read(move.unit, move.value)
