"""Plans of other searches, such as those with a recipe's pins, to stand beside a front."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from tapestry_egg.errors import PlanError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.plans.plan import Plan


def baselines(front: Front, named: Iterable[tuple[str, Plan | Front]]) -> Iterator[Plan]:
    """Plans under names of their own; of a front its fastest.

    They have no bound: what a search with pins proves holds within its pins. Raises PlanError where
    one is for another machine, takes other arguments, or has a name that is taken.
    """
    own = front.plans[0]
    taken = {p.name for p in (*front.plans, *([front.original] if front.original else []))}
    for name, found in named:
        plan = found.plans[0] if isinstance(found, Front) else found
        if name in taken or not name:
            raise PlanError(
                f"the name {name!r} is taken", where="baselines", hint="Write NAME=FILE."
            )
        for what, one, other in (
            ("machine", plan.target, front.target),
            ("arguments", _arguments(plan), _arguments(own)),
        ):
            if one != other:
                raise PlanError(f"is for other {what} than the front", where=f"baseline {name}")
        taken.add(name)
        yield replace(plan, name=name, bound=0.0)


def _arguments(plan: Plan) -> list[tuple[str, str]]:
    graph = plan.graph
    names = graph.input_names or ("",) * len(graph.inputs)
    return [(n, str(graph.values[v])) for n, v in zip(names, graph.inputs, strict=True)]
