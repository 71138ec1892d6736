"""Parts of parts, taken of the whole at once.

The gradient of what puts holes between rows cuts edges off and takes every other row of what is
left; as one slice it reads what it keeps. XLA for GPUs computes both inside their reader, for TPUs
it stores what the second slice reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from tapestry_egg.graph.blockgraph import Operation, TensorType

from .codec import encode_params

#: Along one dim the first element that is taken, and how many apart the next ones are.
Steps = tuple[tuple[int, int], ...]


def parts_at_once(operations: Iterable[Operation], types: Sequence[TensorType]) -> list[Operation]:
    """The operations, where slices of parts are slices of what these are parts of.

    Parts of different `jax.checkpoint` regions stay, as XLA keeps these apart.
    """
    made: dict[int, tuple[Operation, int, Steps]] = {}  # a part -> its maker, of what, and where
    found: list[Operation] = []
    for op in operations:
        steps = _steps(op, types)
        if steps is not None:
            before = made.get(op.inputs[0])
            source = op.inputs[0]
            if before is not None and before[0].remat == op.remat:
                _, source, outer = before
                steps = tuple(
                    (a + s * first, s * step)
                    for (a, s), (first, step) in zip(outer, steps, strict=True)
                )
                op = _slice(op, source, steps, types)
            made[op.outputs[0]] = op, source, steps
        found.append(op)
    return found


def _steps(op: Operation, types: Sequence[TensorType]) -> Steps | None:
    """Where an operation takes its part of what it reads first; None for one that takes none."""
    if op.kernel == "slice":
        strides = op.params["strides"] or (1,) * len(op.params["start_indices"])
        return tuple(zip(map(int, op.params["start_indices"]), map(int, strides), strict=True))
    if op.kernel == "pad" and types[op.outputs[0]].size:
        config = op.params["padding_config"]
        if all(low <= 0 and high <= 0 and not inner for low, high, inner in config):
            return tuple((-int(low), 1) for low, _, _ in config)
    return None


def _slice(op: Operation, source: int, steps: Steps, types: Sequence[TensorType]) -> Operation:
    """An operation that takes its part of `source`."""
    shape = types[op.outputs[0]].shape
    ends = tuple(a + s * (n - 1) + 1 if n else a for (a, s), n in zip(steps, shape, strict=True))
    params = {
        "start_indices": tuple(a for a, _ in steps),
        "limit_indices": ends,
        "strides": tuple(s for _, s in steps),
    }
    encoded = encode_params(params, kernel="slice")
    return replace(op, kernel="slice", inputs=(source,), params=encoded)
