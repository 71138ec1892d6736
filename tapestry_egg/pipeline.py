"""The pipeline: trace, encode, saturate, extract; lowering and running take the plans from there."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .encode import encode
from .errors import ExtractError
from .extract.front import Front as Front
from .extract.merge import MeshResult, merge
from .extract.search import Archive, Effort
from .flatten import FlatProgram, feedback_pairs, flatten
from .layout import MeshShape
from .progress import Phase, Progress
from .rules.book import DEFAULT_BOOKS, RuleBook, load_books
from .saturate import Budget, Saturated, saturate
from .schedule import Schedule, repeat_cheap, schedule
from .target import Target, load_target
from .units import parse_quantity

if TYPE_CHECKING:
    from .extract.assemble import Assembled
    from .blockgraph import BlockGraph
    from .trace import Program

# When bytes and flops are objectives: seconds break ties, and flops weigh more than what their
# arithmetic takes, so that work is divided evenly before bytes are saved.
_TIE = 0.02
_EVEN = 20.0
OBJECTIVES = ("seconds", "peak_bytes", "joules")


@dataclass(frozen=True)
class Settings:
    """How hard to work: `seconds` of search over all mesh shapes, rule budget, mesh axes at most."""

    seconds: float = 45.0
    limits: int = 10
    steps: int = 4
    max_axes: int = 2
    budget: Budget = Budget()


def optimize(
    graph: Program | BlockGraph,
    target: str | Path | Target,
    objectives: Sequence[str] = OBJECTIVES,
    *,
    limits: Mapping[str, float | str] | None = None,
    rules: Sequence[str | Path | RuleBook] = (),
    books: Sequence[str | Path | RuleBook] = DEFAULT_BOOKS,
    state: Mapping[str, str] | None = None,
    mesh_shapes: Sequence[MeshShape] | None = None,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Front:
    """The Pareto front of ways to run a traced program on a target (`"h100:8"`).

    Plans trade `objectives` off against each other; `limits` (`{"peak_bytes": "40GiB"}`) exclude
    plans above them. `rules` adds rule books to those of `books`. `state` pairs outputs with the
    inputs that they become in the next call, by path; donated inputs pair by themselves.
    Raises TargetError, RuleError, GraphError, and ExtractError when no plan meets the limits.
    """
    settings = settings or Settings()
    tell = on_progress or _silent
    machine = target if isinstance(target, Target) else load_target(target)
    bounds = {k: parse_quantity(v, k) for k, v in (limits or {}).items()}
    _check_objectives(objectives)
    program, block_graph = _split(graph)
    sets = load_books((*books, *rules))
    flat = flatten(repeat_cheap(block_graph), feedback_pairs(block_graph, state))
    plan = schedule(flat)
    shapes = tuple(mesh_shapes or machine.mesh_shapes(settings.max_axes))
    problems = [_problem(flat, plan, shape, machine, sets, settings.budget, tell) for shape in shapes]
    archives = _search(problems, bounds.get("peak_bytes"), settings, tell)
    results = [MeshResult(p, a) for p, a in zip(problems, archives, strict=True)]
    if {"wire_bytes", "flops"} & set(objectives):
        results = _for_traffic(results, machine, bounds.get("peak_bytes"), settings, tell)
    front = merge(results, objectives, bounds, machine.spec, block_graph.name)
    front = _certified(front, plan, machine, bounds)
    return replace(front, plans=tuple(replace(p, program=program) for p in front.plans))


def _problem(
    flat: FlatProgram,
    plan: Schedule,
    shape: MeshShape,
    machine: Target,
    books: Sequence[RuleBook],
    budget: Budget,
    tell: Progress,
) -> Assembled:
    """Encode and saturate for one mesh shape, and assemble what extraction chooses from."""
    from .extract.assemble import assemble
    from .extract.snapshot import snapshot

    name = str(shape)
    tell(Phase("encode", f"{len(flat.instances)} operations", None, name))
    encoding = encode(flat, shape)
    tell(Phase("encode", f"{len(encoding.signatures)} signatures", 1.0, name))
    tell(Phase("saturate", "", None, name))
    found: Saturated = saturate(encoding, books, budget)
    strategies = sum(len(s) for s in found.strategies)
    tell(Phase("saturate", f"{found.rows} rows, {strategies} strategies", 1.0, name))
    return assemble(snapshot(plan, found, shape, machine))


def _search(
    problems: Sequence[Assembled], peak: float | None, settings: Settings, tell: Progress
) -> list[Archive]:
    """Search all mesh shapes, side by side where processors allow."""
    from .extract.worker import search_all

    begin = time.perf_counter()
    workers = max(1, min(len(problems), os.cpu_count() or 1))
    each = settings.seconds * workers / max(len(problems), 1)
    words: dict[int, str] = {}

    def report(k: int, text: str) -> None:
        words[k] = f"{problems[k].snapshot.mesh} {text}"
        spent = (time.perf_counter() - begin) / max(settings.seconds, 1e-9)
        tell(Phase("extract", "; ".join(words[i] for i in sorted(words)), min(0.99, spent)))

    effort = Effort(settings.limits, settings.steps, seconds=each)
    archives = search_all([p.problem for p in problems], effort, peak, report, workers)
    tell(Phase("extract", f"{sum(len(a.candidates) for a in archives)} plans", 1.0))
    return archives


def _for_traffic(
    results: Sequence[MeshResult],
    machine: Target,
    peak: float | None,
    settings: Settings,
    tell: Progress,
) -> list[MeshResult]:
    """Search again for few bytes sent and few flops, as if launches and latencies were free."""
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
    archives = _search(found, peak, settings, tell)
    return [r.with_candidates(a) for r, a in zip(results, archives, strict=True)]


def _certified(
    front: Front, plan: Schedule, machine: Target, limits: Mapping[str, float]
) -> Front:
    """The front without plans that the certificate refuses: none, unless something is broken.

    Warns of each one left out; raises the first refusal when no plan is left.
    """
    from .extract.certificate import certify_all

    found = certify_all(front.plans, plan, machine, limits)
    refused = [e for e in found if isinstance(e, ExtractError)]
    if not refused:
        return front
    sound = [p for p, c in zip(front.plans, found, strict=True) if not isinstance(c, ExtractError)]
    if not sound:
        raise refused[0]
    for error in refused:
        warnings.warn(f"a plan is left out: {error}", stacklevel=3)
    # What was left out may have been all that dominated some other plan.
    return replace(front, plans=tuple(sound), epsilon=float("inf"))


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
                f"unknown objective {name!r}", where="objectives",
                hint=f"Objectives are {', '.join(known)}.",
            )


def _silent(_: Phase) -> None:
    return None
