"""The command `tapestry-egg recipes`."""

from __future__ import annotations

from typing import Annotated

import typer

from .console import File, Json, Kernels, load_front, print_json


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
