"""What `optimize` was asked, and what the passes of the pipeline have made of it so far."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.merge import NetworkResult
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
    from tapestry_egg.extract.choices.once import JoinedUnits, Once
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.front.sizes import Room
    from tapestry_egg.extract.places.programs import Patched
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.files.search_file import SearchFile
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

    @property
    def by_devices(self) -> bool:
        """Whether plans are compared by how many devices they have, or by what those cost."""
        return any(objective(k).by_devices for k in self.objectives)

    def tell_part(self, phase: Phase) -> None:
        """Tell of the progress of what is only a part of a pass, as the search that it is for."""
        self.tell(replace(phase, phase="extract", fraction=min(phase.fraction or 0.0, 0.99)))

    @property
    def long(self) -> bool:
        """Whether the program is too long for one that is wanted soon (`LONG`)."""
        return not self.settings.front and self.graph.size > LONG


# Where only one plan is wanted soon, programs of more operations are planned as they are given, on
# meshes of one axis: the rules alone would take minutes on them.
LONG = 2500


@dataclass(frozen=True)
class Begun:
    """What was made of some networks, for all others to take from: units that were joined, arrays
    of problems and the room that there is for more, and what the rules derived of the one that was
    looked at first."""

    joined: JoinedUnits
    room: Room
    strategies: tuple[Saturated, ...] = ()

    @property
    def once(self) -> Once:
        return self.room.once


@dataclass(frozen=True)
class State:
    """A question, and what each pass has added; a pass reads what those before it made.

    Tuples from `encodings` on hold one entry for each of the `networks`.
    """

    question: Question
    shapes: tuple[MeshShape, ...] = ()
    forms: tuple[Form, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    begun: Begun | None = None  # until all problems are posed
    encodings: tuple[Encoding, ...] = ()
    strategies: tuple[Saturated, ...] = ()
    choices: tuple[UnitChoices, ...] = ()
    free: tuple[UnitChoices, ...] = ()  # of the first form, without what a named mesh asks
    problems: tuple[PlanProblem, ...] = ()
    # By the number of a network: the problem of all programs that places of its form make.
    patched: Mapping[int, Patched] = field(default_factory=dict)
    # By the number of a network: the problem of a program that computes values again for some of
    # their readers.
    second: tuple[tuple[int, PlanProblem], ...] = ()
    results: tuple[NetworkResult, ...] = ()  # until all are searched those of a first look
    # What was found of such programs other than the forms, none without a labelling.
    of_places: tuple[NetworkResult, ...] = ()
    front: Front | None = None
    interrupted: bool = False
    finer: int = 0  # so many of the shapes, the last, have more axes than was asked for
    finer_form: int = 0  # the form that is searched on those
    too_large: frozenset[tuple[int, int]] = frozenset()  # forms and shapes that are no networks
    timeline: tuple[Tick, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def networks(self) -> tuple[tuple[int, int], ...]:
        """The forms and shapes, by their places, that are searched together: those of the first
        form on all shapes, then those of the second; one form only on shapes of more axes than was
        asked for, and none of which the tables would be too large."""
        shapes, asked = range(len(self.shapes)), len(self.shapes) - self.finer
        return tuple(
            (f, s)
            for f in range(len(self.forms))
            for s in shapes
            if (s < asked or f == self.finer_form) and (f, s) not in self.too_large
        )

    @property
    def every_result(self) -> tuple[NetworkResult, ...]:
        """What was found of all programs."""
        return (*self.results, *self.of_places)

    @property
    def first(self) -> int:
        """How many networks are of the first form: those numbered below it."""
        return sum(form == 0 for form, _ in self.networks)

    @property
    def raced(self) -> tuple[int, ...]:
        """The networks that are searched only if they may hold something better than others: of
        forms that one device would not choose, of fewer devices where those are no aim, and of
        more axes than was asked for."""
        most = max(shape.devices for shape in self.shapes)
        fewer = [not self.question.by_devices and shape.devices < most for shape in self.shapes]
        return tuple(
            k
            for k, (f, s) in enumerate(self.networks)
            if self.forms[f].extra or fewer[s] or s >= len(self.shapes) - self.finer
        )

    def number(self, result: NetworkResult) -> int:
        """The number of the network that a result is of."""
        choices = result.assembled.choices
        forms = [id(s) for s in self.schedules]
        place = forms.index(id(choices.schedule)), self.shapes.index(choices.mesh)
        return self.networks.index(place)

    def alone(self, form: int, shapes: tuple[MeshShape, ...]) -> State:
        """One form on some shapes, as a state whose passes are a part of one."""
        return replace(
            self,
            question=replace(self.question, tell=self.question.tell_part),
            shapes=shapes,
            forms=(self.forms[form],),
            schedules=(self.schedules[form],),
            notes=(),
            results=(),
            too_large=frozenset(),
        )

    def at(self, k: int) -> str:
        """Which form on which shape entry k is of: `2x×4y form 2`."""
        form, shape = self.networks[k]
        return f"{self.shapes[shape]}{f' form {form + 1}' if form else ''}"
