"""The user's own shardings as a plan: what they say, spread through the program as it comes.

Pinned values have one layout to begin with. From there every operation in turn runs as is cheapest
where its operands already are, as propagation of shardings does it; what nobody has said anything
of follows its readers. No search has to find this plan, so no search can be worse than it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Ints, Problem


def as_given(assembled: PlanProblem) -> Candidate | None:
    """The plan that the pins and constraints of a problem lead to; None where the way ends."""
    schedule = assembled.choices.schedule
    ports = [schedule.program.instances[u.root].port for u in schedule.units]
    entering = [u for u, port in enumerate(ports) if port in ("input", "state", "constant")]
    problem = assembled.problem
    said = [u for u in entering if len(problem.variables[u]) == 1]
    silent = set(entering) - set(said)
    order = [*said, *(i for i in range(len(problem.variables)) if i not in {*said, *silent})]
    rows = spread(problem, [*order, *sorted(silent)])
    found = Candidate.of(problem, rows)
    return found if np.isfinite(found.seconds) else None


def spread(problem: Problem, order: Sequence[int]) -> Ints:
    """A row of every variable, chosen one after another for the least seconds with those before;
    what all would be as good for is the first."""
    pairs: dict[int, list[int]] = defaultdict(list)
    for k, p in enumerate(problem.pairs):
        pairs[p.a].append(k)
        pairs[p.b].append(k)
    rows = np.full(len(problem.variables), -1, dtype=np.int64)
    for i in order:
        costs = problem.variables[i].seconds.copy()
        for k in pairs[i]:
            p = problem.pairs[k]
            other = p.b if p.a == i else p.a
            if rows[other] < 0 or other == i:
                continue
            if p.a == i:
                costs += p.seconds[:, p.label_b[rows[other]]][p.label_a]
            else:
                costs += p.seconds[p.label_a[rows[other]]][p.label_b]
        rows[i] = int(costs.argmin())
    return rows
