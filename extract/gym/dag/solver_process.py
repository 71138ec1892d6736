"""Solvers in processes of their own, side by side, ended at the deadline.

A form travels as plain arrays in an `.npz` stream on standard input (nothing in it can execute),
what a solver finds comes back as lines of JSON. A solver that dies or hangs loses only its own
work. Solvers that cannot share a process, as HiGHS and ortools, do not have to.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

import numpy as np

from tapestry_egg.extract.gym.choices.choices import rows
from tapestry_egg.extract.gym.dag.egraph.form import AndOr, scaled
from tapestry_egg.parallel.child import Child, ready, request, say, write_frame
from tapestry_egg.parallel.deadline import held

from .lazy_milp import Record, Search, expressed


@dataclass(frozen=True)
class Event:
    """News of a solver: nodes of a better choice, or a better bound (scaled, with the constant)."""

    solver: str
    picks: tuple[int, ...] | None = None
    bound: int | float | None = None


def available() -> tuple[str, ...]:
    """The solvers that are installed, as many as there are processors."""
    names = ("milp", "cp-sat") if find_spec("ortools") is not None else ("milp",)
    return names[: max(1, os.cpu_count() or 1)]


def side_by_side(
    form: AndOr, record: Record, solvers: Sequence[str], deadline: float, seed: int
) -> Iterator[Event]:
    """Run solvers on a form until one has proven its answer or the deadline has come.

    What the record has is their start. A bound of inf says that nothing is better than what was
    told, or known.
    """
    nodes = sorted(form.home)
    asked = _request(form, nodes, record, deadline - time.perf_counter(), seed)
    children: dict[Child, str] = {}
    try:
        for name in solvers:
            with held():
                child = Child("tapestry_egg.extract.gym.dag.solver_process:serve", name, quiet=True)
                children[child] = name
        for child in children:
            with suppress(BrokenPipeError):  # it died; the others go on
                write_frame(child.to, asked)
        while waiting := [child for child in children if child.open]:
            left = deadline - time.perf_counter()
            if left <= 0:
                return
            for child in ready(waiting, left):
                for news in child.lines():
                    yield _event(children[child], news, nodes, form)
    finally:
        with held():
            for child in children:
                child.process.kill()
            for child in children:
                child.kill()


def _event(name: str, news: dict[str, Any], nodes: list[int], form: AndOr) -> Event:
    if "nodes" in news:
        return Event(name, picks=tuple(nodes[i] for i in news["nodes"]))
    if news["bound"] == "inf":
        return Event(name, bound=math.inf)
    # The solver's costs are those of the form in the problem's unit, without the constant.
    bound = news["bound"]
    own = math.floor(bound * form.scales[0]) if isinstance(bound, float) else bound * form.scales[0]
    return Event(name, bound=own + form.constant[0])


def _request(form: AndOr, nodes: list[int], record: Record, seconds: float, seed: int) -> bytes:
    classes = sorted(form.members)
    at = {c: i for i, c in enumerate(classes)}
    scale = form.scales[0]
    costs = [form.cost[n] for n in nodes]
    exact = scale == 1 and all(abs(v) < 2**62 for v in costs)
    column = np.array(costs if exact else [v / scale for v in costs], np.int64 if exact else float)
    need_start, needs = rows([at[d] for d in sorted(form.needs[n])] for n in nodes)
    cover_start, covers = rows(sorted(form.covers.get(n, ())) for n in nodes)
    most = record.most
    chosen = None if record.picks is None else expressed(form, dict(record.picks))
    started = set() if chosen is None else set(chosen.values())
    settings = {
        "start": [i for i, n in enumerate(nodes) if n in started],
        "most": None if most is None else str(Fraction(most - form.constant[0], scale)),
        "seconds": seconds,
        "seed": seed,
        "acyclic": form.acyclic,
        "classes": len(classes),
    }
    stream = io.BytesIO()
    np.savez(
        stream,
        home=np.array([at[form.home[n]] for n in nodes], dtype=np.int64),
        costs=column,
        need_start=need_start,
        needs=needs,
        cover_start=cover_start,
        covers=covers,
        roots=np.array(sorted(at[r] for r in form.roots), dtype=np.int64),
        settings=np.frombuffer(json.dumps(settings).encode(), dtype=np.uint8),
    )
    return stream.getvalue()


def serve() -> None:
    """The other side: read a form from standard input, and tell what the solver finds."""
    (solver,) = sys.argv[1:]
    arrived = time.perf_counter()
    with np.load(io.BytesIO(request()), allow_pickle=False) as data:
        asked = dict(data)
    settings = json.loads(asked["settings"].tobytes())
    column, scale = scaled(asked["costs"])
    form = AndOr(1, settings["acyclic"], (scale,))
    form.members = {c: [] for c in range(settings["classes"])}
    form.roots = set(asked["roots"].tolist())
    for i, (home, cost) in enumerate(zip(asked["home"].tolist(), column, strict=True)):
        a, b = asked["need_start"][i : i + 2]
        n = form.add(home, asked["needs"][a:b].tolist(), (cost,), ((home, i),))
        a, b = asked["cover_start"][i : i + 2]
        if b > a:
            form.covers[n] = set(asked["covers"][a:b].tolist())
    form.next_cover = int(asked["covers"].max(initial=-1)) + 1

    def bounded(bound: int | float) -> None:
        if bound in (math.inf, -math.inf):
            return
        say({"bound": int(bound) if scale == 1 else float(bound) / scale})

    most = settings["most"]
    record = Record(
        lambda value, picks: say({"nodes": [n for _, n in picks]}),
        math.inf if most is None else math.ceil(Fraction(most) * scale),
    )
    if settings["start"]:
        record.picks = [(int(asked["home"][i]), i) for i in settings["start"]]
    deadline, seed = arrived + settings["seconds"], settings["seed"]
    if solver == "cp-sat":
        from .cp_sat import solve

        bound = solve(form, record, bounded, deadline, seed)
    else:
        bound = Search(deadline, seed).solve(form, record, bounded)
    if bound >= record.value:
        say({"bound": "inf"})
    else:
        bounded(bound)
