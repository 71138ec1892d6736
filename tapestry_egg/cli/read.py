"""The commands that read saved files: show, front."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tapestry_egg.columns import WIDEST
from tapestry_egg.errors import TapestryError
from tapestry_egg.show import text

from .console import (
    File,
    Json,
    Kernels,
    Limit,
    Minimize,
    PlanName,
    load_any,
    load_front,
    load_sharded,
    plan_of,
    print_json,
    say,
)

if TYPE_CHECKING:
    from tapestry_egg.show.plot import FrontInfo, Scale


def show(
    file: File,
    svg: Annotated[
        str, typer.Option(metavar="PATH", help="Draw the graph into this file; .dot for DOT.")
    ] = "",
    operations: Annotated[
        str, typer.Option(metavar="A:B", help="Draw operations A to B-1 only.")
    ] = "",
    cover: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N:DIM=PARTS,...",
            help="Operation N in shards, drawn or in Loom; may be repeated. A plan brings its own.",
        ),
    ] = None,
    loom: Annotated[
        bool, typer.Option("--loom", help="Print a graph as Loom JSON, which other tools read.")
    ] = False,
    egraph: Annotated[
        bool,
        typer.Option("--egraph", help="Print what rules find out about a graph, as an e-graph."),
    ] = False,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """Print a saved graph, plan or front, or draw a graph or plan.

    Loom graphs are read as well as our own files, here and wherever a graph is read.
    """
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan

    if loom and (svg or operations or as_json):
        raise typer.BadParameter("--loom goes with --cover only")
    loaded, shards = load_sharded(file) if svg or loom else (load_any(file), {})
    if egraph:
        _print_egraph(loaded, file)
        return
    if svg:
        _draw(loaded, svg, operations, shards, cover or ())
        return
    if loom:
        _print_loom(loaded, shards, cover or (), file)
        return
    if operations or cover:
        raise typer.BadParameter("--operations needs --svg, --cover --svg or --loom")
    if isinstance(loaded, Front):
        print_json(loaded.table()) if as_json else print(loaded)
    elif isinstance(loaded, Plan):
        print_json(text.plan_data(loaded)) if as_json else print(text.plan_text(loaded))
    else:
        graph = loaded.graph
        print_json(text.graph_data(graph)) if as_json else print(text.graph_text(graph))


def _print_egraph(loaded: Any, file: str) -> None:
    """Print the e-graph of a graph as egraph-serialize JSON."""
    from tapestry_egg.interop.egraph_json import egraph_document
    from tapestry_egg.tracing.trace import Program

    if not isinstance(loaded, Program):
        raise TapestryError("holds plans, not a graph", where=file)
    print_json(egraph_document(loaded))


def _print_loom(
    loaded: Any, shards: Mapping[tuple[int, ...], Any], covers: Sequence[str], file: str
) -> None:
    """Print a graph as Loom JSON, in the shards that its file has and those asked for."""
    from tapestry_egg.loom import loom_text, to_loom
    from tapestry_egg.show.drawing import parse_cover
    from tapestry_egg.tracing.trace import Program

    if not isinstance(loaded, Program):
        raise TapestryError(
            "holds plans; Loom has graphs and shards, but no layouts",
            where=file,
            hint="Print the graph that they were made of.",
        )
    asked = dict(parse_cover(loaded.graph, text) for text in covers)
    print(loom_text(to_loom(loaded, {**shards, **asked})), end="")


def _draw(
    loaded: Any,
    path: str,
    operations: str,
    shards: Mapping[tuple[int, ...], Any],
    covers: Sequence[str],
) -> None:
    """Draw a graph in the shards that its file has; a plan from the program to the kernel, or some
    of its operations in the shards that it makes."""
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan
    from tapestry_egg.show.drawing import draw, draw_plan, parse_cover, plan_covers

    if isinstance(loaded, Front):
        raise typer.BadParameter("a front is drawn by `tapestry-egg front --svg`; save a plan")
    if isinstance(loaded, Plan) and not operations and not covers:
        say(f"drawn: {draw_plan(loaded, path)}")
        return
    first, _, after = operations.partition(":")
    if operations and not (first.isdigit() and after.isdigit()):
        raise typer.BadParameter(f"{operations!r} is no range A:B of operations")
    graph = loaded.body.graph if isinstance(loaded, Plan) else loaded.graph
    chosen = range(int(first), int(after)) if operations else range(len(graph.operations))
    shards = {at: boxes for at, boxes in shards.items() if at[0] in chosen}
    if isinstance(loaded, Plan):
        shards = {at: boxes for at, boxes in plan_covers(loaded).items() if at[0] in chosen}
    shards.update(parse_cover(graph, text) for text in covers)
    say(f"drawn: {draw(graph, path, shards, chosen if operations else None)}")


def front(
    file: File,
    svg: Annotated[str, typer.Option(metavar="PATH", help="Draw the front into this file.")] = "",
    x: Annotated[str, typer.Option(metavar="OBJECTIVE", help="Across.")] = "peak_bytes",
    y: Annotated[str, typer.Option(metavar="OBJECTIVE", help="Upwards.")] = "seconds",
    log: Annotated[bool, typer.Option("--log", help="Logarithmic axes.")] = False,
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FIGURE=AMOUNT",
            help="Count the plans again with links=2, hbm=1.5, flops=0.9, memory=141GB, price=2.5 "
            "or clock=1200; may be repeated.",
        ),
    ] = None,
    timeline: Annotated[
        bool, typer.Option("--timeline", help="What the rules did, iteration by iteration.")
    ] = False,
    save: Annotated[
        str,
        typer.Option(metavar="PATH", help="Save one plan: --plan, or the best of --minimize."),
    ] = "",
    plan: PlanName = "",
    minimize: Minimize = "seconds",
    limit: Limit = None,
    kernels: Kernels = None,
    picture: Annotated[
        bool | None,
        typer.Option("--plot/--no-plot", help="A picture below the table; default: in a terminal."),
    ] = None,
    notes: Annotated[
        bool, typer.Option("--notes", help="All notes: on the search, costs, what was left out.")
    ] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the table as CSV.")] = False,
    as_json: Json = False,
) -> None:
    """Print the table of a front or the timeline of its rules, draw it, or save a plan of it."""
    from tapestry_egg.egraphs.timeline import timeline_text
    from tapestry_egg.extract.front.notes import notes_text
    from tapestry_egg.show.plot import front_info, plot_front

    loaded = load_front(file)
    if what_if:
        loaded = loaded.what_if(None, **_figures(what_if))
    if save:
        from tapestry_egg.files.files import save as save_to

        chosen = plan_of(loaded, file, plan, minimize, limit or ())
        save_to(chosen, save)
        say(f"saved: plan {chosen.name} -> {save}")
        return
    if timeline:
        ticks = [asdict(tick) for tick in loaded.timeline]
        print_json(ticks) if as_json else print(timeline_text(loaded.timeline))
        return
    if svg:
        drawn = plot_front(front_info(loaded, x=x, y=y), svg, scale="log" if log else "auto")
        say(f"drawn: {drawn}")
    if as_json:
        print_json(loaded.table())
    elif as_csv:
        print(loaded.csv(), end="")
    else:
        print(loaded)
        if notes:
            print(notes_text(loaded.notes) or "no notes")
        elif found := loaded.recommended():
            print(f"to see why: tapestry-egg explain {file} {found[0].name}")
        if sys.stdout.isatty() if picture is None else picture:
            print(_picture(front_info(loaded, x=x, y=y), "log" if log else "auto"), end="")


def _picture(info: FrontInfo, scale: Scale) -> str:
    """The front as text of the terminal's width, below an empty line; nothing where it is small, or
    where what reads has no such characters."""
    from tapestry_egg.show.terminal import front_terminal

    width, height = shutil.get_terminal_size((80, 24))
    text = front_terminal(info, min(width, WIDEST), max(12, min(height - 8, 20)), scale=scale)
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return ""
    return f"\n{text}\n" if text else ""


def _figures(said: Sequence[str]) -> dict[str, float | str]:
    """FIGURE=AMOUNT, split."""
    parts = [one.partition("=") for one in said]
    if wrong := [one for one, (_, sign, _) in zip(said, parts, strict=True) if not sign]:
        raise typer.BadParameter(f"{wrong[0]!r} is not FIGURE=AMOUNT")
    return {name.strip(): amount.strip() for name, _, amount in parts}
