"""Fronts of cost against the number of selected nodes.

Narrow forms are eliminated, which gives the whole front. Elsewhere the widest gap is searched by
the program of the weighted sum for which both ends are the same, whose bound is a line below the
whole front (Aneja and Nair, "Bicriteria transportation problem", 1979), then by programs that limit
the number of nodes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from fractions import Fraction

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices import ChoiceProblem, Number
from tapestry_egg.extract.gym.extraction import Extraction
from tapestry_egg.extract.gym.fronts import Front, Gap, Sweep

from .elimination import WIDEST, Entry, chosen_nodes, eliminate, non_dominated
from .form import AndOr, Scaled, choice_of, working_form
from .greedy import Chosen, bottom_up, greedy_dag
from .reductions import keep_derivable, reduce
from .search import Picks, Record, Search, split

# Entries of tables in the elimination of a part.
_ENTRIES = 300_000

# The share of the time for the first program of a gap, and for the ends of the front.
_SHARE, _ENDS = 0.03, 0.2

# Costs and weights of nodes under which the first choices are built.
_BUILT = ((1.0, 1e-6), (1e-6, 1.0), (1.0, 1.0), (1.0, 0.1), (0.1, 1.0))


def node_front(
    problem: ChoiceProblem,
    seconds: float = 60.0,
    seed: int = 0,
    widest: int = WIDEST,
    told: Callable[[str], None] | None = None,
) -> Front:
    """The front of cost and number of selected nodes.

    Forms of more than `widest` treewidth are not eliminated. `told` hears how it stands, in words,
    after every program. An interruption (Ctrl-C) keeps what was found. Raises ExtractError for a
    problem with pairs or limits.
    """
    if not problem.verify().sums:
        raise ExtractError(
            "fronts of cost and number of nodes are for problems without pairs and limits",
            where=f"choice problem {problem.name}",
        )
    deadline = time.perf_counter() + seconds
    same = 0.0 if problem.integral else 1e-7
    sweep = Sweep(problem, lambda e: e.nodes, len(problem.classes), deadline, same, told)
    return sweep.front(_Work(sweep, seed, widest).run, "nodes", "milp")


def weighted(form: AndOr, a: int, b: int) -> AndOr:
    """A form of one objective, a of the first of a form and b of the second."""
    other = form.copy()
    first, second = form.costs
    other.costs = ({n: a * v + b * second[n] for n, v in first.items()},)
    other.constant = [a * form.constant[0] + b * form.constant[1]]
    other.scale = form.scale if a else 1
    return other


class _Work:
    """Programs and eliminations of one form, for one sweep."""

    def __init__(self, sweep: Sweep, seed: int, widest: int) -> None:
        self.sweep, self.seed, self.widest = sweep, seed, widest
        self.form = working_form(sweep.problem, counted=True)
        self.solved: set[tuple[int, int]] = set()

    def run(self) -> None:
        """Eliminate the form, or close the widest gap again and again."""
        sweep = self.sweep
        sweep.reason = impossible(sweep.problem, self.form) or sweep.reason
        if not all(self.form.members.get(r) for r in self.form.roots):
            sweep.whole = True
            return
        parents = self.form.parents()
        largest = [max((abs(v) for v in k.values()), default=1) or 1 for k in self.form.costs]
        for weights in _BUILT:
            price = dict.fromkeys(self.form.home, 0.0)
            for weight, most, column in zip(weights, largest, self.form.costs, strict=True):
                for n, v in column.items():
                    price[n] += weight * max(v, 0) / most
            chosen = bottom_up(self.form, price, parents)
            if chosen is not None:
                self._keep(self.form.picks(chosen.values()))
        reduce(self.form, sweep.until(0.3))
        if self._eliminated():
            return
        for a, b in ((1, 0), (0, 1)):  # without both ends nothing bounds what lies beyond
            self._sum(a, b, _ENDS)
        sweep.close(self._visit, _SHARE)

    def _keep(self, picks: Picks) -> None:
        self.sweep.keep(choice_of(self.sweep.problem, picks))

    def _eliminated(self) -> bool:
        """The front by elimination; False if the form is too wide or takes too long."""
        form, parts = self.form, split(self.form)
        begin = (0, 0) if parts == [form] else (form.constant[0], form.constant[1])
        total: list[Entry] = [(begin, None)]
        end = max(self.sweep.until(0.3), time.perf_counter() + 1.0)
        for part in parts:
            found = eliminate(part, end, None, _ENTRIES, self.widest)
            if found is None:
                return False
            total = non_dominated(
                (tuple(x + y for x, y in zip(a, b, strict=True)), (way, nodes))
                for a, way in total
                for b, nodes in found.points
            )
        # Both ends, then one in so many, ever more: those had when time is up are spread.
        for i in sorted(range(len(total)), key=lambda i: -(i & -i) or -math.inf):
            self._keep(form.picks(chosen_nodes(total[i - 1][1])))
        self.sweep.whole = True
        return True

    def _visit(self, gap: Gap, share: float) -> None:
        (low, value), (high, cost) = gap.low, gap.high
        if math.inf not in (value, cost):
            a, b = high - low, int((value - cost) * self.form.scale)
            common = math.gcd(a, b)
            a, b = a // common, b // common
            if high - low > 2 and (a, b) not in self.solved:
                self._sum(a, b, share)
                return
        self._limited(gap.limit, share)

    def _sum(self, a: int, b: int, share: float) -> None:
        """The program of a weighted sum: all answers are above a line."""
        sweep, scale = self.sweep, self.form.scale
        self.solved.add((a, b))
        points = [(int(v * scale), k) for k, v in sweep.points()]
        least: Scaled = min((a * v + b * k for v, k in points), default=math.inf)
        search = Search(sweep.until(share), self.seed, min(8, self.widest))
        record = Record(lambda value, picks: self._keep(picks), least)
        bound = search.solve(weighted(self.form, a, b), record, lambda bound: None)
        if a and math.isfinite(bound):
            sweep.prove(bound / (a * scale), b / (a * scale))
        elif not a and bound > 0:
            sweep.prove(math.inf, most=math.ceil(bound) - 1)
        sweep.tell()

    def _limited(self, limit: int, share: float) -> None:
        """The program that limits the number of nodes."""
        sweep, scale = self.sweep, self.form.scale
        sweep.tries[limit] = sweep.tries.get(limit, 0) + 1
        known = [int(v * scale) for k, v in sweep.points() if k <= limit]
        search = Search(sweep.until(share), self.seed, min(8, self.widest), limit)
        record = Record(lambda value, picks: self._keep(picks), min(known, default=math.inf))
        bound = search.solve(self.form.copy(), record, lambda bound: None)
        if bound > -math.inf:
            sweep.prove(bound / scale, most=limit)
        sweep.tell(f", up to {limit} nodes")


# Methods for e-graphs, as the table in `extract/gym/extraction.py` lists them.


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
