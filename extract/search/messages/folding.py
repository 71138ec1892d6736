"""Folding: one layer's messages for all that are equal to it.

In a deep program of equal layers messages in the middle differ little from layer to layer, and
nearly all of what it takes for them to settle happens within one layer. So messages are passed
among a few layers first, those at either end and one in the middle that stands for all others, and
then copied to the rest. That is a start for message passing over the whole program, which alone
proves bounds: messages are a reparametrisation, so any of them are a valid start.

Which variables play the same part is seen from their arrays and those around them, some links far
(colour refinement: Weisfeiler and Leman, 1968); the program's order tells which layer each is in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tapestry_egg.extract.problem.problem import Ints, Problem

from .batches import Batch, Slot
from .pricing import Tables

# Of these numbers no measurement is kept. They choose where message passing starts, no more: bounds
# are proven on the whole program from any start.

# How many links far around a variable its part is told by.
_AROUND = 4

# So many layers at either end are passed by themselves.
_ENDS = 2

# Folding is worth it only if it leaves at most this share of the variables.
_WORTH = 0.2


class Folding:
    """What stands for what: `batches` of the variables that stand for all, their slots at the pairs
    that do, and per kind of pair `stands`: [members], the place of each one's representative."""

    def __init__(
        self, problem: Problem, edges: Sequence[int], whole: Sequence[Batch], tables: Tables
    ) -> None:
        variables = [int(i) for b in whole for i in b.members]
        parts = _parts(problem, variables, edges, tables)
        alike: dict[int, list[int]] = {}
        for i in sorted(variables):
            alike.setdefault(parts[i], []).append(i)
        kept = {members[k] for members in alike.values() for k in _standing(len(members))}
        self.worth = len(kept) <= _WORTH * len(variables)
        self.batches: tuple[Batch, ...] = ()
        self.stands: list[Ints] = []
        if self.worth:
            self.stands = self._stands(problem, edges, parts, tables)
            folded = [self._folded(b, kept) for b in whole]
            self.batches = tuple(b for b in folded if len(b.members))

    def _stands(
        self, problem: Problem, edges: Sequence[int], parts: Mapping[int, int], tables: Tables
    ) -> list[Ints]:
        """Per kind of pair and place: the place of the pair that stands for it."""
        stands = [np.arange(len(k.members)) for k in tables.kinds]
        alike: dict[tuple[int, int, int], list[int]] = {}
        for k in sorted(edges, key=lambda k: (problem.pairs[k].a, problem.pairs[k].b)):
            p = problem.pairs[k]
            alike.setdefault((int(tables.kind_of[k]), parts[p.a], parts[p.b]), []).append(k)
        for (kind, *_), members in alike.items():
            at = tables.place[np.array(members)]
            stands[kind][at] = at[_standing(len(members))]
        return stands

    def _folded(self, batch: Batch, kept: set[int]) -> Batch:
        """The members of a batch that stand for all, reading and writing at pairs that do.

        Where two of them write at one pair the last one counts: that in the middle.
        """
        some = np.array([m for m, i in enumerate(batch.members.tolist()) if i in kept], dtype=int)
        some = some[np.argsort(-np.abs(2 * some - len(batch.members) + 1), kind="stable")]
        slots = tuple(
            Slot(
                s.kind,
                s.is_a,
                self.stands[s.kind][np.arange(len(self.stands[s.kind]))[s.at][some]],
                s.others[some],
                s.later,
            )
            for s in batch.slots
        )
        return Batch(batch.members[some], slots, batch.share)


def _parts(
    problem: Problem, variables: Sequence[int], edges: Sequence[int], tables: Tables
) -> dict[int, int]:
    """A number per variable; equal numbers for equal surroundings."""
    links: dict[int, list[tuple[int, bool, int]]] = {i: [] for i in variables}
    for k in edges:
        p, kind = problem.pairs[k], int(tables.kind_of[k])
        links[p.a].append((kind, True, p.b))
        links[p.b].append((kind, False, p.a))
    parts = {i: len(problem.variables[i]) for i in variables}
    for _ in range(_AROUND):
        numbers: dict[object, int] = {}
        parts = {
            i: numbers.setdefault(
                (parts[i], *sorted((kind, is_a, parts[j]) for kind, is_a, j in links[i])),
                len(numbers),
            )
            for i in variables
        }
    return parts


def _standing(count: int) -> Ints:
    """Of so many in a row, for each: which stands for it."""
    out = np.arange(count)
    out[_ENDS : count - _ENDS] = count // 2
    return out
