"""Measured time of one executable by instruction: what JAX's profiler recorded, read back.

Events carry the name of their instruction and module. CPU devices record them on the threads of the
host, with the device's number; GPUs and TPUs have a plane each, with a line of operations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapestry_egg.errors import TapestryError

from .hlo import KINDS, collectives_in
from .hlo_text import Instruction, Module, parse

#: Opcodes whose events hold those of what they call.
_HOLDERS = ("while", "conditional", "call")

#: JAX's primitives that are kernels of their own; what XLA fuses around them counts as theirs.
ALONE = (
    "dot_general",
    "conv_general_dilated",
    "ragged_dot_general",
    "sort",
    "top_k",
    "gather",
    "scatter",
    "scatter-add",
    "cumsum",
    "cumlogsumexp",
    "cholesky",
    "triangular_solve",
    "fft",
)

#: What XLA's own words say, whatever name it has given to what it merged.
_OPCODES = {"dot": "dot_general", "convolution": "conv_general_dilated"}

#: What all other kernels are called together.
FUSED = "elementwise and reductions"


@dataclass(frozen=True, slots=True)
class MeasuredInstruction:
    """One instruction of an executable in one step: `seconds` are the mean over the devices,
    `least_seconds` those of the device where it took least. A collective waits for the slowest
    device, so its least is nearest to what moving the bytes takes."""

    name: str
    kind: str  # kernel, collective
    what: str  # the kernel's primitive; for a collective its kind
    seconds: float
    least_seconds: float
    count: float  # runs of it on one device
    group: int = 1
    payload_bytes: int = 0  # of one run; collectives only
    shape: str = ""


def profiled(folder: Path, module_text: str, steps: int) -> tuple[MeasuredInstruction, ...]:
    """What a profile of `steps` steps says of a module, in the order of falling seconds.

    Raises TapestryError where the profile knows nothing of the module.
    """
    import jax

    module = parse(module_text)
    files = sorted(folder.rglob("*.xplane.pb"))
    spent: dict[str, dict[str, list[float]]] = {}
    for file in files:
        data = jax.profiler.ProfileData.from_file(str(file))
        for name, device, seconds in _events(data.planes, module.name):
            spent.setdefault(name, {}).setdefault(device, []).append(seconds)
    if not spent:
        raise TapestryError(
            f"the profile holds nothing of {module.name}",
            where="measure",
            hint="JAX's profiler must be able to record this device; see jax.profiler.trace.",
        )
    table = {i.name: (i, c) for c, x in module.computations.items() for i in x.instructions}
    moved = {c.name: c for c in collectives_in(module_text)}
    found = []
    for name, devices in spent.items():
        if name not in table or table[name][0].opcode in _HOLDERS:
            continue
        instruction = table[name][0]
        totals = [sum(times) / steps for times in devices.values()]
        collective = moved.get(name) or moved.get(name.replace("-done", "-start"))
        stem = instruction.opcode.removesuffix("-start").removesuffix("-done")
        is_collective = collective is not None or stem in KINDS
        found.append(
            MeasuredInstruction(
                name=name,
                kind="collective" if is_collective else "kernel",
                what=KINDS.get(stem, stem) if is_collective else _primitive(module, instruction),
                seconds=sum(totals) / len(totals),
                least_seconds=min(totals),
                count=max(len(times) for times in devices.values()) / steps,
                group=collective.group if collective else 1,
                payload_bytes=collective.payload_bytes if collective else 0,
                shape=", ".join(f"{a.dtype}{list(a.shape)}" for a in instruction.arrays),
            )
        )
    return tuple(sorted(found, key=lambda x: (-x.seconds, x.name)))


def _events(planes: Iterable[Any], module: str) -> Iterator[tuple[str, str, float]]:
    """(instruction, device, seconds) of every event of a module."""
    for plane in planes:
        on_device = plane.name.startswith("/device:")
        lines = list(plane.lines)
        # Where a device has a line of operations, its other lines tell the same again; GPUs may
        # have only their streams, whose kernels say which operation they are of.
        of_operations = [x for x in lines if "XLA Ops" in x.name] if on_device else []
        for line in of_operations or lines:
            for event in line.events:
                said = dict(event.stats)
                name = said.get("hlo_op")
                if name is None and of_operations:
                    name = event.name.partition(" ")[0].lstrip("%")
                if name is None or said.get("hlo_module", module) != module:
                    continue
                device = plane.name if on_device else str(said.get("device_ordinal", 0))
                yield str(name), device, float(event.duration_ns) * 1e-9


def _primitive(module: Module, instruction: Instruction) -> str:
    """The primitive that a kernel runs: one of `ALONE`, in it or in what it fuses, else `FUSED`."""
    inside = [instruction]
    for called in instruction.called:
        if called in module.computations:
            inside += module.computations[called].instructions
    names = [_OPCODES[i.opcode] for i in inside if i.opcode in _OPCODES]
    names += [part.rpartition("/")[2] for i in inside for part in i.op_name.split(";")]
    return next((name for name in names if name in ALONE), FUSED)
