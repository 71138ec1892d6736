"""What `optimize` was asked, and what the passes of the pipeline have made of it so far."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapestry_egg.atomic import check_writable
from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.front.notes import INTERRUPTED, Note
from tapestry_egg.extract.pins.pins import Pins
from tapestry_egg.extract.pins.value_pins import constrained, split_pins
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import (
    DEVICES,
    DOLLARS,
    JOULES,
    OBJECTIVES_BY_NAME,
    PEAK_BYTES,
    Objective,
    amounts,
    objective,
)
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.machine.topology import even_parts, parts
from tapestry_egg.plans.plan import Plan
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rules.language.book import RuleBook, load_books, permitted
from tapestry_egg.rules.verify.trust import ensure_verified
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.encode import Encoding
from tapestry_egg.shard.strategies import Saturated
from tapestry_egg.tracing.arguments import (
    check_books,
    check_graph,
    check_limits,
    check_meshes,
    check_objectives,
    check_pins,
    check_settings,
    check_state,
    check_target,
)

from .settings import Settings
from .words import Words, read_words

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.once import JoinedUnits
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.engine.search import Search
    from tapestry_egg.extract.front.sizes import Room
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.files.search_file import SearchFile
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.tracing.trace import Program


@dataclass(frozen=True)
class Question:
    """What is asked: the arguments of `optimize`, read and checked."""

    graph: BlockGraph
    program: Program  # the graph, and the pytrees that its user calls it by
    machine: Target
    objectives: tuple[str | Objective, ...]
    limits: Mapping[str, float]  # base units
    books: tuple[RuleBook, ...]  # permitted, and verified
    words: Words  # shardings, constraints and the mesh, as pins
    pairs: Mapping[int, int]  # output -> the input that it becomes in the next call
    settings: Settings
    tell: Progress
    named_shapes: bool = False  # whether the caller chose the mesh shapes
    unsearched_parts: tuple[int, ...] = ()  # numbers of devices that are not searched
    kept: SearchFile | None = None  # what earlier searches found, and this one finds
    like: Plan | None = None  # of the same program with other sizes: its mesh and rules are taken
    further: bool = False  # whether the first search for one plan found none within the limits

    @property
    def by_devices(self) -> bool:
        """Whether plans are compared by how many devices they have, or by what those cost."""
        return any(objective(k).by_devices for k in self.objectives)

    @property
    def wide(self) -> bool:
        """Whether all forms and meshes are searched, not those alone that lead to one plan soon."""
        return self.settings.front or self.further

    @property
    def long(self) -> bool:
        """Whether the program is too long for one plan that is wanted soon (`LONG`)."""
        return not self.wide and self.graph.size > LONG


# Where only one plan is wanted soon, programs of more operations are planned as they are given, on
# meshes of one axis: the rules alone would take minutes on them.
LONG = 2500


@dataclass(frozen=True)
class Network:
    """One form of the program on one mesh, and what the passes have made of it so far."""

    number: int  # of the form, by its place
    form: Form
    schedule: Schedule
    mesh: MeshShape
    encoding: Encoding | None = None
    strategies: Saturated | None = None
    choices: UnitChoices | None = None
    free: UnitChoices | None = None  # without what a named mesh asks, where there is one
    problem: PlanProblem | None = None
    search: Search | None = None
    covered: bool = False  # whether another network has all its plans

    def __str__(self) -> str:
        return f"{self.mesh}{f' form {self.number + 1}' if self.number else ''}"

    @property
    def result(self) -> NetworkResult:
        """What its search has found."""
        assert self.problem is not None and self.search is not None, "it was searched"
        return NetworkResult(self.problem, self.search.archive, self.covered)


@dataclass(frozen=True)
class Shared:
    """What networks take from each other: units that were joined, and the room that there is for
    tables of which equal ones are made once."""

    joined: JoinedUnits
    room: Room


@dataclass(frozen=True)
class State:
    """A question, and what each pass has added; a pass reads what those before it made."""

    question: Question
    shapes: tuple[MeshShape, ...] = ()
    scheduled: tuple[tuple[Form, Schedule], ...] = ()  # each form, and its units in order
    networks: tuple[Network, ...] = ()
    left: tuple[Network, ...] = ()  # not made, because others were worth more
    shared: Shared | None = None
    front: Front | None = None
    timeline: tuple[Tick, ...] = ()
    notes: tuple[Note, ...] = ()

    @property
    def interrupted(self) -> bool:
        return INTERRUPTED in self.notes

    # What forms and networks hold, entry by entry.

    @property
    def forms(self) -> tuple[Form, ...]:
        return tuple([form for form, _ in self.scheduled])

    @property
    def schedules(self) -> tuple[Schedule, ...]:
        return tuple([schedule for _, schedule in self.scheduled])

    @property
    def encodings(self) -> tuple[Encoding, ...]:
        return tuple([n.encoding for n in self.networks if n.encoding is not None])

    @property
    def strategies(self) -> tuple[Saturated, ...]:
        return tuple([n.strategies for n in self.networks if n.strategies is not None])

    @property
    def choices(self) -> tuple[UnitChoices, ...]:
        return tuple([n.choices for n in self.networks if n.choices is not None])

    @property
    def problems(self) -> tuple[PlanProblem, ...]:
        return tuple([n.problem for n in self.networks if n.problem is not None])

    @property
    def results(self) -> tuple[NetworkResult, ...]:
        return tuple([n.result for n in self.networks if n.search is not None])

    def saying(self, *notes: Note) -> State:
        """The state with more to be said of what was left out, each once."""
        return replace(self, notes=tuple(dict.fromkeys((*self.notes, *notes))))

    def tell(self, phase: Phase) -> None:
        self.question.tell(phase)


# The question: the arguments of `optimize`, checked, and read into what the passes work on.


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
    tell: Progress | None = None,
    price: float | None = None,
    idle: str | None = None,
    resume: str | Path | None = None,
    like: Plan | None = None,
) -> Question:
    """What `optimize` is asked. Raises TargetError, RuleError, GraphError and ExtractError for what
    does not fit; every rule is verified before it is used."""
    check_graph(graph, "optimize")
    check_objectives(objectives)
    check_limits(limits)
    check_target(target)
    check_state(state)
    check_pins(pins)
    check_meshes(mesh_shapes)
    check_books(books)
    check_settings(settings)
    if like is not None and not isinstance(like, Plan):
        raise ExtractError(
            f"{like!r:.40} is no plan", where="like", hint="Give one of a front: front.best()."
        )
    machine = target if isinstance(target, Target) else load_target(target)
    if price is not None:
        machine = machine.at_price(price)
    machine = replace(machine, overlaps=settings.overlap)
    if idle is not None:
        machine = replace(machine, idle_counted=_idle_counted(idle))
    bounds = amounts(limits)
    if machine.usable_bytes is not None:  # whatever is asked for, a plan is to run
        bounds.setdefault(PEAK_BYTES.name, float(machine.usable_bytes))
    _check_price(machine, (*objectives, *bounds))
    wanted = tuple(k if k in OBJECTIVES_BY_NAME else objective(k) for k in objectives)
    counts, omitted = _devices(machine, wanted, bounds, settings.front)
    program, block_graph = _split(graph)
    split = split_pins(block_graph, pins)
    if split.inside:
        block_graph = constrained(block_graph, split.inside)
        program = replace(program, graph=block_graph)
    sets = permitted(load_books(books), numerics)
    ensure_verified(sets)
    words = read_words(
        program,
        machine,
        mesh,
        split.inputs,
        in_shardings,
        out_shardings,
        mesh_shapes,
        settings.first_axes,
        counts,
        [p.pin for p in split.inside],
        split.results,
    )
    return Question(
        graph=block_graph,
        program=program,
        machine=machine,
        objectives=wanted,
        limits=bounds,
        books=tuple(sets),
        words=words,
        pairs=words.pairs(feedback_pairs(block_graph, {**program.state, **(state or {})})),
        settings=settings,
        tell=tell or _silent,
        named_shapes=mesh_shapes is not None,
        kept=None if resume is None else _kept(resume),
        like=like,
        unsearched_parts=omitted if words.fixed.contract is None and not mesh_shapes else (),
    )


def _kept(resume: str | Path) -> SearchFile:
    from tapestry_egg.files.search_file import SearchFile  # most searches are not kept

    check_writable(resume)
    return SearchFile.open(resume)


def _idle_counted(idle: str) -> bool:
    if idle not in ("free", "counted"):
        raise ExtractError(
            f"{idle!r:.40} is neither free nor counted",
            where="idle",
            hint="Devices that a plan leaves unused draw nothing, or what idle ones draw.",
        )
    return idle == "counted"


def _devices(
    machine: Target,
    objectives: Sequence[str | Objective],
    limits: Mapping[str, float],
    front: bool,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The numbers of devices that plans may have, falling, and those of parts that are left out.

    All of the machine's, unless fewer are better in an objective or asked for by a limit. Without
    energy or the number itself among the objectives, and where only the fastest plan is wanted,
    devices whose number divides another are no better than that: what runs on them runs on more as
    fast, and as small, several times over. Raises ExtractError where no part is small enough.
    """
    most = int(min(limits.get(DEVICES.name, math.inf), machine.devices))
    asked = [objective(k) for k in (*objectives, *limits) if k != DEVICES.name or k in objectives]
    if most < 1:
        raise ExtractError("no plan has less than one device", where="limits")
    if most == machine.devices and not any(o.by_devices for o in asked):
        return (most,), ()
    found = even_parts(machine.shape, most)
    fewer = any(o.by_devices or o == JOULES or o.finder == "plan" for o in asked)
    if not front or not fewer:
        return tuple(n for n in found if not any(m > n and m % n == 0 for m in found)), ()
    return found, tuple(n for n in parts(machine.shape, most) if n not in found)


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
