"""The AND-OR choice problem for CP-SAT, of the `ortools` that the extra `solvers` installs.

A Boolean per node and class; acyclicity by a level per class of a cyclic component. Costs that are
no integers are rounded down to nine digits or so: bounds stay bounds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from tapestry_egg.extract.gym.dag.egraph.closure import closure, cyclic_components
from tapestry_egg.extract.gym.dag.egraph.cost_unit import Scaled, unit_of
from tapestry_egg.extract.gym.dag.egraph.form import AndOr
from tapestry_egg.extract.gym.dag.egraph.greedy import Chosen, Improvement, depths

from .and_or_program import nearest
from .lazy_milp import Record

# What the largest cost that is not integral is scaled to.
_LARGE = 10**9


def solve(
    form: AndOr, record: Record, bounded: Callable[[Scaled], None], deadline: float, seed: int
) -> Scaled:
    """Improve a record of a form; returns a bound, the record's value when that is proven.

    Raises ImportError without ortools.
    """
    from ortools.sat.python import cp_model

    unit = unit_of(form)
    step = unit.step
    if not unit.integral:
        step = max(Fraction(1), Fraction(max(abs(v) for v in form.cost.values()), _LARGE))
    model: Any = cp_model.CpModel()
    x = {n: model.new_bool_var("") for n in form.home}
    y = _active(form, model, x)
    _needs(form, model, x, y, deadline)
    levels = _levels(form, model, x) if form.acyclic else {}
    prices = {}
    for n, v in form.cost.items():
        price = v / step
        prices[n] = round(price) if unit.integral else math.floor(price)
    model.minimize(sum(price * x[n] for n, price in prices.items() if price))
    improvement = Improvement(form, seed)
    improvement.start(min(deadline, time.perf_counter() + 2.0))
    improvement.run(min(deadline, time.perf_counter() + 0.5))
    record.offer(form, improvement.best)
    if improvement.best is not None:
        _hint(form, model, x, levels, improvement.best)
    solver: Any = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = max(0.01, deadline - time.perf_counter())
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed

    def scaled_bound(value: float) -> Scaled:
        least = form.constant[0] + Fraction(math.ceil(value - 1e-6)) * step
        if not isinstance(step, int):  # decimals, which binary fractions differ from
            least -= abs(least) * Fraction(1, 10**12)
        return min(math.floor(least), record.value)

    class Told(cp_model.CpSolverSolutionCallback):  # type: ignore[misc]
        def on_solution_callback(self) -> None:
            record.offer(form, chosen_by(form, {n for n in x if self.value(x[n])}))

    solver.best_bound_callback = lambda value: bounded(scaled_bound(value))
    status = solver.solve(model, Told())
    if status == cp_model.INFEASIBLE:
        return record.value
    if status == cp_model.OPTIMAL and unit.integral:
        return record.value
    return scaled_bound(solver.best_objective_bound)


def chosen_by(form: AndOr, nodes: set[int]) -> Chosen:
    """The choice of a set of nodes, as far as the roots need it."""
    return form.trimmed({form.home[n]: n for n in sorted(nodes)})


def _active(form: AndOr, model: Any, x: dict[int, Any]) -> dict[int, Any]:
    """Whether a class is active, per class that is no root."""
    y = {}
    for c, members in form.members.items():
        if c in form.roots:
            model.add_exactly_one([x[n] for n in members])
        elif len(members) == 1:
            y[c] = x[members[0]]
        else:
            y[c] = model.new_bool_var("")
            model.add_exactly_one([*(x[n] for n in members), ~y[c]])
    return y


def _needs(form: AndOr, model: Any, x: dict[int, Any], y: dict[int, Any], deadline: float) -> None:
    for n, needs in form.needs.items():
        for d in sorted(needs):
            if d in y:
                model.add_implication(x[n], y[d])
    for d, users in form.parents().items():
        if d in y:
            model.add_bool_or([*(x[n] for n in users), ~y[d]])
    covers: dict[int, list[int]] = {}
    for n, numbers in form.covers.items():
        for k in sorted(numbers):
            covers.setdefault(k, []).append(n)
    for nodes in covers.values():
        model.add_bool_or([x[n] for n in nodes])
    known = closure(form, deadline)
    if known is None:
        return
    for c in y:
        for d in nearest(known, known.required, c) + nearest(known, known.above, c):
            if d in y:
                model.add_implication(y[c], y[d])


def _levels(form: AndOr, model: Any, x: dict[int, Any]) -> dict[int, Any]:
    """A level per class on a cycle, above those of the classes that its node needs."""
    cyclic = cyclic_components(form)
    size: dict[int, int] = {}
    for k in cyclic.values():
        size[k] = size.get(k, 0) + 1
    levels = {c: model.new_int_var(0, size[k] - 1, "") for c, k in cyclic.items()}
    for n, needs in form.needs.items():
        c = form.home[n]
        for d in sorted(needs):
            if c in cyclic and cyclic.get(d) == cyclic[c]:
                model.add(levels[c] >= levels[d] + 1).only_enforce_if(x[n])
    return levels


def _hint(
    form: AndOr, model: Any, x: dict[int, Any], levels: dict[int, Any], chosen: Chosen
) -> None:
    for n in x:
        model.add_hint(x[n], int(chosen.get(form.home[n]) == n))
    depth = depths(form, chosen, cyclic_components(form)) if levels else {}
    for c, level in levels.items():
        model.add_hint(level, depth.get(c, 0))
