"""The passes: each takes the state, and returns it with what it makes and notes of what it left."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from tapestry_egg.egraphs.timeline import Tick
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.sizes import entries_of_three_axes
from tapestry_egg.extract.pins.boundary import restrict
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.graph.layout_algebra import count_layouts
from tapestry_egg.machine.objectives import PEAK_BYTES
from tapestry_egg.plans.plan import is_split
from tapestry_egg.progress import Phase
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.fused_forms import Batched, batched, forms_with_streams
from tapestry_egg.rewrite.operand_rounding import rounded
from tapestry_egg.rewrite.recompute import recomputing
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.shard.encode import Encoding, encode
from tapestry_egg.shard.strategies import Saturated, saturate
from tapestry_egg.tracing.constants import prepare

from . import omissions
from .settings import FIRST_AXES
from .state import Begun, Question, State

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.unit_choices import UnitChoices
    from tapestry_egg.extract.problem.assemble import PlanProblem

T = TypeVar("T")


# Entries that tables of copies between the layouts of all tensors may have on one mesh, told before
# they are made: one takes some 80 bytes, and the shortest paths of a thousand layouts a second. The
# train step of two GPT-2 layers has 1 million on meshes of three axes, 55 million on four.
COPIES = 40_000_000


def choose_shapes(state: State) -> State:
    """The mesh shapes to search: those that the user's words leave, but such as have too many
    layouts; fewer where time is short."""
    chosen = _choose_shapes(state)
    few = tuple([s for s in chosen.shapes if _copies(state.question.graph, s) <= COPIES])
    left = [str(s) for s in chosen.shapes if s not in few]
    if not few:
        raise ExtractError(
            f"too many layouts on {', '.join(left)}: tables of copies between them have more than "
            f"{COPIES} entries",
            where=state.question.machine.name,
            hint="Name meshes of fewer axes.",
        )
    return replace(chosen, shapes=few, notes=chosen.notes + omissions.of_layouts(left))


def _copies(graph: BlockGraph, shape: MeshShape) -> int:
    """Entries of the tables of copies on a mesh, of every type of tensor, about."""
    types = {(value.shape, value.dtype) for value in graph.values}
    return sum(count_layouts(len(shape.sizes), len(dims)) ** 2 for dims, _ in types)


def _choose_shapes(state: State) -> State:
    q = state.question
    # Names of axes mean something in pins; a named mesh is divided without a loss.
    named = q.words.said and q.words.fixed.contract is None
    if q.named_shapes or named:
        return replace(state, shapes=q.words.shapes, notes=q.words.notes)
    if q.settings.front:
        shapes, left = first_shapes(q.words.shapes, q.graph.size)
        return replace(state, shapes=shapes, notes=q.words.notes + left)
    shapes, left = quickly(q.words.shapes, q.graph.size, q.long)
    return replace(state, shapes=shapes, notes=q.words.notes + left)


# Operations of a program on all mesh shapes that are searched together. Each operation takes some
# milliseconds on each shape: GPT-3 with 96 layers, 49 048 of them, is searched on two of its eight.
OPERATIONS, FEWEST_SHAPES = 100_000, 2


def first_shapes(
    shapes: Sequence[MeshShape], size: int
) -> tuple[tuple[MeshShape, ...], tuple[str, ...]]:
    """The mesh shapes on which a program of so many operations is searched, and what a front says
    of the others: those that come first of each number of devices, which are the mesh of one axis
    and those that keep to the dims of the network."""
    by_devices: dict[int, list[MeshShape]] = {}
    for shape in shapes:
        by_devices.setdefault(shape.devices, []).append(shape)
    most = max(OPERATIONS // max(size, 1) // len(by_devices), FEWEST_SHAPES)
    few = tuple([s for some in by_devices.values() for s in some[:most]])
    return few, omissions.of_long_programs(size, len(shapes) - len(few))


def quickly(
    shapes: Sequence[MeshShape], size: int, long: bool
) -> tuple[tuple[MeshShape, ...], tuple[str, ...]]:
    """The mesh shapes to search where time is short, and what a front says of the others.

    A mesh of one axis has no layouts that one of two axes on the same devices lacks, nor has the
    user's own mesh any that those lack that divide its axes. Very long programs are searched on few
    axes only.
    """
    axes: dict[int, list[int]] = {}  # of the meshes of so many devices
    for shape in shapes:
        axes.setdefault(shape.devices, []).append(len(shape.sizes))
    end = min if long else max
    few = tuple([s for s in shapes if len(s.sizes) == end(axes[s.devices])])
    if not long or len(few) == len(shapes):
        return few, ()
    least = min(map(min, axes.values()))
    words = f"{size} operations: only meshes of {least} axis were searched"
    return few, (words,)


#: Ways to compute places for which there is room in the stead of one form, on one mesh shape: for a
#: form there are networks to be searched, a way is a program that is laid over the one as given.
WAYS_OF_A_FORM = 40


def find_forms(state: State) -> State:
    """The forms of the program that the rules find, cheapest on one device; the given one first."""
    q = state.question
    if q.long:
        q.tell(Phase("saturate", "the form as given", 1.0))
        graph = rounded(prepare(q.graph), dict(q.machine.operands))
        return replace(state, forms=(Form(graph, saturated=False),))
    room = q.settings.forms if q.settings.front else 0
    found = forms_with_streams(
        q.graph,
        q.books,
        q.machine,
        q.settings.algebra,
        q.settings.least_gain,
        slower=q.settings.front,
        room=room,
        ways=max(room, room * WAYS_OF_A_FORM // max(1, len(state.shapes))),
        batches=lambda form: _in_micro_batches(form, q),
        shared=True,
        limit=_most_bytes(q),
    )
    timeline = tuple(replace(tick, subject="algebra") for tick in found[0].timeline)
    every = found
    if not q.settings.front:  # the cheapest, second if there is another than the given one
        split = tuple([f for f in found if any(map(is_split, f.rules))])
        found = (*found[:2][-1:], *split) if found[:2][-1:] != split[:1] else (found[0], *split)
    reads = dict(q.machine.operands)
    found = tuple([replace(f, graph=rounded(prepare(f.graph), reads)) for f in found])
    others = [", ".join(form.rules) for form in found if form.rules]
    q.tell(Phase("saturate", "; ".join(others) or "no better form", 1.0))
    notes = state.notes + omissions.of_forms(every, len(found))
    return replace(state, forms=found, timeline=timeline, notes=notes)


def _in_micro_batches(form: Form, q: Question) -> Batched:
    """A form in micro-batches, and, where memory is short, with values that each computes twice."""
    counts, limit = q.settings.micro_batches, _most_bytes(q)
    made = batched(form, q.machine, counts, limit)
    if not made.forms or not q.settings.recompute:
        return made
    form = replace(form, graph=prepare(form.graph))
    again = recomputing(form, scheduled(form.graph, q.pairs), q.machine, q.settings.recompute)
    made = replace(made, again=again.left)
    for twice, _ in again.forms:
        more = batched(twice, q.machine, counts, limit, short=True)
        made = replace(made, forms=made.forms + more.forms, twice=made.twice + more.others)
    return made


def _most_bytes(q: Question) -> float:
    """What a device may hold: the user's limit, or what the machine has."""
    usable = math.inf if q.machine.usable_bytes is None else float(q.machine.usable_bytes)
    return min(usable, q.limits.get(PEAK_BYTES.name, math.inf))


def schedule_units(state: State) -> State:
    """For every form its units: which operations run as one, and in which order."""
    plans = [_of(form, scheduled(form.graph, state.question.pairs)) for form in state.forms]
    return replace(state, schedules=tuple(plans))


def recompute_values(state: State) -> State:
    """More forms, with their units: those that hold less memory and compute values again, made of
    the form that takes the least time."""
    q = state.question
    best = fastest(state)
    form, schedule = state.forms[best], state.schedules[best]
    made = recomputing(form, schedule, q.machine, q.settings.recompute)
    words = [form.steps[-1].made.partition(": ")[2] for form, _ in made.forms]
    q.tell(Phase("saturate", "; ".join(words) or "nothing to gain", 1.0))
    return replace(
        state,
        forms=state.forms + tuple(form for form, _ in made.forms),
        schedules=state.schedules + tuple(_of(form, schedule) for form, schedule in made.forms),
        notes=state.notes + omissions.of_recomputation(made, len(state.forms) - 1),
    )


def _of(form: Form, schedule: Schedule) -> Schedule:
    """The schedule of a form, with the rules that made the form and the steps that led to it."""
    return replace(schedule, program=replace(schedule.program, rules=form.rules, steps=form.steps))


def encode_facts(state: State) -> State:
    """Every form on every mesh shape as facts of integers."""
    made: list[Encoding] = []
    for form, shape in state.networks:
        program = state.schedules[form].program
        words = f"{state.at(len(made))}: {len(program.instances)} operations"
        state.question.tell(Phase("encode", words, len(made) / len(state.networks)))
        made.append(encode(program, state.shapes[shape]))
    words = f"{sum(len(e.signatures) for e in made)} signatures"
    state.question.tell(Phase("encode", words, 1.0))
    return replace(state, encodings=tuple(made))


def derive_strategies(state: State) -> State:
    """What the rules derive from the facts: ways to run every operation, and changes of layout."""
    q = state.question
    made = _derived(state)
    count = sum(len(s) for found in made for s in found.strategies)
    words = f"{sum(found.rows for found in made)} rows, {count} strategies"
    q.tell(Phase("saturate", words, 1.0))
    timeline: tuple[Tick, ...] = state.timeline
    for k, found in enumerate(made):
        timeline += tuple(replace(tick, subject=state.at(k)) for tick in found.timeline)
    late = {
        "the program": (state.forms[0].by_clock, q.settings.algebra.seconds),
        "layouts": (any(found.by_clock for found in made), q.settings.budget.seconds),
    }
    notes = tuple(
        f"the time limit of {seconds:.4g} s ended the rules on {what}; another run may give "
        "another front"
        for what, (ended, seconds) in late.items()
        if ended
    )
    notes += omissions.of_budgets(() if q.long else state.forms, made)
    if q.long:
        notes += (f"{q.graph.size} operations: the rules on the program were left out",)
    return replace(state, strategies=tuple(made), timeline=timeline, notes=state.notes + notes)


def _derived(state: State) -> list[Saturated]:
    """What the rules derive of every network. Meshes are done side by side, as egglog works in
    processes of its own; on each one form after the other, for they have most in common."""
    q, networks = state.question, state.networks
    known = state.begun.strategies if state.begun else ()
    chains: dict[int, list[int]] = {}
    for k, (_, shape) in enumerate(networks):
        chains.setdefault(shape, []).append(k)
    made: dict[int, Saturated] = {}
    interrupted = threading.Event()

    def derive(chain: Sequence[int]) -> None:
        found = [*known]
        for k in chain:
            if interrupted.is_set():
                return
            found.append(saturate(state.encodings[k], q.books, q.settings.budget, found))
            made[k] = found[-1]

    with ThreadPoolExecutor(min(q.settings.workers or os.cpu_count() or 1, len(chains))) as pool:
        try:
            jobs = {pool.submit(derive, chain): str(state.shapes[n]) for n, chain in chains.items()}
            for job in as_completed(jobs):
                job.result()
                q.tell(Phase("saturate", jobs[job], min(0.99, len(made) / len(networks))))
        finally:
            interrupted.set()
    return [made[k] for k in range(len(networks))]


def join_units(state: State) -> State:
    """For every unit its ways to run: strategies of its operations, joined where values pass
    between them; only those that the user's words leave."""
    from tapestry_egg.extract.choices.once import JoinedUnits
    from tapestry_egg.extract.choices.unit_choices import unit_choices
    from tapestry_egg.extract.front.sizes import Room

    q = state.question
    fixed = q.words.fixed
    made: list[UnitChoices] = []
    free: list[UnitChoices] = []
    begun = state.begun or Begun(JoinedUnits(), Room(left=q.settings.entries))
    for k, found in enumerate(state.strategies):
        form, shape = state.networks[k]
        schedule, mesh = state.schedules[form], state.shapes[shape]
        every = unit_choices(schedule, found, mesh, q.machine, fixed.contract, begun.joined)
        if fixed.contract is not None and not form:
            free.append(restrict(every, replace(fixed, bounded=False)))
        made.append(restrict(every, fixed))
    notes = state.notes + omissions.of_rows(made) + omissions.of_inner_copies(made)
    return replace(state, choices=tuple(made), free=tuple(free), begun=begun, notes=notes)


def pose_problems(state: State) -> State:
    """The choices as arrays: variables, pairs, seconds, joules, and bytes over time; without the
    networks of which these would be too large. Raises ExtractError where that is all of them."""
    made = with_problems(state)
    if not made.problems:
        entries = state.question.settings.entries
        raise ExtractError(
            f"tables of all meshes have more entries than there is room for, {entries}",
            where=state.question.machine.name,
            hint="Set Settings(entries=...) higher, or name meshes of fewer axes.",
        )
    return made


def with_problems(state: State) -> State:
    """The state with the problem of every network for which there is room."""
    from tapestry_egg.extract.front.sizes import Room
    from tapestry_egg.extract.problem.assemble import assemble

    room = state.begun.room if state.begun else Room(left=state.question.settings.entries)
    problems: list[PlanProblem] = []
    fits: list[int] = []
    for k, choices in enumerate(state.choices):
        keeping = room.keeping(choices)
        if keeping is not None:
            fits.append(k)
            problems.append(assemble(choices, once=room.once, keeping=keeping))
    left = omissions.of_endings(problems) + omissions.of_copies(problems)
    left += omissions.of_room(problems, [state.at(k) for k in range(len(state.choices))], fits)
    networks = state.networks
    return replace(
        state,
        encodings=tuple([state.encodings[k] for k in fits]),
        strategies=tuple([state.strategies[k] for k in fits]),
        choices=tuple([state.choices[k] for k in fits]),
        free=tuple([free for k, free in enumerate(state.free) if k in fits]),
        problems=tuple(problems),
        too_large=state.too_large.union(x for k, x in enumerate(networks) if k not in fits),
        notes=state.notes + left,
    )


def add_axes(state: State) -> State:
    """Networks on meshes of three axes as well, where a machine's network has several dims and the
    tables of these, told from those of fewer axes, are small enough: of the form that takes the
    least time on one device."""
    form = fastest(state)
    shapes = _small_enough(state, form)
    if not shapes:
        return state
    own = state.alone(form, shapes)
    for each in (encode_facts, derive_strategies, join_units, with_problems):
        own = each(own)
    others = len(state.forms) - 1
    left = (f"meshes of three axes were searched for 1 of {others + 1} forms",) if others else ()
    return replace(
        with_networks(state, form, own),
        free=state.free if form else (*state.free, *own.free),
        notes=tuple(dict.fromkeys((*state.notes, *own.notes, *left))),
    )


def with_networks(state: State, form: int, own: State) -> State:
    """The state with one form on finer meshes, too: `own` has its networks on these alone."""
    beyond = {(form, len(state.shapes) + shape) for _, shape in own.too_large}
    return replace(
        state,
        shapes=(*state.shapes, *own.shapes),
        too_large=state.too_large | beyond,
        finer=len(own.shapes),
        finer_form=form,
        encodings=woven(state, form, state.encodings, own.encodings),
        strategies=woven(state, form, state.strategies, own.strategies),
        choices=woven(state, form, state.choices, own.choices),
        problems=woven(state, form, state.problems, own.problems),
        timeline=own.timeline,
    )


def woven(state: State, form: int, a: tuple[T, ...], b: tuple[T, ...]) -> tuple[T, ...]:
    """What is there for all networks, and what there is of one form on further shapes: after those
    of this form on all other shapes."""
    after = sum(f <= form for f, _ in state.networks)
    return (*a[:after], *b, *a[after:])


def fastest(state: State) -> int:
    """The place of the form that takes the least time on one device: the first or the second."""
    second = state.forms[1:2]
    return 1 if second and not (second[0].slower or second[0].extra) else 0


# Entries that the tables of all networks of three axes may have together, by prediction. Half a
# million take some two seconds to make; a search divides its work by the root of their number.
THREE_AXES = 2_500_000


def finer_shapes(state: State) -> tuple[MeshShape, ...]:
    """Mesh shapes of one axis more than was searched first, where a machine's network has several
    dims, nothing was said of axes and the program is not too long: those first that keep to the
    dims of the network."""
    q = state.question
    several = sum(n > 1 for n in q.machine.shape) > 1
    if q.settings.max_axes is not None or not q.settings.front or not several:
        return ()
    most = state.shapes[0].devices
    axes = FIRST_AXES + 1
    room = max(OPERATIONS // max(q.graph.size, 1) - len(state.shapes), 0)
    finer = [s for s in q.words.unsearched if len(s.sizes) == axes and s.devices == most]
    return tuple(finer[:room])


def _small_enough(state: State, form: int) -> tuple[MeshShape, ...]:
    """Those of them that are worth their tables."""
    finer = finer_shapes(state)
    if not finer:
        return ()
    own = [p for (f, _), p in zip(state.networks, state.problems, strict=True) if f == form]
    most = state.shapes[0].devices
    each = entries_of_three_axes([p for p in own if p.choices.mesh.devices == most])
    return finer[: int(THREE_AXES // each)]
