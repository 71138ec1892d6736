"""Random small cost function networks, and every answer to them by enumeration.

Shares no code with the solver: documents are plain dictionaries in the contest's format, and costs
and memory are summed in Python's integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
from hypothesis import strategies as st

INFINITE = 10**18


def document(
    intervals: list[list[int]],
    costs: list[list[int]],
    usages: list[list[int]],
    edges: list[tuple[int, int, list[int]]],
    limit: int,
) -> dict[str, Any]:
    """A problem in the contest's JSON."""
    return {
        "problem": {
            "name": "small",
            "nodes": {"intervals": intervals, "costs": costs, "usages": usages},
            "edges": {"nodes": [[a, b] for a, b, _ in edges], "costs": [c for *_, c in edges]},
            "usage_limit": limit,
        }
    }


def cost(problem: dict[str, Any], x: tuple[int, ...]) -> int:
    """What the contest counts; infinite entries are 10^18 each."""
    p = problem["problem"]
    total = sum(c[r] for c, r in zip(p["nodes"]["costs"], x, strict=True))
    for (a, b), table in zip(p["edges"]["nodes"], p["edges"]["costs"], strict=True):
        total += table[x[a] * len(p["nodes"]["costs"][b]) + x[b]]
    return total


def forbidden(problem: dict[str, Any], x: tuple[int, ...]) -> bool:
    """Whether an infinite entry is chosen."""
    p = problem["problem"]
    chosen = [c[r] for c, r in zip(p["nodes"]["costs"], x, strict=True)]
    for (a, b), table in zip(p["edges"]["nodes"], p["edges"]["costs"], strict=True):
        chosen.append(table[x[a] * len(p["nodes"]["costs"][b]) + x[b]])
    return any(c >= INFINITE for c in chosen)


def peak(problem: dict[str, Any], x: tuple[int, ...]) -> int:
    """The most memory in use at any time."""
    p = problem["problem"]["nodes"]
    used: dict[int, int] = {}
    for (a, b), usage, r in zip(p["intervals"], p["usages"], x, strict=True):
        for t in range(a, b):
            used[t] = used.get(t, 0) + usage[r]
    return max(used.values(), default=0)


def answers(problem: dict[str, Any], limit: int | None = None) -> Iterator[tuple[int, ...]]:
    """Every answer within the limit that takes nothing infinite."""
    p = problem["problem"]
    most = p["usage_limit"] if limit is None else limit
    for x in product(*(range(len(c)) for c in p["nodes"]["costs"])):
        if peak(problem, x) <= most and not forbidden(problem, x):
            yield x


def least(problem: dict[str, Any], limit: int | None = None) -> int | None:
    """The least cost within the limit; None where nothing is."""
    return min((cost(problem, x) for x in answers(problem, limit)), default=None)


def connected(seed: int) -> dict[str, Any]:
    """Three to six nodes in a tree with two more edges, few distinct costs, half without memory.

    Much can be minimised away early, and what is left can then be reduced further.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(3, 7))
    sizes = rng.integers(2, 5 if count < 6 else 4, count).tolist()
    ends = [(int(rng.integers(i)), i) for i in range(1, count)]
    ends += [(int(a), int(b)) for a, b in rng.integers(0, count, (2, 2))]
    share = rng.choice([0.0, 0.2, 0.4])
    edges = []
    for a, b in ends:
        cells = sizes[a] * sizes[b]
        table = np.where(rng.random(cells) < share, INFINITE, rng.integers(0, 5, cells))
        edges.append((a, b, table.tolist()))
    costs = [rng.integers(0, 5, k).tolist() for k in sizes]
    usages = [(rng.integers(0, 5, k) * (rng.random() < 0.5)).tolist() for k in sizes]
    intervals = [[a, a + 2] for a in rng.integers(0, 3, count).tolist()]
    some = tuple(int(rng.integers(k)) for k in sizes)
    limit = peak(document(intervals, costs, usages, edges, 0), some)
    return document(intervals, costs, usages, edges, limit)


#: Rows of a neighbour go after a node was minimised away by them: a leaf with amounts near the
#: largest integers, and a node of two parallel edges beside one that has edges to itself.
LATER = (
    document(
        [[0, 0], [0, 0], [2, 4], [2, 5]],
        [[0, 0], [0], [0, 0, 0], [0, 0, 1]],
        [[0, 0], [0], [6 * 10**17, 0, 0], [0, 0, 3 * 10**17]],
        [(1, 1, [0]), (2, 0, [0, 0, 4, 0, 5, 9])],
        6 * 10**17,
    ),
    document(
        [[0, 1], [0, 0], [0, 1]],
        [[0, 0, 0], [0, 0], [0, 0, 0]],
        [[0, 1, 0], [0, 0], [1, 0, 0]],
        [
            (0, 0, [0, INFINITE, INFINITE, 0, 0, INFINITE, 0, INFINITE, INFINITE]),
            (0, 1, [INFINITE, 0, 0, 0, 0, 0]),
            (0, 0, [0] * 9),
            (0, 1, [0, 0, 0, 1, 0, 0]),
        ],
        1,
    ),
)


@st.composite
def problems(draw: st.DrawFn, largest: int = 9, unit: int = 1) -> dict[str, Any]:
    """Up to six nodes of up to four strategies; parallel edges, loops and infinities included."""
    count = draw(st.integers(0, 6))
    sizes = [draw(st.integers(1, 4 if count < 5 else 3)) for _ in range(count)]
    intervals = []
    for _ in range(count):
        a = draw(st.integers(0, 5))
        intervals.append([a, a + draw(st.integers(0, 4))])
    entry = st.one_of(st.integers(0, 9), st.just(INFINITE))
    finite = st.integers(0, 9)
    rows = st.lists
    either = st.sampled_from([finite, entry])
    costs = [draw(rows(draw(either), min_size=k, max_size=k)) for k in sizes]
    amount = st.integers(0, largest).map(lambda n: n * unit + (n % 3 if unit > 1 else 0))
    usages = [draw(rows(amount, min_size=k, max_size=k)) for k in sizes]
    edges = []
    for _ in range(draw(st.integers(0, 8)) if count else 0):
        a, b = draw(st.integers(0, count - 1)), draw(st.integers(0, count - 1))
        n, m = sizes[a], sizes[b]
        kind = draw(st.sampled_from(["any", "finite", "sum", "follow", "follow"]))
        if kind == "sum":
            u = draw(rows(finite, min_size=n, max_size=n))
            v = draw(rows(finite, min_size=m, max_size=m))
            table = [x + y for x in u for y in v]
        elif kind == "follow":  # one row of b for each of a, but perhaps for one more combination
            f = draw(rows(st.integers(0, m - 1), min_size=n, max_size=n))
            more = draw(st.integers(0, 2 * n * m))
            table = [
                draw(finite) if j == f[i] or i * m + j == more else INFINITE
                for i in range(n)
                for j in range(m)
            ]
        else:
            one = entry if kind == "any" else finite
            table = draw(rows(one, min_size=n * m, max_size=n * m))
        edges.append((a, b, table))
    # About what some answer needs, so that limits bind.
    some = tuple(draw(st.integers(0, k - 1)) for k in sizes)
    found = document(intervals, costs, usages, edges, 0)
    limit = max(0, peak(found, some) + draw(st.integers(-2, 1)))
    return document(intervals, costs, usages, edges, limit)
