"""Recompute: forms of a program that hold less memory and compute some values a second time.

Candidates run over prices of memory, at the checkpoints that leave the least on one device. Those
that lower the peak there, and that no other dominates, are searched beside the form they come from.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.quantities import BYTES
from tapestry_egg.rewrite.recomputation.checkpoints import Checkpoints, Flow
from tapestry_egg.rewrite.recomputation.second_places import (
    Recomputation,
    SecondReads,
    with_second_instances,
)
from tapestry_egg.schedule.one_device import unit_seconds
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.schedule.traffic import traffic_of

from .derivation import digest
from .form import Form

#: The name of this change of a program in the rules and steps of plans.
RULE = "recompute"
# Of these numbers no measurement is kept. The grid of prices and sizes is where forms are looked
# for. `Looked` counts what each of the numbers leaves out, and the front's notes say so.

#: Forms with second instances that are searched at most.
MOST_FORMS = 1
#: The share of the peak on one device that a form must save.
LEAST_SAVED = 0.03
# Prices of memory: what all that is kept costs, in the time of the program.
_PRICES = (0.1, 0.3, 1.0, 100.0)
# Bytes that a segment may compute again, as shares of all that is kept past the peak.
_LARGEST = (0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625)
# How far apart two estimates are that may be in the wrong order.
_UNSURE = 1.2


@dataclass(frozen=True)
class Candidate:
    """A program with second instances, and its schedule: seconds and peak bytes are estimates for
    one device."""

    graph: BlockGraph
    schedule: Schedule
    chosen: Recomputation
    seconds: float
    peak: float


@dataclass(frozen=True)
class Looked:
    """Programs that were found, by falling peak, the one as given first; none dominates another.
    And what was not looked at on the way."""

    found: tuple[Candidate, ...]
    unmade: int = 0  # programs that promised too little to be made
    alike: int = 0  # programs that hold less than others, by less than `LEAST_SAVED`
    prices: int = 0  # prices of memory at which values were looked for, if others could find more
    cuts: int = 0  # other ways to cut the program into segments, at which none were
    slight: bool = False  # whether none were looked for, since all that is kept is too little
    library: int = 0  # kernels of a library's own, which run once


def candidates(schedule: Schedule, target: Target, most: int | None = None) -> Looked:
    """The program that was scheduled (`schedule.scheduled`), and those that compute some of its
    values twice and hold less memory.

    With `most`, only so many others are wanted, those whose product of seconds and peak is least:
    what is estimated to be far above them is left out.
    """
    graph, feedback = schedule.program.bodies[0].graph, schedule.program.feedback
    flow = Flow(schedule, target.fusing)
    points = Checkpoints(flow, target)
    seconds = points.seconds
    given = Candidate(graph, schedule, Recomputation(-1, ()), seconds, flow.peak)
    if not seconds or points.crossing <= LEAST_SAVED * flow.peak:
        return Looked((given,), slight=seconds > 0.0 and points.crossing > 0)
    ways = dict.fromkeys(points.cuts(x * points.crossing) for x in _LARGEST)
    cuts = min(ways, key=points.remains)
    promised: dict[Recomputation, float] = {}
    slight: dict[Recomputation, bool] = {}  # whether it saves anything
    steps: list[set[int]] = [set()]  # units that run again, at rising prices
    for price in _PRICES:
        again = points.units(cuts, price * seconds / points.crossing)
        steps.append(set(again))
        chosen = points.recomputation(again)
        if not chosen.segments or chosen in promised or chosen in slight:
            continue
        took, peak = points.estimate(again)
        # An estimate may be far too high, where the schedule would move, but is not too low.
        if flow.peak * (1.0 - LEAST_SAVED) <= peak <= flow.peak:
            slight[chosen] = peak < flow.peak
        else:
            promised[chosen] = took * peak
    made: dict[Recomputation, Candidate] = {}
    front, alike, enough = [given], 0, math.inf
    for chosen in sorted(promised, key=lambda c: promised[c]):
        if promised[chosen] > enough:
            break
        made[chosen] = _candidate(graph, chosen, feedback, target)
        front, alike = _front([given, *(made[c] for c in promised if c in made)])
        if most is not None and len(front) > most:
            enough = min(enough, promised[chosen] * _UNSURE)
    unmade = len(promised) - len(made)
    # What runs again grows with the price. Where it grows by two units, one may come before the
    # other at a price in between.
    between = any(len(low ^ high) > 1 for low, high in pairwise(steps))
    prices = len(_PRICES) if between else 0
    library = sum(u < flow.turn for u in points.kept)
    return Looked(
        tuple(front), unmade, alike + sum(slight.values()), prices, len(ways) - 1, library=library
    )


def _candidate(
    graph: BlockGraph, chosen: Recomputation, feedback: Mapping[int, int], target: Target
) -> Candidate:
    made = with_second_instances(graph, chosen)
    schedule = scheduled(made, feedback)
    traffic = traffic_of(schedule, target)
    seconds = sum(unit_seconds(schedule.program, u, target, traffic) for u in schedule.units)
    return Candidate(made, schedule, chosen, seconds, Flow(schedule, target.fusing).peak)


def _front(found: Sequence[Candidate]) -> tuple[list[Candidate], int]:
    """Those that no other one dominates, from the fastest: each saves memory. And how many save too
    little of it to be among them."""
    inorder = sorted(found, key=lambda c: (c.seconds, c.peak))
    front, alike = inorder[:1], 0
    for c in inorder[1:]:
        if c.peak < front[-1].peak * (1.0 - LEAST_SAVED):
            front.append(c)
        elif c.peak < front[-1].peak:
            alike += 1
    return front, alike


@dataclass(frozen=True)
class Recomputing:
    """Forms that compute some of a form's values twice, each with its schedule, and what was not
    looked at: see `Looked`."""

    forms: tuple[tuple[Form, Schedule], ...] = ()
    left: int = 0  # more such forms
    prices: int = 0
    cuts: int = 0
    slight: bool = False
    library: int = 0


def recomputing(
    form: Form, schedule: Schedule, target: Target, most: int = MOST_FORMS
) -> Recomputing:
    """At most `most` forms that compute some of a form's values twice and hold less memory;
    `schedule` is that of the form.

    Those whose product of seconds and peak is least: the areas that they add to a front.
    """
    if most <= 0:
        return Recomputing()
    with _uncollected():
        looked = candidates(schedule, target, most)
    given, *others = looked.found
    picked = sorted(others, key=lambda c: c.seconds * c.peak)[:most]
    return Recomputing(
        tuple([(_form(form, given, c), c.schedule) for c in sorted(picked, key=_seconds)]),
        left=len(others) - len(picked) + looked.unmade + looked.alike,
        prices=looked.prices,
        cuts=looked.cuts,
        slight=looked.slight,
        library=looked.library,
    )


def second_step(chosen: SecondReads, graph: BlockGraph) -> RuleStep:
    """The step to a program some readers of which take second instances."""
    made = {v for v, _ in chosen.reads}
    last = ", ".join(f"%{v}" for v in sorted({v for v, r in chosen.reads if r[0] != "second"}))
    what = f"{len(made)} value{'' if len(made) == 1 else 's'}"
    many = f"{len(chosen.reads)} reader{'' if len(chosen.reads) == 1 else 's'}"
    how = f"second instances for {many}: {last}"
    return RuleStep((RULE,), what, how, digest(graph), numbers=chosen.numbers())


def _seconds(c: Candidate) -> float:
    return c.seconds


@contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the collector of cycles: copies of a large program, which have none, make it look
    through all that there is again and again."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()


def _form(form: Form, given: Candidate, c: Candidate) -> Form:
    values = [v for segment in c.chosen.segments for v in segment]
    step = RuleStep(
        (RULE,),
        f"{len(values)} values in {len(c.chosen.segments)} segments",
        f"second instances for the operations after %{c.chosen.boundary}: on one device "
        f"{BYTES.format(given.peak)} -> {BYTES.format(c.peak)}, "
        f"{c.seconds / given.seconds - 1.0:+.1%} time",
        digest(c.graph),
        numbers=c.chosen.numbers(),
    )
    return form.then(c.graph, step)
