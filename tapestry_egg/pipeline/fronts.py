"""The last passes: from searches of every network to one front, each of its plans certified."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.extract.engine.archive import Archive
from tapestry_egg.extract.engine.search import Search
from tapestry_egg.extract.front.front import Front, audit
from tapestry_egg.extract.front.merge import best_given, merge, original_plan
from tapestry_egg.extract.front.merging import merge_collectives
from tapestry_egg.extract.front.notes import note
from tapestry_egg.extract.front.sizes import Room
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import AUDITED, CERTIFIED, Origin, Plan
from tapestry_egg.quantities import TIME
from tapestry_egg.rules.language.book import is_shipped
from tapestry_egg.schedule.schedules import Schedule

from . import passes, searches
from .state import Question, State


def merge_front(state: State) -> State:
    """One front of all forms and meshes: plans, each with the least that any mesh has proven for
    its own peak and joules. If one plan was wanted soon, and none is within the limits, all that a
    front is made of is searched first. Raises KeyboardInterrupt if the search was interrupted
    before a plan was within the limits."""
    try:
        return _merged(state)
    except ExtractError:
        if state.interrupted:
            raise KeyboardInterrupt from None
        if state.question.wide:
            raise
    return _merged(_further(state))


def _further(state: State) -> State:
    """The state with the networks of a front, those known among them, and searches of all."""
    state = replace(state, question=replace(state.question, further=True, like=None))
    finding = (passes.choose_shapes, passes.find_forms, passes.recompute_values)
    for each in (*finding, passes.choose_networks, *passes.NETWORK, passes.add_axes):
        state = each(state)
    return searches.search_networks(state)


def _merged(state: State) -> State:
    q = state.question
    # What the user's own shardings lead to is a plan like any other, and so is what pins lead to;
    # beside the front it is told of shardings alone: who pins tensors has given no plan.
    first = [n.result for n in state.networks if n.number == 0]
    given = best_given(first) if q.words.said else None
    every = state.results
    front = merge(
        every, q.objectives, q.limits, q.machine.spec, q.graph.name, q.machine.usable_bytes
    )
    if not q.words.sharded:
        given = None
    notes = state.notes + front.notes
    return replace(state, front=replace(front, original=original_plan(every, given)), notes=notes)


def merge_sent(state: State) -> State:
    """The front with plans as well whose collectives are fewer, where latencies make them faster:
    several become one."""
    q = state.question
    assert state.front is not None
    if not q.settings.merge:
        return state
    front, notes = merge_collectives(
        state.front,
        state.results,
        q.objectives,
        q.limits,
        q.machine,
        q.pairs,
        q.settings.most_work(q.graph.size),
    )
    return replace(state, front=front, notes=state.notes + notes)


def certify_front(state: State) -> State:
    """The front without plans that the certificate refuses: none, unless something is broken.

    Warns of each one left out; raises the first refusal when no plan is left.
    """
    q = state.question
    assert state.front is not None
    front = certified(state.front, state.schedules, q.machine, q.limits)
    return replace(state, front=front)


def certified(
    front: Front,
    schedules: Sequence[Schedule],
    machine: Target,
    limits: Mapping[str, float],
) -> Front:
    """The plans of a front that are legal, cost what they say and keep the limits. Those whose
    collectives are merged have been through the certificate, which made their costs."""
    from tapestry_egg.extract.certify.certificate import certify_all

    refused: list[ExtractError] = []
    sound = [p for p in front.plans if p.body.merged]
    if front.original is not None:
        which = next(s for s in schedules if s.program.bodies[0].graph is front.original.graph)
        (verdict,) = certify_all([front.original], which, machine)
        if isinstance(verdict, ExtractError):
            warnings.warn(f"a plan is left out: {verdict}", stacklevel=5)
            front = replace(front, original=None)
    ordered: list[tuple[Schedule, list[Plan]]] = [
        (s, [p for p in front.plans if not p.body.merged and p.graph is s.program.bodies[0].graph])
        for s in schedules
    ]
    for schedule, own in ordered:
        verdicts = certify_all(own, schedule, machine, limits)
        for p, verdict in zip(own, verdicts, strict=True):
            if isinstance(verdict, ExtractError):
                refused.append(verdict)
            else:
                sound.append(p)
    if not refused:
        return front
    if not sound:
        raise refused[0]
    for error in refused:
        warnings.warn(f"a plan is left out: {error}", stacklevel=5)
    # What was left out may have been all that dominated some other plan.
    kept = tuple(p for p in front.plans if any(p is s for s in sound))
    return replace(front, plans=kept, epsilon=float("inf"))


def tell_origins(state: State) -> State:
    """The front with all that its user wants to know: whose plans they are, and the notes."""
    q = state.question
    notes = state.notes
    if q.words.fixed.contract is not None and q.settings.front and not state.interrupted:
        first = [n for n in state.networks if n.number == 0]
        free = [n.free for n in first if n.free is not None]
        archives = [n.result.archive for n in first]
        cost = contract_cost(free, archives, q.words.fixed.contract)
        notes += (note("mesh-cost", text=cost),) if cost else ()
    front = state.front
    assert front is not None
    own = front.original
    front = replace(
        front,
        plans=tuple(_signed(p, q) for p in front.plans),
        original=None if own is None else _signed(own, q),
        saturated=front.saturated and all(form.saturated for form in state.forms),
        notes=tuple(dict.fromkeys(notes)),
        timeline=state.timeline,
        usable_bytes=q.machine.usable_bytes,
    )
    return replace(state, front=front, notes=front.notes)


def _signed(plan: Plan, q: Question) -> Plan:
    books = [
        str(Path(b.path).resolve())
        for b in q.books
        if not is_shipped(b) and any(r.name in plan.rules for r in b.rules)
    ]
    origin = Origin(q.machine, tuple(sorted(q.pairs.items())), tuple(books))
    return replace(plan, program=q.program, origin=origin)


# What a named mesh costs: the fastest plan within the contract against the fastest without it.


# With more rows to choose from than these the search for the other plan would take too long, and
# the note says that instead. No measurement of the number is kept.
_ROWS = 60_000
# What is good enough for the search.
_GAP = 0.004
# A difference below this share of the seconds is none.
_SLIGHT = 1e-3


def contract_cost(
    free: Sequence[UnitChoices], bound: Sequence[Archive], contract: MeshContract
) -> str:
    """How much longer the fastest plan takes because the boundary is laid out by the user's axes.

    `free` are the choices without that, `bound` what was found with it for the same form of the
    program. Pins hold in both. Where there is too much to choose from, the words say that; empty
    where nothing was found.
    """
    within = min((c.seconds for a in bound for c in a.candidates), default=np.inf)
    if not np.isfinite(within):
        return ""
    room = Room()
    kept = [room.keeping(s) for s in free]
    if any(k is None for k in kept):
        return f"The cost of the mesh {contract} is not known: without it tables are too large."
    problems = [
        assemble(s, once=room.once, keeping=k).problem for s, k in zip(free, kept, strict=True)
    ]
    rows = sum(len(v) for p in problems for v in p.variables)
    if rows > _ROWS:
        return (
            f"The cost of the mesh {contract} is not known: without it there are {rows} rows to "
            f"choose from, more than {_ROWS}."
        )
    least, proven = np.inf, np.inf
    for problem in problems:
        search = Search(problem, _GAP)
        search.fastest()
        least = min(least, *(c.seconds for c in search.archive.candidates))
        proven = min(proven, search.archive.bound(np.inf, np.inf))
    least = min(least, within)
    share = within / least - 1.0 if least > 0 else 0.0
    most = within / proven - 1.0 if proven > 0 else np.inf
    if share < _SLIGHT:
        found = f"The mesh {contract} costs no time"
        return f"{found}: at most {100 * most:.1f} %." if _SLIGHT <= most < np.inf else f"{found}."
    return (
        f"The mesh {contract} costs {100 * share:.1f} %: {TIME.format(within)} instead of "
        f"{TIME.format(least)} with free layouts at the boundary"
        + (f" (at least {TIME.format(proven)})." if proven > 0 else ".")
    )


# The last pass: the ledger checks the plan that a front recommends.


def audit_front(state: State) -> State:
    """The front, of which the plan that is fastest within a device's memory does what it promises.

    Warns of each plan that does not, which is left out; raises PlanError where none does. A
    plan that is no program here, as it has operations that this JAX does not have, is not checked,
    and a note says so.
    """
    assert state.front is not None, "passes before make it"
    front = replace(state.front, notes=state.notes)
    fitting = [p for p in front.plans if front.fits(p)] or front.plans
    left = sorted(fitting, key=lambda p: p.costs.seconds)
    refused = []
    while True:
        try:
            audit(left[0])
            break
        except PlanError as error:
            refused.append(left.pop(0))
            if not left:
                raise
            warnings.warn(f"a plan is left out: {error}", stacklevel=5)
    if refused:
        # They may have been all that dominated some other plan.
        kept = tuple(p for p in front.plans if not any(p is q for q in refused))
        front = replace(front, plans=kept, epsilon=math.inf)
    if left[0] not in AUDITED:
        front = replace(front, notes=(*front.notes, note("not-audited", name=left[0].name)))
    for plan in front.every:
        CERTIFIED.add(plan)  # by the passes before
    return replace(state, front=front)
