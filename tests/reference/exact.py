"""The exact optimum of an extraction problem by a solver, as an oracle for the search."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_matrix

from tapestry_egg.extract.problem.problem import Problem


def exact(problem: Problem, limit: float) -> float:
    """Least seconds within a memory limit, by the textbook program: a binary per row, a marginal
    per pair of rows, a memory constraint at every time; rows of equal columns are not merged."""
    parts = [*(v.seconds for v in problem.variables), *(p.seconds for p in problem.pairs)]
    most = max(float(np.max(x[np.isfinite(x)], initial=0.0)) for x in parts)
    # The solver leaves a millionth open, whatever costs are: of microseconds it would be a share.
    scale = 1e4 / (most or 1.0)
    start = np.concatenate(([0], np.cumsum([len(v) for v in problem.variables]))).astype(int)
    cost = [float(x) * scale for v in problem.variables for x in v.seconds]
    triples: list[tuple[int, int, float]] = []
    right: list[float] = []
    bytes_at: list[list[tuple[int, float]]] = [[] for _ in range(problem.times)]

    def equation(terms: list[tuple[int, float]], value: float) -> None:
        triples.extend((len(right), c, x) for c, x in terms)
        right.append(value)

    for i, v in enumerate(problem.variables):
        equation([(start[i] + r, 1.0) for r in range(len(v))], 1.0)
        for use in v.uses:
            for t in range(use.start, use.end):
                bytes_at[t] += [(start[i] + r, float(use.amount[r])) for r in range(len(v))]
    for p in problem.pairs:
        columns: dict[tuple[int, int], int] = {}
        la, lb = p.seconds.shape
        for a in range(la):
            for b in range(lb):
                if np.isfinite(p.seconds[a, b]):
                    columns[a, b] = len(cost)
                    cost.append(float(p.seconds[a, b]) * scale)
        for a in range(la):
            rows = [(start[p.a] + r, -1.0) for r in range(len(p.label_a)) if p.label_a[r] == a]
            equation([(c, 1.0) for (x, _), c in columns.items() if x == a] + rows, 0.0)
        for b in range(lb):
            rows = [(start[p.b] + r, -1.0) for r in range(len(p.label_b)) if p.label_b[r] == b]
            equation([(c, 1.0) for (_, y), c in columns.items() if y == b] + rows, 0.0)
        for use in p.uses:
            for t in range(use.start, use.end):
                bytes_at[t] += [(c, float(use.amount[k])) for k, c in columns.items()]
    r, c, x = zip(*triples, strict=True)
    constraints = [
        LinearConstraint(csr_matrix((x, (r, c)), shape=(len(right), len(cost))), right, right)
    ]
    if np.isfinite(limit):
        entries = [(t, c, x / limit) for t, terms in enumerate(bytes_at) for c, x in terms if x]
        r, c, x = zip(*entries, strict=True)
        memory = csr_matrix((x, (r, c)), shape=(problem.times, len(cost)))
        # A millionth more: presolve loses some plans that hold as much as the limit.
        constraints.append(LinearConstraint(memory, -np.inf, 1.0 + 1e-6))
    integral = np.zeros(len(cost))
    integral[: start[-1]] = 1
    # HiGHS's presolve finds some of these programs infeasible that are not: it is asked again. Its
    # limit is of the clock, and a machine with other work takes ten times as long as one without.
    for presolve in (True, False):
        found = milp(
            np.array(cost),
            integrality=integral,
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 1e-6, "time_limit": 600.0, "presolve": presolve},
        )
        if found.status == 0:
            break
    assert found.status in (0, 2), found.message
    if found.x is None:
        return float("inf")
    # The solver takes a little less than its rows do, as far as it bears with equations.
    rows = [int(found.x[a:b].argmax()) for a, b in pairwise(start.tolist())]
    return float(problem.evaluate(np.array(rows))[0])
