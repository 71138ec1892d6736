"""Way costs: what the ways to run a unit take on each device, as kernels of the target.

A way is known here by the strategy of every member. Its kernel's seconds and joules follow from the
flops and bytes that strategies leave to one device; where the unit is one product of matrices, from
the shape of that product.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import (
    collective_seconds,
    copying_seconds,
    kernel_seconds,
    like_roofline,
)
from tapestry_egg.machine.energy import collective_joules, joules
from tapestry_egg.machine.split_products import multiplied, split_scratch
from tapestry_egg.machine.tables.gemm import Convolved, Gemm
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate
from tapestry_egg.schedule.one_device import block_work
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.traffic import Traffic, UnitTraffic, scattered_bytes
from tapestry_egg.schedule.units import Unit, is_view

from .strategies import Saturated, StrategyRow

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


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
        self.layouts = saturated.encoding.algebra.layouts
        self.partial = np.array([bool(x.partial) for x in self.layouts], dtype=np.bool_)
        self._ports: dict[int, Ints] = {}
        self._work: dict[int, tuple[Floats, Floats]] = {}
        self._steps: dict[int, Floats] = {}
        self._blocks: dict[int, Floats] = {}
        self._sizes: dict[TensorType, Floats] = {}  # by the number of a layout
        # [strategies, (batch, m, n, k)], and three more of what is convolved (`Convolved`)
        self.gemm_shapes: dict[int, Floats] = {}

    def ports(self, signature: int) -> Ints:
        """The numbers of the layouts of operands and results: [strategies, ports]."""
        found = self._ports.get(signature)
        if found is None:
            model = self.saturated.encoding.signatures[signature]
            rows = [[self.number[x] for x in s.layouts] for s in self._strategies(signature)]
            found = np.array(rows, dtype=np.int64)
            found = found.reshape(len(rows), len(model.input_types) + len(model.output_types))
            self._ports[signature] = found
        return found

    def work(self, signature: int) -> tuple[Floats, Floats]:
        """Per strategy the flops on one device, and the bytes that it moves of every operand where
        it reads a part: [strategies], [strategies, operands]."""
        if signature not in self._work:
            model = self.saturated.encoding.signatures[signature]
            sizes, parts = [d.size for d in model.index], model.reads or (None,) * len(model.inputs)
            done: dict[tuple[int, ...], tuple[float, list[float]]] = {}
            every = []
            for s in self._strategies(signature):
                cuts = zip(sizes, s.cuts, strict=True)
                local = tuple([size // self.mesh.parts(c) for size, c in cuts])
                if local not in done:  # many strategies leave the same to a device
                    moved = [
                        0.0 if part is None else evaluate(part, local) * type_.itemsize
                        for part, type_ in zip(parts, model.input_types, strict=True)
                    ]
                    if model.scattered is not None:
                        moved[model.scattered.operand] += scattered_bytes(model, local, self.target)
                    done[local] = float(evaluate(model.flops, local)), moved
                every.append(done[local])
            flops = np.array([f for f, _ in every])
            moved_of = np.array([m for _, m in every], dtype=np.float64)
            self._work[signature] = flops, moved_of.reshape(len(every), len(parts))
        return self._work[signature]

    def steps(self, signature: int) -> Floats:
        """Per strategy the steps of a kernel on one device that wait for one another."""
        if signature not in self._steps:
            model = self.saturated.encoding.signatures[signature]
            sizes, many = [d.size for d in model.index], self._strategies(signature)
            if not model.steps:
                self._steps[signature] = np.zeros(len(many))
                return self._steps[signature]
            local = [
                tuple([n // self.mesh.parts(c) for n, c in zip(sizes, s.cuts, strict=True)])
                for s in many
            ]
            self._steps[signature] = np.array([evaluate(model.steps, x) for x in local])
        return self._steps[signature]

    def spilled(self, signature: int) -> Floats:
        """Per strategy the bytes that each flop of a kernel takes through memory."""
        model = self.saturated.encoding.signatures[signature]
        local = [
            [n // self.mesh.parts(c) for n, c in zip(model.extents, s.cuts, strict=True)]
            for s in self._strategies(signature)
        ]
        return np.array([model.spilled_in(x) for x in local])

    def blocks(self, signature: int) -> Floats:
        """Per strategy the seconds of a kernel in blocks of scores, and the bytes of these that go
        through memory: [strategies, 2]."""
        if signature not in self._blocks:
            model = self.saturated.encoding.signatures[signature]
            done: dict[tuple[int, ...], tuple[float, float]] = {}
            every = []
            for s in self._strategies(signature):
                cuts = zip(model.extents, s.cuts, strict=True)
                local = tuple([n // self.mesh.parts(c) for n, c in cuts])
                if local not in done:
                    done[local] = block_work(model, local, self.target)
                every.append(done[local])
            self._blocks[signature] = np.array(every, dtype=np.float64).reshape(len(every), 2)
        return self._blocks[signature]

    def _strategies(self, signature: int) -> tuple[StrategyRow, ...]:
        return self.saturated.strategies[signature]

    def kernel(
        self,
        unit: Unit,
        choice: NDArray[np.int32],
        flops: Floats,
        moved: Floats,
        read: Sequence[Ints],
        made: Sequence[Ints],
        gemm: Gemm[Floats] | None,
    ) -> tuple[Floats, Floats]:
        """Seconds, and joules of the whole mesh, of one run of the unit, per way; way r runs member
        m by its strategy `choice[r, m]`. Of it are known the flops per device, the bytes that reads
        of parts of operands move, and the numbers of the layouts that are read and made."""
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
        alone = np.ones(len(flops)) if not made else self._kernels_of_their_own(through, made)
        moved *= alone
        contraction = any([s.contracts for s in signatures])
        dtype = root.signature.output_types[0].dtype if root.outputs else "float32"
        if gemm is not None:
            dtype = gemm.dtype
        own = root.signature
        spilled: Floats | float = own.spilled
        if spilled:
            spilled = self.spilled(self.signature_of[unit.root])[choice[:, -1]]
        work = like_roofline(
            own.kernel, own.measured, flops, dtype, self.target, contraction, spilled
        )
        steps = self.steps(self.signature_of[unit.root])[choice[:, -1]] if own.steps else 0.0
        seconds = kernel_seconds(work, moved, dtype, self.target, contraction, gemm, steps)
        if own.blocks is not None:
            blocks, stored = self.blocks(self.signature_of[unit.root])[choice[:, -1]].T
            seconds, moved = np.maximum(seconds, blocks), moved + alone * stored
        exposed = self.traffic.exposed(unit, self.target)
        inside = exposed * work / self.target.rate(dtype, contraction) if exposed else 0.0
        seconds = np.where(alone > 0.0, seconds, inside)
        energy = joules(
            flops, moved, 0.0 * flops, seconds, self.mesh.devices, self.target, dtype, contraction
        )
        wait, power = self._sent(root.signature)
        return seconds + wait, energy + power

    def gemm(self, unit: Unit, choice: NDArray[np.int32]) -> Gemm[Floats] | None:
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
        asked = model.precision
        return Gemm(batch, rows, columns, depth, lhs, rhs, out, convolved, asked)

    def split(self, unit: Unit, gemm: Gemm[Floats] | None, ways: int) -> Floats:
        """Bytes of what the compiler makes of a product and adds up afterwards, per way: parts of
        its sum, or the products of a vector's elements."""
        members = [self.instances[i].signature for i in unit.members]
        if gemm is None or self.target.split_k is None or not any([s.is_product for s in members]):
            return np.zeros(ways)
        (product,) = (s for s in members if s.contracts)
        if product.by_vector:
            columns = product.adds_columns
            return multiplied(gemm, self.target.split_k) if columns else np.zeros(ways)
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

    def _bytes(self, v: int, layouts: Ints) -> Floats:
        """Bytes of a value on each device, in every one of some layouts."""
        tensor = self.schedule.program.types[v]
        sizes = self._sizes.setdefault(tensor, np.full(len(self.layouts), np.nan))
        for n in np.unique(layouts[np.isnan(sizes[layouts])]).tolist():
            block = self.layouts[n].local_shape(tensor.shape, self.mesh)
            sizes[n] = float(prod(block) * tensor.itemsize)
        return sizes[layouts]

    def _kernels_of_their_own(self, through: UnitTraffic, made: Sequence[Ints]) -> Floats:
        """1 for ways in which a unit is a kernel, 0 for those in which it runs in others."""
        parts = np.any([self.partial[x] for x in made], axis=0)
        alone = [0.0 if through.is_free(whole) else 1.0 for whole in (True, False)]
        return np.where(parts, alone[1], alone[0])
