"""Chains: the longest way through units that read what others make."""

from __future__ import annotations

import numpy as np

from .compiled import compiled
from .timeline import Floats, Ints


@compiled
def longest(maker: Ints, reader: Ints, units: int, lengths: Floats) -> tuple[float, Floats]:
    """The longest chain of reads [reads], each from the unit that makes a value to one that reads
    it, by their lengths; and which reads it is made of, as 0 and 1. Readers rise."""
    total = np.zeros(units + 1)  # of the longest chain that ends at each unit
    last = np.full(units + 1, -1)
    end, most = -1, 0.0
    for r in range(len(reader)):
        here = total[maker[r]] + lengths[r]
        u = reader[r]
        if here > total[u]:
            total[u], last[u] = here, r
        if here > most:
            most, end = here, u
    path = np.zeros(len(reader))
    while end >= 0 and last[end] >= 0:
        r = last[end]
        path[r] = 1.0
        end = maker[r]
    return most, path
