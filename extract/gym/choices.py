"""The choice problem: one alternative per needed class, as arrays.

An e-graph's extraction (AND-OR: a node needs all classes that are its children, a class needs one
of its nodes) and a cost function network (every class chooses, pairs of choices cost, what is
chosen takes memory) are this one problem. Classes and nodes are numbered; ragged lists are rows of
one long array ("compressed sparse rows": row i is `values[start[i]:start[i + 1]]`).

Costs are int64 if the input was integral, so that sums are exact in Python's integers, and float64
otherwise. A flag, not a cost, says what is forbidden.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import ExtractError

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
#: int64 or float64, one entry per node or per table entry.
Column = NDArray[Any]
#: A value of an objective: exact for integers; `Fraction` where float64 costs were added exactly.
Number = int | float | Fraction


def _none() -> Ints:
    return np.zeros(0, dtype=np.int64)


@dataclass(frozen=True)
class Pairs:
    """Costs of two classes' choices together: one table per pair, laid end to end.

    The entry of node i of `first` and node j of `second` (each counted within its class) in the
    table of pair p is at `start[p] + i * (number of nodes of second) + j`. It is paid when both
    classes are active. Several pairs may join the same two classes: their costs add.
    """

    first: Ints = field(default_factory=_none)  # [pairs] class
    second: Ints = field(default_factory=_none)  # [pairs] class, not the first
    start: Ints = field(default_factory=lambda: np.zeros(1, dtype=np.int64))  # [pairs + 1]
    cost: Column = field(default_factory=_none)  # [entries]
    legal: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))  # [entries]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class Usage:
    """The memory that a chosen node takes over time, and how much there is.

    The nodes chosen at time t (`lower <= t < upper`) together take at most `limit`. Nodes with
    `lower == upper` take nothing.
    """

    lower: Ints = field(default_factory=_none)  # [nodes]
    upper: Ints = field(default_factory=_none)  # [nodes]
    amount: Ints = field(default_factory=_none)  # [nodes], not negative
    limit: int | None = None  # None: memory does not count

    @property
    def times(self) -> int:
        """The number of points in time at which memory is counted."""
        return int(self.upper.max(initial=0))


@dataclass(frozen=True)
class ChoiceProblem:
    """Choose one node for every active class, so that the sum of costs is least.

    Active are the roots and the children of chosen nodes. No chosen node may need its own result,
    through whatever classes.
    """

    name: str
    classes: tuple[str, ...]
    nodes: tuple[str, ...]  # by class
    node_start: Ints  # [classes + 1] rows of nodes
    cost: Column  # [nodes]
    allowed: Flags  # [nodes]; False where a cost is infinite
    child_start: Ints  # [nodes + 1] rows of `children`
    children: Ints  # classes, in the order of the input, repetitions kept
    roots: Ints  # classes, each once
    pairs: Pairs = field(default_factory=Pairs)
    usage: Usage = field(default_factory=Usage)
    labels: tuple[str, ...] = ()  # [nodes] what each computes, for readers; or empty
    remarks: tuple[str, ...] = ()  # what the reader of a file should tell

    def node_class(self) -> Ints:
        """The class of each node: [nodes]."""
        return np.repeat(np.arange(len(self.classes)), np.diff(self.node_start))

    def children_of(self, node: int) -> Ints:
        """The classes that a node needs, in the order of the input."""
        return self.children[self.child_start[node] : self.child_start[node + 1]]

    @cached_property
    def needs(self) -> tuple[tuple[int, ...], ...]:
        """The classes that each node needs, in the order of the input: for walks over many."""
        start, children = self.child_start.tolist(), self.children.tolist()
        return tuple(tuple(children[a:b]) for a, b in pairwise(start))

    @property
    def network(self) -> bool:
        """Whether every class chooses, whatever others do."""
        return not self.children.size and len(self.roots) == len(self.classes)

    @property
    def sums(self) -> bool:
        """Whether costs are sums over nodes alone, without pairs and limits."""
        return not len(self.pairs) and self.usage.limit is None

    @property
    def integral(self) -> bool:
        """Whether all costs are integers, so that those of answers differ by one at least."""
        return self.cost.dtype.kind + self.pairs.cost.dtype.kind == "ii"

    def least(self, bound: Number) -> Number:
        """The least cost that an answer may have, from a bound: an integer where all are."""
        if not self.integral or isinstance(bound, int) or not math.isfinite(bound):
            return bound
        return math.ceil(bound - max(1.0, abs(float(bound))) * 1e-15)

    def verify(self) -> ChoiceProblem:
        """The problem itself, when its arrays fit together.

        Raises ExtractError that names the first array and entry that do not.
        """
        _verify(self)
        return self


@dataclass(frozen=True)
class Choice:
    """One answer: the node of every active class, -1 for the others."""

    node: Ints  # [classes]

    def names(self, problem: ChoiceProblem) -> dict[str, str]:
        """Class name -> name of its node, active classes only."""
        at = np.flatnonzero(self.node >= 0)
        return {problem.classes[c]: problem.nodes[self.node[c]] for c in at.tolist()}


def column(values: Sequence[Any]) -> tuple[Column, Flags]:
    """A cost column from numbers: (int64 where all are integral and fit, else float64; allowed).

    Infinite values are not allowed and become 0. Raises ExtractError for what is no number.
    """
    allowed = np.ones(len(values), dtype=np.bool_)
    kept: list[Any] = list(values)
    integral = True
    for i, v in enumerate(kept):
        if isinstance(v, bool) or not isinstance(v, (int, float)) or v != v:
            raise ExtractError(f"cost {v!r} is not a number", where=f"entry {i}")
        if v in (float("inf"), float("-inf")):
            if v < 0:
                raise ExtractError("a cost of minus infinity", where=f"entry {i}")
            allowed[i] = False
            kept[i] = 0
        elif integral and (v != int(v) or not -(2**63) <= int(v) < 2**63):
            integral = False
    if integral:
        return np.array([int(v) for v in kept], dtype=np.int64), allowed
    return np.array([float(v) for v in kept], dtype=np.float64), allowed


def rows(lists: Iterable[Sequence[int]]) -> tuple[Ints, Ints]:
    """Compressed sparse rows of integers: (start, values)."""
    flat: list[int] = []
    start = [0]
    for entries in lists:
        flat.extend(entries)
        start.append(len(flat))
    return np.array(start, dtype=np.int64), np.array(flat, dtype=np.int64)


def _verify(p: ChoiceProblem) -> None:
    classes, nodes = len(p.classes), len(p.nodes)

    def fail(array: str, what: str, hint: str = "") -> None:
        raise ExtractError(
            what, where=f"choice problem {p.name or '(unnamed)'}: {array}", hint=hint
        )

    def check_rows(array: str, start: Ints, count: int, length: int) -> None:
        if start.shape != (count + 1,) or start[0] != 0 or start[-1] != length:
            fail(array, f"{count + 1} offsets from 0 to {length} expected")
        if (np.diff(start) < 0).any():
            fail(array, f"row {int(np.flatnonzero(np.diff(start) < 0)[0])} has a negative length")

    def check_range(array: str, values: Ints, bound: int) -> None:
        bad = np.flatnonzero((values < 0) | (values >= bound))
        if bad.size:
            fail(array, f"entry {int(bad[0])} is {int(values[bad[0]])}, not in 0..{bound - 1}")

    def check_column(array: str, values: Column, length: int, flags: Flags) -> None:
        if values.shape != (length,) or values.dtype not in (np.int64, np.float64):
            fail(array, f"int64 or float64 of length {length} expected")
        if not np.isfinite(values).all():
            fail(array, "a cost is not finite", "Forbid it by its flag.")
        if flags.shape != (length,) or flags.dtype != np.bool_:
            fail(array, f"flags of length {length} expected")

    check_rows("node_start", p.node_start, classes, nodes)
    check_column("cost", p.cost, nodes, p.allowed)
    check_rows("child_start", p.child_start, nodes, len(p.children))
    check_range("children", p.children, classes)
    if p.labels and len(p.labels) != nodes:
        fail("labels", f"{nodes} expected")
    check_range("roots", p.roots, classes)
    if len(np.unique(p.roots)) != len(p.roots):
        fail("roots", "a class is given twice")
    q = p.pairs
    check_range("pairs.first", q.first, classes)
    check_range("pairs.second", q.second, classes)
    if len(q) or len(q.cost):
        check_rows("pairs.start", q.start, len(q), len(q.legal))
        check_column("pairs.cost", q.cost, len(q.legal), q.legal)
        sizes = np.diff(p.node_start)
        wrong = np.flatnonzero(np.diff(q.start) != sizes[q.first] * sizes[q.second])
        if len(q.second) != len(q.first) or wrong.size:
            fail("pairs.start", f"table {int(wrong[0]) if wrong.size else 0} has another size")
        if (q.first == q.second).any():
            fail("pairs.second", "a pair joins a class with itself", "Add it to the node's costs.")
    u = p.usage
    if u.limit is not None:
        if not u.lower.shape == u.upper.shape == u.amount.shape == (nodes,):
            fail("usage", "one interval and one amount per node expected")
        if (u.lower > u.upper).any() or (u.lower < 0).any():
            fail("usage", "an interval ends before it begins, or begins before time 0")
        if (u.amount < 0).any() or u.limit < 0:
            fail("usage", "an amount or a limit is negative")
