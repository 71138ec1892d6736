"""Batches: variables that message passing updates at once.

Variables with equally many rows and pairs of equal kinds, as the same operation in equal layers
has, form a batch if no two of them share a pair. Batches are passed over in the order of their
first members, so a pass goes through one layer's operations, each in all layers. Any order of
variables gives a valid bound; this one costs as much per pass in Python for a hundred layers as for
four.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.problem import Floats, Ints, Problem

from .pricing import Tables, places


class Side:
    """How one end of a pair groups its variable's rows into labels, ready for grouped minima."""

    __slots__ = ("identity", "labels", "order", "starts")

    def __init__(self, labels: Ints, count: int) -> None:
        self.labels = labels
        self.identity = len(labels) == count and bool((labels == np.arange(count)).all())
        self.order = np.argsort(labels, kind="stable")
        self.starts = np.searchsorted(labels[self.order], np.arange(count))

    def least(self, rows: Floats) -> Floats:
        """Per label, the last axis: the least value among its rows."""
        if self.identity:
            return rows
        return np.minimum.reduceat(rows.take(self.order, axis=-1), self.starts, axis=-1)

    def spread(self, labels: Floats) -> Floats:
        """Per row, the last axis: the value of its label."""
        return labels if self.identity else labels.take(self.labels, axis=-1)


@dataclass(frozen=True, eq=False)
class Slot:
    """One pair of every member of a batch, all of one kind; `is_a` if they are its first ends.

    `at` are the pairs' places among their kind, `others` the variables at the other ends, and
    `later` says whether a pass in order meets these after the batch.
    """

    kind: int
    is_a: bool
    at: slice | Ints  # [members]
    others: Ints  # [members]
    later: bool


@dataclass(frozen=True, eq=False)
class Batch:
    """Variables `members` and their pairs."""

    members: Ints  # [members], variables
    slots: tuple[Slot, ...]
    share: float  # of a belief that goes into each message


def batches(
    problem: Problem, core: Sequence[int] | Ints, edges: Sequence[int], tables: Tables
) -> tuple[Batch, ...]:
    """The batches of the variables `core` with the pairs `edges` between them, in order."""
    links: dict[int, list[tuple[int, bool, int, int]]] = {int(i): [] for i in core}
    for k in edges:
        p, kind = problem.pairs[k], int(tables.kind_of[k])
        links[p.a].append((kind, True, p.b, k))
        links[p.b].append((kind, False, p.a, k))
    alike: dict[tuple[object, ...], list[int]] = {}
    for i, found in links.items():
        found.sort()
        key = (len(problem.variables[i]), *((kind, is_a) for kind, is_a, *_ in found))
        alike.setdefault(key, []).append(i)
    apart = [group for members in alike.values() for group in _apart(members, links)]
    apart.sort(key=lambda group: group[0])
    rank = {i: n for n, group in enumerate(apart) for i in group}
    out = []
    for group in apart:
        by_order: dict[tuple[bool, ...], list[int]] = {}
        for i in group:
            by_order.setdefault(tuple(rank[j] > rank[i] for _, _, j, _ in links[i]), []).append(i)
        for later, members in by_order.items():
            out.append(_batch(members, later, links, tables))
    return tuple(out)


def _apart(
    members: Sequence[int], links: dict[int, list[tuple[int, bool, int, int]]]
) -> list[list[int]]:
    """The members in groups, no two of a group neighbours: each joins the first that it can."""
    groups: list[list[int]] = []
    held: list[set[int]] = []
    for i in members:
        near = {j for _, _, j, _ in links[i]}
        for group, inside in zip(groups, held, strict=True):
            if not near & inside:
                group.append(i)
                inside.add(i)
                break
        else:
            groups.append([i])
            held.append({i})
    return groups


def _batch(
    members: Sequence[int],
    later: tuple[bool, ...],
    links: dict[int, list[tuple[int, bool, int, int]]],
    tables: Tables,
) -> Batch:
    slots = []
    for s, onward in enumerate(later):
        kind, is_a, *_ = links[members[0]][s]
        pairs = np.array([links[i][s][3] for i in members], dtype=np.int64)
        others = np.array([links[i][s][2] for i in members], dtype=np.int64)
        slots.append(Slot(kind, is_a, places(tables.place[pairs]), others, onward))
    ahead = sum(later)
    share = 1.0 / max(ahead, len(later) - ahead, 1)
    return Batch(np.array(members, dtype=np.int64), tuple(slots), share)


def picked(table: NDArray[np.float64], labels: Ints, first: bool) -> Floats:
    """Of every table [members, a, b]: its row (`first`) or column number `labels[member]`."""
    each = np.arange(len(labels))
    return table[each, labels] if first else table[each, :, labels]
