"""Rounded first: what is sent for a rounding alone is rounded before, and sent in fewer bytes.

Matrix units of some machines read operands rounded (`tapestry_egg/rewrite/operand_rounding.py`). A
search finds most plans that round before they send; some it does not see: inside a kernel, where
what is read and made has as few bytes, or where several choices would have to change at once. Their
compilers move the rounding before the collective in any case, so that such a plan would promise
more bytes than are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.fetch import Fetch, fetches
from tapestry_egg.plans.plan import BodyPlan, Costs, Kept, Plan
from tapestry_egg.plans.planned import planned_collectives


def rounded_first(plan: Plan, ground: Ground) -> Plan:
    """The plan with roundings moved before what is sent for them alone, as far as that costs none
    of seconds, bytes and joules more, nor fewer seconds than are proven (`plan.bound`)."""
    reads = fetches(plan.body)
    for k, op in enumerate(plan.graph.operations):
        body = _moved(plan.body, k, reads) if registry.meaning(op.kernel) == "rounding" else None
        if body is None:
            continue
        trial = replace(plan, body=body)
        try:
            costs = Walk(trial, ground).certificate().costs
        except ExtractError:  # not legal: its kernel cannot run as two
            continue
        if plan.bound <= costs.seconds and _no_worse(costs, plan.costs):
            plan = replace(trial, costs=costs, collectives=planned_collectives(trial))
            reads = fetches(body)
    return plan


def _no_worse(costs: Costs, before: Costs) -> bool:
    return (
        costs.seconds <= before.seconds
        and costs.peak_bytes <= before.peak_bytes
        and costs.joules <= before.joules
    )


def _moved(body: BodyPlan, k: int, reads: Sequence[Sequence[Fetch]]) -> BodyPlan | None:
    """The body with operation k, a rounding, before what is sent for it alone, if something is;
    what is then sent of it its readers share, if there are several. `reads` as `fetches` gives."""
    strategy = body.strategies[k]
    (read,) = reads[k]
    (made,) = body.graph.operations[k].outputs
    sent = read.origin == "copy" and read.moves and not read.keep and not read.merged
    if not sent or read.have.partial or strategy.cuts != read.need.dims or made in body.kept:
        return None
    first = replace(strategy, cuts=read.have.dims, needs=(read.have,), gives=(read.have,))
    readers = [j for j, r in enumerate(reads) for f in r if f.value == made]
    if any(f.need != read.need for r in reads for f in r if f.value == made):
        return None
    shared = {made: Kept(read.need, max(readers))} if len(set(readers)) > 1 else {}
    return replace(
        body,
        strategies=(*body.strategies[:k], first, *body.strategies[k + 1 :]),
        copies={**body.copies, (made, read.have, read.need): read.steps},
        kept={**body.kept, **shared},
    )
