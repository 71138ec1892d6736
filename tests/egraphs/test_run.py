"""Saturation: stages in their order, requests between iterations, and what ends them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.egraphs.run import Facts, Round, Saturation, saturate
from tapestry_egg.rules.language.book import Rule

DECLARED = "(relation r (i64)) (relation p (i64)) (relation q (i64)) (ruleset load)"


def rule(name: str, ruleset: str, egg: str) -> tuple[Rule, list[str]]:
    return Rule(name, "law", "reason", "exact", egg, ruleset, "book", "here:1:1"), [egg]


#: Counts to five, an iteration for each number.
COUNT = rule("count", "algebra", "(rule ((r x) (< x 5)) ((r (+ x 1))))")
COPY = rule("copy", "fold", "(rule ((r x)) ((p x)))")
ASK = rule("ask", "algebra", '(rule ((r x)) ((want "ask" x -1 -1 -1 -1 -1 -1 -1)))')


def run(stages: Sequence[Round], budget: Budget | None = None, **more: Any) -> Saturation:
    return saturate(
        more.pop("rules", [COUNT, COPY]),
        {"r": [(1,)]},
        stages,
        ("r", "p"),
        budget or Budget(),
        declared=DECLARED,
        **more,
    )


def ran(found: Saturation) -> list[str]:
    return [tick.ruleset for tick in found.timeline]


def values(found: Saturation, name: str) -> list[int]:
    return sorted(row[0] for row in found.tables[name])


def test_a_stage_runs_to_its_fixpoint_before_the_next() -> None:
    found = run([Round(("fold",)), Round(("algebra",))])
    assert ran(found) == ["fold"] * 2 + ["algebra"] * 5
    assert values(found, "r") == [1, 2, 3, 4, 5] and values(found, "p") == [1]
    assert found.saturated and not found.by_clock and found.iterations == 1 + 4
    assert found.matches == {"copy": 1, "count": 4}
    assert found.rows == found.timeline[-1].rows == 6


def test_rulesets_of_a_stage_take_turns() -> None:
    found = run([Round(("fold", "algebra"))])
    assert ran(found) == ["fold", "algebra"] * 6
    assert values(found, "p") == values(found, "r") == [1, 2, 3, 4, 5]


def test_a_stage_that_runs_once_makes_one_iteration_and_takes_no_budget() -> None:
    found = run([Round(("algebra",), once=True)], Budget(iterations=0, seconds=0.0))
    assert ran(found) == ["algebra"] and values(found, "r") == [1, 2]
    assert found.saturated and found.iterations == 0


@pytest.mark.slow
def test_budgets_end_a_stage_and_the_next_one_runs() -> None:
    stages = [Round(("algebra",)), Round(("fold",))]
    few = run(stages, Budget(iterations=2))
    assert values(few, "p") == [1, 2, 3] and not few.saturated and not few.by_clock
    rows = run(stages, Budget(rows=2))  # what is above it stays, unless it is far above
    assert values(rows, "r") == values(rows, "p") == [1, 2, 3] and not rows.saturated
    back = run(stages, Budget(rows=1), most_rows=1)
    assert values(back, "r") == [1] and values(back, "p") == [] and not back.saturated
    late = run(stages, Budget(seconds=0.0))
    assert values(late, "r") == [1] and values(late, "p") == [] and late.by_clock


class Doubles:
    """Grants twice of every number that is asked about, up to forty."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []
        self.told = 0

    def news(self) -> Facts:
        self.told += 1
        return {"q": [(self.told,)]}

    def answers(self, wants: Sequence[tuple[Any, ...]]) -> Facts:
        self.asked.append(sorted(row[1] for row in wants))
        found = [(2 * row[1],) for row in wants if row[1] <= 20]
        return {"r": found} if found else {}


def test_requests_are_answered_between_iterations_until_none_is_granted() -> None:
    requests = Doubles()
    found = run([Round(("load",), once=True), Round(("algebra",))], rules=[ASK], requests=requests)
    assert requests.asked == [[1], [2], [4], [8], [16], [32], []]
    assert requests.told == len(requests.asked) == len(found.timeline) - 1
    assert values(found, "r") == [1, 2, 4, 8, 16, 32] and found.saturated


def test_a_goal_ends_the_run_as_soon_as_it_holds() -> None:
    stages = [Round(("algebra",)), Round(("fold",))]
    early = run(stages, goal=lambda: "(r 3)")
    assert values(early, "r") == [1, 2, 3] and early.reached and not early.saturated
    assert values(early, "p") == []  # nor does a later round run
    assert run(stages, goal=lambda: "(r 1)").iterations == 0
    never = run(stages, goal=lambda: "(r 6)")
    assert values(never, "r") == [1, 2, 3, 4, 5] and never.saturated and not never.reached
    assert not run(stages).reached
