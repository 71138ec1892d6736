"""Draws: shapes and dtypes of programs to try rules on, every kind of shape with every dtype.

The kinds of shapes and the dtypes are lists, walked through in step: no rule is spared one of them
by chance. Chance only chooses within a kind.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType

#: Parameters, and the types of all operands.
Proposal = tuple[dict[str, Any], list[TensorType]]
Known = Sequence[TensorType | None]
#: The dtypes that instances have in turn, common ones more often.
DTYPES = (
    *("float32", "int32", "bfloat16", "float32", "int8", "float32", "complex64", "uint8"),
    *("float32", "bool", "float16", "float32", "uint32", "bfloat16", "float32", "int16"),
    *("float64", "int32", "float8_e4m3fn", "int64", "uint16", "complex128", "uint64"),
)


@dataclass(frozen=True)
class Sizes:
    """A kind of shapes: the extents that dims have, and ranks (none: those that a kernel likes)."""

    name: str
    extents: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    unlike: bool = False  # no two dims of a tensor have one extent, as long as there are others


#: The kinds of shapes that instances have in turn.
SIZES = (
    Sizes("small", (1, 1, 2, 2, 2, 3, 3, 4)),
    Sizes("equal", (3,)),
    Sizes("unlike", (2, 3, 4, 5, 7), unlike=True),
    Sizes("thin", (1, 1, 2)),
    Sizes("deep", (1, 2, 2, 3), (5, 6, 7, 8)),
    Sizes("deep and equal", (2,), (5, 6, 7)),
    Sizes("empty", (0, 1, 2, 3)),
    Sizes("even", (2, 4, 6)),
    Sizes("primes", (5, 7, 11, 13), unlike=True),
    Sizes("small", (1, 2, 2, 3, 3, 4)),
    Sizes("large", (17, 19, 24, 32, 2, 3), (1, 2, 2)),
    Sizes("landmarks", ()),
    Sizes("long", (600,), (1,)),
    Sizes("long and thin", (300, 1, 2), (2,), unlike=True),
)
#: A tensor of more elements is not drawn, but for lists that are longer than a dtype counts.
MOST_ELEMENTS = 4096
LONGEST = 5 * 2**14
#: Numbers that dtypes do not count up to: there places along a dim are no longer what they were.
_COUNTED = {
    **{"int8": 128, "uint8": 256, "float8_e4m3fn": 17, "bfloat16": 257},
    **{"float16": 2049, "int16": 2**15, "uint16": 2**16},
}


class Draw:
    """A source of random choices, with the one dtype that most tensors of an instance have."""

    def __init__(
        self,
        rng: random.Random,
        turn: int,
        landmarks: Sequence[float] = (),
        named: Sequence[str] = (),
    ) -> None:
        self.rng = rng
        self.dtypes = DTYPES
        self.named = named  # dtypes that the rule speaks of: every other turn has one of them
        self.dtype = DTYPES[turn % len(DTYPES)]
        if named and turn % 2:
            self.dtype = named[turn // 2 % len(named)]
        self.sizes = SIZES[sum(divmod(turn, len(DTYPES))) % len(SIZES)]
        self.extents = self.sizes.extents or beside(landmarks)
        if self.sizes.name == "long":
            ends = [_COUNTED[d] * 5 // 4 for d in (self.dtype, *named) if d in _COUNTED]
            self.extents = (max(ends),) if ends else self.extents
        self.ranks = self.sizes.ranks
        self.landmarks = [int(m) for m in landmarks if m == int(m) and abs(m) < 2**31]

    def extent(self) -> int:
        return self.rng.choice(self.extents)

    def rank(self, usual: Sequence[int]) -> int:
        """A rank out of those that a kernel likes, unless the kind of shapes asks for others.

        Scalars go with all kinds.
        """
        if self.ranks and 0 in usual and self.chance(0.3):
            return 0
        return self.rng.choice(self.ranks or tuple(usual))

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.rank((0, 1, 2, 2, 2, 3, 3, 4)) if rank is None else rank
        if self.sizes.unlike and rank <= len(self.extents):
            return tuple(self.rng.sample(self.extents, rank))
        out = [self.extent() for _ in range(rank)]
        while len(out) > 1 and prod(out) > MOST_ELEMENTS // 4:
            out[out.index(max(out))] = 2
        return tuple(out)

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


def beside(landmarks: Sequence[float]) -> tuple[int, ...]:
    """Extents at and beside the whole numbers that a rule speaks of."""
    near = {int(m) + d for m in landmarks if m == int(m) and abs(m) < 600 for d in (-1, 0, 1, 2)}
    return tuple(sorted(n for n in near if n > 0)) or (1, 2, 3)


def first(known: Known, draw: Draw, rank: int | None = None) -> TensorType:
    """The first type that is known, or a new one."""
    return next((t for t in known if t is not None), None) or draw.tensor(rank)
