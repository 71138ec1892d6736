"""Forms with fused attention, found first, so that rules work on a program without its scores; and
forms that hold less memory and take longer.

What is recognised of a program (`streams/`) makes another one of it. The rules run on the one that
takes less time on one device; where that is the program as given, the other one is a form too, if
it holds less memory. So is the program with its largest product in blocks of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.quantities import BYTES
from tapestry_egg.rewrite.streams import blocks
from tapestry_egg.rewrite.streams.streamed import RULE, RULESET, count_streams, with_streams
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.schedule.kernels import scheduled
from tapestry_egg.schedule.one_device import program_seconds

from .checkpoints import Flow
from .derivation import digest
from .explore import BUDGET
from .forms import LEAST_GAIN, MOST_FORMS, Form, forms

# A form that takes longer must save this share of the peak on one device. No measurement of it is
# kept.
_LEAST_SAVED = 0.1


def forms_with_streams(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget = BUDGET,
    least_gain: float = LEAST_GAIN,
    slower: bool = True,
    room: int = 0,
) -> tuple[Form, ...]:
    """The graph as given and up to two forms of it, as `forms.forms` finds them, of the program
    with fused attention where that is faster; and, if `slower` ones are wanted, those that only
    hold less memory, in the places that are left; then as many others as have `room` operations."""
    extra: list[Form] = []

    def find(of: BlockGraph) -> tuple[Form, ...]:
        found = forms(of, books, target, budget, least_gain, room)
        extra[:] = [f for f in found if f.extra]
        return tuple([f for f in found if not f.extra])

    if not any(r.ruleset == RULESET for b in books for r in b.rules):
        return (*find(graph), *extra)
    streamed = with_streams(graph)
    if streamed is graph:
        found = find(graph)
        return (*found, *(_lean(found, Form(graph)) if slower else ()), *extra)
    before, after = program_seconds(graph, target), program_seconds(streamed, target)
    step = RuleStep(
        (RULE,),
        f"{count_streams(streamed) - count_streams(graph)} softmaxes and their derivatives",
        f"kernels that keep no scores: on one device {after / max(before, 1e-30) - 1.0:+.1%} time",
        digest(streamed),
    )
    fused = Form(streamed, (RULE,), True, (step,))
    if after >= before:
        found = find(graph)
        if not slower or len(found) >= MOST_FORMS:
            return (*found, *extra)
        peaks = [Flow(scheduled(g, {})).peak for g in (graph, streamed)]
        if peaks[1] <= (1.0 - _LEAST_SAVED) * peaks[0]:
            found = (*found, replace(fused, saturated=found[0].saturated, slower=True))
        return (*found, *_lean(found, fused), *extra)
    found = find(streamed)
    given = replace(found[0], graph=graph, rules=(), steps=())
    made = [
        replace(f, rules=tuple(sorted({*f.rules, RULE})), steps=(step, *f.steps)) for f in found[1:]
    ]
    extra[:] = [
        replace(f, rules=tuple(sorted({*f.rules, RULE})), steps=(step, *f.steps)) for f in extra
    ]
    fused = replace(fused, saturated=given.saturated)
    every = (given, *(made or [fused]))
    return (*every, *(_lean(every, fused) if slower else ()), *extra)


def _lean(found: Sequence[Form], form: Form) -> tuple[Form, ...]:
    """The form with its largest product in blocks of rows, where there is a place for it and it
    holds less memory on one device."""
    if len(found) >= MOST_FORMS:
        return ()
    made = blocks.with_blocks(form.graph)
    if made is form.graph:
        return ()
    peaks = [Flow(scheduled(g, {})).peak for g in (form.graph, made)]
    if peaks[1] > (1.0 - _LEAST_SAVED) * peaks[0]:
        return ()
    step = RuleStep(
        (blocks.RULE,),
        "the largest product and what reads it",
        f"a loop: on one device {BYTES.format(peaks[0])} -> {BYTES.format(peaks[1])}",
        digest(made),
    )
    rules = tuple(sorted({*form.rules, blocks.RULE}))
    steps = (*form.steps, step)
    return (Form(made, rules, found[0].saturated, steps, slower=True),)
