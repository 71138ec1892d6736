"""Issue places: between which units of the fixed order a copy may be on its way.

On machines where collectives run beside kernels a copy has a window of units: it is issued before
one of them runs, and has arrived before another does. What is computed in between hides it, and
its bytes are in memory from where it is issued. The windows follow from the program alone:

- a sum of partial values is sent as soon as it is made, and so is what leaves the program or a
  loop's body, which has arrived when that ends;
- anything else is fetched one large kernel (a contraction, say) before its reader, so that one
  fetched block at most waits while another is in use;
- nothing is on its way across the begin or the end of a loop's body or of a branch.

Places are numbers of units; what is issued at place u waits for all units before u, and what has
arrived by place u is there before u runs. `len(units)` is the end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.schedule.schedules import Schedule


@dataclass(frozen=True, slots=True)
class Window:
    """Where a copy is issued, before which unit it has arrived, and the unit beside which its
    traffic within a device counts."""

    issue: int
    arrive: int
    at: int


class IssuePlaces:
    """The windows of all copies of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.program = schedule, schedule.program
        units = schedule.units
        self.ports = [bool(self.program.instances[u.root].port) for u in units]
        self.large = [u for u in range(len(units)) if self._is_large(u)]
        self.regions = self._regions()
        self.edges = self._edges()

    def of_read(self, reader: int, value: FlatId, partial: bool) -> Window:
        """The window of the copy that a unit makes of a value for itself; `partial` says that it
        combines partial values."""
        arrive, leaves = self.arrival(reader, value), self.leaves(reader, value)
        at = self.schedule.producer[value] if leaves else reader
        return self.window(value, arrive, at, partial or leaves)

    def of_kept(self, value: FlatId, partial: bool) -> Window:
        """The window of a copy that is kept for several readers: it is there for the first."""
        return self.of_read(self.first(value), value, partial)

    def first(self, value: FlatId, readers: Sequence[int] | None = None) -> int:
        """The unit that needs a copy of a value first, of some that read it or of all."""
        maker = self.schedule.producer[value]
        others = [r for r in self.schedule.readers[value] if r != maker]
        return min(readers or others, key=lambda r: (self.arrival(r, value), r))

    def arrival(self, reader: int, value: FlatId) -> int:
        """The place before which a unit needs its copy of a value."""
        maker = self.schedule.producer[value]
        if self.leaves(reader, value):
            return self._end(maker)
        body = self.program.body_of[value]
        for outer, first, last in self.regions:
            if outer == body and first <= reader <= last:
                return first
        return reader

    def window(self, value: FlatId, arrive: int, at: int, soon: bool) -> Window:
        """The window of a copy that has arrived by a place; `soon`: it is sent once it is made."""
        maker = self.schedule.producer[value]
        edge = self.edges[bisect_left(self.edges, arrive) - 1] if arrive else 0
        earliest = min(max(edge, maker + 1), arrive)
        if soon and not self.ports[maker]:
            return Window(earliest, arrive, at)
        k = bisect_left(self.large, arrive)
        large = self.large[k - 1] if k else 0
        return Window(min(max(earliest, large), arrive), arrive, at)

    def leaves(self, reader: int, value: FlatId) -> bool:
        """Whether a unit is where a value leaves the program, or a region."""
        root = self.program.instances[self.schedule.units[reader].root]
        if root.port in ("state", "output"):
            return True
        return root.port in ("carry", "stack", "branch") and (
            self.program.body_of[value] != root.body
        )

    def _end(self, maker: int) -> int:
        """The next edge after a unit."""
        return self.edges[bisect_right(self.edges, maker)]

    def _is_large(self, u: int) -> bool:
        unit = self.schedule.units[u]
        return not self.ports[u] and any(
            self.program.instances[i].signature.fusion == "kernel" for i in unit.members
        )

    def _regions(self) -> list[tuple[int, int, int]]:
        """(body, first unit, last unit) of every region operation of a body, the widest first."""
        found = []
        for (body, _), (start, stop) in self.program.spans.items():
            units = [u for u, unit in enumerate(self.schedule.units) if start <= unit.root < stop]
            if units:
                found.append((int(body), units[0], units[-1]))
        return sorted(found, key=lambda r: (r[1] - r[2], r))

    def _edges(self) -> list[int]:
        """Places that nothing is on its way across: the begin and end of the program and of all
        regions, and wherever kernels of another body follow."""
        units = self.schedule.units
        edges = {0, len(units)}
        for _, first, last in self.regions:
            edges |= {first, last + 1}
        before = None
        for u, unit in enumerate(units):
            if self.ports[u]:
                continue
            if before is not None and unit.body != before:
                edges.add(u)
            before = unit.body
        return sorted(edges)
