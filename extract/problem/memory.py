"""Memory: the bytes that every choice occupies, on the time line of `schedule/lifetimes.py`.

What XLA's buffer assignment holds when the lowered plan runs in order: a value while it is read as
it was produced, a copy while it is made and read; where collectives run beside kernels it is made
from where it is issued (`extract/problem/issue_places.py`). Amounts are bytes of one device's
block.

A result that is not donated has a place of its own in which arrays no larger lie before it is made,
one at a time (`extract/certify/buffers.py`). Which do depends on all choices together, and memory
here is a sum over them. So it is counted several times over, each time from below: once all arrays,
and results from when they are made on; and for each of some sizes only the arrays that are larger,
beside the places of all results that are not. No array of the one kind lies in a place of the
other, and places that are larger are left out but for the arrays in them: whatever lies where, a
plan holds as much at that moment. A problem has the moments of every count one after the other; its
peak is the most of all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.tiles import stored_bytes
from tapestry_egg.schedule.lifetimes import constrained_source, left_as_results, lifetimes
from tapestry_egg.schedule.lying import LEAST_PLACE, made_straight, read_straight, window_dims
from tapestry_egg.schedule.schedules import Schedule

from .columns import Columns, Wanted
from .issue_places import IssuePlaces
from .problem import Floats, Ints, Use

# So many sizes are counted with. Of the loss and gradients of a GPT-2 (two layers) on eight devices
# four take a seventh more of processor time than none, two no more, and their fronts are as good.
_SIZES = 2


@dataclass(frozen=True)
class Count:
    """What counts at the moments from `begin` on: arrays of more bytes than `above`, and the places
    of results of no more, from the first kernel on."""

    above: float = 0.0
    begin: int = 0

    def array(self, amount: Floats) -> Floats:
        """The bytes that count of arrays which may lie in the place of a result."""
        return np.where(amount > self.above, amount, 0.0) if self.above else amount

    def place(self, amount: Floats) -> Floats:
        """The bytes that count of the places of results before these are made."""
        return np.where((amount >= LEAST_PLACE) & (amount <= self.above), amount, 0.0)


@dataclass(frozen=True, eq=False)
class ReaderBytes:
    """What one reader of a value adds, by which copies it makes of it; most tables that could be
    asked for are nothing, or have no time in which they count, so each is made where it is used.

    What copies take: while they are made, those that combine no partial values and those that
    do; after that; in places of results; and `beside` a kept copy that they are turned of. None
    where that is nothing. `takes` says where the reader reads the array as it was made, `back`
    where it does not read the kept copy alone, `holds` where a copy is kept. The array that was
    made is `whole`; `own` of it counts as an array, `place` as the place of a result."""

    plain: Floats | None  # [labels of the value, labels of the reader], as all tables
    combining: Floats | None
    live: Floats | None
    places: Floats | None
    beside: Floats | None
    takes: NDArray[np.bool_]
    back: NDArray[np.bool_]
    holds: NDArray[np.bool_]  # [labels of the value, 1]
    whole: Floats  # [labels of the value, 1], bytes
    own: Floats  # [labels of the value, 1]
    place: Floats  # [labels of the value, 1]
    _made: dict[str, Floats | None] = field(default_factory=dict)

    def made(self, name: str) -> Floats | None:
        """Bytes by which the array that was made is in memory, or is not, for the reader's sake."""
        if name not in self._made:
            where, amount = self._part(name)
            found = np.where(where, amount, 0.0)
            self._made[name] = found if found.any() else None
        return self._made[name]

    def _part(self, name: str) -> tuple[NDArray[np.bool_], Floats]:
        """Where it counts, and what then."""
        match name:
            case "returns":
                return self.holds & self.back, self.own
            case "taken beside a kept copy":
                return self.holds & self.takes, self.own
            case "copied away":
                return ~self.takes & ~self.holds, -self.own
            case "not in the old one's place":
                return ~self.takes, self.own
            case "taken":
                return self.takes, self.whole
            case "left":
                return ~self.takes, -self.whole
            case "place of taken":
                return self.takes, self.place
            case "place of left":
                return ~self.takes, -self.place
            case "left as an array":
                return ~self.takes, self.own - self.whole
        raise AssertionError(name)


#: Of a reader: whether what it reads is free and is its old state's place, whether its copy goes on
#: to the end, and along which dims windows move.
_Kind = tuple[bool, bool, bool, frozenset[int] | None]


class Memory:
    """Uses of memory for the variables and pairs of one problem."""

    def __init__(self, choices: UnitChoices, columns: Columns | None = None) -> None:
        self.choices, self.schedule, self.program = (
            choices,
            choices.schedule,
            choices.schedule.program,
        )
        self.columns = columns or Columns(choices)
        self.once = self.columns.once
        schedule, of = choices.schedule, (choices.target.epilogues, choices.target.fusing)
        self.lives = self.once(lambda: lifetimes(schedule, *of), "lifetimes", schedule)
        beside = choices.target.slowdown is not None
        self.places = IssuePlaces(choices.schedule) if beside else None
        moving = window_dims(self.program, choices.target.tiles)
        self.windows: dict[int, frozenset[int]] = {int(v): dims for v, dims in moving.items()}
        tiles = choices.target.tiles is not None
        self.straight = read_straight(choices.schedule, tiles)
        self.made_straight = made_straight(choices.schedule, tiles)
        self._first: dict[int, int] = {}  # value -> the tick of the first copy of it
        self._alone: dict[int, int] = {}  # value -> the one unit that it is kept for in the end
        self.counts = counts(self.columns, self._sizes, self.times)
        self.above = tuple([c.above for c in self.counts])
        self._renewed = renewed(schedule)

    @property
    def times(self) -> int:
        """The moments of one step."""
        return self.lives.times

    @property
    def moments(self) -> int:
        """Those of all counts."""
        return self.times * len(self.counts)

    def turns(self, reader: int | None, v: int) -> tuple[bool, bool]:
        """Whether a unit, if it is one, reads a value straight, and whether it is made so."""
        return (reader, v) in self.straight, v in self.made_straight

    def produced(self, v: int, rows: Ints, parts: Floats) -> tuple[Use, ...]:
        """The array of a value as its unit makes it, where the unit runs as `rows` say; what is
        added up of `parts` is there a tick later."""
        if self.lives.free[v]:
            return self._turned(v, rows)
        table, gives = self.columns.table(v), self.columns.gives(v)
        size = self._sizes(v)
        begin, end = self._span(v)
        late = min(max(begin, 2 * self.schedule.producer[v] + 2), end - 1) if parts.any() else begin
        leaves = self._is_result(v)
        key = table, gives, rows, self.windows.get(v)

        def counted(count: Count) -> list[Use]:
            stays = bool(count.above) and not self._passing(v)

            def amounts() -> Floats:
                own = size[gives[rows]].astype(np.float64)
                return own if stays else count.array(own)

            above = count.above
            whole = self.once(amounts, "made", above, stays, *key)
            uses = [Use(late, end, whole)]
            if late > begin:
                at_once = self.once(
                    lambda: np.where(parts > 0, 0.0, whole), "at once", parts, above, stays, *key
                )
                uses.insert(0, Use(begin, late, at_once))
            if leaves and above:
                place = self.once(lambda: count.place(whole), "place", above, *key)
                uses.append(Use(0, begin, place))
                if late > begin:
                    uses.append(Use(begin, late, np.where(parts > 0, place, 0.0)))
            return uses

        return self._occupied(counted) + self._turned(v, rows)

    def _turned(self, v: int, rows: Ints) -> tuple[Use, ...]:
        """What is turned of a value, beside the old state or what it is a copy of, per row."""
        if (turned := self._bytes_turned(v)) is None:
            return ()
        _, begin, end = self.lives.turned[v]
        whole = self.once(lambda: turned[rows], "turned", turned, rows)
        return self._occupied(lambda count: [Use(begin, end, self._array(count, whole))])

    def turned(self, v: int) -> Floats | None:
        """The bytes of a new state that is turned while it is renewed, per row of its unit; None
        where it never is."""
        return self._bytes_turned(v) if self._renews_turned(v) else None

    def _renews_turned(self, v: int) -> bool:
        """Whether what is turned of a value is a new state, no copy."""
        return v in self.lives.turned and self.lives.turned[v][0].renewed

    def _bytes_turned(self, v: int) -> Floats | None:
        if (turned := self._lies_turned(v)) is None:
            return None
        gives, sizes = self.columns.gives(v), self._sizes(v)
        return self.once(lambda: np.where(turned, sizes, 0.0)[gives], "sizes", turned, sizes, gives)

    def _lies_turned(self, v: int) -> NDArray[np.bool_] | None:
        """Per layout, whether a value is turned; None where it never is."""
        if v not in self.lives.turned:
            return None
        way, table = self.lives.turned[v][0], self.columns.table(v)
        shape, mesh = self.program.types[v].shape, self.choices.mesh
        blocks = (x.local_shape(shape, mesh) for x in table.layouts)
        return self.once(lambda: np.array([way.within(b) for b in blocks]), "turned", way, table)

    def running(self, u: int, scratch: Floats, parts: Floats) -> tuple[Use, ...]:
        """What a unit's kernel takes for itself while it runs, per row, and what it makes that is
        added up when its operands may be gone."""
        at = 2 * u + 1
        # What lies between two kernels of one unit are arrays of their own beside other scratch.
        one = len(self.schedule.units[u].members) == 1

        def counted(count: Count) -> list[Use]:
            uses = [Use(at, at + 2, self._array(count, parts))]
            if one or not count.above:
                uses.insert(0, Use(at, at + 1, self._array(count, scratch)))
            return uses

        return self._occupied(counted)

    def kept(self, v: int, have: Ints, copy: Ints, until: Ints) -> tuple[Use, ...]:
        """A copy in layout `copy` that the readers up to `until` share, per row; -1 for none.

        The produced array is dropped once it is copied; readers that go back to it are charged in
        `read`.
        """
        table, first = self.columns.table(v), self.first(v)
        free, size = self.lives.free[v], self._sizes(v)
        straight, fresh, drops = v in self.made_straight, v not in self._renewed, self._passing(v)
        readers = list(zip(self.columns.others(v), self.columns.ranks(v), strict=True))
        holds = copy >= 0
        stops = {
            e: max(self._copy_ends(r, v) for r, place in readers if place <= readers[e][1])
            for e in sorted(set(until[holds].tolist()))
        }
        leaving = [place for r, place in readers if self._port(r) != "carry"]
        to_the_end = tuple(
            e
            for e, stop in stops.items()
            if stop >= self.times and any(place <= readers[e][1] for place in leaving)
        )

        def counted(count: Count) -> list[Use]:
            stay = to_the_end if count.above else ()

            def amounts() -> tuple[tuple[Floats, Floats], list[Floats], list[Floats], Floats]:
                some = np.where(holds, copy, have)
                held = np.where(holds, 1.0 * size[some], 0.0)
                part = count.array(held)
                lasting = [np.where(until == e, held if e in stay else part, 0.0) for e in stops]
                places = [np.where(until == e, count.place(held), 0.0) for e in stay]
                making = table.making(size, have, some, free, straight)
                every = count.array(np.where(holds, making, 0.0))
                drop = -count.array(np.where(holds, 1.0 * size[have], 0.0))
                return self._apart(table, have, some, every), lasting, places, drop

            key = table, have, copy, until, free, straight, self.windows.get(v)
            making, lasting, places, drop = self.once(amounts, "kept", count.above, stay, *key)
            uses = [
                Use(self._begin(None, v, combines, first), first + 1, part)
                for combines, part in zip((False, True), making, strict=True)
            ]
            uses += [Use(first + 1, e, x) for e, x in zip(stops.values(), lasting, strict=True)]
            if fresh:
                uses += [Use(0, first + 1, x) for x in places]
            if drops:
                uses.append(Use(first + 1, self._span(v)[1], drop))
            return uses

        return self._occupied(counted)

    def kind(self, reader: int, v: int) -> _Kind:
        """What the bytes that one reader adds depend on, but for layouts."""
        # A copy of a new state is made in the old one's place, where that is free by then.
        port = self._port(reader)
        state = port == "state" and (reader, v) not in self.lives.copied
        goes = port != "carry" and self._copy_ends(reader, v) >= self.times
        return self.lives.free[v], state, goes, self.windows.get(v)

    def bytes_of(
        self,
        kind: _Kind,
        turns: tuple[bool, bool],
        v: int,
        have: Ints,
        kept: Ints,
        holds: Ints,
        wanted: Wanted,
    ) -> list[ReaderBytes]:
        """The bytes that one reader of a kind adds in each count, [labels of the value, labels of
        the reader].

        `kept` numbers the layout of the kept copy that serves this reader, or is -1; `holds` says
        whether some copy is kept at all.
        """
        free, state, goes, windows = kind
        table, size = self.columns.table(v), self._sizes(v)
        straight, made = turns
        lies = self._lies_turned(v) if self._renews_turned(v) else None

        def counted(count: Count) -> ReaderBytes:
            stays = bool(count.above) and goes
            shape = (len(have), len(wanted.sets))
            making, live = (np.zeros(shape), np.zeros(shape)), np.zeros(shape)
            beside, places = np.zeros(shape), np.zeros(shape if stays else 0)
            takes, back = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
            a, other = have[:, None], kept[:, None]
            for j, b in wanted.in_turn:
                there = (a == b) | (other == b)
                turned = 1.0 * size[b] * (straight & table.turned[a, b])
                beside[:, j] += count.array(np.where(other == b, turned, 0.0))
                every = np.where(there, 0.0, table.making(size, a, b, free, made) + turned)
                every = count.array(every)
                for part, more in zip(making, self._apart(table, a, b, every), strict=True):
                    part[:, j] += more
                copied = np.where(there | state, 0.0, 1.0 * size[b])
                live[:, j] += copied if stays else count.array(copied)
                if stays:
                    places[:, j] += count.place(copied)
                takes[:, j] |= a == b
                back[:, j] |= other != b
            whole = size[have][:, None].astype(np.float64)
            if lies is not None:  # that is counted already, beside the old one
                whole = np.where(lies[have][:, None], 0.0, whole)
            return ReaderBytes(
                plain=unless_zero(making[0]),
                combining=unless_zero(making[1]),
                live=unless_zero(live),
                places=unless_zero(places),
                beside=unless_zero(beside),
                takes=takes,
                back=back,
                holds=(holds > 0)[:, None],
                whole=whole,
                own=count.array(whole),
                place=count.place(whole),
            )

        def once(count: Count) -> ReaderBytes:
            stays = bool(count.above) and goes
            key = table, have, kept, holds, wanted, free, state, straight, made, windows, lies
            return self.once(lambda: counted(count), "reads", count.above, stays, *key)

        return [once(count) for count in self.counts]

    def read(self, reader: int, v: int, every: Sequence[ReaderBytes]) -> tuple[Use, ...]:
        """What one reader adds, whose bytes in each count are these, and when."""
        return tuple(
            [
                Use(u.start + c.begin, u.end + c.begin, u.amount)
                for c, of in zip(self.counts, every, strict=True)
                for u in self._read(c, reader, v, of)
            ]
        )

    def _read(self, count: Count, reader: int, v: int, of: ReaderBytes) -> list[Use]:
        free, straight = self.lives.free[v], (reader, v) in self.straight
        copy_ends = self._copy_ends(reader, v)
        uses: list[Use] = []

        def add(start: int, end: int, amount: Floats | None) -> None:
            if start < end and amount is not None:
                uses.append(Use(start, end, amount))

        def array(start: int, end: int, name: str) -> None:
            if start < end:
                add(start, end, of.made(name))

        at, fresh = self.lives.reads_at[reader, v], v not in self._renewed
        ends = self.lives.reads_until[reader, v] + 1  # the tick of the last run that reads it
        for combines, part in zip((False, True), (of.plain, of.combining), strict=True):
            add(self._begin(reader, v, combines, at), at + 1, part)
        add(at + 1, copy_ends, of.live)
        if fresh:
            add(0, at + 1, of.places)
        if straight:  # a copy that others share stays as it was gathered
            add(at + 1, ends + 1, of.beside)
        if free and self._is_loops(v) and self._port(reader) in ("state", "carry"):
            # What a loop carries in another layout has an array of its own.
            array(self.lives.made[v] + 1, at, "not in the old one's place")
        if (reader, v) in self.lives.copied:
            array(2 * reader + 1, self.times, "taken")
            if fresh and count.above:
                array(0, 2 * reader + 1, "place of taken")
        if leaves := self.lives.leaving.get((reader, FlatId(v))):  # it leaves as a copy
            source, until = leaves
            if (source == v and self._port(reader)) or self.choices.target.tiles is None:
                array(until, self.times, "left")
                if count.above:  # what it was made as is an array and no result
                    begin = self._span(source)[0]
                    array(begin, until, "left as an array")
                    if self._is_result(source):
                        array(0, begin, "place of left")
        if self._passing(v):
            first = self.first(v)
            array(first + 1, at + 1, "returns")
            array(max(first, at) + 1, ends + 1, "taken beside a kept copy")
            if self._reads_last(reader, v):  # copied away before its last reader runs
                begin, end = self._span(v)
                array(max(begin, at + 1, self._read_before(reader, v)), end, "copied away")
        return uses

    def _is_result(self, v: int) -> bool:
        """Whether a value that is there to the end as it is made, and was not from the begin on, is
        a result in a place of its own."""
        return not self._passing(v) and v not in self._renewed

    def _port(self, u: int) -> str:
        """What a unit is of the boundary of the program or of a region, if it is anything."""
        return self.program.instances[self.schedule.units[u].root].port

    def _is_loops(self, v: int) -> bool:
        """Whether a value is what a loop leaves."""
        maker = self.program.instances[self.schedule.units[self.schedule.producer[v]].root]
        return maker.port in ("carry", "stack") and v == maker.outputs[-1]

    def _array(self, count: Count, amount: Floats) -> Floats:
        return self.once(lambda: count.array(amount), "array", count.above, amount)

    def _sizes(self, v: int) -> Ints:
        """Bytes of a block of a value in memory, per layout."""
        table = self.columns.table(v)
        if (windows := self.windows.get(v)) is None:
            return table.held_bytes
        tensor, tiles, mesh = self.program.types[v], self.choices.target.tiles, self.choices.mesh

        def sizes() -> Ints:
            blocks = [x.local_shape(tensor.shape, mesh) for x in table.layouts]
            item = max(tensor.itemsize, 1)
            return np.array([stored_bytes(b, item, tiles, windows) for b in blocks], np.int64)

        return self.once(sizes, "in tiles", table, tensor, windows)

    def first(self, v: int) -> int:
        """The tick of the first copy that could be made of a value."""
        found = self._first.get(v)
        if found is None:
            producer, at = self.schedule.producer[v], self.lives.reads_at
            found = min(at[r, v] for r in self.schedule.readers[v] if r != producer)
            self._first[v] = found
        return found

    def _apart(
        self, table: CopyTable, have: Ints, need: Ints, making: Floats
    ) -> tuple[Floats, Floats]:
        """What copies take while they are made: those that combine no partial values, and those
        that do, if it matters."""
        if self.places is None:
            return making, np.zeros_like(making)
        combines = table.combines[have, need]
        return np.where(combines, 0.0, making), np.where(combines, making, 0.0)

    def _begin(self, reader: int | None, v: int, combines: bool, at: int) -> int:
        """The tick from which a copy is on its way that is made by tick `at`, for one reader or for
        several; what leaves is only then."""
        if self.places is None:
            return at
        value = FlatId(v)
        reader = self.places.first(value) if reader is None else reader
        if self.places.leaves(reader, value):
            return at
        return min(at, 2 * self.places.of_read(reader, value, combines).issue)

    def _span(self, v: int) -> tuple[int, int]:
        """From when up to before when a value that is read as it was produced is in memory."""
        end = min(self.lives.last[v] + 2, self.times)
        return min(self.lives.made[v], end - 1), end

    def _reads_last(self, reader: int, v: int) -> bool:
        """Whether a unit alone is what a value is kept for in the end."""
        if v not in self._alone:
            producer, last = self.schedule.producer[v], self.lives.last[v]
            at = [r for r in self.schedule.readers[v] if self.lives.reads_until[r, v] == last]
            self._alone[v] = at[0] if len(at) == 1 and at[0] != producer else -1
        return self._alone[v] == reader

    def _read_before(self, reader: int, v: int) -> int:
        """Before which tick everything else that reads a value is done with it."""
        others = [
            r for r in self.schedule.readers[v] if r not in (reader, self.schedule.producer[v])
        ]
        return max((self.lives.reads_until[r, v] + 2 for r in others), default=0)

    def _passing(self, v: int) -> bool:
        """Whether a value has memory of its own that ends with its last reader."""
        return not self.lives.free[v] and self.lives.last[v] < self.times

    def _occupied(self, counted: Callable[[Count], Sequence[Use]]) -> tuple[Use, ...]:
        """The uses of all counts, at the moments of each."""
        return tuple(
            Use(u.start + c.begin, u.end + c.begin, u.amount)
            for c in self.counts
            for u in counted(c)
            if u.start < u.end and self.once.some(u.amount)
        )

    def _copy_ends(self, reader: int, v: int) -> int:
        """Before which tick a copy that a unit reads is no longer in memory."""
        root = self.program.instances[self.schedule.units[reader].root]
        if root.port == "output" or (root.port == "state" and (reader, v) in self.lives.copied):
            return self.times
        return min(self.lives.reads_until[reader, v] + 2, self.times)


def counts(columns: Columns, size: Callable[[int], Ints], times: int) -> tuple[Count, ...]:
    """The counts of a problem of so many moments each: with the sizes that blocks of results may
    have, those first that they have cut over all devices, and that most bytes have. `size` gives
    the bytes of a block of a value per layout."""
    if not columns.choices.target.reserves:
        return (Count(),)
    bytes_of: dict[tuple[int, float], float] = {}
    for v in left_as_results(columns.schedule):
        whole = [not x.partial for x in columns.table(v).layouts]
        sizes = np.unique(size(v)[whole])
        for k, x in enumerate(sizes[sizes >= LEAST_PLACE].tolist()):
            bytes_of[k, x] = bytes_of.get((k, x), 0.0) + x
    order = sorted(bytes_of, key=lambda x: (x[0], -bytes_of[x], x[1]))
    found = sorted(list(dict.fromkeys(x for _, x in order))[:_SIZES])
    return (Count(), *(Count(float(x), (1 + k) * times) for k, x in enumerate(found)))


def renewed(schedule: Schedule) -> frozenset[FlatId]:
    """Values that are new states, or may be what a loop that leaves one begins with: they are in
    the old one's place, or beside it, and are no results."""
    found: set[FlatId] = set()
    for unit in schedule.units:
        root = schedule.program.instances[unit.root]
        if root.port == "state":
            found |= {root.inputs[0], constrained_source(schedule, root.inputs[0])}
        elif root.port == "carry":
            found.add(root.inputs[0])
    return frozenset(found)


def unless_zero(table: Floats) -> Floats | None:
    """A table, where there is anything in it."""
    return table if table.any() else None
