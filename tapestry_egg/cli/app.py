"""The command line: `tapestry-egg trace | optimize | show | front | explain | run | ...`.

Standard output is data, standard error is talk. Reading commands take `--json`, and `-` for
standard input. Exit codes: 0 all went well, 1 something failed (the rest was done and written),
2 the command line was wrong, 130 it was interrupted (and what was found until then is written).
Errors are `error: where: what` with a hint below.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from tapestry_egg.errors import TapestryError
from tapestry_egg.parallel.deadline import end_as_interrupted
from tapestry_egg.progress import VERBS

from . import INTERRUPTED, census, explain, graphs, kernels, searches
from . import read as cli_read
from . import report as reports
from . import rules as cli_rules
from . import targets as cli_targets
from .console import (
    File,
    Json,
    Kernels,
    Limit,
    Minimize,
    PlanName,
    choose_plan,
    complain,
    print_json,
)

NAME = "tapestry-egg"

app = typer.Typer(
    name=NAME,
    help="The Pareto front of ways to run a JAX program on a mesh of devices.\n\n"
    f"Stages: {' -> '.join(VERBS)}. Progress names the pass at work, as in "
    "docs/architecture.md.",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script. Exits with the codes stated above."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    end_as_interrupted()
    try:
        code = app(args=given or ["--help"], prog_name=NAME, standalone_mode=False)
    except TapestryError as error:
        complain(str(error))
        sys.exit(1)
    except typer.TyperException as error:
        command = given[0] if given and not given[0].startswith("-") else ""
        known = command in {
            one.callback.__name__ for one in app.registered_commands if one.callback
        }
        complain(f"{error.format_message()}\n  {NAME} {f'{command} ' if known else ''}--help")
        sys.exit(error.exit_code)
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe has gone (`| head`): nothing is wrong, and nobody is listening.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    if code == INTERRUPTED:  # Typer's own answer to Ctrl-C, too
        complain("interrupted")
    sys.exit(code if isinstance(code, int) else 0)


def _tell_version(asked: bool) -> None:
    if asked:
        from tapestry_egg import __version__

        print(f"{NAME} {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_tell_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The Pareto front of ways to run a JAX program on a mesh of devices."""


app.command()(graphs.trace)
app.command()(searches.optimize)
app.command()(searches.problem)


@app.command()
def run(
    file: File,
    plan: PlanName = "",
    minimize: Minimize = "seconds",
    limit: Limit = None,
    program: Annotated[
        str,
        typer.Option(metavar="FILE.py[:NAME]", help="Take the arguments from this program."),
    ] = "",
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs; the median is printed.")] = 5,
    seed: Annotated[
        int, typer.Option(help="Of the random arguments, where there is no program.")
    ] = 0,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """Run a plan on this machine's devices.

    Prints how far its results are from those of the original program, the time of one step, and
    planned against compiled: the bytes of every kind of collective, and peak memory. Without
    enough accelerators, CPU devices are simulated: the numbers are right, the times mean little.
    Exit code 1 says that results differ by more than rounding (with --program, that they are
    farther from float64 than the original's), or that other bytes are moved than planned.
    """
    from tapestry_egg.pipeline.rehearse import rehearse

    chosen = choose_plan(file, plan, minimize, limit or ())
    report = rehearse(chosen, program=program or None, repeat=repeat, seed=seed)
    print_json(report.data()) if as_json else print(report)
    if not report.ok:
        raise typer.Exit(1)


for command in (
    census.census,
    cli_read.show,
    cli_read.front,
    explain.explain,
    reports.report,
    reports.recipes,
    cli_rules.rules,
    kernels.kernels,
    cli_targets.targets,
    cli_targets.calibrate,
    cli_rules.verify,
):
    app.command()(command)


if __name__ == "__main__":
    main()
