"""Snapshots of a program: what is left to choose on each mesh shape, as problems on their own.

`optimize` searches them all and merges what it finds. Saved (`files/problem_file.py`), each is
a problem for the extractor alone, here or elsewhere, without the program.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tapestry_egg.atomic import write_atomic
from tapestry_egg.extract.problem.boundary import Fixed
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.files import problem_file as snapshot_format
from tapestry_egg.machine.target import load_target
from tapestry_egg.progress import Progress
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, RuleBook, load_books, permitted
from tapestry_egg.rules.verify.trust import ensure_verified
from tapestry_egg.schedule.flatten import feedback_pairs

from .problems import pose
from .settings import Settings

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph


def problems_of(
    graph: BlockGraph,
    target: str,
    *,
    rules: Sequence[str | Path | RuleBook] = (),
    numerics: str = "reorders",
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Iterator[tuple[str, Problem]]:
    """The problems that `optimize` would search for a program on a target, with a name for each.

    One for each form of the program and mesh shape: `8x`, `2x×4y`, `8x form 2`. Raises what
    `optimize` raises.
    """
    settings = settings or Settings()
    machine = load_target(target)
    books = permitted(load_books((*DEFAULT_BOOKS, *rules)), numerics)
    ensure_verified(books)
    shapes = machine.distinct(machine.mesh_shapes(settings.max_axes))
    tell = on_progress or (lambda _: None)
    pairs = feedback_pairs(graph, None)
    posed = pose(graph, pairs, machine, shapes, books, Fixed(), settings, tell)
    for k, assembled in enumerate(posed.problems):
        form, at = divmod(k, len(shapes))
        yield f"{shapes[at]}{f' form {form + 1}' if form else ''}", assembled.problem


def save_problem(problem: Problem, name: str, path: Path) -> None:
    """Write a problem to a file, compressed where its name ends in `.gz`."""
    data = json.dumps(snapshot_format.write(problem, name)).encode()
    write_atomic(path, gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
