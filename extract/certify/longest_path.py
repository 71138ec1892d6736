"""How long a plan's step takes where collectives run beside kernels, and what runs when.

Worked out again for the certificate, place by place and copy by copy. Kernels run one after
another. A copy may be on its way between two kernels: combined partial values, and what leaves the
program or a loop's body, from where it is made; others from the last large kernel before their
reader; up to that reader, or to the end of the stretch of program, loop's body or branch that they
leave. Of all that are on their way the links carry what is needed first. A second of a collective
that is hidden slows the kernels beside it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.plans.plan import Lane
from tapestry_egg.schedule.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Sending:
    """One copy of value `value` for the units `readers`: seconds over links and within the device,
    in all runs of it; whether it combines partial values; what it is called. `window` says between
    which places it is on its way where that is not its own affair."""

    value: int
    readers: tuple[int, ...]
    links: float
    local: float
    combines: bool
    name: str
    window: tuple[int, int] | None = None  # issued before one unit, needed by another


@dataclass(frozen=True)
class Step:
    """A step's seconds; when units run and copies are on their way, as (number, begin, end), on a
    clock that nothing slows down."""

    seconds: float
    slowdown: float
    runs: tuple[tuple[int, float, float], ...]
    flights: tuple[tuple[int, float, float], ...]
    sendings: tuple[Sending, ...]


class _Links:
    """One stream that always carries what is needed first."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.waiting: list[tuple[int, int, float]] = []  # (place, number, seconds left), in order
        self.carried: list[tuple[int, float, float]] = []  # (number, begin, end)

    def add(self, needed: int, number: int, seconds: float) -> None:
        insort(self.waiting, (needed, number, seconds))

    def work(self, until: float) -> None:
        """Carry what there is, up to a time."""
        while self.waiting and self.clock < until:
            needed, number, left = self.waiting.pop(0)
            took = min(left, until - self.clock)
            self._carry(number, took)
            if left > took:
                insort(self.waiting, (needed, number, left - took))
        self.clock = max(self.clock, until)

    def deliver(self, place: int, clock: float) -> float:
        """When all that is needed at a place has arrived, at `clock` at the soonest."""
        while self.waiting and self.waiting[0][0] <= place:
            _, number, left = self.waiting.pop(0)
            self._carry(number, left)
        return max(clock, self.clock)

    def _carry(self, number: int, seconds: float) -> None:
        end = self.clock + seconds
        if self.carried and self.carried[-1][0] == number and self.carried[-1][2] == self.clock:
            self.carried[-1] = (number, self.carried[-1][1], end)
        else:
            self.carried.append((number, self.clock, end))
        self.clock = end


@dataclass(slots=True)
class _Stretch:
    """Units `first` up to before `stop`, across whose ends nothing is on its way."""

    first: int
    stop: int


class Streams:
    """Two streams, compute and links, over one schedule."""

    def __init__(self, schedule: Schedule, slowdown: float | None) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.alone = slowdown is None  # nothing runs beside anything
        self.slowdown = slowdown or 0.0
        self.nests = [self._nest(u.root) for u in schedule.units]
        self.stretch_of = self._stretches()
        self.maker: dict[int, int] = {
            v: u for u, unit in enumerate(schedule.units) for v in unit.outputs
        }

    def step(self, kernels: Sequence[float], sendings: Sequence[Sending]) -> Step:
        """The step of a plan whose units take `kernels` seconds, in all runs of each."""
        count = len(kernels)
        beside = list(kernels)
        issued: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
        for k, s in enumerate(sendings):
            reader, needed = self._first(s.value, s.readers)
            leaves = self._is_exit(reader, s.value)
            beside[self.maker[s.value] if leaves else reader] += s.local
            if s.links > 0.0 and s.window is not None:
                issued[s.window[0]].append((s.window[1], k))
            elif s.links > 0.0:
                place = self._issued(s.value, needed, s.combines or leaves)
                issued[place].append((needed, k))
        clock = 0.0
        links = _Links()
        runs: list[tuple[int, float, float]] = []
        for place in range(count + 1):
            links.work(clock)
            for needed, k in issued[place]:
                links.add(needed, k, sendings[k].links)
            clock = links.deliver(place, clock)
            if place < count:
                runs.append((place, clock, clock + beside[place]))
                clock += beside[place]
        hidden = sum(beside) + sum(s.links for s in sendings) - clock
        seconds = clock + self.slowdown * hidden
        return Step(seconds, self.slowdown, tuple(runs), tuple(links.carried), tuple(sendings))

    def at(self, step: Step, times: Sequence[float]) -> list[float]:
        """Times on the clock of `runs` and `flights`, on the one that is slowed down (`lanes`)."""
        every = (*step.runs, *step.flights)
        edges = np.unique(np.array([0.0, *(t for _, a, b in every for t in (a, b))]))
        both = np.diff(edges) * _busy(step.runs, edges) * _busy(step.flights, edges)
        clock = edges + step.slowdown * np.concatenate(([0.0], np.cumsum(both)))
        slowed: list[float] = np.interp(times, edges, clock).tolist()
        return slowed

    def lanes(self, step: Step) -> tuple[Lane, ...]:
        """The bars of a step in the order in which they begin, on a clock that is slowed down
        wherever both streams are busy."""
        every = (*step.runs, *step.flights)
        edges = np.unique(np.array([0.0, *(t for _, a, b in every for t in (a, b))]))
        both = np.diff(edges) * _busy(step.runs, edges) * _busy(step.flights, edges)
        hidden = np.concatenate(([0.0], np.cumsum(both)))
        clock = edges + step.slowdown * hidden

        def bar(body: int, stream: str, name: str, a: float, b: float, source: str = "") -> Lane:
            i, j = np.searchsorted(edges, (a, b)).tolist()
            behind = float(hidden[j] - hidden[i]) if stream == "links" else 0.0
            begin, end = float(clock[i]), float(clock[j])
            count = self.program.bodies[body].weight
            return Lane(stream, name, begin, end, behind, body, count, source)

        found = []
        for u, a, b in step.runs:
            unit = self.schedule.units[u]
            root = self.program.instances[unit.root]
            if b > a:
                name, source = root.signature.kernel, ""
                if root.operation >= 0:
                    op = self.program.bodies[root.body].graph.operations[root.operation]
                    source = f"{op.source.file}:{op.source.line}" if op.source.file else ""
                found.append(bar(unit.body, "compute", name, a, b, source))
        for k, a, b in step.flights:
            sent = step.sendings[k]
            body = self.program.body_of[FlatId(sent.value)]
            found.append(bar(body, "links", sent.name, a, b))
        return tuple(sorted(found, key=lambda x: (x.start, x.stream, x.end)))

    def in_memory_from(self, value: int, readers: Sequence[int], combines: bool, at: int) -> int:
        """The tick from which a copy takes memory that is made by tick `at`; of what leaves, and
        where nothing runs beside anything, no other one."""
        reader, needed = self._first(value, readers)
        if self.alone or self._is_exit(reader, value):
            return at
        return min(at, 2 * self._issued(value, needed, combines))

    def window(self, members: Sequence[tuple[int, Sequence[int], bool]]) -> tuple[int, int] | None:
        """Between which places copies are on their way that are one collective, each told by its
        value, the units that read it, and whether it combines partial values; None where one is
        read before all are made, or where they would cross an end of a stretch."""
        needed = min(self._first(value, readers)[1] for value, readers, _ in members)
        made = max(self.maker[value] for value, _, _ in members)
        if made >= needed:
            return None
        issued = [
            self._issued(value, needed, combines or self.leaves(value, readers))
            for value, readers, combines in members
        ]
        return max(issued), needed

    def leaves(self, value: int, readers: Sequence[int]) -> bool:
        """Whether the first that needs a copy of a value is where it leaves program or region."""
        return self._is_exit(self._first(value, readers)[0], value)

    def _first(self, value: int, readers: Sequence[int]) -> tuple[int, int]:
        """The reader that needs its copy first, and the place at which it does."""
        needed, reader = min((self._needed(u, value), u) for u in readers)
        return reader, needed

    def _needed(self, reader: int, value: int) -> int:
        if self._is_exit(reader, value):
            return self.stretch_of[self.maker[value]].stop
        body = self.program.body_of[value]
        for outer, start, stop in self.nests[reader]:
            if outer == body:
                units = self.schedule.units
                return min(u for u in range(reader + 1) if start <= units[u].root < stop)
        return reader

    def _issued(self, value: int, needed: int, soon: bool) -> int:
        maker = self.maker[value]
        if not needed:
            return 0
        least = max(self.stretch_of[needed - 1].first, maker + 1)
        if self.alone or least >= needed:
            return needed
        if soon and not self._port(maker):
            return least
        place = needed - 1
        while place > least and not self._large(place):
            place -= 1
        return place

    def _is_exit(self, reader: int, value: int) -> bool:
        root = self.program.instances[self.schedule.units[reader].root]
        if root.port in ("carry", "stack", "branch"):
            return self.program.body_of[value] != root.body
        return root.port in ("state", "output")

    def _port(self, u: int) -> str:
        return self.program.instances[self.schedule.units[u].root].port

    def _large(self, u: int) -> bool:
        unit = self.schedule.units[u]
        kinds = {self.program.instances[i].signature.fusion for i in unit.members}
        return not self._port(u) and "kernel" in kinds

    def _nest(self, root: int) -> tuple[tuple[int, int, int], ...]:
        """The regions around an instance, outermost first: (body, first, stop instance)."""
        spans = self.program.spans.items()
        around = [(int(b), a, z) for (b, _), (a, z) in spans if a <= root < z]
        return tuple(sorted(around, key=lambda r: r[1] - r[2]))

    def _stretches(self) -> list[_Stretch]:
        """Per unit the stretch that it is in."""
        found: list[_Stretch] = []
        body = None
        for u, unit in enumerate(self.schedule.units):
            new = not found or self.nests[u] != self.nests[u - 1]
            if not self._port(u):
                new = new or (body is not None and body != unit.body)
                body = unit.body
            if new:
                found.append(_Stretch(u, u + 1))
            else:
                found.append(found[-1])
                found[-1].stop = u + 1
        return found


def _busy(spans: Sequence[tuple[int, float, float]], edges: np.ndarray) -> np.ndarray:
    """[edges - 1]: whether some span covers what lies between two edges."""
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.searchsorted(edges, [a for _, a, _ in spans]), 1)
    np.add.at(change, np.searchsorted(edges, [b for _, _, b in spans]), -1)
    return (np.cumsum(change)[:-1] > 0).astype(np.float64)
