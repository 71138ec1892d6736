"""The pipeline: trace, encode, saturate, extract; lowering and running take plans from there."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.collector import rarely_collected
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.contract_cost import contract_cost
from tapestry_egg.extract.front.front import Front as Front
from tapestry_egg.extract.front.merge import MeshResult, best_given, merge, original_plan
from tapestry_egg.extract.problem.pins import Pins
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.plans.plan import Origin
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.quantities import parse_quantity
from tapestry_egg.rules.language.book import (
    DEFAULT_BOOKS,
    RuleBook,
    is_shipped,
    load_books,
    permitted,
)
from tapestry_egg.rules.verify.trust import ensure_verified
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.kernels import Schedule
from tapestry_egg.tracing.arguments import (
    check_books,
    check_graph,
    check_limits,
    check_meshes,
    check_objectives,
)

from . import omissions
from .problems import LONG, pose
from .searches import ended_by_clock, for_traffic, search, search_in_turn, search_limits
from .settings import Settings as Settings
from .words import read_words

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.tracing.trace import Program

OBJECTIVES = ("seconds", "peak_bytes", "joules")


@rarely_collected()
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
    mesh: Any = None,
    pins: Pins | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    settings: Settings | None = None,
    executor: Executor | None = None,
    on_progress: Progress | None = None,
) -> Front:
    """The Pareto front of ways to run a traced program on a target (`"h100:8"`).

    Plans trade `objectives` off against each other; `limits` (`{"peak_bytes": "40GiB"}`) exclude
    plans above them. Plans above the usable memory of a device are marked, and `best` takes none
    unless a limit on `peak_bytes` allows it. `rules` adds rule books to those of `books`. `state`
    pairs outputs with the inputs that they become in the next call, by path or prefix; donated
    inputs pair by themselves. `pins` fixes the layouts of inputs by path or prefix (`{"[0]['w']":
    (None, "x")}`, see `extract/problem/pins.py`), and so those of the outputs that feed back to
    them; `in_shardings` and `out_shardings` do so as in `jax.jit`, and the program's own
    constraints hold inside. Rules that change rounding are used only with `numerics="relaxed"`.
    Every rule is verified before it is used.
    `mesh` (a JAX mesh or a `MeshShape`) is a contract: what crosses the boundary is laid out by its
    axes, and inside plans may divide them. Without it, shardings or constraints that name one mesh
    do. Without any, or with `mesh_shapes`, meshes are the plan's own affair.
    Mesh shapes (default: all of the target's that differ in more than the names of their axes) are
    searched side by side by `executor` (default: processes of this machine; a Dask cluster's
    `Client.get_executor()` will do). An interruption (Ctrl-C) of the search ends it, and
    the front holds what was found until then; its `notes` say so.
    Raises TargetError, RuleError (RuleRefused for a rule that is not true), GraphError, and
    ExtractError when no plan meets the limits.
    """
    check_graph(graph, "optimize")
    check_objectives(objectives)
    check_limits(limits)
    check_meshes(mesh_shapes)
    check_books(rules)
    settings = settings or Settings()
    tell = on_progress or _silent
    machine = target if isinstance(target, Target) else load_target(target)
    bounds = {k: parse_quantity(v, k) for k, v in (limits or {}).items()}
    program, block_graph = _split(graph)
    sets = permitted(load_books((*books, *rules)), numerics)
    ensure_verified(sets, executor)
    words = read_words(
        program or block_graph,
        machine,
        mesh,
        pins,
        in_shardings,
        out_shardings,
        mesh_shapes,
        settings.max_axes,
    )
    pairs = words.pairs(feedback_pairs(block_graph, state))
    shapes, fixed = words.shapes, words.fixed
    left: tuple[str, ...] = ()
    # Names of axes mean something in pins; a named mesh is divided without a loss.
    named = words.said and fixed.contract is None
    if not settings.front and mesh_shapes is None and not named:
        shapes, left = _quickly(shapes, block_graph)
    posed = pose(block_graph, pairs, machine, shapes, sets, fixed, settings, tell)
    heeded = dict(bounds)
    if machine.usable_bytes is not None:
        heeded.setdefault("peak_bytes", float(machine.usable_bytes))
    wanted = search_limits(heeded)
    searched = search_in_turn(posed.problems, wanted, settings, executor, tell)
    notes = words.notes + left + posed.notes + searched.notes
    notes += ended_by_clock(settings, searched.archives) + omissions.of_opaque(block_graph)
    if mesh_shapes is None and fixed.contract is None:
        notes += omissions.of_meshes(machine, settings.max_axes)
    if not settings.front:
        notes += ("only the fastest plan within the limits was looked for",)
    results = [MeshResult(p, a) for p, a in zip(posed.problems, searched.archives, strict=True)]
    if {"wire_bytes", "flops"} & {*objectives, *bounds} and not searched.interrupted:
        again = search(for_traffic(posed.problems, machine), wanted, settings, executor, tell)
        notes += again.notes + ended_by_clock(settings, again.archives)
        results = [r.with_candidates(a) for r, a in zip(results, again.archives, strict=True)]
    # What the user's own shardings lead to is a plan like any other.
    given = best_given(results[: len(shapes)]) if words.said else None
    front = merge(results, objectives, bounds, machine.spec, block_graph.name)
    front = replace(front, original=original_plan(results, given))
    front = _certified(front, posed.plans, machine, bounds)
    if fixed.contract is not None and settings.front and not searched.interrupted:
        archives = [r.archive for r in results[: len(shapes)]]
        cost = contract_cost(posed.free, archives, fixed.contract)
        notes += (cost,) if cost else ()
    return replace(
        front,
        plans=tuple(
            replace(p, program=program, origin=_origin(p, machine, pairs, sets))
            for p in front.plans
        ),
        original=front.original
        and replace(
            front.original,
            program=program,
            origin=_origin(front.original, machine, pairs, sets),
        ),
        saturated=front.saturated and posed.saturated,
        notes=tuple(dict.fromkeys(notes)),
        timeline=posed.timeline,
        usable_bytes=machine.usable_bytes,
    )


def _certified(
    front: Front, schedules: Sequence[Schedule], machine: Target, limits: Mapping[str, float]
) -> Front:
    """The front without plans that the certificate refuses: none, unless something is broken.

    Warns of each one left out; raises the first refusal when no plan is left.
    """
    from tapestry_egg.extract.certify.certificate import certify_all

    refused: list[ExtractError] = []
    sound: list[Plan] = []
    if front.original is not None:
        which = next(p for p in schedules if p.program.bodies[0].graph is front.original.graph)
        (verdict,) = certify_all([front.original], which, machine)
        if isinstance(verdict, ExtractError):
            warnings.warn(f"a plan is left out: {verdict}", stacklevel=3)
            front = replace(front, original=None)
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


def _origin(
    plan: Plan, machine: Target, feedback: Mapping[int, int], books: Sequence[RuleBook]
) -> Origin:
    own = [
        str(Path(b.path).resolve())
        for b in books
        if not is_shipped(b) and any(r.name in plan.rules for r in b.rules)
    ]
    return Origin(machine, tuple(sorted(feedback.items())), tuple(own))


def _quickly(
    shapes: Sequence[MeshShape], graph: BlockGraph
) -> tuple[tuple[MeshShape, ...], tuple[str, ...]]:
    """The mesh shapes to search where time is short, and what a front says of the others.

    A mesh of one axis has no layouts that one of two axes on the same devices lacks, nor has the
    user's own mesh any that those lack that divide its axes. Very long
    programs are searched on few axes only.
    """
    axes = [len(shape.sizes) for shape in shapes]
    if graph.size <= LONG:
        return tuple([s for s, n in zip(shapes, axes, strict=True) if n == max(axes)]), ()
    few = tuple([s for s, n in zip(shapes, axes, strict=True) if n == min(axes)])
    if len(few) == len(shapes):
        return few, ()
    words = f"{graph.size} operations: only meshes of {min(axes)} axis were searched"
    return few, (words,)


def _split(graph: Program | BlockGraph) -> tuple[Program, BlockGraph]:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.tracing.trace import Program

    if isinstance(graph, BlockGraph):
        return Program.of(graph), graph
    return graph, graph.graph


def _silent(_: Phase) -> None:
    return None
