"""What if: the plans of a front on a machine of other figures, without a new search.

Every plan is counted again on the other machine. No other plans are looked for, so the fastest that
is known here need not be the fastest there, and what was proven for one machine holds for it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import isfinite

from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Plan
from tapestry_egg.quantities import BYTES
from tapestry_egg.schedule.of_plans import plan_schedule

from .front import Front
from .notes import note

#: What plans of one graph and order have in common, by the `id` of the graph, or of the plan where
#: what is merged makes an order of its own.
Grounds = dict[int, Ground]

#: What a question can change, each with what it is in words.
CHANGES: Mapping[str, str] = {
    "links": "times the bandwidth of every link",
    "hbm": "times the bandwidth of memory",
    "flops": "times the rate of arithmetic",
    "memory": "of memory on every device",
    "price": "dollars for a device and hour",
    "clock": "MHz",
}


def changed(machine: Target, changes: Mapping[str, float | str]) -> Target:
    """A machine with some figures changed; see `CHANGES`.

    Raises TargetError for an unknown figure or an amount that is none.
    """
    for name, amount in changes.items():
        if name not in CHANGES:
            known = ", ".join(CHANGES)
            raise TargetError(
                f"{name!r:.40} cannot be changed", where="what_if", hint=f"Figures are {known}."
            )
        number = _amount(name, amount)
        if name == "links":
            levels = [
                replace(
                    x,
                    bytes_per_second=x.bytes_per_second * number,
                    tree_bytes_per_second=x.tree_bytes_per_second * number,
                )
                for x in machine.levels
            ]
            speed = machine.link_speed * number
            machine = replace(machine, levels=tuple(levels), link_speed=speed)
        elif name == "hbm":
            rate = machine.hbm_bytes_per_second * number
            machine = replace(machine, hbm_bytes_per_second=rate)
        elif name == "flops":
            machine = replace(
                machine,
                peak=tuple((k, x * number) for k, x in machine.peak),
                vector=tuple((k, x * number) for k, x in machine.vector),
                matmul_speed=machine.matmul_speed * number,
                power=replace(machine.power, flops_watts=machine.power.flops_watts * number),
            )
        elif name == "memory":
            machine = replace(machine, hbm_bytes=int(number), shared_memory=False)
        elif name == "price":
            machine = machine.at_price(number)
        else:
            machine = machine.at_clock(number)
    return machine


def what_if(front: Front, machine: Target | None, changes: Mapping[str, float | str]) -> Front:
    """`Front.what_if`."""
    first = next((p for p in front.plans if p.origin is not None), None)
    if first is None or first.origin is None:
        raise ExtractError(
            "it is not told what machine the plans were made for",
            where="what_if",
            hint="Plans of a front know it, and those that were loaded from a file.",
        )
    known = first.origin.machine
    other = changed(machine or known, changes)
    other = replace(other, overlaps=known.overlaps)  # as the plans were searched
    if other.shape != known.shape:
        raise TargetError(
            f"the plans are for {known.spec}, not for {other.spec}",
            where="what_if",
            hint="Another number of devices takes a search: te.optimize.",
        )
    grounds: Grounds = {}
    said = [f"{_said(k, x)} {CHANGES[k]}" for k, x in changes.items()]
    words = ", ".join([*([other.spec] if machine is not None else []), *said]) or "as it was"
    return replace(
        front,
        plans=tuple(_repriced(p, other, grounds) for p in front.plans),
        original=None if front.original is None else _repriced(front.original, other, grounds),
        target=other.spec,
        epsilon=float("inf"),
        usable_bytes=other.usable_bytes,
        stages={},
        notes=(note("what-if", words=words, known=known.spec),),
    )


def _repriced(plan: Plan, machine: Target, grounds: Grounds) -> Plan:
    """A plan with the costs that it has on another machine, and no bound."""
    assert plan.origin is not None, "all plans of a front are of one search"
    key = id(plan) if plan.body.merged else id(plan.graph)
    if key not in grounds:
        grounds[key] = Ground(plan_schedule(plan.body, dict(plan.origin.feedback)), machine)
    found_costs = Walk(plan, grounds[key]).certificate().costs
    origin = replace(plan.origin, machine=machine)
    return replace(plan, target=machine.spec, costs=found_costs, bound=0.0, origin=origin)


def _amount(name: str, amount: float | str) -> float:
    if name == "memory":
        return BYTES.parse(amount, "memory", "what_if")
    try:
        number = float(amount)
    except (TypeError, ValueError):
        number = 0.0
    if isinstance(amount, bool) or not isfinite(number) or number <= 0:
        raise TargetError(
            f"{amount!r:.40} is not an amount of {name}",
            where="what_if",
            hint="Give a positive number.",
        )
    return number


def _said(name: str, amount: float | str) -> str:
    return BYTES.format(_amount(name, amount)) if name == "memory" else f"{float(amount):g}"
