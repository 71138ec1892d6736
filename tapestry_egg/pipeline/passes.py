"""The passes: each takes the state, and returns it with what it makes and notes of what it left."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.notes import Note, note
from tapestry_egg.extract.front.sizes import entries_of_three_axes
from tapestry_egg.extract.pins.boundary import restrict
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.graph.layout_algebra import count_layouts
from tapestry_egg.machine.objectives import PEAK_BYTES
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Plan, RuleStep, is_split
from tapestry_egg.progress import Phase
from tapestry_egg.rewrite.changes import changed, is_change
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.fused_forms import Batched, batched, forms_with_streams
from tapestry_egg.rewrite.operand_rounding import rounded
from tapestry_egg.rewrite.recomputation.second_places import second_places
from tapestry_egg.rewrite.recompute import recomputing, second_step
from tapestry_egg.rewrite.streams import written_out
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.schedule.traffic import traffic_of
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Saturated, saturate
from tapestry_egg.tracing.constants import prepare

from . import omissions
from .settings import DANGER, FIRST_AXES
from .state import Network, Question, Shared, State

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.assemble import PlanProblem


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
    if q.like is not None and q.like.mesh in q.words.shapes:
        left = omissions.of_other_sizes(len(q.words.shapes) - 1)
        return replace(state, shapes=(q.like.mesh,), notes=q.words.notes + left)
    # Names of axes mean something in pins; a named mesh is divided without a loss.
    named = q.words.said and q.words.fixed.contract is None
    if q.named_shapes or named:
        return replace(state, shapes=q.words.shapes, notes=q.words.notes)
    if q.wide:
        shapes, left = first_shapes(q.words.shapes, q.graph.size)
        return replace(state, shapes=shapes, notes=q.words.notes + left)
    shapes, left = quickly(q.words.shapes, q.graph.size, q.long)
    return replace(state, shapes=shapes, notes=q.words.notes + left)


# Operations of a program on all mesh shapes that are searched together. Each operation takes some
# milliseconds on each shape: GPT-3 with 96 layers, 49 048 of them, is searched on two of its eight.
OPERATIONS, FEWEST_SHAPES = 100_000, 2


def first_shapes(
    shapes: Sequence[MeshShape], size: int
) -> tuple[tuple[MeshShape, ...], tuple[Note, ...]]:
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
) -> tuple[tuple[MeshShape, ...], tuple[Note, ...]]:
    """The mesh shapes to search where time is short, and what a front says of the others.

    The user's own mesh has no layouts that those lack that divide its axes. A mesh of one axis has
    none that one of two on the same devices lacks, but its best plan is found sooner. Very long
    programs are searched on few axes only.
    """
    axes: dict[int, list[int]] = {}  # of the meshes of so many devices
    for shape in shapes:
        axes.setdefault(shape.devices, []).append(len(shape.sizes))
    ends = (min,) if long else (min, max)
    few = tuple([s for s in shapes if len(s.sizes) in {end(axes[s.devices]) for end in ends}])
    if not long or len(few) == len(shapes):
        return few, ()
    least = min(map(min, axes.values()))
    return few, (note("long-program-axes", axes=least, operations=size),)


def take_as_given(state: State) -> State:
    """The program as it is given, as the first form, with its units; where a plan for other sizes
    is known, as the rules of that plan make it."""
    q = state.question
    form = Form(q.graph, saturated=False) if q.like is None else _as_in(q.like, q)
    form = replace(form, graph=_compiled(form.graph, q))
    schedule = _of(form, scheduled(form.graph, q.pairs))
    return replace(state, scheduled=((form, schedule),))


def _compiled(graph: BlockGraph, q: Question) -> BlockGraph:
    """A form as it is compiled for a machine: what constants give is computed, operands have the
    bits that products read, and loops run two rounds at a time where one would end in a copy."""
    return in_pairs(rounded(prepare(graph), dict(q.machine.operands)), q.pairs, q.machine)


def _as_in(like: Plan, q: Question) -> Form:
    """The form of a program that takes least on one device, by the rules of a plan alone; with the
    changes of whole programs that it has."""
    changes = tuple([rule for rule in like.rules if is_change(rule)])
    named = {*like.rules} - {*changes}
    graph = changed(q.graph, changes)
    step = RuleStep(changes, "the program", "what a plan for other sizes runs", digest(graph))
    steps, changes = ((step,), changes) if graph is not q.graph else ((), ())
    if not named:
        return Form(graph, changes, False, steps)
    # Rules that unite nothing only derive facts that others ask for.
    rules = [[r for r in b.rules if r.name in named or "(union" not in r.egg] for b in q.books]
    books = [replace(b, rules=tuple(own)) for b, own in zip(q.books, rules, strict=True)]
    found = forms(graph, books, q.machine, q.settings.algebra, q.settings.least_gain)[:2][-1]
    every = tuple(sorted({*found.rules, *changes}))
    return replace(found, rules=every, steps=(*steps, *found.steps), saturated=False)


def find_forms(state: State) -> State:
    """The forms of the program that the rules find, cheapest on one device; the given one first.

    Raises what the rules raise.
    """
    q = state.question
    if q.like is not None:
        return state.saying(note("other-size-forms", name=q.like.name))
    if q.long:
        return state.saying(note("no-rules", operations=q.graph.size))
    found = forms_with_streams(
        q.graph,
        q.books,
        q.machine,
        q.settings.algebra,
        q.settings.least_gain,
        slower=q.wide,
        room=q.settings.forms if q.wide else 0,
        shared=True,
        batches=lambda form: _in_micro_batches(form, q),
        limit=_most_bytes(q),
    )
    timeline = tuple(replace(tick, subject="algebra") for tick in found[0].timeline)
    every = found
    if not q.wide:  # the cheapest, second if there is another than the given one
        kept = tuple([f for f in found if any(_is_searched_soon(r) for r in f.rules)])
        found = (*found[:2][-1:], *kept) if found[:2][-1:] != kept[:1] else (found[0], *kept)
    given = state.forms[0]
    # What was made of the form as given is not made again.
    made_of = [given.graph if f.graph is q.graph else _compiled(f.graph, q) for f in found]
    graphs = [given.graph if g == given.graph else g for g in made_of]
    found = tuple([replace(f, graph=g) for f, g in zip(found, graphs, strict=True)])
    others = [", ".join(form.rules) for form in found if form.rules]
    q.tell(Phase("saturate", "; ".join(others) or "no better form", 1.0))
    known = state.schedules[0]
    every_one = [
        (f, known if f.graph is given.graph else _of(f, scheduled(f.graph, q.pairs))) for f in found
    ]
    made = replace(state, scheduled=tuple(every_one), timeline=(*state.timeline, *timeline))
    late = "the rules on the program" if found[0].by_clock else ""
    return made.saying(
        *omissions.of_rules(found[0]),
        *omissions.of_forms(every, len(found)),
        *omissions.of_clock(late, q.settings.algebra.seconds),
    )


def _is_searched_soon(rule: str) -> bool:
    """Whether forms of such a rule are searched where one plan is wanted soon."""
    return rule in written_out.NAMES or is_split(rule)


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
    """What a device may hold."""
    return q.limits.get(PEAK_BYTES.name, math.inf)


def recompute_values(state: State) -> State:
    """More forms, with their units: those that hold less memory and compute values again, made of
    the form that takes the least time. Where one plan is wanted soon, if memory is short for it."""
    q = state.question
    if q.like is not None or not (q.wide or _short(state)):
        return state
    best = fastest(state)
    form, schedule = state.scheduled[best]
    made = recomputing(form, schedule, q.machine, q.settings.recompute)
    words = [form.steps[-1].made.partition(": ")[2] for form, _ in made.forms]
    q.tell(Phase("saturate", "; ".join(words) or "nothing to gain", 1.0))
    second, left = _second_instances(q, form, schedule)
    every = [*made.forms, *second]
    added = tuple((form, _of(form, schedule)) for form, schedule in every)
    more = replace(state, scheduled=state.scheduled + added)
    return more.saying(
        *omissions.of_recomputation(made, len(state.forms) - 1),
        *omissions.of_second_instances(left),
    )


def _short(state: State) -> bool:
    """Whether the fastest plan so far holds much of what a device may hold."""
    found = [c for n in state.networks if n.search for c in n.search.archive.candidates]
    peak = min(found, key=lambda c: c.costs).peak if found else math.inf
    return peak > DANGER * _most_bytes(state.question)


# Forms in which some readers of values compute these again have so many operations together, and
# no more than so many are searched.
_SECOND_OPERATIONS, _SECOND = 600, 8


def _second_instances(
    q: Question, form: Form, schedule: Schedule
) -> tuple[list[tuple[Form, Schedule]], int]:
    """Forms in which some of the readers of values compute these again, with their units, where all
    such are few; and of how many values there are none."""
    if not (q.wide and q.settings.recompute and q.settings.forms):
        return [], 0
    graph = schedule.program.bodies[0].graph
    fits = min(_SECOND_OPERATIONS // max(1, graph.size), _SECOND) - 1
    places = second_places(graph, q.pairs, max(0, fits))
    found: list[tuple[Form, Schedule]] = []
    for ways in product(*(range(len(place)) for place in places.places)):
        chosen = places.chosen(ways)
        made = places.built(graph, chosen) if any(ways) else None
        if made is not None and len(found) < fits:
            step = second_step(chosen, made)
            rules = tuple(sorted({*form.rules, *step.rules}))
            own = replace(form, graph=made, rules=rules, steps=(*form.steps, step), slower=True)
            found.append((own, scheduled(made, q.pairs)))
    return found, places.left


def _of(form: Form, schedule: Schedule) -> Schedule:
    """The schedule of a form, with the rules that made the form and the steps that led to it."""
    return replace(schedule, program=replace(schedule.program, rules=form.rules, steps=form.steps))


def fastest(state: State) -> int:
    """The place of the form that takes the least time on one device: the first or the second."""
    second = state.forms[1:2]
    return 1 if second and not (second[0].slower or second[0].extra) else 0


# Networks: every form on every mesh. A pass takes up those that it has not been through.


def begin(state: State) -> State:
    """One network to begin with: the program as given on the default mesh."""
    state = replace(state, networks=(network(state, 0, state.shapes[0]),))
    for each in NETWORK:
        state = each(state)
    return state


def choose_networks(state: State) -> State:
    """The forms and meshes that are searched: the first form on all meshes, then the second, and so
    on; of large programs those meshes that have the fewest axes. What was begun with is one of
    them."""
    fewest: dict[int, int] = {}  # axes of the meshes of so many devices
    for mesh in state.shapes if _in_rounds(state) else ():
        axes = fewest.get(mesh.devices, len(mesh.sizes))
        fewest[mesh.devices] = min(axes, len(mesh.sizes))
    first = [s for s in state.shapes if len(s.sizes) <= fewest.get(s.devices, len(s.sizes))]
    known = {(id(n.schedule), n.mesh): n for n in state.networks}
    begun = [(n.form.graph, n.schedule) for n in state.networks]
    every = [
        (f, next((own for g, own in begun if g == f.graph), made)) for f, made in state.scheduled
    ]
    state = replace(state, scheduled=tuple(every))
    networks = []
    for k, schedule in enumerate(state.schedules):
        for mesh in first:
            one = known.get((id(schedule), mesh))
            fresh = network(state, k, mesh)
            networks.append(fresh if one is None else replace(one, number=k, form=fresh.form))
    return replace(state, networks=tuple(networks))


def _in_rounds(state: State) -> bool:
    """Whether it depends on plans on meshes of few axes which forms are searched on others: where
    nobody named meshes or their axes, in programs whose tables take long. A search that is resumed
    has all, so that what it found stays, and one that ends by the clock, so that it is one."""
    from tapestry_egg.extract.engine.search import SMALL

    q = state.question
    asked = q.named_shapes or q.words.said or not q.settings.front
    timed = q.kept is not None or q.settings.seconds is not None
    return not (asked or timed) and all(len(s.units) > SMALL for s in state.schedules)


def network(state: State, form: int, mesh: MeshShape) -> Network:
    """A form, by its place, on a mesh, of which nothing is made yet."""
    return Network(form, *state.scheduled[form], mesh)


def encode_facts(state: State) -> State:
    """Every form on every mesh as facts of integers."""
    made = []
    for k, n in enumerate(state.networks):
        if n.encoding is None:
            words = f"{n}: {len(n.schedule.program.instances)} operations"
            state.tell(Phase("encode", words, k / len(state.networks)))
            n = replace(n, encoding=encode(n.schedule.program, n.mesh))
        made.append(n)
    done = replace(state, networks=tuple(made))
    words = f"{sum(len(e.signatures) for e in done.encodings)} signatures"
    state.tell(Phase("encode", words, 1.0))
    return done


def derive_strategies(state: State) -> State:
    """What the rules derive from the facts: ways to run every operation, and changes of layout.

    Meshes are done side by side, as egglog works in processes of its own; on each one form after
    the other, for they have most in common.
    """
    q, networks = state.question, state.networks
    known = [n.strategies for n in networks if n.strategies is not None]
    chains: dict[MeshShape, list[int]] = {}
    for k, n in enumerate(networks):
        if n.strategies is None:
            chains.setdefault(n.mesh, []).append(k)
    made: dict[int, Saturated] = {}
    interrupted = threading.Event()

    def derive(chain: Sequence[int]) -> None:
        found = [*known]
        for k in chain:
            encoding = networks[k].encoding
            if interrupted.is_set() or encoding is None:
                return
            found.append(saturate(encoding, q.books, q.settings.budget, found))
            made[k] = found[-1]

    with ThreadPoolExecutor(max(1, min(threads(q), len(chains)))) as pool:
        try:
            jobs = {pool.submit(derive, chain): str(mesh) for mesh, chain in chains.items()}
            for job in as_completed(jobs):
                job.result()
                q.tell(Phase("saturate", jobs[job], min(0.99, len(made) / len(networks))))
        finally:
            interrupted.set()
    ticks = [
        replace(tick, subject=str(networks[k])) for k in sorted(made) for tick in made[k].timeline
    ]
    done = replace(
        state,
        networks=tuple(
            [replace(n, strategies=made[k]) if k in made else n for k, n in enumerate(networks)]
        ),
        timeline=(*state.timeline, *ticks),
    )
    count = sum(len(s) for found in done.strategies for s in found.strategies)
    rows = sum(found.rows for found in done.strategies)
    q.tell(Phase("saturate", f"{rows} rows, {count} strategies", 1.0))
    late = "the rules on layouts" if any(found.by_clock for found in made.values()) else ""
    return done.saying(*omissions.of_clock(late, q.settings.budget.seconds))


def join_units(state: State) -> State:
    """For every unit its ways to run: strategies of its operations, joined where values pass
    between them; only those that the user's words leave."""
    from tapestry_egg.extract.choices.once import JoinedUnits
    from tapestry_egg.extract.choices.unit_choices import unit_choices
    from tapestry_egg.extract.front.sizes import Room

    q = state.question
    fixed = q.words.fixed
    most = q.settings.entries
    room = Room(left=q.settings.most_entries(q.graph.size), most=most)
    shared = state.shared or Shared(JoinedUnits(), room)
    made = []
    for n in state.networks:
        if n.choices is None and n.strategies is not None:
            every = unit_choices(
                n.schedule, n.strategies, n.mesh, q.machine, fixed.contract, shared.joined
            )
            bound = fixed.contract is not None and n.number == 0
            free = restrict(every, replace(fixed, bounded=False)) if bound else None
            n = replace(n, choices=restrict(every, fixed), free=free)
        made.append(n)
    return replace(state, networks=tuple(made), shared=shared)


def pose_problems(state: State) -> State:
    """The choices as arrays: variables, pairs, seconds, joules, and bytes over time; without the
    networks of which these would be too large. Raises ExtractError where that is all of them."""
    from tapestry_egg.extract.problem.assemble import assemble

    assert state.shared is not None, "units were joined"
    room = state.shared.room
    made, left = [], []
    for n in state.networks:
        if n.problem is None and n.choices is not None:
            keeping = room.keeping(n.choices)
            if keeping is None:
                left.append(str(n))
                continue
            n = replace(n, problem=assemble(n.choices, once=room.once, keeping=keeping))
        made.append(n)
    if not made:
        entries = state.question.settings.entries
        raise ExtractError(
            f"tables of all meshes have more entries than there is room for, {entries}",
            where=state.question.machine.name,
            hint="Set Settings(entries=...) higher, or name meshes of fewer axes.",
        )
    return replace(state, networks=tuple(made)).saying(*omissions.of_room((), left))


def threads(q: Question) -> int:
    """How many threads work side by side."""
    return q.settings.workers or os.cpu_count() or 1


#: What makes a network, one pass after the other.
NETWORK = (encode_facts, derive_strategies, join_units, pose_problems)


def with_networks(state: State, more: Iterable[tuple[int, MeshShape]]) -> State:
    """The state with networks of more forms, by their places, on meshes; all of them made."""
    fresh = [network(state, form, mesh) for form, mesh in more]
    state = replace(state, networks=(*state.networks, *fresh))
    for each in NETWORK:
        state = each(state)
    return state


# Entries that the tables of all networks of three axes may have together, by prediction. Half a
# million take some two seconds to make.
THREE_AXES = 2_500_000


def add_axes(state: State) -> State:
    """Networks on meshes of three axes as well, where a machine's network has several dims and the
    tables of these, told from those of fewer axes, are small enough: of the form that takes the
    least time on one device."""
    form = fastest(state)
    shapes = _small_enough(state, form)
    if not shapes:
        return state
    state = with_networks(state, [(form, mesh) for mesh in shapes])
    others = len(state.forms) - 1
    if others:
        state = state.saying(note("three-axes", others, forms=others + 1))
    return state


def finer_shapes(state: State) -> tuple[MeshShape, ...]:
    """Mesh shapes of one axis more than was searched first, where a machine's network has several
    dims, nothing was said of axes and the program is not too long: those first that keep to the
    dims of the network."""
    q = state.question
    several = sum(n > 1 for n in q.machine.shape) > 1
    if q.settings.max_axes is not None or not q.wide or not several:
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
    most = state.shapes[0].devices
    own: list[PlanProblem] = [
        n.problem
        for n in state.networks
        if n.number == form and n.problem is not None and n.mesh.devices == most
    ]
    room = 0.0 if state.shared is None else state.shared.room.left / 2
    return finer[: int(min(THREE_AXES, room) // entries_of_three_axes(own))]


# Loops that run two rounds at a time, so that what they carry is not copied.
#
# A round whose next value is not written over the old one, as a stencil's or a product's is not,
# ends in a copy into the array that the loop carries (XLA's copy insertion,
# `hlo/copy_insertion.cc`). Of two rounds in one the first writes into another array and the second
# back into the carried one. Where each round has slices of stacks or fills some, XLA would put
# those of two rounds together first: such loops stay as they are.


def in_pairs(graph: BlockGraph, feedback: Mapping[int, int], target: Target) -> BlockGraph:
    """The program with loops in pairs of rounds wherever that saves a copy of what they carry; the
    same graph if there are none."""
    if not (target.slices and any(map(_may_pair, _operations(graph)))):
        return graph
    schedule = scheduled(graph, feedback)
    traffic, found = traffic_of(schedule, target), set[object]()
    for unit in schedule.units:
        carry = schedule.program.instances[unit.root]
        if carry.port == "carry" and traffic.is_copied(unit) and traffic.takes_turns(unit):
            found.add(_key(schedule.program.loop_of(carry)))
    return _paired(graph, found) if found else graph


def _paired(graph: BlockGraph, loops: set[object]) -> BlockGraph:
    operations = []
    for op in graph.operations:
        if op.regions:
            op = replace(op, regions=tuple([_paired(r, loops) for r in op.regions]))
        if _may_pair(op) and _key(op) in loops:
            op = replace(op, params={**op.params, "unroll": 2})
        operations.append(op)
    return replace(graph, operations=tuple(operations))


def _operations(graph: BlockGraph) -> Iterator[Operation]:
    for op in graph.operations:
        yield op
        for region in op.regions:
            yield from _operations(region)


def _may_pair(op: Operation) -> bool:
    """Whether a loop has a known number of rounds, and neither reads nor fills stacks."""
    if not op.is_scan or op.params["unroll"] != 1 or op.rounds < 2:
        return False
    carries: int = op.params["num_carry"]
    carried = len(op.inputs) == op.params["num_consts"] + carries
    return carried and len(op.outputs) == carries


def _key(op: Operation) -> object:
    """What a loop keeps in its schedule, where operations are in another order."""
    return op.outputs, op.source
