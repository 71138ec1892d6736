"""Joins: copies of a plan merged further, as long as all that it then holds is within a limit.

Runs are cut by bytes that add up in the order of units that a plan has
(`extract/merged/runs.py`). But what waits for a merged copy keeps alive what it reads, and frees
later what it would have freed. So collectives next to each other are made one where the plan, in
the order that it then takes, stays within a limit (`extract/merged/peaks.py`): from the first on,
each with as many of those behind it as may be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tapestry_egg.errors import PlanError
from tapestry_egg.extract.certify.merging import most_bytes, payload
from tapestry_egg.extract.certify.recount import Walk

from .members import Member
from .peaks import Peaks
from .runs import Cut, Runs


class Joins:
    """The copies of one plan, and what it holds whichever of these are merged."""

    def __init__(self, runs: Runs) -> None:
        self.runs, self.peaks = runs, Peaks(runs.candidates)
        self.tried = 0  # ways to merge whose peak was counted

    def counted(self, cut: Cut) -> Cut | None:
        """A cut with the peak that a plan so merged has; None where some copies wait for others of
        their own."""
        self.tried += 1
        try:
            return replace(cut, peak=float(self.peaks.profile(cut.groups).max(initial=0.0)))
        except PlanError:
            return None

    def further(self, cut: Cut, limit: float) -> Cut:
        """A counted cut within a limit, and more of its copies merged there."""
        for _, members in sorted(self.runs.members.items(), key=lambda x: -len(x[1])):
            sets = self._sets(members, cut)
            n = 0
            while n + 1 < len(sets):
                more = self._with(cut, sets[n], sets[n + 1])
                if more is not None and more.peak <= limit:
                    cut, sets[n] = more, [*sets[n], *sets.pop(n + 1)]
                else:
                    n += 1
        return cut

    def _sets(self, members: Sequence[Member], cut: Cut) -> list[list[Member]]:
        """Copies of one kind by the collectives that a cut makes of them, in order."""
        number = {key: n for n, group in enumerate(cut.groups) for key in group}
        found: dict[object, list[Member]] = {}
        for m in members:
            found.setdefault(number.get(m.key, m.key), []).append(m)
        return list(found.values())

    def _with(self, cut: Cut, one: Sequence[Member], other: Sequence[Member]) -> Cut | None:
        """A cut with two collectives made one; None where they cannot be, or it saves nothing."""
        both = [*one, *other]
        less = self.runs.saved(both) - self.runs.saved(one) - self.runs.saved(other)
        if less <= 0.0 or not _may_be_one(self.runs.walk, both):
            return None
        apart = {m.key for m in both}
        groups = tuple(group for group in cut.groups if apart.isdisjoint(group))
        merged = (*groups, tuple(m.key for m in both))
        return self.counted(replace(cut, groups=merged, saved=cut.saved + less))


def _may_be_one(walk: Walk, members: Sequence[Member]) -> bool:
    """Whether the compiler makes one of so much, and no copy waits for another."""
    if payload(walk, [m.move for m in members]) > most_bytes(walk, members[0].move):
        return False
    readers = before = 0
    for m in members:
        readers, before = readers | m.readers, before | m.before
    return not readers & before
