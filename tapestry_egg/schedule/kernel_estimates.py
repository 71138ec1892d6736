"""What XLA for GPUs takes a kernel to cost before it decides what to compute within readers.

Its estimate of a kernel (xla/service/gpu/model/gpu_performance_model.cc, gpu_hlo_cost_analysis.cc)
is what it computes or what it moves, whichever takes longer. What is computed counts as often as
it is: where an array is read at several places, each of them computes what it reads. A launch is a
microsecond more. How large the arrays of one device are is not known here: of those that are not
cut a launch is the least, in proportion, that it may be. So what is small is computed again, and a
repeated element is taken to be computed once: XLA counts it for every copy, which launches outweigh
in vectors beside arrays of some MiB. XLA also adds a twentieth of the lesser of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .flatten import FlatProgram
from .units import Unit

#: Clock cycles of a flop, as templates count them: XLA's table for an H100 in float32 has 7 for a
#: sum, 3 for a product and 79 for an exponential, which templates count as ten
#: (xla/service/gpu/model/hlo_op_profiles_data.h).
CYCLES = 7
#: Such cycles in the time of a byte of memory: 132 cores of 128 units at 1.98 GHz, each counted
#: twice, beside 3352 GB/s, as XLA describes an H100.
CYCLES_PER_BYTE = 2 * 132 * 128 * 1.98e9 / 3352.32e9
#: Bytes that memory moves in the time that XLA takes a launch to last, a microsecond.
LAUNCH = 3.35e6


@dataclass(frozen=True)
class KernelEstimate:
    """What one kernel computes and reads.

    `cycles` are of arrays that are not cut. `uses[v]` says how often the elements of v are read,
    on average, as a sum of shares: `None`, where the results are written; else the value at whose
    own places they are. Equal places share what they read.
    """

    cycles: float
    uses: Mapping[FlatId, Mapping[FlatId | None, float]]

    def with_inside(self, v: FlatId, made: KernelEstimate) -> KernelEstimate:
        """The kernel that computes a value, which another one makes, where this one reads it."""
        at = self.uses[v]
        times = sum(at.values())
        uses = {w: dict(places) for w, places in self.uses.items() if w != v}
        for w, places in made.uses.items():
            own = uses.setdefault(w, {})
            for place, share in places.items():
                if place is None:
                    own.update(at)
                else:
                    own[place] = own.get(place, 0.0) + share * times
        return KernelEstimate(self.cycles + times * made.cycles, uses)

    def bytes_taken(self, sizes: Sequence[int], written: int) -> float:
        """The bytes that memory moves in the time of the kernel, which writes `written`: what it
        reads again comes from caches."""
        read = sum(min(1.0, sum(x.values())) * sizes[v] for v, x in self.uses.items())
        return max(self.cycles / CYCLES_PER_BYTE, read + written)


def estimate(program: FlatProgram, unit: Unit) -> KernelEstimate:
    """What a unit computes and reads, if all that it reads is stored."""
    places: dict[FlatId, dict[FlatId | None, float]] = {v: {None: 1.0} for v in unit.outputs}
    cycles = 0.0
    for i in reversed(unit.members):
        instance = program.instances[i]
        own: dict[FlatId | None, float] = {}
        for v in instance.outputs:
            own |= places.get(v, {})
        times = sum(own.values())
        cycles += times * CYCLES * instance.signature.whole_flops
        for v, share in zip(instance.inputs, _shares(instance.signature), strict=True):
            read = places.setdefault(v, {})
            if share is None:
                read |= own
            else:
                read[v] = read.get(v, 0.0) + times * share
    return KernelEstimate(cycles, {v: places[v] for *_, v in unit.reads})


def _shares(signature: OperationSignature) -> tuple[float | None, ...]:
    """How often an operation reads the elements of each operand, on average; None where the result
    has the same index."""
    known: tuple[float | None, ...] | None = signature.__dict__.get("_shares")
    if known is None:
        found = [_share(signature, p) for p in range(len(signature.inputs))]
        known = signature.__dict__["_shares"] = tuple(found)
    return known


def _share(signature: OperationSignature, p: int) -> float | None:
    if signature.fusion != "loop" or len(signature.outputs) != 1:
        return 1.0
    own, result = (t.shape for t in (signature.input_types[p], signature.output_types[0]))
    if own == result and p not in signature.moved:
        return None
    return min(1.0, prod(result) / max(1, prod(own)))
