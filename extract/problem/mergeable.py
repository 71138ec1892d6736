"""Mergeable collectives: which copies several collectives of which may be one, and their latencies.

See `latencies.py` for what follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.choices.copies import CopyTable
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.machine.compiler_choices import type_together
from tapestry_egg.machine.costs import MOVING, carried_as, least_added

from .columns import Columns
from .problem import Floats, Ints

#: What all copies have in common that may be one collective: kind, axes, monoid, of sums the type.
Kind = tuple[str, tuple[int, ...], str | None, str | None]


@dataclass(frozen=True, eq=False)
class Mergeable:
    """Which of the copies of one program's values may be merged, and what of their seconds is no
    more than latency."""

    columns: Columns

    def latency(self, v: int) -> Floats | None:
        """[from, to]: the seconds of copies of a value but for those that their bytes add to any
        collective; None where none may be merged."""
        if self.columns.program.body_of[v]:
            return None
        table = self.columns.table(v)

        def latency() -> Floats | None:
            moves = self._moves(table)
            if not moves:
                return None
            found = np.zeros_like(table.seconds)
            for kind, at in moves.items():
                sizes = table.local_bytes[at[0]]
                added = {x: self._added(kind, x) for x in np.unique(sizes).tolist()}
                bytes_ = np.array([added[x] for x in sizes.tolist()])
                found[at] = np.maximum(0.0, table.seconds[at] - bytes_)
            return found

        return self.columns.once(latency, "latency", table)

    def _moves(self, table: CopyTable) -> dict[Kind, tuple[Ints, Ints]]:
        """The copies of one type of tensor that may be merged, by their kinds: (from, to) of
        each."""
        choices = self.columns.choices
        combiner, dtype = choices.target.combiner, table.tensor.dtype
        found: dict[Kind, list[tuple[int, int]]] = {}
        if combiner is None or dtype.startswith("key<"):
            return {}
        for a, b, step in table.single():
            name = step.kind
            kind = (name, step.axes, step.monoid, type_together(name, dtype))
            if int(table.following[a, b]) != b or name not in MOVING or name not in combiner.kinds:
                continue
            if choices.mesh.parts(step.axes) < 2 or carried_as(name, step.monoid, dtype) != name:
                continue
            if float(table.local_bytes[a]) <= self._most(kind):
                found.setdefault(kind, []).append((a, b))
        return {k: (np.array(x)[:, 0], np.array(x)[:, 1]) for k, x in found.items()}

    def _most(self, kind: Kind) -> float:
        """The most bytes that may enter one collective."""
        combiner = self.columns.choices.target.combiner
        assert combiner is not None
        whole = self.columns.choices.mesh.parts(kind[1]) if kind[0] == "all_gather" else 1
        return combiner.bytes / whole

    def _added(self, kind: Kind, size: float) -> float:
        """Seconds that so many bytes, no more than one may have, add at least to those of any
        collective that they join."""
        choices = self.columns.choices
        combiner, most = choices.target.combiner, self._most(kind)
        assert combiner is not None
        least = least_added(kind[0], kind[1], choices.mesh, choices.target, most, size)
        if kind[0] in combiner.contiguous:
            least += 4.0 * size / choices.target.hbm_bytes_per_second
        return least


def may_merge(choices: UnitChoices) -> bool:
    """Whether seconds are a sum in which collectives may be merged."""
    target = choices.target
    return target.combiner is not None and target.slowdown is None and choices.mesh.devices > 1
