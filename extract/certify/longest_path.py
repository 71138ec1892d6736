"""How long a plan's step takes where collectives run beside kernels, and what runs when.

Worked out again for the certificate, place by place, and copy by copy. Kernels run one after
another. A copy may be on its way between two kernels: combined partial values from where they are
made, others from the last large kernel before their reader; up to that reader, or to the end of the
stretch of program, loop's body or branch that they leave. Collectives follow one another in the
order in which they are issued. A second of them that is hidden slows the kernels beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.plans.plan import Lane
from tapestry_egg.schedule.kernels import Schedule


@dataclass(frozen=True, slots=True)
class Sending:
    """One copy of value `value` for the units `readers`: seconds over links and within the device,
    in all runs of it; whether it combines partial values; what it is called."""

    value: int
    readers: tuple[int, ...]
    links: float
    local: float
    combines: bool
    name: str


@dataclass(frozen=True)
class Step:
    """A step's seconds; when units run and copies are on their way, as (number, begin, end), on a
    clock that nothing slows down."""

    seconds: float
    slowdown: float
    runs: tuple[tuple[int, float, float], ...]
    flights: tuple[tuple[int, float, float], ...]
    sendings: tuple[Sending, ...]


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
            reader = min(s.readers, key=lambda u: (self._needed(u, s.value), u))
            needed = self._needed(reader, s.value)
            beside[self.maker[s.value] if self._is_exit(reader, s.value) else reader] += s.local
            if s.links > 0.0:
                issued[self._issued(s, needed)].append((needed, k))
        clock = free = 0.0
        waiting: dict[int, float] = {}  # place -> when all that it needs has arrived
        runs: list[tuple[int, float, float]] = []
        flights: list[tuple[int, float, float]] = []
        for place in range(count + 1):
            for needed, k in sorted(issued[place]):
                begin = max(clock, free)
                free = begin + sendings[k].links
                flights.append((k, begin, free))
                waiting[needed] = free
            clock = max(clock, waiting.pop(place, 0.0))
            if place < count:
                runs.append((place, clock, clock + beside[place]))
                clock += beside[place]
        busy = sum(beside)
        hidden = busy + sum(s.links for s in sendings) - clock
        seconds = clock + self.slowdown * hidden
        return Step(seconds, self.slowdown, tuple(runs), tuple(flights), tuple(sendings))

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

    def _needed(self, reader: int, value: int) -> int:
        if self._is_exit(reader, value):
            return self.stretch_of[self.maker[value]].stop
        body = self.program.body_of[value]
        for outer, start, stop in self.nests[reader]:
            if outer == body:
                units = self.schedule.units
                return min(u for u in range(reader + 1) if start <= units[u].root < stop)
        return reader

    def _issued(self, s: Sending, needed: int) -> int:
        maker = self.maker[s.value]
        if not needed:
            return 0
        least = max(self.stretch_of[needed - 1].first, maker + 1)
        if self.alone or least >= needed:
            return needed
        if s.combines and not self._port(maker):
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
