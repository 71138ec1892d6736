"""What `optimize` was asked, and what the passes of the pipeline have made of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.front.notes import INTERRUPTED, Note
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.objectives import Objective, objective
from tapestry_egg.machine.target import Target
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.encode import Encoding
from tapestry_egg.shard.strategies import Saturated

from .settings import Settings
from .words import Words

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.once import JoinedUnits
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.engine.search import Search
    from tapestry_egg.extract.front.sizes import Room
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.files.search_file import SearchFile
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
    executor: Executor | None
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
