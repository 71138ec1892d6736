"""The search of a program's networks: all of them together, from the first plan on."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from operator import le
from typing import TYPE_CHECKING

from tapestry_egg.extract.engine.archive import Limits, so_far
from tapestry_egg.extract.front.notes import note
from tapestry_egg.machine.objectives import SEARCHED, objective
from tapestry_egg.parallel.deadline import interruptible
from tapestry_egg.progress import Phase

from . import omissions
from .state import Network, Question, State

if TYPE_CHECKING:
    from tapestry_egg.extract.engine.race import Effort
    from tapestry_egg.extract.engine.search import Search
    from tapestry_egg.extract.problem.assemble import PlanProblem
    from tapestry_egg.machine.target import Target

# When bytes and flops are objectives: seconds break ties, and flops weigh more than what their
# arithmetic takes, so that work is divided evenly before bytes are saved.
_TIE = 0.02
_EVEN = 20.0

# The share of all work that the first plan may have, so that much is left for other networks.
_FIRST = 0.25

# The share of the work of networks that were left out which the others get. With half of it the
# front of two GPT-2 layers on 8x8 devices is the one of a search of all networks.
_LEFT = 0.5


def heeded(q: Question) -> Limits | None:
    """The limits on what speed is exchanged for."""
    return Limits.of(q.limits)


def search_first(state: State) -> State:
    """The fastest plan of the one network that there is so far."""
    state = with_searches(state)
    begun = time.perf_counter()
    for n in state.networks:
        assert n.search is not None
        if not n.search.archive.candidates:
            n.search.fastest(most=_FIRST * state.question.settings.most_work(n.form.graph.size))
    _report(state, begun)
    return state


def search_ends(state: State) -> None:
    """Find the ends of the front on every network that has a search: the fastest plan, and those of
    few bytes and joules, as far as they are asked for."""
    from tapestry_egg.extract.engine.race import Race

    q = state.question
    begun = time.perf_counter()
    Race(
        [n.search for n in state.networks if n.search is not None],
        effort(q, _passing(state)),
        heeded(q),
        report=lambda _: _report(state, begun),
        devices=[n.mesh.devices for n in state.networks] if q.by_devices else None,
    ).run(ends=True)


def search_networks(state: State) -> State:
    """For every network the labellings that no other dominates, and bounds on all others."""
    from tapestry_egg.extract.engine.race import Race

    q = state.question
    state = with_searches(state)
    searches = [n.search for n in state.networks if n.search is not None]
    begun = time.perf_counter()
    found = Race(
        searches,
        effort(q, _passing(state)),
        heeded(q),
        report=lambda _: _report(state, begun),
        devices=[n.mesh.devices for n in state.networks] if q.by_devices else None,
        within=_within(q, state.networks),
    )
    try:
        with interruptible():
            found.run()
        interrupted = False
    except KeyboardInterrupt:  # it may come where nothing is found yet
        if not any(s.archive.candidates for s in searches):
            raise
        interrupted = True
    if q.kept is not None:
        each = [n.problem.problem for n in state.networks if n.problem is not None]
        q.kept.note(each, [s.archive for s in searches], ended=True)
    q.tell(Phase("extract", so_far([s.archive for s in searches]), 1.0))
    left = [s for s in q.words.unsearched if s not in {n.mesh for n in state.networks}]
    searched = [n for k, n in enumerate(state.networks) if k in found.begun]
    unsearched = [n for k, n in enumerate(state.networks) if k not in found.begun]
    done = replace(state, networks=_covered(q, searched)).saying(
        *omissions.of_searched(searched),
        *omissions.of_search(found, interrupted),
        *omissions.of_networks(unsearched),
        *omissions.of_opaque(q.graph),
        *omissions.of_unsplit(state.schedules[0].program),
        *omissions.of_objectives(q.objectives),
        *omissions.of_meshes(left),
        *omissions.of_overlap(q.machine),
        *omissions.of_parts(q.unsearched_parts),
    )
    if not q.settings.front:
        done = done.saying(note("fastest"))
    finders = {objective(k).finder for k in (*q.objectives, *q.limits)}
    return _for_traffic(done) if "traffic" in finders and not interrupted else done


def _covered(q: Question, networks: Sequence[Network]) -> tuple[Network, ...]:
    """The networks that have a plan, each with whether another has all of its plans."""
    found = [n for n in networks if n.search is not None and n.search.archive.candidates]
    within = _within(q, found)
    return tuple(replace(n, covered=k in within) for k, n in enumerate(found))


def _within(q: Question, networks: Sequence[Network]) -> frozenset[int]:
    """The networks on meshes of one axis of whose form there is one on a mesh of several, which has
    all layouts that they have: not where pins name axes, as these are other ones on every mesh, nor
    where budgets left more out there."""
    if q.words.said and q.words.fixed.contract is None:
        return frozenset()
    several: dict[tuple[int, int], list[tuple[int, ...]]] = {}
    for n in networks:
        if len(n.mesh.sizes) > 1:
            several.setdefault((n.number, n.mesh.devices), []).append(_left_out(n))
    return frozenset(
        k
        for k, n in enumerate(networks)
        if len(n.mesh.sizes) == 1
        for others in [several.get((n.number, n.mesh.devices), [])]
        if any(all(map(le, other, _left_out(n))) for other in others)
    )


def _left_out(network: Network) -> tuple[int, ...]:
    """Of how many kernels and values budgets left something out, by what it is."""
    choices, problem = network.choices, network.problem
    assert choices is not None and problem is not None, "it was posed"
    copies = problem.fewer_endings, problem.fewer_copies, problem.spared
    return *choices.truncated, choices.uncombined, *copies


def _passing(state: State) -> list[float]:
    """Units of work that a pass of messages over the tables of each network on several devices
    takes. Those that were left out leave half of theirs to the others."""
    some = [n.search for n in state.networks if n.mesh.devices > 1]
    found = [s.all.sweeping for s in some if s is not None]
    return found + [_LEFT * max(found, default=0.0)] * len(state.left)


def effort(q: Question, passing: Sequence[float] = ()) -> Effort:
    """How hard to search networks over whose tables a pass takes so many units."""
    from tapestry_egg.extract.engine.race import Effort

    from .passes import threads

    wanted = [SEARCHED.index(o) for o in map(objective, q.objectives) if o in SEARCHED]
    return Effort(
        work=q.settings.most_work(q.graph.size, passing),
        gap=q.settings.gap,
        front=q.settings.front,
        brief=not q.wide,
        wanted=tuple(wanted),
        seconds=q.settings.most_seconds(q.graph.size, passing),
        patience=q.settings.patience,
        threads=threads(q),
    )


def with_searches(state: State) -> State:
    """The state with a search of every network, each of which knows what is kept of it."""
    from tapestry_egg.extract.engine.mixtures import Mixtures, likeness
    from tapestry_egg.extract.engine.search import Search

    q = state.question
    shared: dict[tuple[int, int, int], Mixtures] = {
        likeness(n.number, n.search.problem): n.search.mixtures
        for n in state.networks
        if n.search is not None
    }
    made: list[Network] = []
    fresh = count(1 + max((n.search.number for n in state.networks if n.search), default=-1))
    for n in state.networks:
        if n.search is None:
            assert n.problem is not None, "it was posed"
            problem = n.problem.problem
            alike = likeness(n.number, problem)
            mixtures = shared.setdefault(alike, Mixtures(problem.paths))
            search = Search(problem, q.settings.gap, mixtures, next(fresh))
            known = None if q.kept is None else q.kept.known(problem)
            if known is not None:
                search.take_up(known)
            n = replace(n, search=search)
        made.append(n)
    return replace(state, networks=tuple(made))


def _for_traffic(state: State) -> State:
    """The same networks searched for few bytes sent and few flops, as if launches and latencies
    were free; what is found joins the labellings that were found for seconds."""
    from tapestry_egg.extract.engine.race import race

    q = state.question
    posed = [n.problem for n in state.networks if n.problem is not None]
    problems = for_traffic(posed, q.machine)
    forms = [n.number for n in state.networks]
    found = race([p.problem for p in problems], effort(q), heeded(q), forms=forms)
    for n, archive in zip(state.networks, found, strict=True):
        assert n.search is not None
        for c in archive.candidates:
            n.search.consider(c.rows)
    return state


def for_traffic(problems: Sequence[PlanProblem], machine: Target) -> list[PlanProblem]:
    """The same rows for few bytes sent and few flops, as if launches and latencies were free."""
    from tapestry_egg.extract.problem.assemble import Weights, assemble

    found = []
    for choices, keeping in ((p.choices, p.keeping) for p in problems):
        link = machine.link(choices.mesh, tuple(range(len(choices.mesh.sizes))))
        weights = Weights(
            seconds=_TIE,
            wire_bytes=1.0 / link.bytes_per_second,
            flops=_EVEN / machine.rate("bfloat16", True),
        )
        found.append(assemble(choices, weights, keeping=keeping))
    return found


def _report(state: State, begun: float) -> None:
    """Tell of the best plans so far."""
    q = state.question
    searches: list[Search] = [n.search for n in state.networks if n.search is not None]
    size, passing = q.graph.size, _passing(state)
    spent = sum(s.work.units for s in searches) / q.settings.most_work(size, passing)
    spent = max(spent, (time.perf_counter() - begun) / q.settings.most_seconds(size, passing))
    archives = [s.archive for s in searches]
    q.tell(Phase("extract", so_far(archives), min(0.99, spent)))
    if q.kept is not None:
        each = [n.problem.problem for n in state.networks if n.problem is not None]
        q.kept.note(each, archives, ended=False)
