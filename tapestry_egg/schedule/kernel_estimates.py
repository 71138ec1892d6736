"""What XLA for GPUs takes a kernel to cost before it decides what to compute within readers.

Its estimate of a kernel (xla/service/gpu/model/gpu_performance_model.cc, gpu_hlo_cost_analysis.cc)
is what it computes or what it moves, whichever takes longer. What is computed counts as often as
it is: where an array is read at several places, each of them computes what it reads. A launch is a
microsecond more. How large the arrays of one device are is not known here: of those that are not
cut a launch is the least, in proportion, that it may be. So what is small is computed again, and a
repeated element is taken to be computed once: XLA counts it for every copy, which launches outweigh
in vectors beside arrays of some MiB. XLA also adds a twentieth of the lesser of both.

It does not look at registers. Columns it adds up in blocks of 1024 threads, each of which goes from
row to row (xla/backends/gpu/codegen/emitters/reduction.cc). Of all that such a kernel reads the
place, which moves along with the rows, is kept in two of a thread's registers. A GPU of NVIDIA's
has 65536 of them in a core and runs 2048 threads there: 32 for each, the places of `PLACES` arrays.
What does not fit goes through memory for every row: the gradient of a scan of a state-space model,
of 20 arrays, took 252 ms on an H100 for a kernel that moves 37 GB. Sums along rows are made in
blocks of 256 threads or less, mostly without such a loop. So what would make a sum along columns
read at more places is stored before it, by a kernel of its own, which goes element by element and
has registers enough. Plans count it so, and lowering keeps the two apart. What pads and joins take
beside (a condition for each) is not counted, and of products with vectors, which XLA may add up
along columns as well, nothing is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.fusion_costs import FusionCosts
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .flatten import FlatProgram
from .units import Unit

#: Registers of a core (65536) for each of its threads (2048), two for the place of an array.
PLACES = 65536 // 2048 // 2


@dataclass(frozen=True)
class KernelEstimate:
    """What one kernel computes and reads.

    `flops` are of arrays that are not cut. `uses[v]` says how often the elements of v are read,
    on average, as a sum of shares: `None`, where the results are written; else the value at whose
    own places they are. Equal places share what they read.
    """

    flops: float
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
        return KernelEstimate(self.flops + times * made.flops, uses)

    def bytes_taken(self, sizes: Sequence[int], written: int, costs: FusionCosts) -> float:
        """The bytes that memory moves in the time of the kernel, which writes `written`: what it
        reads again comes from caches."""
        read = sum(min(1.0, sum(x.values())) * sizes[v] for v, x in self.uses.items())
        return max(self.flops * costs.bytes_per_flop, read + written)


def estimate(program: FlatProgram, unit: Unit) -> KernelEstimate:
    """What a unit computes and reads, if all that it reads is stored."""
    places: dict[FlatId, dict[FlatId | None, float]] = {v: {None: 1.0} for v in unit.outputs}
    flops = 0.0
    for i in reversed(unit.members):
        instance = program.instances[i]
        own: dict[FlatId | None, float] = {}
        for v in instance.outputs:
            own |= places.get(v, {})
        times = sum(own.values())
        flops += times * instance.signature.whole_flops
        for v, share in zip(instance.inputs, instance.signature.shares_read, strict=True):
            read = places.setdefault(v, {})
            if share is None:
                read |= own
            else:
                read[v] = read.get(v, 0.0) + times * share
    return KernelEstimate(flops, {v: places[v] for *_, v in unit.reads})


def adds_columns(signature: OperationSignature) -> bool:
    """Whether an operation reduces dims of an array of which the last is none."""
    if signature.fusion != "reduce" or not signature.inputs[0].matrix:
        return False
    last = signature.inputs[0].matrix[-1]
    roles = {signature.index[d].role for d, a in enumerate(last) if a}
    return any(dim.role == "reduce" for dim in signature.index) and "reduce" not in roles


def reads_too_much(
    kernel: KernelEstimate, v: FlatId, made: KernelEstimate, types: Sequence[TensorType]
) -> bool:
    """Whether the kernel of a sum along columns would read arrays at more places than its threads
    have registers for, and at more than now, if it computed value v, which another kernel makes;
    `types` are all values'."""
    now, then = (
        sum(len(places) for w, places in x.uses.items() if types[w].shape)
        for x in (kernel, kernel.with_inside(v, made))
    )
    return then > max(now, PLACES)
