"""The textbook program of e-graph extraction, given to HiGHS and to CP-SAT as it is.

x per node, y per class: the nodes of a class sum to y, a node needs y of each child, roots are
active, and levels forbid cycles. Where costs are negative, an active class needs a reader as well.
No reduction, no cut, no start: what a user would write down.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem


@dataclass(frozen=True)
class Baseline:
    """What a solver said: its choice (None: none), its bound, and whether it calls it optimal."""

    choice: Choice | None
    bound: float | None
    proven: bool
    seconds: float


def highs(problem: ChoiceProblem, seconds: float) -> Baseline:
    """HiGHS, one thread."""
    import highspy

    started = time.perf_counter()
    classes, nodes = len(problem.classes), len(problem.nodes)
    home = problem.node_class()
    edges = [(n, d) for n in range(nodes) for d in sorted(set(problem.children_of(n).tolist()))]
    columns = nodes + 2 * classes  # x, y, levels
    rows: list[tuple[list[int], list[float], float, float]] = []
    for c in range(classes):
        members = list(range(problem.node_start[c], problem.node_start[c + 1]))
        rows.append(([*members, nodes + c], [1.0] * len(members) + [-1.0], 0.0, 0.0))
    for n, d in edges:
        rows.append(([n, nodes + d], [1.0, -1.0], -np.inf, 0.0))
        c = int(home[n])
        if c == d:
            rows.append(([n], [1.0], 0.0, 0.0))
            continue
        level = nodes + classes
        # level_c >= level_d + 1 where x is 1
        rows.append(
            ([level + c, level + d, n], [1.0, -1.0, -float(classes)], 1.0 - classes, np.inf)
        )
    for d, readers in _readers(problem).items():
        rows.append(([nodes + d, *readers], [1.0, *[-1.0] * len(readers)], -np.inf, 0.0))
    h: Any = highspy.Highs()
    h.setOptionValue("output_flag", False)
    h.setOptionValue("threads", 1)
    h.setOptionValue("mip_rel_gap", 0.0)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(rows)
    cost = np.zeros(columns)
    cost[:nodes] = problem.cost
    lower, upper = np.zeros(columns), np.ones(columns)
    upper[:nodes][~problem.allowed] = 0.0
    lower[nodes + problem.roots] = 1.0
    upper[nodes + classes :] = classes - 1
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
    lp.row_lower_ = np.array([r[2] for r in rows])
    lp.row_upper_ = np.array([r[3] for r in rows])
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.cumsum([0, *(len(r[0]) for r in rows)])
    lp.a_matrix_.index_ = np.array([i for r in rows for i in r[0]])
    lp.a_matrix_.value_ = np.array([v for r in rows for v in r[1]])
    lp.integrality_ = [
        highspy.HighsVarType.kInteger if i < nodes + classes else highspy.HighsVarType.kContinuous
        for i in range(columns)
    ]
    h.passModel(lp)
    h.setOptionValue("time_limit", max(0.1, seconds - (time.perf_counter() - started)))
    h.run()
    info = h.getInfo()
    choice = None
    if info.primal_solution_status == 2:
        x = np.array(h.getSolution().col_value)
        choice = _choice(problem, x[:nodes] > 0.5, x[nodes : nodes + classes] > 0.5)
    proven = h.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return Baseline(choice, _finite(info.mip_dual_bound), proven, time.perf_counter() - started)


def cp_sat(problem: ChoiceProblem, seconds: float) -> Baseline:
    """CP-SAT, one worker; costs that are no integers in millionths."""
    from ortools.sat.python import cp_model

    started = time.perf_counter()
    model: Any = cp_model.CpModel()
    home = problem.node_class()
    x = [model.new_bool_var("") for _ in problem.nodes]
    y = [model.new_bool_var("") for _ in problem.classes]
    level = [model.new_int_var(0, len(y) - 1, "") for _ in y]
    for c in range(len(y)):
        members = range(problem.node_start[c], problem.node_start[c + 1])
        model.add(sum(x[n] for n in members) == y[c])
    for r in problem.roots.tolist():
        model.add(y[r] == 1)
    for n in range(len(x)):
        if not problem.allowed[n]:
            model.add(x[n] == 0)
        for d in sorted(set(problem.children_of(n).tolist())):
            model.add_implication(x[n], y[d])
            model.add(level[home[n]] > level[d]).only_enforce_if(x[n])
    for d, readers in _readers(problem).items():
        model.add(sum(x[n] for n in readers) >= y[d])
    scale = 1 if problem.cost.dtype.kind == "i" else 10**6
    prices = [round(float(v) * scale) if scale > 1 else int(v) for v in problem.cost]
    model.minimize(sum(p * v for p, v in zip(prices, x, strict=True) if p))
    solver: Any = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = max(0.1, seconds - (time.perf_counter() - started))
    status = solver.solve(model)
    choice = None
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        chosen = np.array([bool(solver.value(v)) for v in x])
        choice = _choice(problem, chosen, np.array([bool(solver.value(v)) for v in y]))
    bound = solver.best_objective_bound / scale if status != cp_model.UNKNOWN else None
    return Baseline(choice, bound, status == cp_model.OPTIMAL, time.perf_counter() - started)


def _readers(problem: ChoiceProblem) -> dict[int, list[int]]:
    """The nodes that need each class but roots, where a class that nobody needs could be a gain."""
    if problem.cost.min(initial=0) >= 0:
        return {}
    found: dict[int, list[int]] = {d: [] for d in range(len(problem.classes))}
    for n in range(len(problem.nodes)):
        for d in set(problem.children_of(n).tolist()):
            found[d].append(n)
    for r in problem.roots.tolist():
        found.pop(r, None)
    return found


def _choice(problem: ChoiceProblem, x: np.ndarray, y: np.ndarray) -> Choice:
    node = np.full(len(y), -1, dtype=np.int64)
    home = problem.node_class()
    for n in np.flatnonzero(x).tolist():
        node[home[n]] = n
    # Without what no root needs: active classes without a reader that cost nothing.
    todo = problem.roots.tolist()
    kept = np.full(len(y), -1, dtype=np.int64)
    while todo:
        c = todo.pop()
        if kept[c] < 0 <= node[c]:
            kept[c] = node[c]
            todo.extend(problem.children_of(int(node[c])).tolist())
    return Choice(kept)


def _finite(value: float) -> float | None:
    return float(value) if abs(value) < sys.float_info.max / 2 else None
