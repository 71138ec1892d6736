"""The problems of a program: what is left to choose on each mesh shape, on their own.

`optimize` searches them all and merges what it finds. Saved (`files/problem_file.py`), each is
a problem for the extractor alone, here or elsewhere, without the program.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.files import problem_file
from tapestry_egg.machine.objectives import OBJECTIVES
from tapestry_egg.packed import write_packed
from tapestry_egg.pipeline import searches
from tapestry_egg.pipeline.pipeline import PASSES, run_passes
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.pipeline.state import State, read_question
from tapestry_egg.progress import Progress
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, RuleBook

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph


def problems_of(
    graph: BlockGraph,
    target: str,
    *,
    rules: Sequence[str | Path | RuleBook] = (),
    on_progress: Progress | None = None,
) -> Iterator[tuple[str, Problem]]:
    """The problems that `optimize` would search for a program on a target, with a name for each.

    One for each form of the program and mesh shape: `8x`, `2x×4y`, `8x form 2`; of large programs
    also those that a search leaves out for what it finds on others. Nothing is searched for it.
    Raises what `optimize` raises.
    """
    question = read_question(
        graph,
        target,
        OBJECTIVES,
        books=(*DEFAULT_BOOKS, *rules),
        settings=Settings(),
        tell=on_progress,
    )
    searching = (searches.search_first, searches.search_networks)
    before = [each.run for each in PASSES].index(searches.search_networks)
    done, _ = run_passes(
        State(question), [each for each in PASSES[:before] if each.run not in searching]
    )
    for n in done.networks:
        if n.problem is not None:
            yield str(n), n.problem.problem


def save_problem(problem: Problem, name: str, path: Path) -> None:
    """Write a problem to a file, compressed where its name ends in `.gz`."""
    write_packed(path, json.dumps(problem_file.write(problem, name)).encode())
