"""Forms with fused attention: found first, so that rules work on a program without its scores.

What is recognised of a program (`streams/`) makes another one of it. The rules run on the one that
takes less time on one device; where that is the program as given, the other one is a form too, if
it holds less memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.quantities import BYTES
from tapestry_egg.rewrite.streams.streamed import RULE, count_streams, with_streams
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.schedule.kernels import scheduled
from tapestry_egg.schedule.one_device import program_seconds

from .checkpoints import Flow
from .derivation import digest
from .explore import BUDGET
from .forms import LEAST_GAIN, MOST_FORMS, Form, forms

#: Kernels are put together only where rules of this ruleset may do so.
RULESET = "fusion"
# A form that takes longer must save this share of the peak on one device. No measurement of it is
# kept.
_LEAST_SAVED = 0.1


def forms_with_streams(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    target: Target,
    budget: Budget = BUDGET,
    least_gain: float = LEAST_GAIN,
) -> tuple[Form, ...]:
    """The graph as given and up to two forms of it, as `forms.forms` finds them, of the program
    with fused attention where that is faster. A form that only holds less memory is `slower`."""
    asked = any(r.ruleset == RULESET for b in books for r in b.rules)
    streamed = with_streams(graph) if asked else graph
    if streamed is graph:
        return forms(graph, books, target, budget, least_gain)
    before, after = program_seconds(graph, target), program_seconds(streamed, target)
    step = RuleStep(
        (RULE,),
        f"{count_streams(streamed) - count_streams(graph)} softmaxes and their derivatives",
        f"kernels that keep no scores: on one device {after / max(before, 1e-30) - 1.0:+.1%} time",
        digest(streamed),
    )
    if after < before:
        found = forms(streamed, books, target, budget, least_gain)
        made = [
            replace(f, rules=tuple(sorted({*f.rules, RULE})), steps=(step, *f.steps)) for f in found
        ]
        given = replace(found[0], graph=graph, rules=(), steps=())
        every = (given, *made[1:], replace(made[0], timeline=(), others=0, slight=0))
        left = max(0, len(every) - MOST_FORMS)
        return (replace(given, others=given.others + left), *every[1:MOST_FORMS])
    found = forms(graph, books, target, budget, least_gain)
    peaks = [Flow(scheduled(g, {})).peak for g in (graph, streamed)]
    if len(found) >= MOST_FORMS or peaks[1] > (1.0 - _LEAST_SAVED) * peaks[0]:
        return found
    saved = f"{step.made}, {BYTES.format(peaks[0])} -> {BYTES.format(peaks[1])}"
    step = replace(step, made=saved)
    return (*found, Form(streamed, (RULE,), found[0].saturated, (step,), slower=True))
