"""Notes below a front: no wider than the lines of who reads it, omissions under a heading."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tapestry_egg.cli.searches import summary
from tapestry_egg.extract.engine.race import Effort
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import note_lines
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.parallel.executors import INTERRUPTED
from tapestry_egg.pipeline import omissions
from tapestry_egg.pipeline.batch import Outcome

RACE: Any = SimpleNamespace(late=True, effort=Effort(seconds=3.0, patience=1.0))
LATE = omissions.of_search(RACE, False)[0]
#: What was left out, as those say it who leave it out.
OMITTED = (
    *omissions.of_meshes([MeshShape(("x", "y", "z"), (2, 2, 2))]),
    *omissions.of_parts([3, 5, 7, 9]),
    *omissions.of_long_programs(3000, 4),
    *omissions.of_second_instances(2),
)


@pytest.mark.parametrize("width", [60, 120])
def test_omissions_stand_under_a_heading_and_what_happened_before_it(width: int) -> None:
    lines = note_lines((OMITTED[0], INTERRUPTED, *OMITTED[1:], LATE), width)
    assert max(map(len, lines)) <= width
    heading = lines.index("not searched:")
    assert " ".join(" ".join(lines[:heading]).split()) == f"{INTERRUPTED} {LATE}"
    below = " ".join(" ".join(lines[heading + 1 : -1]).split())
    assert below == " ".join(OMITTED)
    assert lines[-1] == "what bounds cover: docs/bounds.md"


def test_what_happened_has_no_heading_and_a_front_without_notes_no_lines() -> None:
    assert "not searched:" not in note_lines([INTERRUPTED])
    assert note_lines(()) == [] and "docs/bounds.md" not in str(Front(()))


def test_a_front_is_no_wider_than_a_page() -> None:
    notes = (*OMITTED, "word " * 60, LATE)
    assert max(map(len, str(Front((), notes=notes)).split("\n"))) <= 120


def test_the_result_of_a_graph_is_a_line_with_a_count_and_what_happened_below_it() -> None:
    told = summary(Outcome("gpt2", plans=9, notes=(*OMITTED, INTERRUPTED))).split("\n")
    assert told[0].endswith(f"  {len(OMITTED)} notes: tapestry-egg front")
    assert told[1:] == [f"  {INTERRUPTED}"]
    assert "note" not in summary(Outcome("gpt2", plans=9))


def test_the_front_in_readme_has_its_notes_as_they_are_printed() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    found = re.search(r"^p\d+ .*\n((?!p\d)[^`]*)^```$", text, re.M)
    assert found is not None
    printed = found[1].rstrip("\n").split("\n")
    notes: list[str] = []
    under = False
    for line in printed[:-1]:
        indent = len(line) - len(line.lstrip())
        if line == "not searched:":
            under = True
        elif indent > 2 * under:  # a line that goes on
            notes[-1] += f" {line.strip()}"
        else:
            notes.append(line.strip())
    assert len(notes) > 3 and note_lines(notes) == printed
