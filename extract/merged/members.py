"""Members: the copies of a plan that may be made by one collective, and which are put together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from tapestry_egg.extract.certify.merging import (
    Key,
    Kind,
    copying,
    entering,
    kind_of,
    most_bytes,
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


@dataclass(frozen=True, slots=True)
class Member:
    """A copy that may be merged: what it takes alone, bytes that enter it, the unit that makes its
    value, those that read it before a step is over, and all units that must have run before it is
    made."""

    key: Key
    move: Move
    seconds: float
    bytes: float
    maker: int
    readers: int  # a bit for each unit
    before: int  # a bit for each unit


class Candidates:
    """The copies of a plan that may be merged, by what they do."""

    def __init__(self, walk: Walk) -> None:
        self.walk = walk
        before = ancestors(walk)
        # A new state is read when all is over: its port comes before others for the old one.
        ports = enumerate(walk.program.instances[x.root].port for x in walk.schedule.units)
        ends = {u for u, port in ports if port == "state"}
        lives = walk.ground.lives
        self.members: dict[Kind, list[Member]] = {}
        for key, move in own_moves(walk).items():
            kind = kind_of(walk, move)
            if kind is None or payload(walk, [move]) > most_bytes(walk, move):
                continue
            maker = lives.maker[move.value]
            readers = sum(1 << u for u in set(walk.readers_of(move)) - {maker} - ends)
            seconds = self._seconds(kind, [move])
            one = Member(key, move, seconds, entering(walk, [move]), maker, readers, before[maker])
            self.members.setdefault(kind, []).append(one)
        for kind, members in self.members.items():
            late = kind[0] == "all_gather"  # fetched for their readers, not sent when made
            members.sort(key=lambda m: (walk.read_at(m.move) if late else 0, m.maker, m.key[0]))

    def most_saved(self) -> float:
        """Seconds that merging can save at most, of what is tried."""
        return max(self.groups(which)[1] for which in get_args(Which))

    def groups(self, which: Which, gathers: bool = True) -> tuple[tuple[Merged, ...], float]:
        """Copies to merge, as many as may be, and the seconds that this saves."""
        made: list[Merged] = []
        saved = 0.0
        for kind, run in self._runs(which, gathers):
            less = self.saved(kind, run)
            if less > 0.0:
                made.append(tuple(m.key for m in run))
                saved += less
        return tuple(made), saved

    def _runs(self, which: Which, gathers: bool) -> Iterator[tuple[Kind, list[Member]]]:
        """Members that need not wait for each other, two or more."""
        kinds = {k: own for k, own in self.members.items() if gathers or k[0] != "all_gather"}
        level: Mapping[Key, int] = {}
        if which != "next":
            every = [m for own in kinds.values() for m in own]
            level = levels(self.walk, every, which == "before")
        for kind, members in kinds.items():
            run: list[Member] = []
            # None of a level waits for another, nor do levels for each other in a circle.
            for m in sorted(members, key=lambda m: level[m.key]) if level else members:
                moves = [x.move for x in (*run, m)]
                small = payload(self.walk, moves) <= most_bytes(self.walk, m.move)
                if level:
                    free = bool(run) and level[run[-1].key] == level[m.key]
                else:
                    free = not any(x.readers & m.before or m.readers & x.before for x in run)
                if not (small and free):
                    if len(run) > 1:
                        yield kind, run
                    run = []
                run = [*run, m]
            if len(run) > 1:
                yield kind, run

    def saved(self, kind: Kind, members: Sequence[Member]) -> float:
        """Seconds that some copies of a kind take less as one collective."""
        return sum(m.seconds for m in members) - self._seconds(kind, [m.move for m in members])

    def _seconds(self, kind: Kind, moves: Sequence[Move]) -> float:
        walk = self.walk
        amount = entering(walk, moves)
        sent = float(collective_seconds(kind[0], amount, kind[1], walk.mesh, walk.target))
        return sent + copying(walk, moves)


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
    return {
        m.key: max((far[u] for u in range(len(units)) if m.readers >> u & 1), default=0)
        for m in members
    }


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
