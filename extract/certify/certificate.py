"""The certificate: a finished plan, checked and costed from scratch.

What `recount.py` finds must be what the plan says of itself, within the limits and not below its
bound.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from tapestry_egg.errors import ExtractError
from tapestry_egg.machine.objectives import OBJECTIVES_BY_NAME, amounts, named
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Lane, Plan
from tapestry_egg.schedule.of_plans import plan_schedule
from tapestry_egg.schedule.schedules import Schedule

from .ground import Ground
from .recount import Walk
from .verdict import Certificate

#: Costs recomputed here may differ from the plan's by this share: sums in another order.
_TOLERANCE = 1e-6


def certify(
    plan: Plan,
    schedule: Schedule,
    target: Target,
    limits: Mapping[str, float | str] | None = None,
) -> Certificate:
    """Check that a plan is legal, that it costs what it says, and that its bound is below.

    Raises ExtractError that names the first violated check and the operation.
    """
    return _certified(plan, Ground(schedule, target), limits or {})


def certify_all(
    plans: Sequence[Plan],
    schedule: Schedule,
    target: Target,
    limits: Mapping[str, float | str] | None = None,
) -> list[Certificate | ExtractError]:
    """Per plan of one schedule, its certificate or the error that says why there is none."""
    ground = Ground(schedule, target)
    found: list[Certificate | ExtractError] = []
    for plan in plans:
        try:
            found.append(_certified(plan, ground, limits or {}))
        except ExtractError as e:
            found.append(e)
    return found


def _certified(plan: Plan, ground: Ground, limits: Mapping[str, float | str]) -> Certificate:
    walk = Walk(plan, ground)
    found = walk.certificate()
    _check_parts(plan, walk, found)
    recounted = replace(plan, costs=found.costs)
    for name, said, true in said_and_true(plan, recounted):
        if abs(said - true) > _TOLERANCE * max(abs(said), abs(true)) + 1e-18:
            raise ExtractError(
                f"the plan says {name} {said!r}, the certificate finds {true!r}",
                where=f"certificate of plan {plan.name} on {plan.mesh}",
                hint="This is a defect of tapestry-egg; please report the program.",
            )
    for name, limit in amounts(limits).items():
        objective = named(name)
        if objective.value(recounted) > limit * (1 + _TOLERANCE):
            raise ExtractError(
                f"{name} is {objective.format(objective.value(recounted))}, over the limit "
                f"{objective.format(limit)}",
                where=f"certificate of plan {plan.name} on {plan.mesh}",
            )
    if plan.bound > found.seconds * (1 + _TOLERANCE):
        raise ExtractError(
            f"the bound {plan.bound!r} is above the plan's seconds {found.seconds!r}",
            where=f"certificate of plan {plan.name} on {plan.mesh}",
            hint="This is a defect of tapestry-egg; please report the program.",
        )
    return found


def _check_parts(plan: Plan, walk: Walk, found: Certificate) -> None:
    """Check that costs are made up of their parts: the peak of arrays, the seconds of kernels and
    collectives, which run one after another at most. Raises ExtractError."""
    change: dict[int, float] = defaultdict(float)
    for _, x in walk.lying:
        change[x.begin] += x.amount
        change[x.end] -= x.amount
    peak = max(accumulate(change[at] for at in sorted(change)), default=0.0)
    last = max((end for *_, end in (*found.step.runs, *found.step.flights)), default=0.0)
    for what, said, least, most in (
        ("peak_bytes", found.peak_bytes, peak - 1, peak + 1),
        ("seconds", found.seconds, last, found.serial_seconds),
    ):
        if not least * (1 - _TOLERANCE) <= said <= most * (1 + _TOLERANCE) + 1e-18:
            raise ExtractError(
                f"{what} is counted as {said!r}, its parts are {least!r} to {most!r}",
                where=f"certificate of plan {plan.name} on {plan.mesh}",
                hint="This is a defect of tapestry-egg; please report the program.",
            )


def said_and_true(plan: Plan, recounted: Plan) -> Iterator[tuple[str, float, float]]:
    """What a plan says that it costs, and what it costs as counted again, by name."""
    for name, objective in OBJECTIVES_BY_NAME.items():
        yield name, objective.value(plan), objective.value(recounted)
    yield "serial_seconds", plan.costs.serial_seconds, recounted.costs.serial_seconds


def recompute(plan: Plan, schedule: Schedule, target: Target) -> Certificate:
    """The costs of a legal plan, whoever made it. Raises ExtractError where it is not legal."""
    return Walk(plan, Ground(schedule, target)).certificate()


def memory_curve(plan: Plan) -> tuple[tuple[float, int], ...]:
    """The bytes alive on a device from each of so many seconds on, at the begin of every kernel.

    Raises ExtractError for a plan of which it is not told what machine it was made for.
    """
    walk, found = walked(plan, "memory")
    begins = walk.ground.streams.at(found.step, [begin for _, begin, _ in found.step.runs])
    return tuple(
        (at, round(max(found.profile[2 * u : 2 * u + 2])))
        for (u, _, _), at in zip(found.step.runs, begins, strict=True)
    )


def lanes(plan: Plan) -> tuple[Lane, ...]:
    """What every device does when in one step of a plan, in the order in which it begins.

    Raises ExtractError where it is not told what machine the plan was made for.
    """
    walk, found = walked(plan, "lanes")
    return walk.ground.streams.lanes(found.step)


def walked(plan: Plan, what: str) -> tuple[Walk, Certificate]:
    """A plan gone through once, and what was counted; `what` is asked for, for messages.

    Raises ExtractError where it is not told what machine the plan was made for.
    """
    if plan.origin is None:
        raise ExtractError(
            "it is not told what machine the plan was made for",
            where=f"{what} of plan {plan.name}",
            hint="Plans of a front know it, and those that were loaded from a file.",
        )
    walk = Walk(plan, ground_of(plan))
    return walk, walk.certificate()


def ground_of(plan: Plan) -> Ground:
    """What all plans of the same graph for the same machine have in common."""
    assert plan.origin is not None, "asked before"
    return Ground(plan_schedule(plan.body, dict(plan.origin.feedback)), plan.origin.machine)
