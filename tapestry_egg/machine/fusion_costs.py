"""What XLA's compiler for GPUs knows of a device when it decides what kernels compute again.

Its estimate of a kernel (xla/service/gpu/model/gpu_performance_model_base.cc) has the units of all
cores add and multiply at the device's highest clock, and memory move bytes at its full rate. An
operation counts as many cycles as XLA measured on that generation, or three where its table
(hlo_op_profiles_data.h) has none. How `schedule/inlining.py` uses that is told there.
"""

from __future__ import annotations

from dataclasses import dataclass

from .target_table import Table

#: Seconds that XLA takes a launch to last, on all GPUs (kKernelLaunchOverhead).
LAUNCH_SECONDS = 1e-6


@dataclass(frozen=True, slots=True)
class FusionCosts:
    """A GPU as XLA describes it: `cores` of so many `units` at `hertz`, of which a sum in float32
    takes `cycles`, beside memory of `bytes_per_second`. On the device XLA tries kernels of products
    out: those whose results take `library_bytes` or more are taken to be the library's then, which
    leaves its workspace beside a result (None: all are XLA's own)."""

    cores: int
    units: int
    hertz: float
    cycles: int
    bytes_per_second: float
    library_bytes: int | None = None

    @property
    def bytes_per_flop(self) -> float:
        """The bytes that memory moves in the time of a flop; each unit does two in a cycle."""
        return self.cycles * self.bytes_per_second / (2 * self.cores * self.units * self.hertz)

    @property
    def launch_bytes(self) -> float:
        """The bytes that memory moves in the time of a launch."""
        return LAUNCH_SECONDS * self.bytes_per_second


def read_fusion_costs(table: Table) -> FusionCosts:
    """The figures of a target's file."""
    cores, units, cycles = [int(table.number(k, whole=True)) for k in ("cores", "units", "cycles")]
    told = "library_bytes" in table.keys()
    library = int(table.number("library_bytes", whole=True)) if told else None
    hertz, rate = table.number("hertz"), table.number("bytes_per_second")
    found = FusionCosts(cores, units, hertz, cycles, rate, library)
    table.finish()
    return found
