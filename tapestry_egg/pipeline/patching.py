"""Patching: networks of all programs that the places of a form make together.

What a pass makes of every form is made here of each program that has one place computed in another
way; `extract/places/patched.py` makes one problem of these. What a search finds in it is a
labelling of a program of its own, which is made when it is found.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.pins.boundary import restrict
from tapestry_egg.extract.places.axis import Names
from tapestry_egg.extract.search.archive import Archive, Candidate
from tapestry_egg.graph.ids import SignatureId
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.plan import RuleStep, is_split
from tapestry_egg.progress import Phase
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.operand_rounding import rounded
from tapestry_egg.rewrite.patches import BodyName, Patches
from tapestry_egg.rewrite.recomputation.second_places import SecondPlaces, second_places
from tapestry_egg.rewrite.recompute import RULE, second_step
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import Encoding, encode_together
from tapestry_egg.shard.strategies import Saturated, saturate
from tapestry_egg.tracing.constants import prepare

from . import omissions
from .state import Question, State

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.places.programs import Patched, Ways
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.extract.problem.kept import Keeping
    from tapestry_egg.extract.problem.problem import Ints


#: So many programs that compute values again are searched of a form at most, each on its own; and
#: so many that places make, and of which nothing was found, are asked what they take at least
#: however collectives are merged. No measurement of the number is kept.
FEW = 24
#: Columns of all networks of a form together times its ways, as far as a search copes with them:
#: with 7.5 million in the place of 1.7 a step of two Llama layers has 7 plans with gaps of up to
#: 31 %, where it has 11 with gaps of 1 % (`benchmarks.bench_llama two`, a work of 40). Of Llama-8B
#: 7.8 million, three ways on six mesh shapes, lead to the plans that there are without, and take
#: 6 s of a processor.
COLUMNS_OF_WAYS = 2_000_000


def join_patches(state: State) -> State:
    """For every network of a form with places that can be computed in several ways one problem of
    all programs that these make together; for one of a form that may compute values again, and has
    no such places, the problem of every program that does, if these are few."""
    from tapestry_egg.extract.places.patched import patched

    q = state.question
    found: dict[int, Patched] = {}
    second: list[tuple[int, PlanProblem]] = []
    state, fewer = with_fewer_ways(state)
    every = second_instances(state)
    notes = omissions.of_second_places([*every.values()]) + omissions.of_ways(fewer)
    again = {k: own for k, own in every.items() if own.places}
    programs: dict[int, Programs] = {}
    for k, (form, shape) in enumerate(state.networks):
        patches = state.forms[form].patches
        if patches is None and form not in again:
            continue
        q.tell(Phase("extract", state.at(k), k / len(state.networks)))
        if form not in programs:
            programs[form] = Programs(
                q, state.forms[form], patches, state.schedules[form], again.get(form)
            )
        own = Posed(programs[form], state.shapes[shape], state=state)
        counts = programs[form].counts
        if patches is None and prod(counts) <= FEW:
            others = [ways for ways in product(*map(range, counts)) if any(ways)]
            second += [(k, posed) for ways in others if (posed := own(ways)) is not None]
        else:
            made = patched(own, counts, Names(programs[form].values, programs[form].stands))
            left = len(counts) if made is None else made.left
            notes += omissions.of_places(left, str(state.shapes[shape]))
            if made is None:
                continue
            found[k] = made
        notes += omissions.of_rows(own.others) + omissions.of_inner_copies(own.others)
    notes = tuple(dict.fromkeys((*state.notes, *notes)))
    return replace(state, patched=found, second=tuple(second), begun=None, notes=notes)


def with_fewer_ways(state: State) -> tuple[State, int]:
    """The state with as many ways of places as the tables of the form as given leave room for, or
    as have the operations that other forms may have, and how many others there are."""
    from tapestry_egg.extract.search.exact import columns

    total = [0] * len(state.forms)
    for (k, _), posed in zip(state.networks, state.problems, strict=True):
        total[k] += columns(posed.problem) if state.forms[k].patches else 0
    forms, left = [], 0
    for form, size in zip(state.forms, total, strict=True):
        patches = form.patches
        if patches:
            most = state.question.settings.forms // max(1, patches.distinct or form.graph.size) - 1
            patches = patches.first(max(most, COLUMNS_OF_WAYS // max(1, size)))
            left += patches.left - form.patches.left if form.patches else 0
        forms.append(replace(form, patches=patches or None))
    return replace(state, forms=tuple(forms)), left


def second_instances(state: State) -> dict[int, SecondPlaces]:
    """Of every form, but of micro-batches and of what computes values again already, where it may
    compute values again for some of their readers.

    There are as many ways as there is room for beside the forms and what rules make of their
    places, and no more programs than a few. Where rules make places, the one problem of all must be
    of a size that integer programs settle.
    """
    from tapestry_egg.extract.search.exact import COLUMNS, columns

    q, forms = state.question, state.forms
    if not (q.settings.front and q.settings.recompute):
        return {}
    whole = [k for k, f in enumerate(forms) if not any(r == RULE or is_split(r) for r in f.rules)]
    ways, used = [], 0
    for form in forms:
        places = form.patches.places if form.patches else ()
        each = (form.patches and form.patches.distinct) or form.graph.size
        ways.append(sum(len(place) - 1 for place in places))
        used += ways[-1] * each + form.graph.size * form.extra
    room = max(0, q.settings.forms - used) // max(1, len(whole))
    size = [1] * len(forms)
    for (k, _), posed in zip(state.networks, state.problems, strict=True):
        size[k] = max(size[k], columns(posed.problem))
    found = {}
    for k in whole:
        graph = state.schedules[k].program.bodies[0].graph
        fits = min(room // max(1, graph.size), FEW) - 1
        if ways[k]:
            fits = min(fits, COLUMNS // size[k] - ways[k] - 1)
        found[k] = second_places(graph, q.pairs, max(0, fits))
    return found


class Programs:
    """The programs that the places of a form make, with their units, each made once: by what rules
    find first, then by what is computed `again`."""

    def __init__(
        self,
        question: Question,
        form: Form,
        patches: Patches | None,
        given: Schedule,
        again: SecondPlaces | None = None,
    ) -> None:
        self.question, self.form, self.patches, self.again = question, form, patches, again
        places = [*(patches.places if patches else ()), *(again.places if again else ())]
        self.counts = [len(place) for place in places]
        first = (0,) * len(places)
        self.known: dict[Ways, Schedule | None] = {first: given}
        # By identity, of units that are kept here.
        self._stands: dict[int, Mapping[BodyName, Mapping[int, int]]] = {id(given): {}}

    @property
    def values(self) -> Mapping[BodyName, int]:
        """How many values the graphs have that all programs share."""
        if self.patches is not None:
            return self.patches.values
        assert self.again is not None
        return {(): len(self.again.graph.values)}

    @property
    def single(self) -> list[Ways]:
        """The program as given, and those of which one place is computed in another way."""
        first = (0,) * len(self.counts)
        others = [
            (*first[:p], way, *first[p + 1 :])
            for p, count in enumerate(self.counts)
            for way in range(1, count)
        ]
        return [first, *others]

    def schedule(self, ways: Ways) -> Schedule | None:
        """The units of one program; None where it depends on itself, or lacks what is computed
        again."""
        if ways not in self.known:
            count = len(self.patches) if self.patches else 0
            self.known[ways] = (
                self._again(ways, count) if any(ways[count:]) else self._changed(ways[:count], ways)
            )
        return self.known[ways]

    def _changed(self, own: Ways, ways: Ways) -> Schedule | None:
        """The units of a program that rules make."""
        assert self.patches is not None
        built = self.patches.built(own)
        if built is None:
            return None
        q = self.question
        graph = rounded(prepare(built.graph), dict(q.machine.operands))
        made = scheduled(graph, q.pairs)
        rules = tuple(sorted({*self.form.rules, *built.rules}))
        return self._kept(made, rules, (*self.form.steps, *built.steps), built.stands)

    def _again(self, ways: Ways, count: int) -> Schedule | None:
        """The units of a program that computes some values again."""
        assert self.again is not None
        given = self.schedule((*ways[:count], *[0] * (len(ways) - count)))
        if given is None:
            return None
        chosen = self.again.chosen(ways[count:])
        graph = self.again.built(given.program.bodies[0].graph, chosen)
        if graph is None:
            return None
        step = second_step(chosen, graph)
        rules = tuple(sorted({*given.program.rules, *step.rules}))
        steps = (*given.program.steps, step)
        return self._kept(scheduled(graph, self.question.pairs), rules, steps, self.stands(given))

    def _kept(
        self,
        made: Schedule,
        rules: tuple[str, ...],
        steps: tuple[RuleStep, ...],
        stands: Mapping[BodyName, Mapping[int, int]],
    ) -> Schedule:
        found = replace(made, program=replace(made.program, rules=rules, steps=steps))
        self._stands[id(found)] = stands
        return found

    def stands(self, schedule: Schedule) -> Mapping[BodyName, Mapping[int, int]]:
        """Of every body the new values of a program -> those of the one as given that they stand
        for. Raises ExtractError for units that were not made here: their new values would pass for
        values of their own."""
        if id(schedule) not in self._stands:
            raise ExtractError("units of a program that no places make", where="places")
        return self._stands[id(schedule)]


class Posed:
    """Those programs as problems on one mesh, each made once; what they have in common, too."""

    def __init__(self, programs: Programs, mesh: MeshShape, state: State | None = None) -> None:
        from tapestry_egg.extract.choices.once import JoinedUnits, Once
        from tapestry_egg.extract.problem.assemble import Weights

        self.programs, self.mesh, self.weights = programs, mesh, Weights()
        q = programs.question
        every = [s for ways in programs.single if (s := programs.schedule(ways)) is not None]
        self.encoding = encode_together([s.program for s in every], mesh)[0]
        # What was made of the form as given, and of other forms, is here, too.
        begun = state.begun if state else None
        self.joined = begun.joined if begun else JoinedUnits()
        self.once = begun.once if begun else Once()
        before = state.strategies if state else ()
        self.saturated = saturate(self.encoding, q.books, q.settings.budget, before)
        self.number: dict[OperationSignature, SignatureId] = {
            s: SignatureId(k) for k, s in enumerate(self.encoding.signatures)
        }
        # By identity, with the signature that it is of.
        self._known_by: dict[int, tuple[OperationSignature, SignatureId | None]] = {}
        self.known: dict[Ways, PlanProblem | None] = {}
        self.keeping: Keeping | None = None  # as of the program as given
        if state:
            self._take(state.problems)

    def _take(self, problems: Sequence[PlanProblem]) -> None:
        """The problem of the program as given from those that there are, if its layouts are those
        that all programs have together."""
        first = (0,) * len(self.programs.counts)
        given = self.programs.known[first]
        for p in problems:
            own = p.choices.saturated
            if p.choices.schedule is not given or p.choices.mesh != self.mesh:
                continue
            self.keeping = p.keeping
            if (
                own.encoding.algebra == self.encoding.algebra
                and own.saturated
                and self.saturated.saturated
            ):
                self.known[first] = p

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
        from tapestry_egg.extract.choices.unit_choices import unit_choices
        from tapestry_egg.extract.problem.assemble import assemble
        from tapestry_egg.extract.problem.columns import Columns
        from tapestry_egg.extract.problem.kept import Keeping, count_shared

        schedule = self.programs.schedule(ways)
        if schedule is None:
            return None
        found = self._strategies(schedule)
        if found is None:
            return None
        q = self.programs.question
        fixed = q.words.fixed
        choices = restrict(
            unit_choices(schedule, found, self.mesh, q.machine, fixed.contract, self.joined), fixed
        )
        if self.keeping is None:
            self.keeping = Keeping(count_shared(Columns(choices)))
        return assemble(choices, self.weights, self.once, self.keeping)

    def _strategies(self, schedule: Schedule) -> Saturated | None:
        """What the rules derived, of the operations of one program; None where it has others."""
        found = [self._numbered(i.signature) for i in schedule.program.instances]
        own = tuple([number for number in found if number is not None])
        if len(own) < len(found):
            return None
        encoding: Encoding = replace(self.encoding, program=schedule.program, signature_of=own)
        return replace(self.saturated, encoding=encoding)

    def _numbered(self, signature: OperationSignature) -> SignatureId | None:
        """The number of a signature, which is compared with those that there are once."""
        if id(signature) not in self._known_by:
            self._known_by[id(signature)] = signature, self.number.get(signature)
        return self._known_by[id(signature)][1]


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


def unfound(state: State, most: int = FEW) -> list[NetworkResult] | None:
    """The results, or what would be such, of programs that places make, or that compute values
    again, and of which nothing was found; None where there are more than `most`, which are then
    not made."""
    every = {id(r.assembled): r for r in state.every_result}
    found = [r for r in every.values() if not r.archive.candidates]
    rest = sum(prod(len(group.ways) for group in own.groups) for own in state.patched.values())
    if len(found) + rest - len(every) > most:
        return None
    for k, own in state.patched.items():
        nothing = replace(state.results[k].archive, candidates=[])
        for chosen in product(*(group.ways for group in own.groups)):
            ways = [0] * own.places
            for group, mine in zip(own.groups, chosen, strict=True):
                for p, way in zip(group.places, mine, strict=True):
                    ways[p] = way
            posed = own.pose(tuple(ways))
            if posed is not None and id(posed) not in every:
                found.append(NetworkResult(posed, nothing))
    return found if len(found) <= most else None
