"""Settings: how hard to work on a program."""

from __future__ import annotations

from dataclasses import dataclass, field

from .algebra import BUDGET, LEAST_GAIN
from .recompute import MOST_FORMS
from .saturate import Budget


@dataclass(frozen=True)
class Settings:
    """How hard to work: `seconds` of search over all mesh shapes, how many `prices` of memory it
    tries first and `steps` at each, mesh axes at most, and budgets of the rules: `algebra` on the
    program, `budget` on each mesh shape.

    Other forms of the program share the time of the search; one is searched only if it saves more
    than the share `least_gain` of the seconds on one device. At most `recompute` forms are searched
    that compute values of it a second time to hold less memory. A search ends early where every
    plan is within the share `gap` of its bound, or after `patience` seconds without a better plan
    or bound. Every mesh shape is searched from `seeds` seeds, `seed` and those after it, on
    `workers` processors (None: all). Without `front` only the fastest plan is looked for: among
    the plans of the form that takes least on one device, and further only where that plan is not
    within the limits.
    """

    seconds: float = 45.0
    prices: int = 16
    steps: int = 4
    max_axes: int = 2
    budget: Budget = field(default_factory=Budget)
    algebra: Budget = BUDGET
    least_gain: float = LEAST_GAIN
    recompute: int = MOST_FORMS
    gap: float = 0.004
    patience: float = float("inf")
    seed: int = 0
    seeds: int = 1
    workers: int | None = None
    front: bool = True
