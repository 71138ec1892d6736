"""Answers, checked and costed from the arrays of their problem alone.

Shares no code with what finds answers. Integers are added as Python's integers and floats as
fractions, so that a value here is what the input says, to the last digit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isinf

from tapestry_egg.extract.problem.problem import Problem

from .choices import Choice, ChoiceProblem, Column, Number


@dataclass(frozen=True)
class Evaluation:
    """What a choice costs, the most memory that it takes at any time, and what is wrong with it
    (empty: nothing)."""

    cost: Number
    peak: int
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations


def evaluate(problem: ChoiceProblem, choice: Choice, limited: bool = True) -> Evaluation:
    """Recompute the cost of a choice, and check activation, cycles, pairs and, if `limited`, the
    limit.

    Costs given in integers add up to an integer, others to a fraction. The cost of a choice with
    violations is that of what it chose for active classes.
    """
    wrong: list[str] = []
    picked: list[int] = choice.node.tolist()
    if len(picked) != len(problem.classes):
        what = f"{len(picked)} entries for {len(problem.classes)} classes"
        return Evaluation(inf, 0, (what,))
    active = _active(problem, picked, wrong)
    chosen = [picked[c] for c in sorted(active) if picked[c] >= 0]
    for n in chosen:
        if not problem.allowed[n]:
            wrong.append(f"node {problem.nodes[n]} is forbidden")
    _cycles(problem, picked, active, wrong)
    total = _total(problem.cost, chosen)
    entries = _pairs(problem, picked, active, wrong)
    if entries:
        total += _total(problem.pairs.cost, entries)
    peak, moment = _peak(problem, chosen)
    limit = problem.usage.limit
    if limited and limit is not None and peak > limit:
        wrong.append(f"{peak} is used at time {moment}, the limit is {limit}")
    return Evaluation(total, peak, tuple(wrong))


def _total(costs: Column, at: list[int]) -> int | Fraction:
    if costs.dtype.kind == "i":
        return sum(costs[at].tolist())  # Python's integers: of any size
    return sum(map(Fraction, costs[at].tolist()), Fraction(0))


def _active(problem: ChoiceProblem, picked: list[int], wrong: list[str]) -> set[int]:
    """The classes that need a node, each with a node of its own, or a violation."""
    todo = [int(r) for r in problem.roots]
    active = set(todo)
    while todo:
        c = todo.pop()
        n = picked[c]
        if not 0 <= n < len(problem.nodes):
            wrong.append(f"class {problem.classes[c]} is needed and has no node")
            picked[c] = -1
            continue
        if not problem.node_start[c] <= n < problem.node_start[c + 1]:
            wrong.append(f"node {problem.nodes[n]} is not of class {problem.classes[c]}")
        for d in problem.needs[n]:
            if d not in active:
                active.add(d)
                todo.append(d)
    for c, n in enumerate(picked):
        if n >= 0 and c not in active:
            wrong.append(f"class {problem.classes[c]} has a node and is not needed")
    return active


def _cycles(problem: ChoiceProblem, picked: list[int], active: set[int], wrong: list[str]) -> None:
    """Peel off what needs nothing that is left; a remainder holds a cycle."""
    waits: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    for c in active:
        if picked[c] < 0:
            continue
        needs = {d for d in problem.needs[picked[c]] if picked[d] >= 0}
        waits[c] = len(needs)
        for d in needs:
            readers.setdefault(d, []).append(c)
    ready = [c for c, n in waits.items() if n == 0]
    while ready:
        c = ready.pop()
        del waits[c]
        for reader in readers.get(c, ()):
            waits[reader] -= 1
            if waits[reader] == 0:
                ready.append(reader)
    if waits:
        first = problem.classes[min(waits)]
        wrong.append(f"{len(waits)} classes are on or above a cycle, among them {first}")


def _pairs(
    problem: ChoiceProblem, picked: list[int], active: set[int], wrong: list[str]
) -> list[int]:
    """Places of the table entries that are paid."""
    at = []
    pairs = problem.pairs
    starts, first = pairs.start.tolist(), problem.node_start.tolist()
    ends = zip(pairs.first.tolist(), pairs.second.tolist(), starts, strict=False)
    for a, b, start in ends:
        if a not in active or b not in active or picked[a] < 0 or picked[b] < 0:
            continue
        i, j = picked[a] - first[a], picked[b] - first[b]
        place = start + i * (first[b + 1] - first[b]) + j
        if not pairs.legal[place]:
            names = f"{problem.nodes[picked[a]]} and {problem.nodes[picked[b]]}"
            wrong.append(f"nodes {names} are forbidden together")
        at.append(place)
    return at


def _peak(problem: ChoiceProblem, chosen: list[int]) -> tuple[int, int]:
    """The most memory that nodes take at any time, and the first time when they do."""
    usage = problem.usage
    if usage.limit is None:
        return 0, 0
    steps: dict[int, int] = {}
    spans = zip(
        *(x[chosen].tolist() for x in (usage.lower, usage.upper, usage.amount)), strict=True
    )
    for begin, end, amount in spans:
        steps[begin] = steps.get(begin, 0) + amount
        steps[end] = steps.get(end, 0) - amount
    used, most, moment = 0, 0, 0
    for t in sorted(steps):
        used += steps[t]
        if used > most:
            most, moment = used, t
    return most, moment


@dataclass(frozen=True)
class RowCosts:
    """What one row per variable costs, and what is wrong with it (empty: nothing)."""

    seconds: float
    peak_bytes: float
    joules: float
    violations: tuple[str, ...]


def row_costs(problem: Problem, rows: Sequence[int]) -> RowCosts:
    """Recompute seconds, peak bytes and joules of one row per variable of a saved problem."""
    if len(rows) != len(problem.variables):
        what = f"{len(rows)} rows for {len(problem.variables)} variables"
        return RowCosts(inf, inf, inf, (what,))
    seconds, joules = Fraction(0), Fraction(0)
    steps = [Fraction(0)] * (problem.times + 1)
    wrong: list[str] = []

    def occupy(start: int, end: int, amount: float) -> None:
        steps[start] += Fraction(amount)
        steps[end] -= Fraction(amount)

    for variable, r in zip(problem.variables, rows, strict=True):
        if not 0 <= r < len(variable.seconds):
            return RowCosts(inf, inf, inf, (f"{variable.name} has no row {r}",))
        if isinf(variable.seconds[r]) or isinf(variable.joules[r]):
            wrong.append(f"row {r} of {variable.name} is forbidden")
            continue
        seconds += Fraction(float(variable.seconds[r]))
        joules += Fraction(float(variable.joules[r]))
        for use in variable.uses:
            occupy(use.start, use.end, float(use.amount[r]))
    for pair in problem.pairs:
        a, b = int(pair.label_a[rows[pair.a]]), int(pair.label_b[rows[pair.b]])
        if isinf(pair.seconds[a, b]) or isinf(pair.joules[a, b]):
            names = (problem.variables[pair.a].name, problem.variables[pair.b].name)
            wrong.append(f"rows {rows[pair.a]} of {names[0]} and {rows[pair.b]} of {names[1]}")
            continue
        seconds += Fraction(float(pair.seconds[a, b]))
        joules += Fraction(float(pair.joules[a, b]))
        for use in pair.uses:
            occupy(use.start, use.end, float(use.amount[a, b]))
    held, peak = Fraction(0), Fraction(0)
    for t in range(problem.times):
        held += steps[t]
        peak = max(peak, held)
    return RowCosts(float(seconds), float(peak), float(joules), tuple(wrong))
