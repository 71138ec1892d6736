"""The order that a plan promises, as ties between operations that XLA must keep.

A plan's peak holds for one order of its kernels. XLA's schedulers choose among orders of their own
(on GPUs the least of a greedy list, a depth-first and a post-order schedule): left alone they put
off every weight gradient to the end, and combine gathers of many layers into one, all of whose
results are then live at once. So each large kernel waits for the large results before it: both
pass through one optimization barrier. The barrier moves nothing; it is dropped after scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..blockgraph import TensorType
from ..flatten import flatten
from ..layout import Layout, MeshShape
from ..plan import BodyPlan
from ..schedule import Schedule, operations_of, schedule
from .collectives import traffic
from .fetch import Fetch, produced_layouts

#: Local bytes below which order matters little for the peak, and XLA's combining of collectives
#: and fusing across kernels saves more launches than an order would save memory.
SMALL = 1 << 14


@dataclass(frozen=True, slots=True)
class Tie:
    """Before an operation begins, `held` are let go only when `done` are there.

    `held` are (origin, value) that it reads, `done` values produced before and read later.
    """

    held: tuple[tuple[str, int], ...]
    done: tuple[int, ...]


def ties(body: BodyPlan, reads: tuple[tuple[Fetch, ...], ...], mesh: MeshShape) -> dict[int, Tie]:
    """The ties of a body, by the operation that they precede; `reads` as `fetches` gives them."""
    graph = body.graph
    plan = schedule(flatten(graph, {}))
    groups = operations_of(plan)
    layouts = produced_layouts(body)
    last_read = {f.value: k for k, found in enumerate(reads) for f in found}
    solid = _solid(plan, groups, body)
    leaving = set(graph.outputs)

    def local(v: int, layout: Layout) -> int:
        type_ = graph.values[v]
        return TensorType(layout.local_shape(type_.shape, mesh), type_.dtype).nbytes

    out: dict[int, Tie] = {}
    done: dict[int, None] = {}
    for members in groups:
        begin = min(members)
        inside = {v for k in members for v in graph.operations[k].outputs}
        outside = [f for k in members for f in reads[k] if f.value not in inside]
        sizes = [local(f.value, f.need) for f in outside]
        sizes += [local(v, layouts[v]) for v in graph.operations[max(members)].outputs]
        if done and _waits(plan, body, members) and max(sizes, default=0) >= SMALL:
            held = _held(outside, solid, graph, mesh)
            waited = tuple(
                v for v in done if last_read.get(v, -1) >= begin and ("produced", v) not in held
            )
            if held and waited:
                out[begin] = Tie(tuple(held), waited)
                done.clear()
        for k in members:
            for v in graph.operations[k].outputs:
                if (v in solid or v in leaving) and local(v, layouts[v]) >= SMALL:
                    done[v] = None
    return out
