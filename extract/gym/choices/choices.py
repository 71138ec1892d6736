"""The choice problem: one alternative per needed class, as arrays.

An e-graph's extraction (AND-OR: a node needs all classes that are its children, a class needs one
of its nodes), a cost function network (every class chooses, pairs of choices cost) and mixtures of
both are this one problem. Classes, nodes and objectives are numbered; ragged lists are rows of one
long array ("compressed sparse rows": row i is `values[start[i]:start[i + 1]]`).

Costs are kept in one column per objective: int64 where the input was integral, so that sums are
exact when they are taken in Python's integers; float64 otherwise. What is forbidden is said by a
flag and not by a cost.
"""

from __future__ import annotations

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
    costs: tuple[Column, ...] = ()  # per objective: [entries]
    legal: Flags = field(default_factory=lambda: np.zeros(0, dtype=np.bool_))  # [entries]

    def __len__(self) -> int:
        return len(self.first)


@dataclass(frozen=True)
class Usage:
    """What a chosen node occupies of one resource over time, and how much there is.

    The nodes chosen at time t (`lower <= t < upper`) together occupy at most `limits[t]`;
    `limits` of length one holds for all times. Nodes with `lower == upper` occupy nothing.
    """

    lower: Ints = field(default_factory=_none)  # [nodes]
    upper: Ints = field(default_factory=_none)  # [nodes]
    amount: Ints = field(default_factory=_none)  # [nodes], not negative
    limits: Ints = field(default_factory=_none)  # [times] or [1]

    def __bool__(self) -> bool:
        return bool(self.limits.size)


@dataclass(frozen=True)
class ChoiceProblem:
    """Choose one node for every active class, so that the sums of costs are least.

    Active are the roots and the children of chosen nodes; with `all_active` every class is. A
    node's costs are paid once, whatever number of classes chose it. With `acyclic`, no chosen node
    may need its own result, through whatever classes.
    """

    name: str
    objectives: tuple[str, ...]
    classes: tuple[str, ...]
    nodes: tuple[str, ...]  # by class
    node_start: Ints  # [classes + 1] rows of nodes
    costs: tuple[Column, ...]  # per objective: [nodes]
    allowed: Flags  # [nodes]; False where a cost is infinite
    child_start: Ints  # [nodes + 1] rows of `children`
    children: Ints  # classes, in the order of the input, repetitions kept
    roots: Ints  # classes, each once
    provide_start: Ints = field(default_factory=_none)  # [nodes + 1], or empty: none
    provides: Ints = field(default_factory=_none)  # classes that a node yields besides its own
    pairs: Pairs = field(default_factory=Pairs)
    usage: Usage = field(default_factory=Usage)
    all_active: bool = False
    acyclic: bool = True
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

    def provided_by(self, node: int) -> Ints:
        """The classes that a node yields besides its own."""
        if not self.provide_start.size:
            return self.provides
        return self.provides[self.provide_start[node] : self.provide_start[node + 1]]

    def times(self) -> int:
        """The number of points in time at which the resource is counted."""
        return int(self.usage.upper.max(initial=0))

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


@dataclass(frozen=True)
class Extraction:
    """What a method found: a choice with its values, a bound, and how they came about.

    `bound` is below the first objective of every feasible choice (-inf where nothing is known);
    `proven` when no choice is better than this one, or there is none at all. Without a choice,
    `reason` says why.
    """

    method: str
    choice: Choice | None
    values: tuple[Number, ...]  # per objective; empty without a choice
    bound: float | int | Fraction
    proven: bool
    seconds: float
    reason: str = ""
    notes: tuple[str, ...] = ()  # reductions and steps, as shown to a reader

    @property
    def feasible(self) -> bool:
        """Whether there is a choice."""
        return self.choice is not None

    @property
    def gap(self) -> float:
        """(value - bound) / |value|: 0 when proven, inf when nothing is known."""
        if self.proven and self.values:
            return 0.0
        if not self.values or self.bound == float("-inf"):
            return float("inf")
        value = self.values[0]
        return max(0.0, float(value - self.bound)) / max(abs(float(value)), 1e-300)


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

    def check_columns(array: str, columns: tuple[Column, ...], length: int, flags: Flags) -> None:
        if len(columns) != len(p.objectives):
            fail(array, f"{len(columns)} columns for {len(p.objectives)} objectives")
        for name, values in zip(p.objectives, columns, strict=True):
            if values.shape != (length,) or values.dtype not in (np.int64, np.float64):
                fail(f"{array}[{name}]", f"int64 or float64 of length {length} expected")
            if not np.isfinite(values).all():
                fail(f"{array}[{name}]", "a cost is not finite", "Forbid it by its flag.")
        if flags.shape != (length,) or flags.dtype != np.bool_:
            fail(array, f"flags of length {length} expected")

    if not p.objectives or len(set(p.objectives)) != len(p.objectives):
        fail("objectives", "at least one is needed, each once")
    check_rows("node_start", p.node_start, classes, nodes)
    check_columns("costs", p.costs, nodes, p.allowed)
    check_rows("child_start", p.child_start, nodes, len(p.children))
    check_range("children", p.children, classes)
    if p.labels and len(p.labels) != nodes:
        fail("labels", f"{nodes} expected")
    check_range("roots", p.roots, classes)
    if len(np.unique(p.roots)) != len(p.roots):
        fail("roots", "a class is given twice")
    if p.provide_start.size or p.provides.size:
        check_rows("provide_start", p.provide_start, nodes, len(p.provides))
        check_range("provides", p.provides, classes)
    q = p.pairs
    check_range("pairs.first", q.first, classes)
    check_range("pairs.second", q.second, classes)
    if len(q) or q.costs:
        check_rows("pairs.start", q.start, len(q), len(q.legal))
        check_columns("pairs.costs", q.costs, len(q.legal), q.legal)
        sizes = np.diff(p.node_start)
        wrong = np.flatnonzero(np.diff(q.start) != sizes[q.first] * sizes[q.second])
        if len(q.second) != len(q.first) or wrong.size:
            fail("pairs.start", f"table {int(wrong[0]) if wrong.size else 0} has another size")
        if (q.first == q.second).any():
            fail("pairs.second", "a pair joins a class with itself", "Add it to the node's costs.")
    u = p.usage
    if u:
        if not u.lower.shape == u.upper.shape == u.amount.shape == (nodes,):
            fail("usage", "one interval and one amount per node expected")
        if (u.lower > u.upper).any() or (u.lower < 0).any():
            fail("usage", "an interval ends before it begins, or begins before time 0")
        if (u.amount < 0).any() or (u.limits < 0).any():
            fail("usage", "an amount or a limit is negative")
        if len(u.limits) not in (1, p.times()):
            fail("usage.limits", f"one limit, or one for each of {p.times()} times, expected")
