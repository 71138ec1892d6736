"""The snapshot: what saturation found, as tables that extraction can search.

One entry per unit of the schedule: its *rows*, each a complete way to run the unit, made by
joining the derived strategies of its members on the layouts of the values between them. Nothing is
added that the rules did not derive, and rows with equal layouts keep the cheapest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..blockgraph import TensorType
from ..constraints import KERNEL as CONSTRAINT
from ..constraints import Constraint, Wanted
from ..costs import collective_joules, collective_seconds, joules, kernel_seconds
from ..errors import ExtractError
from ..layout import Layout, MeshShape
from ..mesh_contract import MeshContract
from ..metakernels.signature import OperationSignature, evaluate
from ..saturate import Saturated, StrategyRow
from ..schedule import Schedule, Unit
from ..target import Target
from .copies import CopyTable, copy_table

# A unit whose joined rows would exceed this many is cut to the cheapest; reported as `truncated`.
_ROWS = 600


@dataclass(frozen=True)
class UnitRows:
    """All ways to run one unit. Row r picks `choice[r][m]` of member m's strategies."""

    choice: NDArray[np.int32]  # [rows, members] strategy number in the member's signature
    needs: tuple[tuple[Layout, ...], ...]  # per row: one layout per read of the unit
    gives: tuple[tuple[Layout, ...], ...]  # per row: one layout per output
    seconds: NDArray[np.float64]
    joules: NDArray[np.float64]
    flops: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.seconds)


@dataclass(frozen=True)
class Snapshot:
    """Units with their rows, and copy tables by tensor type; all costs are of one run of a unit."""

    schedule: Schedule
    saturated: Saturated
    mesh: MeshShape
    target: Target
    rows: tuple[UnitRows, ...]
    copies: Mapping[TensorType, CopyTable]
    truncated: int

    def signature(self, instance: int) -> OperationSignature:
        return self.schedule.program.instances[instance].signature

    def strategy(self, instance: int, number: int) -> StrategyRow:
        which = self.saturated.encoding.signature_of[instance]
        return self.saturated.strategies[which][number]


def snapshot(
    schedule: Schedule,
    saturated: Saturated,
    mesh: MeshShape,
    target: Target,
    contract: MeshContract | None = None,
) -> Snapshot:
    """Join the derived strategies into unit rows, and tabulate copies.

    A value that the program constrains has only rows that give it as it asks; `contract` is the
    mesh that the program's axes are of, where a plan's mesh divides it.
    Raises ExtractError when some unit has no way to run (a rule was removed that all need).
    """
    joiner = _Joiner(schedule, saturated, mesh, target, contract)
    rows = tuple(joiner.rows(u, unit) for u, unit in enumerate(schedule.units))
    program = schedule.program
    types = {
        program.types[v]
        for unit in schedule.units
        for v in (*unit.outputs, *(v for _, _, v in unit.reads))
    }
    algebra = saturated.encoding.algebra
    copies: dict[TensorType, CopyTable] = {}
    by_rank: dict[int, list[Layout]] = {}
    for layout in algebra.layouts:
        by_rank.setdefault(len(layout.dims), []).append(layout)
    for tensor in types:
        strong = TensorType(tensor.shape, tensor.dtype)
        if strong not in copies:
            copies[strong] = copy_table(
                strong, by_rank[tensor.rank], saturated.changes, algebra.monoids, mesh, target
            )
        copies[tensor] = copies[strong]
    return Snapshot(schedule, saturated, mesh, target, rows, copies, joiner.truncated)


class _Joiner:
    def __init__(
        self,
        schedule: Schedule,
        saturated: Saturated,
        mesh: MeshShape,
        target: Target,
        contract: MeshContract | None = None,
    ) -> None:
        self.schedule, self.saturated, self.mesh, self.target = schedule, saturated, mesh, target
        self.wanted = self._constrained(contract)
        self.instances = schedule.program.instances
        self.signature_of = saturated.encoding.signature_of
        self.memo: dict[tuple[object, ...], UnitRows] = {}
        self.by_output: dict[tuple[int, Wanted | None], dict[tuple[Layout, ...], list[int]]] = {}
        self.truncated = 0

    def _constrained(self, contract: MeshContract | None) -> dict[int, Wanted]:
        """Instances of constraints that this mesh can read -> the layouts that they want."""
        found = {}
        for i, instance in enumerate(self.schedule.program.instances):
            if instance.operation < 0 or instance.signature.kernel != CONSTRAINT:
                continue
            op = self.schedule.program.bodies[instance.body].graph.operations[instance.operation]
            shape = instance.signature.output_types[0].shape
            wanted = Constraint.of(op.params).wanted(shape, self.mesh, contract)
            if wanted is not None:
                found[i] = wanted
        return found

    def rows(self, number: int, unit: Unit) -> UnitRows:
        key = self._shape_of(unit)
        if key not in self.memo:
            self.memo[key] = self._join(unit)
        found = self.memo[key]
        if not len(found):
            root = self.instances[unit.root]
            body = self.schedule.program.bodies[root.body]
            source = body.graph.operations[root.operation].source if root.operation >= 0 else ""
            raise ExtractError(
                f"no strategy was derived for unit {number} ({root.signature.kernel})",
                where=str(source),
                hint="The rule `whole` lets every operation run replicated; was it removed?",
            )
        return found

    def _shape_of(self, unit: Unit) -> tuple[object, ...]:
        """Equal for units of equal structure, so that repeated layers are joined once."""
        local: dict[int, int] = {}
        parts = []
        for i in unit.members:
            instance = self.instances[i]
            wires = tuple(local.setdefault(v, len(local)) for v in instance.inputs)
            outs = tuple(local.setdefault(v, len(local)) for v in instance.outputs)
            parts.append((self.signature_of[i], wires, outs, instance.port, self.wanted.get(i)))
        return (*parts, tuple(local[v] for v in unit.outputs))

    def _allowed(self, instance: int) -> list[int]:
        """The numbers of the strategies of an instance's signature that it may run by."""
        strategies = self.saturated.strategies[self.signature_of[instance]]
        wanted = self.wanted.get(instance)
        if wanted is None:
            return list(range(len(strategies)))
        return [n for n, s in enumerate(strategies) if wanted.holds(s.layouts[-1])]

    def _giving(self, instance: int) -> dict[tuple[Layout, ...], list[int]]:
        signature = self.signature_of[instance]
        key = (signature, self.wanted.get(instance))
        if key not in self.by_output:
            table: dict[tuple[Layout, ...], list[int]] = {}
            strategies = self.saturated.strategies[signature]
            operands = len(self.saturated.encoding.signatures[signature].inputs)
            for n in self._allowed(instance):
                table.setdefault(strategies[n].layouts[operands:], []).append(n)
            self.by_output[key] = table
        return self.by_output[key]

    def _join(self, unit: Unit) -> UnitRows:
        inside = {v for i in unit.members[:-1] for v in self.instances[i].outputs}
        root = unit.root
        partial: list[tuple[dict[int, Layout], dict[int, int]]] = []
        strategies = self.saturated.strategies[self.signature_of[root]]
        for n in self._allowed(root):
            wanted = self._wants(root, strategies[n], inside, {})
            if wanted is not None:
                partial.append((wanted, {root: n}))
        for i in reversed(unit.members[:-1]):
            (out,) = self.instances[i].outputs
            giving = self._giving(i)
            grown = []
            for wants, chosen in partial:
                for n in giving.get((wants[out],), ()):
                    s = self.saturated.strategies[self.signature_of[i]][n]
                    wanted = self._wants(i, s, inside, wants)
                    if wanted is not None:
                        grown.append((wanted, {**chosen, i: n}))
            partial = self._thin(unit, grown, inside)
        return self._finish(unit, [chosen for _, chosen in partial])

    def _wants(
        self, i: int, s: StrategyRow, inside: set[int], wants: dict[int, Layout]
    ) -> dict[int, Layout] | None:
        """Layouts that values inside the unit must have, or None when two readers disagree."""
        out = wants
        for v, layout in zip(self.instances[i].inputs, s.layouts, strict=False):
            if v not in inside:
                continue
            if v in out:
                if out[v] != layout:
                    return None
            else:
                out = {**out, v: layout}
        return out

    def _thin(
        self, unit: Unit, rows: list[tuple[dict[int, Layout], dict[int, int]]], inside: set[int]
    ) -> list[tuple[dict[int, Layout], dict[int, int]]]:
        """Drop rows that agree with an earlier one on everything visible from outside."""
        seen: dict[tuple[object, ...], tuple[dict[int, Layout], dict[int, int]]] = {}
        for wants, chosen in rows:
            key = (self._visible(chosen), tuple(sorted(wants.items(), key=lambda e: e[0])))
            seen.setdefault(key, (wants, chosen))
        kept = list(seen.values())
        if len(kept) > _ROWS:
            self.truncated += 1
            kept = sorted(kept, key=lambda r: sum(len(x.partial) for x in r[0].values()))[:_ROWS]
        return kept

    def _visible(self, chosen: dict[int, int]) -> tuple[object, ...]:
        """Needs of outside values and layouts given, as far as chosen."""
        facts: list[object] = []
        for i, n in chosen.items():
            s = self.saturated.strategies[self.signature_of[i]][n]
            facts.append((i, s.layouts))
        return tuple(facts)

    def _finish(self, unit: Unit, rows: list[dict[int, int]]) -> UnitRows:
        best: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], tuple[float, ...]] = {}
        chosen_for: dict[tuple[tuple[Layout, ...], tuple[Layout, ...]], dict[int, int]] = {}
        maker = {v: (i, q) for i in unit.members for q, v in enumerate(self.instances[i].outputs)}
        for chosen in rows:
            layouts = {
                i: self.saturated.strategies[self.signature_of[i]][n].layouts
                for i, n in chosen.items()
            }
            needs = tuple(layouts[i][p] for i, p, _ in unit.reads)
            gives = tuple(
                layouts[i][len(self.instances[i].inputs) + q]
                for i, q in (maker[v] for v in unit.outputs)
            )
            costs = self._cost(unit, chosen, needs, gives)
            if (needs, gives) not in best or costs < best[needs, gives]:
                best[needs, gives] = costs
                chosen_for[needs, gives] = chosen
        keys = list(best)
        return UnitRows(
            choice=np.array(
                [[chosen_for[k][i] for i in unit.members] for k in keys], dtype=np.int32
            ).reshape(len(keys), len(unit.members)),
            needs=tuple(k[0] for k in keys),
            gives=tuple(k[1] for k in keys),
            seconds=np.array([best[k][0] for k in keys]),
            joules=np.array([best[k][1] for k in keys]),
            flops=np.array([best[k][2] for k in keys]),
        )

    def _cost(
        self,
        unit: Unit,
        chosen: dict[int, int],
        needs: tuple[Layout, ...],
        gives: tuple[Layout, ...],
    ) -> tuple[float, float, float]:
        """(seconds, joules of the whole mesh, flops per device) of one run of the unit."""
        instances = self.instances
        root = instances[unit.root]
        if root.port or all(instances[i].signature.fusion == "view" for i in unit.members):
            return (0.0, 0.0, 0.0)
        flops, moved, contraction = 0.0, 0.0, False
        wait, power = self._sent(root.signature)
        for i in unit.members:
            signature = instances[i].signature
            cuts = self.saturated.strategies[self.signature_of[i]][chosen[i]].cuts
            local = tuple(
                d.size // self.mesh.parts(c) for d, c in zip(signature.index, cuts, strict=True)
            )
            flops += evaluate(signature.flops, local)
            contraction |= signature.contracts
        for (i, p, v), layout in zip(unit.reads, needs, strict=True):
            signature = instances[i].signature
            tensor = self.schedule.program.types[v]
            reads = signature.reads[p] if signature.reads else None
            if reads is None:
                moved += _bytes(tensor, layout, self.mesh)
            else:
                cuts = self.saturated.strategies[self.signature_of[i]][chosen[i]].cuts
                local = tuple(
                    d.size // self.mesh.parts(c) for d, c in zip(signature.index, cuts, strict=True)
                )
                moved += evaluate(reads, local) * tensor.itemsize
        for v, layout in zip(unit.outputs, gives, strict=True):
            moved += _bytes(self.schedule.program.types[v], layout, self.mesh)
        dtype = root.signature.output_types[0].dtype if root.outputs else "float32"
        seconds = float(kernel_seconds(flops, moved, dtype, self.target, contraction))
        energy = float(
            joules(flops, moved, 0.0, seconds, self.mesh.devices, self.target, dtype, contraction)
        )
        return (seconds + wait, energy + power, flops)

    def _sent(self, signature: OperationSignature) -> tuple[float, float]:
        """(seconds, joules) of sending what one device computes for all to the others."""
        axes = tuple(range(len(self.mesh.sizes)))
        seconds = energy = 0.0
        for tensor in signature.sent_types:
            amount = float(tensor.nbytes)
            seconds += collective_seconds("all_reduce", amount, axes, self.mesh, self.target)
            energy += collective_joules("all_reduce", amount, axes, self.mesh, self.target)
        return seconds, energy


def _bytes(tensor: TensorType, layout: Layout, mesh: MeshShape) -> float:
    n = 1
    for size in layout.local_shape(tensor.shape, mesh):
        n *= size
    return float(n * tensor.itemsize)
