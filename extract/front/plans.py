"""From a labelling of the problem to a plan: strategies, kept copies and paths for every body."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.buffers import may_have_places
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.choices.unit_choices import UnitChoices
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.extract.problem.assemble import PlanProblem, Sharing
from tapestry_egg.extract.problem.problem import Ints
from tapestry_egg.graph.ids import BodyId, InstanceId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.energy import dollars
from tapestry_egg.plans.plan import BodyPlan, Change, Costs, Kept, Plan, Strategy
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.schedule.flatten import Instance
from tapestry_egg.schedule.schedules import read_position

#: Sums in another order differ by this share.
_TOLERANCE = 1e-6


def make_plan(
    assembled: PlanProblem,
    candidate: Candidate,
    name: str,
    bound: float,
    grounds: dict[int, Ground] | None = None,
    listed: bool = True,
) -> Plan:
    """The executable plan of one labelling, with its predicted costs and its bound in seconds; its
    collectives, and the bytes that they send, where these are to be `listed`.

    Costs are counted from the plan if the problem counts them from below: where compilers hold
    memory for results before they are made, or a kernel's rows may be sent with those of an earlier
    one. `grounds`, by the identity of schedules, serve for several plans, and what is found so is
    added. Raises ExtractError where less is counted from the plan than the search has proven of its
    labelling.
    """
    choices = assembled.choices
    rows = _settled(assembled, candidate.rows)
    seconds, joules, profile = assembled.problem.evaluate(rows)
    builder = _Builder(assembled, rows)
    plan = Plan(
        name=name,
        mesh=choices.mesh,
        target=choices.target.spec,
        body=builder.body(0),
        costs=Costs(
            seconds=seconds,
            peak_bytes=round(float(profile.max(initial=0.0))),
            joules=joules,
            flops=builder.flops,
            serial_seconds=assembled.problem.serial(rows),
            dollars=dollars(seconds, choices.mesh.devices, choices.target),
        ),
        bound=bound,
        rules=choices.schedule.program.rules,
        steps=choices.schedule.program.steps,
    )
    collectives = planned_collectives(plan) if listed else ()
    wire = float(sum(c.wire_bytes * c.count for c in collectives))
    plan = replace(plan, collectives=collectives, costs=replace(plan.costs, wire_bytes=wire))
    if may_hold_more(choices) or choices.sent_ahead:
        schedule, known = choices.schedule, {} if grounds is None else grounds
        ground = known.get(id(schedule)) or Ground(schedule, choices.target)
        known[id(schedule)] = ground
        walk = Walk(plan, ground)
        if choices.sent_ahead:
            costs = walk.certificate().costs
        else:
            walk.find_moves()
            costs = replace(plan.costs, peak_bytes=round(max(walk.profile(), default=0.0)))
        for name in ("seconds", "peak_bytes", "joules"):
            counted, proven = getattr(costs, name), getattr(plan.costs, name)
            if counted < (1.0 - _TOLERANCE) * proven:
                raise ExtractError(
                    f"{name} of {counted} was counted, the search proved at least {proven}",
                    where=f"a plan on {plan.mesh}",
                    hint="This is a defect of tapestry-egg; please report the program.",
                )
        plan = replace(plan, costs=costs)
    return plan


def may_hold_more(choices: UnitChoices) -> bool:
    """Whether plans may hold memory for results before they are made, more than a search counts."""
    return choices.target.reserves and may_have_places(choices.schedule, choices.target)


def _settled(assembled: PlanProblem, rows: Ints) -> Ints:
    """The same labelling with no copy kept longer than to the last reader that takes it."""
    rows = rows.copy()
    for value in assembled.sharing:
        row = int(rows[value.variable])
        have, kept = value.rows[row]
        if kept is None:
            continue
        takers = _takers(assembled, value, kept, rows)
        unit_row = _unit_row(assembled, value.variable)
        enough = [
            (-1 if k is None else k[1], r)
            for r, (h, k) in enumerate(value.rows)
            if h == have
            and unit_row[r] == unit_row[row]
            and (not takers if k is None else k[0] == kept[0] and k[1] >= max(takers, default=0))
        ]
        rows[value.variable] = min(enough)[1]
    return rows


def _unit_row(assembled: PlanProblem, variable: int) -> Ints:
    """Which row of its unit each row of a variable runs; variables without a unit run none."""
    if variable < len(assembled.unit_row):
        return assembled.unit_row[variable]
    return np.zeros(len(assembled.problem.variables[variable]), dtype=np.int64)


def _takers(
    assembled: PlanProblem, value: Sharing, kept: tuple[Layout, int], rows: Ints
) -> list[int]:
    """Positions among the value's readers of those that a kept copy serves."""
    choices = assembled.choices
    layout, ending = kept
    places = [read_position(choices.schedule, r, value.value) for r in value.readers]
    found = []
    for position, (reader, place) in enumerate(zip(value.readers, places, strict=True)):
        row = int(assembled.unit_row[reader][rows[reader]])
        wanted = {
            need
            for need, (_, _, v) in zip(
                choices.rows[reader].needs[row], choices.schedule.units[reader].reads, strict=True
            )
            if v == value.value
        }
        if place <= places[ending] and layout in wanted:
            found.append(position)
    return found


class _Builder:
    def __init__(self, assembled: PlanProblem, rows: Ints) -> None:
        self.choices = assembled.choices
        self.plan = self.choices.schedule
        self.program = self.plan.program
        self.given: dict[int, Layout] = {}  # flat value -> layout it is produced in
        self.needed: dict[tuple[int, int], Layout] = {}  # (instance, operand) -> layout
        self.strategies: dict[int, Strategy] = {}  # instance -> strategy
        self.copies: dict[int, dict[tuple[int, Layout, Layout], tuple[Change, ...]]]
        self.copies = defaultdict(dict)
        self.kept: dict[int, dict[int, Kept]] = defaultdict(dict)
        self.flops = 0.0
        self.local: dict[int, int] = {
            v: k for body in self.program.bodies for k, v in enumerate(body.values)
        }
        for u, unit in enumerate(self.plan.units):
            self._unit(u, int(assembled.unit_row[u][rows[u]]), unit.members)
        self._keep(assembled, rows)
        self._route()

    def _unit(self, u: int, row: int, members: tuple[InstanceId, ...]) -> None:
        unit_rows = self.choices.rows[u]
        root = self.program.instances[members[-1]]
        self.flops += float(unit_rows.flops[row]) * root.weight
        for m, i in enumerate(members):
            instance = self.program.instances[i]
            s = self.choices.strategy(i, int(unit_rows.choice[row, m]))
            reads = len(instance.inputs)
            needs, gives = s.layouts[:reads], s.layouts[reads:]
            self.strategies[i] = Strategy(s.cuts, needs, gives)
            for p, layout in enumerate(needs):
                self.needed[i, p] = layout
            for v, layout in zip(instance.outputs, gives, strict=True):
                self.given[v] = layout

    def _keep(self, assembled: PlanProblem, rows: Ints) -> None:
        for value in assembled.sharing:
            _, kept = value.rows[int(rows[value.variable])]
            if kept is None:
                continue
            layout, ending = kept
            body = self.program.body_of[value.value]
            until = read_position(self.plan, value.readers[ending], value.value)
            self.kept[body][self.local[value.value]] = Kept(layout, until)
            self._copy(body, value.value, layout)

    def _route(self) -> None:
        """Paths of every copy that some reader makes, and the bytes they send."""
        for i, instance in enumerate(self.program.instances):
            for p, v in enumerate(instance.inputs):
                self._copy(self.program.body_of[v], v, self.needed[i, p])

    def _copy(self, body: int, v: int, target: Layout) -> None:
        source = self.given[v]
        if source == target:
            return
        table = self.choices.table(v)
        self.copies[body][self.local[v], source, target] = table.path(source, target)

    def body(self, b: int) -> BodyPlan:
        """The plan of one body, with those of the regions in it."""
        body = self.program.bodies[b]
        graph = body.graph
        by_operation: dict[int, int] = {}
        for i, instance in enumerate(self.program.instances):
            if instance.body == b and instance.operation >= 0:
                by_operation[instance.operation] = i
        strategies = []
        for k, op in enumerate(graph.operations):
            if op.regions:
                strategies.append(self._region(b, k))
            else:
                strategies.append(self.strategies[by_operation[k]])
        return BodyPlan(
            graph=graph,
            inputs=tuple(self.given[body.values[v]] for v in graph.inputs),
            outputs=self._leaving(b),
            strategies=tuple(strategies),
            kept=dict(self.kept[b]),
            copies=dict(self.copies[b]),
            groups=self._groups(b),
        )

    def _groups(self, b: int) -> tuple[int, ...]:
        """The unit that each operation of a body runs in; region operations are on their own."""
        groups = [-1] * len(self.program.bodies[b].graph.operations)
        for u, unit in enumerate(self.plan.units):
            for i in unit.members:
                instance = self.program.instances[i]
                if instance.body == b and instance.operation >= 0 and len(unit.members) > 1:
                    groups[instance.operation] = u
        return tuple(groups)

    def _ports(self, b: int, operation: int) -> dict[str, list[int]]:
        """The ports of one region operation by kind, in order."""
        start, stop = self.program.spans[BodyId(b), operation]
        ports: dict[str, list[int]] = defaultdict(list)
        for i in range(start, stop):
            instance: Instance = self.program.instances[i]
            if instance.body == b and instance.port:
                ports[instance.port].append(i)
        return ports

    def _region(self, b: int, operation: int) -> Strategy:
        op = self.program.bodies[b].graph.operations[operation]
        ports = self._ports(b, operation)
        enter = [self.needed[i, 0] for i in ports["invariant"]]
        carried = [self.needed[i, 0] for i in ports["carry"]]
        final = [self.strategies[i].gives[-1] for i in ports["carry"]]
        if op.is_scan:
            needs = enter + carried + [self.needed[i, 0] for i in ports["stream"]]
            gives = final + [self.strategies[i].gives[0] for i in ports["stack"]]
        elif op.is_while:
            needs, gives = enter + carried, final
        else:
            needs = [self.needed[ports["predicate"][0], 0], *enter]
            gives = [self.strategies[i].gives[0] for i in ports["branch"]]
        bodies = [
            self.body(n)
            for n, inner in enumerate(self.program.bodies)
            if inner.parent == b and inner.operation == operation
        ]
        return Strategy((), tuple(needs), tuple(gives), tuple(bodies))

    def _leaving(self, b: int) -> tuple[Layout, ...]:
        """The layouts in which a body's outputs leave it."""
        body = self.program.bodies[b]
        if body.parent < 0:
            out: dict[int, Layout] = {}
            state = [i for i, n in enumerate(self.program.instances) if n.port == "state"]
            plain = [i for i, n in enumerate(self.program.instances) if n.port == "output"]
            returning = {i: j for j, i in self.program.feedback.items()}
            for i, input_position in zip(state, sorted(returning), strict=True):
                out[returning[input_position]] = self.needed[i, 0]
            others = [j for j in range(len(body.graph.outputs)) if j not in out]
            for i, j in zip(plain, others, strict=True):
                out[j] = self.needed[i, 0]
            return tuple(out[j] for j in range(len(body.graph.outputs)))
        op = self.program.bodies[body.parent].graph.operations[body.operation]
        ports = self._ports(body.parent, body.operation)
        carried = [self.needed[i, 1] for i in ports["carry"]]
        if op.is_scan:
            return tuple(carried + [self.needed[i, 0] for i in ports["stack"]])
        if op.is_while:
            if body.region == 0:
                return (self.needed[ports["predicate"][0], 0],)
            return tuple(carried)
        return tuple(self.needed[i, body.region] for i in ports["branch"])
