"""The last passes: from searches of every problem to one front, each of its plans certified."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.ground import Legal
from tapestry_egg.extract.front.contract_cost import contract_cost
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.latencies import (
    LOOKED,
    PARTS,
    Latencies,
    fastest,
    open_to_merging,
    worth_merging,
)
from tapestry_egg.extract.front.merge import NetworkResult, best_given, merge, original_plan
from tapestry_egg.extract.front.merging import merge_collectives
from tapestry_egg.machine.objectives import SEARCHED, objective
from tapestry_egg.machine.target import Target
from tapestry_egg.parallel.executors import INTERRUPTED
from tapestry_egg.plans.plan import Origin, Plan
from tapestry_egg.rules.language.book import is_shipped
from tapestry_egg.schedule.of_plans import plan_schedule
from tapestry_egg.schedule.schedules import Schedule

from . import omissions
from .patching import FEW, of_programs, unfound, whole
from .searches import (
    begins,
    ended_by_clock,
    for_traffic,
    heeded,
    known_before,
    part_of,
    search,
    search_in_turn,
)
from .state import Question, State

# So many rounds at most mix prices of what merging may take away, along chains and then by lines,
# each with such a share of the work of all others, until so many in turn raise nothing by the share
# `_NEAR`, and as near to their bound as the last number. After either, each search for plans that
# merging makes fast takes the last share of the work; so much does a look whether there are any.
_ALONG_CHAINS, _BY_LINES, _NEAR, _LIKELY = (6, 0.0075, 1, 1.0), (8, 0.012, 3, 1e-3), 5e-4, 0.085
_LOOK = 0.0075
# Such a look finds the fastest; in so many times its work one search finds leaner ones as well.
_LEANER = 3.0


def search_problems(state: State) -> State:
    """For every problem the labellings that no other dominates, and proven bounds on all others."""
    q = state.question
    wanted = heeded(q)
    columns = [SEARCHED.index(o) for o in map(objective, q.objectives) if o in SEARCHED]
    given = len(state.problems)
    problems = [*whole(state.problems, state.patched), *(posed for _, posed in state.second)]
    found = search_in_turn(
        problems,
        wanted,
        q.settings,
        q.executor,
        q.tell,
        (*state.raced, *range(given, len(problems))),
        columns,
        q.by_devices,
        q.kept,
    )
    for first in state.results:
        network = state.number(first)
        if network not in state.patched:
            found.archives[network].join(first.archive)
    notes = state.notes + found.notes + ended_by_clock(q.settings, found.archives)
    if q.settings.front and not found.interrupted:
        notes += omissions.of_programs(problems, found.archives, q.settings.gap)
    notes += omissions.of_opaque(q.graph) + omissions.of_objectives(q.objectives)
    left = [s for s in q.words.unsearched if s not in state.shapes]
    notes += omissions.of_meshes(left) + omissions.of_overlap(q.machine)
    notes += omissions.of_parts(q.unsearched_parts)
    if not q.settings.front:
        notes += ("only the fastest plan within the limits was looked for",)
    own, beside = found.archives[:given], found.archives[given:]
    results, others, wrong = of_programs(state.problems, own, state.patched)
    others += [NetworkResult(p, a) for p, a in zip(problems[given:], beside, strict=True)]
    notes += wrong
    finders = {objective(k).finder for k in (*q.objectives, *q.limits)}
    if "traffic" in finders and not found.interrupted:
        every = [*results, *others]
        traffic = for_traffic([r.assembled for r in every], q.machine)
        known = known_before(q.kept, traffic)
        before = [begins(archive, wanted, q.settings) for archive in known]
        again = search(traffic, wanted, q.settings, q.executor, q.tell, begun=before, kept=q.kept)
        notes += again.notes + ended_by_clock(q.settings, again.archives)
        notes += omissions.of_places_for_traffic(len(state.patched))
        every = [r.with_candidates(a) for r, a in zip(every, again.archives, strict=True)]
        results, others = every[: len(results)], every[len(results) :]
    return replace(
        state,
        results=tuple(results),
        of_places=tuple(others),
        notes=notes,
        interrupted=found.interrupted,
    )


def search_merged(state: State) -> State:
    """The results with labellings that merging may make faster than all that were found; as they
    are where it saves no share worth telling."""
    q = state.question
    every = list(state.every_result)
    if not q.settings.merge or state.interrupted or any(r.archive.by_clock for r in every):
        return state
    networks = {k: Latencies(r) for k, r in enumerate(every)}
    some, more = open_to_merging(every, networks)
    looked = _looked(q, every, some)
    mine, others, left = worth_merging(every, networks)
    if not mine or INTERRUPTED in looked:
        notes = state.notes + looked + omissions.of_merging(left, more)
        return replace(state, notes=notes, interrupted=INTERRUPTED in looked)
    if state.patched or state.second:
        state = _with_all_programs(_with(state, every))
        every = list(state.every_result)
        seen = {id(own.result.assembled): own for own in networks.values()}
        networks = {k: seen.get(id(r.assembled), Latencies(r)) for k, r in enumerate(every)}
        networks = {k: own.knowing(every[k]) for k, own in networks.items()}
        mine, others, left = worth_merging(every, networks)
    notes = state.notes + looked + omissions.of_merging(left, more)
    if not mine:
        return replace(state, notes=notes)
    # Where one problem stands for many programs, some of these are not asked: nothing is proven.
    asked = {**mine, **others} if unfound(state) == [] else mine
    known = np.array([c.costs for r in every for c in r.archive.corners()]).reshape(-1, 3)
    longer = part_of(q.settings, _LIKELY)
    for by_lines in (False, True):
        told = _raised(q, every, mine, asked, by_lines)
        notes += told
        parts = PARTS[-1:] if by_lines else PARTS
        for part in parts if INTERRUPTED not in told else ():
            problems = [own.likely(part, by_lines) for own in mine.values()]
            within, own, weights = heeded(q), longer, None
            each = longer.most_work / len(mine)
            least = [max(each, _LEANER * own.spent) for own in mine.values()]
            if part == PARTS[-1] and not by_lines and longer.most_work < sum(least):
                own, weights = replace(longer, work=sum(least)), least
            tell = q.tell_part
            found = search(
                problems, within, own, q.executor, tell, known, weights=weights, proofs=False
            )
            notes += found.notes + ended_by_clock(q.settings, found.archives)
            for k, archive in zip(mine, found.archives, strict=True):
                every[k] = every[k].with_mergeable(by_lines, archive.candidates)
            if found.interrupted:
                break
        if INTERRUPTED in notes:
            break
    return replace(
        _with(state, every),
        interrupted=INTERRUPTED in notes,
        notes=tuple(dict.fromkeys(notes)),
    )


def _with(state: State, every: Sequence[NetworkResult]) -> State:
    """The state with other results of the same programs."""
    count = len(state.results)
    return replace(state, results=tuple(every[:count]), of_places=tuple(every[count:]))


def _looked(
    q: Question, every: list[NetworkResult], some: Mapping[int, Latencies]
) -> tuple[str, ...]:
    """Take into the results of some networks what is quickly found where latencies are cheap: plans
    of many collectives that no search has found at their whole price. What is to be said of it."""
    if not some:
        return ()
    problems = [own.likely(LOOKED, False) for own in some.values()]
    quick = part_of(q.settings, _LOOK)
    known = np.array([c.costs for r in every for c in r.archive.corners()]).reshape(-1, 3)
    found = search(problems, heeded(q), quick, q.executor, q.tell_part, known, proofs=False)
    for (k, own), archive in zip(some.items(), found.archives, strict=True):
        own.spent = archive.spent
        every[k] = every[k].with_mergeable(False, archive.candidates)
    return found.notes + ended_by_clock(q.settings, found.archives)


def _with_all_programs(state: State) -> State:
    """The results with the fastest plan of every program that places make, where these are few."""
    q, rest = state.question, unfound(state, FEW)
    if not rest:
        return state
    quick = replace(part_of(q.settings, _LIKELY), front=False)
    found = search([r.assembled for r in rest], None, quick, q.executor, q.tell_part)
    made = {
        id(r.assembled): replace(r, archive=replace(r.archive, candidates=archive.candidates))
        for r, archive in zip(rest, found.archives, strict=True)
    }
    given, others = (
        tuple([made.pop(id(r.assembled), r) for r in own])
        for own in (state.results, state.of_places)
    )
    return replace(state, results=given, of_places=(*others, *made.values()))


def _raised(
    q: Question,
    every: list[NetworkResult],
    mine: Mapping[int, Latencies],
    asked: Mapping[int, Latencies],
    by_lines: bool,
) -> tuple[str, ...]:
    """Raise what networks are known to take at least, however merged: all that are `asked`, then
    those that are worth it, then those that may take least. What is to be said of it."""
    rounds, share, vain, gap = _BY_LINES if by_lines else _ALONG_CHAINS
    quick = replace(part_of(q.settings, share), front=False, gap=min(q.settings.gap, gap))
    notes: tuple[str, ...] = ()
    least, lasting = 0.0, 0
    for n in range(rounds):
        some = asked if n == 0 else mine if n == 1 and not by_lines else _lowest(every, asked)
        problems = [own.bounding(by_lines) for own in some.values()]
        found = search(problems, None, quick, q.executor, q.tell_part)
        notes += found.notes
        if found.interrupted:
            break
        for (k, own), archive in zip(some.items(), found.archives, strict=True):
            bound = archive.bound(np.inf, np.inf)
            own.prices.meet(fastest(archive).rows, by_lines)
            own.prices.proven(bound)
            every[k] = every[k].with_least(bound)
            if by_lines:
                every[k] = every[k].with_mergeable(True, archive.candidates)
        before, least = least, min(every[k].least_merged for k in asked)
        lasting = 0 if n < 2 or least > before * (1.0 + _NEAR) else lasting + 1
        if lasting == vain:
            break
    return notes


def _lowest(
    results: Sequence[NetworkResult], asked: Mapping[int, Latencies]
) -> dict[int, Latencies]:
    """Of the networks that were asked those that may take least, however merged."""
    least = min(results[k].least_merged for k in asked)
    return {k: x for k, x in asked.items() if results[k].least_merged <= least * (1.0 + _NEAR)}


def merge_front(state: State) -> State:
    """One front of all forms and meshes: plans, each with the least that any mesh has proven for
    its own peak and joules."""
    q = state.question
    # What the user's own shardings lead to is a plan like any other, and so is what pins lead to;
    # beside the front it is told of shardings alone: who pins tensors has given no plan.
    given = best_given(state.results[: state.first]) if q.words.said else None
    every = state.every_result
    front = merge(every, q.objectives, q.limits, q.machine.spec, q.graph.name)
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
        state.every_result,
        q.objectives,
        q.limits,
        q.machine,
        q.pairs,
        whole=unfound(state) == [],
    )
    return replace(state, front=front, notes=state.notes + notes)


def certify_front(state: State) -> State:
    """The front without plans that the certificate refuses: none, unless something is broken.

    Warns of each one left out; raises the first refusal when no plan is left.
    """
    q = state.question
    assert state.front is not None
    of_results = [r.assembled.choices.schedule for r in state.every_result]
    every = list({id(s): s for s in (*state.schedules, *of_results)}.values())
    return replace(state, front=certified(state.front, every, q.machine, q.limits, q.pairs))


def certified(
    front: Front,
    schedules: Sequence[Schedule],
    machine: Target,
    limits: Mapping[str, float],
    feedback: Mapping[int, int] | None = None,
) -> Front:
    """The plans of a front that are legal, cost what they say and keep the limits; `feedback` is
    that of the schedules."""
    from tapestry_egg.extract.certify.certificate import certify_all

    legal: Legal = {}  # of all schedules
    refused: list[ExtractError] = []
    sound: list[Plan] = []
    if front.original is not None:
        which = next(s for s in schedules if s.program.bodies[0].graph is front.original.graph)
        (verdict,) = certify_all([front.original], which, machine, legal=legal)
        if isinstance(verdict, ExtractError):
            warnings.warn(f"a plan is left out: {verdict}", stacklevel=5)
            front = replace(front, original=None)
    ordered: list[tuple[Schedule, list[Plan]]] = [
        (s, [p for p in front.plans if not p.body.merged and p.graph is s.program.bodies[0].graph])
        for s in schedules
    ]
    ordered += [(plan_schedule(p.body, feedback or {}), [p]) for p in front.plans if p.body.merged]
    for schedule, own in ordered:
        verdicts = certify_all(own, schedule, machine, limits, legal)
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
        archives = [r.archive for r in state.results[: state.first]]
        cost = contract_cost(state.free, archives, q.words.fixed.contract)
        notes += (cost,) if cost else ()
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
