"""`python -m tapestry_egg.extract`: how it ends before it is done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.extract.__main__ import main
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.choices import ChoiceProblem
from tapestry_egg.extract.gym.extraction import Extraction, extract
from tests.gym import and_or

ROOT = Path(__file__).resolve().parents[2]


def cover() -> ChoiceProblem:
    """A set cover that no solver closes in the seconds given."""
    draw = np.random.default_rng(0)
    nodes: list[list[tuple[float | int, list[int]]]] = [[(0, list(range(1, 301)))]]
    nodes += [[(0, [301 + int(s)]) for s in draw.choice(200, 6, replace=False)] for _ in range(300)]
    nodes += [[(int(draw.integers(10, 20)), [])] for _ in range(200)]
    return and_or.problem_of(nodes, [0])


def small(least: int = 1) -> ChoiceProblem:
    return and_or.problem_of(
        [[(1, [1, 2]), (4, [2]), (9, [])], [(1, [])], [(10**18, []), (least, [])]], [0]
    )


def saved(tmp_path: Path, name: str, problem: ChoiceProblem) -> str:
    formats.write(problem, tmp_path / name, "egraph-serialize")
    return str(tmp_path / name)


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def started(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "tapestry_egg.extract", *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_prints_and_writes_what_there_is(tmp_path: Path, number: int) -> None:
    path = saved(tmp_path, "cover.json", cover())
    arguments = (path, path, "--seconds", "100", "--json", "--progress", "-o", str(tmp_path / "o"))
    process = started(*arguments)
    assert process.stderr is not None
    line = process.stderr.readline()  # the first answer is there
    for word in (b"cover: ", b"best ", b"bound ", b"gap "):
        assert word in line
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    (row,) = rows_of(out.decode())  # the second file is not begun
    assert process.returncode == 130
    assert row["feasible"] and not row["proven"] and "interrupted" in row["notes"]
    assert json.loads((tmp_path / "o" / "cover.json").read_text())["choices"]


@pytest.mark.slow
def test_files_that_cannot_be_read_leave_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    big = replace(small(), name="big")
    paths = [
        saved(tmp_path, "one.json", small()),
        str(tmp_path / "missing.json"),
        str(broken),
        saved(tmp_path, "two.json", small(10**18 - 1)),
        saved(tmp_path, "three.json.gz", big),
    ]

    assert main([*paths, "--json", "-o", str(tmp_path / "out")]) == 1
    rows = rows_of(capsys.readouterr().out)
    written = {p.name for p in (tmp_path / "out").iterdir()}
    assert [("error" in row) for row in rows] == [False, True, True, False, False]
    assert rows[3]["values"] == {"cost": 9}
    assert written == {"one.json", "two.json", "three.json"}


@pytest.mark.slow
def test_the_search_ends_at_a_gap_and_where_nothing_is_gained() -> None:
    problem = cover()
    found = extract(problem, 300.0, gap=0.9)
    assert found.feasible and not found.proven and found.gap <= 0.9
    assert "the gap is small enough" in found.notes
    found = extract(problem, 300.0, patience=0.3)
    assert found.feasible and not found.proven and "nothing was gained" in found.notes


def test_nothing_is_enough_before_there_is_an_answer() -> None:
    standing = Extraction(small())
    standing.gained = time.perf_counter() - 10.0
    assert not standing.enough(1e9, 1.0)
    standing.raise_bound(1)
    found = extract(small(), 10.0)
    assert found.choice is not None
    standing.offer(found.choice)
    assert standing.value == 3 and not standing.enough(0.6, 1.0)
    assert standing.enough(0.7, 1.0) == "the gap is small enough"
    standing.gained = time.perf_counter() - 10.0
    assert standing.enough(0.0, 1.0) == "nothing was gained"
