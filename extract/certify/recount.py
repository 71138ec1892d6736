"""Recount: the costs of a finished plan from scratch.

Nothing here comes from the tables of a search: from the plan itself and the target, every strategy
is checked device by device, every copy is walked step by step, and seconds, joules, flops and peak
bytes are added up again. The schedule says which operations run as one kernel, in which order, and
when values live. Bytes on the wire are those of the collectives that the plan lists, which the
ledger holds against the emitted program.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial, reduce

import numpy as np

from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import BodyId, FlatId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import (
    carried_as,
    collective_seconds,
    collective_wire_bytes,
)
from tapestry_egg.machine.energy import (
    collective_dynamic_joules,
    collective_joules,
    dollars,
    idle_joules,
    joules,
)
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.collectives import after
from tapestry_egg.plans.exchanges import Exchange, Reader, exchanges, sent_together
from tapestry_egg.plans.plan import BodyPlan, Change, Plan, PlannedCollective, Strategy
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.schedule.flatten import FlatProgram, Instance
from tapestry_egg.schedule.lifetimes import Lives
from tapestry_egg.schedule.units import Unit
from tapestry_egg.shard.neighbours import (
    ExchangeCosts,
    held_until_read,
    makers,
    unit_exchange_costs,
)

from .buffers import buffers, in_places
from .ground import Ground
from .kernel_work import (
    Work,
    block_bytes,
    held_bytes,
    kernel_scratch,
    kernel_work,
)
from .legality import Illegal, check_layout, check_permute, check_strategy
from .longest_path import Sending
from .merging import Joined, Unmerged, joined
from .moves import (
    InTwo,
    copy_in_memory,
    in_two,
    inner_moves,
    read_again,
    turned_for,
    turning,
    turns_before,
    turns_on_the_way,
)
from .moves import Move as Move
from .verdict import Buffer, Certificate, Copied, Refused


class Walk:
    """One plan, flat value by flat value."""

    def __init__(self, plan: Plan, ground: Ground) -> None:
        self.plan, self.mesh, self.ground = plan, plan.mesh, ground
        self.schedule, self.target, self.program = ground.schedule, ground.target, ground.program
        self.body_of, self.local, self.times = ground.body_of, ground.local, ground.times
        self.bodies = self._nested()
        self.ports: PortLayouts = port_layouts(self.program, self.bodies)
        self.given: dict[int, Layout] = {}
        self.needed: dict[tuple[int, int], Layout] = {}
        self.moves: list[Move] = []
        self.kept: set[int] = set()  # values whose kept copy some reader takes
        self.in_two: dict[int, InTwo] = {}
        self.joined: Mapping[Move, Joined] = {}
        self.margins: dict[int, tuple[Exchange, ...]] = {}  # by instance

    @cached_property
    def collectives(self) -> tuple[PlannedCollective, ...]:
        """What the plan sends."""
        return planned_collectives(self.plan)

    def find_moves(self) -> None:
        """Check that all is legal, and list the copies that are made (`moves`)."""
        self._legal()
        self._boundary()
        self._find_moves()

    def certificate(self) -> Certificate:
        self.find_moves()
        serial = energy = flops = 0.0
        kernels: list[float] = []
        sendings: list[Sending] = []
        for unit in self.schedule.units:
            kernel = self.kernel(unit)
            weight = self.times[self.body_of_instance(unit.root)]
            serial, energy = serial + weight * kernel.seconds, energy + weight * kernel.joules
            flops += weight * kernel.flops
            kernels.append(weight * kernel.seconds)
        for move in self.moves:
            copy = self.copy(move)
            weight = self.times[self.body_of[move.value]]
            serial, energy = serial + weight * copy[0], energy + weight * copy[1]
            for u, seconds, spent in turned_for(self, move):
                serial, energy = serial + weight * seconds, energy + weight * spent
                leaves = self.ground.streams.leaves(move.value, (u,))
                kernels[self.ground.lives.maker[move.value] if leaves else u] += weight * seconds
            if move.inner:  # between two kernels that nothing else comes between
                kernels[move.unit] += weight * copy[0]
                continue
            sendings.append(self._sending(move, weight * (copy[0] - copy[3]), weight * copy[3]))
        step = self.ground.streams.step(kernels, sendings)
        profile = self.profile()
        peak = round(max(profile, default=0.0))
        price = dollars(step.seconds, self.mesh.devices, self.target)
        wire = float(sum(c.wire_bytes * c.count for c in self.collectives))
        return Certificate(step.seconds, energy, flops, wire, peak, profile, serial, price, step)

    # The nest of bodies

    def _nested(self) -> list[BodyPlan]:
        found: list[BodyPlan] = []
        for number, body in enumerate(self.program.bodies):
            if body.parent < 0:
                plan = self.plan.body
            else:
                strategy = found[body.parent].strategies[body.operation]
                if len(strategy.bodies) <= body.region:
                    raise self._refuse(body.parent, body.operation, "a region has no plan")
                plan = strategy.bodies[body.region]
            mine, theirs = plan.graph, body.graph
            if mine is not theirs and (
                mine.values != theirs.values
                or [(o.kernel, o.inputs, o.outputs) for o in mine.operations]
                != [(o.kernel, o.inputs, o.outputs) for o in theirs.operations]
            ):
                raise ExtractError(
                    "the plan is of another graph than the schedule",
                    where=f"certificate of plan {self.plan.name}, body {number}",
                )
            if len(plan.strategies) != len(theirs.operations):
                raise ExtractError(
                    f"{len(plan.strategies)} strategies for {len(theirs.operations)} operations",
                    where=f"certificate of plan {self.plan.name}, body {number}",
                )
            found.append(plan)
        return found

    def body_of_instance(self, i: int) -> int:
        return self.program.instances[i].body

    # Legality

    def _legal(self) -> None:
        for i, instance in enumerate(self.program.instances):
            if instance.port:
                needs, gives = self.ports.needs[i], self.ports.gives[i]
                try:
                    check_port(instance, needs, gives, self.mesh)
                except Illegal as e:
                    raise self._refuse(instance.body, instance.operation, str(e)) from None
            else:
                strategy = self.bodies[instance.body].strategies[instance.operation]
                try:
                    beside = _beside(instance.signature, strategy, self.mesh)
                except Illegal as e:
                    raise self._refuse(instance.body, instance.operation, str(e)) from None
                if beside:
                    self.margins[i] = beside
                needs, gives = strategy.needs, strategy.gives
            for p, layout in enumerate(needs):
                self.needed[i, p] = layout
            for v, layout in zip(instance.outputs, gives, strict=True):
                self.given[v] = layout

    def _boundary(self) -> None:
        body, graph = self.plan.body, self.plan.body.graph
        for j, i in self.program.feedback.items():
            if body.outputs[j] != body.inputs[i]:
                name = graph.output_names[j] if graph.output_names else str(j)
                raise ExtractError(
                    f"output {name} feeds back and leaves as {body.outputs[j].show(self.mesh)}, "
                    f"but enters as {body.inputs[i].show(self.mesh)}",
                    where=f"certificate of plan {self.plan.name} on {self.mesh}",
                )
        for layout in (*body.inputs, *body.outputs):
            if layout.partial:
                raise ExtractError(
                    "a partial value crosses the function's boundary",
                    where=f"certificate of plan {self.plan.name} on {self.mesh}",
                )

    # Copies

    def _find_moves(self) -> None:
        for u, reads in enumerate(self.ground.reads):
            own: set[tuple[int, Layout]] = set()
            for i, p, v, at, region in reads:
                have, need = self.given[v], self.needed[i, p]
                if have == need:
                    continue
                b = self.body_of[v]
                kept = self.bodies[b].kept.get(self.local[v])
                if kept is not None and kept.layout == need and at <= kept.until:
                    if v not in self.kept:
                        self.moves.append(Move(v, have, need, -1, (b, at), region))
                    self.kept.add(v)
                elif (v, need) not in own:
                    own.add((v, need))
                    self.moves.append(Move(v, have, need, u, (b, at), region))
        self.in_two = self._in_two()
        self.moves += [two.move for two in self.in_two.values()]
        try:
            self.joined = joined(self)
        except Unmerged as e:
            raise self._refuse(*e.at, str(e)) from None

    def with_others(self, move: Move) -> Joined | None:
        """The collective that makes a copy together with others, if one does."""
        if move.inner or self.body_of[move.value]:
            return None
        return self.joined.get(move)

    def _in_two(self) -> dict[int, InTwo]:
        """The units that run as two kernels."""
        found: dict[int, InTwo] = {}
        for move in inner_moves(self.ground, self.given, self.needed):
            b = self.body_of[move.value]
            steps = self.bodies[b].copies.get((self.local[move.value], move.have, move.need), ())
            two = found.get(move.unit) or in_two(self.ground, move, self.needed, steps)
            if two is None or two.move.value != move.value:
                raise self._refuse(*move.reader, f"value {move.value} is copied inside a kernel")
            found[move.unit] = two
        return found

    def copy(self, move: Move) -> tuple[float, float, float, float]:
        """(seconds, joules of the mesh, wire bytes, seconds within a device) of one copy, walked
        step by step."""
        b = self.body_of[move.value]
        tensor = self.program.types[move.value]
        steps = self.bodies[b].copies.get((self.local[move.value], move.have, move.need))
        if steps is None:
            words = f"no steps lead from {move.have.show(self.mesh)} to {move.need.show(self.mesh)}"
            raise self._refuse(*move.reader, f"value {self.local[move.value]} {tensor}: {words}")
        layout, seconds, energy, wire, local = move.have, 0.0, 0.0, 0.0, 0.0
        one = self.with_others(move)
        for step in steps:
            before = float(block_bytes(tensor, layout, self.mesh))
            try:
                layout = self._after(step, layout, tensor)
            except (PlanError, Illegal) as e:
                raise self._refuse(*move.reader, f"a copy of {tensor}: {e}") from None
            kind = carried_as(step.kind, step.monoid, tensor.dtype)
            count = step.pieces or 1
            sent = (kind, before / count, step.axes, self.mesh, self.target)
            if one is None:
                took, spent = count * collective_seconds(*sent), count * collective_joules(*sent)
            else:
                whole = collective_seconds(kind, one.every, *sent[2:])
                took = whole * (before / one.every)
                spent = collective_dynamic_joules(*sent)
                spent += idle_joules(took, self.mesh.devices, self.target)
                copied = one.copying * (before / one.every)
                traffic, devices = 4.0 * before if one.apart else 0.0, self.mesh.devices
                spent += joules(0.0, traffic, 0.0, copied, devices, self.target)
                took, local = took + copied, local + copied
            seconds, energy = seconds + took, energy + spent
            local += took if step.kind in ("slice", "to_partial") else 0.0
            wire += collective_wire_bytes(kind, before, self.mesh.parts(step.axes))
        if layout != move.need:
            raise self._refuse(
                *move.reader,
                f"a copy of {tensor} leads to {layout.show(self.mesh)}, "
                f"not to {move.need.show(self.mesh)}",
            )
        if turns_before(self, move):
            took, spent = turning(self, move.value, move.have)
            seconds, local, energy = seconds + took, local + took, energy + spent
        return seconds, energy, wire, local

    def _sending(self, move: Move, links: float, local: float) -> Sending:
        steps = self.bodies[self.body_of[move.value]].copies[
            self.local[move.value], move.have, move.need
        ]
        kinds = [step.kind for step in steps if step.kind not in ("slice", "to_partial")]
        readers, combines = self.readers_of(move), move.combines
        name = f"{' then '.join(kinds)} %{self.local[move.value]}"
        one = self.with_others(move)
        window = None if one is None else one.window
        return Sending(move.value, readers, links, local, combines, name, window)

    def copy_of(self, b: int, v: int, have: Layout, need: Layout) -> Layout:
        """Where the steps of a plan's copy lead, legal ones all; whether or not it is made."""
        tensor, layout = self.bodies[b].graph.values[v], have
        for step in self.bodies[b].copies[v, have, need]:
            try:
                check_layout(layout, tensor.shape, tensor.dtype, self.mesh)
                layout = self._after(step, layout, tensor)
            except (PlanError, Illegal) as e:
                end = len(self.bodies[b].graph.operations)
                raise self._refuse(b, end, f"a copy of {tensor}: {e}") from None
        return layout

    def _after(self, step: Change, layout: Layout, tensor: TensorType) -> Layout:
        """The layout that one step of a copy leads to. Raises PlanError or `Illegal`."""
        found = after(step, layout)
        check_layout(found, tensor.shape, tensor.dtype, self.mesh)
        check_permute(step, layout, found, self.mesh)
        return found

    # Kernels

    def kernel(self, unit: Unit) -> Work:
        """What one run of a unit does and takes, but for what combines or sends a value in it."""
        two = self.in_two.get(self.ground.unit_of[unit.root])
        works = [
            kernel_work(
                part,
                self.ground.traffic.of(part),
                self.ground.traffic.exposed(part, self.target),
                self.program,
                self.bodies,
                self.given,
                self.needed,
                self.mesh,
                self.target,
            )
            for part in ((unit,) if two is None else (two.first, two.rest))
        ]
        beside = self.exchanged(unit)
        if beside is not None:
            took = beside.seconds, beside.joules, 0.0, beside.moved, beside.sent, "exchange"
            works.append(Work(*took))
        works += read_again(self, self.ground.unit_of[unit.root])
        lives = self.ground.lives
        turned = [v for v in unit.outputs if self.turned(lives, v) and lives.renews_turned(v)]
        works += [w for v in turned for w in self._turning(v)]
        return reduce(Work.then, works)

    def _turning(self, v: FlatId) -> list[Work]:
        """The kernels that turn what is renewed, before and when it leaves."""
        seconds, spent = turning(self, v, self.given[v])
        moved = 2.0 * block_bytes(self.program.types[v], self.given[v], self.mesh)
        return [Work(seconds, spent, 0.0, moved, 0.0, "memory")] * 2

    def exchanged(self, unit: Unit) -> ExchangeCosts | None:
        """What the operations of a unit get from neighbours, and what those after them get at once
        with them; None where that is nothing."""
        return self.beside.get(self.ground.unit_of[unit.root])

    @cached_property
    def _readers(self) -> dict[int, list[Reader]]:
        """The operations of units of which some get something from neighbours, by their bodies."""
        found: dict[int, list[Reader]] = {}
        instances = self.program.instances
        for u, unit in enumerate(self.schedule.units):
            if self.margins.keys().isdisjoint(unit.members):
                continue
            for i in unit.members:
                x, needs = instances[i], tuple[Layout, ...]()
                op = self.bodies[x.body].graph.operations[x.operation]
                if i in self.margins:
                    needs = self.bodies[x.body].strategies[x.operation].needs
                every = enumerate(x.inputs)
                copies = any([self.given[v] != self.needed[i, p] for p, v in every])
                own = x.inputs, needs, x.outputs, self.margins.get(i, ()), u, copies, op.remat
                found.setdefault(x.body, []).append(Reader(x.operation, *own))
        return {b: sorted(own, key=lambda r: r.operation) for b, own in found.items()}

    @cached_property
    def _groups(self) -> list[tuple[Reader, ...]]:
        """The operations that send rows together."""
        made = self.schedule.once(lambda: makers(self.schedule), "makers")
        every = self._readers.values()
        return [g for own in every for g in sent_together(own, lambda v: made.get(v, -1))]

    @cached_property
    def beside(self) -> dict[int, ExchangeCosts]:
        """What units get from neighbours, by their numbers."""
        units: dict[int, list[Reader]] = {}
        for r in (r for own in self._readers.values() for r in own):
            units.setdefault(r.unit, []).append(r)
        return {
            u: unit_exchange_costs(
                own, [g for g in self._groups if g[0].unit == u], self.mesh, self.target
            )
            for u, own in units.items()
        }

    @cached_property
    def rows_ahead(self) -> list[tuple[int, int, float]]:
        """Rows that are in memory from one unit on until another, and their bytes."""
        return [*held_until_read(self._groups, self.mesh)]

    # Memory

    def profile(self) -> tuple[float, ...]:
        """Bytes alive at each tick of the schedule, two for every unit."""
        change = np.zeros(self.ground.lives.end + 1)
        for _, x in self.lying:
            change[x.begin] += x.amount
            change[x.end] -= x.amount
        return tuple(np.cumsum(change)[:-1].tolist())

    @cached_property
    def lying(self) -> Sequence[tuple[FlatId, Buffer]]:
        """What is in memory, array by array; what lies in the place of a result before that is made
        is no more than the place."""
        lives, held = self.ground.lives, list(self.held())
        return in_places(held, lives.staying, lives.end) if self.target.reserves else held

    def held(self) -> Iterator[tuple[FlatId, Buffer]]:
        """All arrays that a step holds in memory, with the values that they are."""
        lives = self.ground.lives
        moves: dict[int, list[Move]] = {}
        for move in self.moves:
            moves.setdefault(move.value, []).append(move)
        for u, unit in enumerate(self.schedule.units):
            scratch, parts = kernel_scratch(unit, self.program, self.bodies, self.mesh, self.target)
            for v in unit.outputs:
                copies = [self.copied(m) for m in moves.get(v, ())]
                needs, back = self.readers(u, v)
                inside = partial(
                    held_bytes, self.program.types[v], mesh=self.mesh, tiles=self.target.tiles
                )
                size = partial(inside, windows=self.ground.windows.get(v, ()))
                late = parts > 0.0
                ends = self._left(v), self.turned(lives, v)
                read = needs, back, copies, size, inside, late, *ends
                for x in buffers(lives, v, self.given[v], *read):
                    yield v, x
            beside = self.exchanged(unit)
            scratch += 0.0 if beside is None else beside.held
            for amount, ticks in ((scratch, 1), (parts, 2)):
                if amount:
                    (v, *_), at = unit.outputs, 2 * u + 1
                    yield v, Buffer(at, at + ticks, amount, self.given[v], "scratch")
            if u in self.in_two:
                yield from copy_in_memory(self.ground, self.in_two[u], self.mesh)
        for first, last, amount in self.rows_ahead:
            (v, *_) = self.schedule.units[first].outputs
            yield v, Buffer(2 * first + 2, 2 * last + 2, amount, self.given[v], "scratch")

    def _left(self, v: int) -> int | None:
        """The tick from which a value is no longer in memory as it was made: it leaves as a copy,
        and nothing else needs it."""
        x = self.ground.left.get(v)
        return x.until if x and x.copied(self.given, self.needed) else None

    def turned(self, lives: Lives, v: FlatId) -> tuple[int, int] | None:
        """From when up to before when what is turned of a value is in memory beside it."""
        if (known := lives.turned(v)) is None:
            return None
        way, begin, end = known
        block = self.given[v].local_shape(self.program.types[v].shape, self.mesh)
        return (begin, end) if way.within(block) else None

    def readers_of(self, move: Move) -> tuple[int, ...]:
        """The units for which a copy is there: all that might take one that is kept."""
        lives = self.ground.lives
        if move.unit >= 0:
            return (move.unit,)
        return tuple(u for u in lives.users[move.value] if u != lives.maker[move.value])

    def copied(self, move: Move) -> Copied:
        b = self.body_of[move.value]
        steps = self.bodies[b].copies[self.local[move.value], move.have, move.need]
        units = [move.unit] if move.unit >= 0 else self.served(move.value)
        blocks, layout = [], move.have
        for step in steps[:-1]:
            layout = after(step, layout)
            blocks.append(layout)
        turned = [u for u in units if (u, move.value) in self.ground.straight]
        one, at = self.with_others(move), self.read_at(move)
        readers, kept = self.readers_of(move), move.unit < 0
        begin = self.ground.streams.in_memory_from(move.value, readers, move.combines, at)
        apart = False
        if one is not None:
            begin, at, apart = one.begin, one.at, one.apart
        wire = self.copy(move)[2]
        return Copied(
            move.need,
            tuple(units),
            kept,
            wire,
            tuple(blocks),
            begin,
            at,
            one is not None,
            apart,
            tuple(turned) if turns_on_the_way(self, move, "all_gather") else (),
            turns_before(self, move),
        )

    def read_at(self, move: Move) -> int:
        """The tick at which a copy is made on its own, that of who reads it first."""
        lives = self.ground.lives
        if move.unit < 0:
            return lives.first_read(move.value)
        return lives.read(move.unit, move.value)

    def readers(self, maker: int, v: int) -> tuple[dict[int, list[Layout]], list[int]]:
        """The layouts in which other units read v, and those units that go past its kept copy."""
        kept = self.bodies[self.body_of[v]].kept.get(self.local[v])
        needs: dict[int, list[Layout]] = {}
        back: list[int] = []
        for u in self.ground.lives.users.get(v, []):
            if u == maker:
                continue
            reads = [(self.needed[i, p], at) for i, p, w, at, _ in self.ground.reads[u] if w == v]
            needs[u] = [need for need, _ in reads]
            if kept and any(need != kept.layout or at > kept.until for need, at in reads):
                back.append(u)
        return needs, back

    def served(self, v: int) -> list[int]:
        """Units with an operation that reads v while its kept copy is there, taken or not; it lasts
        until they are done."""
        b = self.body_of[v]
        until = self.bodies[b].kept[self.local[v]].until
        return [u for u, at in self.ground.first_reads.get(v, ()) if at <= until]

    def _refuse(self, b: int, operation: int, what: str) -> Refused:
        graph = self.program.bodies[b].graph
        if 0 <= operation < len(graph.operations):
            op = graph.operations[operation]
            place = f"operation {operation} ({op.kernel}, {op.source}) of {graph.name}"
        else:
            place = f"the boundary of {graph.name}"
        return Refused(
            what,
            (b, operation),
            where=f"certificate of plan {self.plan.name} on {self.mesh}, {place}",
            hint="This is a defect of tapestry-egg; please report the program.",
        )


def _beside(
    signature: OperationSignature, strategy: Strategy, mesh: MeshShape
) -> tuple[Exchange, ...]:
    """What an operation so cut gets from neighbours, if it may be cut so. Raises Illegal otherwise.

    The signature remembers what was legal, as equal layers run alike, in all plans and forms.
    """
    known: dict[tuple[Strategy, MeshShape], tuple[Exchange, ...]]
    known = signature.__dict__.setdefault("_legal", {})
    found = known.get(key := (strategy, mesh))
    if found is None:
        check_strategy(signature, strategy, mesh)
        found = known[key] = exchanges(signature, strategy.cuts, strategy.needs, mesh)
    return found


# The layouts at the ports of a flat program, read off a finished plan, and whether they may be so.
#
# A port stands for a boundary: of the program, or of a loop or conditional in it. What a plan says
# of a boundary stands in the region operation's strategy on the outside and in its bodies' plans
# inside.


Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class PortLayouts:
    """Per port instance: the layouts that it reads and those that it produces."""

    needs: dict[int, Layouts] = field(default_factory=dict)
    gives: dict[int, Layouts] = field(default_factory=dict)

    def put(self, instance: int, needs: Sequence[Layout], gives: Sequence[Layout]) -> None:
        self.needs[instance] = tuple(needs)
        self.gives[instance] = tuple(gives)


def port_layouts(program: FlatProgram, bodies: Sequence[BodyPlan]) -> PortLayouts:
    """The layouts at every port; `bodies[b]` is the plan of the program's body b."""
    out = PortLayouts()
    _boundary(program, bodies[0], out)
    for i, instance in enumerate(program.instances):
        if instance.port == "constant":
            out.put(i, (), [Layout.replicated(program.types[v].rank) for v in instance.outputs])
    for b, k in program.spans:
        _region(program, bodies, b, k, out)
    return out


def _boundary(program: FlatProgram, plan: BodyPlan, out: PortLayouts) -> None:
    """Ports of the program itself: they name the values, each of which enters or leaves once."""
    values = program.bodies[0].values
    entering = {values[v]: x for v, x in zip(plan.graph.inputs, plan.inputs, strict=True)}
    returning = {
        (values[plan.graph.inputs[i]], values[plan.graph.outputs[j]]): plan.outputs[j]
        for j, i in program.feedback.items()
    }
    leaving: dict[int, list[Layout]] = {}
    for j, v in enumerate(plan.graph.outputs):
        if j not in program.feedback:
            leaving.setdefault(values[v], []).append(plan.outputs[j])
    for i, instance in enumerate(program.instances):
        if instance.port == "input":
            out.put(i, (), [entering[v] for v in instance.outputs])
        elif instance.port == "state":
            (new,), (old,) = instance.inputs, instance.outputs
            out.put(i, [returning[old, new]], [entering[old]])
        elif instance.port == "output":
            out.put(i, [leaving[instance.inputs[0]].pop(0)], ())


def _region(
    program: FlatProgram, bodies: Sequence[BodyPlan], b: int, k: int, out: PortLayouts
) -> None:
    """Ports of one region operation, in JAX's order of operands and results."""
    op, outside = program.bodies[b].graph.operations[k], bodies[b].strategies[k]
    inside = [
        bodies[n]
        for n, body in enumerate(program.bodies)
        if (body.parent, body.operation) == (b, k)
    ]
    start, stop = program.spans[BodyId(b), k]
    ports: dict[str, list[int]] = {}
    for i in range(start, stop):
        instance = program.instances[i]
        if instance.port and instance.port != "constant" and instance.body == b:
            ports.setdefault(instance.port, []).append(i)
    needs, gives = outside.needs, outside.gives
    invariant, carry = ports.get("invariant", []), ports.get("carry", [])
    if op.is_scan:
        (body,) = inside
        n, m = int(op.params["num_consts"]), len(carry)
        for x, i in enumerate(invariant):
            out.put(i, [needs[x]], [body.inputs[x]])
        for x, i in enumerate(carry):
            out.put(i, [needs[n + x], body.outputs[x]], [body.inputs[n + x], gives[x]])
        for x, i in enumerate(ports.get("stream", [])):
            out.put(i, [needs[n + m + x]], [body.inputs[n + m + x]])
        for x, i in enumerate(ports.get("stack", [])):
            out.put(i, [body.outputs[m + x]], [gives[m + x]])
    elif op.is_while:
        test, body = inside
        a, c = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        for x, i in enumerate(invariant):
            out.put(i, [needs[x]], [test.inputs[x] if x < a else body.inputs[x - a]])
        for x, i in enumerate(carry):
            made = [test.inputs[a + x], body.inputs[c + x], gives[x]]
            out.put(i, [needs[a + c + x], body.outputs[x]], made)
        for i in ports.get("predicate", []):
            out.put(i, [test.outputs[0]], ())
    else:
        for i in ports.get("predicate", []):
            out.put(i, [needs[0]], ())
        for x, i in enumerate(invariant):
            out.put(i, [needs[1 + x]], [body.inputs[x] for body in inside])
        for x, i in enumerate(ports.get("branch", [])):
            out.put(i, [body.outputs[x] for body in inside], [gives[x]])


def check_port(instance: Instance, needs: Layouts, gives: Layouts, mesh: MeshShape) -> None:
    """A port is the identity: one layout, up to the stacked dim, which is never cut.

    Raises Illegal where it is not.
    """
    signature, kind = instance.signature, instance.port
    types = (*signature.input_types, *signature.output_types)
    layouts = (*needs, *gives)
    for tensor, layout in zip(types, layouts, strict=True):
        try:
            check_layout(layout, tensor.shape, tensor.dtype, mesh)
        except Illegal as e:
            raise Illegal(f"the {kind} port: {e}") from None
    outer = needs if kind == "stream" else gives if kind == "stack" else ()
    if any(layout.dims[0] for layout in outer):
        raise Illegal(f"the {kind} port cuts the dim that the loop runs over")
    plain = {
        Layout(x.dims[1:], x.partial, x.monoid) if k in range(*_outer(kind, needs)) else x
        for k, x in enumerate(layouts)
    }
    if len(plain) > 1:
        words = ", ".join(x.show(mesh) for x in plain)
        raise Illegal(f"the {kind} port changes the layout: {words}")
    if kind in ("input", "output", "state") and any(x.partial for x in layouts):
        raise Illegal(f"a partial value crosses the boundary at an {kind} port")
    if kind in ("constant", "predicate") and any(x.axes for x in layouts):
        raise Illegal(f"a {kind} is not replicated over every axis")


def _outer(kind: str, needs: tuple[Layout, ...]) -> tuple[int, int]:
    """Which of a port's layouts, needs first, have the stacked dim in front."""
    if kind == "stream":
        return 0, len(needs)
    if kind == "stack":
        return len(needs), len(needs) + 1
    return 0, 0
