"""Latencies: what merging collectives may take away of the seconds of a plan, and what it may not.

Collectives of one kind over the same devices that need not wait for each other can be one, which
has one latency. How many there will be is not known to a sum. Two things are:

- One collective of x bytes takes T(x) seconds, and no more than M bytes are made one. So y bytes
  add at least a(y), the least of T(x + y) - T(x) over all x up to M - y, to any collective that
  they join. The rest of a copy's seconds, T(y) - a(y), is its latency here.
- Along a chain of units, each of which reads what the one before it makes, every collective that is
  read on the way waits for those before it: these are never merged with one another. Each takes no
  less than T(y) and what others add to it. So all that merging leaves of latencies is no less than
  those along any chain.

So the seconds of a labelling, however merged, are no less than those of all its copies without
latencies, and the latencies along the longest chain. A price on latencies along chains (a mixture
of chains) is a sum over copies again, which message passing bounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .timeline import Floats, Ints

#: The event that latencies are taken away at, before those of reads.
SAVED = 0


@dataclass(frozen=True, eq=False)
class Latencies:
    """Reads of values whose copies may be merged: event 1 + r is read r, whose latency is paid
    along chains through it. Units are numbered in order; a read leads from the unit that makes the
    value to the one that reads it."""

    maker: Ints  # [reads], units
    reader: Ints  # [reads], units, rising
    units: int

    def __len__(self) -> int:
        """The events: what is taken away, and all reads."""
        return 1 + len(self.maker)

    def seconds(self, lengths: Floats) -> float:
        """The least seconds of a labelling however it is merged: `lengths` are its seconds
        unmerged, what latencies it has in all, and those of each read."""
        return float(lengths[0] - lengths[1] + self._longest(lengths[2:])[0])

    def shares(self, lengths: Floats) -> Floats:
        """What a second of each of these counts: along the longest chain of a labelling."""
        path = self._longest(lengths[2:])[1]
        return np.concatenate(([1.0, -1.0], path))

    def evenly(self) -> Floats:
        """No latency counts at all: a bound, whatever the labelling."""
        return np.concatenate(([1.0, -1.0], np.zeros(len(self.maker))))

    def _longest(self, latencies: Floats) -> tuple[float, Floats]:
        """The latencies along the longest chain, and which reads it is made of, as 0 and 1."""
        from .chains import longest  # numba takes long to import

        length, path = longest(self.maker, self.reader, self.units, latencies)
        return float(length), path
