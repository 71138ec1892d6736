"""What `tapestry-egg run --json` printed of plans, for the pages of these: planned and compiled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from tapestry_egg.errors import PlanError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.plans.plan import Plan


class Sent(msgspec.Struct, frozen=True):
    """Payload bytes of one device, of the collectives of one kind among so many devices."""

    kind: str
    group: int
    planned_bytes: int
    compiled_bytes: int


class Run(msgspec.Struct, frozen=True):
    """A plan as it ran: seconds of one step, of the plan and of the program on one device; peak
    bytes of a device and what was sent, as planned and as compiled; outputs that `differ`."""

    plan: str
    mesh: str
    platform: str
    ok: bool
    seconds: float
    original_seconds: float
    planned_peak_bytes: int
    compiled_peak_bytes: int
    collectives: tuple[Sent, ...]
    differing: tuple[str, ...] = ()

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def load_runs(front: Front, paths: Iterable[str | Path]) -> dict[str, Run]:
    """The runs in files, by the names of plans of a front.

    Raises PlanError for a file that holds none, or one of another plan than the front has.
    """
    plans = {p.name: p for p in front.every}
    found: dict[str, Run] = {}
    for path in paths:
        try:
            run = msgspec.json.decode(Path(path).read_bytes(), type=Run)
        except (OSError, msgspec.MsgspecError, UnicodeError) as e:
            raise PlanError(
                f"holds no run of a plan: {e}",
                where=str(path),
                hint="Write one with `tapestry-egg run FRONT --plan NAME --json`.",
            ) from None
        plan = plans.get(run.plan)
        planned = (str(plan.mesh), plan.costs.peak_bytes) if plan else None
        if planned != (run.mesh, run.planned_peak_bytes):
            raise PlanError(
                f"ran a plan {run.plan} on mesh {run.mesh} that the front does not have",
                where=str(path),
                hint=f"It has {', '.join(plans)}; run a plan of this front.",
            )
        found[run.plan] = run
    return found


# Plans of other searches, such as those with a recipe's pins, to stand beside a front.


def baselines(front: Front, named: Iterable[tuple[str, Plan | Front]]) -> Iterator[Plan]:
    """Plans under names of their own; of a front its fastest.

    They have no bound: what a search with pins proves holds within its pins. Raises PlanError where
    one is for another machine, takes other arguments, or has a name that is taken.
    """
    own = front.plans[0]
    taken = {p.name for p in front.every}
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
