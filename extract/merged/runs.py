"""Runs: which collectives next to each other are one, within a limit on memory.

Copies of one kind, in the order in which they are made, are cut into runs, each of which is one
collective. What is merged waits in memory for the last of it, so a run has bytes at every tick that
its members would not have apart: those of the certificate (`extract/certify/buffers.py`), in the
order of units that the plan has. That merging may change, and what a cut then holds is counted
after (`extract/merged/peaks.py`). Of all ways to cut the copies of a kind the one that takes least
is found, run by run; kinds come one after the other, and those after have what memory is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from tapestry_egg.extract.certify.kernel_work import held_bytes
from tapestry_egg.extract.certify.merging import Key, Kind, copied_apart, most_bytes, payload
from tapestry_egg.extract.certify.moves import Move
from tapestry_egg.extract.certify.verdict import Copied
from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.plans.plan import Merged

from .members import Candidates, Member, untangled

_Size = Callable[[Layout], float]


@dataclass(frozen=True, slots=True)
class Cut:
    """Copies of a plan that are merged, the seconds that this saves, and the peak that it has; as
    `Runs` tells it that is of units in the plan's own order."""

    groups: tuple[Merged, ...]
    saved: float
    peak: float


@dataclass(frozen=True, slots=True)
class _Run:
    """Members `first` up to before `stop` of a kind: seconds as one collective, and bytes more at
    the ticks from `begin` on. Of some that are gathered, a reader `waits` until all are made."""

    first: int
    stop: int
    seconds: float
    begin: int
    bytes: Floats
    waits: bool


class Runs:
    """The copies of one plan that may be merged, and what runs of them take."""

    def __init__(self, candidates: Candidates) -> None:
        self.candidates, self.members = candidates, candidates.members
        self.walk = candidates.walk
        self._runs: dict[Kind, dict[int, list[_Run]]] = {}
        self._alone: dict[int, Floats] = {}  # value -> bytes of it and its copies, made apart
        self._together: dict[tuple[Move, int, bool], Floats] = {}  # (copy, tick, apart) -> more

    @cached_property
    def profile(self) -> Floats:
        """Bytes alive at each tick, every collective apart."""
        return np.array(self.walk.profile())

    def within(self, limit: float, waits: bool = True) -> Cut:
        """The cut that saves most, kind by kind, of those that hold no more than a limit wherever
        they hold more than the plan. Unless some `waits`, none for which a kernel that reads a
        gathered copy comes later: what else is alive then, too, is not known here.
        """
        held, groups, saved = self.profile.copy(), list[list[Member]](), 0.0
        for kind, members in sorted(self.members.items(), key=lambda x: -len(x[1])):
            runs = self._runs_of(kind)
            least, last = [0.0], list[_Run | None]([None])
            for k in range(1, len(members) + 1):
                best: tuple[float, _Run | None] = least[k - 1] + members[k - 1].seconds, None
                for run in runs.get(k, ()):
                    seconds = least[run.first] + run.seconds
                    if run.waits and not waits:
                        continue
                    if seconds < best[0] and _fits(held, run, limit):
                        best = seconds, run
                least.append(best[0])
                last.append(best[1])
            saved += sum(m.seconds for m in members) - least[-1]
            k = len(members)
            while k:
                by = last[k]
                if by is None:
                    k -= 1
                else:
                    k = by.first
                    groups.append(members[k : by.stop])
                    held[by.begin : by.begin + len(by.bytes)] += by.bytes
        free = untangled(groups, self.saved)
        if len(free) == len(groups) and all(own in groups for own in free):
            return _cut(groups, saved, held)
        # Kinds know nothing of each other: of a circle something is cut off.
        free = [own for own in free if self.saved(own) > 0.0]
        held = sum((self._of(own) for own in free), self.profile)
        return _cut(free, sum(map(self.saved, free)), held)

    def by_levels(self) -> Iterator[Cut]:
        """What is put together by how many others precede copies, or follow them."""
        for which in ("before", "after"):
            for gathers in (True, False):
                keys, saved = self.candidates.groups(which, gathers)
                groups = [[self._by_key[key] for key in group] for group in keys]
                held = sum((self._of(own) for own in groups), self.profile)
                yield _cut(groups, saved, held)

    @cached_property
    def _by_key(self) -> dict[Key, Member]:
        return {m.key: m for own in self.members.values() for m in own}

    @cached_property
    def _kinds(self) -> dict[Key, Kind]:
        return {m.key: kind for kind, own in self.members.items() for m in own}

    def saved_by(self, group: Merged) -> float:
        """Seconds that the copies of a group take less if they are one."""
        return self.saved([self._by_key[key] for key in group])

    def saved(self, members: Sequence[Member]) -> float:
        """Seconds that copies of one kind take less if they are one."""
        return self.candidates.saved(self._kinds[members[0].key], members)

    def _of(self, members: Sequence[Member]) -> Floats:
        """[ticks]: bytes that copies of one kind have more if they are one."""
        walk, kind = self.walk, self._kinds[members[0].key]
        made = max(walk.ground.lives.made(m.move.value) + 1 for m in members)
        at = max(made, min(walk.read_at(m.move) for m in members))
        apart = copied_apart(kind, 1.0, walk.target) > 0.0
        return sum((self._more(m, at, apart) for m in members), np.zeros(len(self.profile)))

    def _runs_of(self, kind: Kind) -> dict[int, list[_Run]]:
        """By where they end, all runs of two members or more that take less than these do apart."""
        if kind not in self._runs:
            found: dict[int, list[_Run]] = {}
            for k in range(len(self.members[kind])):
                for run in self._around(kind, k):
                    found.setdefault(run.stop, []).append(run)
            self._runs[kind] = found
        return self._runs[kind]

    def _around(self, kind: Kind, k: int) -> Iterator[_Run]:
        """The runs of a kind from member k on where copies are made for their readers, else those
        up to it: as long as none waits for another, and the compiler makes one of so much."""
        walk, members, late = self.walk, self.members[kind], kind[0] == "all_gather"
        every = members[k:] if late else members[k::-1]
        readers = before = 0
        run: list[Member] = []
        size, most = 0.0, most_bytes(walk, members[k].move)
        for m in every:
            size += payload(walk, [m.move])
            if size > most or readers & m.before or m.readers & before:
                break
            readers, before = readers | m.readers, before | m.before
            run.append(m)
        amounts = np.cumsum([m.bytes for m in run])
        name, axes, *_ = kind
        sent = np.asarray(collective_seconds(name, amounts, axes, walk.mesh, walk.target))
        alone = np.cumsum([m.seconds for m in run])
        apart = copied_apart(kind, 1.0, walk.target) > 0.0
        total, at = np.zeros(len(self.profile)), -1
        made, read = 0, walk.ground.lives.end
        waited = read  # by a kernel: a new state is read when a step is over
        for n, m in enumerate(run, 1):
            made = max(made, walk.ground.lives.made(m.move.value) + 1)
            read = min(read, walk.read_at(m.move))
            waited = min(waited, walk.read_at(m.move)) if m.readers else waited
            if max(made, read) == at:
                total = total + self._more(m, at, apart)
            else:
                at = max(made, read)
                total = sum((self._more(x, at, apart) for x in run[:n]), np.zeros_like(total))
            seconds = float(sent[n - 1]) + copied_apart(kind, float(amounts[n - 1]), walk.target)
            if n > 1 and seconds < alone[n - 1]:
                first = k if late else k - n + 1
                ticks = np.flatnonzero(total)
                begin, end = (int(ticks[0]), int(ticks[-1]) + 1) if ticks.size else (0, 0)
                waits = late and made > waited
                yield _Run(first, first + n, seconds, begin, total[begin:end], waits)

    def _more(self, member: Member, at: int, apart: bool) -> Floats:
        """[ticks]: bytes that a copy, and what it is made of, have more if it is made with others
        at tick `at`."""
        key = (member.move, at, apart)
        if key not in self._together:
            v, copies = member.move.value, self._copies[member.move.value]
            if v not in self._alone:
                self._alone[v] = self._held(v, [one for _, one in copies])
            joined = [
                replace(one, begin=at, at=at, joined=True, apart=apart)
                if move == member.move
                else one
                for move, one in copies
            ]
            self._together[key] = self._held(v, joined) - self._alone[v]
        return self._together[key]

    def _held(self, v: int, copies: Sequence[Copied]) -> Floats:
        """[ticks]: bytes of a value and its copies."""
        lives, (needs, back, size, inside) = self.walk.ground.lives, self._read[v]
        change = np.zeros(len(self.profile) + 1)
        for x in lives.buffers(v, self.walk.given[v], needs, back, copies, size, inside):
            # Who reads a copy before it is made now comes after.
            end = max(x.end, x.begin + 2) if x.role == "copy" else x.end
            change[x.begin] += x.amount
            change[min(max(end, x.begin), len(self.profile))] -= x.amount
        return np.cumsum(change)[:-1]

    @cached_property
    def _copies(self) -> dict[int, list[tuple[Move, Copied]]]:
        """Value that may be merged -> its copies, each made apart."""
        values = {m.move.value for own in self.members.values() for m in own}
        found: dict[int, list[tuple[Move, Copied]]] = {v: [] for v in values}
        for move in self.walk.moves:
            if move.value in found:
                found[move.value].append((move, self.walk.copied(move)))
        return found

    @cached_property
    def _read(self) -> dict[int, tuple[Mapping[int, list[Layout]], list[int], _Size, _Size]]:
        """Value that may be merged -> who reads it, and what its blocks take."""
        walk = self.walk
        found: dict[int, tuple[Mapping[int, list[Layout]], list[int], _Size, _Size]] = {}
        for v in self._copies:
            type_, windows = walk.program.types[v], walk.ground.windows.get(FlatId(v), ())
            inside = partial(held_bytes, type_, mesh=walk.mesh, tiles=walk.target.tiles)
            size = partial(inside, windows=windows)
            found[v] = (*walk.readers(walk.ground.lives.maker[v], v), size, inside)
        return found


def _cut(groups: Sequence[Sequence[Member]], saved: float, held: Floats) -> Cut:
    keys = tuple(tuple(m.key for m in own) for own in groups)
    return Cut(keys, saved, float(held.max(initial=0.0)))


def _fits(held: Floats, run: _Run, limit: float) -> bool:
    """Whether a run holds no more than a limit wherever it holds more than its members apart."""
    here = held[run.begin : run.begin + len(run.bytes)] + run.bytes
    return bool((here[run.bytes > 0.0] <= limit).all())
