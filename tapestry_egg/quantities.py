"""Quantities as people write them: `60GiB`, `12 ms`, `1.5 kJ`; and back, in a unit that reads well.

Everywhere else they are plain numbers in base units: seconds, bytes, joules, flops.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from .errors import ExtractError
from .printable import brief

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ$]*)\s*\Z")


@dataclass(frozen=True, slots=True)
class Quantity:
    """What can be measured: its units (name, size in base units) from the largest to the smallest,
    the base unit, and units that are read but not written."""

    units: tuple[tuple[str, float], ...]
    base: str
    read: tuple[tuple[str, float], ...] = ()

    def unit_for(self, value: float) -> tuple[str, float]:
        """The unit (name, size in base units) in which `value` has one to three leading digits."""
        for name, size in self.units:
            if abs(value) >= size * (1 - 5e-4):
                return name, size
        return self.units[-1] if value else (self.base, 1.0)

    def parse(self, value: str | float, name: str, where: str = "") -> float:
        """An amount in base units; a bare number is in base units already. `name` says whose.

        Bytes know both `GiB` (2^30) and `GB` (10^9). Raises ExtractError for a malformed number,
        or a unit of something else.

        >>> BYTES.parse("60GiB", "memory"), TIME.parse("1.5 ms", "time")
        (64424509440.0, 0.0015)
        """
        where = where or f"limit on {name}"
        if isinstance(value, int | float) and not isinstance(value, bool):
            number, unit = _float(value), ""
        else:
            match = _NUMBER.match(value) if isinstance(value, str) else None
            if match is None:
                raise ExtractError(
                    f"{brief(value)} is not an amount", where=where, hint=self._spelling()
                )
            number, unit = float(match[1]), match[2].replace("µ", "u").replace("μ", "u")
        if not math.isfinite(number) or number < 0:
            raise ExtractError(
                f"{brief(value)} is not an amount", where=where, hint=self._spelling()
            )
        known = dict(self.units + self.read)
        if unit and unit not in known:
            raise ExtractError(
                f"{unit!r} is not a unit of {name}", where=where, hint=self._spelling()
            )
        return number * known[unit] if unit else number

    def format(self, value: float, digits: int = 3) -> str:
        """`value` in a unit that gives it one to three leading digits.

        >>> BYTES.format(64424509440), TIME.format(0.0123)
        ('60 GiB', '12.3 ms')
        """
        if not math.isfinite(value):
            return str(value)
        name, size = self.unit_for(value)
        return f"{format_number(value / size, digits)} {name}".rstrip()

    def _spelling(self) -> str:
        names = [name for name, _ in self.units if name]
        if not names:
            return "Write a number."
        return f"Write a number, with a unit if you like: {', '.join(names)}."


def _decimal(base: str, prefixes: str) -> tuple[tuple[str, float], ...]:
    power = {"E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "": 0, "m": -3, "u": -6, "n": -9}
    return tuple((p + base, 10.0 ** power[p]) for p in [*prefixes, ""] if p in power)


_BINARY = tuple((f"{p}iB", 2.0**e) for p, e in zip("PTGMK", (50, 40, 30, 20, 10), strict=True))
_SMALL = (("mJ", 1e-3), ("uJ", 1e-6), ("nJ", 1e-9))

TIME = Quantity(
    (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)), "s"
)
BYTES = Quantity(
    (*_BINARY, ("B", 1.0)),
    "B",
    tuple((f"{p}B", 10.0**e) for p, e in zip("PTGMKk", (15, 12, 9, 6, 3, 3), strict=True)),
)
ENERGY = Quantity((*_decimal("J", "GMk"), *_SMALL), "J")
MONEY = Quantity((("USD", 1.0), ("mUSD", 1e-3), ("uUSD", 1e-6)), "USD", (("kUSD", 1e3), ("$", 1.0)))
OPERATIONS = Quantity(_decimal("FLOP", "EPTGMk"), "FLOP")
NUMBER = Quantity((("", 1.0),), "")


def _float(value: float) -> float:
    """A number as a float, infinite where it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def format_number(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, without exponent between 0.001 and a million.

    >>> format_number(0.5), format_number(1234.5), format_number(7.25e9)
    ('0.5', '1234', '7.25e+09')
    """
    if value == 0:
        return "0"
    if not 1e-3 <= abs(value) < 1e6:
        return f"{value:.{digits}g}"
    after = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    text = f"{value:.{after}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
