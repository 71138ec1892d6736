"""Options of XLA's compiler that a plan counts on.

A plan says which collectives are one, and, where seconds count on it, which run beside kernels.
XLA for GPUs merges collectives up to so many bytes, and hides them where its scheduler is told to;
of products that share an operand it makes one (`xla/debug_options_flags.cc`, `DotMerger`). XLA for
TPUs hides collectives as it likes, in so much memory. Nothing else is ever set, whatever a plan's
file says.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from tapestry_egg.machine.compiler_choices import MERGED_KINDS

if TYPE_CHECKING:
    from .plan import Plan

_MERGED = "xla_gpu_{}_combine_threshold_bytes"
_BESIDE = "xla_gpu_enable_latency_hiding_scheduler"
_FREELY = 1 << 17  # bytes that may be merged though no plan says so
# Products of up to so many MiB are made one, if they share an operand.
_PRODUCTS = "xla_gpu_dot_merger_threshold_mb"
_PERCENT = "xla_tpu_scheduler_percent_shared_memory_limit"

#: JAX's names of platforms that XLA's compiler for GPUs serves.
GPUS = ("cuda", "gpu", "rocm")


def compiler_options(plan: Plan) -> dict[str, int | bool]:
    """The options by name; none where the machine is not known, or has no tiles, as TPUs have, and
    its compiler merges nothing.

    XLA for TPUs orders kernels such that collectives run beside them as far as that takes no more
    than so much of a device's memory, in whole percent: here what the plan promises to hold. Left
    alone it takes nearly all of the memory (libtpu 0.0.52: a plan of a mixture of experts held 39 %
    more than it promised, and holds 12 %).

    No more bytes are merged than the largest collective that the plan has merged: what enters and
    leaves a small one would stay as long as a large one's, and what enters one sum of several be
    copied into one array, and what leaves it out of it. Little is merged freely, which saves
    launches, but for where collectives run beside kernels: those that wait for others are beside
    nothing. XLA is told of every kind, also of those that the machine, which a file describes, has
    none merged of: it would merge them up to 30 MiB.

    No products are merged: what they do not share, as the weights of queries, keys and values,
    would be copied into one array at each step, which no plan counts.
    """
    machine = plan.origin.machine if plan.origin else None
    if machine is None:
        return {}
    if machine.tiles is not None:
        return {_PERCENT: min(100, int(100 * plan.costs.peak_bytes / machine.hbm_bytes))}
    if machine.combiner is None:
        return {}
    beside = machine.slowdown is not None
    together: dict[tuple[str, int], int] = defaultdict(int)
    for c in plan.collectives:
        if c.merged and c.kind in MERGED_KINDS:
            together[c.kind, c.merged] += c.payload_bytes
    most = dict.fromkeys(MERGED_KINDS, 1 if beside else _FREELY)
    for (kind, _), payload in together.items():
        most[kind] = max(most[kind], payload)
    merged: dict[str, int | bool] = {_MERGED.format(k): n for k, n in most.items()}
    merged[_PRODUCTS] = 0
    return {_BESIDE: True, **merged} if beside else merged


#: With them XLA for CPU keeps optimization barriers, and loops that have some.
BARRIERS_ON_CPUS = {"xla_disable_hlo_passes": "cse_barrier_expander,small-while-loop-hoisting"}

#: With them XLA for CPU makes reductions itself. It leaves them to a library (YNNPACK), which gives
#: wrong numbers, or ends the process, for some arrays with a dim of one element (jaxlib 0.10.2 and
#: 0.11; github.com/jax-ml/jax/issues/39257 and 40412).
OWN_REDUCTIONS_ON_CPUS = {
    "xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT,"
    "LIBRARY_FUSION_TYPE_INDIVIDUAL_CONVOLUTION"
}


def passed_options(plan: Plan, platform: str) -> dict[str, Any]:
    """What the compiler of a platform must do, or leave alone, for the plan to be carried out.

    XLA for CPU drops optimization barriers before its last merging of equal operations, which
    would turn a second gather (made to save memory) back into the first. Where they stay, loops of
    a KiB or less must stay loops: it makes one kernel of such, and ends the process over a barrier
    in it (`xla/service/cpu/small_while_loop_hoisting_pass.cc`, `IrEmitter`). XLA for GPUs makes one
    collective of any that do not wait for each other, up to 30 MiB: what enters and leaves a small
    one then stays as long as a large one's. It does so where the plan does. And it would copy what
    enters one sum of several into one array, and what leaves it out of it.
    """
    if platform == "cpu":
        return dict(BARRIERS_ON_CPUS)
    family = "gpu" if platform in GPUS else platform
    return {k: v for k, v in plan.compiler_options.items() if k.startswith(f"xla_{family}_")}
