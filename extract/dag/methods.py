"""Methods for AND-OR choice problems: e-graphs, with acyclic answers.

`automatic` reduces, builds choices, and eliminates where the form is narrow. What is left goes to
processes of their own, side by side: the mixed-integer program (`lazy_milp.py`) and, where ortools
is installed, CP-SAT (`cp_sat.py`); the first to prove its answer ends the search.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from fractions import Fraction

from ..choices import ChoiceProblem, Number
from ..standing import Standing
from .annealing import Annealing
from .closure import cyclic_components
from .cost_unit import Scaled
from .form import AndOr, problem_choice, trim, working_form
from .greedy import Improvement, bottom_up, greedy_dag
from .lazy_milp import Record, Search, split, trivial_bound
from .reductions import keep_derivable, reduce
from .solver_process import available, side_by_side
from .tree_elimination import eliminate

# Forms of more nodes get answers before they are reduced, and before programs are solved.
_LARGE = 1000

# Seconds that a solver may take beyond what it was given before it is ended.
_GRACE = 0.15


def automatic(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Everything below, one after another and then side by side, until the answer is proven."""
    form = working_form(problem)
    if not _possible(problem, form, standing):
        return
    standing.bound = _value(form, trivial_bound(form))
    if len(form.home) > _LARGE:  # whose reductions take a while: a first answer before
        _first_answers(problem, form, standing, deadline)
    record = Record(lambda value, picks: _offer_picks(problem, standing, picks, "reductions"))
    if not _reduced(form, standing, deadline, None):
        standing.fail(_impossible(problem, working_form(problem)))
        return
    if not form.home:
        record.offer(form, {})
        standing.close()
        return
    record.better = lambda value, picks: _offer_picks(problem, standing, picks, "greedy")
    improvement = Improvement(form, seed)
    improvement.start(min(deadline, time.perf_counter() + 3.0))
    if not form.negative():
        improvement.run(min(deadline, time.perf_counter() + 1.0))
    record.offer(form, improvement.best)
    if improvement.best is not None and not cyclic_components(form):
        # Bounds are far off where choosing more may gain: what can be had there is a good choice.
        share, longest = (0.25, 4.0) if form.negative() else (0.08, 1.0)
        if form.negative() or len(form.home) > _LARGE:
            seconds = min(longest, share * (deadline - time.perf_counter()))
            _, chosen = Annealing(form, improvement.best, seed).run(seconds)
            record.offer(form, chosen)
    if not _reduced(form, standing, deadline, record.most):
        standing.close()
        return
    left: list[AndOr] = []
    found: list[int] = []
    parts = split(form)
    for part in parts:
        narrow = None
        if part.acyclic:
            end = min(deadline, time.perf_counter() + 0.5)
            most = record.most if parts == [form] else None
            narrow = eliminate(part, end, most, 20_000)
        if narrow is None:
            left.append(part)
        elif narrow.points:
            found += narrow.points[0][1]
        else:  # nothing is better than what is known
            standing.close()
            return
    record.better = lambda value, picks: _offer_picks(problem, standing, picks, "elimination")
    if not left:
        record.offer(form, {form.home[n]: n for n in found})
        standing.close()
        return
    _solve_left(problem, form, left, found, record, standing, deadline, seed)


def _solve_left(
    problem: ChoiceProblem,
    form: AndOr,
    left: list[AndOr],
    found: list[int],
    record: Record,
    standing: Standing,
    deadline: float,
    seed: int,
) -> None:
    """What elimination left, by solvers side by side."""
    rest = form
    if len(left) > 1 or left[0] is not form:
        rest = form.copy()
        kept = {n for part in left for n in part.home}
        rest.fixed += [p for n in found for p in rest.parts[n]]
        rest.constant[0] += sum(rest.cost[n] for n in found)
        gone = [c for c in rest.members if not kept.issuperset(rest.members[c])]
        rest.remove([n for n in rest.home if n not in kept])
        for c in gone:
            del rest.members[c]
        rest.roots &= rest.members.keys()
    for event in side_by_side(rest, record, available(), deadline - _GRACE, seed):
        if event.picks is not None:
            picks = [*rest.fixed, *(p for n in event.picks for p in rest.parts[n])]
            _offer_picks(problem, standing, picks, event.solver)
        if event.bound is not None:
            standing.raise_bound(_value(rest, event.bound))
        if event.bound == math.inf:
            standing.close()
        if standing.proven:
            return


def elimination(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Reductions, then elimination of the whole form."""
    form = working_form(problem)
    if not _possible(problem, form, standing):
        return
    if not _reduced(form, standing, deadline, None):
        standing.fail(_impossible(problem, working_form(problem)))
        return
    found = eliminate(form, deadline)
    if found is None:
        standing.reason = "the treewidth is too large, or time was up"
        return
    nodes = found.points[0][1]
    standing.notes.append(f"width {found.width}")
    standing.offer(problem_choice(problem, form, nodes), "elimination")
    standing.close()


def milp(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """The mixed-integer program, in this process."""
    form = working_form(problem)
    if not _possible(problem, form, standing):
        return
    whole = form.copy()
    record = Record(lambda value, picks: _offer_picks(problem, standing, picks, "milp"))
    bound = Search(deadline, seed).solve(form, record, lambda b: _raise(standing, _value(whole, b)))
    if bound == math.inf:
        standing.fail(_impossible(problem, whole))
    else:
        _raise(standing, _value(whole, bound))


def cp_sat(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """CP-SAT, in a process of its own."""
    form = working_form(problem)
    if not _possible(problem, form, standing):
        return
    if not _reduced(form, standing, deadline, None):
        standing.fail(_impossible(problem, working_form(problem)))
        return
    record = Record(lambda value, picks: _offer_picks(problem, standing, picks, "greedy"))
    improvement = Improvement(form, seed)
    improvement.start(min(deadline, time.perf_counter() + 3.0))
    record.offer(form, improvement.best)
    if not form.home:
        record.offer(form, {})
        standing.close()
        return
    for event in side_by_side(form, record, ("cp-sat",), deadline - _GRACE, seed):
        if event.picks is not None:
            picks = [*form.fixed, *(p for n in event.picks for p in form.parts[n])]
            _offer_picks(problem, standing, picks, event.solver)
        if event.bound is not None:
            _raise(standing, _value(form, event.bound))
        if event.bound == math.inf:
            standing.close()


def greedy(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Greedy DAG extraction on the problem as it is."""
    form = working_form(problem)
    if not _possible(problem, form, standing):
        return
    chosen = greedy_dag(form, deadline)
    if chosen is not None:
        standing.offer(problem_choice(problem, form, chosen.values()), "greedy-dag")


def tree(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """The choice of least tree cost."""
    form = working_form(problem)
    if _possible(problem, form, standing):
        _offer_tree(problem, form, standing, "bottom-up")


def _first_answers(
    problem: ChoiceProblem, form: AndOr, standing: Standing, deadline: float
) -> None:
    """The choices that others' fast extractors would give."""
    if not form.negative():
        _offer_tree(problem, form, standing, "bottom-up")
    end = time.perf_counter() + 0.15 * (deadline - time.perf_counter())
    chosen = greedy_dag(form, end)
    if chosen is not None:
        standing.offer(problem_choice(problem, form, chosen.values()), "greedy-dag")


def _offer_tree(problem: ChoiceProblem, form: AndOr, standing: Standing, method: str) -> None:
    price = {n: float(max(v, 0)) for n, v in form.cost.items()}
    chosen = bottom_up(form, price, form.parents())
    if chosen is not None:
        standing.offer(problem_choice(problem, form, chosen.values()), method)


def _offer_picks(
    problem: ChoiceProblem, standing: Standing, picks: Iterable[tuple[int, int]], method: str
) -> None:
    node = [-1] * len(problem.classes)
    for c, n in picks:
        node[c] = n
    standing.offer(trim(problem, node), method)


def _value(form: AndOr, scaled: Scaled) -> Number:
    """A scaled value, with the constant, in the problem's unit."""
    if isinstance(scaled, float) and math.isinf(scaled):
        return scaled
    exact = Fraction(scaled) / form.scales[0]
    return int(exact) if form.scales[0] == 1 and exact.denominator == 1 else exact


def _raise(standing: Standing, bound: Number) -> None:
    if bound == math.inf:
        standing.close()
    else:
        standing.raise_bound(bound)


def _reduced(form: AndOr, standing: Standing, deadline: float, most: int | None) -> bool:
    before = len(form.home), len(form.members)
    found = reduce(form, deadline, most)
    after = len(form.home), len(form.members)
    standing.notes.append(
        f"reduced from {before[0]} nodes in {before[1]} classes to {after[0]} in {after[1]}"
    )
    return found


def _possible(problem: ChoiceProblem, form: AndOr, standing: Standing) -> bool:
    """Whether every root can be had at all; the problem's failure is noted if not."""
    reason = _impossible(problem, form.copy())
    if reason:
        standing.fail(reason)
    return not reason


def _impossible(problem: ChoiceProblem, form: AndOr) -> str:
    """Which root cannot be had, and why; empty where all can."""
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
