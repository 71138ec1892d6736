"""Quantities as people write them: `60GiB`, `12 ms`, `1.5 kJ`; and back, in a unit that reads well.

Objectives are plain numbers in base units everywhere else: seconds, bytes, joules, flops.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import ExtractError
from .printable import brief


@dataclass(frozen=True, slots=True)
class Quantity:
    """What an objective measures: its words, and its units from the largest to the smallest."""

    title: str
    units: tuple[tuple[str, float], ...]
    base: str

    def unit_for(self, value: float) -> tuple[str, float]:
        """The unit (name, size in base units) in which `value` has one to three leading digits."""
        for name, size in self.units:
            if abs(value) >= size * (1 - 5e-4):
                return name, size
        return self.units[-1] if value else (self.base, 1.0)


_TIME = (("h", 3600.0), ("min", 60.0), ("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9))
_BYTES = tuple((f"{p}iB", 2.0**e) for p, e in zip("PTGMK", (50, 40, 30, 20, 10), strict=True))
_DECIMAL_BYTES = {f"{p}B": 10.0**e for p, e in zip("PTGMKk", (15, 12, 9, 6, 3, 3), strict=True)}


def _decimal(base: str, prefixes: str) -> tuple[tuple[str, float], ...]:
    power = {"E": 18, "P": 15, "T": 12, "G": 9, "M": 6, "k": 3, "": 0, "m": -3, "u": -6, "n": -9}
    return tuple((p + base, 10.0 ** power[p]) for p in [*prefixes, ""] if p in power)


#: Objectives by name, with what they measure.
QUANTITIES: Mapping[str, Quantity] = {
    "seconds": Quantity("time per step", _TIME, "s"),
    "peak_bytes": Quantity("peak memory per device", (*_BYTES, ("B", 1.0)), "B"),
    "wire_bytes": Quantity("bytes sent per device", (*_BYTES, ("B", 1.0)), "B"),
    "joules": Quantity(
        "energy per step", (*_decimal("J", "GMk"), ("mJ", 1e-3), ("uJ", 1e-6), ("nJ", 1e-9)), "J"
    ),
    "flops": Quantity("operations per device", _decimal("FLOP", "EPTGMk"), "FLOP"),
    "devices": Quantity("devices", (("", 1.0),), ""),
}

_NUMBER = re.compile(r"\s*([+-]?(?:\d[\d_]*\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([A-Za-zµμ]*)\s*\Z")


def parse_quantity(value: str | float, objective: str, where: str = "") -> float:
    """A limit or amount of `objective` in base units; a bare number is in base units already.

    Bytes know both `GiB` (2^30) and `GB` (10^9). Raises ExtractError for an unknown objective, a
    malformed number, or a unit that does not measure the objective.

    >>> parse_quantity("60GiB", "peak_bytes")
    64424509440.0
    >>> parse_quantity("1.5 ms", "seconds")
    0.0015
    """
    where = where or f"limit on {objective}"
    if objective not in QUANTITIES:
        raise ExtractError(
            f"unknown objective {objective!r}",
            where=where,
            hint=f"Objectives are {', '.join(QUANTITIES)}.",
        )
    if isinstance(value, int | float) and not isinstance(value, bool):
        number, unit = _float(value), ""
    else:
        match = _NUMBER.match(value) if isinstance(value, str) else None
        if match is None:
            raise ExtractError(
                f"{brief(value)} is not an amount", where=where, hint=_spelling(objective)
            )
        number, unit = float(match[1]), match[2].replace("µ", "u").replace("μ", "u")
    if not math.isfinite(number) or number < 0:
        raise ExtractError(
            f"{brief(value)} is not an amount", where=where, hint=_spelling(objective)
        )
    known = dict(QUANTITIES[objective].units)
    if "B" in known:
        known |= _DECIMAL_BYTES
    if unit and unit not in known:
        raise ExtractError(
            f"{unit!r} is not a unit of {objective}", where=where, hint=_spelling(objective)
        )
    return number * known[unit] if unit else number


def _float(value: float) -> float:
    """A number as a float, infinite where it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _spelling(objective: str) -> str:
    names = [name for name, _ in QUANTITIES[objective].units if name]
    return (
        f"Write a number, with a unit if you like: {', '.join(names)}."
        if names
        else ("Write a number.")
    )


def format_quantity(value: float, objective: str, digits: int = 3) -> str:
    """`value` in a unit that gives it one to three leading digits.

    >>> format_quantity(64424509440, "peak_bytes"), format_quantity(0.0123, "seconds")
    ('60 GiB', '12.3 ms')
    """
    if not math.isfinite(value):
        return str(value)
    name, size = QUANTITIES[objective].unit_for(value)
    return f"{format_number(value / size, digits)} {name}".rstrip()


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
