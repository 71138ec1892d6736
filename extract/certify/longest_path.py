"""How long a plan's step takes where collectives run beside kernels, and what runs when.

Worked out for the certificate, place by place and copy by copy. Kernels run one after another.
Between which of them a copy may be on its way says `extract/problem/issue_places.py`. Of all that
are on their way the links carry what is needed first. A second of a collective that is hidden slows
the kernels beside it.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.extract.problem.issue_places import IssuePlaces, Window
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.plans.plan import Lane
from tapestry_egg.schedule.flatten import FlatProgram
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


class Streams:
    """Two streams, compute and links, over one schedule."""

    def __init__(self, schedule: Schedule, slowdown: float | None) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.alone = slowdown is None  # nothing runs beside anything
        self.slowdown = slowdown or 0.0
        self.places = IssuePlaces(schedule)

    def step(self, kernels: Sequence[float], sendings: Sequence[Sending]) -> Step:
        """The step of a plan whose units take `kernels` seconds, in all runs of each."""
        count = len(kernels)
        beside = list(kernels)
        issued: list[list[tuple[int, int]]] = [[] for _ in range(count + 1)]
        for k, s in enumerate(sendings):
            own = self._window(s.value, s.readers, s.combines)
            beside[own.at] += s.local
            place, needed = s.window or (own.issue, own.arrive)
            if s.links > 0.0:
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
        edges, hidden = _hidden(step)
        slowed: list[float] = np.interp(times, edges, edges + step.slowdown * hidden).tolist()
        return slowed

    def lanes(self, step: Step) -> tuple[Lane, ...]:
        """The bars of a step in the order in which they begin, on a clock that is slowed down
        wherever both streams are busy."""
        edges, hidden = _hidden(step)
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
                source = line(self.program, root.body, root.operation)
                found.append(bar(unit.body, "compute", root.signature.kernel, a, b, source))
        for k, a, b in step.flights:
            sent = step.sendings[k]
            body = self.program.body_of[FlatId(sent.value)]
            found.append(bar(body, "links", sent.name, a, b))
        return tuple(sorted(found, key=lambda x: (x.start, x.stream, x.end)))

    def in_memory_from(self, value: int, readers: Sequence[int], combines: bool, at: int) -> int:
        """The tick from which a copy takes memory that is made by tick `at`; of what leaves, and
        where nothing runs beside anything, no other one."""
        if self.alone or self.leaves(value, readers):
            return at
        return min(at, 2 * self._window(value, readers, combines).issue)

    def window(self, members: Sequence[tuple[int, Sequence[int], bool]]) -> tuple[int, int] | None:
        """Between which places copies are on their way that are one collective, each told by its
        value, the units that read it, and whether it combines partial values; None where one is
        read before all are made, or where they would cross an end of a stretch."""
        arrivals = [self._window(value, readers, False).arrive for value, readers, _ in members]
        needed = min(arrivals)
        if max(self.schedule.producer[value] for value, _, _ in members) >= needed:
            return None
        if self.alone:
            return needed, needed
        issued = [
            self.places.window(
                FlatId(value), needed, needed, combines or self.leaves(value, readers)
            ).issue
            for value, readers, combines in members
        ]
        return max(issued), needed

    def leaves(self, value: int, readers: Sequence[int]) -> bool:
        """Whether the first that needs a copy of a value is where it leaves program or region."""
        return self.places.leaves(self.places.first(FlatId(value), readers), FlatId(value))

    def _window(self, value: int, readers: Sequence[int], combines: bool) -> Window:
        """The window of a copy for some readers; where nothing runs beside anything it is made as
        it is needed."""
        found = self.places.of_read(
            self.places.first(FlatId(value), readers), FlatId(value), combines
        )
        return replace(found, issue=found.arrive) if self.alone else found


def line(program: FlatProgram, body: int, operation: int) -> str:
    """Where an operation of a body was written; empty where that is not known, or it is a port."""
    operations = program.bodies[body].graph.operations
    source = operations[operation].source if 0 <= operation < len(operations) else None
    return f"{source.file}:{source.line}" if source is not None and source.file else ""


def _hidden(step: Step) -> tuple[np.ndarray, np.ndarray]:
    """[times]: when something begins or ends, and for how long both streams were busy by then."""
    every = (*step.runs, *step.flights)
    edges = np.unique(np.array([0.0, *(t for _, a, b in every for t in (a, b))]))
    both = np.diff(edges) * _busy(step.runs, edges) * _busy(step.flights, edges)
    return edges, np.concatenate(([0.0], np.cumsum(both)))


def _busy(spans: Sequence[tuple[int, float, float]], edges: np.ndarray) -> np.ndarray:
    """[edges - 1]: whether some span covers what lies between two edges."""
    change = np.zeros(len(edges), dtype=np.int64)
    np.add.at(change, np.searchsorted(edges, [a for _, a, _ in spans]), 1)
    np.add.at(change, np.searchsorted(edges, [b for _, _, b in spans]), -1)
    return (np.cumsum(change)[:-1] > 0).astype(np.float64)
