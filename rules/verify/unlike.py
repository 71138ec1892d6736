"""Which of the programs that a rule applies to it is tried on: those that are unlike each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.terms.requests import Applied

from .samples import DTYPES, SIZES, beside

# Choice: which of the programs that a rule applies to it is tried on.


# Programs that differ in sizes and dtypes only are tried so often.
_ALIKE = 4
# So often are all kinds of shapes and all dtypes walked through at least.
_ROUNDS = 3
# So many programs do where none that is new was found in so many turns.
_SOME = 12
# Extents up to this are drawn all the time, whatever a rule speaks of.
_SMALL = 8
_VAIN = 1000


class Unlike:
    """Chooses programs that are unlike each other: in dtypes, in kinds of shapes, in kernels, in
    parameters, in extents beside the numbers `marks` that the rule speaks of. But for parameters,
    what is new in one of them is never left out for want of room."""

    def __init__(self, wanted: int, marks: Sequence[float] = ()) -> None:
        self.wanted, self.given = wanted, 0
        self.beside = frozenset(n for n in beside(marks) if n > _SMALL)
        self.last = 0
        self.seen: Counter[Any] = Counter()

    def fresh(self, inputs: Mapping[str, TensorType], applied: Mapping[str, Applied]) -> bool:
        rare, structure, both = self._features(inputs, applied)
        new = any(self.seen[f] < most for f, most in rare)
        usual = self.seen[structure] < _ALIKE and not self.seen[both]
        return (new and self.given < 3 * self.wanted) or (usual and self.given < self.wanted)

    def take(
        self, inputs: Mapping[str, TensorType], applied: Mapping[str, Applied], turn: int
    ) -> None:
        rare, structure, both = self._features(inputs, applied)
        self.seen.update([*(f for f, _ in rare), structure, both])
        self.given += 1
        self.last = turn

    def enough(self, turn: int) -> bool:
        """Whether drawing may end: every kind of shapes met every dtype some times, and as many
        programs were found as are wanted, or none that is new for long."""
        if turn <= _ROUNDS * len(DTYPES) * len(SIZES):
            return False
        return self.given >= self.wanted or (self.given >= _SOME and turn - self.last > _VAIN)

    def _features(
        self, inputs: Mapping[str, TensorType], applied: Mapping[str, Applied]
    ) -> tuple[list[tuple[Any, int]], Any, Any]:
        dtypes = tuple(t.dtype for t in inputs.values())
        kernels = tuple(a.kernel for a in applied.values())
        kinds = tuple(sorted({kind(d) for d in dtypes}))
        structure = tuple(
            (a.kernel, a.key[1], tuple(t.rank for t in a.inputs)) for a in applied.values()
        )
        ranks = {t.rank for a in applied.values() for t in (*a.inputs, a.output)}
        extents = {n for a in applied.values() for t in (*a.inputs, a.output) for n in t.shape}
        rare = [
            (("dtypes", dtypes), 1),
            (("kernels", kernels), 1),
            (("shapes", kinds, _oddities(applied)), 1),
            (("rank", max(ranks, default=0)), _ALIKE),
            *((("spelling", s), _ALIKE) for s in _spellings(applied)),
            *((("extent", n), 2) for n in sorted(self.beside & extents)),
        ]
        return rare, ("structure", structure), ("both", structure, dtypes)


def _spellings(applied: Mapping[str, Applied]) -> tuple[Any, ...]:
    """What is told by parameters: whether operations of one kernel that read the same have the
    same, and what their templates say under `unlike` of one, and of two that read the same."""
    found: list[Any] = []
    every = list(applied.values())
    for k, a in enumerate(every):
        found.append((a.kernel, registry.unlike(a.kernel, a.params, a.inputs)))
        for b in every[k + 1 :]:
            if b.kernel == a.kernel and b.inputs == a.inputs:
                told = registry.unlike(a.kernel, a.params, a.inputs, b.params)
                found.append((a.kernel, told, a.key[1] == b.key[1]))
    return tuple(dict.fromkeys(found))


def _oddities(applied: Mapping[str, Applied]) -> tuple[str, ...]:
    """What is odd about the shapes that occur."""
    shapes = [t.shape for a in applied.values() for t in (*a.inputs, a.output)]
    extents = {n for shape in shapes for n in shape}
    found = {
        "empty": 0 in extents,
        "made of nothing": any(
            a.output.size and any(t.size == 0 for t in a.inputs) for a in applied.values()
        ),
        "deep": any(len(s) > 4 for s in shapes),
        "large": any(n > 16 for n in extents),
        "long": any(n > 100 for n in extents),
        "large and odd": any(n > 16 and n % 2 for n in extents),
        "thin": 1 in extents,
        "oblong": any(len(set(s)) > 1 for s in shapes),
        "scalar": () in shapes,
    }
    return tuple(k for k, holds in found.items() if holds)
