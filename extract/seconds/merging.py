"""Merging: what collectives take at least of which several may be made into one.

Collectives of one kind over the same axes are one only where none waits for another, and where all
their bytes are no more than the compiler makes one of. Such a *group* takes what one collective of
all its bytes does, f(Σ bytes); each of its members pays its bytes, and all together one latency.
What is gathered is then in memory from the first reader of the group on, and what is reduced up to
the last value that is made for it.

Bounds: give every collective a *share* s in [0, 1], such that the members of no group that there
may be have more than 1 together, and price it at s · f(bytes / s). Where f is concave, the prices
of a group's members are no more than what the group takes (Jensen's inequality), so the prices of
a labelling's collectives are no more than what it takes in the best of all groupings. Shares of 1
along a *chain* are valid, of which no two are in one group, and so are those in proportion to bytes
(the bytes of a group are limited), and every mixture of these. Prices are concave in shares; the
best chain for a labelling is a longest path, and a mixture is moved towards it (Frank and Wolfe,
1956).

Two are in no group where one waits for the other. Where bytes have prices, they may as well be left
out of one if what the one holds until the other is there costs more than all that merging saves of
it: members of a group that pay so much for waiting pay more than their price without any share, and
of those that do not no two are in one chain.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

# Weight in a chain of what is not used, beside what is: so that chains are as long as they can be.
_UNUSED = 1e-3
# So many chains are mixed before anything is known, and steps of these lengths are tried.
_FIRST = 8
_LENGTHS = (1.0, 0.6, 0.3, 0.12, 0.04, 0.01)
# So many chains are mixed at most; the one of least weight goes first.
_MIXED = 10


@dataclass(frozen=True, eq=False)
class Mixture:
    """Chains with their weights, and the weight of shares in proportion to bytes: 1 together."""

    chains: tuple[Bools, ...]  # each [places]
    weights: tuple[float, ...]
    by_bytes: float = 0.0

    def towards(self, chain: Bools | None, far: float) -> Mixture:
        """So far on the way to one chain; to shares in proportion to bytes, if it is None."""
        left = [w * (1.0 - far) for w in self.weights]
        rest = self.by_bytes * (1.0 - far)
        if chain is None:
            return Mixture(self.chains, tuple(left), rest + far)
        chains, weights = [*self.chains, chain], [*left, far]
        if len(chains) > _MIXED:
            k = int(np.argmin(weights))
            del chains[k]
            gone = weights.pop(k)
            weights[int(np.argmax(weights))] += gone
        return Mixture(tuple(chains), tuple(weights), rest)


@dataclass(frozen=True)
class Grouped:
    """Collectives in groups: the seconds that this saves, the peak bytes, and the groups of two or
    more, by numbers."""

    seconds: float
    peak: float
    groups: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Merging:
    """The collectives of a problem of which several may be one, `events`: each belongs to a slot (a
    value read by some unit, or its kept copy), makes a `copy` (of one value, in one layout; only
    what makes one that no other slot makes, too, may be merged), is of a `kind` (collective, axes,
    monoid), lets so many `bytes` enter, and takes `alone` seconds on its own. With others it takes
    `joules` more (less: no more than 0), at least, and `held` bytes while it waits.

    Slot a is `before` slot b if whatever reads the copy of a must run before the value of b is
    made. The value of a slot is there from tick `made`, its copy is made alone at tick `read`, and
    what it is made of is in memory before `until`. A group's bytes are at most `most` [kinds]; what
    a group takes is interpolated between `amounts` and `times` [kinds, points]; `envelope` [kinds,
    points] is concave, and no more. Kinds that gather wait for their readers, others for makers.
    """

    slot: Ints  # [events]
    copy: Ints  # [events]
    kind: Ints  # [events]
    bytes: Floats  # [events], on one device
    held: Floats  # [events], on one device
    alone: Floats  # [events], seconds
    joules: Floats  # [events], of all devices
    before: Bools  # [slots, slots]
    made: Ints  # [slots], ticks
    read: Ints  # [slots], ticks
    until: Ints  # [slots], ticks
    gathers: Bools  # [kinds]
    most: Floats  # [kinds]
    amounts: Floats  # [kinds, points], bytes, from 0 up to the most of a group
    times: Floats  # [kinds, points], seconds
    envelope: Floats  # [kinds, points], seconds

    def __len__(self) -> int:
        return len(self.slot)

    # What a labelling takes

    def grouped(self, made: Ints, profile: Floats, limit: float) -> Grouped:
        """The collectives `made` in groups: each in the first one that it fits into, if no more
        than `limit` bytes are held at any time; `profile` are those that are held where all are
        alone."""
        profile, saved, last = profile.copy(), 0.0, -1
        groups: list[_Group] = []
        found: list[tuple[int, ...]] = []

        def end() -> float:
            less = 0.0
            for group in groups:
                one = group.alone - self._whole(last, group.size)
                if len(group.members) > 1 and one > 0.0:
                    less += one
                    found.append(tuple(group.members))
            return less

        often = np.bincount(self.copy[made], minlength=1)
        made = made[often[self.copy[made]] == 1]
        order = made[np.lexsort((self._rank[made], self.kind[made]))]
        for e in order.tolist():
            kind = self._kinds[e]
            if kind != last:
                saved += end()
                groups, last = [], kind
            slot, size = self._slots[e], self._sizes[e]
            for group in groups:
                fits = group.size + size <= self._most[kind]
                if not fits or self._waiting[slot] & group.slots:
                    continue
                spans = self._waits(group, e)
                if all(profile[a:b].max(initial=0.0) + x <= limit for a, b, x in spans):
                    for a, b, x in spans:
                        profile[a:b] += x
                    break
            else:
                group = _Group(self.gathers[kind], self._reads[slot])
                groups.append(group)
            group.slots |= 1 << slot
            group.size += size
            group.alone += self._alone[e]
            group.at = max(group.at, self._mades[slot])
            group.members.append(e)
        saved += end()
        return Grouped(saved, float(profile.max(initial=0.0)), tuple(found))

    def _waits(self, group: _Group, e: int) -> list[tuple[int, int, float]]:
        """(start, end, bytes) of what waits where a collective joins a group."""
        slot = self._slots[e]
        made = self._mades[slot]
        if group.gathers:
            return _stretch(max(group.at, made), self._reads[slot], self._held[e])
        found = []
        for m in group.members:
            begin = max(self._untils[self._slots[m]], group.at)
            found += _stretch(begin, made, self._held[m])
        return found

    def _whole(self, kind: int, size: float) -> float:
        """Seconds of one collective of so many bytes."""
        xs, ys = self._curves[kind]
        k = min(max(bisect_right(xs, size) - 1, 0), len(xs) - 2)
        return ys[k] + (ys[k + 1] - ys[k]) * (size - xs[k]) / (xs[k + 1] - xs[k])

    @cached_property
    def _curves(self) -> list[tuple[list[float], list[float]]]:
        return [(x.tolist(), y.tolist()) for x, y in zip(self.amounts, self.times, strict=True)]

    @cached_property
    def _waiting(self) -> list[int]:
        """Per slot a bit for each slot that waits for it, or that it waits for."""
        both = np.packbits(self.before | self.before.T, axis=1, bitorder="little")
        return [int.from_bytes(row.tobytes(), "little") for row in both]

    @cached_property
    def _rank(self) -> Ints:
        """[events]: the tick by which members of a kind are in order: when read, or when made."""
        return np.where(self.gathers[self.kind], self.read[self.slot], self.made[self.slot])

    @cached_property
    def others(self) -> dict[int, tuple[int, ...]]:
        """The collectives elsewhere that make the same copy, of each of which there are such."""
        alike: dict[int, list[int]] = {}
        for e, copy in enumerate(self.copy.tolist()):
            alike.setdefault(copy, []).append(e)
        slots = self._slots
        found = {
            e: tuple(o for o in every if slots[o] != slots[e])
            for every in alike.values()
            for e in every
        }
        return {e: o for e, o in found.items() if o}

    # Lists, for loops over single collectives.

    @cached_property
    def _kinds(self) -> list[int]:
        return self.kind.tolist()

    @cached_property
    def _slots(self) -> list[int]:
        return self.slot.tolist()

    @cached_property
    def _sizes(self) -> list[float]:
        return self.bytes.tolist()

    @cached_property
    def _held(self) -> list[float]:
        return self.held.tolist()

    @cached_property
    def _alone(self) -> list[float]:
        return self.alone.tolist()

    @cached_property
    def _most(self) -> list[float]:
        return self.most.tolist()

    @cached_property
    def _mades(self) -> list[int]:
        return self.made.tolist()

    @cached_property
    def _reads(self) -> list[int]:
        return self.read.tolist()

    @cached_property
    def _untils(self) -> list[int]:
        return self.until.tolist()

    # What it takes at least

    def less(self, shares: Floats) -> Floats:
        """[events]: what the price of each collective, at its share, is less than what it takes
        alone."""
        return np.minimum(self._priced(shares)[0] - self.alone, 0.0)

    def _priced(self, shares: Floats, some: Ints | None = None) -> tuple[Floats, Floats]:
        """[some] each: price of collectives at such shares, and how fast it rises with them."""
        every = slice(None) if some is None else some
        shares, sizes, kinds = shares[every], self.bytes[every], self.kind[every]
        widened = sizes / np.maximum(shares, 1e-9)
        begins, slopes = self._tangents
        k = np.zeros(len(sizes), dtype=np.int64)
        for kind, xs in enumerate(self.amounts):
            at = np.flatnonzero(kinds == kind)
            k[at] = np.clip(np.searchsorted(xs, widened[at], side="right") - 1, 0, len(xs) - 2)
        begin, slope = begins[kinds, k], slopes[kinds, k]
        return shares * begin + slope * sizes, begin

    @cached_property
    def _tangents(self) -> tuple[Floats, Floats]:
        """[kinds, stretches]: where the lines begin that the envelope is made of, and their
        slopes."""
        slopes = np.diff(self.envelope, axis=1) / np.diff(self.amounts, axis=1)
        return self.envelope[:, :-1] - slopes * self.amounts[:, :-1], slopes

    @cached_property
    def _by_bytes(self) -> Floats:
        """Shares in proportion to bytes."""
        return self.bytes / self.most[self.kind]

    # Chains are told by *places*: a slot in one of the kinds, kind by kind in order of `_rank`.

    @cached_property
    def _places(self) -> tuple[_Places, ...]:
        found, first = [], 0
        for k, gathers in enumerate(self.gathers.tolist()):
            at = np.flatnonzero(self.kind == k)
            ranks = self.read if gathers else self.made
            some = np.unique(self.slot[at])
            some = some[np.lexsort((some, ranks[some]))]
            place = np.argsort(some, kind="stable")[np.searchsorted(np.sort(some), self.slot[at])]
            before = self.before[np.ix_(some, some)]
            slope = self._tangents[1][k, -1]
            saved = np.maximum(self.alone[at] - slope * self.bytes[at], 0.0)
            need = np.zeros(len(some))
            np.maximum.at(need, place, saved / np.maximum(self.held[at], 1e-9))
            late = np.where(before | before.T, -1, self.made[some][None, :]).max(axis=1, initial=-1)
            start = np.maximum(self.read[some], late) if gathers else self.until[some]
            end = self.read[some] if gathers else self.made[some]
            found.append(_Places(first, at, place, before, start, end, need, bool(gathers)))
            first += len(some)
        return tuple(found)

    @cached_property
    def _place(self) -> Ints:
        """[events]: the place of each."""
        out = np.zeros(len(self), dtype=np.int64)
        for x in self._places:
            out[x.events] = x.first + x.place
        return out

    def relations(self, paid: Floats | None) -> list[Bools]:
        """Per kind [places, places]: which two are in no group, the earlier one first; `paid[t]` is
        what a byte costs from the start up to before tick t."""
        return [x.apart(paid) for x in self._places]

    def fitted(self, mixture: Mixture, relations: Sequence[Bools]) -> Mixture:
        """The same chains without what may be in one group after all, and with what may not be any
        more: where fewest chains have passed."""
        chains: list[list[Bools]] = [[] for _ in mixture.chains]
        for x, related in zip(self._places, relations, strict=True):
            both = related | related.T
            passed = np.zeros(len(related))
            for n, (chain, weight) in enumerate(zip(mixture.chains, mixture.weights, strict=True)):
                taken: list[int] = []
                for b in reversed(np.flatnonzero(chain[x.first : x.first + len(related)]).tolist()):
                    if both[b, taken].all():
                        taken.append(b)
                free: Bools = np.asarray(both[:, taken].all(axis=1))
                free[taken] = False
                while free.any():
                    b = int(np.where(free, passed, np.inf).argmin())
                    taken.append(b)
                    free &= both[b]
                here = np.zeros(len(related), dtype=np.bool_)
                here[taken] = True
                passed += weight * here
                chains[n].append(here)
        return Mixture(tuple(np.concatenate(c) for c in chains), mixture.weights, mixture.by_bytes)

    def shares(self, mixture: Mixture) -> Floats:
        """[events]: the share of each collective."""
        total = np.zeros(sum(len(x.need) for x in self._places))
        for chain, weight in zip(mixture.chains, mixture.weights, strict=True):
            total += weight * chain
        return np.minimum(total[self._place] + mixture.by_bytes * self._by_bytes, 1.0)

    def evenly(self, relations: Sequence[Bools]) -> Mixture:
        """Chains that all collectives are on, as far as so few can be."""
        chains = [self._chain(np.ones(len(self)), relations)]
        seen = chains[0].astype(np.float64)
        for _ in range(1, _FIRST):
            chains.append(self._chain(1.0 / (1.0 + 4.0 * seen[self._place]), relations))
            seen += chains[-1]
        return Mixture(tuple(chains), (1.0 / _FIRST,) * _FIRST)

    def towards(
        self, mixture: Mixture, used: Floats, relations: Sequence[Bools], far: float
    ) -> Mixture:
        """The mixture so far on its way to one chain at which what is `used` is priced higher."""
        rises = self._priced(self.shares(mixture))[1] * used
        chain = self._chain(rises, relations)
        if rises @ self._by_bytes > rises @ self._on(chain):
            return mixture.towards(None, far)
        return mixture.towards(chain, far)

    def better(
        self, mixture: Mixture, used: Floats, relations: Sequence[Bools], steps: int
    ) -> Mixture:
        """A mixture at which collectives that are `used` so often are priced higher, as high as so
        few steps lead to."""
        some = np.flatnonzero(used)
        if not len(some):
            return mixture

        def total(shares: Floats) -> float:
            return float(np.einsum("e,e->", self._priced(shares, some)[0], used[some]))

        shares = self.shares(mixture)
        value = total(shares)
        for _ in range(steps):
            rises = np.zeros(len(self))
            rises[some] = self._priced(shares, some)[1] * used[some]
            ahead = self._chain(rises, relations)
            chain, end = cast(Bools | None, ahead), self._on(ahead)
            if rises @ self._by_bytes > rises @ end:
                chain, end = None, self._by_bytes
            found = [total(shares + far * (end - shares)) for far in _LENGTHS]
            best = int(np.argmax(found))
            if found[best] <= value * (1 + 1e-6):
                break
            mixture = mixture.towards(chain, _LENGTHS[best])
            shares = self.shares(mixture)
            value = total(shares)
        return mixture

    def _on(self, chain: Bools) -> Floats:
        """[events]: 1 on a chain, 0 elsewhere."""
        return np.where(chain[self._place], 1.0, 0.0)

    def _chain(self, weights: Floats, relations: Sequence[Bools]) -> Bools:
        """[places]: one chain of every kind, the heaviest that a longest path leads to."""
        least = _UNUSED * float(weights.max(initial=1e-30))
        found = []
        for x, related in zip(self._places, relations, strict=True):
            own: Floats = np.zeros(len(related))
            np.maximum.at(own, x.place, weights[x.events] + least)
            best, came = own.copy(), np.full(len(own), -1)
            for b in range(1, len(own)):
                through = related[:b, b] * best[:b]
                a = int(through.argmax())
                if through[a] > 0.0:
                    best[b] += through[a]
                    came[b] = a
            taken: list[int] = []
            b = int(best.argmax()) if len(best) else -1
            while b >= 0:
                if related[b, taken].all():
                    taken.append(b)
                b = int(came[b])
            on: Bools = np.zeros(len(own), dtype=np.bool_)
            on[taken] = True
            found.append(on)
        return np.concatenate(found)


@dataclass(eq=False)
class _Group:
    """Collectives that are one: from tick `at` on, of so many bytes, that take so long alone."""

    gathers: bool
    at: int
    slots: int = 0
    size: float = 0.0
    alone: float = 0.0
    members: list[int] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.members = []
        self.at = self.at if self.gathers else 0


@dataclass(frozen=True, eq=False)
class _Places:
    """The slots of one kind in order, from number `first` on: place[e] is that of `events[e]`.

    What a gather at one place holds that is made for an earlier one is held from `start` of that to
    its own `end`, what is reduced from its own `start` to `end` of a later one. `need` is what a
    byte must cost in that time so that a group without it is no worse.
    """

    first: int
    events: Ints
    place: Ints
    before: Bools  # [places, places]
    start: Ints  # [places], ticks
    end: Ints  # [places], ticks
    need: Floats  # [places], seconds per byte
    gathers: bool

    def apart(self, paid: Floats | None) -> Bools:
        """[places, places]: which two are in no group, the earlier one first."""
        if paid is None or not paid[-1]:
            return self.before
        waits = paid[np.minimum(self.end, len(paid) - 1)][None, :]
        waits = waits - paid[np.minimum(self.start, len(paid) - 1)][:, None]
        need = self.need[None, :] if self.gathers else self.need[:, None]
        return self.before | np.triu((waits >= need) & (waits > 0.0), 1)


def _stretch(start: int, end: int, amount: float) -> list[tuple[int, int, float]]:
    return [(start, end, amount)] if start < end else []
