"""Merge: one front out of the searches of all networks, with bounds over all of them."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.engine.archive import SLIVER, Archive, Candidate, shown
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Floats, Ints, Problem
from tapestry_egg.machine.energy import dollars
from tapestry_egg.machine.objectives import DEVICES, DOLLARS, SEARCHED, Objective, objective
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.fetch import Fetch, fetches
from tapestry_egg.plans.plan import BodyPlan, Costs, Kept, Plan
from tapestry_egg.plans.planned import planned_collectives

from .front import Front, in_order, unmet, value, within
from .notes import note
from .plans import make_plan, may_hold_more

# Candidates that are over a limit by no more than this share are made into plans all the same.
_JUST = 0.02


@dataclass(frozen=True)
class NetworkResult:
    """What the search of one network found: candidates by true costs, cuts on seconds. Where it is
    `covered`, another network has all its plans, and what that proves counts."""

    assembled: PlanProblem
    archive: Archive
    covered: bool = False


def merge(
    results: Sequence[NetworkResult],
    objectives: Sequence[str | Objective],
    limits: Mapping[str, float],
    target: str,
    name: str,
    usable_bytes: int | None = None,
) -> Front:
    """The plans that no plan of any network dominates in `objectives`, within the limits.

    A plan's bound is the least over forms and meshes of what each proved for the plan's own peak
    and joules; where devices or dollars are objectives, over those that may have as few. Raises
    ExtractError when no plan meets the limits, with the least that was found, and the least peak
    that was not proven impossible; `usable_bytes` are what a device has for programs. Where plans
    hold more than their problems count, its notes say so. Warns of plans that are left out, since
    they hold less than was proven, and raises the first such refusal where that is all of them.
    """
    grounds: dict[int, Ground] = {}
    worth = worth_a_plan([_unmerged(r) for r in results], objectives, limits)
    plans: list[Plan] = []
    refused: list[ExtractError] = []
    more = False
    for assembled, c in worth:
        try:
            plan = bounded_plan(results, assembled, c, objectives, grounds)
        except ExtractError as error:
            refused.append(error)
            continue
        plans.append(plan)
        more |= plan.costs.peak_bytes > round(c.peak) and may_hold_more(assembled.choices)
    if refused and not plans:
        raise refused[0]
    for each in refused:
        warnings.warn(f"a plan is left out: {each}", stacklevel=2)
    fitting = [p for p in plans if within(p, limits)]
    if not fitting:
        raise unmet(plans, limits, usable_bytes, least_peak([r.archive for r in results]))
    costs = np.array([[value(p, k) for k in objectives] for p in fitting], dtype=float)
    named = in_order(fitting[i] for i in shown(costs))
    return Front(
        plans=named,
        objectives=tuple(objectives),
        target=target,
        graph_name=name,
        epsilon=epsilon(bounding(results), [(p.costs.seconds, p.costs.peak_bytes) for p in named]),
        saturated=all(r.assembled.choices.saturated.saturated for r in results),
        notes=(note("results-memory"),) if more else (),
        searched=(
            len({id(r.assembled.choices.schedule) for r in results}),
            len({r.assembled.choices.mesh for r in results}),
        ),
    )


def _unmerged(result: NetworkResult) -> NetworkResult:
    """A result whose candidates have the seconds of every collective on its own."""
    problem = result.assembled.problem
    if problem.latencies is None:
        return result
    found = [replace(c, seconds=c.unmerged) for c in result.archive.candidates]
    return replace(result, archive=replace(result.archive, candidates=found))


def bounded_plan(
    results: Sequence[NetworkResult],
    assembled: PlanProblem,
    candidate: Candidate,
    objectives: Sequence[str | Objective],
    grounds: dict[int, Ground],
    listed: bool = True,
) -> Plan:
    """A candidate's plan, its bound the least that any mesh has proven for its peak and joules;
    `grounds` and `listed` as in `make_plan`."""
    rivals = [r for r in results if _may_rival(r, assembled, candidate, objectives)]
    return _bounded(rivals, assembled, candidate, "", grounds, listed)


def _bounded(
    rivals: Sequence[NetworkResult],
    assembled: PlanProblem,
    candidate: Candidate,
    name: str,
    grounds: dict[int, Ground] | None = None,
    listed: bool = True,
) -> Plan:
    """A candidate's plan, with what its rivals have proven for what it holds: no plan holds less
    than its problem counts, and this one may hold more. What is proven of sums of seconds holds
    however collectives are merged, but not what is proven of longest paths."""
    plan = make_plan(assembled, candidate, name, 0.0, grounds, listed)
    peak = max(candidate.peak, float(plan.costs.peak_bytes))
    bound = _checked(least_seconds(rivals, peak, candidate.joules), candidate.seconds)
    apart = any(r.assembled.problem.timeline is not None for r in rivals)
    plan = replace(plan, bound=bound, merged_too=not apart)
    choices = assembled.choices
    if not choices.target.operands:
        return plan
    known = {} if grounds is None else grounds
    if id(choices.schedule) not in known:
        known[id(choices.schedule)] = Ground(choices.schedule, choices.target)
    return rounded_first(plan, known[id(choices.schedule)])


def best_given(results: Sequence[NetworkResult]) -> tuple[NetworkResult, Candidate] | None:
    """The fastest plan that the user's own shardings lead to on any mesh, offered to every search's
    archive; None where they lead to none."""
    found = [(r, c) for r in results if (c := as_given(r.assembled)) is not None]
    for r, c in found:
        r.archive.add(c)

    def key(one: tuple[NetworkResult, Candidate]) -> tuple[float, float, float, str]:
        result, c = one  # as it is given, none of its collectives is merged
        seconds = c.seconds if c.unmerged == np.inf else c.unmerged
        return seconds, c.peak, c.joules, str(result.assembled.choices.mesh)

    return min(found, key=key, default=None)


def original_plan(
    results: Sequence[NetworkResult], given: tuple[NetworkResult, Candidate] | None
) -> Plan | None:
    """That plan, with its bound over all meshes; None, and a warning, where it is refused."""
    if given is None:
        return None
    result, c = given
    try:
        return _bounded(results, result.assembled, c, "given")
    except ExtractError as error:
        warnings.warn(f"a plan is left out: {error}", stacklevel=2)
        return None


def least_seconds(results: Sequence[NetworkResult], peak: float, joules: float) -> float:
    """A bound on seconds of any plan on any of the meshes within a peak and joules."""
    return min((a.bound(peak, joules) for a in bounding(results)), default=0.0)


def _may_rival(
    result: NetworkResult,
    assembled: PlanProblem,
    candidate: Candidate,
    objectives: Sequence[str | Objective],
) -> bool:
    """Whether some plan of a mesh may have no more devices, and cost no more dollars, than a plan
    of another, where these are objectives."""
    own, other = assembled.choices.mesh.devices, result.assembled.choices.mesh.devices
    wanted = {objective(k).name for k in objectives}
    if DEVICES.name in wanted and other > own:
        return False
    if DOLLARS.name in wanted:
        target = assembled.choices.target
        least = result.archive.bound(candidate.peak, candidate.joules)
        return target.held(other) * least <= target.held(own) * candidate.seconds * (1 + 1e-9)
    return True


def _checked(bound: float, seconds: float) -> float:
    """The bound, no more than the plan that it bounds but for rounding.

    Raises ExtractError when it is more: some bound is wrong then.
    """
    if bound > seconds * (1 + 1e-6):
        raise ExtractError(f"a bound of {bound:.9g} s for a plan of {seconds:.9g} s")
    return min(bound, seconds)


def worth_a_plan(
    results: Sequence[NetworkResult],
    objectives: Sequence[str | Objective],
    limits: Mapping[str, float],
) -> list[tuple[PlanProblem, Candidate]]:
    """The candidates of all meshes; only those that the front shows where that can be told from
    what a search counts. Where none meets the limits, those that come nearest."""
    found = [(r.assembled, c) for r in results for c in r.archive.candidates]
    wanted, asked = [objective(k) for k in objectives], [objective(k) for k in limits]
    every = list(dict.fromkeys(wanted + asked))
    if any(o.finder not in ("search", "mesh", "seconds") for o in every):
        return found
    costs = np.array([[_amount(o, p, c) for o in every] for p, c in found])
    over = np.zeros(len(found))  # by which share of a limit at most
    most = {every.index(o): limit for o, limit in zip(asked, limits.values(), strict=True)}
    for k, limit in most.items():
        over = np.maximum(over, costs[:, k] / max(limit, 1e-300) - 1.0)
    if not (over <= 0).any():
        return _nearest(found, costs, most)
    columns = costs[:, [every.index(o) for o in wanted]]
    worth = []
    # What is just over a limit may yet make a plan within it, which holds copies no longer than
    # they are read.
    for some in (over <= 0, (over > 0) & (over <= _JUST)):
        at = np.flatnonzero(some)
        worth += [found[at[i]] for i in shown(columns[at])]
    return worth


def _amount(objective: Objective, assembled: PlanProblem, candidate: Candidate) -> float:
    """What a candidate's plan will have of an objective that a search or the mesh tells."""
    if objective in SEARCHED:
        return candidate.costs[SEARCHED.index(objective)]
    devices = assembled.choices.mesh.devices
    if objective == DEVICES:
        return devices
    return dollars(candidate.seconds, devices, assembled.choices.target)


def _nearest(
    found: Sequence[tuple[PlanProblem, Candidate]], costs: Floats, limits: Mapping[int, float]
) -> list[tuple[PlanProblem, Candidate]]:
    """Per limit the candidate with the least, and the one with the least within the others."""
    at: dict[int, None] = {}
    for k in limits:
        others = [costs[:, j] <= limit for j, limit in limits.items() if j != k]
        for fits in (np.ones(len(found), bool), np.all(others, axis=0) if others else None):
            if fits is not None and fits.any():
                at[int(np.where(fits, costs[:, k], np.inf).argmin())] = None
    return [found[i] for i in at]


def epsilon(archives: Sequence[Archive], points: Sequence[tuple[float, float]]) -> float:
    """The least ε that the archives prove such that every plan of their problems is
    (1+ε)-dominated in (seconds, peak) by one of some points.

    Peaks are divided at those of the points and at limits within which something is proven, from
    the smallest that any plan may have. A plan between two of them is slower than the bound at the
    upper one, and no smaller than the lower.
    """
    proven = {c.peak for a in archives for c in a.cuts if c.peak < np.inf}
    peaks = sorted(proven | {peak for _, peak in points})
    worst = 0.0
    for low, high in pairwise([least_peak(archives), *peaks, np.inf]):
        bound = min(a.bound(high * (1 - 2 * SLIVER), np.inf) for a in archives)
        if low < high and bound < np.inf:
            worst = max(worst, min(max(_over(s, bound), _over(p, low)) for s, p in points))
    return (1.0 + worst) / (1 - 2 * SLIVER) - 1.0


def bounding(results: Sequence[NetworkResult]) -> list[Archive]:
    """The archives whose bounds count."""
    return [r.archive for r in results if not r.covered]


def least_peak(archives: Sequence[Archive]) -> float:
    """Bytes that the peak of every plan of some problems has at least; 0 where none is proved."""
    return min(a.least_peak() for a in archives)


def _over(value: float, bound: float) -> float:
    """By which share of a bound, at least, a value is above it."""
    if value <= bound:
        return 0.0
    return value / bound - 1.0 if bound > 0 else float("inf")


# The user's own shardings as a plan: what they say, spread through the program as it comes.
#
# Pinned values have one layout to begin with. From there every operation in turn runs as is
# cheapest where its operands already are, as propagation of shardings does it; what nobody has said
# anything of follows its readers. No search has to find this plan, so no search can be worse than
# it.


def as_given(assembled: PlanProblem) -> Candidate | None:
    """The plan that the pins and constraints of a problem lead to; None where the way ends."""
    schedule = assembled.choices.schedule
    ports = [schedule.program.instances[u.root].port for u in schedule.units]
    entering = [u for u, port in enumerate(ports) if port in ("input", "state", "constant")]
    problem = assembled.problem
    said = [u for u in entering if len(problem.variables[u]) == 1]
    silent = set(entering) - set(said)
    order = [*said, *(i for i in range(len(problem.variables)) if i not in {*said, *silent})]
    rows = spread(problem, [*order, *sorted(silent)])
    found = Candidate.of(problem, rows)
    return found if np.isfinite(found.seconds) else None


def spread(problem: Problem, order: Sequence[int]) -> Ints:
    """A row of every variable, chosen one after another for the least seconds with those before;
    what all would be as good for is the first."""
    pairs: dict[int, list[int]] = defaultdict(list)
    for k, p in enumerate(problem.pairs):
        pairs[p.a].append(k)
        pairs[p.b].append(k)
    rows = np.full(len(problem.variables), -1, dtype=np.int64)
    for i in order:
        costs = problem.variables[i].seconds.copy()
        for k in pairs[i]:
            p = problem.pairs[k]
            other = p.b if p.a == i else p.a
            if rows[other] < 0 or other == i:
                continue
            if p.a == i:
                costs += p.seconds[:, p.label_b[rows[other]]][p.label_a]
            else:
                costs += p.seconds[p.label_a[rows[other]]][p.label_b]
        rows[i] = int(costs.argmin())
    return rows


# Rounded first: what is sent for a rounding alone is rounded before, and sent in fewer bytes.
#
# Matrix units of some machines read operands rounded (`tapestry_egg/rewrite/operand_rounding.py`).
# A search finds most plans that round before they send; some it does not see: inside a kernel,
# where what is read and made has as few bytes, or where several choices would have to change at
# once. Their compilers move the rounding before the collective in any case, so that such a plan
# would promise more bytes than are sent.


def rounded_first(plan: Plan, ground: Ground) -> Plan:
    """The plan with roundings moved before what is sent for them alone, as far as that costs none
    of seconds, bytes and joules more, nor fewer seconds than are proven (`plan.bound`)."""
    reads = fetches(plan.body)
    for k, op in enumerate(plan.graph.operations):
        body = _moved(plan.body, k, reads) if registry.meaning(op.kernel) == "rounding" else None
        if body is None:
            continue
        trial = replace(plan, body=body)
        try:
            costs = Walk(trial, ground).certificate().costs
        except ExtractError:  # not legal: its kernel cannot run as two
            continue
        if plan.bound <= costs.seconds and _no_worse(costs, plan.costs):
            plan = replace(trial, costs=costs, collectives=planned_collectives(trial))
            reads = fetches(body)
    return plan


def _no_worse(costs: Costs, before: Costs) -> bool:
    return (
        costs.seconds <= before.seconds
        and costs.peak_bytes <= before.peak_bytes
        and costs.joules <= before.joules
    )


def _moved(body: BodyPlan, k: int, reads: Sequence[Sequence[Fetch]]) -> BodyPlan | None:
    """The body with operation k, a rounding, before what is sent for it alone, if something is;
    what is then sent of it its readers share, if there are several. `reads` as `fetches` gives."""
    strategy = body.strategies[k]
    (read,) = reads[k]
    (made,) = body.graph.operations[k].outputs
    sent = read.origin == "copy" and read.moves and not read.keep and not read.merged
    if not sent or read.have.partial or strategy.cuts != read.need.dims or made in body.kept:
        return None
    first = replace(strategy, cuts=read.have.dims, needs=(read.have,), gives=(read.have,))
    readers = [j for j, r in enumerate(reads) for f in r if f.value == made]
    if any(f.need != read.need for r in reads for f in r if f.value == made):
        return None
    shared = {made: Kept(read.need, max(readers))} if len(set(readers)) > 1 else {}
    return replace(
        body,
        strategies=(*body.strategies[:k], first, *body.strategies[k + 1 :]),
        copies={**body.copies, (made, read.have, read.need): read.steps},
        kept={**body.kept, **shared},
    )
