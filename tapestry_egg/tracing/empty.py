"""Operations on tensors without elements, which programs that halve their arrays end in.

A result without elements is a constant, and an operand without elements adds nothing. Left in the
graph, such operations would have no points to cut, and keep their other operands whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType


def is_constant(outputs: Sequence[TensorType]) -> bool:
    """Whether an operation without effects computes nothing: no result has an element."""
    return bool(outputs) and all(t.size == 0 and not t.dtype.startswith("key<") for t in outputs)


def unchanged_operand(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType
) -> int | None:
    """The operand that an operation gives back as it is, since nothing is written into it or
    joined to it; None where it does more."""
    found: int | None = None
    if kernel == "dynamic_update_slice" or kernel.startswith("scatter"):
        written = inputs[1] if kernel == "dynamic_update_slice" else inputs[2]
        found = 0 if written.size == 0 else None
    elif kernel == "concatenate":
        kept = joined_operands(kernel, inputs)
        found = kept[0] if len(kept) == 1 else None
    return found if found is not None and inputs[found] == output else None


def joined_operands(kernel: str, inputs: Sequence[TensorType]) -> tuple[int, ...]:
    """The operands that an operation needs: of those that are joined, the ones with elements."""
    everything = tuple(range(len(inputs)))
    if kernel != "concatenate":
        return everything
    return tuple(p for p in everything if inputs[p].size) or everything[:1]
