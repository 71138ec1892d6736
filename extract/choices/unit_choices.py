"""Unit choices: what saturation found, as tables that extraction can search.

One entry per unit of the schedule: its *rows*, each a complete way to run the unit, made by
joining the derived strategies of its members on the layouts of the values between them. Nothing is
added that the rules did not derive; of rows with equal layouts those are kept that none beats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import InstanceId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import LOCAL
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.schedule.flatten import FlatProgram, Instance
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.traffic import Traffic
from tapestry_egg.shard.strategies import ChangeRow, Saturated, StrategyRow

from .copies import CopyTable, StepCosts, copy_table
from .inner_copies import InnerCopies
from .joiner import Joiner
from .joiner import UnitRows as UnitRows
from .once import JoinedUnits


@dataclass(frozen=True)
class UnitChoices:
    """Units with their rows, and copy tables by tensor type, those of `fills` apart, since nothing
    is sent for them; all costs are of one run of a unit.
    `truncated` kernels, and so many ports, have more rows than are here; `uncombined` values inside
    kernels are never combined there. Some rows leave out what is `sent_ahead`, with what an earlier
    kernel sends, if it does."""

    schedule: Schedule
    saturated: Saturated
    mesh: MeshShape
    target: Target
    rows: tuple[UnitRows, ...]
    copies: Mapping[TensorType, CopyTable]
    traffic: Traffic
    truncated: tuple[int, int]
    uncombined: int = 0
    fills: frozenset[int] = frozenset()
    of_fills: Mapping[TensorType, CopyTable] = field(default_factory=dict)
    sent_ahead: bool = False

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
    of = target.epilogues, target.fusing
    inside = InnerCopies(schedule, saturated, copies, known.once, *of)
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
        joiner.costs.traffic,
        (kernels, ports),
        inside.others,
        written,
        of_fills,
        joiner.neighbours.sends_ahead,
    )


def _used(saturated: Saturated) -> dict[TensorType, set[Layout]]:
    """The layouts of every type in which some strategy reads or makes it."""
    found: dict[TensorType, set[Layout]] = {}
    for signature, rows in zip(saturated.encoding.signatures, saturated.strategies, strict=True):
        for k, tensor in enumerate((*signature.input_types, *signature.output_types)):
            own = found.setdefault(TensorType(tensor.shape, tensor.dtype), set())
            own.update([row.layouts[k] for row in rows])
    return found


# Fills: values that hold one number everywhere, which any device writes in any layout by itself.
#
# No collective makes a copy of one. XLA writes the number anew where a gather of a fill would
# stand, and a plan that had the gather would promise bytes that nothing sends.


def fills(program: FlatProgram) -> frozenset[int]:
    """The flat values that are made of single numbers alone, as far as a compiler sees it: not
    through products, nor out of loops and branches. What a constraint gives a layout has that."""
    single = {v for v, type_ in enumerate(program.types) if type_.size == 1}
    found: set[int] = set()
    for instance in program.instances:
        if _keeps(instance) and all(v in single or v in found for v in instance.inputs):
            found.update(instance.outputs)
    return frozenset(found - single)


def _keeps(instance: Instance) -> bool:
    """Whether what an instance makes of fills are fills, and XLA makes them so."""
    if instance.port:
        return instance.port in ("invariant", "stream")
    signature = instance.signature
    visible = signature.fusion != "kernel" and signature.means != "layout"
    return visible and signature.keeps_fills
