"""Recompute: forms of a program that hold less memory and compute some values a second time.

Candidates run over prices of memory, at the checkpoints that leave the least on one device. Those
that lower the peak there, and that no other dominates, are searched beside the form they come from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .algebra import Form
from .blockgraph import BlockGraph
from .checkpoints import Checkpoints, Flow
from .derivation import digest
from .flatten import flatten
from .plan import RuleStep
from .roofline import unit_seconds
from .schedule import Schedule, schedule
from .second_instances import Recomputation, ordered, with_second_instances
from .target import Target
from .units import format_quantity

#: The name of this change of a program in the rules and steps of plans.
RULE = "recompute"
#: Forms with second instances that are searched at most.
MOST_FORMS = 1
#: The share of the peak on one device that a form must save.
LEAST_SAVED = 0.03
# Prices of memory: what all that is kept costs, in the time of the program.
_PRICES = (0.1, 0.3, 1.0, 100.0)
# Bytes that a segment may compute again, as shares of all that is kept past the peak.
_LARGEST = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)


@dataclass(frozen=True)
class Candidate:
    """A program with second instances: seconds and peak bytes are estimates for one device."""

    graph: BlockGraph
    chosen: Recomputation
    seconds: float
    peak: float


def candidates(graph: BlockGraph, feedback: Mapping[int, int], target: Target) -> list[Candidate]:
    """The program itself, and those that hold less memory, none of them dominated by another.

    By falling peak; the first is the program in the order of its schedule.
    """
    given = ordered(graph, feedback)
    plan = schedule(flatten(given, feedback))
    seconds, flow = _seconds(plan, target), Flow(plan)
    found = [Candidate(given, Recomputation(-1, ()), seconds, flow.peak)]
    points = Checkpoints(flow, target)
    if not seconds or points.crossing <= LEAST_SAVED * flow.peak:
        return found
    cuts = min((points.cuts(x * points.crossing) for x in _LARGEST), key=points.remains)
    tried = set[Recomputation]()
    for price in _PRICES:
        chosen = points.choose(cuts, price * seconds / points.crossing)
        if not chosen.segments or chosen in tried:
            continue
        tried.add(chosen)
        made = with_second_instances(given, chosen)
        after = schedule(flatten(ordered(made, feedback), feedback))
        found.append(Candidate(made, chosen, _seconds(after, target), Flow(after).peak))
    found.sort(key=lambda c: (c.seconds, c.peak))
    front = found[:1]
    for c in found[1:]:
        if c.peak < front[-1].peak * (1.0 - LEAST_SAVED):
            front.append(c)
    return front


def _seconds(plan: Schedule, target: Target) -> float:
    return sum(unit_seconds(plan.program, unit, target) for unit in plan.units)


def recomputing(
    form: Form, feedback: Mapping[int, int], target: Target, most: int = MOST_FORMS
) -> tuple[Form, ...]:
    """At most `most` forms that compute some of a form's values twice and hold less memory.

    Those whose product of seconds and peak is least: the areas that they add to a front.
    """
    if most <= 0:
        return ()
    given, *others = candidates(form.graph, feedback, target)
    picked = sorted(others, key=lambda c: c.seconds * c.peak)[:most]
    return tuple(_form(form, given, c) for c in sorted(picked, key=lambda c: c.seconds))


def _form(form: Form, given: Candidate, c: Candidate) -> Form:
    values = [v for segment in c.chosen.segments for v in segment]
    step = RuleStep(
        (RULE,),
        f"{len(values)} values in {len(c.chosen.segments)} segments",
        f"second instances for the operations after %{c.chosen.boundary}: on one device "
        f"{format_quantity(given.peak, 'peak_bytes')} -> {format_quantity(c.peak, 'peak_bytes')}, "
        f"{c.seconds / given.seconds - 1.0:+.1%} time",
        digest(c.graph),
        numbers=c.chosen.numbers(),
    )
    rules = tuple(sorted({*form.rules, RULE}))
    return Form(c.graph, rules, form.saturated, (*form.steps, step))
