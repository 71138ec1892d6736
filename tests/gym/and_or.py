"""Small AND-OR choice problems, drawn from a seed, and all their answers by enumeration."""

from __future__ import annotations

import random
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem, column, rows

Value = int | Fraction


def problem_of(
    nodes: list[list[tuple[float | int, list[int]]]],
    roots: list[int],
) -> ChoiceProblem:
    """A problem from (cost, children) of each node of each class."""
    flat = [node for members in nodes for node in members]
    costs, allowed = column([cost for cost, _ in flat])
    child_start, children = rows([c for _, c in flat])
    names = [f"{c}.{i}" for c, members in enumerate(nodes) for i in range(len(members))]
    return ChoiceProblem(
        name="small",
        classes=tuple(str(c) for c in range(len(nodes))),
        nodes=tuple(names),
        node_start=np.cumsum([0, *map(len, nodes)]).astype(np.int64),
        cost=costs,
        allowed=allowed,
        child_start=child_start,
        children=children,
        roots=np.array(roots, dtype=np.int64),
    )


def random_problem(size: int, seed: int, kind: str = "positive") -> ChoiceProblem:
    """A problem of `size` classes: cycles, self-loops, empty classes and forbidden nodes occur.

    `kind` of costs: positive (with zeros and ties), real, signed, or huge (near 10^18).
    """
    draw = random.Random(seed)
    most = draw.choice((1, 2, 3, 3, 4))

    def cost() -> int | float:
        if draw.random() < 0.03:
            return float("inf")
        if kind == "real":
            return draw.choice((0.1, 0.3, 0.7, 1.1, draw.random()))
        if kind == "signed":
            return draw.randint(-4, 4)
        if kind == "huge":
            return 10**18 - draw.randint(0, 3)
        return draw.choice((0, 1, 1, 2, 3, 5, 8))

    def members(c: int) -> list[tuple[int | float, list[int]]]:
        count = draw.randint(1, most) if draw.random() > 0.04 else 0
        return [
            (cost(), [later(c) for _ in range(draw.choice((0, 1, 1, 2, 2, 3)))])
            for _ in range(count)
        ]

    def later(c: int) -> int:
        # Mostly onward, so that answers exist; sometimes back, for cycles.
        if c + 1 < size and draw.random() < 0.75:
            return draw.randrange(c + 1, size)
        return draw.randrange(size)

    nodes = [members(c) for c in range(size)]
    if draw.random() < 0.8:  # a way to end
        nodes[-1] = [(cost(), []), *nodes[-1]]
    roots = sorted(draw.sample(range(size), draw.choice((1, 1, 1, 2)) if size > 1 else 1))
    return problem_of(nodes, [0, *(r for r in roots if r)])


def problems(kind: str = "positive", most: int = 6) -> st.SearchStrategy[ChoiceProblem]:
    """Random problems of up to `most` classes."""
    return st.builds(
        random_problem,
        size=st.integers(1, most),
        seed=st.integers(0, 2**32),
        kind=st.just(kind),
    )


def answers(problem: ChoiceProblem) -> Iterator[tuple[dict[int, int], Value, int]]:
    """Every legal answer: (class -> node, cost, number of distinct nodes), by enumeration."""
    options: list[list[int]] = [[] for _ in problem.classes]
    for c in range(len(problem.classes)):
        options[c].extend(range(problem.node_start[c], problem.node_start[c + 1]))
    allowed = problem.allowed.tolist()
    needs = [set(problem.children_of(n).tolist()) for n in range(len(problem.nodes))]

    def grow(picked: dict[int, int], todo: list[int]) -> Iterator[dict[int, int]]:
        open_classes = [c for c in todo if c not in picked]
        if not open_classes:
            yield picked
            return
        c, *rest = open_classes
        for n in options[c]:
            if allowed[n]:
                yield from grow({**picked, c: n}, [*rest, *sorted(needs[n])])

    def has_cycle(picked: dict[int, int]) -> bool:
        left = dict(picked)
        while True:
            ready = [c for c, n in left.items() if needs[n].isdisjoint(left)]
            if not ready:
                return bool(left)
            for c in ready:
                del left[c]

    for picked in grow({}, problem.roots.tolist()):
        if has_cycle(picked):
            continue
        used = set(picked.values())
        yield picked, sum((exact(problem, n) for n in used), 0), len(used)


def exact(problem: ChoiceProblem, node: int) -> Value:
    """A node's cost without rounding."""
    cost = problem.cost[node].item()
    return cost if isinstance(cost, int) else Fraction(cost)


def best(problem: ChoiceProblem) -> Value | None:
    """The least cost of all answers; None where there is none."""
    return min((cost for _, cost, _ in answers(problem)), default=None)


def choice_of(problem: ChoiceProblem, picked: dict[int, int]) -> Choice:
    """An enumerated answer as a choice."""
    node = np.full(len(problem.classes), -1, dtype=np.int64)
    for c, n in picked.items():
        node[c] = n
    return Choice(node)
