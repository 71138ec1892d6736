"""Which of the programs that a rule applies to it is tried on: those that are unlike each other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
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
    """What is told by parameters: whether operations of one kernel have the same, and how many dims
    a product contracts and in what order it pairs them, what pads add and cut off, which slices
    have strides, what powers are taken, which convolutions leave a rest that no window covers."""
    of: dict[str, list[Any]] = {}
    for a in applied.values():
        of.setdefault(a.kernel, []).append((a.key[1], a.inputs))
    found: list[Any] = []
    for kernel, some in of.items():
        if len(some) > 1 and len({inputs for _, inputs in some}) == 1:
            found.append((kernel, len({params for params, _ in some}) > 1))
    pads = [a.params["padding_config"] for a in applied.values() if a.kernel == "pad"]
    if pads:
        found.append(("pad", *(_signs(config) for config in pads)))
    slices = [a for a in applied.values() if a.kernel == "slice"]
    if slices:
        found.append(("slice", *(_strided(a.params) for a in slices)))
    for a, b in combinations(slices, 2):
        if a.inputs == b.inputs:
            found.append(("slices", _relations(a.params, b.params)))
    rests = [_leaves_rest(a) for a in applied.values() if a.kernel == "conv_general_dilated"]
    if rests:
        found.append(("conv_general_dilated", *rests))
    found += [(a.kernel, a.params["y"]) for a in applied.values() if a.kernel == "integer_pow"]
    for a in applied.values():
        if a.kernel == "dot_general":
            (lhs, rhs), batch = a.params["dimension_numbers"]
            pairs = sorted(zip(lhs, rhs, strict=True))
            crossed = [r for _, r in pairs] != sorted(rhs)
            found.append((a.kernel, len(lhs), len(batch[0]), crossed))
    return tuple(dict.fromkeys(found))


def _strided(params: Mapping[str, Any]) -> bool:
    """Whether a slice leaves elements out between those that it keeps."""
    ends = zip(params["start_indices"], params["limit_indices"], strict=True)
    steps = params["strides"] or [1] * len(params["start_indices"])
    return any(step > 1 and b - a > 1 for step, (a, b) in zip(steps, ends, strict=True))


def _relations(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """How two slices of one tensor lie to each other, in whatever dims."""
    of = [tuple(zip(p["start_indices"], p["limit_indices"], strict=True)) for p in (a, b)]
    found = set()
    for (begin, end), (other, last) in zip(*of, strict=True):
        if (begin, end) == (other, last):
            found.add("same")
        elif end == other or last == begin:
            found.add("beside")
        else:
            found.add("as long" if end - begin == last - other else "elsewhere")
    return tuple(sorted(found))


def _leaves_rest(conv: Applied) -> bool:
    """Whether the strides of a convolution leave elements at the end that no window covers."""
    p, (x, w) = conv.params, conv.inputs[:2]
    numbers = p["dimension_numbers"]
    for k, step in enumerate(p["window_strides"]):
        n, window = (
            t.shape[numbers[spec][k + 2]] for t, spec in ((x, "lhs_spec"), (w, "rhs_spec"))
        )
        whole = (n - 1) * p["lhs_dilation"][k] + 1 + sum(p["padding"][k])
        left = whole - ((window - 1) * p["rhs_dilation"][k] + 1)
        if n and left >= step and left % step:
            return True
    return False


def _signs(config: Sequence[Sequence[int]]) -> tuple[bool, bool]:
    """Whether a pad cuts off, and whether it adds."""
    ends = [n for low, high, _ in config for n in (low, high)]
    return any(n < 0 for n in ends), any(n > 0 for n in ends)


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
