"""Checkpoints: which values of a program to keep past its peak, and which to compute again.

Only values that are made before the time of the peak and read after it matter (activations that
the backward pass reads). *Checkpoints* cut the early part of the program into segments where little
passes from one to the next (the residual stream between layers); what passes is kept, so that a
segment can be computed again without any other. Where a segment may compute at most `a` bytes
again, the cuts that pass the fewest bytes are found by dynamic programming; Σ passed + a estimates
the memory that remains (Chen et al. 2016, arXiv:1604.06174, with bytes in the place of layers).
Inside a segment a minimum cut weighs the bytes of what is kept, at a price, against the seconds of
what is computed again. Equal segments make equal choices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.machine.tables.kernel_rates import kernel_rate
from tapestry_egg.machine.target import Target
from tapestry_egg.schedule.lifetimes import Lifetimes, lifetimes
from tapestry_egg.schedule.one_device import scheduled_alone, unit_seconds
from tapestry_egg.schedule.own_arrays import self_compared
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.traffic import traffic_of
from tapestry_egg.schedule.units import is_view
from tapestry_egg.tracing.plain import handles_in

from .second_places import Recomputation

_RESIDENT = ("input", "state", "constant")


def peak_alone(graph: BlockGraph, target: Target) -> float:
    """The most bytes that a program holds on one device, none of its outputs fed back; the graph
    remembers it, as several other forms are held beside the same one."""
    known: dict[FusionCosts | None, float] = graph.__dict__.setdefault("_peak_alone", {})
    if target.fusing not in known:
        known[target.fusing] = Flow(scheduled_alone(graph), target.fusing).peak
    return known[target.fusing]


class Flow:
    """What exists in memory of a scheduled program, and which kernels make it of what.

    Kernels are units that store what they make; `sources[u]` are the stored values that unit u
    reads in the end, through views and what is computed on the fly.
    """

    def __init__(self, schedule: Schedule, costs: FusionCosts | None = None) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.lives: Lifetimes = lifetimes(schedule, costs=costs)
        self.local = {v: k for k, v in enumerate(self.program.bodies[0].values)}
        self._stored: dict[int, frozenset[int]] = {}

    @cached_property
    def profile(self) -> NDArray[np.float64]:
        """Bytes alive at each tick on one device, f64[ticks]."""
        change = np.zeros(self.lives.times + 1)
        for v, size in enumerate(self.program.sizes):
            if self.schedule.producer[v] >= 0 and not self.lives.free[v]:
                end = min(self.lives.last[v] + 2, self.lives.times)
                change[min(self.lives.made[v], end - 1)] += size
                change[end] -= size
        return np.cumsum(change)[:-1]

    @property
    def peak(self) -> float:
        return float(self.profile.max(initial=0.0))

    @cached_property
    def turn(self) -> int:
        """The unit that runs when most is alive; before a region, if that is in one. -1: none."""
        if not self.schedule.units:
            return -1
        turn = min(int(self.profile.argmax()) // 2, len(self.schedule.units) - 1)
        for start, stop in self.program.spans.values():
            inside = [u for u, x in enumerate(self.schedule.units) if start <= x.root < stop]
            if inside and inside[0] <= turn <= inside[-1]:
                turn = inside[0] - 1
        return turn

    @cached_property
    def early(self) -> int:
        """The last operation of the program that runs up to the turn, -1 if none does."""
        inside = {
            i: k
            for (body, k), span in self.program.spans.items()
            if body == 0
            for i in range(*span)
        }
        numbers = [
            inside.get(i, self.program.instances[i].operation)
            for unit in self.schedule.units[: self.turn + 1]
            for i in unit.members
        ]
        return max(numbers, default=-1)

    def stored(self, v: int) -> frozenset[int]:
        """The stored values that reading value v reads."""
        stack = [v]
        while stack:
            u = stack[-1]
            if u in self._stored:
                stack.pop()
                continue
            below = self._through(u)
            open_ = [w for w in below if w not in self._stored]
            if open_:
                stack += open_
                continue
            if below:
                self._stored[u] = frozenset().union(*(self._stored[w] for w in below))
            else:
                self._stored[u] = frozenset((u,))
            stack.pop()
        return self._stored[v]

    def _through(self, v: int) -> tuple[int, ...]:
        """What a value that is not stored is a view of, or computed from where it is read."""
        u = self.schedule.producer[v]
        if u < 0 or not self.passing[u]:
            return ()
        return tuple(dict.fromkeys(w for _, _, w in self.schedule.units[u].reads))

    @cached_property
    def passing(self) -> tuple[bool, ...]:
        """Per unit, whether it stores nothing: a view, or computed inside every reader."""
        within = zip(self.schedule.units, self.lives.within, strict=True)
        return tuple(
            [
                is_view(self.program, unit) or (inside and not self.root_port(u))
                for u, (unit, inside) in enumerate(within)
            ]
        )

    def root_port(self, u: int) -> str:
        return self.program.instances[self.schedule.units[u].root].port

    @cached_property
    def sources(self) -> tuple[frozenset[int], ...]:
        none: frozenset[int] = frozenset()
        return tuple(
            none.union(*(self.stored(v) for _, _, v in unit.reads)) for unit in self.schedule.units
        )

    def makes(self, u: int) -> tuple[int, ...]:
        """The stored values that unit u makes."""
        return () if self.passing[u] else self.schedule.units[u].outputs

    @cached_property
    def _once(self) -> frozenset[FlatId]:
        return self_compared(self.program)

    def repeatable(self, u: int) -> bool:
        """Whether a unit may run twice: plain operations of the program itself that have no
        effects and are not themselves a recomputation, nor compared with what they gave before."""
        if not self._once.isdisjoint(self.schedule.units[u].outputs):
            return False
        for i in self.schedule.units[u].members:
            instance = self.program.instances[i]
            if instance.port or instance.body or instance.signature.opaque:
                return False
            op = self.program.bodies[0].graph.operations[instance.operation]
            if op.effectful or op.regions or op.remat is not None or handles_in(op.params):
                return False
        return True


class Checkpoints:
    """The choice of what to keep, for one scheduled program and target."""

    def __init__(self, flow: Flow, target: Target) -> None:
        self.flow, self.target = flow, target
        self.schedule, self.program = flow.schedule, flow.program
        self.size = self.program.sizes

    @cached_property
    def _seconds(self) -> tuple[float, ...]:
        """Per unit, its time."""
        traffic = traffic_of(self.schedule, self.target)
        units = self.schedule.units
        return tuple([unit_seconds(self.program, u, self.target, traffic) for u in units])

    @cached_property
    def seconds(self) -> float:
        """Seconds of the program on one device."""
        return sum(self._seconds)

    @cached_property
    def _first(self) -> dict[int, int]:
        """Value made up to the turn -> the first unit past it that reads it."""
        found: dict[int, int] = {}
        for u in range(len(self.schedule.units) - 1, self.flow.turn, -1):
            if not self.flow.passing[u]:
                found.update(dict.fromkeys(filter(self._own, self.flow.sources[u]), u))
        return found

    @cached_property
    def late(self) -> frozenset[int]:
        """Values made up to the turn and read after it, except those in memory throughout."""
        return frozenset(self._first)

    def _own(self, v: int) -> bool:
        """Whether a value is made up to the turn, and is not in memory from then on anyway."""
        u, lives = self.schedule.producer[v], self.flow.lives
        resident = self.flow.root_port(u) in _RESIDENT or lives.last[v] >= lives.times
        return 0 <= u <= self.flow.turn and not resident

    @cached_property
    def crossing(self) -> int:
        """Bytes of what is kept past the turn."""
        return sum(self.size[v] for v in self.late)

    @cached_property
    def _last(self) -> dict[int, int]:
        """Value -> the last unit up to the turn that reads it."""
        found: dict[int, int] = {}
        for u in range(self.flow.turn + 1):
            if not self.flow.passing[u]:
                found.update(dict.fromkeys(self.flow.sources[u], u))
        return found

    @cached_property
    def passed(self) -> NDArray[np.float64]:
        """Entry t: bytes made before unit t and read by it or later ones up to the turn."""
        change = np.zeros(self.flow.turn + 3)
        for v, last in self._last.items():
            if self._own(v):
                change[self.schedule.producer[v] + 1] += self.size[v]
                change[last + 1] -= self.size[v]
        return np.cumsum(change)[:-1]

    def cuts(self, largest: float) -> tuple[int, ...]:
        """The units before which the early part is cut, so that no segment makes more than
        `largest` late bytes (a single unit may) and the cuts pass the fewest bytes."""
        n = self.flow.turn + 1
        made = np.zeros(n + 1)
        for v in self.late:
            made[self.schedule.producer[v] + 1] += self.size[v]
        total = np.cumsum(made)
        best = np.full(n + 1, np.inf)
        best[0] = 0.0
        before = np.zeros(n + 1, dtype=np.int64)
        for j in range(1, n + 1):
            first = int(np.searchsorted(total[:j], total[j] - largest - 0.5))
            first = min(first, j - 1)
            i = first + int(best[first:j].argmin())
            # One byte more for each cut: no cuts where nothing is gained.
            best[j] = best[i] + (self.passed[j] + 1.0 if j < n else 0.0)
            before[j] = i
        found, j = [], n
        while j > 0:
            j = int(before[j])
            found.append(j)
        return tuple(sorted(found))[1:]

    def remains(self, cuts: Sequence[int]) -> float:
        """An estimate of the bytes that remain past the turn: what the cuts pass, and the largest
        segment."""
        ends = [0, *cuts, self.flow.turn + 1]
        sizes = [0.0] * (len(ends) - 1)
        for v in self.late:
            sizes[int(np.searchsorted(ends, self.schedule.producer[v], side="right")) - 1] += (
                self.size[v]
            )
        return float(sum(self.passed[c] for c in cuts) + max(sizes, default=0.0))

    def units(self, cuts: Sequence[int], price: float) -> dict[int, int]:
        """The units to run again, segment by segment, where a byte that is kept costs `price`
        seconds; and the segment of each."""
        ends = [0, *cuts, self.flow.turn + 1]
        known: dict[object, frozenset[int]] = {}
        again: dict[int, int] = {}  # unit -> segment
        for s in range(len(ends) - 1):
            inside = range(ends[s], ends[s + 1])
            again.update(dict.fromkeys(self._segment(inside, price, known), s))
        return again

    @cached_property
    def kept(self) -> frozenset[int]:
        """The units before the turn that are a library's attention on the target (cuDNN's), which
        else runs in blocks of scores: they run once.

        On an H100 (JAX 0.11.2, bfloat16) steps of GPT-2 whose attention was computed again gave
        gradients that are not the program's, where all else computed again gave the right ones.
        """
        return frozenset(u for u in range(self.flow.turn + 1) if self._by_a_library(u))

    def _by_a_library(self, u: int) -> bool:
        for i in self.schedule.units[u].members:
            own = self.program.instances[i].signature
            dtype = own.output_types[0].dtype if own.output_types else ""
            if own.scratch is None or not own.scratch.blocks:
                continue
            if kernel_rate(own.kernel, own.measured, dtype, self.target.name) is not None:
                return True
        return False

    def _segment(
        self, inside: range, price: float, known: dict[object, frozenset[int]]
    ) -> list[int]:
        """The units of one segment to run again: a minimum cut (what is needed | the rest)."""
        flow = self.flow
        units = [
            u
            for u in inside
            if not flow.passing[u]
            and flow.repeatable(u)
            and u not in self.kept
            and all(self._last.get(v, u) < inside.stop for v in flow.makes(u))
        ]
        number = {u: k for k, u in enumerate(units)}
        makers = {v: u for u in units for v in flow.makes(u)}
        arcs: list[tuple[str, str, float]] = []
        outside: dict[int, int] = {}
        for u in units:
            k = number[u]
            arcs.append((f"again {k}", "rest", self._seconds[u]))
            for q, v in enumerate(flow.makes(u)):
                arcs.append((f"need {k} {q}", f"again {k}", price * self.size[v]))
                if v in self.late:
                    arcs.append(("all", f"need {k} {q}", np.inf))
            for w in sorted(flow.sources[u]):
                if w in makers:
                    m = makers[w]
                    q = flow.makes(m).index(w)
                    arcs.append((f"again {k}", f"need {number[m]} {q}", np.inf))
                elif self._own(w) and w not in self.late:
                    name = f"keep {outside.setdefault(w, len(outside))}"
                    arcs.append((f"again {k}", name, np.inf))
                    arcs.append((name, "rest", price * self.size[w]))
        key = tuple(arcs)
        if key not in known:
            known[key] = _needed(arcs)
        return [u for u in units if number[u] in known[key]]

    def recomputation(self, again: Mapping[int, int]) -> Recomputation:
        """The values of the units to run again, and of what is computed from them on the fly."""
        flow, segment = self.flow, dict[FlatId, int]()
        for u in range(flow.turn + 1):
            if u in again:
                number = again[u]
            elif flow.passing[u] and flow.repeatable(u):
                read = [segment[v] for _, _, v in self.schedule.units[u].reads if v in segment]
                if not read:
                    continue
                number = max(read)
            else:
                continue
            for i in self.schedule.units[u].members:
                segment.update(dict.fromkeys(self.program.instances[i].outputs, number))
        numbers = {s: k for k, s in enumerate(sorted(set(segment.values())))}
        segments: list[list[int]] = [[] for _ in numbers]
        for v, s in sorted(segment.items()):
            segments[numbers[s]].append(flow.local[v])
        feedback = tuple(sorted(self.program.feedback.items()))
        return Recomputation(flow.early, tuple(map(tuple, segments)), feedback)

    def estimate(self, again: Mapping[int, int]) -> tuple[float, float]:
        """Seconds and peak bytes of the program with second instances of units, on one device.

        The schedule is taken to stay as it is: a second instance is there from its first reader on,
        and what it is made of that is kept stays until then. That kernels fuse differently around
        second instances is left out.
        """
        flow, lives, producer = self.flow, self.flow.lives, self.schedule.producer
        change = np.zeros(lives.times + 1)
        needed, until = dict(self._first), dict[int, int]()  # in units, and in ticks
        ends: dict[int, int] = {}  # value -> the last unit up to the turn that reads its first
        unread = set[int]()  # units whose first instances nothing reads: they are not made
        for u in range(flow.turn, -1, -1):
            if u in again and all(self._own(v) and v not in ends for v in flow.makes(u)):
                unread.add(u)
            elif not flow.passing[u]:
                for v in flow.sources[u]:
                    ends.setdefault(v, u)
        seconds = self.seconds

        def add(v: int, start: int, last: int, sign: int) -> None:
            if not lives.free[v]:
                end = min(last + 2, lives.times)
                change[min(start, end - 1)] += sign * self.size[v]
                change[end] -= sign * self.size[v]

        for u in sorted(again, reverse=True):
            made = [v for v in flow.makes(u) if v in needed]
            if not made:
                continue
            at = min(needed[v] for v in made)
            seconds += 0.0 if u in unread else self._seconds[u]
            for w in flow.sources[u]:
                until[w] = max(until.get(w, 0), 2 * at + 1)
                if producer[w] in again:
                    needed[w] = min(needed.get(w, at), at)
            for v in made:
                last = lives.last[v] if v in self._first else until[v]
                add(v, 2 * at, last, 1)
                add(v, lives.made[v], lives.last[v], -1)
                if u not in unread:
                    add(v, lives.made[v], 2 * ends.get(v, u), 1)
        for v, last in until.items():
            if producer[v] not in again and lives.last[v] < last:
                add(v, lives.made[v], lives.last[v], -1)
                add(v, lives.made[v], last, 1)
        return seconds, float((flow.profile + np.cumsum(change)[:-1]).max())


def _needed(arcs: Sequence[tuple[str, str, float]]) -> frozenset[int]:
    """Numbers of the units on the side of what is needed in a minimum cut."""
    import networkx as nx

    # The algorithm goes through sets of nodes, and flows are floats: names would be met in another
    # order in every process, and flows be rounded in another way.
    number = {"all": 0, "rest": 1}
    for a, b, _ in arcs:
        number.setdefault(a, len(number))
        number.setdefault(b, len(number))
    graph = nx.DiGraph()
    graph.add_nodes_from(range(len(number)))
    for a, b, capacity in arcs:
        if np.isinf(capacity):
            graph.add_edge(number[a], number[b])  # no capacity: infinite
        else:
            graph.add_edge(number[a], number[b], capacity=capacity)
    _, (needed, _) = nx.minimum_cut(graph, 0, 1)
    names = (name for name, n in number.items() if n in needed)
    return frozenset(int(name.split()[1]) for name in names if name.startswith("again"))
