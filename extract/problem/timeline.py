"""The timeline: how long a step takes where collectives run beside kernels.

The units of the fixed order run one after another on one stream of compute. A collective is issued
before some unit, when all earlier ones are done, and has arrived before another, which waits for
it. Of those that are issued the links carry first what must arrive first. (XLA's GPU runtime has
one stream for the collectives of a program, whichever links they pass over, and its scheduler
orders them by what waits for them.) So whatever is chosen, from place i to place m, i < m, a step
takes no less than the units i..m-1, nor than all collectives that are issued at i or later and
arrive by m; and it takes no longer than the longest path of such pieces, since serving what is due
first delays nothing that could be in time (processor demand: Baruah, Rosier and Howell, 1990).

A second of communication that is hidden slows what hides it by `slowdown` seconds, so the value is
(1 - slowdown) · longest path + slowdown · sum of all events.

Bounds: every path, and every mixture of paths, gives each event a share in [0, 1] such that
Σ share · seconds ≤ longest path for all choices, and some path reaches what a labelling takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from heapq import heappop, heappush, heapreplace

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
        """What a step takes: `lengths` are the sum of all seconds, which is not needed, and those
        of its events."""
        lengths = lengths[1:]
        longest = float(lengths[: self.units].sum()) + self._waits(lengths)
        return (1.0 - self.slowdown) * longest + self.slowdown * float(lengths.sum())

    def shares(self, lengths: Floats) -> Floats:
        """The price of a second of every event: its share in the longest path of a step whose
        events take `lengths`, and in what slows down; nothing of the sum of all, which is first."""
        lengths = lengths[1:]
        path = np.zeros(len(self))
        path[: self.units] = 1.0
        before = self.units + 1
        for begin, end in reversed(self._jumps(lengths)):
            if end < before:
                path[begin:end] = 0.0
                within = (self.issue >= begin) & (self.arrive <= end)
                path[self.units :][within] = 1.0
                before = begin
        return np.concatenate(([0.0], (1.0 - self.slowdown) * path + self.slowdown))

    def evenly(self) -> Floats:
        """The prices to begin with: half of the way all units, half of it all collectives."""
        half = np.full(len(self), (1.0 - self.slowdown) * 0.5 + self.slowdown)
        return np.concatenate(([0.0], half))

    def _jumps(self, lengths: Floats) -> list[tuple[int, int]]:
        """Where the longest path leaves compute for links, in order, and where other paths do that
        are longer up to there: (issued from, arrived by).

        From the place i where something is issued one may jump to any m where something must have
        arrived; `within[i, m]` is what lies in between.
        """
        sent = np.flatnonzero(lengths[self.units :] > 0.0)
        if not len(sent):
            return []
        begins, begin = np.unique(self.issue[sent], return_inverse=True)
        ends, end = np.unique(self.arrive[sent], return_inverse=True)
        within = np.zeros((len(begins), len(ends)))
        np.add.at(within, (begin, end), lengths[self.units :][sent])
        within = np.cumsum(np.cumsum(within[::-1], axis=0)[::-1], axis=1)
        done = np.concatenate(([0.0], np.cumsum(lengths[: self.units])))
        reached = np.zeros(len(begins))
        jumps = []
        late, k = 0.0, 0
        for n, m in enumerate(ends.tolist()):
            while k < len(begins) and begins[k] <= m:
                reached[k] = done[begins[k]] + late
                k += 1
            through = reached[:k] + within[:k, n]
            best = int(through.argmax())
            if through[best] > done[m] + late:
                late = float(through[best] - done[m])
                jumps.append((int(begins[best]), m))
        return jumps

    def _waits(self, lengths: Floats) -> float:
        """Seconds that units wait for collectives: the links carry what must arrive first."""
        events, waits, places = self._actions
        there = lengths[events] > 0.0
        done = np.concatenate(([0.0], np.cumsum(lengths[: self.units])))
        late = clock = 0.0  # how long units have waited; up to when the links have worked
        queue: list[tuple[int, float]] = []  # (place of arrival, seconds left)
        for wait, place, ran, arrive, length in zip(
            waits[there].tolist(),
            places[there].tolist(),
            done[places[there]].tolist(),
            self.arrive[events[there] - self.units].tolist(),
            lengths[events[there]].tolist(),
            strict=True,
        ):
            now = ran + late
            while queue and clock < now:
                due, left = queue[0]
                if clock + left <= now:
                    clock += left
                    heappop(queue)
                else:
                    heapreplace(queue, (due, left - (now - clock)))
                    clock = now
            clock = max(clock, now)
            if not wait:
                heappush(queue, (arrive, length))
                continue
            while queue and queue[0][0] <= place:
                clock += heappop(queue)[1]
            late += clock - now
        return late

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
