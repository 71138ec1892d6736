"""The command `trace`, and the graph files that other commands take: programs are traced first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tapestry_egg.errors import TapestryError
from tapestry_egg.parallel.executors import host_only

from .console import Quiet

if TYPE_CHECKING:
    from tapestry_egg.progress import Progress


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
    from tapestry_egg.progress import Phase
    from tapestry_egg.tracing.entry import load_entry

    host_only()
    entry = load_entry(program)
    on_progress(Phase("trace", subject=entry.name))
    from tapestry_egg.tracing.entry import file_of, line_in, user_error
    from tapestry_egg.tracing.trace import trace as trace_function

    try:
        traced = trace_function(entry.function, *entry.arguments, name=entry.name)
    except TapestryError:
        raise
    except Exception as error:
        # One that did not come by the user's lines is a defect, and keeps its traceback.
        if line_in(file_of(program), error) is None:
            raise
        raise user_error(file_of(program), "tracing it", error) from error
    if loom:
        from tapestry_egg.loom import to_loom, write_loom

        write_loom(to_loom(traced), out)
    else:
        save(traced, out)
    words = f"{len(traced.graph.operations)} operations -> {out}"
    on_progress(Phase("trace", words, 1.0, entry.name))


def graph_files(
    paths: Sequence[str], out: Path, on_progress: Progress
) -> tuple[list[Path], dict[str, TapestryError]]:
    """The graph files that the arguments name, and why others name none; programs are traced into
    `out` first."""
    files: list[Path] = []
    failed: dict[str, TapestryError] = {}
    for text in paths:
        try:
            files += _files_of(text, out, on_progress)
        except TapestryError as error:
            failed[text] = error
    return list({path.resolve(): path for path in files}.values()), failed


def _files_of(text: str, out: Path, on_progress: Progress) -> list[Path]:
    from tapestry_egg.tracing.entry import is_entry

    path = Path(text)
    if is_entry(text):
        name = re.sub(r"\.(py|mlir|stablehlo|jax|jaxexport)$", "", path.name.replace(".py:", "-"))
        _trace_to(text, out / f"{name}.json", on_progress)
        return [out / f"{name}.json"]
    if path.is_dir():
        found = [p for p in sorted(path.glob("*.json")) if _is_graph_name(p.name)]
        if not found:
            raise TapestryError("holds no .json graph", where=text, hint="Trace some first.")
        return found
    return [path]


def _is_graph_name(name: str) -> bool:
    """Whether a file of a folder may be a graph, and not what `optimize` writes there."""
    from tapestry_egg.pipeline.batch import MANIFEST

    return name != MANIFEST and not name.endswith(".front.json")
