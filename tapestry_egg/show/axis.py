"""One axis of a drawing: from values to pixels, and where the ticks stand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tapestry_egg.machine.objectives import named
from tapestry_egg.quantities import TIME, format_number

#: A logarithmic axis is chosen where the largest value is more than this times the smallest.
LOG_FROM = 8.0

#: A linear axis starts at zero where the smallest value is less than this times the largest.
ZERO_BELOW = 0.3

#: What is not above this counts as zero.
_TINY = 1e-30

#: Steps within a decade, coarse to fine; the first that gives enough ticks is taken.
_DECADES: tuple[tuple[float, ...], ...] = (
    (1,),
    (1, 3),
    (1, 2, 5),
    (1, 1.5, 2, 3, 5, 7),
    (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 7, 8, 9),
)


@dataclass(frozen=True, slots=True)
class Axis:
    """Values from `low` to `high` laid over the pixels from `start` to `end` (`end` may be less).

    `unit` is the (name, size) of the unit that the tick labels count.
    """

    title: str
    unit: tuple[str, float]
    low: float
    high: float
    log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        """The pixel of a value; values outside are put on the nearer end."""
        low, high, value = (self._scaled(v) for v in (self.low, self.high, value))
        share = (value - low) / (high - low)
        return self.start + (self.end - self.start) * min(1.0, max(0.0, share))

    def _scaled(self, value: float) -> float:
        if not self.log:
            return value
        return math.log(value) if value > 0 else -math.inf

    @property
    def label(self) -> str:
        """What the axis measures, with its unit: `time per step (ms)`."""
        name = self.unit[0]
        return f"{self.title} ({name})" if name else self.title

    def ticks(self) -> list[tuple[float, str]]:
        """Values and texts of four to eight round ticks, in increasing order."""
        size = self.unit[1]
        low, high = self.low / size, self.high / size
        marks = _log_marks(low, high) if self.log else _linear_marks(low, high)
        return [(m * size, format_number(m, 6)) for m in marks]


def fit_axis(
    objective: str, values: Sequence[float], start: float, end: float, scale: str = "auto"
) -> Axis:
    """An axis for `values` of `objective`, with some air at both ends.

    A linear axis starts at zero where that costs little room. An axis with a value
    of zero is linear whatever `scale` asks.
    """
    finite = [v for v in values if math.isfinite(v)] or [0.0]
    low, high = min(finite), max(finite)
    log = low > _TINY and (scale == "log" or (scale == "auto" and high > LOG_FROM * low))
    if log:
        air = (high / low) ** 0.08 if high > low else 1.25
        low, high = low / air, high * air
    else:
        air = 0.1 * (high - low) or 0.2 * abs(high) or 1.0
        low, high = (low - air if low > ZERO_BELOW * high else min(0.0, low)), high + air
    measured = named(objective)
    middle = math.sqrt(low * high) if log else 0.5 * (low + high)
    return Axis(measured.title, measured.quantity.unit_for(middle), low, high, log, start, end)


def time_axis(seconds: float, start: float, end: float) -> Axis:
    """An axis from the begin of a step to its end."""
    unit = TIME.unit_for(0.5 * seconds)
    return Axis("time", unit, 0.0, seconds or 1.0, False, start, end)


def _linear_marks(low: float, high: float) -> list[float]:
    raw = (high - low) / 6
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(s * power for s in (1.0, 2.0, 2.5, 5.0, 10.0) if s * power >= raw * 0.85)
    first = math.ceil(low / step - 1e-9)
    count = math.floor(high / step + 1e-9) - first + 1
    return [float(f"{(first + i) * step:.12g}") for i in range(count)]


def _log_marks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in _DECADES:
        marks = [s * 10.0**p for p in powers for s in steps if low <= s * 10.0**p <= high]
        if len(marks) > 8:
            return marks[:: math.ceil(len(marks) / 8)]
        if len(marks) >= 4:
            return marks
    return _linear_marks(low, high)
