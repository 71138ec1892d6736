"""The joiner: all ways to run a unit, from the derived strategies of its members.

Members are joined from the root back to the first one. Of what is joined so far, all that matters
to the rest is the layouts of values whose maker is still to come, and to the outside those that the
unit reads and gives; ways that agree on these are one way, the one of the least work. So a unit of
many members takes as many steps as it has members, each over a limited number of ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import ExtractError
from tapestry_egg.graph.ids import FlatId, LayoutId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.machine.target import Target
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.traffic import traffic_of
from tapestry_egg.schedule.units import Unit
from tapestry_egg.shard.neighbours import Neighbours
from tapestry_egg.shard.stored_blocks import stored_blocks
from tapestry_egg.shard.strategies import Saturated
from tapestry_egg.shard.way_costs import WayCosts
from tapestry_egg.tracing.constraints import Constraint, Wanted

from .inner_copies import InnerCopies, InnerCopy
from .once import OnMesh
from .shortest import Ints

#: A unit whose joined rows would exceed this many is cut to those of fewest partial values, and
#: of these to those that read a value of several members in fewest layouts, and counted as
#: `truncated`: the front's notes say so. No measurement of this number is kept.
ROWS = 600
# The rows of long units are fewer, so that joining them takes no more steps than this; no fewer
# than so many. Counted among the above; no measurement of these is kept.
_STEPS, _FEWEST = 60_000, 100

# What an operand of a member is that is joined, where it is no value that is opened with it.
_OPEN, _OUTSIDE = -2, -1

Layouts = tuple[LayoutId, ...]


@dataclass(frozen=True)
class UnitRows:
    """All ways to run one unit. Row r picks `choice[r][m]` of member m's strategies."""

    choice: NDArray[np.int32]  # [rows, members] strategy number in the member's signature
    needs: tuple[tuple[Layout, ...], ...]  # per row: one layout per read of the unit
    gives: tuple[tuple[Layout, ...], ...]  # per row: one layout per output
    seconds: NDArray[np.float64]  # [rows], of one run
    joules: NDArray[np.float64]  # [rows], of one run, all devices
    flops: NDArray[np.float64]  # [rows], of one run, per device
    scratch: NDArray[np.float64]  # [rows], bytes beside operands and results while it runs
    parts: NDArray[np.float64]  # [rows], bytes that are added up to the result afterwards
    # [rows], bytes that a device sends for a copy inside it, and of rows to its neighbours
    wire: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)


class _Chosen(NamedTuple):
    """The strategy of the member joined last, and those of the others."""

    number: int
    rest: _Chosen | None


class _Copied(NamedTuple):
    """The value inside a unit that is copied there, by its number, and the layout that it is made
    in."""

    number: int
    layout: LayoutId


class _Way(NamedTuple):
    """A way to run the members joined so far."""

    open: Layouts  # layouts of the values whose makers are still to come
    shown: int  # number of the layouts that are read from outside and given so far
    flops: float  # per device
    moved: float  # bytes that reads of parts of operands move
    partial: int  # partial axes of values inside
    chosen: _Chosen | None
    copied: _Copied | None = None
    # of values that several members read from outside: the layout of the first read
    first: tuple[LayoutId | None, ...] = ()
    mixed: int = 0  # reads of these in other layouts, each of which takes a copy


class _Strategy(NamedTuple):
    """One strategy of a signature: its number, and what it means to a unit."""

    number: int
    operands: Layouts
    flops: float
    moved: tuple[float, ...]  # per operand: elements that it moves, where it reads a part; else 0


class _Fitting(NamedTuple):
    """A strategy of a member that is joined where its result and what it reads of the open values
    lie as it has them."""

    number: int
    fresh: Layouts  # of the values that it opens
    shown: Layouts  # that it reads from outside, or gives to there
    flops: float
    moved: tuple[float, ...]  # of what it reads from memory, where it moves any
    partial: int  # partial axes of the values that it opens


class _Member(NamedTuple):
    """A member that is joined to those that read it."""

    giving: Mapping[Layouts, list[_Strategy]]  # its strategies, by the layouts of its results
    # the same by these and by the layouts of the open values that it reads, in order
    fitting: Mapping[tuple[Layouts, Layouts], list[_Fitting]]
    place: int  # of its result among the open values; -1 for the unit's root
    read_open: list[int]  # places of the open values that it reads
    copied: int  # the number of the sum that its result is, which may be left partial; -1
    # what it reads from outside, in order: which of the values it is that several members read, or
    # -1; empty where it reads none of them
    shared: list[int]
    given: int  # layouts that it shows before those of what it reads


def _mixed(way: _Way, member: _Member, shown: Layouts) -> tuple[tuple[LayoutId | None, ...], int]:
    """In which layout the values that several members read are read first, and how many reads are
    in others, with those of one member more, of which `shown` are all layouts that others see."""
    first, mixed = way.first, way.mixed
    for k, layout in zip(member.shared, shown[member.given :], strict=True):
        if k >= 0 and first[k] is None:
            first = (*first[:k], layout, *first[k + 1 :])
        elif k >= 0:
            mixed += first[k] != layout
    return first, mixed


class Joiner:
    """Joins the units of one schedule on one mesh; equal units, and `known` ones, once."""

    def __init__(
        self,
        schedule: Schedule,
        saturated: Saturated,
        mesh: MeshShape,
        target: Target,
        inside: InnerCopies,
        contract: MeshContract | None = None,
        known: OnMesh | None = None,
    ) -> None:
        self.schedule, self.saturated, self.mesh, self.target = schedule, saturated, mesh, target
        self.inside = inside
        self.wanted = self._constrained(contract)
        self.instances = schedule.program.instances
        self.signature_of = saturated.encoding.signature_of
        self.layouts = saturated.encoding.algebra.layouts
        self.number = saturated.encoding.algebra.number
        self.neighbours = Neighbours(schedule, saturated, mesh, target)
        traffic = traffic_of(schedule, target)
        self.costs = WayCosts(schedule, saturated, mesh, target, traffic)
        self.known = known or OnMesh()
        self.numbers = self.known.numbered(saturated.encoding.signatures)
        self.by_output: dict[tuple[int, Wanted | None], Mapping[Layouts, list[_Strategy]]] = {}
        self.by_reads: dict[tuple[object, ...], dict[tuple[Layouts, Layouts], list[_Fitting]]] = {}
        # Units that have fewer rows than there are: kernels, and ports.
        self.truncated = [0, 0]

    def _constrained(self, contract: MeshContract | None) -> dict[int, Wanted]:
        """Instances of constraints that this mesh can read -> the layouts that they want."""
        found = {}
        for i, instance in enumerate(self.schedule.program.instances):
            if instance.operation < 0 or instance.signature.means != "layout":
                continue
            op = self.schedule.program.bodies[instance.body].graph.operations[instance.operation]
            shape = instance.signature.output_types[0].shape
            wanted = Constraint.of(op.params).wanted(shape, self.mesh, contract)
            if wanted is not None and 0 not in shape:  # what has no elements lies nowhere
                found[i] = wanted
        return found

    def rows(self, number: int, unit: Unit) -> UnitRows:
        """The rows of a unit. Raises ExtractError when there are none."""
        inner = self.inside.of(number)
        key = self._shape_of(unit, inner)
        rows = self.known.rows
        if key not in rows:
            rows[key] = self._join(unit, key, inner)
        found = rows[key]
        self.truncated[bool(self.instances[unit.root].port)] += key in self.known.cut
        if not len(found):
            root = self.instances[unit.root]
            body = self.schedule.program.bodies[root.body]
            source = body.graph.operations[root.operation].source if root.operation >= 0 else ""
            what = f"what enters or leaves ({root.port})" if root.port else root.signature.kernel
            raise ExtractError(
                f"no rule says how devices share {what}",
                where=str(source) or body.graph.name,
                hint="The book `sharding` has such rules, `whole` for all that runs: name it among "
                "`books`, too, or leave `books` out.",
            )
        return found

    def _shape_of(self, unit: Unit, inner: Sequence[InnerCopy]) -> tuple[object, ...]:
        """Equal for units of equal structure, in any form, so that repeated layers are joined
        once."""
        local: dict[int, int] = {}
        parts = []
        for i in unit.members:
            instance = self.instances[i]
            wires = tuple([local.setdefault(v, len(local)) for v in instance.inputs])
            outs = tuple([local.setdefault(v, len(local)) for v in instance.outputs])
            signature = self.numbers[self.signature_of[i]]
            parts.append((signature, wires, outs, instance.port, self.wanted.get(i)))
        copied = tuple([(local[s.value], s.partial_reads, s.sent, s.over) for s in inner])
        through = self.costs.traffic.of(unit)
        exposed = round(self.costs.traffic.exposed(unit, self.target), 9)
        late = self.neighbours.lateness(unit)
        return (*parts, tuple([local[v] for v in unit.outputs]), copied, through, exposed, late)

    def _giving(self, instance: int) -> Mapping[Layouts, list[_Strategy]]:
        """Strategies that an instance may run by, by the layouts that they give; of those with the
        same layouts, those that are not worse than another."""
        signature, wanted = self.signature_of[instance], self.wanted.get(instance)
        key = (signature, wanted)
        if key not in self.by_output:
            model = self.saturated.encoding.signatures[signature]
            operands = len(model.inputs)
            table: dict[Layouts, dict[Any, _Strategy]] = {}
            flops_of, moved_of = self.costs.work(signature)
            ports_of = map(tuple, self.costs.ports(signature).tolist())
            every = zip(flops_of.tolist(), map(tuple, moved_of.tolist()), ports_of, strict=True)
            for n, (flops, moved, ports) in enumerate(every):
                if wanted is not None and not wanted.holds(self.layouts[ports[-1]]):
                    continue
                made = _Strategy(n, ports[:operands], flops, moved)
                own = table.setdefault(ports[operands:], {})
                known = own.get((ports[:operands], moved))
                if known is None or made.flops < known.flops:
                    own[ports[:operands], moved] = made
            self.by_output[key] = {k: list(v.values()) for k, v in table.items()}
        return self.by_output[key]

    def _fitting(
        self, instance: int, reads: tuple[int, ...], shares: tuple[float, ...], shown: bool
    ) -> Mapping[tuple[Layouts, Layouts], list[_Fitting]]:
        """Strategies that an instance may run by, by the layouts that they give and those of what
        is open already. `reads` says of every operand which of the values it is that are opened
        with it, or that it is open already, or read from outside; `shares` how much of the part
        that it takes moves through memory; `shown` whether the result leaves the unit."""
        key = (self.signature_of[instance], self.wanted.get(instance), reads, shares, shown)
        found = self.by_reads.get(key)
        if found is None:
            found = self.by_reads[key] = {}
            takes = self.instances[instance].signature.fusion == "kernel"
            for given, strategies in self._giving(instance).items():
                for s in strategies:
                    fresh: dict[int, LayoutId] = {}
                    ports = [*zip(reads, s.operands, s.moved, strict=True)]
                    # What is read twice lies in one way.
                    if any([k >= 0 and fresh.setdefault(k, x) != x for k, x, _ in ports]):
                        continue
                    outside = [x for k, x, _ in ports if k == _OUTSIDE]
                    made = _Fitting(
                        number=s.number,
                        fresh=tuple(fresh.values()),
                        shown=(*(given if shown else ()), *outside),
                        flops=s.flops,
                        moved=tuple(
                            [
                                part * share
                                for (k, _, part), share in zip(ports, shares, strict=True)
                                if part and (takes or k == _OUTSIDE)
                            ]
                        ),
                        partial=sum([len(self.layouts[x].partial) for x in fresh.values()]),
                    )
                    open_ = tuple([x for k, x, _ in ports if k == _OPEN])
                    found.setdefault((given, open_), []).append(made)
        return found

    def _join(self, unit: Unit, key: tuple[object, ...], inner: Sequence[InnerCopy]) -> UnitRows:
        """The rows of a unit: its members' strategies, joined from the last to the first where the
        layouts between them agree."""
        inside = {v for i in unit.members[:-1] for v in self.instances[i].outputs}
        leaving = set(unit.outputs) & inside
        places = {s.value: k for k, s in enumerate(inner)}
        numbers: dict[tuple[int, Layouts], int] = {}  # what is shown, numbered
        pending: list[FlatId] = []  # values whose layouts the ways' `open` are
        times = Counter(v for _, _, v in unit.reads)
        several = {v: k for k, v in enumerate(v for v, n in times.items() if n > 1)}
        moved = self._moved(unit)
        ways = [_Way((), -1, 0.0, 0.0, 0, None, first=(None,) * len(several))]
        most = max(_FEWEST, min(ROWS, _STEPS // len(unit.members)))
        for i in reversed(unit.members):
            instance = self.instances[i]
            place = -1 if i == unit.root else pending.index(instance.outputs[0])
            at = [pending.index(v) if v in pending else -1 for v in instance.inputs]
            new = [v for v, k in zip(instance.inputs, at, strict=True) if v in inside and k < 0]
            slot = {v: k for k, v in enumerate(dict.fromkeys(new))}
            reads = [
                _OPEN if k >= 0 else slot.get(v, _OUTSIDE)
                for v, k in zip(instance.inputs, at, strict=True)
            ]
            shown = place < 0 or instance.outputs[0] in leaving
            outside = [v for v, k in zip(instance.inputs, reads, strict=True) if k == _OUTSIDE]
            member = _Member(
                giving=self._giving(i),
                fitting=self._fitting(
                    i,
                    tuple(reads),
                    tuple([moved.get((i, p), 1.0) for p in range(len(reads))]),
                    shown,
                ),
                place=place,
                read_open=[k for k in at if k >= 0],
                copied=places.get(instance.outputs[0], -1) if instance.outputs else -1,
                shared=[several.get(v, -1) for v in outside] if several.keys() & outside else [],
                given=len(instance.outputs) if shown else 0,
            )
            ways = self._joined(ways, member, numbers, inner)
            pending = [v for k, v in enumerate(pending) if k != place] + list(slot)
            if len(ways) > most:
                self.known.cut.add(key)
                ways = sorted(ways, key=lambda w: (w.copied is not None, w.partial, w.mixed))[:most]
        return self._finish(unit, ways, inner)

    def _moved(self, unit: Unit) -> Mapping[tuple[int, int], float]:
        """By the operands that a unit reads of memory, how much of what it reads goes through."""
        shares = self.costs.traffic.of(unit).reads
        return {(i, p): x for (i, p, _), x in zip(unit.reads, shares, strict=True)}

    def _joined(
        self,
        ways: Sequence[_Way],
        member: _Member,
        numbers: dict[tuple[int, Layouts], int],
        inner: Sequence[InnerCopy],
    ) -> list[_Way]:
        """The ways with one more member; of those that look alike from outside, the one of the
        fewest flops."""
        grown: dict[tuple[Layouts, int, float, _Copied | None], _Way] = {}
        fitting, k, rest = member.fitting, member.place, member.read_open
        for way in ways:
            opened, shown, had, moved_so_far, partial, chosen, _, first, mixed = way
            reads = tuple([opened[n] for n in rest])
            kept = opened if k < 0 else opened[:k] + opened[k + 1 :]
            for given, copied in self._wanted_of(way, member, inner):
                for s in fitting.get((given, reads), ()):
                    number, fresh, seen, more, parts, open_partial = s
                    mark, moved = shown, moved_so_far
                    if seen:
                        mark = numbers.setdefault((shown, seen), len(numbers))
                    for part in parts:
                        moved += part
                    what = (kept + fresh, mark, moved, copied)
                    flops = had + more
                    known = grown.get(what)
                    if known is None or flops < known.flops:
                        read = _mixed(way, member, seen) if member.shared else (first, mixed)
                        last = _Chosen(number, chosen)
                        own = what[0], mark, flops, moved, partial + open_partial, last, copied
                        grown[what] = _Way(*own, *read)
        return list(grown.values())

    def _wanted_of(
        self, way: _Way, member: _Member, inner: Sequence[InnerCopy]
    ) -> list[tuple[Layouts, _Copied | None]]:
        """The layouts in which a member may give its results, and that of one which is copied."""
        found: list[tuple[Layouts, _Copied | None]]
        if member.place < 0:
            found = [(given, way.copied) for given in member.giving]
        else:
            found = [((way.open[member.place],), way.copied)]
        if member.copied >= 0 and way.copied is None:
            sources = self.inside.sources(inner[member.copied], way.open[member.place])
            found += [((have,), _Copied(member.copied, have)) for have in sources]
        return found

    def _finish(self, unit: Unit, ways: Sequence[_Way], inner: Sequence[InnerCopy]) -> UnitRows:
        """The rows of the ways; of those that read and give the same, the ones no other beats."""
        members = unit.members
        choice = np.zeros((len(ways), len(members)), dtype=np.int32)
        for r, way in enumerate(ways):
            link = way.chosen
            for m in range(len(members)):  # the last joined is the first member
                assert link is not None
                choice[r, m], link = link
        read, made = self._shown(unit, choice)
        needs, gives = self._named(read, len(ways)), self._named(made, len(ways))
        gemm = self.costs.gemm(unit, choice)
        flops = np.array([w.flops for w in ways])
        moved = np.array([w.moved for w in ways])
        seconds, energy = self.costs.kernel(unit, choice, flops, moved, read, made, gemm)
        parts = self.costs.split(unit, gemm, len(ways))
        scratch = stored_blocks(unit, choice, self.schedule, self.saturated, self.mesh, self.target)
        wire = np.zeros(len(ways))
        for k, one in enumerate(inner):
            two = [r for r, w in enumerate(ways) if w.copied and w.copied.number == k]
            if two:
                seconds[two], energy[two], more, wire[two] = self._in_two(unit, one, choice[two])
                scratch[two] += more
        beside = self.neighbours.costs(unit, choice)
        if beside is not None:
            seconds, energy, scratch, wire = [
                a + b for a, b in zip((seconds, energy, scratch, wire), beside.T, strict=True)
            ]
        costs = np.stack([seconds, energy, scratch, parts, wire, flops], axis=1)
        alike: dict[int, list[int]] = {}  # what is shown -> rows, none worse than another
        for r, way in enumerate(ways):
            if self._worthwhile(inner, way, needs[r]):
                own = alike.get(way.shown, [])
                if not any((costs[k] <= costs[r]).all() for k in own):
                    own = [k for k in own if not (costs[r] <= costs[k]).all()]
                    alike[way.shown] = [*own, r]
        kept = [r for own in alike.values() for r in own]
        return UnitRows(
            choice=choice[kept],
            needs=tuple([needs[r] for r in kept]),
            gives=tuple([gives[r] for r in kept]),
            seconds=seconds[kept],
            joules=energy[kept],
            flops=flops[kept],
            scratch=scratch[kept],
            parts=parts[kept],
            wire=wire[kept],
        )

    def _shown(self, unit: Unit, choice: NDArray[np.int32]) -> tuple[list[Ints], list[Ints]]:
        """The numbers of the layouts of what a unit reads and of what it gives, per way."""
        place: dict[int, int] = {i: m for m, i in enumerate(unit.members)}
        maker = {v: (i, q) for i in unit.members for q, v in enumerate(self.instances[i].outputs)}

        def layouts(i: int, port: int) -> Ints:
            return self.costs.ports(self.signature_of[i])[choice[:, place[i]], port]

        given = [maker[v] for v in unit.outputs]
        return (
            [layouts(i, p) for i, p, _ in unit.reads],
            [layouts(i, len(self.instances[i].inputs) + q) for i, q in given],
        )

    def _named(self, ports: Sequence[Ints], ways: int) -> list[tuple[Layout, ...]]:
        """Per way the layouts of some ports that have these numbers."""
        if not ports:
            return [()] * ways
        names = self.layouts
        return [*zip(*([names[n] for n in x.tolist()] for x in ports), strict=True)]

    def _worthwhile(self, inner: Sequence[InnerCopy], way: _Way, needs: Sequence[Layout]) -> bool:
        """Whether two partial operands or more are combined by their sum, where one is at all."""
        axes = () if way.copied is None else self.layouts[way.copied.layout].partial
        if way.copied is None or not axes:
            return True
        reads = inner[way.copied.number].partial_reads
        return sum(set(axes) <= set(needs[k].partial) for k in reads) > 1

    def _in_two(
        self, unit: Unit, inner: InnerCopy, choice: NDArray[np.int32]
    ) -> NDArray[np.float64]:
        """Seconds, joules, scratch and bytes sent of ways that copy a value on the way: a kernel
        makes it, a collective combines or sends it, another kernel reads it. [4, ways]"""
        place = {i: m for m, i in enumerate(unit.members)}
        total = np.zeros((4, len(choice)))
        sides: list[NDArray[np.int64]] = []
        table = self.inside.copies[self.schedule.program.types[inner.value]]
        for part in (inner.first, inner.rest):
            own = choice[:, [place[i] for i in part.members]]
            flops, moved = np.zeros(len(own)), np.zeros(len(own))
            outside = self._moved(part)
            for m, i in enumerate(part.members):
                flops_of, moved_of = self.costs.work(self.signature_of[i])
                flops += flops_of[own[:, m]]
                takes = self.instances[i].signature.fusion == "kernel"
                for p in range(len(self.instances[i].inputs)):
                    if takes or (i, p) in outside:
                        moved += outside.get((i, p), 1.0) * moved_of[own[:, m], p]
            read, made = self._shown(part, own)
            total[:2] += self.costs.kernel(
                part, own, flops, moved, read, made, self.costs.gemm(part, own)
            )
            ends = made[0] if part is inner.first else read[-1]
            sides.append(np.array([table.number[self.layouts[n]] for n in ends], dtype=np.int64))
        have, need = sides
        total[:2] += table.seconds[have, need], table.joules[have, need]
        total[2] = 0.0 if inner.over else table.held_bytes[have]
        total[2] += np.where(table.in_place[have, need], 0.0, table.held_bytes[need])
        total[3] = table.wire[have, need]
        return total
