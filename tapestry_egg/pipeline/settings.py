"""Settings: how hard to work on a program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.sizes import ENTRIES
from tapestry_egg.rewrite.extractions import OPERATIONS
from tapestry_egg.rewrite.form import LEAST_GAIN
from tapestry_egg.rewrite.recompute import MOST_FORMS
from tapestry_egg.rewrite.terms.explore import BUDGET
from tapestry_egg.shard.strategies import Budget

# Units of search, each about what one processor does in a second, and more for each operation of
# the program, where nothing else is asked for: a short program is not searched for a minute. Every
# network on several devices adds so much, in programs of so many operations or more: two GPT-2
# layers on 8x8 devices, 24 networks, have gaps up to 430 % with 6 units and up to 80 % with 12.
_WORK, _PER_OPERATION, _PER_NETWORK, _LARGE = 2.0, 1.0 / 1500.0, 0.25, 1500
# The search has work for at least so many passes of messages over the tables of all networks. Two
# mesh axes make tables large: two GPT-2 layers on 8x8 devices have as many entries as twelve on 8.
_PASSES = 60.0
# Entries of tables that are made, in any case and for each unit of work: two million take a second.
_ENTRIES, _ENTRIES_PER_WORK = 2e6, 2e6
#: Mesh axes at most, on all machines and for all programs, where nothing else is asked for.
FIRST_AXES = 2
#: Peaks below this share of a limit are not in danger: no model is as wrong as that.
DANGER = 0.5
# A limit of time that nobody asked for is so many times as far away as the work should take, and no
# nearer than so many seconds.
_FAR, _LEAST = 20.0, 600.0
# Settings that are amounts, and whether nothing is one of their amounts, too.
_AMOUNTS = {
    "work": False,
    "seconds": False,
    "max_axes": False,
    "workers": False,
    "gap": True,
    "patience": True,
    "recompute": True,
    "forms": True,
    "entries": False,
}


@dataclass(frozen=True)
class Settings:
    """How hard to work: units of `work` for the search over all mesh shapes, `max_axes` of a mesh
    at most (None: two, and three where a machine's network has several dims and tables stay small),
    and budgets of the rules: `algebra` on the program, `budget` on each mesh shape.

    Work is counted in what a search touches (rows, entries of tables, iterations of solvers): a
    unit, as in other solvers, is about what one processor does in a second, but the count, and with
    it the front, is the same on a machine that is busy, and for any number of `workers`. `seconds`
    is a limit of time on the search, and `patience` one on the time without a better plan or bound:
    where either ends it, the front's notes say so, and the next run may give another front. Unless
    they are asked for, the limit is twenty times as far away as the work should take; where only
    `seconds` are given, nothing else limits the work.

    Other forms of the program share the work of the search: two that save more than the share
    `least_gain` of the seconds on one device, and whatever else the rules hold, as many as have
    `forms` operations together. At most `recompute` forms are searched that compute values of it a
    second time to hold less memory; of 0, nor are values made again for some of their readers, as
    else in a few small programs of the fastest form. Programs whose batch can be split over time
    are searched in `micro_batches` of it, too: in each of these numbers that divides it (none: not
    at all), or in a few that are chosen by what they save on one device and by limits on memory; so
    is, where memory is short, what computes values a second time. A search ends early where every
    plan is within the share `gap` of its bound. It runs on `workers` processors (None: all).
    Without `front` only the fastest plan is looked for: among the plans of the form that takes
    least on one device, of that with short loops written out, and of one that computes values again
    if memory is short for that plan; on meshes of one axis and of the most axes. If none is within
    the limits, the search goes on with all that a front is made of, until one is.

    With `overlap` seconds are a longest path, in which collectives run beside kernels as far as the
    target's file lets them and their bytes are in memory from where they are issued; without it
    they are the sum of all kernels and collectives, one after another. Without `merge` no
    collectives are made into one where that makes plans faster.

    The tables of all problems have no more than so many `entries` together, and no more than two
    million, and as many for each unit of work: the gigabytes that a search takes follow from
    it, and how long it takes to begin (`extract/front/sizes.py`). Where they would have more, fewer
    copies are tried as shared ones, or meshes and forms are not searched, and notes say so.
    """

    seconds: float | None = None
    max_axes: int | None = None
    budget: Budget = field(default_factory=Budget)
    algebra: Budget = BUDGET
    least_gain: float = LEAST_GAIN
    recompute: int = MOST_FORMS
    forms: int = OPERATIONS
    micro_batches: tuple[int, ...] | None = None
    gap: float = 0.004
    patience: float = float("inf")
    workers: int | None = None
    front: bool = True
    work: float | None = None
    overlap: bool = False
    merge: bool = True
    entries: int = ENTRIES

    def __post_init__(self) -> None:
        """Raises ExtractError for an amount that is none."""
        for name, nothing in _AMOUNTS.items():
            value = getattr(self, name)
            if value is not None and not _is_amount(value, nothing):
                least = "0 or more" if nothing else "more than 0"
                raise ExtractError(
                    f"{name} is {value!r:.40}", where="Settings", hint=f"It is a number, {least}."
                )
        given = self.micro_batches or ()
        several = isinstance(given, tuple | list)
        if not several or any(not isinstance(n, int) or n < 1 for n in given):
            raise ExtractError(
                f"micro_batches are {self.micro_batches!r:.40}",
                where="Settings",
                hint="They are whole numbers from 1 on, as (2, 8); with () none are looked for.",
            )

    @property
    def first_axes(self) -> int:
        """Mesh axes at most before it is known how large tables are."""
        return FIRST_AXES if self.max_axes is None else self.max_axes

    def most_work(self, size: int, passing: Sequence[float] = ()) -> float:
        """Units of work that the search of a program of `size` operations may take, where a pass
        over the tables of its networks on several devices takes `passing`; infinite where only time
        limits it."""
        if self.work is not None:
            return self.work
        default = max(_WORK + _PER_OPERATION * size, _PASSES * sum(passing))
        default += _PER_NETWORK * len(passing) * min(size / _LARGE, 1.0)
        return default if self.seconds is None else float("inf")

    def most_entries(self, size: int) -> float:
        """Entries that the tables of such a program may have together."""
        return min(self.entries, _ENTRIES + _ENTRIES_PER_WORK * self.most_work(size))

    def most_seconds(self, size: int, passing: Sequence[float] = ()) -> float:
        """Seconds after which the search of such a program ends, finished or not."""
        if self.seconds is not None:
            return self.seconds
        return max(_LEAST, _FAR * self.most_work(size, passing))


def _is_amount(value: object, nothing: bool) -> bool:
    """Whether a value is a number above 0, or is 0 where that is an amount, too."""
    return isinstance(value, Real) and (float(value) > 0 or (nothing and value == 0))
