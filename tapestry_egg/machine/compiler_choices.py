"""What XLA's compiler for GPUs decides by: when kernels compute values again, and which collectives
become one."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry_egg.errors import TargetError

# What XLA's compiler for GPUs knows of a device when it decides what kernels compute again.
#
# Its estimate of a kernel (xla/service/gpu/model/gpu_performance_model_base.cc) has the units of
# all cores add and multiply at the device's highest clock, and memory move bytes at its full rate.
# An operation counts as many cycles as XLA measured on that generation, or three where its table
# (hlo_op_profiles_data.h) has none. How `schedule/inlining.py` uses that is told there.


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


# Collectives that a compiler makes into one.
#
# XLA puts collectives of one kind, over the same devices, that do not wait for each other, into one
# launch (`AllReduceCombiner`, `ReduceScatterCombiner`, `AllGatherCombiner`), as long as they have
# no more bytes together than its options say (`xla_gpu_all_reduce_combine_threshold_bytes` and so
# on; 30 MiB by default on GPUs). Sums of several types are never one (`GetAllReduceKey`), gathers
# are. What one sum of several is made of is first copied into one array (`AllReduceContiguous`),
# and its results out of that.


#: The kinds that XLA for GPUs makes into one.
MERGED_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class Combiner:
    """The kinds of collectives that are made into one, up to so many bytes of payload together:
    what enters them on one device, of all-gathers what leaves them. Of the kinds `contiguous` all
    that enters is one array."""

    bytes: int
    kinds: tuple[str, ...]
    contiguous: tuple[str, ...] = ()

    def check(self, where: str) -> None:
        """Raises TargetError for a kind that is never made into one, and for no bytes."""
        for kind in (*self.kinds, *self.contiguous):
            if kind not in MERGED_KINDS:
                raise TargetError(
                    f"{kind!r} is none of {', '.join(MERGED_KINDS)}", where=f"{where}.kinds"
                )
        if self.bytes <= 0:
            raise TargetError(f"{self.bytes!r} is out of range", where=f"{where}.bytes")


def type_together(kind: str, dtype: str) -> str | None:
    """What type all members have of a collective of this kind that moves `dtype`; None: any."""
    return None if kind == "all_gather" else dtype
