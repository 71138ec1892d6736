"""Members: the copies of a plan that may be made by one collective, and which are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tapestry_egg.extract.certify.merging import (
    Key,
    Kind,
    copied_apart,
    entering,
    kind_of,
    own_moves,
    payload,
)
from tapestry_egg.extract.certify.moves import Move
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.plans.plan import Merged

#: Which collectives are put together: those next to each other, or those that as many others
#: precede, or follow, one after the other.
Which = Literal["next", "before", "after"]
WHICH: tuple[Which, ...] = get_args(Which)


@dataclass(frozen=True, slots=True)
class Member:
    """A copy that may be merged: what it takes alone, bytes that enter it and bytes that the
    compiler counts, the unit that makes its value, those that read it before a step is over, and
    all units that must have run before it is made."""

    key: Key
    move: Move
    seconds: float
    bytes: float
    payload: float
    maker: int
    readers: int  # a bit for each unit
    before: int  # a bit for each unit


class Candidates:
    """The copies of a plan that may be merged, by what they do."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        combiner = walk.target.combiner
        self._most_bytes = 0.0 if combiner is None else float(combiner.bytes)
        before = walk.schedule.once(lambda: ancestors(walk), "ancestors")
        # A new state is read when all is over: its port comes before others for the old one.
        ports = enumerate(walk.program.instances[x.root].port for x in walk.schedule.units)
        ends = {u for u, port in ports if port == "state"}
        lives = walk.ground.lives
        self.members: dict[Kind, list[Member]] = {}
        for key, move in own_moves(walk).items():
            kind = kind_of(walk, move)
            if kind is None:
                continue
            counted, amount = payload(walk, [move]), entering(walk, [move])
            if counted > self._most_bytes:
                continue
            maker = lives.maker[move.value]
            readers = sum(1 << u for u in set(walk.readers_of(move)) - {maker} - ends)
            seconds = self._seconds(kind, 1, amount)
            one = Member(key, move, seconds, amount, counted, maker, readers, before[maker])
            self.members.setdefault(kind, []).append(one)
        for kind, members in self.members.items():
            late = kind[0] == "all_gather"  # fetched for their readers, not sent when made
            members.sort(key=lambda m: (walk.read_at(m.move) if late else 0, m.maker, m.key[0]))
        self._by_key = {m.key: (kind, m) for kind, own in self.members.items() for m in own}
        self._groups: dict[tuple[Which, bool], tuple[tuple[Merged, ...], float]] = {}

    def most_saved(self) -> float:
        """Seconds that merging can save at most, of what is tried."""
        return max(self.groups(which)[1] for which in WHICH)

    def groups(self, which: Which, waits: bool = True) -> tuple[tuple[Merged, ...], float]:
        """Copies to merge, as many as may be, none waiting for another, and the seconds that this
        saves. Unless some `waits`, no kernel that reads a gathered copy runs later for it."""
        if (which, waits) not in self._groups:
            runs = [run for kind, run in self._runs(which, waits) if self._gain(kind, run) > 0.0]
            if which == "next":  # others know no circles
                runs = [run for run in untangled(runs, self.saved) if self.saved(run) > 0.0]
            keys = tuple(tuple(m.key for m in run) for run in runs)
            self._groups[which, waits] = keys, sum(map(self.saved, runs))
        return self._groups[which, waits]

    def saved_by(self, group: Merged) -> float:
        """Seconds that the copies of a group take less if they are one."""
        return self.saved([self._by_key[key][1] for key in group])

    def saved(self, members: Sequence[Member]) -> float:
        """Seconds that copies of one kind take less if they are one."""
        return self._gain(self._by_key[members[0].key][0], members)

    def _runs(self, which: Which, waits: bool) -> Iterator[tuple[Kind, list[Member]]]:
        """Members that need not wait for each other, two or more."""
        level: Mapping[Key, int] = {}
        if which != "next":
            every = [m for own in self.members.values() for m in own]
            level = levels(self.walk, every, which == "before")
        for kind, members in self.members.items():
            at_once = kind[0] == "all_gather" and not waits
            run = _Run(self.walk, self._most_bytes, at_once)
            # None of a level waits for another, nor do levels for each other in a circle.
            for m in sorted(members, key=lambda m: level[m.key]) if level else members:
                same = not level or not run.members or level[run.members[-1].key] == level[m.key]
                if not (same and run.takes(m)):
                    if len(run.members) > 1:
                        yield kind, run.members
                    run = _Run(self.walk, self._most_bytes, at_once)
                run.add(m)
            if len(run.members) > 1:
                yield kind, run.members

    def _gain(self, kind: Kind, members: Sequence[Member]) -> float:
        apart, amount = sum(m.seconds for m in members), sum(m.bytes for m in members)
        return apart - self._seconds(kind, len(members), amount)

    def _seconds(self, kind: Kind, copies: int, amount: float) -> float:
        """Seconds that one collective of so many copies takes, which so many bytes enter."""
        walk = self.walk
        sent = float(collective_seconds(kind[0], amount, kind[1], walk.mesh, walk.target))
        return sent + (copied_apart(kind, amount, walk.target) if copies > 1 else 0.0)


class _Run:
    """Members that one collective may have: none waits for another, and the compiler makes one of
    so much. `at_once`: what is gathered is made before the first kernel reads any of it."""

    def __init__(self, walk: Walk, most: float, at_once: bool) -> None:
        self.walk, self.most, self.at_once = walk, most, at_once
        self.members: list[Member] = []
        self.size, self.readers, self.before = 0.0, 0, 0
        self.made, self.read = -1, walk.ground.lives.end

    def takes(self, m: Member) -> bool:
        """Whether one more may be among them."""
        if not self.members:
            return True
        if self.readers & m.before or m.readers & self.before:
            return False
        if self.size + m.payload > self.most:
            return False
        return not self.at_once or max(self.made, self._made(m)) <= min(self.read, self._read(m))

    def add(self, m: Member) -> None:
        """One more is among them."""
        self.members.append(m)
        self.size += m.payload
        self.readers, self.before = self.readers | m.readers, self.before | m.before
        self.made, self.read = max(self.made, self._made(m)), min(self.read, self._read(m))

    def _made(self, m: Member) -> int:
        return self.walk.ground.lives.made(m.move.value) + 1

    def _read(self, m: Member) -> int:
        """When a kernel reads it first: a new state is read when a step is over."""
        return self.walk.read_at(m.move) if m.readers else self.walk.ground.lives.end


def untangled(
    groups: Iterable[list[Member]], saved: Callable[[Sequence[Member]], float]
) -> list[list[Member]]:
    """Groups of copies, the members of none waiting for each other, that do not wait for each other
    in a circle either. One that would close a circle with those that are `saved` more by is cut in
    two: what is made of what others of it lead to, and the rest."""
    kept: list[_Tied] = []
    left = sorted(groups, key=saved, reverse=True)
    while left:
        group = left.pop(0)
        readers = before = 0
        for m in group:
            readers, before = readers | m.readers, before | m.before
        behind = _behind(readers, kept)
        if behind & before:
            parts = [
                [m for m in group if bool(m.before & behind) == later] for later in (False, True)
            ]
            left[:0] = [part for part in parts if len(part) > 1]
        else:
            kept.append((group, readers, before))
    return [group for group, _, _ in kept]


#: Members of one collective, all that read one of them, and all that come before one.
_Tied = tuple[list[Member], int, int]


def _behind(readers: int, groups: Iterable[_Tied]) -> int:
    """Some readers, and those of all groups with a member that is made after one of these: a bit
    for each."""
    rest = list(groups)
    while more := [x for x in rest if x[2] & readers]:
        rest = [x for x in rest if not x[2] & readers]
        for _, own, _ in more:
            readers |= own
    return readers


def levels(walk: Walk, members: Iterable[Member], before: bool) -> dict[Key, int]:
    """Of each copy how many others must be made one after the other `before` it, or else after it,
    at most."""
    lives, units = walk.ground.lives, walk.schedule.units
    members = list(members)
    copied = {m.move.value for m in members}
    far = [0] * len(units)  # of each unit, to what it reads or from what it makes
    for m in members if not before else ():
        if not m.readers:  # but when the step is over
            far[lives.maker[m.move.value]] = 1
    for u in range(len(units)) if before else reversed(range(len(units))):
        for _, _, v in units[u].reads:
            maker = lives.maker[v]
            if maker < u and before:
                far[u] = max(far[u], far[maker] + (v in copied))
            elif maker < u:
                far[maker] = max(far[maker], far[u] + (v in copied))
    if before:
        return {m.key: far[lives.maker[m.move.value]] for m in members}
    return {m.key: max((far[u] for u in units_of(m.readers)), default=0) for m in members}


def units_of(bits: int) -> Iterator[int]:
    """The units of a set that has a bit for each."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest


def ancestors(walk: Walk) -> list[int]:
    """Per unit, a bit for itself and for each unit that what it reads is made from."""
    maker = walk.ground.lives.maker
    found: list[int] = []
    for u, unit in enumerate(walk.schedule.units):
        bits = 1 << u
        for _, _, v in unit.reads:
            if maker[v] < u:
                bits |= found[maker[v]]
        found.append(bits)
    return found
