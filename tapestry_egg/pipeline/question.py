"""The question: the arguments of `optimize`, checked, and read into what the passes work on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TargetError
from tapestry_egg.extract.problem.pins import Pins
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import (
    DOLLARS,
    OBJECTIVES_BY_NAME,
    Objective,
    amounts,
    objective,
)
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.rules.language.book import RuleBook, load_books, permitted
from tapestry_egg.rules.verify.trust import ensure_verified
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.tracing.arguments import (
    check_books,
    check_graph,
    check_limits,
    check_meshes,
    check_objectives,
)

from .settings import Settings
from .state import Question
from .words import read_words

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.tracing.trace import Program


def read_question(
    graph: Program | BlockGraph,
    target: str | Path | Target,
    objectives: Sequence[str | Objective],
    *,
    limits: Mapping[str, float | str] | None = None,
    books: Sequence[str | Path | RuleBook],
    state: Mapping[str, str] | None = None,
    numerics: str = "reorders",
    mesh_shapes: Sequence[MeshShape] | None = None,
    mesh: Any = None,
    pins: Pins | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    settings: Settings,
    executor: Executor | None = None,
    tell: Progress | None = None,
    price: float | None = None,
) -> Question:
    """What `optimize` is asked. Raises TargetError, RuleError, GraphError and ExtractError for what
    does not fit; every rule is verified before it is used."""
    check_graph(graph, "optimize")
    check_objectives(objectives)
    check_limits(limits)
    check_meshes(mesh_shapes)
    check_books(books)
    machine = target if isinstance(target, Target) else load_target(target)
    if price is not None:
        machine = machine.at_price(price)
    machine = replace(machine, overlaps=settings.overlap)
    bounds = amounts(limits)
    _check_price(machine, (*objectives, *bounds))
    program, block_graph = _split(graph)
    sets = permitted(load_books(books), numerics)
    ensure_verified(sets, executor)
    words = read_words(
        program,
        machine,
        mesh,
        pins,
        in_shardings,
        out_shardings,
        mesh_shapes,
        settings.max_axes,
    )
    return Question(
        graph=block_graph,
        program=program,
        machine=machine,
        objectives=tuple(k if k in OBJECTIVES_BY_NAME else objective(k) for k in objectives),
        limits=bounds,
        books=tuple(sets),
        words=words,
        pairs=words.pairs(feedback_pairs(block_graph, state)),
        settings=settings,
        executor=executor,
        tell=tell or _silent,
        named_shapes=mesh_shapes is not None,
    )


def _check_price(machine: Target, asked: Sequence[str | Objective]) -> None:
    """Raise TargetError where dollars are asked for of a machine without a price."""
    if machine.price is None and DOLLARS.name in asked:
        raise TargetError(
            f"nothing is known of the price of {machine.name}",
            hint="Give dollars per device and hour: price=2.5, or --price 2.5.",
        )


def _split(graph: Program | BlockGraph) -> tuple[Program, BlockGraph]:
    from tapestry_egg.tracing.trace import Program

    program = graph if isinstance(graph, Program) else Program.of(graph)
    return program, program.graph


def _silent(_: Phase) -> None:
    return None
