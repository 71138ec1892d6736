"""Power, clock and price of one device, as target files give them."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from tapestry_egg.errors import TargetError

from .target_table import Table


@dataclass(frozen=True, slots=True)
class Power:
    """What one device draws, by unit.

    It always draws `idle_watts`: waiting, its clocks running. While a kernel runs it draws
    `kernel_watts` more, whatever the kernel does, and `flops_watts` more where arithmetic runs at
    its published rate; bytes read from or written to memory, and bytes sent, cost joules each.
    All units at once may draw more than `max_watts`: then a device slows down, which is not
    modelled. `measured` says whether the figures were measured on such a device.
    """

    idle_watts: float
    max_watts: float
    kernel_watts: float
    flops_watts: float
    joules_per_byte: float
    joules_per_wire_byte: float
    measured: bool = False


@dataclass(frozen=True, slots=True)
class Clock:
    """How arithmetic and its power follow the clock of the compute units.

    A file's rates and watts hold at `mhz`; `least_mhz` to `most_mhz` can be set. Voltage, as a
    share of that at `mhz`, is `floor` up to `ridge_mhz` and rises linearly from there (Schoonhoven
    et al., "Going green: optimizing GPUs for energy efficiency through model-steered auto-tuning",
    2022). Of the idle power, `idle_watts` follow the clock.
    """

    mhz: float
    least_mhz: float
    most_mhz: float
    ridge_mhz: float
    floor: float
    idle_watts: float

    def voltage(self, mhz: float) -> float:
        """The voltage at a clock, as a share of that at the file's own."""
        steps = max(0.0, mhz - self.ridge_mhz) / (self.mhz - self.ridge_mhz)
        return self.floor + (1.0 - self.floor) * steps

    def switching(self, mhz: float) -> float:
        """What switching draws at a clock, as a share of that at the file's own: f·V²."""
        return mhz / self.mhz * self.voltage(mhz) ** 2

    def check(self, where: str) -> None:
        """Raise TargetError where the figures contradict each other."""
        numbers = (self.mhz, self.least_mhz, self.most_mhz, self.ridge_mhz, self.idle_watts)
        if not all(isfinite(x) and x >= 0 for x in numbers) or not 0 < self.floor <= 1:
            raise TargetError("a figure is out of range", where=where)
        if not 0 < self.least_mhz <= self.mhz <= self.most_mhz or self.ridge_mhz >= self.mhz:
            raise TargetError("least, ridge, mhz and most are not in this order", where=where)


@dataclass(frozen=True, slots=True)
class Price:
    """What a device costs, whoever says so."""

    dollars_per_device_hour: float
    source: str = ""
    as_of: str = ""

    def check(self, where: str) -> None:
        """Raise TargetError for what is no price."""
        price = self.dollars_per_device_hour
        if isinstance(price, bool) or not isinstance(price, int | float):
            raise TargetError(f"{price!r:.40} is no price", where=where)
        if not isfinite(price) or price <= 0:
            raise TargetError(
                f"{price!r} dollars for an hour of a device is no price",
                where=where,
                hint="Give a positive number.",
            )


def read_power(table: Table, hbm_rate: float, link_rate: float) -> Power:
    """The key `power` of a target file, given the published rates of memory and of all links."""
    busy = table.table("busy")
    idle, most = table.number("idle", zero=True), table.number("max")
    if idle > most:
        raise table.node.error(f"power idle {idle:g} W is above max {most:g} W")
    found = Power(
        idle_watts=idle,
        max_watts=most,
        kernel_watts=busy.number("kernel", zero=True),
        flops_watts=busy.number("flops", zero=True),
        joules_per_byte=busy.number("hbm", zero=True) / hbm_rate,
        joules_per_wire_byte=busy.number("link", zero=True) / link_rate,
        measured=table.flag("measured"),
    )
    table.finish()
    busy.finish()
    return found


def read_clock(table: Table) -> Clock:
    """The key `clock` of a target file."""
    found = Clock(
        mhz=table.number("mhz"),
        least_mhz=table.number("least"),
        most_mhz=table.number("most"),
        ridge_mhz=table.number("ridge", zero=True),
        floor=table.number("floor", most=1),
        idle_watts=table.number("idle", zero=True),
    )
    table.finish()
    if not found.least_mhz <= found.mhz <= found.most_mhz or found.ridge_mhz >= found.mhz:
        raise table.node.error("least, ridge, mhz and most are not in this order")
    return found


def read_price(table: Table) -> Price:
    """The key `price` of a target file."""
    found = Price(table.number("dollars_per_hour"), table["source"].text(), table["as_of"].text())
    table.finish()
    return found
