"""What scattered elements cost: lines of memory, and sectors of the cache that all cores share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Caches:
    """The shared cache of a device: its `bytes`, its rate, and the `sector` that it moves for the
    least element; `core` bytes lie in the cache of one core, and `line` bytes are the least that
    memory moves."""

    bytes: float
    bytes_per_second: float
    sector: float
    core: float
    line: float

    def scattered_bytes(
        self,
        nbytes: float,
        run: float,
        unit: float,
        within: float,
        times: float,
        counted: bool,
        memory_rate: float,
    ) -> float:
        """The bytes that memory moves in the time that scattered elements of `nbytes` take, beyond
        those that are counted once already (`Scattered` says what the others are).

        Runs anywhere in more than the cache holds move lines of memory; in less they move sectors
        of the cache, and those that a core holds only what they are. Sums are made in the shared
        cache, wherever they are.
        """
        moved = nbytes * times * max(1.0, self.line / run) if within > self.bytes else 0.0
        if times > 1.0 or within > self.core:
            sectors = nbytes * times * max(1.0, self.sector / unit)
            moved = max(moved, sectors * memory_rate / self.bytes_per_second)
        return max(0.0, moved - nbytes) if counted else moved
