"""Options of XLA's compiler that a plan counts on.

A plan says which collectives are one, and, where seconds count on it, which run beside kernels.
XLA for GPUs merges collectives up to so many bytes, and hides them where its scheduler is told to
(`xla/debug_options_flags.cc`). Nothing else is ever set, whatever a plan's file says.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .plan import Plan

_MERGED = "xla_gpu_{}_combine_threshold_bytes"
_BESIDE = "xla_gpu_enable_latency_hiding_scheduler"


def compiler_options(plan: Plan) -> dict[str, int | bool]:
    """The options by name; none where the compiler of the plan's target merges nothing, or the
    machine is not known.

    Where collectives run beside kernels, those that wait for others are beside nothing: no more
    bytes are merged than the largest collective that the plan has merged.
    """
    machine = plan.origin.machine if plan.origin else None
    if machine is None or machine.combiner is None:
        return {}
    combiner = machine.combiner
    if machine.slowdown is None:
        return {_MERGED.format(kind): combiner.bytes for kind in combiner.kinds}
    together: dict[tuple[str, int], int] = defaultdict(int)
    for c in plan.collectives:
        if c.merged:
            together[c.kind, c.merged] += c.payload_bytes
    most = {kind: 1 for kind in combiner.kinds}
    for (kind, _), payload in together.items():
        most[kind] = max(most.get(kind, 1), payload)
    return {_BESIDE: True, **{_MERGED.format(k): n for k, n in most.items() if k in combiner.kinds}}
