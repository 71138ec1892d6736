"""IOPDDL JSON: the instances of the ASPLOS 2025 contest on intra-operator parallelism.

A node has a half-open interval of time in which it occupies memory, and per strategy a cost and a
usage; an edge has a row-major table of costs over the strategies of its two nodes. The usages of
the nodes present at any time together stay within `usage_limit`. All are integers of 64 bits; a
cost of 10^18 stands for infinity. (github.com/google/iopddl)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import Any, NotRequired, TypedDict

import msgspec
import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices import (
    Choice,
    ChoiceProblem,
    Flags,
    Ints,
    Pairs,
    Usage,
)


class _Nodes(TypedDict):
    intervals: list[list[Any]]
    costs: list[list[Any]]
    usages: list[list[Any]]


class _Edges(TypedDict):
    nodes: list[list[Any]]
    costs: list[list[Any]]


class _Problem(TypedDict):
    name: NotRequired[Any]
    nodes: _Nodes
    edges: _Edges
    usage_limit: Any


_HINT = "nodes: {intervals, costs, usages}, edges: {nodes, costs}, usage_limit; lists of integers."
#: Costs from here on are infinite.
INFINITE = 10**18


def recognises(document: Any) -> bool:
    """Whether a JSON document is of this format."""
    if not isinstance(document, Mapping) or not isinstance(document.get("problem"), Mapping):
        return False
    return {"nodes", "edges", "usage_limit"} <= document["problem"].keys()


def read(document: Mapping[str, Any], name: str) -> ChoiceProblem:
    """The problem of a document: a class per node, named by its number.

    Raises ExtractError where lengths do not match or a number is none.
    """
    try:
        problem = msgspec.convert(document["problem"], _Problem)
    except msgspec.ValidationError as fault:
        what, _, place = str(fault).partition(" - at ")
        where = place.strip("`").removeprefix("$.") or "problem"
        raise ExtractError(what, where=where, hint=_HINT) from None
    nodes, edges = problem["nodes"], problem["edges"]
    spans = _integers(list(chain.from_iterable(nodes["intervals"])), "nodes.intervals")
    count = len(nodes["costs"])
    if not len(nodes["intervals"]) == len(nodes["usages"]) == count or len(spans) != 2 * count:
        raise ExtractError("intervals, costs and usages are not of one length", where="nodes")
    spans = spans.reshape(-1, 2)
    sizes = _lengths(nodes["costs"])
    if (sizes == 0).any():
        raise ExtractError("no strategy", where=f"node {int(np.flatnonzero(sizes == 0)[0])}")
    if (_lengths(nodes["usages"]) != sizes).any():
        at = int(np.flatnonzero(_lengths(nodes["usages"]) != sizes)[0])
        raise ExtractError("as many usages as costs expected", where=f"node {at}")
    costs = _integers(list(chain.from_iterable(nodes["costs"])), "nodes.costs")
    amount = _integers(list(chain.from_iterable(nodes["usages"])), "nodes.usages")
    start = np.concatenate(([0], np.cumsum(sizes)))
    ends = _integers(list(chain.from_iterable(edges["nodes"])), "edges.nodes")
    if len(ends) != 2 * len(edges["nodes"]) or len(edges["nodes"]) != len(edges["costs"]):
        raise ExtractError("two nodes and one table per edge expected", where="edges")
    if ends.size and not 0 <= ends.min() <= ends.max() < count:
        raise ExtractError("an edge joins a node that is not there", where="edges.nodes")
    first, second = ends.reshape(-1, 2).T
    entries = _lengths(edges["costs"])
    wrong = np.flatnonzero(entries != sizes[first] * sizes[second])
    if wrong.size:
        raise ExtractError(
            f"{int(sizes[first[wrong[0]]] * sizes[second[wrong[0]]])} costs expected",
            where=f"edge {int(wrong[0])}",
        )
    table = _integers(list(chain.from_iterable(edges["costs"])), "edges.costs")
    allowed, legal = costs < INFINITE, table < INFINITE
    cell = np.concatenate(([0], np.cumsum(entries)))
    loops = np.flatnonzero(first == second)
    for e in loops.tolist():  # a node with itself: the diagonal is a cost of the node
        own = slice(int(start[first[e]]), int(start[first[e] + 1]))
        step = int(sizes[first[e]]) + 1
        allowed[own] &= legal[cell[e] : cell[e + 1] : step]
        costs[own] += np.where(allowed[own], table[cell[e] : cell[e + 1] : step], 0)
    if loops.size:
        keep = np.ones(len(first), dtype=bool)
        keep[loops] = False
        inside = np.repeat(keep, entries)
        table, legal = table[inside], legal[inside]
        first, second, entries = first[keep], second[keep], entries[keep]
        cell = np.concatenate(([0], np.cumsum(entries)))
    limit = _integers([problem["usage_limit"]], "usage_limit")
    rows = int(start[-1])
    return ChoiceProblem(
        name=str(problem.get("name") or name),
        classes=tuple(map(str, range(count))),
        nodes=tuple([f"{i}:{k}" for i, n in enumerate(sizes.tolist()) for k in range(n)]),
        node_start=start,
        cost=np.where(allowed, costs, 0),
        allowed=allowed,
        child_start=np.zeros(rows + 1, dtype=np.int64),
        children=np.zeros(0, dtype=np.int64),
        roots=np.arange(count),
        pairs=Pairs(first, second, cell, np.where(legal, table, 0), legal),
        usage=Usage(
            np.repeat(spans[:, 0], sizes), np.repeat(spans[:, 1], sizes), amount, int(limit[0])
        ),
    )


def write(problem: ChoiceProblem) -> dict[str, Any]:
    """The JSON document of a problem.

    Raises ExtractError for a problem that the format cannot say: choices that need others,
    fractions, nodes of a class at different times.
    """
    _expressible(problem)
    start = problem.node_start.tolist()
    cost = _with_infinity(problem.cost, problem.allowed)
    usage, nothing = problem.usage, np.zeros(len(cost), dtype=np.int64)
    if usage.limit is None:
        usage = Usage(nothing, nothing, nothing, 0)
    lower, upper, amount = usage.lower.tolist(), usage.upper.tolist(), usage.amount.tolist()
    pairs = problem.pairs
    table = _with_infinity(pairs.cost, pairs.legal) if len(pairs) else []
    cell = pairs.start.tolist()
    spans = list(pairwise(start))
    return {
        "problem": {
            "name": problem.name,
            "nodes": {
                "intervals": [[lower[a], upper[a]] for a, _ in spans],
                "costs": [cost[a:b] for a, b in spans],
                "usages": [amount[a:b] for a, b in spans],
            },
            "edges": {
                "nodes": [
                    [a, b] for a, b in zip(pairs.first.tolist(), pairs.second.tolist(), strict=True)
                ],
                "costs": [table[a:b] for a, b in pairwise(cell)][: len(pairs)],
            },
            "usage_limit": usage.limit,
        }
    }


def answer(problem: ChoiceProblem, choice: Choice) -> list[int]:
    """The strategy of every node, counted from 0 within the node, as the contest prints it."""
    return (choice.node - problem.node_start[:-1]).tolist()


def _expressible(problem: ChoiceProblem) -> None:
    first, per_class = problem.node_start[:-1], np.diff(problem.node_start)
    empty, usage = bool((per_class == 0).any()), problem.usage
    reasons = {
        "choices need others": not problem.network,
        "a cost is no integer": not problem.integral,
        "a class has no node": empty,
    }
    if usage.limit is not None and not empty:
        spans = np.stack((usage.lower, usage.upper))
        same = (spans == np.repeat(spans[:, first], per_class, axis=1)).all()
        reasons["nodes of a class are there at different times"] = not same
    for reason, holds in reasons.items():
        if holds:
            raise ExtractError(
                f"an IOPDDL file cannot say this problem: {reason}", where=problem.name
            )


def _with_infinity(costs: Ints, allowed: Flags) -> list[int]:
    return np.where(allowed, costs, INFINITE).tolist()


def _lengths(lists: Sequence[Sequence[Any]]) -> Ints:
    return np.fromiter(map(len, lists), dtype=np.int64, count=len(lists))


def _integers(values: list[Any], where: str) -> Ints:
    try:
        out = np.array(values if values else [], dtype=np.int64 if not values else None)
        if out.dtype.kind not in "iu" or out.ndim != 1:
            raise ValueError("integers expected")
        if out.dtype.kind == "u" and (out >= 2**63).any():
            raise ValueError("an integer of more than 64 bits")
        return out.astype(np.int64)
    except (ValueError, TypeError, OverflowError) as e:
        raise ExtractError(f"not all are 64-bit integers: {e}", where=where) from e
