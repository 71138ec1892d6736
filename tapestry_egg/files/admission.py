"""Admission: what a file says of plans, certified before it is believed.

Nothing in a file counts as evidence, its digests least of all. The form that a plan runs must
compute what the program in the file does (`rewrite/equivalence.py`); every strategy, layout, copy
and boundary must be legal, and every cost, counted again from the plan, the program and the machine
in the file, must be what the plan says (`extract/certify/recount.py`). Bounds cannot be proven
again without the search: they are only held against the costs. `steps`, `notes`, `timeline` and
`epsilon` tell how plans were found; nothing that runs depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path

from tapestry_egg.errors import (
    ExtractError,
    PlanError,
    RuleError,
    TapestryError,
    TemplateError,
)
from tapestry_egg.extract.certify.certificate import said_and_true
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.certify.verdict import Refused
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.objectives import objective
from tapestry_egg.machine.topology import parts
from tapestry_egg.plans.plan import CERTIFIED, BodyPlan, Plan, RuleStep
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.rewrite.changes import changed, is_change
from tapestry_egg.rewrite.equivalence import check_equivalent
from tapestry_egg.rewrite.operand_rounding import unrounded
from tapestry_egg.rewrite.recomputation.second_places import retake
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, Rule, RuleBook, book_names, load_books
from tapestry_egg.schedule.of_plans import groups_of, plan_schedule
from tapestry_egg.tracing.constants import prepare

#: Costs counted again differ from those of a true plan by this share at most.
TOLERANCE = 1e-9
_HINT = (
    "The file was changed after it was written, or another version of tapestry-egg wrote it, which "
    "has other operations or costs. Search again: `tapestry-egg optimize GRAPH`, or te.optimize."
)


def admit(
    plans: Sequence[Plan],
    at: Sequence[str],
    where: str = "$",
    rules: Sequence[str | Path | RuleBook] = (),
    folder: Path | None = None,
) -> None:
    """Certify plans of one program that come from a file.

    `at[i]` is the place of plan i, `where` that of the file. Rule books of the user's are looked
    for where plans say that they were, and in `folder`. Raises PlanError with the place of the
    first thing that is not so.
    """
    try:
        _admit(plans, at, where, rules, folder)
    except PlanError:
        raise
    except TapestryError as e:
        place = f"{where}, {e.where}" if e.where else where
        hint = e.hint if isinstance(e, RuleError | TemplateError) and e.hint else _HINT
        raise PlanError(e.what, where=place, hint=hint) from None
    except (
        *(ArithmeticError, LookupError, TypeError, ValueError, AttributeError),
        *(AssertionError, MemoryError, StopIteration),
    ) as e:
        # What no check had in mind is refused like what a check refuses.
        raise PlanError(
            f"cannot be certified: {type(e).__name__}: {e}", where=where, hint=_HINT
        ) from e


def _admit(
    plans: Sequence[Plan],
    at: Sequence[str],
    where: str,
    rules: Sequence[str | Path | RuleBook],
    folder: Path | None,
) -> None:
    for plan in plans:
        if plan.origin is None or plan.program is None:
            raise PlanError(
                "no machine is named that the plan was made for",
                where=f"{where}.origin.machine",
                hint="Only plans that te.optimize made can be certified; "
                "te.load(.., certify=False) reads others.",
            )
    graphs = {id(p.graph): p.graph for p in plans}
    for graph in graphs.values():
        own = [(p, place) for p, place in zip(plans, at, strict=True) if p.graph is graph]
        _admit_form(graph, own, rules, folder)


def _admit_form(
    graph: BlockGraph,
    own: Sequence[tuple[Plan, str]],
    rules: Sequence[str | Path | RuleBook],
    folder: Path | None,
) -> None:
    """Certify the plans of one form of the program."""
    first, place = own[0]
    assert first.program is not None and first.origin is not None
    named = {name for p, _ in own for name in p.rules}
    paths = tuple(dict.fromkeys(b for p, _ in own if p.origin for b in p.origin.books))
    reads = dict(first.origin.machine.operands)
    given = first.program.graph
    try:
        check_equivalent(
            unrounded(_changed(given, first.steps, named), reads),
            unrounded(graph, reads),
            named,
            lambda: _rules(named, paths, tuple(rules), folder),
        )
    except PlanError as e:
        raise PlanError(e.what, where=f"{place}.graph, {e.where}", hint=e.hint or _HINT) from None
    except RecursionError:
        raise PlanError("nested too deeply", where=f"{place}.graph") from None
    known: dict[int, tuple[Ground, list[tuple[int, ...]]]] = {}
    for plan, place in own:
        which = id(plan) if plan.body.merged else 0  # all others have one schedule
        if which not in known:
            try:
                found = plan_schedule(plan.body, dict(first.origin.feedback))
            except PlanError as e:
                raise PlanError(e.what, where=f"{place}.body.merged", hint=_HINT) from None
            known[which] = Ground(found, first.origin.machine), groups_of(found)
        _admit_plan(plan, place, *known[which])


def _changed(given: BlockGraph, steps: Sequence[RuleStep], named: set[str]) -> BlockGraph:
    """The program with all changes of it whose names a form has. Where values were made again
    before one of them, the steps up to it are taken as they were: either leaves it the same.

    Raises PlanError for steps among these that are of rules, and where values were made again more
    than once: no search does that, and each time may double the program.
    """
    again = [k for k, step in enumerate(steps) if step.numbers]
    last = [k for k, step in enumerate(steps) if again and again[0] < k and _is_change(step)]
    taken = steps[: last[-1] + 1] if last else ()
    if sum(bool(step.numbers) for step in taken) > 1:
        raise PlanError("values were made again more than once before a change", where="steps")
    for step in taken:
        if step.numbers:
            given = retake(prepare(given, trusted=False), step.numbers)
        elif _is_change(step):
            given = changed(given, step.rules)
        else:
            raise PlanError("rules were used before values were made again", where="steps")
    return changed(given, named.difference(*(step.rules for step in taken)))


def _is_change(step: RuleStep) -> bool:
    return bool(step.rules) and is_change(step.rules[0])


def _rules(
    named: set[str],
    paths: tuple[str, ...],
    given: tuple[str | Path | RuleBook, ...],
    folder: Path | None,
) -> tuple[Rule, ...]:
    """All rules that may have made a form; those of the user's own are verified first."""
    from tapestry_egg.rules.verify.trust import ensure_verified

    own: list[str | Path | RuleBook] = list(given)
    for text in paths if not given else ():
        path = Path(text)
        beside = (folder or Path()) / path.name
        if not path.is_file() and not beside.is_file():
            raise PlanError(
                f"plans were made with rules of {text}, which is not there",
                where="rules",
                hint="Give the rule book: te.load(.., rules=[..]), or --rules.",
            )
        own.append(path if path.is_file() else beside)
    shipped = _shipped()
    lacking = named - {r.name for b in shipped for r in b.rules}
    books = load_books((*(b for b in shipped if b.name in DEFAULT_BOOKS or lacking), *own))
    mine = books[len(books) - len(own) :] if own else ()
    ensure_verified(mine)
    return tuple(r for b in books for r in b.rules)


@cache
def _shipped() -> tuple[RuleBook, ...]:
    return load_books(book_names())


def admit_front(
    front: Front,
    where: str,
    rules: Sequence[str | Path | RuleBook] = (),
    folder: Path | None = None,
) -> None:
    """Certify a front that comes from elsewhere: its plans, that of the user's own shardings among
    them, as `admit` does, and what it says beside them. Raises PlanError with the place."""
    check_head(front, where)
    plans = list(front.plans)
    at = [f"{where}.plans[{i}]" for i in range(len(plans))]
    if front.original is not None:
        plans, at = [*plans, front.original], [*at, f"{where}.original"]
    admit(plans, at, where, rules, folder)


def check_head(front: Front, where: str) -> None:
    """Check what a front says of all of its plans. Raises PlanError with the place."""
    names = [p.name for p in front.plans]
    if len(set(names)) != len(names):
        raise PlanError("two plans have one name", where=f"{where}.plans", hint=_HINT)
    for p in front.plans:
        if p.origin is None:
            continue
        machine = p.origin.machine
        for what, said, true in (
            ("target", front.target, machine.spec),
            ("usable_bytes", front.usable_bytes, machine.usable_bytes),
            ("graph_name", front.graph_name, p.program.graph.name if p.program else ""),
        ):
            if said != true:
                raise PlanError(
                    f"is {said!r:.80}, the plans are for {true!r:.80}",
                    where=f"{where}.{what}",
                    hint=_HINT,
                )
    for k, name in enumerate(front.objectives):
        try:
            objective(name)
        except ExtractError as e:
            raise PlanError(e.what, where=f"{where}.objectives[{k}]", hint=_HINT) from None
    if math.isnan(front.epsilon) or front.epsilon < 0:
        raise PlanError(f"{front.epsilon!r} is no share", where=f"{where}.epsilon", hint=_HINT)


def _admit_plan(plan: Plan, place: str, ground: Ground, groups: Sequence[tuple[int, ...]]) -> None:
    """Certify one plan."""

    def refuse(what: str, at: str) -> PlanError:
        return PlanError(what, where=f"{place}.{at}", hint=_HINT)

    mesh, target = plan.mesh, ground.target
    if plan.target != target.spec:
        raise refuse(f"is {plan.target!r:.80}, the machine is {target.spec}", "target")
    if len(set(mesh.names)) != len(mesh.names) or not all(mesh.names):
        raise refuse(f"axes are called {', '.join(mesh.names)!r:.80}", "mesh.names")
    if mesh.devices > target.devices:
        raise refuse(f"{mesh} has more devices than {target.spec}", "mesh.sizes")
    if mesh.devices not in parts(target.shape, target.devices):
        raise refuse(f"{mesh} is no part of {target.spec}", "mesh.sizes")
    try:
        walk = Walk(plan, ground)
        found = walk.certificate()
    except Refused as e:
        raise refuse(e.what, _path(ground, e.at)) from None
    except ExtractError as e:
        raise refuse(e.what, "body") from None
    recounted = replace(plan, costs=found.costs)
    for name, said, true in said_and_true(plan, recounted):
        if not abs(said - true) <= TOLERANCE * max(abs(said), abs(true)):
            raise refuse(f"is {said!r}, counted again it is {true!r}", f"costs.{name}")
    if not 0.0 <= plan.bound <= plan.costs.seconds * (1.0 + TOLERANCE):
        raise refuse(f"{plan.bound!r} is no bound of {plan.costs.seconds!r} seconds", "bound")
    moved = planned_collectives(plan)
    for k, (said_, true_) in enumerate(zip(plan.collectives, moved, strict=False)):
        if astuple(said_) != astuple(true_):
            raise refuse(f"is not what the plan does: {true_}", f"collectives[{k}]")
    if len(plan.collectives) != len(moved):
        raise refuse(f"the plan makes {len(moved)} collectives", "collectives")
    _check_bodies(plan.body, ground, walk, groups, refuse)
    CERTIFIED.add(plan)


def _check_bodies(
    body: BodyPlan,
    ground: Ground,
    walk: Walk,
    groups: Sequence[tuple[int, ...]],
    refuse: Callable[[str, str], PlanError],
) -> None:
    """What lowering takes from a plan and costs do not show."""
    del body
    for b, one in enumerate(walk.bodies):
        at = _body_path(ground, b)
        if one.groups != groups[b]:
            raise refuse("the kernels are not those of the schedule", f"{at}.groups")
        for k, (op, s) in enumerate(zip(one.graph.operations, one.strategies, strict=True)):
            if op.regions and s.cuts:
                raise refuse("a region operation is not cut itself", f"{at}.strategies[{k}].cuts")
        for n, ((v, have, need), steps) in enumerate(one.copies.items()):
            if walk.copy_of(b, v, have, need) != need:
                raise refuse(f"{len(steps)} steps lead elsewhere", f"{at}.copies[{n}]")


def _body_path(ground: Ground, b: int) -> str:
    body = ground.program.bodies[b]
    if body.parent < 0:
        return "body"
    outer = _body_path(ground, body.parent)
    return f"{outer}.strategies[{body.operation}].bodies[{body.region}]"


def _path(ground: Ground, at: tuple[int, int]) -> str:
    b, k = at
    path, graph = _body_path(ground, b), ground.program.bodies[b].graph
    if not 0 <= k < len(graph.operations):
        return f"{path}.outputs"
    op = graph.operations[k]
    return f"{path}.strategies[{k}] ({op.kernel}, {op.source})"
