"""All programs that the places of one make together, as one problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Ints, Problem

from .axis import Key, Names

Ways = tuple[int, ...]  # of every place the number of the way that computes it
Pose = Callable[[Ways], PlanProblem | None]


@dataclass(frozen=True, eq=False)
class Place:
    """Places of a program that are one, as they touch the same: row r of `variable` computes them
    by `ways[way[r]]`. `members[w]` says of what way w alone has, by its key, which variable it is,
    and which row of it each row of that variable is; None where that is the same one."""

    places: tuple[int, ...]
    ways: tuple[Ways, ...]
    variable: int
    way: Ints  # [rows]
    members: tuple[Mapping[Key, tuple[int, Ints | None]], ...]


@dataclass(frozen=True, eq=False)
class Patched:
    """The problem of all programs. `common` are the variables, by key, that all have; `left` counts
    the `places` that stay as given."""

    problem: Problem
    pose: Pose
    groups: tuple[Place, ...]
    common: Mapping[Key, int]
    names: Names
    places: int
    left: int = 0

    def ways(self, rows: Ints) -> Ways:
        """How a labelling computes every place."""
        found = [0] * self.places
        for group in self.groups:
            ways = group.ways[int(group.way[rows[group.variable]])]
            for p, way in zip(group.places, ways, strict=True):
                found[p] = way
        return tuple(found)

    def own(self, rows: Ints) -> tuple[PlanProblem, Ints]:
        """The program of a labelling as a problem of its own, and the labelling there. Raises
        ExtractError where that program has what no place has."""
        ways = self.ways(rows)
        posed = self.pose(ways)
        if posed is None:
            raise ExtractError("ways that depend on each other", where=str(ways))
        known: dict[Key, int] = {key: int(rows[v]) for key, v in self.common.items()}
        for group in self.groups:
            for key, (v, row) in group.members[int(group.way[rows[group.variable]])].items():
                if key in known:
                    raise ExtractError("a unit that two places have", where=str(ways))
                known[key] = int(rows[v]) if row is None else int(row[rows[v]])
        keys = self.names.of(posed)
        if set(keys) != set(known):
            raise ExtractError("a unit that no place has", where=str(ways))
        return posed, np.array([known[key] for key in keys], dtype=np.int64)


class Entangled(Exception):
    """Places that touch the same, or one that cannot be laid over the program as given."""

    def __init__(self, *groups: int) -> None:
        super().__init__(groups)
        self.groups = groups
