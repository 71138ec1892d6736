"""Unit choices: what saturation found, as tables that extraction can search.

One entry per unit of the schedule: its *rows*, each a complete way to run the unit, made by
joining the derived strategies of its members on the layouts of the values between them. Nothing is
added that the rules did not derive; of rows with equal layouts those are kept that none beats, and
at the program's boundary those that the user's words leave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import InstanceId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import LOCAL
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.shard.fills import fills
from tapestry_egg.shard.strategies import ChangeRow, Saturated, StrategyRow

from .copies import CopyTable, StepCosts, copy_table
from .inner_copies import InnerCopies
from .joiner import Joiner
from .joiner import UnitRows as UnitRows
from .once import JoinedUnits
from .pins import Pin

Allows = Callable[[Layout], bool]


@dataclass(frozen=True)
class UnitChoices:
    """Units with their rows, and copy tables by tensor type, those of `fills` apart, since nothing
    is sent for them; all costs are of one run of a unit.
    `truncated` kernels, and so many ports, have more rows than are here; `uncombined` values inside
    kernels are never combined there."""

    schedule: Schedule
    saturated: Saturated
    mesh: MeshShape
    target: Target
    rows: tuple[UnitRows, ...]
    copies: Mapping[TensorType, CopyTable]
    truncated: tuple[int, int]
    uncombined: int = 0
    fills: frozenset[int] = frozenset()
    of_fills: Mapping[TensorType, CopyTable] = field(default_factory=dict)

    def table(self, value: int) -> CopyTable:
        """The copies of a flat value."""
        tables = self.of_fills if value in self.fills else self.copies
        return tables[self.schedule.program.types[value]]

    def signature(self, instance: InstanceId) -> OperationSignature:
        return self.schedule.program.instances[instance].signature

    def strategy(self, instance: InstanceId, number: int) -> StrategyRow:
        which = self.saturated.encoding.signature_of[instance]
        return self.saturated.strategies[which][number]


def unit_choices(
    schedule: Schedule,
    saturated: Saturated,
    mesh: MeshShape,
    target: Target,
    contract: MeshContract | None = None,
    known: JoinedUnits | None = None,
) -> UnitChoices:
    """Join the derived strategies into unit rows, and tabulate copies.

    A value that the program constrains has only rows that give it as it asks; `contract` is the
    mesh that the program's axes are of, where a plan's mesh divides it. What is `known` of other
    forms, for the same target and contract, is not worked out again, and is added to.
    Raises ExtractError when some unit has no way to run (a rule was removed that all need).
    """
    known = known or JoinedUnits()
    here = known.on_mesh(saturated)
    copies: dict[TensorType, CopyTable] = {}
    inside = InnerCopies(schedule, saturated, copies, known.once, target.epilogues)
    inner = [s for u in range(len(schedule.units)) for s in inside.of(u)]
    program = schedule.program
    stored = (v for unit in schedule.units for v in (*unit.outputs, *(r[2] for r in unit.reads)))
    types = {program.types[v] for v in (*stored, *(s.value for s in inner))}
    algebra = saturated.encoding.algebra
    by_rank: dict[int, list[Layout]] = {}
    for layout in algebra.layouts:
        by_rank.setdefault(len(layout.dims), []).append(layout)
    changes: dict[int, list[ChangeRow]] = {rank: [] for rank in by_rank}
    for change in saturated.changes:
        changes[len(change.source.dims)].append(change)
    costs, used = StepCosts(mesh, target), _used(saturated) if saturated.some else {}
    for tensor in types:
        strong = TensorType(tensor.shape, tensor.dtype)
        if strong not in here.copies:
            every = by_rank[tensor.rank], changes[tensor.rank], algebra.monoids
            here.copies[strong] = copy_table(strong, *every, costs, used.get(strong))
        copies[strong] = copies[tensor] = here.copies[strong]
    written = fills(program)
    local = {rank: [c for c in some if c.kind in LOCAL] for rank, some in changes.items()}
    of_fills: dict[TensorType, CopyTable] = {}
    costs = StepCosts(mesh, target)
    for tensor in {program.types[v] for v in written} & types:
        strong = TensorType(tensor.shape, tensor.dtype)
        if strong not in here.of_fills:
            every = by_rank[tensor.rank], local[tensor.rank], algebra.monoids
            here.of_fills[strong] = copy_table(strong, *every, costs, used.get(strong))
        of_fills[strong] = of_fills[tensor] = here.of_fills[strong]
    joiner = Joiner(schedule, saturated, mesh, target, inside, contract, here)
    rows = tuple(joiner.rows(u, unit) for u, unit in enumerate(schedule.units))
    kernels, ports = joiner.truncated
    return UnitChoices(
        schedule,
        saturated,
        mesh,
        target,
        rows,
        copies,
        (kernels, ports),
        inside.others,
        written,
        of_fills,
    )


def _used(saturated: Saturated) -> dict[TensorType, set[Layout]]:
    """The layouts of every type in which some strategy reads or makes it."""
    found: dict[TensorType, set[Layout]] = {}
    for signature, rows in zip(saturated.encoding.signatures, saturated.strategies, strict=True):
        for k, tensor in enumerate((*signature.input_types, *signature.output_types)):
            own = found.setdefault(TensorType(tensor.shape, tensor.dtype), set())
            own.update([row.layouts[k] for row in rows])
    return found


@dataclass(frozen=True, slots=True)
class Fixed:
    """What the user fixes: layouts of inputs and outputs, and the mesh whose axes all that crosses
    the boundary is laid out by (None: any mesh), unless that is not `bounded`."""

    pins: tuple[Pin, ...] = ()
    contract: MeshContract | None = None
    bounded: bool = True


def restrict(choices: UnitChoices, fixed: Fixed) -> UnitChoices:
    """The choices with only those rows of the inputs and outputs that give pinned layouts, and
    layouts that the axes of a named mesh express.

    An input that an output feeds back into pins the output too: one identity makes both.
    Raises ExtractError where the rules derive no such row.
    """
    rows = list(choices.rows)
    if fixed.contract is not None and fixed.bounded:
        contract, mesh = fixed.contract, choices.mesh

        def expressible(layout: Layout) -> bool:
            return contract.express(layout, mesh) is not None

        for u, port in _ports(choices.schedule):
            rows[u] = _allowed(rows[u], port, expressible)
    for p in fixed.pins:
        if 0 in p.shape:  # what has no elements lies nowhere: it is whole on every device
            continue
        u = (_output_unit if p.output else _input_unit)(choices.schedule, p.position)
        wanted = p.wanted(choices.mesh, fixed.contract)
        port = choices.schedule.program.instances[choices.schedule.units[u].root].port
        if wanted is not None:
            rows[u] = _allowed(rows[u], port, wanted.holds)
        if wanted is None or not len(rows[u]):
            raise ExtractError(
                f"the rules derive no way for {p.name or 'the output'} to "
                f"{'leave' if p.output else 'enter'} as {p} on {choices.mesh}",
                where=p.where,
                hint="Pin another layout, or bring back the rule that was removed.",
            )
    return replace(choices, rows=tuple(rows))


def _ports(schedule: Schedule) -> list[tuple[int, str]]:
    """The units at the program's boundary: unit, its port."""
    roots = [schedule.program.instances[u.root] for u in schedule.units]
    return [(u, i.port) for u, i in enumerate(roots) if i.port in ("input", "output", "state")]


def _input_unit(schedule: Schedule, position: int) -> int:
    body = schedule.program.bodies[0]
    return schedule.producer[body.values[body.graph.inputs[position]]]


def _output_unit(schedule: Schedule, position: int) -> int:
    """The unit by which an output leaves: the state port where it feeds back."""
    program = schedule.program
    if position in program.feedback:
        return _input_unit(schedule, program.feedback[position])
    leaving = [j for j in range(len(program.bodies[0].graph.outputs)) if j not in program.feedback]
    ports = sorted((schedule.units[u].root, u) for u, port in _ports(schedule) if port == "output")
    return ports[leaving.index(position)][1]


def _allowed(rows: UnitRows, port: str, allows: Allows) -> UnitRows:
    """The rows of a port whose layout is allowed; a state's enters and leaves in one layout."""
    layouts: Sequence[tuple[Layout, ...]] = rows.needs if port == "output" else rows.gives
    which = np.array([r for r, own in enumerate(layouts) if allows(own[0])], dtype=np.int64)
    return UnitRows(
        rows.choice[which],
        tuple(rows.needs[r] for r in which),
        tuple(rows.gives[r] for r in which),
        rows.seconds[which],
        rows.joules[which],
        rows.flops[which],
        rows.scratch[which],
        rows.parts[which],
        rows.wire[which],
    )
