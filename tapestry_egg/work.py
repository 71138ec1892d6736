"""Work: how much a search has done, counted in what it touches instead of in time.

The count is the same on a busy machine and on an idle one, so a search that ends by it ends at the
same place: what it finds depends on nothing but its input. One unit is about what one processor
does in a second.
"""

from __future__ import annotations

# What a call of an array function costs, however short its arrays, in entries of long ones.
CALL = 1000

# So many entries are one unit.
_UNIT = 1e9


class Work:
    """A running count: entries of tables that were read, and calls that read them."""

    __slots__ = ("entries",)

    def __init__(self) -> None:
        self.entries = 0

    def add(self, calls: int, entries: int) -> None:
        """Count calls of array functions, and the entries that they read together."""
        self.entries += calls * CALL + entries

    def add_units(self, units: float) -> None:
        """Count what was estimated in units."""
        self.entries += round(units * _UNIT)

    @property
    def units(self) -> float:
        """All of it, in units."""
        return self.entries / _UNIT
