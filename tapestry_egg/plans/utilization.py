"""How well a plan uses its machine: arithmetic against the peak, memory, bytes by level of the
network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from tapestry_egg.columns import percent
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.quantities import BYTES, OPERATIONS


@dataclass(frozen=True, slots=True)
class Products:
    """The flops of a step's products in one dtype, whole and each counted once, and the published
    flop/s of one device for it."""

    dtype: str
    flops: float
    peak: float


@dataclass(frozen=True)
class Utilization:
    """What a plan uses of its machine in a step of `seconds` on so many `devices`.

    `products` are useful ones, by falling flops: a value that is computed a second time, or on
    several devices, counts once. `usable_bytes` is what a program may use of one device, None where
    devices share one memory. `sent` are the bytes that one device sends, on the average of all, by
    level of the network, innermost first; a level that the mesh spans and nothing is sent over has
    0.
    """

    seconds: float
    devices: int
    products: tuple[Products, ...]
    peak_bytes: int
    usable_bytes: int | None
    sent: Mapping[str, float]

    @property
    def flops(self) -> float:
        """The useful flops of a step, of all devices."""
        return sum(p.flops for p in self.products)

    @property
    def share(self) -> float:
        """The share of the peak (model flops utilization): the seconds that the useful products
        would take on all devices at the published rates of their dtypes, over those of the step."""
        ideal = sum(p.flops / p.peak for p in self.products) / self.devices
        return ideal / self.seconds if self.seconds else 0.0

    def data(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        return {**asdict(self), "flops": self.flops, "share": self.share}

    def arithmetic_shown(self) -> str:
        """`28.3 %: 344 GFLOP in products of f32 (peak 495 TFLOP/s a device)`."""
        if not self.products:
            return "no products"
        several = len(self.products) > 1
        said = [
            f"{_brief(p.dtype)} (peak {OPERATIONS.format(p.peak)}/s a device)"
            + (f" {percent(p.flops / self.flops)}" if several else "")
            for p in self.products
        ]
        flops = OPERATIONS.format(self.flops)
        return f"{percent(self.share)}: {flops} in products of {', '.join(said)}"

    def memory_shown(self) -> str:
        """`80 MiB, 0.1 % of the 74.5 GiB that a program may use`."""
        peak = BYTES.format(self.peak_bytes)
        if self.usable_bytes is None:
            return f"{peak}, of one memory that all devices share"
        share = percent(self.peak_bytes / self.usable_bytes)
        usable = BYTES.format(self.usable_bytes)
        return f"{peak}, {share} of the {usable} that a program may use"

    def sent_shown(self) -> str:
        """`20 MiB over nvlink, 0 B over network`; empty where there is one device."""
        return ", ".join(f"{BYTES.format(n)} over {level}" for level, n in self.sent.items())


def _brief(dtype: str) -> str:
    return str(TensorType((), dtype)).removesuffix("[]")
