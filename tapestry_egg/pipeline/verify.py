"""What must hold between passes, checked from what a pass made alone.

Each check is linear in what it looks at and far cheaper than the pass. A failure is a defect of
tapestry-egg, told with the entry at fault.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.machine.objectives import DEVICES
from tapestry_egg.machine.topology import parts

from .state import State

if TYPE_CHECKING:
    from tapestry_egg.extract.problem.problem import Problem


def shapes(state: State) -> None:
    """There is a mesh shape, and each has a part of the machine's devices that plans may have."""
    _holds(bool(state.shapes), "no mesh shape", "mesh shapes")
    machine, named = state.question.machine, state.question.named_shapes
    most = state.question.limits.get(DEVICES.name, math.inf)
    for shape in state.shapes:
        is_part = shape.devices in parts(machine.shape, machine.devices)
        _holds(is_part and (named or shape.devices <= most), "other devices", str(shape))


def _holds(fact: bool, what: str, where: str) -> None:
    if not fact:
        hint = "This is a defect of tapestry-egg; please report the program."
        raise ExtractError(what, where=where, hint=hint)


def forms(state: State) -> None:
    """Every form is a sound graph that takes and returns what the program does."""
    given = state.question.graph
    asked = [[given.values[v] for v in ends] for ends in (given.inputs, given.outputs)]
    for k, form in enumerate(state.forms):
        where = f"form {k + 1} of {given.name}"
        verify_graph(form.graph, where)
        graph = form.graph
        own = [[graph.values[v] for v in ends] for ends in (graph.inputs, graph.outputs)]
        for name, mine, theirs in zip(("inputs", "outputs"), own, asked, strict=True):
            same = [(t.shape, t.dtype) for t in mine] == [(t.shape, t.dtype) for t in theirs]
            _holds(same, f"other {name} than the program's", where)


def schedules(state: State) -> None:
    """Every instance runs in one unit, and no unit reads what a later one makes."""
    for k, schedule in enumerate(state.schedules):
        where = f"schedule of form {k + 1}"
        members = [m for unit in schedule.units for m in unit.members]
        _holds(len(members) == len(set(members)), "an operation runs in two units", where)
        loops = {v for i in schedule.program.instances if i.port == "carry" for v in i.outputs}
        for u, unit in enumerate(schedule.units):
            for _, _, v in unit.reads:
                made = schedule.producer[v]
                sound = made >= 0 and (
                    made < u or v in loops or unit.body != schedule.units[made].body
                )
                sound = sound or schedule.program.instances[unit.root].port != ""
                _holds(sound, f"unit {u} reads value {v}, which unit {made} makes", where)


def forms_and_schedules(state: State) -> None:
    """Both, one schedule for each form."""
    forms(state)
    schedules(state)


def encodings(state: State) -> None:
    """Every operation has a signature, and every signature its facts."""
    for k, encoding in enumerate(state.encodings):
        where = f"facts of {state.networks[k]}"
        numbers = set(encoding.signature_of)
        _holds(len(encoding.signature_of) == len(encoding.program.instances), "missing", where)
        _holds(numbers == set(range(len(encoding.signatures))), "unused signatures", where)
        told = encoding.facts.get("signature", ())
        _holds(len(told) == len(encoding.signatures), "no fact", where)


def strategies(state: State) -> None:
    """Every signature has a way to run, each with one layout for every operand and output."""
    for k, found in enumerate(state.strategies):
        for s, (signature, rows) in enumerate(
            zip(found.encoding.signatures, found.strategies, strict=True)
        ):
            where = f"{signature.kernel}, signature {s} of {state.networks[k]}"
            types = (*signature.input_types, *signature.output_types)
            ranks = [t.rank for t in types]
            for row in rows:
                _holds([len(x.dims) for x in row.layouts] == ranks, "layouts do not fit", where)


def choices(state: State) -> None:
    """Every unit has a row, and every row a layout for each read and each output."""
    for k, every in enumerate(state.choices):
        for u, (unit, rows) in enumerate(zip(every.schedule.units, every.rows, strict=True)):
            where = f"unit {u} of {state.networks[k]}"
            _holds(len(rows) > 0, "no way to run", where)
            _holds(len(rows.needs[0]) == len(unit.reads), "reads without a layout", where)
            _holds(len(rows.gives[0]) == len(unit.outputs), "outputs without a layout", where)


def problems(state: State) -> None:
    """One for every form on every mesh shape: tables of the right shapes, no cost below zero, and
    no moment outside the program."""
    _holds(len(state.problems) == len(state.networks), "missing", "problems")
    for n in state.networks:
        if n.problem is not None:
            choices, where = n.problem.choices, f"problem of {n}"
            own = choices.mesh == n.mesh and choices.schedule is n.schedule
            _holds(own, "of another form or mesh", where)
            _is_sound(n.problem.problem, where)


def _is_sound(problem: Problem, where: str) -> None:
    for x in problem.variables:
        _holds(len(x.seconds) == len(x.joules) > 0, f"{x.name} has no rows", where)
        _holds(bool((x.seconds >= 0).all()), f"{x.name} costs less than nothing", where)
        for use in x.uses:
            inside = 0 <= use.start <= use.end <= problem.times
            _holds(inside and len(use.amount) == len(x), f"{x.name} occupies no moment", where)
    for p in problem.pairs:
        names = f"{problem.variables[p.a].name}, {problem.variables[p.b].name}"
        fits = len(p.label_a) == len(problem.variables[p.a]) and len(p.label_b) == len(
            problem.variables[p.b]
        )
        _holds(fits and p.a != p.b, f"{names}: labels do not fit", where)


def networks(state: State) -> None:
    """Each is of a form and its schedule, and sound as far as it is made."""
    _holds(bool(state.networks), "no network", "networks")
    for n in state.networks:
        own = state.forms[n.number] is n.form and state.schedules[n.number] is n.schedule
        _holds(own, "of another form", str(n))
        if n.problem is not None:
            _is_sound(n.problem.problem, f"problem of {n}")


def results(state: State) -> None:
    """What a search says of its fastest labelling is what the problem says of it."""
    for k, result in enumerate(state.results):
        found = min(result.archive.candidates, key=lambda c: c.costs, default=None)
        if found is None:
            continue
        said = np.array(found.costs)
        true = np.array(Candidate.of(result.assembled.problem, found.rows).costs)
        close = bool(np.allclose(said, true, rtol=1e-9, atol=0.0))
        _holds(close, f"the search says {said}, the problem {true}", f"search {k}")


def front(state: State) -> None:
    """The front has a plan, and no plan is faster than its bound."""
    found = state.front
    _holds(found is not None and len(found) > 0, "no plan", "front")
    for plan in found or ():
        sound = plan.bound <= plan.costs.seconds * (1 + 1e-6)
        _holds(sound, f"the bound {plan.bound} is above {plan.costs.seconds}", f"plan {plan.name}")
