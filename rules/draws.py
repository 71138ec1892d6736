"""Draws: random choices of shapes and dtypes for programs to try rules on."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from ..blockgraph import TensorType

#: Parameters, and the types of all operands.
Proposal = tuple[dict[str, Any], list[TensorType]]
Known = Sequence[TensorType | None]
#: The dtypes that instances have in turn, common ones more often.
DTYPES = (
    *("float32", "int32", "bfloat16", "float32", "int8", "float32", "complex64", "float32"),
    *("uint8", "bool", "float32", "float16", "int32", "bfloat16"),
)
_EXTENTS = (1, 1, 2, 2, 2, 3, 3, 4)


class Draw:
    """A source of random choices, with the one dtype that most tensors of an instance have."""

    def __init__(self, rng: random.Random, dtype: str) -> None:
        self.rng, self.dtype = rng, dtype
        self.extents = rng.choice((_EXTENTS, (2, 3), (1, 2), (2, 4, 6)))

    def extent(self) -> int:
        return self.rng.choice(self.extents)

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.rng.choice((0, 1, 2, 2, 2, 3, 3, 4)) if rank is None else rank
        return tuple(self.extent() for _ in range(rank))

    def tensor(self, rank: int | None = None) -> TensorType:
        return TensorType(self.shape(rank), self.dtype)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def subset(self, values: Sequence[int], least: int = 0) -> list[int]:
        """Some of the values in their order, at least so many."""
        if len(values) < least:
            return []
        count = self.rng.randint(least, len(values))
        return sorted(self.rng.sample(list(values), count))


def first(known: Known, draw: Draw, rank: int | None = None) -> TensorType:
    """The first type that is known, or a new one."""
    return next((t for t in known if t is not None), None) or draw.tensor(rank)
