"""Sums along columns, and how much their kernels may read at once.

XLA for GPUs adds up columns in blocks of 1024 threads, each of which goes from row to row
(xla/backends/gpu/codegen/emitters/reduction.cc). Of all that such a kernel reads the compiler keeps
the place, which moves along with the rows, in two of a thread's registers. A GPU of NVIDIA's has
65536 of them in a core and runs 2048 threads there: 32 for each, the places of `PLACES` arrays.
What does not fit goes through memory for every row, which XLA's fusion does not look at: the
gradient of a scan of a state-space model, of 20 arrays, took 252 ms on an H100 for a kernel that
moves 37 GB. Sums along rows are made in blocks of 256 threads or less, mostly without such a loop.

So what would make such a kernel read at more places is stored before it, by a kernel of its own,
which goes element by element and has registers enough. Plans count it so, and lowering keeps the
two apart. What pads and joins take beside (a condition for each) is not counted, and of products
with vectors, which XLA may add up along columns as well, nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.signature import OperationSignature

from .kernel_estimates import KernelEstimate

#: Registers of a core (65536) for each of its threads (2048), two for the place of an array.
PLACES = 65536 // 2048 // 2


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
