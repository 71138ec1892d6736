"""Patching: networks of all programs that the places of a form make together.

What a pass makes of every form is made here of each program that has one place computed in another
way; `extract/places/patched.py` makes one problem of these. What a search finds in it is a
labelling of a program of its own, which is made when it is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.places.axis import Names
from tapestry_egg.extract.problem.boundary import restrict
from tapestry_egg.extract.search.archive import Archive, Candidate
from tapestry_egg.graph.ids import SignatureId
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.progress import Phase
from tapestry_egg.rewrite.forms import Form
from tapestry_egg.rewrite.operand_rounding import rounded
from tapestry_egg.rewrite.patches import BodyName, Patches
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import Encoding, encode_together
from tapestry_egg.shard.strategies import Saturated, saturate
from tapestry_egg.tracing.constants import prepare

from . import omissions
from .state import Question, State

if TYPE_CHECKING:
    from tapestry_egg.extract.places.programs import Patched, Ways
    from tapestry_egg.extract.problem.assemble import PlanProblem, Weights
    from tapestry_egg.extract.problem.problem import Ints
    from tapestry_egg.extract.problem.unit_choices import UnitChoices


def join_patches(state: State) -> State:
    """For every network of a form with places that can be computed in several ways, one problem of
    all programs that these make together."""
    from tapestry_egg.extract.places.patched import patched

    q = state.question
    found: dict[int, Patched] = {}
    notes: tuple[str, ...] = ()
    programs: dict[int, Programs] = {}
    for k, (form, shape) in enumerate(state.networks):
        patches = state.forms[form].patches
        if patches is None:
            continue
        q.tell(Phase("extract", state.at(k), k / len(state.networks)))
        if form not in programs:
            programs[form] = Programs(q, state.forms[form], patches, state.schedules[form])
        own = Posed(programs[form], state.shapes[shape])
        made = patched(
            own,
            [len(place) for place in patches.places],
            Names(patches.values, programs[form].stands),
        )
        left = len(patches) if made is None else made.left
        notes += omissions.of_places(left, str(state.shapes[shape]))
        if made is not None:
            found[k] = made
            notes += omissions.of_rows(own.others) + omissions.of_sums(own.others)
    notes = tuple(dict.fromkeys((*state.notes, *notes)))
    return replace(state, patched=found, notes=notes)


class Programs:
    """The programs that the places of a form make, with their units, each made once."""

    def __init__(self, question: Question, form: Form, patches: Patches, given: Schedule) -> None:
        self.question, self.form, self.patches = question, form, patches
        self.known: dict[Ways, Schedule | None] = {(0,) * len(patches): given}
        # By identity, of units that are kept here.
        self._stands: dict[int, Mapping[BodyName, Mapping[int, int]]] = {id(given): {}}

    @property
    def single(self) -> list[Ways]:
        """The program as given, and those of which one place is computed in another way."""
        first = (0,) * len(self.patches)
        others = [
            (*first[:p], way, *first[p + 1 :])
            for p, place in enumerate(self.patches.places)
            for way in range(1, len(place))
        ]
        return [first, *others]

    def schedule(self, ways: Ways) -> Schedule | None:
        """The units of one program; None where it depends on itself."""
        if ways not in self.known:
            q, built = self.question, self.patches.built(ways)
            self.known[ways] = None
            if built is not None:
                graph = rounded(prepare(built.graph), dict(q.machine.operands))
                made = scheduled(graph, q.pairs)
                rules = tuple(sorted({*self.form.rules, *built.rules}))
                steps = (*self.form.steps, *built.steps)
                program = replace(made.program, rules=rules, steps=steps)
                self.known[ways] = found = replace(made, program=program)
                self._stands[id(found)] = built.stands
        return self.known[ways]

    def stands(self, schedule: Schedule) -> Mapping[BodyName, Mapping[int, int]]:
        """Of every body the new values of a program -> those of the one as given that they stand
        for. Raises ExtractError for units that were not made here: their new values would pass for
        values of their own."""
        if id(schedule) not in self._stands:
            raise ExtractError("units of a program that no places make", where="places")
        return self._stands[id(schedule)]


class Posed:
    """Those programs as problems on one mesh, each made once."""

    def __init__(self, programs: Programs, mesh: MeshShape, weights: Weights | None = None) -> None:
        from tapestry_egg.extract.problem.assemble import Weights

        self.programs, self.mesh, self.weights = programs, mesh, weights or Weights()
        q = programs.question
        every = [s for ways in programs.single if (s := programs.schedule(ways)) is not None]
        self.encoding = encode_together([s.program for s in every], mesh)[0]
        self.saturated = saturate(self.encoding, q.books, q.settings.budget)
        self.number: dict[OperationSignature, SignatureId] = {
            s: SignatureId(k) for k, s in enumerate(self.encoding.signatures)
        }
        self.known: dict[Ways, PlanProblem | None] = {}
        self.shared: int | None = None  # values of several readers in the program as given

    @property
    def others(self) -> list[UnitChoices]:
        """The choices of all programs but the one as given."""
        return [p.choices for ways, p in self.known.items() if any(ways) and p is not None]

    def __call__(self, ways: Ways) -> PlanProblem | None:
        """The problem of one program; None where there is no such program."""
        if ways not in self.known:
            self.known[ways] = self._made(ways)
        return self.known[ways]

    def _made(self, ways: Ways) -> PlanProblem | None:
        from tapestry_egg.extract.problem.assemble import assemble, count_shared
        from tapestry_egg.extract.problem.columns import Columns
        from tapestry_egg.extract.problem.unit_choices import unit_choices

        schedule = self.programs.schedule(ways)
        if schedule is None:
            return None
        found = self._strategies(schedule)
        if found is None:
            return None
        q = self.programs.question
        fixed = q.words.fixed
        choices = restrict(
            unit_choices(schedule, found, self.mesh, q.machine, fixed.contract), fixed
        )
        if self.shared is None:
            self.shared = count_shared(Columns(choices))
        return assemble(choices, self.weights, shared=self.shared)

    def _strategies(self, schedule: Schedule) -> Saturated | None:
        """What the rules derived, of the operations of one program; None where it has others."""
        instances = schedule.program.instances
        if any(i.signature not in self.number for i in instances):
            return None
        own = tuple([self.number[i.signature] for i in instances])
        encoding: Encoding = replace(self.encoding, program=schedule.program, signature_of=own)
        return replace(self.saturated, encoding=encoding)


def whole(problems: Sequence[PlanProblem], patched: Mapping[int, Patched]) -> list[PlanProblem]:
    """The problems to search: of all programs, where places of one make several."""
    return [
        replace(p, problem=patched[k].problem) if k in patched else p
        for k, p in enumerate(problems)
    ]


def of_programs(
    problems: Sequence[PlanProblem], archives: Sequence[Archive], patched: Mapping[int, Patched]
) -> tuple[list[NetworkResult], list[NetworkResult], tuple[str, ...]]:
    """What searches of such problems found, as results of the programs as given, one for each, and
    of the others. All have the bounds that hold for all.

    A labelling that is none of its own program, or costs something else there, is left out and told
    in the notes.
    """
    given: list[NetworkResult] = []
    others: list[NetworkResult] = []
    wrong: list[ExtractError] = []
    for k, (problem, archive) in enumerate(zip(problems, archives, strict=True)):
        if k not in patched:
            given.append(NetworkResult(problem, archive))
            continue
        by_program: dict[Ways, tuple[PlanProblem, list[Candidate]]] = {}
        nothing = (0,) * patched[k].places
        as_given = patched[k].pose(nothing)
        assert as_given is not None, "it was searched"
        by_program[nothing] = as_given, []
        for c in archive.candidates:
            try:
                posed, rows = patched[k].own(c.rows)
                own = _own(posed, c, rows)
            except ExtractError as e:
                wrong.append(e)
                continue
            by_program.setdefault(patched[k].ways(c.rows), (posed, []))[1].append(own)
        for ways, (posed, found) in by_program.items():
            result = NetworkResult(posed, replace(archive, candidates=found))
            (others if any(ways) else given).append(result)
    return given, others, omissions.of_wrong_programs(wrong)


def _own(posed: PlanProblem, found: Candidate, rows: Ints) -> Candidate:
    """A labelling as one of its own program. Raises ExtractError where it costs something else."""
    seconds, joules, profile = posed.problem.evaluate(rows)
    costs = seconds, float(profile.max(initial=0.0)), joules
    if not np.allclose(costs, found.costs, rtol=1e-9, atol=0.0):
        raise ExtractError(
            f"all programs together say {found.costs}, this one {costs}",
            where=", ".join(posed.choices.schedule.program.rules),
        )
    return Candidate(rows, *costs)
