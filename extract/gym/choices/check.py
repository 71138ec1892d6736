"""An answer to a choice problem, checked and costed from the problem's arrays alone.

Shares no code with the methods that find answers. Integers are added as Python's integers and
floats as fractions, so that a value here is what the input says, to the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from .choices import Choice, ChoiceProblem, Column, Number


@dataclass(frozen=True)
class Evaluation:
    """The exact value of every objective, and what is wrong with the choice (empty: nothing)."""

    values: tuple[Number, ...]
    violations: tuple[str, ...]

    @property
    def feasible(self) -> bool:
        """Whether nothing is wrong."""
        return not self.violations


def evaluate(problem: ChoiceProblem, choice: Choice) -> Evaluation:
    """Recompute every objective of a choice, and check activation, cycles, pairs and limits.

    Values of objectives given in integers are integers, others are fractions. The values of a
    choice with violations are those of what it chose for active classes.
    """
    wrong: list[str] = []
    picked: list[int] = choice.node.tolist()
    if len(picked) != len(problem.classes):
        return Evaluation((), (f"{len(picked)} entries for {len(problem.classes)} classes",))
    active = _active(problem, picked, wrong)
    chosen = sorted({picked[c] for c in active if picked[c] >= 0})
    for n in chosen:
        if not problem.allowed[n]:
            wrong.append(f"node {problem.nodes[n]} is forbidden")
    if problem.acyclic:
        _cycles(problem, picked, active, wrong)
    entries = _pairs(problem, picked, active, wrong)
    _limits(problem, chosen, wrong)
    values: list[Number] = []
    for k, costs in enumerate(problem.costs):
        total = _total(costs, chosen)
        if entries:
            total += _total(problem.pairs.costs[k], entries)
        values.append(total)
    return Evaluation(tuple(values), tuple(wrong))


def _total(costs: Column, at: list[int]) -> int | Fraction:
    if costs.dtype.kind == "i":
        return sum(costs[at].tolist())  # Python's integers: of any size
    return sum(map(Fraction, costs[at].tolist()), Fraction(0))


def _active(problem: ChoiceProblem, picked: list[int], wrong: list[str]) -> set[int]:
    """The classes that need a node, each with a node that yields it, or a violation."""
    todo = [int(r) for r in problem.roots]
    if problem.all_active:
        todo = list(range(len(picked)))
    active = set(todo)
    while todo:
        c = todo.pop()
        n = picked[c]
        if not 0 <= n < len(problem.nodes):
            wrong.append(f"class {problem.classes[c]} is needed and has no node")
            picked[c] = -1
            continue
        inside = problem.node_start[c] <= n < problem.node_start[c + 1]
        if not inside and c not in problem.provided_by(n).tolist():
            wrong.append(f"node {problem.nodes[n]} does not yield class {problem.classes[c]}")
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


def _limits(problem: ChoiceProblem, chosen: list[int], wrong: list[str]) -> None:
    usage = problem.usage
    if not usage:
        return
    steps: dict[int, int] = {}
    for n in chosen:
        amount = int(usage.amount[n])
        begin, end = int(usage.lower[n]), int(usage.upper[n])
        if amount and begin < end:
            steps[begin] = steps.get(begin, 0) + amount
            steps[end] = steps.get(end, 0) - amount
    if not steps:
        return
    used = 0
    moments = sorted(steps)
    for t, until in zip(moments, [*moments[1:], problem.times()], strict=True):
        used += steps[t]
        for moment in range(t, until if len(usage.limits) > 1 else min(t + 1, until)):
            limit = int(usage.limits[moment if len(usage.limits) > 1 else 0])
            if used > limit:
                wrong.append(f"{used} is used at time {moment}, the limit is {limit}")
                return
