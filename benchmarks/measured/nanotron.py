"""What nanotron does to gradients and updated parameters, beside the program.

By its code at 67c5ebb6, of the branch whose script (`run_multinode.sh`) ran the benchmark.
Gradients are added up in float32 and summed over data parallel devices so:

* with ZeRO 0 by DistributedDataParallel, bucket by bucket beside the backward pass of the last
  micro-batch (optim/gradient_accumulator.py, get_fp32_accum_hook);
* with ZeRO 1 in one all-reduce of the whole buffer after it, since the model is not wrapped then
  (trainer.py, make_ddp; sync_gradients_across_dp). What was updated is gathered in one piece and
  copied into place, one launch for each array and device (optim/zero.py, distributed.py).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from .programs import Model
from .rows import Run

#: Bytes of gradients, in bfloat16, at which a bucket is closed, and of the first one
#: (`ddp_bucket_cap_mb`; PyTorch's _DEFAULT_FIRST_BUCKET_BYTES).
BUCKET, FIRST_BUCKET = 25 * 2**20, 2**20


@lru_cache(maxsize=64)
def arrays(model: Model, tensor: int) -> tuple[int, ...]:
    """Numbers of entries, on one of `tensor` devices, of the parameters in the order of modules."""
    d, f = model.width, model.hidden
    vocabulary = model.vocabulary * d // tensor
    qkv = d * (model.heads + 2 * model.kv) * model.head // tensor
    layer = (qkv, d * d // tensor, 2 * d * f // tensor, d * f // tensor, d, d)
    head = () if model.tied else (vocabulary,)
    return (vocabulary, *(layer * model.layers), d, *head)


def buckets(model: Model, tensor: int) -> list[int]:
    """Bytes of the buckets of gradients in bfloat16, in the order in which they are full."""
    out, filled, full = [], 0, FIRST_BUCKET
    for n in reversed(arrays(model, tensor)):
        filled += 2 * n
        if filled >= full:
            out.append(filled)
            filled, full = 0, BUCKET
    return [*out, filled] if filled else out


def summing_seconds(run: Run) -> float:
    """Seconds to sum all gradients of a step over data parallel devices, on the run's target."""
    from tapestry_egg.graph.layout import MeshShape
    from tapestry_egg.machine.costs import collective_seconds
    from tapestry_egg.machine.target import load_target

    if run.data == 1:
        return 0.0
    mesh, target = MeshShape(("d", "t"), (run.data, run.tensor)), load_target(run.target)
    if run.zero:
        sent = np.array([4.0 * sum(arrays(run.model, run.tensor))])
    else:
        sent = 2.0 * np.array(buckets(run.model, run.tensor), np.float64)
    return float(np.sum(collective_seconds("all_reduce", sent, (0,), mesh, target)))


def copies(run: Run) -> int:
    """Launches that copy gathered parameters into place."""
    shared = run.zero and run.data > 1
    return run.data * len(arrays(run.model, run.tensor)) if shared else 0
