"""Methods for e-graphs, as the table in `extract/gym/extraction.py` lists them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from fractions import Fraction

from tapestry_egg.extract.gym.choices import ChoiceProblem, Number
from tapestry_egg.extract.gym.extraction import Extraction

from .elimination import eliminate
from .form import AndOr, Scaled, choice_of, working_form
from .greedy import Chosen, bottom_up, greedy_dag
from .reductions import keep_derivable, reduce
from .search import Picks, Record, Search

# Forms of more nodes get answers before they are reduced.
_LARGE = 1000


class _Run:
    """A problem on its way to an answer: its form, and the extraction that answers go to.

    The form is None if some root cannot be had; the failure is then noted. All that reductions take
    away after this leaves an answer, unless they know one and look for a better.
    """

    def __init__(self, extraction: Extraction) -> None:
        self.extraction = extraction
        form = working_form(extraction.problem)
        reason = impossible(extraction.problem, form)
        if reason:
            extraction.fail(reason)
        self.form = None if reason else form
        self.scale = form.scale

    def offer(self, picks: Iterable[tuple[int, int]]) -> None:
        """Offer the choice of (class, node) pairs, of which some may not be needed."""
        self.extraction.offer(choice_of(self.extraction.problem, picks))

    def chosen(self, form: AndOr, chosen: Chosen | None) -> None:
        """Offer a choice of a form."""
        if chosen is not None:
            self.offer(form.picks(chosen.values()))

    def bounded(self, bound: Scaled) -> None:
        """Take a scaled lower bound; inf says that nothing is better than what is known."""
        if bound == math.inf:
            self.extraction.close()
        elif bound > -math.inf:
            exact = Fraction(bound) / self.scale
            whole = self.scale == 1 and exact.denominator == 1
            value: Number = int(exact) if whole else exact
            self.extraction.raise_bound(value)

    def search(self, form: AndOr, search: Search) -> None:
        """Search a form, and take all that comes of it."""

        def better(value: int, picks: Picks) -> None:
            self.offer(picks)

        self.bounded(search.solve(form, Record(better), self.bounded))


def automatic(extraction: Extraction, deadline: float, seed: int) -> None:
    """Everything in turn, programs in a process of their own, until the answer is proven."""
    run = _Run(extraction)
    if run.form is None:
        return
    if len(run.form.home) > _LARGE:  # whose reductions take a while: a first answer before
        if not run.form.negative():
            _tree(run, run.form)
        now = time.perf_counter()
        run.chosen(run.form, greedy_dag(run.form, now + 0.4 * max(0.0, deadline - now)))
    run.search(run.form, Search(deadline, seed, apart=True))


def milp(extraction: Extraction, deadline: float, seed: int) -> None:
    """The same, programs in this process."""
    run = _Run(extraction)
    if run.form is not None:
        run.search(run.form, Search(deadline, seed))


def elimination(extraction: Extraction, deadline: float, seed: int) -> None:
    """Reductions, then elimination of the whole form."""
    run = _Run(extraction)
    if run.form is None:
        return
    reduce(run.form, deadline)
    found = eliminate(run.form, deadline)
    if found is None:
        extraction.reason = "the treewidth is too large, or time was up"
        return
    run.offer(run.form.picks(found.points[0][1]))
    extraction.close()


def greedy(extraction: Extraction, deadline: float, seed: int) -> None:
    """Greedy DAG extraction on the problem as it is."""
    run = _Run(extraction)
    if run.form is not None:
        run.chosen(run.form, greedy_dag(run.form, deadline))


def tree(extraction: Extraction, deadline: float, seed: int) -> None:
    """The choice of least tree cost."""
    run = _Run(extraction)
    if run.form is not None:
        _tree(run, run.form)


def _tree(run: _Run, form: AndOr) -> None:
    """Offer the choice of least tree cost; costs below zero count as none."""
    price = {n: float(max(v, 0)) for n, v in form.cost.items()}
    run.chosen(form, bottom_up(form, price, form.parents()))


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
