"""Patched: one problem of all programs that the places of a program make together.

The problems of the program as given, and of it with one place computed another way, are laid over
each other (`laid.py`). So of n places of two ways each there are n + 1 problems to assemble, and
2^n programs in the one that is made of them, each at its own costs: where all places but one are as
given that holds by construction, and for the others because places are apart: what one changes no
other touches, or they are one place. That is tried on programs of several changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Ints, Problem

from .axis import Names
from .laid import Laid
from .programs import Entangled, Patched, Pose, Ways

#: Ways of places together that are one place, as they touch the same.
TOGETHER = 16
# Programs with several places changed that are held against the problem, and labellings of each; of
# long programs fewer, but two, as far as they have no more variables than this together.
_TRIED, _LABELLINGS, _VARIABLES = 12, 4, 1_500


def patched(pose: Pose, counts: Sequence[int], names: Names) -> Patched | None:
    """The problem of all programs whose place p is computed by one of `counts[p]` ways; None where
    no place can be held apart from the rest. `pose` makes the problem of one program."""
    groups: list[tuple[int, ...]] = [(p,) for p in range(len(counts))]
    while groups:
        try:
            found = Laid(pose, groups, counts, names).build()
            _try(found)
            return found
        except Entangled as e:
            groups = _apart(groups, counts, e.groups)
    return None


def _apart(
    groups: Sequence[tuple[int, ...]], counts: Sequence[int], entangled: Sequence[int]
) -> list[tuple[int, ...]]:
    """The groups with some joined to one, or without the last of them where that has too many
    ways, or was alone."""
    some = sorted(set(entangled))
    joined = tuple(sorted(p for g in some for p in groups[g]))
    if len(some) > 1 and prod(counts[p] for p in joined) <= TOGETHER:
        return sorted([g for k, g in enumerate(groups) if k not in some] + [joined])
    return [g for k, g in enumerate(groups) if k != some[-1]]


def _try(found: Patched) -> None:
    """Hold the problem against those of programs with several places changed, on labellings drawn
    at random. Raises Entangled where they differ."""
    rng = np.random.default_rng(0)
    sizes = np.array([len(v) for v in found.problem.variables])
    for chosen in _several(found, rng):
        for _ in range(_LABELLINGS):
            rows = rng.integers(0, sizes)
            for group, way in zip(found.groups, chosen, strict=True):
                rows[group.variable] = rng.choice(np.flatnonzero(group.way == way))
                for a, members in enumerate(group.members):
                    for v, row in members.values():
                        if row is None:
                            last = int(sizes[v]) - 1
                            rows[v] = rng.integers(0, last) if a == way else last
            if not _agrees(found, rows):
                raise Entangled(*range(len(found.groups)))


def _several(found: Patched, rng: np.random.Generator) -> list[Ways]:
    """Rows of every group, all or some: two at least that are not the first."""
    sizes = [len(group.ways) for group in found.groups]
    most = min(_TRIED, max(2, _VARIABLES // len(found.problem.variables)))
    if prod(sizes) <= 4 * most:
        every = [c for c in product(*map(range, sizes)) if sum(r > 0 for r in c) > 1]
        return every[:: max(1, -(-len(every) // most))]
    last = tuple(n - 1 for n in sizes)
    drawn = [tuple(rng.integers(0, np.array(sizes)).tolist()) for _ in range(most - 1)]
    return [last, *drawn]


def _agrees(found: Patched, rows: Ints) -> bool:
    """Whether a labelling costs in the problem what it costs in that of its own program."""
    try:
        posed, own = found.own(rows)
    except ExtractError:
        return False
    return np.allclose(_said(posed.problem, own), _said(found.problem, rows), rtol=1e-9, atol=1e-12)


def _said(problem: Problem, rows: Ints) -> tuple[float, float, float, float]:
    """Of a labelling, forbidden or not: the seconds that are finite, how many are not, joules, and
    the peak."""
    seconds, forbidden = 0.0, 0
    costs = [float(v.seconds[rows[i]]) for i, v in enumerate(problem.variables)]
    costs += [float(p.seconds[p.label_a[rows[p.a]], p.label_b[rows[p.b]]]) for p in problem.pairs]
    for c in costs:
        forbidden += not np.isfinite(c)
        seconds += c if np.isfinite(c) else 0.0
    _, joules, profile = problem.evaluate(rows)
    return seconds, float(forbidden), joules, float(profile.max(initial=0.0))
