"""The command `calibrate`: this machine's own times, as a target file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tapestry_egg.errors import TargetError

from .console import Json, Quiet, print_json, say


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
