"""Notes of a front: a sentence each, few on the screen, all of them behind `--notes`."""

from __future__ import annotations

import re
import string
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.cli.searches import summary
from tapestry_egg.extract.engine.race import Effort
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import (
    INTERRUPTED,
    KINDS,
    Note,
    as_note,
    note,
    notes_text,
)
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import omissions
from tapestry_egg.pipeline.batch import Outcome

RACE: Any = SimpleNamespace(late=True, effort=Effort(seconds=3.0, patience=1.0))
BRIEF = te.Settings(work=0.2, workers=1)
LATE = omissions.of_search(RACE, False)[0]
#: What was left out, as those note it who leave it out.
OMITTED = (
    *omissions.of_meshes([MeshShape(("x", "y", "z"), (2, 2, 2))]),
    *omissions.of_parts([3, 5, 7, 9]),
    *omissions.of_long_programs(3000, 4),
    *omissions.of_second_instances(2),
)


def test_numbers_have_their_nouns() -> None:
    assert str(OMITTED[0]) == "Not searched: 1 mesh shape of more than 2 axes."
    assert str(note("mesh-axes", 2, axes=1)) == "Not searched: 2 mesh shapes of more than 1 axis."
    assert OMITTED[0].setting == "Settings(max_axes=...) or --max-axes"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_short_sentence(kind: str) -> None:
    effect, text, setting = KINDS[kind]
    named = {f for _, f, _, _ in string.Formatter().parse(text + setting) if f} - {"count"}
    words: dict[str, Any] = {f: 2 if re.search(rf"{{{f}:", text) else "some" for f in named}
    made = note(kind, **words)
    assert "{" not in str(made) and made.effect == effect
    for sentence in re.split(r"[.;:] ", str(made)):
        assert len(sentence.split()) <= 20
    assert not re.search(r"\b(told|whole on|lies|looked at|of which)\b", str(made))


@pytest.mark.parametrize("width", [60, 120])
def test_notes_stand_under_headings_by_what_they_tell(width: int) -> None:
    lines = notes_text((OMITTED[0], INTERRUPTED, *OMITTED[1:], LATE), width).split("\n")
    assert max(map(len, lines)) <= width
    heading = lines.index("not searched, and no gap covers it:")
    before, after = (" ".join(" ".join(x).split()) for x in (lines[:heading], lines[heading:]))
    assert str(INTERRUPTED) in before and str(LATE) in before
    assert all(n.text in after and n.setting in after for n in OMITTED)


def test_a_front_prints_what_happened_and_counts_the_rest() -> None:
    shown = str(Front((), notes=(*OMITTED, INTERRUPTED)))
    assert str(INTERRUPTED) in shown.replace("\n  ", " ")
    assert f"{len(OMITTED)} notes on what was not searched: --notes, front.notes" in shown
    assert not any(n.text in shown for n in OMITTED)
    assert "note" not in str(Front(()))
    assert max(map(len, shown.split("\n"))) <= 80


def test_one_plan_is_recommended_and_gaps_name_their_scope() -> None:
    front = te.optimize(te.trace(lambda x: x * 2.0, np.ones(8, "f4")), "cpu:2", settings=BRIEF)
    shown = str(front).split("\n")
    assert shown[1].split()[-1] == "gap*"
    best, reason = front.recommended() or pytest.fail("none fits")
    assert best is front.best() and f"recommended: {best.name} ({reason})" in shown
    forms, meshes = front.searched or (0, 0)
    assert forms >= 1 and meshes >= len({p.mesh for p in front})
    scope = "* to the best plan of the space searched: "
    (line,) = [x for x in shown if x.startswith(scope)]
    assert line.removeprefix(scope).startswith(f"{forms} form") and f"{meshes} mesh" in line
    small = replace(front, usable_bytes=1)
    assert small.recommended() is None and "no plan fits a device" in str(small)
    lean = replace(front, objectives=("peak_bytes",), usable_bytes=None).recommended()
    assert lean is not None and lean[1] == "least peak memory per device"


def test_the_result_of_a_graph_is_a_line_with_a_count_and_what_happened_below_it() -> None:
    told = summary(Outcome("gpt2", plans=9, notes=(*OMITTED, INTERRUPTED)))
    assert f"  {len(OMITTED)} notes" in told.replace("\n", " ")
    assert str(INTERRUPTED) in told.replace("\n ", "")
    assert "note" not in summary(Outcome("gpt2", plans=9))


def test_notes_are_read_as_they_were_written_and_sentences_of_earlier_files() -> None:
    for each in (*OMITTED, INTERRUPTED):
        assert as_note(msgspec.json.decode(msgspec.json.encode(each))) == each
        assert msgspec.convert(msgspec.to_builtins(each), Note | str) == each
    old = as_note("8 forms were not searched")
    assert str(old) == "8 forms were not searched" and old.kind == "text"
    assert replace(old, kind="other") != old


def test_the_front_in_readme_ends_as_fronts_are_printed() -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    found = re.search(r"^p\d+ .*\n((?!p\d)[^`]*)^```$", text, re.M)
    assert found is not None
    recommended, scope, notes = found[1].rstrip("\n").split("\n")
    assert re.fullmatch(
        r"recommended: p0 \(fastest within the [\d.]+ GiB of a device\)", recommended
    )
    count = tuple(map(int, re.findall(r"\d+", scope)))
    assert scope == f"* {Front((), searched=(count[0], count[1])).scope()}"
    assert re.fullmatch(r"\d+ notes on what was not searched: --notes, front.notes", notes)
