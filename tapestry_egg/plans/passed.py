"""Plans that have passed a check in this process, so that none is checked twice."""

from __future__ import annotations

import weakref

from .plan import Plan


class Passed:
    """A set of plans as objects: a plan is frozen, and one that is changed is another object."""

    def __init__(self) -> None:
        self._plans: dict[int, weakref.ref[Plan]] = {}

    def add(self, plan: Plan) -> None:
        number = id(plan)
        self._plans[number] = weakref.ref(plan, lambda _: self._plans.pop(number, None))

    def __contains__(self, plan: Plan) -> bool:
        known = self._plans.get(id(plan))
        return known is not None and known() is plan


#: By the certificate, by the ledger.
CERTIFIED, AUDITED = Passed(), Passed()
