"""Plans that have passed a check in this process, so that none is checked twice."""

from __future__ import annotations

import weakref

from .plan import Plan


class Passed:
    """A set of plans as objects: a plan is frozen, and one that is changed is another object."""

    def __init__(self) -> None:
        self._plans: dict[int, weakref.ref[Plan]] = {}

    def add(self, plan: Plan) -> None:
        # Those that are gone are dropped here: what a weak reference calls would swallow Ctrl-C.
        for gone in [k for k, known in self._plans.items() if known() is None]:
            del self._plans[gone]
        self._plans[id(plan)] = weakref.ref(plan)

    def __contains__(self, plan: Plan) -> bool:
        known = self._plans.get(id(plan))
        return known is not None and known() is plan


#: By the certificate, by the ledger.
CERTIFIED, AUDITED = Passed(), Passed()
