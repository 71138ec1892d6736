"""Objectives: what a plan may be better in, each known by one record that all stages read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from tapestry_egg.errors import ExtractError
from tapestry_egg.quantities import BYTES, ENERGY, MONEY, NUMBER, OPERATIONS, TIME, Quantity

#: Who finds plans that are better in an objective. `search`: every search; it evaluates each
#: labelling in it. `traffic`: a further search of the same rows, by weights on bytes and flops.
#: `mesh`: nobody has to; it follows from the mesh. `plan`: nobody looks; it is read off plans that
#: were found for other reasons. `seconds`: nobody has to; on the same devices it grows with them.
Finder = Literal["search", "traffic", "mesh", "plan", "seconds"]


@dataclass(frozen=True)
class Objective:
    """What a plan may be better in; less is better.

    `of` reads it off a plan. `title` says in words what it is, `column` does above a column, and
    `quantity` in which units it is written and read.

    One of the user's own has a name and a function of a plan: `te.Objective("area", lambda plan:
    plan.costs.seconds * plan.costs.joules)`, or a formula: `"seconds * joules"` wherever
    objectives are taken (`formulas.py`). Plans are compared by it, but none is looked for on
    its behalf, and no bound speaks of it.
    """

    name: str
    of: Callable[[Any], float]  # what is given: a plan
    title: str = ""
    column: str = ""
    quantity: Quantity = NUMBER
    finder: Finder = "plan"
    formula: str = ""  # of the named objectives, where one of the user's own is so given

    def value(self, plan: Any) -> float:
        """The amount that a plan has of it, in base units.

        Raises ExtractError where an objective of the user's own gives no amount.
        """
        found = self.of(plan)
        if self.finder != "plan":
            return float(found)
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not 0.0 <= number < math.inf:
            raise ExtractError(
                f"{found!r:.60} is not an amount",
                where=f"objective {self.name} of {f'plan {plan.name}' if plan.name else 'a plan'}",
                hint="The function of an objective gives a finite number, 0 at least.",
            )
        return number

    @property
    def by_devices(self) -> bool:
        """Whether the number of devices decides it besides what a search counts, energy apart."""
        named = set(re.findall(r"[a-z_]+", self.formula))
        return self.finder in ("mesh", "seconds") or not named.isdisjoint(_BY_DEVICES)

    def parse(self, amount: str | float, where: str = "") -> float:
        """An amount of it, such as `60GiB`, in base units. Raises ExtractError for none."""
        if share_of_least(amount) is not None:
            raise ExtractError(
                f"{str(amount).strip()} is a share of the least, which only a front knows",
                where=where or f"limit on {self.name}",
                hint="Give an amount here; front.best(limits=...) and front.ranked take shares.",
            )
        return self.quantity.parse(amount, self.name, where)

    def format(self, amount: float, digits: int = 3) -> str:
        """An amount in base units, as people write it."""
        return self.quantity.format(amount, digits)


SECONDS = Objective("seconds", attrgetter("costs.seconds"), "time per step", "time", TIME, "search")
PEAK_BYTES = Objective(
    "peak_bytes", attrgetter("costs.peak_bytes"), "peak memory per device", "peak", BYTES, "search"
)
JOULES = Objective(
    "joules", attrgetter("costs.joules"), "energy per step", "energy", ENERGY, "search"
)
WIRE_BYTES = Objective(
    "wire_bytes", attrgetter("costs.wire_bytes"), "bytes sent per device", "sent", BYTES, "traffic"
)
FLOPS = Objective(
    "flops",
    attrgetter("costs.flops"),
    "operations per device",
    "operations",
    OPERATIONS,
    "traffic",
)
DOLLARS = Objective(
    "dollars", attrgetter("costs.dollars"), "price per step", "price", MONEY, "seconds"
)
DEVICES = Objective("devices", attrgetter("mesh.devices"), "devices", "devices", NUMBER, "mesh")

_BY_DEVICES = (DOLLARS.name, DEVICES.name)

OBJECTIVES_BY_NAME: Mapping[str, Objective] = {
    o.name: o for o in (SECONDS, PEAK_BYTES, JOULES, WIRE_BYTES, FLOPS, DOLLARS, DEVICES)
}

#: What a plan's `Costs` hold, in the order of their fields.
COSTS = tuple(
    o for o in OBJECTIVES_BY_NAME.values() if o.finder in ("search", "traffic", "seconds")
)

#: What a search counts of every labelling, in the order of `Candidate.costs`.
SEARCHED = tuple(o for o in OBJECTIVES_BY_NAME.values() if o.finder == "search")

#: What plans are compared by where nobody says otherwise.
OBJECTIVES = tuple(o.name for o in SEARCHED)

#: The names of objectives as a hint.
KNOWN = f"Objectives are {', '.join(OBJECTIVES_BY_NAME)}."


def objective(what: object, where: str = "") -> Objective:
    """The objective of a name or of a formula; one of the user's own is what it is.

    Raises ExtractError for anything else.
    """
    if isinstance(what, Objective):
        return what
    if isinstance(what, str) and re.search(r"[^\w\s]", what):
        from .formulas import formula

        return formula(what, where=where)
    return named(what, where)


def named(name: object, where: str = "") -> Objective:
    """The objective of a name. Raises ExtractError for anything else."""
    found = OBJECTIVES_BY_NAME.get(name) if isinstance(name, str) else None
    if found is None:
        raise ExtractError(f"unknown objective {name!r:.60}", where=where, hint=KNOWN)
    return found


def share_of_least(limit: object) -> float | None:
    """What a limit of the form `110%` multiplies the least that there is by; None for another."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", limit) if isinstance(limit, str) else None
    return float(match[1]) / 100.0 if match else None


def amounts(limits: Mapping[str, float | str] | None) -> dict[str, float]:
    """Limits by the names of objectives, in base units.

    Raises ExtractError for an unknown objective and for what is no amount of it.
    """
    return {k: named(k, "limits").parse(v) for k, v in (limits or {}).items()}
