"""The last pass: the ledger checks the plan that a front recommends."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

from tapestry_egg.errors import PlanError
from tapestry_egg.extract.front.front import audit
from tapestry_egg.extract.front.notes import note
from tapestry_egg.plans.passed import AUDITED, CERTIFIED

from .state import State


def audit_front(state: State) -> State:
    """The front, of which the plan that is fastest within a device's memory does what it promises.

    Warns of each plan that does not, which is left out; raises PlanError where none does. A
    plan that is no program here, as it has operations that this JAX does not have, is not checked,
    and a note says so.
    """
    front = state.front
    assert front is not None, "passes before make it"
    fitting = [p for p in front.plans if front.fits(p)] or front.plans
    left = sorted(fitting, key=lambda p: p.costs.seconds)
    refused = []
    while True:
        try:
            audit(left[0])
            break
        except PlanError as error:
            refused.append(left.pop(0))
            if not left:
                raise
            warnings.warn(f"a plan is left out: {error}", stacklevel=5)
    if refused:
        # They may have been all that dominated some other plan.
        kept = tuple(p for p in front.plans if not any(p is q for q in refused))
        front = replace(front, plans=kept, epsilon=math.inf)
    if left[0] not in AUDITED:
        front = replace(front, notes=(*front.notes, note("not-audited", name=left[0].name)))
    for plan in front.every:
        CERTIFIED.add(plan)  # by the passes before
    return replace(state, front=front)
