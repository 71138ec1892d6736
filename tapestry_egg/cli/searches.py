"""The commands `optimize` and `problem`: the front of every graph, or what is left to choose."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapestry_egg.errors import TapestryError
from tapestry_egg.machine.objectives import OBJECTIVES, PEAK_BYTES, SECONDS, Objective
from tapestry_egg.parallel.executors import host_only
from tapestry_egg.printable import printable

from . import report as reports
from .console import (
    Idle,
    Json,
    Kernels,
    Limit,
    Mesh,
    Out,
    Pin,
    Price,
    Quiet,
    Rules,
    State,
    Target,
    Workers,
    complain,
    objective_text,
    parse_limits,
    parse_mesh,
    parse_pins,
    parse_state,
    print_json,
    say,
)
from .graphs import graph_files

if TYPE_CHECKING:
    from tapestry_egg.pipeline.batch import Outcome


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
    workers: Workers = None,
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
    With --workers, several graphs are done at a time. An interruption keeps the best that was found
    until then.
    """
    from tapestry_egg.machine.target import load_target
    from tapestry_egg.parallel.executors import Processes
    from tapestry_egg.pipeline.batch import BatchRequest, Outcome, run_batch
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
        graphs, unread = graph_files(paths, Path(out), on_progress)
        several = workers is not None and workers > 1 and len(graphs) > 1
        pool = stack.enter_context(Processes(workers)) if several else None
        searched = run_batch(
            graphs,
            settings,
            Path(out),
            executor=pool,
            workers=workers,
            again=again,
            on_progress=on_progress,
        )
        refused = (Outcome(name, error=str(error)) for name, error in unread.items())
        for outcome in chain(refused, searched):
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


def summary(outcome: Outcome) -> str:
    """One line: `gpt2  9 plans  1.2 ms to 3.4 ms  10 GiB to 41 GiB  gap 0.8 %  2.1 s`, and how many
    notes the front has (`tapestry-egg front --notes`); below it those about the search."""
    from tapestry_egg.columns import wrapped
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
            *([f"{others} note{'' if others == 1 else 's'}"] if others else []),
        ]
    )
    return printable(wrapped("\n".join([words, *(f"  {note}" for note in told)])))


def _range(low: float, high: float, objective: Objective) -> str:
    first, last = objective.format(low), objective.format(high)
    return first if first == last else f"{first} to {last}"


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
        found, unread = graph_files([graph], Path(out), on_progress)
        for error in unread.values():
            raise error
        (path,) = found
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
