"""A calibration as a target file and its tables, in the form that `load_target` reads."""

from __future__ import annotations

from datetime import date
from pathlib import Path

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import TargetError
from tapestry_egg.machine.target import Target, load_target

from .calibration import (
    Calibration,
    best_rates,
    collective_lines,
    like_target,
    link_rate,
    matmul_lines,
)


def write_calibration(path: str | Path, found: Calibration, like: str = "") -> Target:
    """Write a target file, with its tables beside it, and read it back for the devices measured.

    What was not measured is that of the known target `like`, by default the one that the devices
    are of. Tables first, so that the target file never names one that is not there.
    """
    path = Path(path)
    if path.suffix not in (".yaml", ".yml"):
        raise TargetError(f"{path.name!r} is no name of a target file", hint="End it in .yaml.")
    base = load_target(f"{like or like_target(found.device, found.platform)}:1")
    tables = {"matmuls": f"{path.stem}_matmuls.csv", "collectives": f"{path.stem}_collectives.csv"}
    lines = {"matmuls": list(matmul_lines(found)), "collectives": list(collective_lines(found))}
    for key, own in lines.items():
        if own:
            write_atomic(path.parent / tables[key], "\n".join([*own, ""]))
    named = {key: name for key, name in tables.items() if lines[key]}
    write_atomic(path, _text(path.stem, found, base, named))
    return load_target(f"{path}:{found.devices}")


def _text(name: str, found: Calibration, base: Target, tables: dict[str, str]) -> str:
    """The target file. Rates are measured, so their efficiencies are 1."""
    power, rates = base.power, best_rates(found)
    idle, most = found.watts or (power.idle_watts, power.max_watts)
    more = (most - idle) / max(power.max_watts - power.idle_watts, 1e-9)
    link = link_rate(found) or base.levels[0].bytes_per_second
    full = link * (2 * base.levels[0].rank if base.levels[0].kind == "torus" else 1)
    told = "the driver's" if found.watts else f"not measured: those of {base.name}"
    memory = found.memory or base.hbm_bytes
    lines = [
        f"# {found.devices} x {found.device}, measured by tapestry-egg calibrate.",
        f"name: {name}",
        f'title: "{found.device}, {found.devices} devices, calibrated"',
        f"retrieved: {date.today().isoformat()}",
        f'sources: ["tapestry-egg calibrate", "what it cannot measure: target {base.name}"]',
        "",
        "# The best flop/s of all products measured, and of a polynomial outside the matrix units.",
        "peak:",
        *(f"  {dtype}: {rate:.6g}" for dtype, rate in rates.items()),
        f"vector: {{float32: {found.vector_rate:.6g}}}",
        "hbm:",
        f"  bytes: {memory}",
        f"  bytes_per_second: {found.copy_rate:.6g}",
        "  reserved_bytes: 0",
        f"  shared: {'true' if base.shared_memory else 'false'}",
        f"launch_seconds: {found.launch:.4g}  # of each of a chain of tiny products",
        "efficiency: {flops: 1, hbm: 1}",
        "tables:",
        *(f"  {key}: {file}" for key, file in tables.items()),
        f"# Watts: idle and max {told}; what units add is an estimate.",
        "power:",
        f"  idle: {idle:.6g}",
        f"  max: {most:.6g}",
        "  measured: false",
        f"  busy: {{kernel: {power.kernel_watts * more:.6g}, "
        f"flops: {power.flops_watts * more:.6g}, "
        f"hbm: {power.joules_per_byte * more * found.copy_rate:.6g}, "
        f"link: {power.joules_per_wire_byte * more * full:.6g}}}",
        "levels:",
    ]
    for number, level in enumerate(base.levels):
        lines += [
            f"  - name: {level.name}" + ("" if number == 0 else f"  # as {base.name}'s"),
            f"    kind: {level.kind}",
            *([f"    max: [{', '.join(map(str, level.max))}]"] if level.max else []),
            f"    bytes_per_second: {link if number == 0 else level.bytes_per_second:.6g}",
            "    efficiency: 1",
            f"    latency_seconds: {level.latency_seconds:.6g}",
            f"    base_seconds: {level.base_seconds:.6g}",
        ]
        if level.kind == "torus":
            every = "true" if level.wrap_every_dim else "false"
            lines.append(f"    wrap: {{multiple: {level.wrap_multiple}, every_dim: {every}}}")
    if base.overlap_slowdown is not None:
        lines.append(f"overlap: {{slowdown: {base.overlap_slowdown:g}}}  # as {base.name}'s")
    return "\n".join([*lines, ""])
