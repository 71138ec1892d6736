"""Stored blocks: what kernels that run in blocks take beside their operands and results."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.tables.kernel_rates import kernel_rate
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.units import Unit

from .strategies import Saturated


def stored_blocks(
    unit: Unit,
    choice: NDArray[np.int32],
    schedule: Schedule,
    saturated: Saturated,
    mesh: MeshShape,
    target: Target,
) -> NDArray[np.float64]:
    """Bytes of what kernels of a unit that run in blocks take beside, per way; way r runs member m
    by its strategy `choice[r, m]`."""
    found = np.zeros(len(choice))
    for m, i in enumerate(unit.members):
        signature = schedule.program.instances[i].signature
        if signature.scratch is None:
            continue
        amounts = []
        for s in saturated.strategies[saturated.encoding.signature_of[i]]:
            cuts = zip(signature.extents, s.cuts, strict=True)
            local = tuple([size // mesh.parts(c) for size, c in cuts])
            amounts.append(kernel_blocks(signature, local, target))
        found += np.array(amounts)[choice[:, m]]
    return found


def kernel_blocks(signature: OperationSignature, extents: tuple[int, ...], target: Target) -> float:
    """Bytes of what an operation's kernel takes beside at the given index extents, where the
    machine has no measured kernel that does without."""
    if signature.scratch is None:
        return 0.0
    dtype = signature.output_types[0].dtype
    if kernel_rate(signature.kernel, signature.measured, dtype, target.name) is not None:
        return 0.0
    return float(signature.scratch.bytes_at(extents, target.epilogues))
