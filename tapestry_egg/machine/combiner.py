"""Collectives that a compiler makes into one.

XLA puts collectives of one kind, over the same devices, that do not wait for each other, into one
launch (`AllReduceCombiner`, `ReduceScatterCombiner`, `AllGatherCombiner`), as long as they have no
more bytes together than its options say (`xla_gpu_all_reduce_combine_threshold_bytes` and so on; 30
MiB by default on GPUs). Sums of several types are never one (`GetAllReduceKey`), gathers are. What
one sum of several is made of is first copied into one array (`AllReduceContiguous`), and its
results out of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapestry_egg.errors import TargetError

from .target_table import Table

#: The kinds that XLA for GPUs makes into one.
MERGED_KINDS = ("all_reduce", "reduce_scatter", "all_gather")


@dataclass(frozen=True, slots=True)
class Combiner:
    """The kinds of collectives that are made into one, up to so many bytes of payload together:
    what enters them on one device, of all-gathers what leaves them. Of the kinds `contiguous` all
    that enters is one array."""

    bytes: int
    kinds: tuple[str, ...]
    contiguous: tuple[str, ...] = ()

    def check(self, where: str) -> None:
        """Raises TargetError for a kind that is never made into one, and for no bytes."""
        for kind in (*self.kinds, *self.contiguous):
            if kind not in MERGED_KINDS:
                raise TargetError(
                    f"{kind!r} is none of {', '.join(MERGED_KINDS)}", where=f"{where}.kinds"
                )
        if self.bytes <= 0:
            raise TargetError(f"{self.bytes!r} is out of range", where=f"{where}.bytes")


def type_together(kind: str, dtype: str) -> str | None:
    """What type all members have of a collective of this kind that moves `dtype`; None: any."""
    return None if kind == "all_gather" else dtype


def read_combiner(table: Table, where: str) -> Combiner:
    """The figures of a target's file."""
    contiguous = table.texts("contiguous") if "contiguous" in table.keys() else ()
    found = Combiner(int(table.number("bytes", whole=True)), table.texts("kinds"), contiguous)
    table.finish()
    found.check(where)
    return found
