"""Saturation: rules and facts in, rulesets run to their fixpoint or a budget, tables out.

One driver for all that is saturated: the program (`rewrite/forms.py`), and each of its forms on a
mesh (`shard/strategies.py`). Rules cannot compute shapes; they may ask Python, which answers
between iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tapestry_egg.rules.language.book import Rule, schema
from tapestry_egg.scratch import scratch

from .process import Budget, EGraph, Exhausted
from .timeline import Tick

#: One row of a relation.
Row = tuple[int | str, ...]
#: Rows by relation.
Facts = Mapping[str, Sequence[Row]]


class Requests(Protocol):
    """Answers what rules ask by rows of `want`."""

    def news(self) -> Facts:
        """What the rules have to know before their next iteration."""

    def answers(self, wants: Sequence[tuple[Any, ...]]) -> Facts:
        """The answers to rows of `want` that have come; none where nothing is granted."""


@dataclass(frozen=True)
class Round:
    """Rulesets that run in turn, one iteration of each, until none of them changes anything; or one
    iteration only, whatever it takes."""

    rulesets: tuple[str, ...]
    once: bool = False


@dataclass(frozen=True)
class Saturation:
    """What rules derived from facts: the tables that were asked for, and how it went."""

    tables: dict[str, list[tuple[Any, ...]]]
    saturated: bool  # whether every round came to its fixpoint
    iterations: int
    rows: int
    matches: dict[str, int]
    timeline: tuple[Tick, ...]
    by_clock: bool  # whether time ended it before another budget did
    reached: bool = False  # whether the goal was reached


def saturate(
    rules: Sequence[tuple[Rule, Sequence[str]]],
    facts: Facts,
    rounds: Sequence[Round],
    tables: Sequence[str],
    budget: Budget,
    *,
    declared: str = "",
    requests: Requests | None = None,
    most_rows: float = float("inf"),
    goal: Callable[[], str] | None = None,
) -> Saturation:
    """Run rules, each with the egglog forms that stand for it, on facts, a round after the other.

    `declared` is egglog text that stands before the rules. An iteration that leaves more than
    `most_rows` is taken back, and its round is over. After every iteration `goal` gives facts as
    egglog's `check` reads them ("": none yet); nothing more runs once they hold. Raises RuleError,
    with the rule's place in its file, when egglog refuses a rule.
    """
    with (
        scratch() as folder,
        EGraph(folder) as egraph,
    ):
        egraph.declare(schema())
        egraph.declare(declared)
        for rule, forms in rules:
            egraph.add_rule(rule, forms)
        _load(egraph, facts)
        saturated, iterations, reached = True, 0, False
        for each in rounds:
            if each.once:
                for ruleset in each.rulesets:
                    egraph.step(ruleset)
                continue
            if reached := reached or _holds(egraph, goal):
                break
            finished, ran = _fixpoint(egraph, each.rulesets, budget, requests, most_rows, goal)
            saturated = saturated and finished
            iterations += ran
        return Saturation(
            egraph.tables(tables),
            saturated,
            iterations,
            egraph.rows(),
            egraph.matches,
            tuple(egraph.timeline),
            egraph.by_clock,
            reached or _holds(egraph, goal),
        )


def _fixpoint(
    egraph: EGraph,
    rulesets: Sequence[str],
    budget: Budget,
    requests: Requests | None,
    most_rows: float,
    goal: Callable[[], str] | None,
) -> tuple[bool, int]:
    """Run rulesets in turn until nothing changes and nothing is granted, or a budget is spent or
    the goal reached; whether it was the former, and the iterations that changed something."""
    for i in range(budget.iterations):
        if requests is not None:
            _load(egraph, requests.news())
        try:
            changed = [
                egraph.step(ruleset, budget.seconds - egraph.seconds, most_rows)
                for ruleset in rulesets
            ]
        except Exhausted:
            return False, i
        if _holds(egraph, goal):
            return False, i + 1
        granted: Facts = {}
        if requests is not None:
            granted = requests.answers(egraph.unseen("want"))
            _load(egraph, granted)
        if not any(changed) and not granted:
            return True, i
        if egraph.rows() > budget.rows:
            return False, i + 1
    return False, budget.iterations


def _holds(egraph: EGraph, goal: Callable[[], str] | None) -> bool:
    facts = goal() if goal else ""
    return bool(facts) and egraph.holds(facts)


def _load(egraph: EGraph, facts: Facts) -> None:
    for name, rows in facts.items():
        egraph.load(name, rows)
