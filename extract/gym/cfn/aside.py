"""A second process at work on the same network.

The network travels as plain arrays in an `.npz` stream on standard input (nothing in it can
execute), what is found comes back as lines of JSON. A process that is lost loses only its own work.
"""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from tapestry_egg.extract.gym.cfn.network import program
from tapestry_egg.extract.gym.cfn.network.known import Known
from tapestry_egg.extract.gym.cfn.network.network import Ints, Network, Uses
from tapestry_egg.parallel.child import Child, request, say, write_frame

from .cores import CoreSearch
from .search import Search

#: A second process is not worth its start for less than so many seconds.
WORTH = 3.0

# At most so often, in seconds, is a better plan told.
_OFTEN = 1.0

# So many answers at most are told at once.
_AT_ONCE = 40


class Aside:
    """A process that solves a small network as a program, and searches a large one.

    With a `span` (least, largest and given limit) it searches at all limits (`sweep.py`).
    """

    def __init__(
        self,
        net: Network,
        seconds: float,
        seed: int,
        step: float,
        span: tuple[int, int, int] | None = None,
    ) -> None:
        self.child = Child("tapestry_egg.extract.gym.cfn.aside:work", threads=1, quiet=True)
        until = time.time() + seconds
        threading.Thread(
            target=self._send, args=(_arrays(net, until, seed, step, span),), daemon=True
        ).start()

    def _send(self, arrays: dict[str, Any]) -> None:
        stream = io.BytesIO()
        save: Any = np.savez  # whose keywords are arrays
        save(stream, **arrays)
        with suppress(OSError, ValueError):  # it has ended
            write_frame(self.child.to, stream.getbuffer())

    def news(self, search: Search) -> None:
        """Offer a search what has come in."""
        for told in self._told():
            if told["x"] is not None:
                search.offer(np.array(told["x"], dtype=np.int64))
            if told["bound"] is not None:
                search.raise_bound(told["bound"])
            if told["infeasible"] and search.best is None:
                search.proven = True

    def learn(self, known: Known) -> None:
        """Add what has come in about many limits."""
        for told in self._told():
            for need, value, x in told["answers"]:
                known.add(need, value, np.array(x, dtype=np.int64))
            for limit, bound, slope in told["lines"]:
                known.line(limit, bound, slope)

    @property
    def open(self) -> bool:
        """Whether it may still tell something."""
        return self.child.open

    def _told(self) -> Iterator[Any]:
        while lines := self.child.lines():
            yield from lines

    def end(self) -> None:
        """End the process."""
        self.child.kill()


def _arrays(
    net: Network, until: float, seed: int, step: float, span: tuple[int, int, int] | None
) -> dict[str, Any]:
    uses = net.uses
    return {
        "sizes": net.sizes,
        "cost": net.cost,
        "first": net.first,
        "second": net.second,
        "cells": net.cells,
        "variable": uses.variable,
        "lower": uses.lower,
        "upper": uses.upper,
        "start": uses.start,
        "amount": uses.amount,
        "room": uses.room,
        "numbers": np.array([net.constant, until, seed, step]),
        "span": np.array(span or (), dtype=np.int64),
    }


def work() -> None:
    """What the second process does: reads a network, and tells of rows and bounds."""
    a = np.load(io.BytesIO(request()), allow_pickle=False)
    constant, until, seed, step = a["numbers"].tolist()
    uses = Uses(a["variable"], a["lower"], a["upper"], a["start"], a["amount"], a["room"])
    net = Network(a["sizes"], a["cost"], a["first"], a["second"], a["cells"], uses, constant)
    if len(a["span"]):
        _work_on_limits(net, until, int(seed), step, *a["span"].tolist())
        return
    told = time.time()

    def tell(x: Ints | None, bound: float, infeasible: bool = False) -> None:
        nonlocal told
        told = time.time()
        line = {
            "x": None if x is None else x.tolist(),
            "bound": bound if math.isfinite(bound) else None,
            "infeasible": infeasible,
        }
        say(line)

    if program.fits(net):
        found = program.solve(net, until - time.time(), np.zeros(0, dtype=np.int64))
        tell(found.x, found.bound, found.infeasible)

    def report(value: float, bound: float) -> None:
        if time.time() - told > _OFTEN:
            tell(search.best, bound)

    left = until - time.time()
    if left > 0:
        search = CoreSearch(net, left, int(seed), report, step=step)
        last = search.run()
        bound = last.value if last.proven else last.bound
        tell(last.x, bound, last.proven and last.x is None)


def _work_on_limits(
    net: Network, until: float, seed: int, step: float, low: int, top: int, given: int
) -> None:
    """Search at many limits, and tell of answers and of bounds at prices."""
    from .sweep import SweepSearch

    known = Known(low, top)
    told: set[tuple[float, float]] = set()
    last = time.time()

    def tell(search: Search) -> None:
        nonlocal last
        if time.time() - last < _OFTEN:
            return
        answers = [x for x in known.thinned(_AT_ONCE) if (x.need, x.value) not in told]
        lines = [line for line in known.lines if line not in told]
        told.update((x.need, x.value) for x in answers)
        told.update(lines)
        found = {
            "answers": [(x.need, x.value, x.rows.tolist()) for x in answers],
            "lines": [(top, *line) for line in lines],
        }
        say(found)
        last = time.time()

    left = until - time.time()
    search = SweepSearch(net, known, left, seed, step, math.inf)
    search.news = tell
    search.sweep(given, at_once=True)
