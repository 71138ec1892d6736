"""Sizes: how large the tables of a problem are, and those of one on a mesh of more axes.

Over a axes of which each may cut one of m dims, in any order, a tensor has
Σ_j C(a, j)·m·(m + 1)···(m + j - 1) layouts: 4, 19, 106 for three dims. Each further axis multiplies
them, and so the entries of tables, by somewhat more than the last one did.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.extract.problem.problem import Problem

# By how much the third axis multiplies more than the second did: from 1.38 to 2.04 in programs of
# two products, their gradients and train step, and of attention, on meshes of 8 and 64.
_FASTER = 1.7
# What the entries of a pair on one axis are of those on two, as a power: 0.42 to 0.47 in the same.
_ROOT = 0.45


def entries(problem: Problem) -> int:
    """The entries of all tables of pairs of a problem."""
    return sum(pair.seconds.size for pair in problem.pairs)


def entries_of_three_axes(problems: Sequence[PlanProblem]) -> float:
    """About how many entries a problem of three axes would have, told from those of one program on
    meshes of one and two axes: entries(2)² / entries(1), and some.

    Infinite where none has two; where none has one, a pair of as many entries as the mean one
    stands for all.
    """
    by_axes: dict[int, int] = {}
    for p in problems:
        axes = len(p.choices.mesh.sizes)
        by_axes[axes] = max(by_axes.get(axes, 0), entries(p.problem))
    two = by_axes.get(2)
    if not two:
        return float("inf")
    pairs = max(len(p.problem.pairs) for p in problems)
    one = by_axes.get(1) or pairs * (two / pairs) ** _ROOT
    return _FASTER * two**2 / one
