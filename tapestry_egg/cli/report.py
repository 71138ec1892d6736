"""The command `tapestry-egg report`, and the option of `optimize` that does the same."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .console import File, Kernels, load_front


def report(
    file: File,
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="PATH", help="A file .html, or a folder; default: beside FILE."
        ),
    ] = "",
    kernels: Kernels = None,
) -> None:
    """Write a front as one page that opens from disk and loads nothing.

    It has the front with bounds, every plan with its layouts, collectives, lanes, memory and rules,
    the difference of any two plans, and the timeline of the rules. Prints the page's path.
    """
    print(load_front(file).report(out or default_path(file)))


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
