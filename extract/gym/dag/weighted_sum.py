"""Weighted sums of two objectives: what they say of all answers at once.

The least a * cost + b * count of all answers is a line below the front (`front_bounds.py`). A
relaxation gives one too; its rows and cuts hold for all weights, so one program serves them all.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapestry_egg.extract.gym.dag.egraph.closure import closure
from tapestry_egg.extract.gym.dag.egraph.cost_unit import Scaled, Unit
from tapestry_egg.extract.gym.dag.egraph.form import AndOr
from tapestry_egg.extract.gym.dag.egraph.greedy import Improvement

from .and_or_program import Model
from .lazy_milp import Record, Search, too_dear
from .linear_program import Solved

#: (a, b): a of the first objective and b of the second.
Weights = tuple[int, int]


def weighted(form: AndOr, weights: Weights) -> AndOr:
    """A form of one objective, the weighted sum of a form's two; nodes and classes are the same."""
    a, b = weights
    other = form.copy()
    first, second = form.costs
    other.costs = ({n: a * v + b * second[n] for n, v in first.items()},)
    other.constant = [a * form.constant[0] + b * form.constant[1]]
    other.scales = (form.scales[0] if a else form.scales[1],)
    return other


@dataclass(frozen=True)
class Relaxed:
    """A bound on a weighted sum, and the last solution of the relaxation that gave it, in a unit
    and without a constant."""

    bound: Scaled
    unit: Unit
    constant: int
    solved: Solved | None


class Relaxation:
    """The relaxation of a form of two objectives under weights that change; cuts are kept."""

    def __init__(self, form: AndOr, deadline: float) -> None:
        known = closure(form, deadline)
        self.model = Model(weighted(form, (1, 0)), known)

    def solve(self, built: Improvement, record: Record, deadline: float, seed: int) -> Relaxed:
        """The bound for the costs of a weighted form; choices built from its solutions go to the
        record."""
        model = self.model
        model.reprice(built.form)
        bound, solved = Search(deadline, seed).relax(model, record, built)
        return Relaxed(bound, model.unit, model.form.constant[0], solved)

    def dear(self, relaxed: Relaxed, value: Scaled) -> list[int]:
        """Nodes that no answer of a weighted sum below a value has."""
        if relaxed.solved is None:
            return []
        room = value - relaxed.constant
        return too_dear(self.model.node_at, relaxed.unit, relaxed.solved, room)
