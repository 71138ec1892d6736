"""The timeline: how long a step takes where collectives run beside kernels.

The units of the fixed order run one after another on one stream of compute, collectives one after
another, in the order in which they are issued, on one stream of links. (XLA's GPU runtime has one
such stream for the collectives of a program, whichever links they pass over.) A collective is
issued before some unit, when all earlier ones are done, and has arrived before another, which waits
for it. So the time is a longest path ("max-plus") through a graph that is the same for all choices;
they decide how long each event takes, and an event of no length makes nobody wait.

A second of communication that is hidden slows what hides it by `slowdown` seconds, so the value is
(1 - slowdown) · longest path + slowdown · sum of all events.

Bounds: from place i to place m, i < m, either the units i..m-1 run, or all collectives that are
issued at i or later and arrive by m: either takes no longer than the step takes between the two
places, whatever is chosen. So every path of such pieces, and every mixture of paths, is a share in
[0, 1] for every event with Σ share · seconds ≤ longest path for all choices, and some path reaches
what a labelling takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Timeline:
    """The events of one order: event u < `units` is unit u, and the others are collectives, in the
    order in which they are issued: number units + k at place `issue[k]`, there at `arrive[k]`."""

    units: int
    issue: Ints  # [collectives], places of units, in order
    arrive: Ints  # [collectives], places of units
    slowdown: float

    def __len__(self) -> int:
        return self.units + len(self.issue)

    def seconds(self, lengths: Floats) -> float:
        """What a step takes whose events take `lengths`."""
        longest, _ = self._pass(lengths)
        return (1.0 - self.slowdown) * longest + self.slowdown * float(lengths.sum())

    def shares(self, lengths: Floats) -> Floats:
        """The price of a second of every event: the longest path of a step whose events take
        `lengths`, and what slows down."""
        _, jumps = self._pass(lengths)
        path = np.zeros(len(self))
        path[: self.units] = 1.0
        before = self.units + 1
        for begin, end in reversed(jumps):
            if end >= before:
                continue
            path[begin:end] = 0.0
            within = (self.issue >= begin) & (self.arrive <= end)
            path[self.units :][within] = 1.0
            before = begin
        return (1.0 - self.slowdown) * path + self.slowdown

    def evenly(self) -> Floats:
        """The prices to begin with: half of the way all units, half of it all collectives."""
        return np.full(len(self), (1.0 - self.slowdown) * 0.5 + self.slowdown)

    def _pass(self, lengths: Floats) -> tuple[float, list[tuple[int, int]]]:
        """The longest path, and where it leaves compute for links: (issued at, arrived by), for
        every time that a unit waited, in order."""
        events, waits, places = self._actions
        there = lengths[events] > 0.0
        done = np.concatenate(([0.0], np.cumsum(lengths[: self.units])))
        late = link = 0.0  # how long units have waited so far; when the links are free
        begun = 0  # place at which the links were last free
        arrived: dict[int, tuple[float, int]] = {}
        jumps: list[tuple[int, int]] = []
        for event, wait, place, ran in zip(
            events[there].tolist(),
            waits[there].tolist(),
            places[there].tolist(),
            done[places[there]].tolist(),
            strict=True,
        ):
            now = ran + late
            if wait:
                at, since = arrived[event]
                if at > now:
                    late += at - now
                    jumps.append((since, place))
            else:
                if now >= link:
                    link, begun = now, place
                link += float(lengths[event])
                arrived[event] = link, begun
        return float(done[-1]) + late, jumps

    @cached_property
    def _actions(self) -> tuple[Ints, NDArray[np.bool_], Ints]:
        """What happens to collectives, in order: (event, whether a unit waits for it, place)."""
        found = []
        for k, (issue, arrive) in enumerate(
            zip(self.issue.tolist(), self.arrive.tolist(), strict=True)
        ):
            found += [(issue, False, k), (arrive, True, k)]
        found.sort()
        events = np.array([self.units + k for _, _, k in found], dtype=np.int64)
        waits = np.array([wait for _, wait, _ in found], dtype=np.bool_)
        return events, waits, np.array([place for place, _, _ in found], dtype=np.int64)


class Events:
    """Numbers of the events of a timeline, by window, until all are known."""

    def __init__(self, units: int) -> None:
        self.units = units
        self._number: dict[tuple[int, int], int] = {}

    def collective(self, issue: int, arrive: int) -> int:
        """A provisional number for what is issued at one place and there at another."""
        return self.units + self._number.setdefault((issue, arrive), len(self._number))

    def timeline(self, slowdown: float) -> tuple[Timeline, Mapping[int, int]]:
        """The timeline, and the final number of every provisional one."""
        order = sorted(self._number)
        final = {self.units + self._number[w]: self.units + k for k, w in enumerate(order)}
        issue = np.array([i for i, _ in order], dtype=np.int64)
        arrive = np.array([a for _, a in order], dtype=np.int64)
        return Timeline(self.units, issue, arrive, slowdown), final
