"""The command `tapestry-egg report`, and the option of `optimize` that does the same."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .console import File, Json, Kernels, as_front, load_any, load_front, print_json

if TYPE_CHECKING:
    from tapestry_egg.extract.front.front import Front
    from tapestry_egg.plans.plan import Plan


def report(
    file: File,
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="PATH", help="A file .html, or a folder; default: beside FILE."
        ),
    ] = "",
    run: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="What `run --json` printed of a plan; may be repeated."),
    ] = None,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="A plan, or a front's fastest, beside the front, as one of pins; may be repeated.",
        ),
    ] = None,
    recipes: Annotated[
        bool,
        typer.Option("--recipes", help="Data parallelism and full sharding beside the front, too."),
    ] = False,
    kernels: Kernels = None,
) -> None:
    """Write a front as one page that opens from disk and loads nothing.

    It has the front with bounds, every plan with its layouts, collectives, lanes, memory and rules,
    the difference of any two plans, and the timeline of the rules; of plans that ran, what was
    planned against what was compiled. Prints the page's path.
    """
    front = load_front(file)
    beside: dict[str, Plan | Front] = {}
    for name, found in map(named_baseline, baseline or ()):
        if name in beside:
            raise typer.BadParameter(f"the name {name!r} is taken", param_hint="--baseline")
        beside[name] = found
    if recipes:
        beside |= {r.name: r.plan for r in front.recipes().recipes if r.plan is not None}
    print(front.report(out or default_path(file), baselines=beside, runs=run or ()))


def named_baseline(text: str) -> tuple[str, Plan | Front]:
    """The name in `NAME=FILE`, and the plan or front in the file.

    Raises BadParameter where either is missing, GraphError where the file holds something else.
    """
    from tapestry_egg.plans.plan import Plan

    name, _, path = text.partition("=")
    if not (name and path):
        raise typer.BadParameter(f"{text!r} is not NAME=FILE", param_hint="--baseline")
    loaded = load_any(path)
    return name, loaded if isinstance(loaded, Plan) else as_front(loaded, path)


def default_path(file: str) -> Path:
    """Beside the file of a front: `gpt2.front.json` has its page in `gpt2.html`."""
    path = Path("front.json" if file == "-" else file)
    return path.with_name(path.name.removesuffix(".json").removesuffix(".front") + ".html")


def report_of(name: str, out: Path, asked: str) -> Path:
    """Write the page of a front that `optimize` has written into `out`: into a file `.html` as
    asked, else as `NAME.html` into a folder."""
    path = Path(asked)
    if path.suffix.lower() not in (".html", ".htm"):
        path = path / f"{name}.html"
    return load_front(str(out / f"{name}.front.json")).report(path)


# The command `tapestry-egg recipes`.


def recipes(
    file: File,
    work: Annotated[
        float, typer.Option(min=0.1, help="Effort for each, about seconds of one processor.")
    ] = 2.0,
    kernels: Kernels = None,
    as_json: Json = False,
) -> None:
    """What data parallelism and full sharding would take beside a front.

    The batch is found from the program. Each recipe is layouts of arguments alone, with the best
    plan that is found for them.
    """
    from tapestry_egg.pipeline.settings import Settings

    found = load_front(file).recipes(settings=Settings(work=work, front=False))
    print_json(found.data()) if as_json else print(found)
