"""Way costs: what the ways to run a unit take on each device, as kernels of the target.

A way is known here by the strategy of every member. Its kernel's seconds and joules follow from the
flops and bytes that strategies leave to one device; where the unit is one product of matrices, from
the shape of that product.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import (
    collective_seconds,
    copying_seconds,
    kernel_seconds,
    like_roofline,
)
from tapestry_egg.machine.energy import collective_joules, joules
from tapestry_egg.machine.split_k import multiplied, split_scratch
from tapestry_egg.machine.tables.gemm import Convolved, Gemm
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.traffic import Traffic, UnitTraffic
from tapestry_egg.schedule.units import Unit, is_view

from .strategies import Saturated


class WayCosts:
    """Costs of ways to run units of one schedule on one mesh; equal parts of them, once."""

    def __init__(
        self,
        schedule: Schedule,
        saturated: Saturated,
        mesh: MeshShape,
        target: Target,
        traffic: Traffic,
    ) -> None:
        self.schedule, self.saturated, self.mesh, self.target = schedule, saturated, mesh, target
        self.instances = schedule.program.instances
        self.traffic = traffic
        self.signature_of = saturated.encoding.signature_of
        self.number = saturated.encoding.algebra.number
        self.done: dict[tuple[int, int], tuple[float, tuple[float, ...]]] = {}
        self.sizes: dict[tuple[TensorType, int], float] = {}
        # [strategies, (batch, m, n, k)], and three more of what is convolved (`Convolved`)
        self.gemm_shapes: dict[int, NDArray[np.float64]] = {}

    def work(self, signature: int, strategy: int) -> tuple[float, tuple[float, ...]]:
        """Flops of a strategy on one device, and per operand the bytes that it moves where it reads
        a part."""
        if (signature, strategy) not in self.done:
            model = self.saturated.encoding.signatures[signature]
            cuts = self.saturated.strategies[signature][strategy].cuts
            local = tuple(
                [d.size // self.mesh.parts(c) for d, c in zip(model.index, cuts, strict=True)]
            )
            parts = model.reads or (None,) * len(model.inputs)
            moved = tuple(
                [
                    0.0 if part is None else evaluate(part, local) * type_.itemsize
                    for part, type_ in zip(parts, model.input_types, strict=True)
                ]
            )
            self.done[signature, strategy] = evaluate(model.flops, local), moved
        return self.done[signature, strategy]

    def kernel(
        self,
        unit: Unit,
        flops: NDArray[np.float64],
        moved: NDArray[np.float64],
        read: Sequence[Sequence[Layout]],
        made: Sequence[Sequence[Layout]],
        gemm: Gemm[NDArray[np.float64]] | None,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Seconds, and joules of the whole mesh, of one run of the unit, per way; of it are known
        the flops per device and the bytes that reads of parts of operands move."""
        root = self.instances[unit.root]
        signatures = [self.instances[i].signature for i in unit.members]
        moved, through = moved.copy(), self.traffic.of(unit)
        if (root.port and not through.launches) or is_view(self.schedule.program, unit):
            return np.zeros(len(flops)), np.zeros(len(flops))
        for (i, p, v), column, share in zip(unit.reads, read, through.reads, strict=True):
            reads = self.instances[i].signature.reads
            if not reads or reads[p] is None:
                moved += share * self._bytes(v, column)
        for v, column, share in zip(unit.outputs, made, through.writes, strict=True):
            moved += share * self._bytes(v, column)
        if root.port:
            seconds = copying_seconds(moved, through.launches, self.target)
            return seconds, joules(
                0.0 * moved, moved, 0.0 * moved, seconds, self.mesh.devices, self.target
            )
        alone = np.ones(len(flops)) if not made else _kernels_of_their_own(through, made)
        moved *= alone
        contraction = any([s.contracts for s in signatures])
        dtype = root.signature.output_types[0].dtype if root.outputs else "float32"
        if gemm is not None:
            dtype = gemm.dtype
        own = root.signature
        work = like_roofline(
            own.kernel, own.measured, flops, dtype, self.target, contraction, own.spilled
        )
        seconds = kernel_seconds(work, moved, dtype, self.target, contraction, gemm)
        seconds = seconds * alone
        energy = joules(
            flops, moved, 0.0 * flops, seconds, self.mesh.devices, self.target, dtype, contraction
        )
        wait, power = self._sent(root.signature)
        return seconds + wait, energy + power

    def gemm(self, unit: Unit, choice: NDArray[np.int32]) -> Gemm[NDArray[np.float64]] | None:
        """The local product of matrices that the unit's kernel is, per way; None where it is none,
        or more than one."""
        found = [
            (m, self.signature_of[i], self.instances[i].signature)
            for m, i in enumerate(unit.members)
            if self.instances[i].signature.contracts
        ]
        if len(found) != 1 or found[0][2].gemm is None:
            return None
        (m, signature, model), dims = found[0], found[0][2].gemm
        if signature not in self.gemm_shapes:
            local = [
                [d.size // self.mesh.parts(c) for d, c in zip(model.index, s.cuts, strict=True)]
                for s in self.saturated.strategies[signature]
            ]
            self.gemm_shapes[signature] = np.array(
                [(*dims.shape(x), *(model.convolved(x) or ())) for x in local], dtype=np.float64
            )
        batch, rows, columns, depth, *windows = self.gemm_shapes[signature][choice[:, m]].T
        lhs, rhs = model.input_types[dims.lhs].dtype, model.input_types[dims.rhs].dtype
        convolved = Convolved(*windows) if windows else None
        out = model.output_types[0].dtype
        return Gemm(batch, rows, columns, depth, lhs, rhs, out, convolved)

    def split(
        self, unit: Unit, gemm: Gemm[NDArray[np.float64]] | None, ways: int
    ) -> NDArray[np.float64]:
        """Bytes of what the compiler makes of a product and adds up afterwards, per way: parts of
        its sum, or the products of a vector's elements."""
        members = [self.instances[i].signature for i in unit.members]
        if gemm is None or self.target.split_k is None or not any([s.is_product for s in members]):
            return np.zeros(ways)
        (product,) = (s for s in members if s.contracts)
        if product.by_vector:
            return multiplied(gemm) if product.adds_columns else np.zeros(ways)
        return split_scratch(gemm, self.target.split_k)

    def _sent(self, signature: OperationSignature) -> tuple[float, float]:
        """(seconds, joules) of sending what one device computes for all to the others."""
        axes = tuple(range(len(self.mesh.sizes)))
        seconds = energy = 0.0
        for tensor in signature.sent_types:
            amount = float(tensor.nbytes)
            seconds += collective_seconds("all_reduce", amount, axes, self.mesh, self.target)
            energy += collective_joules("all_reduce", amount, axes, self.mesh, self.target)
        return seconds, energy

    def _bytes(self, v: int, column: Sequence[Layout]) -> NDArray[np.float64]:
        """Bytes of a value on each device, in every layout of a column."""
        tensor = self.schedule.program.types[v]
        out = []
        for layout in column:
            key = (tensor, self.number[layout])
            if key not in self.sizes:
                n = 1
                for size in layout.local_shape(tensor.shape, self.mesh):
                    n *= size
                self.sizes[key] = float(n * tensor.itemsize)
            out.append(self.sizes[key])
        return np.array(out)


def _kernels_of_their_own(
    through: UnitTraffic, made: Sequence[Sequence[Layout]]
) -> NDArray[np.float64]:
    """1 for ways in which a unit is a kernel, 0 for those in which it runs in others."""
    return np.array(
        [
            0.0 if through.is_free(not any([x.partial for x in gives])) else 1.0
            for gives in zip(*made, strict=True)
        ]
    )
