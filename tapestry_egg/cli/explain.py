"""The command that answers why: `tapestry-egg explain`, all of a plan or one question about it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from tapestry_egg.errors import ExtractError
from tapestry_egg.plans.cost_table import KEYS
from tapestry_egg.show import text

from .console import (
    File,
    Json,
    Kernels,
    Limit,
    Minimize,
    PlanName,
    load_plan,
    parse_pins,
    print_json,
    say,
)


def explain(
    file: File,
    name: Annotated[
        str, typer.Argument(metavar="[PLAN]", help="Which plan of a front; the same as --plan.")
    ] = "",
    plan: PlanName = "",
    minimize: Minimize = "seconds",
    limit: Limit = None,
    by: Annotated[
        str, typer.Option(metavar="KEY", help=f"Its costs by one of {', '.join(KEYS)}.")
    ] = "",
    tensor: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="The way of one tensor: a path such as [0]['w'], or a number %12."
        ),
    ] = "",
    collective: Annotated[
        int | None, typer.Option(metavar="N", help="Why collective N is there.")
    ] = None,
    line: Annotated[
        str, typer.Option(metavar="FILE:LINE", help="All that a line of the program costs.")
    ] = "",
    peak: Annotated[bool, typer.Option("--peak", help="What is in memory when most is.")] = False,
    why_not: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=LAYOUT",
            help="Why a tensor has no such layout: [0]['w']=(None, 'x'), %12=-,x, result[0]=x, "
            "FILE:LINE=x. Searches; may be repeated.",
        ),
    ] = None,
    diff: Annotated[
        str, typer.Option(metavar="PLAN", help="From this plan to another of the front.")
    ] = "",
    lanes: Annotated[
        str, typer.Option(metavar="PATH", help="Draw what runs when, and the memory, as SVG.")
    ] = "",
    trace: Annotated[
        str, typer.Option(metavar="PATH", help="Write it as a trace for Perfetto.")
    ] = "",
    specs: Annotated[
        bool, typer.Option("--specs", help="Its PartitionSpecs by path, as JSON.")
    ] = False,
    everything: Annotated[
        bool, typer.Option("--all", help="Every operation, and equal layers one by one.")
    ] = False,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """Explain a plan: layouts, collectives, costs; where its costs come from, what runs when.

    Or answer one question of why it is as it is: --tensor, --collective, --line, --peak, --why-not,
    --diff.
    """
    from tapestry_egg.show.lanes import draw_lanes, write_trace

    one_question(by, tensor, collective is not None, line, peak, bool(why_not), diff, specs)
    if name and plan and name != plan:
        raise typer.BadParameter(f"two plans are named: {name} and {plan}")
    front, chosen = load_plan(file, name or plan, minimize, limit or ())
    if lanes:
        say(f"drawn: {draw_lanes(chosen, lanes)}")
    if trace:
        say(f"written: {write_trace(chosen, trace)}")
    if specs:
        print_json(chosen.specs())
        return
    answer: Any = None
    if by:
        answer = chosen.costs_by(by)
    elif tensor:
        answer = chosen.tensor(tensor)
    elif collective is not None:
        answer = chosen.collective(collective)
    elif line:
        answer = chosen.line(line)
    elif peak:
        answer = chosen.peak()
    elif why_not:
        from tapestry_egg.why.why_not import why_not as ask

        answer = ask(chosen, layouts(why_not), front=front)
    elif diff:
        if front is None:
            raise typer.BadParameter("--diff needs a front, and the file holds a plan")
        answer = chosen.difference(front[diff])
    if answer is not None:
        print_json(answer.data()) if as_json else print(answer)
        return
    if (lanes or trace) and not as_json:
        return
    print_json(text.plan_data(chosen)) if as_json else print(text.plan_text(chosen, everything))


def one_question(*asked: object) -> None:
    """Raise BadParameter where more than one thing is asked."""
    if sum(map(bool, asked)) > 1:
        raise typer.BadParameter("ask one thing at a time")


def layouts(said: Sequence[str]) -> Mapping[str, Any]:
    """`["[0]['w'] = (None, 'x')"]` as layouts by path; `[0]['w']=-,x` is the same.

    Raises ExtractError for one that is malformed.
    """
    found: dict[str, Any] = {}
    for one in said:
        path, _, layout = one.rpartition("=")
        layout = layout.strip()
        layout = layout.removeprefix("PartitionSpec").removeprefix("P") if "(" in layout else layout
        if not layout.startswith("("):
            found |= parse_pins([one])
            continue
        try:
            spec = ast.literal_eval(layout)
        except (ValueError, SyntaxError):
            spec = None
        if spec is None or not path.strip():
            raise ExtractError(
                f"{one!r} is not NAME=LAYOUT",
                where="--why-not",
                hint="[0]['w']=(None, 'x'): per dim the axis that shards it, several, or None.",
            )
        found[path.strip()] = spec if isinstance(spec, tuple) else (spec,)
    return found
