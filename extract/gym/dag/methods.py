"""Methods for AND-OR choice problems: e-graphs, with acyclic answers.

`automatic` reduces, builds choices, and eliminates where the form is narrow. What is left goes to
processes of their own, side by side: the mixed-integer program (`lazy_milp.py`) and, where ortools
is installed, CP-SAT (`cp_sat.py`); the first to prove its answer ends the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from tapestry_egg.extract.gym.choices.choices import ChoiceProblem, Number
from tapestry_egg.extract.gym.choices.standing import Standing
from tapestry_egg.extract.gym.dag.egraph.annealing import Annealing, anneals
from tapestry_egg.extract.gym.dag.egraph.cost_unit import Scaled
from tapestry_egg.extract.gym.dag.egraph.form import AndOr, problem_choice, trim, working_form
from tapestry_egg.extract.gym.dag.egraph.greedy import Chosen, Improvement, bottom_up, greedy_dag
from tapestry_egg.extract.gym.dag.egraph.reductions import keep_derivable, reduce
from tapestry_egg.extract.gym.dag.egraph.tree_elimination import eliminate
from tapestry_egg.parallel.deadline import TimeUp

from .lazy_milp import Record, Search, split, trivial_bound
from .solver_process import available, side_by_side

# Forms of more nodes get answers before they are reduced, and before programs are solved.
_LARGE = 1000

# Seconds that a solver may take beyond what it was given before it is ended.
_GRACE = 0.15


@dataclass
class _Run:
    """A problem on its way to an answer: its form, and the standing that answers go to."""

    problem: ChoiceProblem
    standing: Standing
    deadline: float
    seed: int
    form: AndOr

    def left(self, share: float, longest: float = math.inf) -> float:
        """When a share of the time that is left will be over, or so many seconds."""
        now = time.perf_counter()
        return now + min(longest, share * max(0.0, self.deadline - now))

    def offer(self, picks: Iterable[tuple[int, int]], method: str) -> None:
        """Offer the choice of (class, node) pairs, of which some may not be needed."""
        node = [-1] * len(self.problem.classes)
        for c, n in picks:
            node[c] = n
        self.standing.offer(trim(self.problem, node), method)

    def record(self, method: str) -> Record:
        """A record of the form; what it takes is offered as a method's."""
        return Record(lambda value, picks: self.offer(picks, method))

    def chosen(self, chosen: Chosen | None, method: str) -> None:
        """Offer a choice of the form."""
        if chosen is not None:
            choice = problem_choice(self.problem, self.form, chosen.values())
            self.standing.offer(choice, method)

    def tree(self) -> None:
        """Offer the choice of least tree cost; costs below zero count as none."""
        price = {n: float(max(v, 0)) for n, v in self.form.cost.items()}
        self.chosen(bottom_up(self.form, price, self.form.parents()), "bottom-up")

    def reduce(self, most: int | None = None) -> bool:
        """Reduce the form; False when nothing is better than `most`."""
        form = self.form
        before = len(form.home), len(form.members)
        found = reduce(form, self.deadline, most)
        after = len(form.home), len(form.members)
        self.standing.notes.append(
            f"reduced from {before[0]} nodes in {before[1]} classes to {after[0]} in {after[1]}"
        )
        return found

    def bounded(self, bound: Scaled) -> None:
        """Take a lower bound; inf says that nothing is better than what is known."""
        if bound == math.inf:
            self.standing.close()
        else:
            self.standing.raise_bound(_value(self.form, bound))

    def solve(self, form: AndOr, record: Record, solvers: Sequence[str]) -> None:
        """Run solvers side by side on a form, until one has proven its answer.

        Raises TimeUp where none has in time.
        """
        for event in side_by_side(form, record, solvers, self.deadline - _GRACE, self.seed):
            if event.picks is not None:
                self.offer(form.picks(event.picks), event.solver)
            if event.bound is not None:
                self.bounded(event.bound)
            if self.standing.proven:
                return
        if time.perf_counter() >= self.deadline - _GRACE:
            raise TimeUp


def _opened(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> _Run | None:
    """A problem with its form, from which what cannot be derived is gone.

    None when some root cannot be had; the failure is then noted. All that reductions take away
    after this leaves an answer, unless they know one and look for a better.
    """
    form = working_form(problem)
    reason = impossible(problem, form)
    if reason:
        standing.fail(reason)
        return None
    return _Run(problem, standing, deadline, seed, form)


def automatic(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Everything below, one after another and then side by side, until the answer is proven."""
    run = _opened(problem, standing, deadline, seed)
    if run is None:
        return
    form = run.form
    standing.bound = _value(form, trivial_bound(form))
    if len(form.home) > _LARGE:  # whose reductions take a while: a first answer before
        if not form.negative():
            run.tree()
        run.chosen(greedy_dag(form, run.left(0.4)), "greedy-dag")
    run.reduce()
    record = run.record("reductions")
    if not form.home:
        record.offer(form, {})
        standing.close()
        return
    record.better = run.record("greedy").better
    improvement = Improvement(form, seed)
    improvement.start(run.left(1.0, 3.0))
    if not form.negative():
        improvement.run(run.left(1.0, 1.0), stale=12 if len(form.home) <= _LARGE else 4)
    record.offer(form, improvement.best)
    if improvement.best is not None and anneals(form):
        # Bounds are far off where choosing more may gain: what can be had there is a good choice.
        share, longest = (0.25, 4.0) if form.negative() else (0.08, 1.0)
        if form.negative() or len(form.home) > _LARGE:
            seconds = run.left(share, longest) - time.perf_counter()
            _, chosen = Annealing(form, improvement.best, seed).run(seconds)
            record.offer(form, chosen)
    if not run.reduce(record.most):
        standing.close()
        return
    left: list[AndOr] = []
    found: list[int] = []
    parts = split(form)
    for part in parts:
        narrow = None
        if part.acyclic:
            most = record.most if parts == [form] else None
            narrow = eliminate(part, run.left(1.0, 0.5), most, 20_000)
        if narrow is None:
            left.append(part)
        elif narrow.points:
            found += narrow.points[0][1]
        else:  # nothing is better than what is known
            standing.close()
            return
    record.better = run.record("elimination").better
    if not left:
        record.offer(form, {form.home[n]: n for n in found})
        standing.close()
        return
    whole = len(left) == 1 and left[0] is form
    run.solve(form if whole else _rest(form, left, found), record, available())


def _rest(form: AndOr, left: Sequence[AndOr], found: Iterable[int]) -> AndOr:
    """A form without the parts whose best nodes were found."""
    rest = form.copy()
    kept = {n for part in left for n in part.home}
    rest.fixed += [p for n in found for p in rest.parts[n]]
    rest.constant[0] += sum(rest.cost[n] for n in found)
    gone = [c for c in rest.members if not kept.issuperset(rest.members[c])]
    rest.remove([n for n in rest.home if n not in kept])
    for c in gone:
        del rest.members[c]
    rest.roots &= rest.members.keys()
    return rest


def elimination(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Reductions, then elimination of the whole form."""
    run = _opened(problem, standing, deadline, seed)
    if run is None:
        return
    run.reduce()
    found = eliminate(run.form, deadline)
    if found is None:
        standing.reason = "the treewidth is too large, or time was up"
        return
    standing.notes.append(f"width {found.width}")
    standing.offer(problem_choice(problem, run.form, found.points[0][1]), "elimination")
    standing.close()


def milp(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """The mixed-integer program, in this process."""
    run = _opened(problem, standing, deadline, seed)
    if run is not None:
        bound = Search(deadline, seed).solve(run.form, run.record("milp"), run.bounded)
        run.bounded(bound)


def cp_sat(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """CP-SAT, in a process of its own."""
    run = _opened(problem, standing, deadline, seed)
    if run is None:
        return
    run.reduce()
    record = run.record("greedy")
    improvement = Improvement(run.form, seed)
    improvement.start(run.left(1.0, 3.0))
    record.offer(run.form, improvement.best)
    if run.form.home:
        run.solve(run.form, record, ("cp-sat",))
    else:
        record.offer(run.form, {})
        standing.close()


def greedy(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Greedy DAG extraction on the problem as it is."""
    run = _opened(problem, standing, deadline, seed)
    if run is not None:
        run.chosen(greedy_dag(run.form, deadline), "greedy-dag")


def tree(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """The choice of least tree cost."""
    run = _opened(problem, standing, deadline, seed)
    if run is not None:
        run.tree()


def _value(form: AndOr, scaled: Scaled) -> Number:
    """A scaled value, with the constant, in the problem's unit."""
    if isinstance(scaled, float) and math.isinf(scaled):
        return scaled
    exact = Fraction(scaled) / form.scales[0]
    return int(exact) if form.scales[0] == 1 and exact.denominator == 1 else exact


def impossible(problem: ChoiceProblem, form: AndOr) -> str:
    """Which root cannot be had, and why; empty where all can. What cannot be derived goes."""
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
