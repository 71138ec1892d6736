"""Problems: from a program to what is left to choose, for each of its forms on each mesh shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.extract.problem.boundary import Fixed, restrict
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import Target
from tapestry_egg.progress import Phase, Progress
from tapestry_egg.rewrite.forms import Form, forms
from tapestry_egg.rewrite.recompute import recomputing
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.schedule.kernels import Schedule, scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Budget, Saturated, saturate
from tapestry_egg.tracing.constants import prepare

from . import omissions

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.extract.problem.unit_choices import UnitChoices
    from tapestry_egg.graph.blockgraph import BlockGraph

    from .settings import Settings


# Where only one plan is wanted soon, programs of more operations are planned as they are given, on
# meshes of one axis: the rules alone would take minutes on them.
LONG = 2500


@dataclass(frozen=True)
class Posed:
    """A program's forms in order, their problems on every mesh shape, and what the rules did."""

    plans: tuple[Schedule, ...]
    problems: tuple[PlanProblem, ...]  # of the first form on every shape, ..
    free: tuple[UnitChoices, ...]  # of the first form, without what a named mesh asks
    timeline: tuple[Tick, ...]
    saturated: bool
    notes: tuple[str, ...] = ()


def pose(
    graph: BlockGraph,
    feedback: Mapping[int, int],
    machine: Target,
    shapes: Sequence[MeshShape],
    books: Sequence[RuleBook],
    fixed: Fixed,
    settings: Settings,
    tell: Progress,
) -> Posed:
    """Find a program's forms by the rules, then encode and saturate each on each mesh shape."""
    from tapestry_egg.extract.problem.assemble import assemble

    long = not settings.front and graph.size > LONG
    found, timeline, notes = (
        _as_given(graph, tell) if long else _forms(graph, books, machine, settings, tell)
    )
    plans = [_of(form, scheduled(form.graph, feedback)) for form in found]
    again = _recomputing(found, plans, machine, settings, tell)
    for form, plan in again:
        found += (form,)
        plans.append(_of(form, plan))
    notes += omissions.of_recomputation([form for form, _ in again])
    problems: list[PlanProblem] = []
    free = []
    for number, plan in enumerate(plans):
        for shape in shapes:
            ticks: list[Tick] = []
            choices = _snapshot(plan, shape, machine, books, settings.budget, fixed, tell, ticks)
            if fixed.contract is not None and not number:
                free.append(restrict(choices, replace(fixed, bounded=False)))
            problems.append(assemble(restrict(choices, fixed)))
            where = f"{shape} form {number + 1}" if number else str(shape)
            timeline += [replace(tick, subject=where) for tick in ticks]
    saturated = all(form.saturated for form in found)
    late = {"the program": (found[0].by_clock, settings.algebra.seconds)}
    shards = any(p.choices.saturated.by_clock for p in problems)
    late["layouts"] = (shards, settings.budget.seconds)
    notes += omissions.of_rows([p.choices for p in problems])
    notes += tuple(
        f"the time limit of {seconds:.4g} s ended the rules on {what}; another run may give "
        "another front"
        for what, (ended, seconds) in late.items()
        if ended
    )
    if long:
        notes += (f"{graph.size} operations: the rules on the program were left out",)
    return Posed(tuple(plans), tuple(problems), tuple(free), tuple(timeline), saturated, notes)


def _forms(
    graph: BlockGraph,
    books: Sequence[RuleBook],
    machine: Target,
    settings: Settings,
    tell: Progress,
) -> tuple[tuple[Form, ...], list[Tick], tuple[str, ...]]:
    """The forms to search, what the rules did, and what is said of what is left out."""
    tell(Phase("saturate", "", None, "algebra"))
    found = forms(graph, books, machine, settings.algebra, settings.least_gain)
    timeline = [replace(tick, subject="algebra") for tick in found[0].timeline]
    every = found
    if not settings.front:  # the cheapest, which is second if there is another than the given one
        found = found[:2][-1:]
    found = tuple([replace(form, graph=prepare(form.graph)) for form in found])
    others = [", ".join(form.rules) for form in found if form.rules]
    tell(Phase("saturate", "; ".join(others) or "no better form", 1.0, "algebra"))
    return found, timeline, omissions.of_forms(every, len(found))


def _as_given(
    graph: BlockGraph, tell: Progress
) -> tuple[tuple[Form, ...], list[Tick], tuple[str, ...]]:
    """The program itself as the only form."""
    tell(Phase("saturate", "the form as given", 1.0, "algebra"))
    return (Form(prepare(graph), saturated=False),), [], ()


def _recomputing(
    found: Sequence[Form],
    plans: Sequence[Schedule],
    machine: Target,
    settings: Settings,
    tell: Progress,
) -> tuple[tuple[Form, Schedule], ...]:
    """Forms that hold less memory, of the form that takes the least time."""
    tell(Phase("saturate", "", None, "recomputation"))
    fastest = 1 if len(found) > 1 else 0
    made = recomputing(found[fastest], plans[fastest], machine, settings.recompute)
    words = [form.steps[-1].made.partition(": ")[2] for form, _ in made]
    tell(Phase("saturate", "; ".join(words) or "nothing to gain", 1.0, "recomputation"))
    return made


def _of(form: Form, schedule: Schedule) -> Schedule:
    """The schedule of a form, with the rules that made the form and the steps that led to it."""
    return replace(schedule, program=replace(schedule.program, rules=form.rules, steps=form.steps))


def _snapshot(
    schedule: Schedule,
    shape: MeshShape,
    machine: Target,
    books: Sequence[RuleBook],
    budget: Budget,
    fixed: Fixed,
    tell: Progress,
    timeline: list[Tick],
) -> UnitChoices:
    """Encode and saturate for one mesh shape: what there is to choose from.

    What the rules did is added to the `timeline`.
    """
    from tapestry_egg.extract.problem.unit_choices import unit_choices

    name = str(shape)
    tell(Phase("encode", f"{len(schedule.program.instances)} operations", None, name))
    encoding = encode(schedule.program, shape)
    tell(Phase("encode", f"{len(encoding.signatures)} signatures", 1.0, name))
    tell(Phase("saturate", "", None, name))
    found: Saturated = saturate(encoding, books, budget)
    timeline += found.timeline
    strategies = sum(len(s) for s in found.strategies)
    tell(Phase("saturate", f"{found.rows} rows, {strategies} strategies", 1.0, name))
    return unit_choices(schedule, found, shape, machine, fixed.contract)
