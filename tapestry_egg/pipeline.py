"""The pipeline: trace, encode, saturate, extract; lowering and running take plans from there."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .algebra import BUDGET, LEAST_GAIN, Form, forms
from .encode import encode
from .errors import ExtractError
from .executors import INTERRUPTED
from .extract.archive import Archive
from .extract.front import Front as Front
from .extract.merge import MeshResult, merge
from .extract.pins import Pin, Pins, fitting, pin, read_pins
from .extract.search import Effort, Limits
from .flatten import feedback_pairs, flatten
from .layout import MeshShape
from .prepare import prepare
from .progress import Phase, Progress
from .recompute import MOST_FORMS, RULE, recomputing
from .rules.book import DEFAULT_BOOKS, RuleBook, load_books, permitted
from .rules.trust import ensure_verified
from .saturate import Budget, Saturated, saturate
from .schedule import Schedule, in_order, repeat_cheap, schedule
from .target import Target, load_target
from .timeline import Tick
from .units import parse_quantity

if TYPE_CHECKING:
    from .blockgraph import BlockGraph
    from .extract.assemble import Assembled
    from .extract.problem import Floats
    from .extract.worker import Searched
    from .plan import Plan
    from .trace import Program

# When bytes and flops are objectives: seconds break ties, and flops weigh more than what their
# arithmetic takes, so that work is divided evenly before bytes are saved.
_TIE = 0.02
_EVEN = 20.0
# How much more time than others the forms have that compute values twice: they reach from the
# middle of the front to its end, where the search takes longest.
_TWICE = 2.0
OBJECTIVES = ("seconds", "peak_bytes", "joules")


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
    `workers` processors (None: all).
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


def optimize(
    graph: Program | BlockGraph,
    target: str | Path | Target,
    objectives: Sequence[str] = OBJECTIVES,
    *,
    limits: Mapping[str, float | str] | None = None,
    rules: Sequence[str | Path | RuleBook] = (),
    books: Sequence[str | Path | RuleBook] = DEFAULT_BOOKS,
    state: Mapping[str, str] | None = None,
    numerics: str = "reorders",
    mesh_shapes: Sequence[MeshShape] | None = None,
    pins: Pins | None = None,
    settings: Settings | None = None,
    executor: Executor | None = None,
    on_progress: Progress | None = None,
) -> Front:
    """The Pareto front of ways to run a traced program on a target (`"h100:8"`).

    Plans trade `objectives` off against each other; `limits` (`{"peak_bytes": "40GiB"}`) exclude
    plans above them. `rules` adds rule books to those of `books`. `state` pairs outputs with the
    inputs that they become in the next call, by path; donated inputs pair by themselves. `pins`
    fixes the layouts of inputs by path or prefix (`{"[0]['w']": (None, "x")}`, see
    `extract/pins.py`), and so those of the outputs that feed back to them. Rules that change
    rounding are used only with `numerics="relaxed"`. Every rule is verified before it is used.
    Mesh shapes are searched side by side by `executor` (default: processes of this machine; a Dask
    cluster's `Client.get_executor()` will do). An interruption (Ctrl-C) of the search ends it, and
    the front holds what was found until then; its `notes` say so.
    Raises TargetError, RuleError (RuleRefused for a rule that is not true), GraphError, and
    ExtractError when no plan meets the limits.
    """
    settings = settings or Settings()
    tell = on_progress or _silent
    machine = target if isinstance(target, Target) else load_target(target)
    bounds = {k: parse_quantity(v, k) for k, v in (limits or {}).items()}
    _check_objectives(objectives)
    program, block_graph = _split(graph)
    sets = permitted(load_books((*books, *rules)), numerics)
    ensure_verified(sets, executor)
    pairs = feedback_pairs(block_graph, state)
    fixed = read_pins(block_graph, pins)
    shapes = fitting(fixed, tuple(mesh_shapes or machine.mesh_shapes(settings.max_axes)))
    found = forms_of(block_graph, sets, machine, settings, tell)
    found += _recomputing(found, pairs, machine, settings, tell)
    plans = [scheduled(form, pairs) for form in found]
    timeline = [replace(tick, subject="algebra") for tick in found[0].timeline]
    problems = []
    for number, plan in enumerate(plans):
        for shape in shapes:
            ticks: list[Tick] = []
            problems.append(
                problem_on(plan, shape, machine, sets, settings.budget, fixed, tell, ticks)
            )
            where = f"{shape} form {number + 1}" if number else str(shape)
            timeline += [replace(tick, subject=where) for tick in ticks]
    wanted = _limits(bounds)
    searched = _in_turn(problems, wanted, settings, executor, tell)
    notes = searched.notes
    results = [MeshResult(p, a) for p, a in zip(problems, searched.archives, strict=True)]
    if {"wire_bytes", "flops"} & {*objectives, *bounds} and not searched.interrupted:
        again = _search(_for_traffic(results, machine), wanted, settings, executor, tell)
        notes += again.notes
        results = [r.with_candidates(a) for r, a in zip(results, again.archives, strict=True)]
    front = merge(results, objectives, bounds, machine.spec, block_graph.name)
    front = _certified(front, plans, machine, bounds)
    return replace(
        front,
        plans=tuple(replace(p, program=program) for p in front.plans),
        saturated=front.saturated and all(form.saturated for form in found),
        notes=tuple(dict.fromkeys(notes)),
        timeline=tuple(timeline),
    )


def forms_of(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    machine: Target,
    settings: Settings,
    tell: Progress,
) -> tuple[Form, ...]:
    tell(Phase("saturate", "", None, "algebra"))
    found = tuple(
        replace(form, graph=prepare(form.graph))
        for form in forms(graph, books, machine, settings.algebra, settings.least_gain)
    )
    others = [", ".join(form.rules) for form in found[1:]]
    tell(Phase("saturate", "; ".join(others) or "no better form", 1.0, "algebra"))
    return found


def _recomputing(
    found: Sequence[Form],
    feedback: Mapping[int, int],
    machine: Target,
    settings: Settings,
    tell: Progress,
) -> tuple[Form, ...]:
    """Forms that hold less memory, of the form that takes the least time."""
    tell(Phase("saturate", "", None, "recomputation"))
    made = recomputing(found[1 if len(found) > 1 else 0], feedback, machine, settings.recompute)
    words = [form.steps[-1].made.partition(": ")[2] for form in made]
    tell(Phase("saturate", "; ".join(words) or "nothing to gain", 1.0, "recomputation"))
    return made


def scheduled(form: Form, feedback: Mapping[int, int]) -> Schedule:
    flat = flatten(in_order(repeat_cheap(form.graph), feedback), feedback)
    return schedule(replace(flat, rules=form.rules, steps=form.steps))


def problem_on(
    plan: Schedule,
    shape: MeshShape,
    machine: Target,
    books: Sequence[RuleBook],
    budget: Budget,
    pins: Sequence[Pin],
    tell: Progress,
    timeline: list[Tick] | None = None,
) -> Assembled:
    """Encode and saturate for one mesh shape, and assemble what extraction chooses from.

    What the rules did is added to the `timeline`.
    """
    from .extract.assemble import assemble
    from .extract.snapshot import snapshot

    name = str(shape)
    tell(Phase("encode", f"{len(plan.program.instances)} operations", None, name))
    encoding = encode(plan.program, shape)
    tell(Phase("encode", f"{len(encoding.signatures)} signatures", 1.0, name))
    tell(Phase("saturate", "", None, name))
    found: Saturated = saturate(encoding, books, budget)
    if timeline is not None:
        timeline += found.timeline
    strategies = sum(len(s) for s in found.strategies)
    tell(Phase("saturate", f"{found.rows} rows, {strategies} strategies", 1.0, name))
    return assemble(pin(snapshot(plan, found, shape, machine), pins))


def _limits(bounds: Mapping[str, float]) -> Limits | None:
    """What the search must heed of the limits: those on what speed is exchanged for."""
    if not {"peak_bytes", "joules"} & set(bounds):
        return None
    return Limits(bounds.get("peak_bytes", math.inf), bounds.get("joules", math.inf))


def _in_turn(
    problems: Sequence[Assembled],
    limits: Limits | None,
    settings: Settings,
    executor: Executor | None,
    tell: Progress,
) -> Searched:
    """Search forms that compute values twice, then all others for what is better than those.

    The others' plans of small peaks, which take long to find, are then not looked for.
    """
    from .extract.worker import Searched, weight

    twice = [RULE in p.snapshot.schedule.program.rules for p in problems]
    weights = [
        weight(p.problem) * (_TWICE if t else 1.0) for p, t in zip(problems, twice, strict=True)
    ]
    archives = [Archive() for _ in problems]
    notes: tuple[str, ...] = ()
    for turn in (True, False):
        mine = [k for k, t in enumerate(twice) if t == turn]
        if not mine or INTERRUPTED in notes:
            continue
        rivals = np.array([c.costs for a in archives for c in a.corners()]).reshape(-1, 3)
        share = sum(weights[k] for k in mine) / sum(weights)
        own = replace(settings, seconds=settings.seconds * share)
        searched = _search([problems[k] for k in mine], limits, own, executor, tell, rivals)
        notes += searched.notes
        for k, archive in zip(mine, searched.archives, strict=True):
            archives[k] = archive
    return Searched(archives, notes)


def _search(
    problems: Sequence[Assembled],
    limits: Limits | None,
    settings: Settings,
    executor: Executor | None,
    tell: Progress,
    rivals: Floats | None = None,
) -> Searched:
    """Search all mesh shapes, side by side where processors allow."""
    from .extract.worker import search_all, so_far

    begin = time.perf_counter()

    def report(archives: Sequence[Archive]) -> None:
        spent = (time.perf_counter() - begin) / max(settings.seconds, 1e-9)
        tell(Phase("extract", so_far(archives), min(0.99, spent)))

    effort = Effort(
        settings.prices,
        settings.steps,
        seconds=settings.seconds,
        gap=settings.gap,
        seed=settings.seed,
        patience=settings.patience,
    )
    found = search_all(
        [p.problem for p in problems],
        effort,
        limits,
        report,
        settings.workers,
        executor,
        settings.seeds,
        rivals,
    )
    words = "  ".join([so_far(found.archives), *found.notes])
    tell(Phase("extract", words, 1.0))
    return found


def _for_traffic(results: Sequence[MeshResult], machine: Target) -> list[Assembled]:
    """The same rows for few bytes sent and few flops, as if launches and latencies were free."""
    from .extract.assemble import Weights, assemble

    found = []
    for result in results:
        snap = result.assembled.snapshot
        link = machine.link(snap.mesh, tuple(range(len(snap.mesh.sizes))))
        weights = Weights(
            seconds=_TIE,
            wire_bytes=1.0 / link.bytes_per_second,
            flops=_EVEN / machine.rate("bfloat16", True),
        )
        found.append(assemble(snap, weights))
    return found


def _certified(
    front: Front, schedules: Sequence[Schedule], machine: Target, limits: Mapping[str, float]
) -> Front:
    """The front without plans that the certificate refuses: none, unless something is broken.

    Warns of each one left out; raises the first refusal when no plan is left.
    """
    from .extract.certificate import certify_all

    refused: list[ExtractError] = []
    sound: list[Plan] = []
    for plan in schedules:
        own = [p for p in front.plans if p.body.graph is plan.program.bodies[0].graph]
        for p, verdict in zip(own, certify_all(own, plan, machine, limits), strict=True):
            if isinstance(verdict, ExtractError):
                refused.append(verdict)
            else:
                sound.append(p)
    if not refused:
        return front
    if not sound:
        raise refused[0]
    for error in refused:
        warnings.warn(f"a plan is left out: {error}", stacklevel=3)
    # What was left out may have been all that dominated some other plan.
    kept = tuple(p for p in front.plans if any(p is q for q in sound))
    return replace(front, plans=kept, epsilon=float("inf"))


def _split(graph: Program | BlockGraph) -> tuple[Program | None, BlockGraph]:
    from .blockgraph import BlockGraph

    if isinstance(graph, BlockGraph):
        return None, graph
    return graph, graph.graph


def _check_objectives(objectives: Sequence[str]) -> None:
    known = (*OBJECTIVES, "wire_bytes", "flops", "devices")
    for name in objectives:
        if name not in known:
            raise ExtractError(
                f"unknown objective {name!r}",
                where="objectives",
                hint=f"Objectives are {', '.join(known)}.",
            )


def _silent(_: Phase) -> None:
    return None
