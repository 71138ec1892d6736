"""The command line: `tapestry-egg trace | optimize | show | front | explain | run | ...`.

Standard output is data, standard error is talk. Reading commands take `--json`, and `-` for
standard input. Exit codes: 0 all went well, 1 something failed (the rest was done and written),
2 the command line was wrong, 130 it was interrupted (and what was found until then is written).
Errors are `error: where: what` with a hint below.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapestry_egg.errors import TapestryError
from tapestry_egg.machine.objectives import (
    OBJECTIVES,
    PEAK_BYTES,
    SECONDS,
    Objective,
)
from tapestry_egg.parallel.deadline import end_as_interrupted
from tapestry_egg.parallel.executors import host_only
from tapestry_egg.printable import printable
from tapestry_egg.progress import VERBS

from . import INTERRUPTED, calibrate, census, explain, kernels, recipes
from . import read as cli_read
from . import report as reports
from . import rules as cli_rules
from . import targets as cli_targets
from .console import (
    Cluster,
    File,
    Idle,
    Json,
    Kernels,
    Limit,
    Mesh,
    Minimize,
    Out,
    Pin,
    PlanName,
    Price,
    Quiet,
    Rules,
    State,
    Target,
    Workers,
    choose_plan,
    complain,
    objective_text,
    parse_limits,
    parse_mesh,
    parse_pins,
    parse_state,
    print_json,
    say,
)

if TYPE_CHECKING:
    from tapestry_egg.pipeline.batch import Outcome
    from tapestry_egg.progress import Progress

NAME = "tapestry-egg"

app = typer.Typer(
    name=NAME,
    help="The Pareto front of ways to run a JAX program on a mesh of devices.\n\n"
    f"Stages: {' -> '.join(VERBS)}. Progress tells each with the pass at work, by its name in "
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


@app.command()
def trace(
    program: Annotated[
        str,
        typer.Argument(
            metavar="FILE.py[:NAME]",
            help="A program of yours; the file is imported, that is, run. Or StableHLO (.mlir), or "
            "what jax.export wrote (.jax).",
        ),
    ],
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="PATH", help="The graph file to write.")
    ],
    loom: Annotated[
        bool, typer.Option("--loom", help="Write Loom JSON, which other tools read, too.")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Trace a JAX function into a graph file.

    The arguments to trace with come from the file: NAME_args() returns those of NAME, or example()
    returns (function, arguments). Shapes are enough: jax.ShapeDtypeStruct leaves will do.
    """
    from tapestry_egg.progress import reporter

    with reporter(quiet=quiet) as on_progress:
        _trace_to(program, Path(out), on_progress, loom)


def _trace_to(program: str, out: Path, on_progress: Progress, loom: bool = False) -> None:
    from tapestry_egg.files.files import save
    from tapestry_egg.interop.foreign import load_program
    from tapestry_egg.progress import Phase

    host_only()
    entry = load_program(program)
    on_progress(Phase("trace", subject=entry.name))
    from tapestry_egg.tracing.trace import trace as trace_function

    traced = trace_function(entry.function, *entry.arguments, name=entry.name)
    if loom:
        from tapestry_egg.loom import to_loom, write_loom

        write_loom(to_loom(traced), out)
    else:
        save(traced, out)
    words = f"{len(traced.graph.operations)} operations -> {out}"
    on_progress(Phase("trace", words, 1.0, entry.name))


@app.command()
def optimize(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Graph files, folders of them, or programs FILE.py, .mlir"
        ),
    ],
    target: Target,
    out: Out = "out",
    objective: Annotated[
        list[str] | None,
        typer.Option(
            metavar="OBJECTIVE",
            help=f"Default: {', '.join(OBJECTIVES)}. Also a formula, 'seconds * joules', or "
            "FILE.yaml:NAME; may be repeated.",
        ),
    ] = None,
    limit: Limit = None,
    pin: Pin = None,
    state: State = None,
    mesh: Mesh = "",
    max_axes: Annotated[
        int | None,
        typer.Option(
            min=1, max=3, help="Axes of a mesh at most; default: 2, or 3 where that is quick."
        ),
    ] = None,
    overlap: Annotated[
        bool,
        typer.Option("--overlap", help="Count collectives beside kernels; bounds are wider."),
    ] = False,
    numerics: Annotated[
        str, typer.Option(help="Or relaxed: also rules that change rounding.")
    ] = "reorders",
    price: Price = None,
    idle: Idle = None,
    rules: Rules = None,
    kernels: Kernels = None,
    work: Annotated[
        float | None,
        typer.Option(min=0.1, help="Effort, about seconds of one processor; default: 90."),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(min=0.1, help="Time limit; fronts that it ends differ from run to run."),
    ] = None,
    gap: Annotated[
        float | None, typer.Option(min=0.0, help="Stop at plans this near to their bounds: 0.01.")
    ] = None,
    patience: Annotated[
        float | None, typer.Option(min=0.0, help="Stop after so many seconds without gain.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Searches of each mesh shape, from other seeds.")
    ] = None,
    workers: Workers = None,
    cluster: Cluster = "",
    report: Annotated[
        str,
        typer.Option(
            metavar="PATH",
            help="Write each front as a page, too: into a folder, or one file .html.",
        ),
    ] = "",
    again: Annotated[
        bool, typer.Option("--again", help="Also graphs whose front is there and current.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Keep each search in NAME.search.npz, and go on from there: work adds up.",
        ),
    ] = False,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Compute the front of every graph.

    Writes NAME.front.json and its picture NAME.front.svg for each, and prints a line per graph.
    Run it again after an interruption, or with more graphs: what is there and current is skipped.
    With --workers or --cluster, several graphs are done at a time; the mesh shapes of one graph
    always are. An interruption keeps the best that was found until then.
    """
    from tapestry_egg.machine.target import load_target
    from tapestry_egg.parallel.executors import chosen
    from tapestry_egg.pipeline.batch import BatchRequest, run_batch
    from tapestry_egg.progress import reporter

    host_only()
    objectives = tuple(map(objective_text, objective or OBJECTIVES))
    load_target(target)
    settings = BatchRequest(
        target,
        objectives,
        tuple(sorted(parse_limits(limit or ()).items())),
        tuple(rules or ()),
        seconds,
        gap,
        patience,
        seeds,
        work,
        max_axes,
        numerics,
        tuple(parse_pins(pin or ()).items()),
        tuple(parse_state(state or ()).items()),
        parse_mesh(mesh),
        tuple(kernels or ()),
        price,
        overlap=overlap or None,
        idle=idle,
        resume=resume,
    )
    failed = 0
    with reporter(quiet=quiet) as on_progress, ExitStack() as stack:
        graphs = _graph_files(paths, Path(out), on_progress)
        several = workers is not None and workers > 1 and len(graphs) > 1
        pool = stack.enter_context(chosen(workers, cluster)) if several or cluster else None
        for outcome in run_batch(
            graphs,
            settings,
            Path(out),
            executor=pool,
            workers=workers,
            again=again,
            on_progress=on_progress,
        ):
            if outcome.error:
                failed += 1
                complain(outcome.error)
            elif report:
                say(f"report: {reports.report_of(outcome.name, Path(out), report)}")
            if as_json:
                print_json(asdict(outcome))
            elif not outcome.error:
                print(summary(outcome), flush=True)
    if failed:
        raise typer.Exit(1)


def _graph_files(paths: Sequence[str], out: Path, on_progress: Progress) -> list[Path]:
    """The graph files that the arguments name; programs are traced into `out` first."""
    from tapestry_egg.interop.foreign import is_program

    files: list[Path] = []
    for text in paths:
        path = Path(text)
        if is_program(text):
            name = re.sub(
                r"\.(py|mlir|stablehlo|jax|jaxexport)$", "", path.name.replace(".py:", "-")
            )
            _trace_to(text, out / f"{name}.json", on_progress)
            files.append(out / f"{name}.json")
        elif path.is_dir():
            found = [p for p in sorted(path.glob("*.json")) if _is_graph_name(p.name)]
            if not found:
                raise TapestryError("holds no .json graph", where=text, hint="Trace some first.")
            files += found
        else:
            files.append(path)
    return list({path.resolve(): path for path in files}.values())


def _is_graph_name(name: str) -> bool:
    """Whether a file of a folder may be a graph, and not what `optimize` writes there."""
    from tapestry_egg.pipeline.batch import MANIFEST

    return name != MANIFEST and not name.endswith(".front.json")


def summary(outcome: Outcome) -> str:
    """One line: `gpt2  9 plans  1.2 ms to 3.4 ms  10 GiB to 41 GiB  gap 0.8 %  2.1 s`, and how many
    notes the front has; below it those of what happened to the search."""
    from tapestry_egg.columns import readers_width, wrapped
    from tapestry_egg.extract.front.notes import happened
    from tapestry_egg.plans.plan import gap_text

    told = happened(outcome.notes)
    others = len(outcome.notes) - len(told)
    words = "  ".join(
        [
            outcome.name,
            f"{outcome.plans} plan{'' if outcome.plans == 1 else 's'}",
            _range(outcome.seconds_best, outcome.seconds_worst, SECONDS),
            _range(outcome.peak_least, outcome.peak_most, PEAK_BYTES),
            f"gap {gap_text(outcome.gap, outcome.proven)}",
            "as before" if outcome.skipped else f"{outcome.took:.1f} s",
            *([f"{others} note{'' if others == 1 else 's'}: tapestry-egg front"] if others else []),
        ]
    )
    return printable(wrapped("\n".join([words, *(f"  {note}" for note in told)]), readers_width()))


def _range(low: float, high: float, objective: Objective) -> str:
    first, last = objective.format(low), objective.format(high)
    return first if first == last else f"{first} to {last}"


@app.command()
def problem(
    graph: Annotated[
        str, typer.Argument(metavar="GRAPH", help="A graph file, or a program FILE.py[:NAME]")
    ],
    target: Target,
    out: Out = "out",
    rules: Rules = None,
    kernels: Kernels = None,
    quiet: Quiet = False,
) -> None:
    """Save what is left to choose once a program is saturated.

    Writes NAME.MESH.problem.json.gz for every mesh shape, and form of the program: problems for
    `python -m tapestry_egg.extract`, which needs no program. Prints their paths.
    """
    from tapestry_egg.files.files import load
    from tapestry_egg.progress import reporter
    from tapestry_egg.tracing.trace import Program

    from .saved_problems import problems_of, save_problem

    host_only()
    with reporter(quiet=quiet) as on_progress:
        (path,) = _graph_files([graph], Path(out), on_progress)
        loaded = load(path)
        if not isinstance(loaded, Program):
            raise TapestryError("holds plans, not a graph", where=str(path))
        for name, problem in problems_of(
            loaded.graph, target, rules=rules or (), on_progress=on_progress
        ):
            mesh = name.replace("×", "-").replace(" ", "-")
            file = Path(out) / f"{path.name.removesuffix('.gz').removesuffix('.json')}.{mesh}"
            file = file.with_name(f"{file.name}.problem.json.gz")
            save_problem(problem, f"{loaded.graph.name} on {target}, {name}", file)
            print(file, flush=True)


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
    farther from float64 than the original's; where that draws other random numbers, the original
    decides as without), or that other bytes are moved than planned.
    """
    from tapestry_egg.pipeline.rehearse import rehearse

    chosen = choose_plan(file, plan, minimize, limit or ())
    report = rehearse(chosen, program=program or None, repeat=repeat, seed=seed)
    print_json(report.data()) if as_json else print(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def demo(
    out: Out = "out/demo",
    quiet: Quiet = False,
) -> None:
    """Do the main job on a GPT-2 train step.

    Computes its front for h100:8, runs plans of it on 8 simulated CPU devices, and shows that their
    numbers are the original's and their traffic the planned one.
    """
    from tapestry_egg.pipeline.rehearse import simulate_devices
    from tapestry_egg.progress import reporter

    from .demo import DEVICES
    from .demo import demo as run_demo

    host_only()
    simulate_devices(DEVICES)
    with reporter(quiet=quiet) as on_progress:
        ok = run_demo(Path(out), on_progress=on_progress)
    say(f"written: {out}")
    if not ok:
        raise typer.Exit(1)


for command in (
    census.census,
    cli_read.show,
    cli_read.front,
    explain.explain,
    reports.report,
    recipes.recipes,
    cli_rules.rules,
    kernels.kernels,
    cli_targets.targets,
    calibrate.calibrate,
    cli_rules.verify,
):
    app.command()(command)


if __name__ == "__main__":
    main()
