"""The command targets: the machines that are known, and what their tables say of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapestry_egg.columns import columns
from tapestry_egg.errors import TargetError
from tapestry_egg.quantities import BYTES

from .console import Json, Quiet, print_fields, print_json, say

if TYPE_CHECKING:
    from tapestry_egg.machine.tables.lookup import TableError
    from tapestry_egg.machine.target import Target


def targets(
    name: Annotated[str, typer.Argument(metavar="[NAME:SHAPE]", help="One target.")] = "",
    as_json: Json = False,
) -> None:
    """List the machines known, or show one."""
    from tapestry_egg.machine.tables.lookup import table_errors
    from tapestry_egg.machine.target import load_target

    if name:
        target = load_target(name)
        errors = table_errors(target.matmuls, target.collectives)
        fields = {
            **asdict(target),
            "devices": target.devices,
            "modelled_against_measured": [asdict(e) for e in errors],
        }
        if as_json:
            print_json(fields)
        else:
            print_fields(
                {
                    "target": target.spec,
                    "title": target.title,
                    "devices": str(target.devices),
                    "mesh shapes": ", ".join(str(mesh) for mesh in target.mesh_shapes()),
                    "memory": BYTES.format(target.hbm_bytes),
                    "memory rate": _rate(target.hbm_bytes_per_second),
                    "links": ", ".join(
                        f"{level.name} {_rate(level.full_bytes_per_second)}"
                        for level in target.levels
                    ),
                    "power": _power(target),
                    "clock": _clock(target),
                    "price": _price(target),
                    "as of": target.retrieved,
                    "sources": "\n".join(target.sources),
                }
            )
            if errors:
                print("\nmodelled against measured, every row left out in turn:")
                print(columns(_error_rows(errors)))
        return
    rows = _target_rows()
    if as_json:
        print_json(rows)
    else:
        cells = [[row["name"], row["title"]] for row in rows]
        print(columns([["target", "machine"], *cells]))
        say("Write NAME:SHAPE, such as h100:8 (GPUs), h100:4x8 (hosts x GPUs) or v5e:4x4 (torus).")


def _error_rows(errors: Sequence[TableError]) -> list[list[str]]:
    """A table of errors, each with a bar up to its 90th percentile: `#` as far as the median."""
    rows = [["times of", "rows", "median", "90 %", "0 to 50 %"]]
    for e in errors:
        median, high = (min(25, round(50 * x)) for x in (e.median, e.high))
        bar = "#" * median + "-" * (high - median)
        rows.append([e.what, str(e.rows), f"{e.median:.1%}", f"{e.high:.1%}", bar])
    return rows


def _target_rows() -> list[dict[str, str]]:
    import yaml

    folder = Path(__file__).parents[1] / "machine" / "targets"
    rows = []
    for path in sorted(folder.glob("*.yaml")):
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
        rows.append({"name": path.stem, "title": str(data.get("title", ""))})
    if not rows:
        raise TargetError("no target files are installed", where=str(folder))
    return rows


def _power(target: Target) -> str:
    """Watts of a device by unit, and whether they were measured."""
    p = target.power
    hbm = p.joules_per_byte * target.hbm_bytes_per_second
    links = p.joules_per_wire_byte * target.levels[0].full_bytes_per_second
    return (
        f"{p.idle_watts:.3g} W idle; busy: kernels {p.kernel_watts:.3g}, arithmetic "
        f"{p.flops_watts:.3g}, memory {hbm:.3g}, links {links:.3g} W more; {p.max_watts:g} W at "
        f"most; {'measured' if p.measured else 'estimated'}"
    )


def _clock(target: Target) -> str:
    clock = target.clock
    if clock is None:
        return "fixed"
    chosen = target.mhz or clock.mhz
    return f"{chosen:g} MHz, of {clock.least_mhz:g} to {clock.most_mhz:g}"


def _price(target: Target) -> str:
    price = target.price
    if price is None:
        return "not known; give --price"
    said = ", ".join(filter(None, (price.source, price.as_of)))
    return f"{price.dollars_per_device_hour:g} USD for a device and hour ({said})"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:g} GB/s"


# The command `calibrate`: this machine's own times, as a target file.


def calibrate(
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The target file to write.")
    ] = "machine.yaml",
    like: Annotated[
        str,
        typer.Option(metavar="NAME", help="The target whose power and outer links it has."),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few sizes, for seconds: to see that it works.")
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Measure this machine with JAX: products, memory, launches, collectives, power.

    Writes a target file and its tables beside it; `--target FILE.yaml:8` reads them.
    """
    from tapestry_egg.machine.tables.lookup import table_errors
    from tapestry_egg.progress import reporter
    from tapestry_egg.runtime.measure import calibrated_target, calibration

    if not out.endswith((".yaml", ".yml")):
        raise TargetError(f"{out!r} is no name of a target file", hint="End it in .yaml.")
    with reporter(quiet=quiet) as on_progress:
        found = calibration.calibrate(quick, on_progress)
    target = calibrated_target.write_calibration(out, found, like)
    if as_json:
        print_json(
            {
                "target": f"{out}:{found.devices}",
                "device": found.device,
                "products": len(found.products),
                "collectives": len(found.collectives),
                "power_measured": found.watts is not None,
            }
        )
        return
    say(f"written: {', '.join(str(Path(out).parent / x) for x in _files(Path(out), target))}")
    if found.watts is None:
        say(
            "power was not measured, because no driver reports it here; it is that of "
            f"{like or 'its kind'}"
        )
    for error in table_errors(target.matmuls, None):
        say(f"{error.what}: rows left out are foretold to {error.median:.1%} in the median")
    print(f"{out}:{found.devices}")


def _files(out: Path, target: object) -> list[str]:
    tables = [getattr(target, key) for key in ("matmuls", "collectives")]
    return [out.name, *(t.name for t in tables if t is not None)]
