"""What leaves a program, and how long what it is made of is held.

Where a result is a copy, what it was copied from is gone once nothing else reads that.

A new state that is what another was is copied to its own place (AddCopiesForAliasedInputOutputs, in
XLA's copy_insertion.cc) once nothing reads there any more: at once where nothing does, at the end
else. States that change places take one array beside.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tapestry_egg.graph.ids import FlatId, InstanceId
from tapestry_egg.graph.layout import Layout

from .flatten import Instance
from .schedules import Schedule
from .units import is_view

if TYPE_CHECKING:
    from .lifetimes import Lives


@dataclass(frozen=True, slots=True)
class Leaving:
    """Output `unit` reads value `read`, which is `source` or a view of it, and nothing else needs
    that from tick `until` on: it is gone then where the output takes a copy, or one of the views
    on the way. `path` has the reads from the output to the source: units, operands of their
    members, and values."""

    unit: int
    read: FlatId
    source: FlatId
    until: int
    path: tuple[tuple[int, tuple[InstanceId, int], FlatId], ...]

    def copied(self, given: Mapping[int, Layout], needed: Mapping[tuple[int, int], Layout]) -> bool:
        """Whether a plan that gives values, and needs operands, in such layouts copies it."""
        return any(given[v] != needed[operand] for _, operand, v in self.path)


def leaving(lives: Lives) -> tuple[Leaving, ...]:
    """What leaves a program by one output alone."""
    found = []
    for u, unit in enumerate(lives.schedule.units):
        if _root(lives, u).port != "output":
            continue
        ((i, p, read),) = unit.reads
        source, path = read, [(u, (i, p), read)]
        while _is_view(lives, maker := lives.maker[source]):
            i, p, source = next(iter(lives.schedule.units[maker].reads))
            path.append((maker, (i, p), source))
        until = _until(lives, u, source)
        if until < lives.end:
            found.append(Leaving(u, read, source, until, tuple(path)))
    return tuple(found)


def _until(lives: Lives, leaves: int, source: int) -> int:
    """The tick from which a kernel's result is needed by the output alone, if by no other; the
    last one else."""
    made = _root(lives, lives.maker[source]).port in ("", "carry", "stack")
    if not made or not lives.owns_memory(source):
        return lives.end
    until, views = 0, [source]
    for w in views:
        for u in lives.users.get(w, ()):
            if _is_view(lives, u):
                views.append(lives.schedule.units[u].outputs[-1])
            elif u == leaves:
                until = max(until, lives.read(u, w) + 1)
            elif _root(lives, u).port in ("state", "output"):
                return lives.end
            else:
                until = max(until, lives.through(u, w) + 2)
    return until


def _root(lives: Lives, u: int) -> Instance:
    return lives.program.instances[lives.schedule.units[u].root]


def _is_view(lives: Lives, u: int) -> bool:
    return is_view(lives.program, lives.schedule.units[u])


def change_order(views: Sequence[Instance], rank: int) -> bool:
    """Whether views, the last first, put the dims of something into another order together."""
    orders = [x.signature.permutation for x in views]
    place = list(range(rank))
    for order in orders:
        if order is None:  # a view of the same order
            continue
        if len(order) != rank:
            return True
        place = [order[d] for d in place]
    return place != sorted(place)


def doubled(lives: Lives, passed: PassedOn, turned: Collection[int]) -> set[tuple[int, int]]:
    """Outputs, unit and value, whose memory is that of an argument or leaves otherwise, too; or
    what a loop has turned; and new states that are what enters with its dims turned, or that
    change places with others, one for all."""
    inputs = (x for x in lives.schedule.units if lives.program.instances[x.root].port == "input")
    taken = {v for unit in inputs for v in unit.outputs}
    found: set[tuple[int, int]] = set()
    for u, unit in enumerate(lives.schedule.units):
        if _root(lives, u).port not in ("state", "output"):
            continue
        ((*_, v),) = unit.reads
        w, views = v, list[Instance]()
        while _is_view(lives, lives.maker[w]):
            made = lives.schedule.units[lives.maker[w]]
            views += [lives.program.instances[i] for i in reversed(made.members)]
            w = next(source for *_, source in made.reads)
        enters = _root(lives, lives.maker[w]).port in ("input", "state")
        new, rank = _root(lives, u).port == "state", len(lives.program.types[v].shape)
        if enters and change_order(views, rank) if new else w in taken or w in turned:
            found.add((u, v))
        taken.add(w)
        old = _root(lives, lives.maker[w])
        if not new and old.port == "state" and passed.overwritten(w):
            found.add((u, v))
    if (first := passed.changes_first()) is not None:
        found.add((first, _root(lives, first).inputs[0]))
    return found


class PassedOn:
    """Which states of a program get what another was; `maker[v]` is the unit that makes value v."""

    def __init__(self, schedule: Schedule, maker: Mapping[int, int]) -> None:
        self.schedule, self.maker = schedule, maker
        self.states = [u for u in range(len(schedule.units)) if self._root(u).port == "state"]
        of = {u: self.maker[self._seen(self._root(u).inputs[0])] for u in self.states}
        #: unit of a state -> that of the other whose old value it becomes, as it is or as a view
        self.source = {u: w for u, w in of.items() if w != u and self._root(w).port == "state"}

    def changes_first(self) -> int | None:
        """Of the states that change places one of the largest: one array serves all of them."""
        rings = [u for u in self.source if u in self._before(u)]
        types = self.schedule.program.types
        size = {u: types[self._root(u).outputs[0]].nbytes for u in rings}
        return min(rings, key=lambda u: (-size[u], u), default=None)

    def waits(self, u: int) -> bool:
        """Whether unit u is a state that is given another's old value at the end alone."""
        return u in self.source and u not in self._vacant

    def overwritten(self, old: int) -> bool:
        """Whether an old state's place is given another argument."""
        new = self._seen(self._root(self.maker[old]).inputs[0])
        return new != old and self._root(self.maker[new]).port in ("input", "state")

    @cached_property
    def _vacant(self) -> set[int]:
        """Units of states whose old value nothing reads, but to copy it to such a place."""
        read: dict[int, set[int]] = {}
        for u, unit in enumerate(self.schedule.units):
            if not self._is_view(u):
                for *_, v in unit.reads:
                    read.setdefault(self._seen(v), set()).add(u)
        found = set[int]()
        while True:
            more = {
                u
                for u in self.states
                if all(
                    r in found and self.source.get(r) == u
                    for r in read.get(self._root(u).outputs[0], ())
                )
            }
            if more <= found:
                return found
            found |= more

    def _before(self, u: int) -> set[int]:
        """The states whose old values come to a state's place, from one to the next."""
        found = set[int]()
        while u in self.source and self.source[u] not in found:
            u = self.source[u]
            found.add(u)
        return found

    def _seen(self, v: int) -> int:
        """What a value is a view of."""
        while self._is_view(self.maker[v]):
            v = next(source for *_, source in self.schedule.units[self.maker[v]].reads)
        return v

    def _is_view(self, u: int) -> bool:
        return is_view(self.schedule.program, self.schedule.units[u])

    def _root(self, u: int) -> Instance:
        return self.schedule.program.instances[self.schedule.units[u].root]
