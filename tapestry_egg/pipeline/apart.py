"""Networks that are made and searched apart from the others.

One is looked at first where all of them take long: what is made for it is not made again, and its
plan joins what the whole search finds. Meshes of three axes are searched in the end, near plans of
two, where all that they hold is too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.extract.front.merge import NetworkResult
from tapestry_egg.extract.front.nearby import division, nearby
from tapestry_egg.extract.search.archive import shown
from tapestry_egg.extract.search.settling import Limits
from tapestry_egg.files.search_file import Near
from tapestry_egg.graph.layout import MeshShape

from .passes import (
    derive_strategies,
    encode_facts,
    fastest,
    finer_shapes,
    join_units,
    with_networks,
    with_problems,
    woven,
)
from .searches import begins, heeded, known_before, search
from .state import Begun, State

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.extract.problem.problem import Ints

# So many meshes of three axes are searched so, and near so many plans on every mesh that one of
# them divides; with this share of the work of the others. No measurement of these is kept.
_MESHES, _PLANS, _SHARE = 2, 6, 0.5

# So many networks, and operations of all of them together, take some seconds to make ready. The
# look has this share of the work, and no more than so many units. No measurement is kept of these.
_NETWORKS, _OPERATIONS = 12, 5_000
_LOOK, _MOST = 0.05, 2.0


def look_first(state: State) -> State:
    """The fastest plan within the limits of the form that takes the least time on one device, on
    the first mesh of most axes; nothing where the whole search begins as soon."""
    from tapestry_egg.extract.choices.once import JoinedUnits
    from tapestry_egg.extract.front.sizes import Room

    q, count = state.question, len(state.networks)
    if not q.settings.front or count < _NETWORKS or count * q.graph.size < _OPERATIONS:
        return state
    form, most = fastest(state), state.shapes[0].devices
    mine = [s for s, shape in enumerate(state.shapes) if shape.devices == most]
    place = max(mine, key=lambda s: len(state.shapes[s].sizes))
    network = state.networks.index((form, place))

    begun = Begun(JoinedUnits(), Room(left=q.settings.entries))
    own = replace(state.alone(form, (state.shapes[place],)), timeline=(), begun=begun)
    for each in (encode_facts, derive_strategies, join_units, with_problems):
        own = each(own)
    if not own.problems:
        return state
    work = min(_LOOK * q.settings.most_work, _MOST)
    settings = replace(q.settings, work=work, front=False, workers=1, seeds=1)
    found = search(own.problems, heeded(q), settings, None, q.tell)
    if found.interrupted:  # there is no front of one network
        raise KeyboardInterrupt
    ticks = tuple(replace(tick, subject=state.at(network)) for tick in own.timeline)
    return replace(
        state,
        results=(NetworkResult(own.problems[0], replace(found.archives[0], by_clock=False)),),
        begun=replace(begun, strategies=own.strategies),
        timeline=(*state.timeline, *ticks),
    )


def search_nearby(state: State) -> State:
    """Networks on meshes of three axes that hold what lies near the best plans of two, and what was
    found there; nothing where those were searched whole, or were not asked for."""
    q = state.question
    shapes = () if state.finer or state.interrupted else finer_shapes(state)[:_MESHES]
    form, plans = _near_before(state, shapes)
    if not plans:
        form = fastest(state)
        plans = {shape: _plans(state, form, shape) for shape in shapes}
    shapes = tuple(shape for shape in shapes if plans.get(shape))
    if not shapes or q.words.fixed.contract is not None:
        return state

    own = state.alone(form, shapes)
    for each in (encode_facts, derive_strategies):
        own = each(own)
    near = tuple(
        nearby(found, plans[shape], shape)
        for found, shape in zip(own.strategies, shapes, strict=True)
    )
    own = join_units(replace(own, strategies=near))
    own = with_problems(own)
    if not own.problems:
        return replace(state, notes=tuple(dict.fromkeys((*state.notes, *own.notes))))
    known = np.array([c.costs for r in state.results for c in r.archive.corners()])
    settings = replace(q.settings, work=_SHARE * q.settings.most_work)
    limits, earlier = Limits.of(dict(q.limits)), known_before(q.kept, own.problems)
    if q.kept is not None:
        q.kept.near = tuple(
            Near(shape, form, tuple((q.kept.digest(p.problem), rows) for p, rows in plans[shape]))
            for shape in shapes
        )
    found = search(
        own.problems,
        limits,
        settings,
        q.executor,
        q.tell_part,
        known.reshape(-1, 3),
        begun=[begins(archive, limits, q.settings) for archive in earlier],
        kept=q.kept,
    )
    for archive, before in zip(found.archives, earlier, strict=True):
        archive.join(before)
    results = tuple(NetworkResult(p, a) for p, a in zip(own.problems, found.archives, strict=True))
    some = ", ".join(str(shape) for shape in shapes)
    note = f"meshes of three axes ({some}) were searched only near the plans of fewer, for one form"
    return replace(
        with_networks(state, form, own),
        results=woven(state, form, state.results, results),
        interrupted=found.interrupted,
        notes=tuple(dict.fromkeys((*state.notes, *own.notes, *found.notes, note))),
    )


def _near_before(
    state: State, shapes: Sequence[MeshShape]
) -> tuple[int, dict[MeshShape, list[tuple[PlanProblem, Ints]]]]:
    """The form and the plans that an earlier search that is kept was near to, by mesh: so the same
    problems are posed, and what was found of them counts. None where there was no such search."""
    kept = state.question.kept
    if kept is None or not kept.near:
        return 0, {}
    posed = {kept.digest(r.assembled.problem): r.assembled for r in state.results}
    found: dict[MeshShape, list[tuple[PlanProblem, Ints]]] = {}
    form = kept.near[0].form
    for near in kept.near:
        own = near.shape in shapes and near.form == form < len(state.forms)
        if own and all(digest in posed for digest, _ in near.plans):
            plans = [(posed[digest], rows) for digest, rows in near.plans]
            found[near.shape] = [(p, kept.evaluated(p.problem, rows).rows) for p, rows in plans]
    return form, found


def _plans(state: State, form: int, shape: MeshShape) -> list[tuple[PlanProblem, Ints]]:
    """The best plans of a form on the meshes that one of more axes divides: those that a front of
    all of them would show, the fastest of each mesh first, no more than `_PLANS` of a mesh."""
    mine = [
        r
        for (f, s), r in zip(state.networks, state.results, strict=True)
        if f == form and division(state.shapes[s], shape) is not None
    ]
    every = [(k, c) for k, r in enumerate(mine) for c in r.archive.candidates]
    if not every:
        return []
    best = {id(every[i][1]) for i in shown(np.array([c.costs for _, c in every]))}
    found: list[tuple[PlanProblem, Ints]] = []
    for r in mine:
        corners = r.archive.corners()
        # The fastest of a mesh is looked at even where another mesh has a better one.
        chosen = [c for c in corners if id(c) in best or c is corners[0]]
        step = max(1.0, len(chosen) / _PLANS)
        places = dict.fromkeys(int(n * step) for n in range(min(_PLANS, len(chosen))))
        found += [(r.assembled, chosen[n].rows) for n in places]
    return found
