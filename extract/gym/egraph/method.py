"""The method for e-graphs: a first answer where the form is large, then the search."""

from __future__ import annotations

import math
import time
from fractions import Fraction

from tapestry_egg.extract.gym.choices import ChoiceProblem, Number
from tapestry_egg.extract.gym.extraction import Extraction

from .form import AndOr, Scaled, choice_of, working_form
from .greedy import Chosen, bottom_up, greedy_dag
from .reductions import keep_derivable
from .search import Picks, Record, Search

# Forms of more nodes get answers before they are reduced.
_LARGE = 1000


def run(extraction: Extraction, deadline: float, seed: int) -> None:
    """Answer a problem of sums by the deadline (`time.perf_counter`), its programs in a process of
    their own."""
    problem = extraction.problem
    form = working_form(problem)
    reason = impossible(problem, form)
    if reason:
        extraction.fail(reason)
        return
    scale = form.scale

    def offer(picks: Picks) -> None:
        extraction.offer(choice_of(problem, picks))

    def first(chosen: Chosen | None) -> None:
        if chosen is not None:
            offer(form.picks(chosen.values()))

    def bounded(bound: Scaled) -> None:
        if bound == math.inf:  # nothing is better than what is known
            extraction.close()
        elif bound > -math.inf:
            exact = Fraction(bound) / scale
            whole = scale == 1 and exact.denominator == 1
            value: Number = int(exact) if whole else exact
            extraction.raise_bound(value)

    if len(form.home) > _LARGE:  # whose reductions take a while
        if not form.negative():
            price = {n: float(v) for n, v in form.cost.items()}
            first(bottom_up(form, price, form.parents()))
        now = time.perf_counter()
        first(greedy_dag(form, now + 0.4 * max(0.0, deadline - now)))
    record = Record(lambda value, picks: offer(picks))
    bounded(Search(deadline, seed, apart=True).solve(form, record, bounded))


def impossible(problem: ChoiceProblem, form: AndOr) -> str:
    """Which root cannot be had, and why; empty if all can. What cannot be derived goes."""
    empty = {c for c, m in form.members.items() if not m}
    keep_derivable(form)
    for r in sorted(form.roots):
        if form.members.get(r):
            continue
        name = problem.classes[r]
        if problem.node_start[r] == problem.node_start[r + 1]:
            return f"root {name} has no nodes"
        if r in empty:
            return f"every node of root {name} is forbidden"
        return (
            f"root {name} cannot be had: each of its nodes needs, in the end, itself, a forbidden "
            "node or a class without nodes"
        )
    return ""
