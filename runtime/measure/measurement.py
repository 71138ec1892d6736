"""A measured run beside what was planned and compiled: seconds by kernel and by collective."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.columns import columns
from tapestry_egg.errors import TapestryError
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.plans.cost_table import CostPart
from tapestry_egg.plans.plan import Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.quantities import TIME

from .hlo import KINDS, collectives_in
from .hlo_text import Instruction, Module, parse

# Measured time of one executable by instruction: what JAX's profiler recorded, read back.
#
# Events carry the name of their instruction and module. CPU devices record them on the threads of
# the host, with the device's number; GPUs and TPUs have a plane each, with a line of operations.


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


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """Kernels of one primitive, or collectives of one kind and group size, of one step and device.

    `least_seconds` sums what each took on the device where it took least: for collectives, without
    most of the waiting for others. Counts are those of runs; XLA fuses and merges, so they may
    differ.
    """

    kind: str
    name: str
    planned_seconds: float
    measured_seconds: float
    least_seconds: float
    planned_count: float
    measured_count: float


@dataclass(frozen=True)
class Measurement:
    """One plan as it ran: `step_seconds` by the clock, medians of `steps`, and by instruction.

    `data()` and `save()` give the whole record as JSON. `rates()` says how much faster than planned
    links, arithmetic and memory were, for `front.what_if(**measurement.rates())`.
    """

    plan: str
    graph: str
    target: str
    device: str
    steps: int
    step_seconds: float
    planned_seconds: float
    rows: tuple[MeasuredRow, ...]
    instructions: tuple[MeasuredInstruction, ...]

    def rates(self) -> dict[str, float | str]:
        """Planned over measured seconds, of collectives (`links`), products of matrices (`flops`)
        and what is fused (`hbm`), those without a counterpart left out: of kernels the mean over
        the devices, of collectives the least, since most wait for others."""
        found: dict[str, float | str] = {}
        for key, chosen in (
            ("links", [r for r in self.rows if r.kind == "collective"]),
            ("flops", [r for r in self.rows if r.name in ("dot_general", "conv_general_dilated")]),
            ("hbm", [r for r in self.rows if r.name == FUSED]),
        ):
            both = [r for r in chosen if r.planned_seconds > 0 and r.least_seconds > 0]
            if both:
                spent = sum(
                    r.least_seconds if r.kind == "collective" else r.measured_seconds for r in both
                )
                found[key] = sum(r.planned_seconds for r in both) / spent
        return found

    def data(self) -> dict[str, Any]:
        """The record as plain data."""
        return {"format": "tapestry-egg measurement 1", **asdict(self)}

    def save(self, path: str | Path) -> None:
        """Write the record as JSON."""
        write_atomic(Path(path), json.dumps(self.data(), indent=1) + "\n")

    def __str__(self) -> str:
        cells = [["kernel or collective", "planned", "measured", "least", "planned", "measured"]]
        for r in self.rows:
            cells.append(
                [
                    r.name,
                    *(
                        TIME.format(x) if x else "-"
                        for x in (r.planned_seconds, r.measured_seconds, r.least_seconds)
                    ),
                    *(f"{x:g}×" if x else "-" for x in (r.planned_count, r.measured_count)),
                ]
            )
        head = (
            f"plan {self.plan} of {self.graph}, planned for {self.target}, run on {self.device}: "
            f"{TIME.format(self.step_seconds)} a step, planned {TIME.format(self.planned_seconds)}"
        )
        return "\n".join([head, columns(cells, right=range(1, 6))])


def rows_of(
    plan: Plan, parts: Sequence[CostPart], measured: Sequence[MeasuredInstruction]
) -> tuple[MeasuredRow, ...]:
    """Planned beside measured: kernels first, each by falling measured seconds."""
    sums: dict[tuple[str, str], list[float]] = {}

    def add(kind: str, name: str, *numbers: float) -> None:
        entry = sums.setdefault((kind, name), [0.0] * 5)
        for k, number in enumerate(numbers):
            entry[k] += number

    for p in parts:
        if p.kind == "kernel":
            name = next((n for n in p.name.split(" + ") if n in ALONE), FUSED)
            add("kernel", name, p.seconds, 0.0, 0.0, p.count, 0.0)
    assert plan.origin is not None, "its parts were told"
    for c in planned_collectives(plan):
        block = c.payload_bytes / c.group if c.kind == "all_gather" else float(c.payload_bytes)
        axes = tuple(plan.mesh.names.index(a) for a in c.axes)
        seconds = collective_seconds(c.kind, block, axes, plan.mesh, plan.origin.machine)
        add("collective", f"{c.kind} over {c.group}", c.count * seconds, 0.0, 0.0, c.count, 0.0)
    for m in measured:
        name = f"{m.what} over {m.group}" if m.kind == "collective" else m.what
        add(m.kind, name, 0.0, m.seconds, m.least_seconds, 0.0, m.count)
    order = sorted(sums, key=lambda k: (k[0] == "collective", -sums[k][1], k))
    return tuple(MeasuredRow(*key, *sums[key]) for key in order)
