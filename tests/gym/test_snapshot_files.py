"""Snapshots in files: read as they were written, answered from the command line, recomputed."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.__main__ import main
from tapestry_egg.extract.engine.archive import Archive, Candidate, Cut
from tapestry_egg.extract.gym import problem_front as module
from tapestry_egg.extract.gym.check import row_costs
from tapestry_egg.extract.gym.problem_front import problem_front
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.files import problem_file
from tests.extract.random_problems import cost, labellings, ladder, random_problem

SMALL = {
    "tapestry_egg": "problem",
    "version": 1,
    "name": "two units",
    "times": 3,
    "tables": [[2, 1], [1, 1], [0, 8], [[0, None], [1, 0]], [[0, 0], [0, 0]], [10, 10]],
    "labels": [[0, 1]],
    "variables": [
        {"name": "first", "seconds": 0, "joules": 1, "uses": [[0, 2, 2], [0, 1, 5]]},
        {"name": "second", "seconds": 0, "joules": 1, "uses": [[1, 3, 2]]},
    ],
    "pairs": [{"variables": [0, 1], "labels": [0, 0], "seconds": 3, "joules": 4}],
}


def saved(tmp_path: Path, document: object, name: str = "small") -> str:
    path = tmp_path / f"{name}.json"
    path.write_text(json.dumps(document))
    return str(path)


def every_cost(problem: Problem) -> set[tuple[float, float, float]]:
    """(seconds, peak, joules) of every legal choice of rows."""
    found = set()
    for rows in itertools.product(*(range(len(v)) for v in problem.variables)):
        seconds, joules, profile = cost(problem, rows)
        if np.isfinite(seconds):
            found.add((seconds, max(profile), joules))
    return found


def test_the_example_of_two_units() -> None:
    problem = problem_file.read(SMALL)
    # Rows (0, 1) are forbidden; the others cost, with 10 bytes at first and 8 for each row 1:
    assert every_cost(problem) == {(4.0, 10.0, 2.0), (4.0, 18.0, 2.0), (2.0, 18.0, 2.0)}
    front = problem_front(problem, "two", 60.0)
    assert [p.values for p in front] == [(2.0, 18.0, 2.0), (4.0, 10.0, 2.0)]
    assert [p.answer.tolist() for p in front] == [[1, 1], [0, 0]]
    assert front.exact and front.knee() in front.points


def test_bytes_that_are_always_there_are_a_variable_of_one_row() -> None:
    bare = json.loads(json.dumps(SMALL))
    bare["variables"][0]["uses"].pop()
    held = problem_file.read({**bare, "constant": [10, 0, 0]})
    assert [(v.name, len(v)) for v in held.variables][2:] == [("constant", 1)]
    assert every_cost(held) == every_cost(problem_file.read(SMALL))
    nothing = problem_file.read({**bare, "constant": [0, 0, 0]})
    assert len(nothing.variables) == 2
    assert every_cost(nothing) == every_cost(problem_file.read(bare))


@pytest.mark.parametrize("seed", range(40))
def test_what_is_written_is_read_again(seed: int) -> None:
    problem = random_problem(seed)
    again = problem_file.read(json.loads(json.dumps(problem_file.write(problem, "again"))))
    assert [v.name for v in again.variables] == [v.name for v in problem.variables]
    rng = np.random.default_rng(seed)
    for _ in range(5):
        rows = tuple(int(rng.integers(len(v))) for v in problem.variables)
        assert cost(again, rows) == cost(problem, rows)


@pytest.mark.parametrize("seed", range(60))
def test_fronts_of_small_problems_are_those_of_enumeration(seed: int) -> None:
    problem = random_problem(seed)
    all_costs = every_cost(problem)
    if not all_costs:
        with pytest.raises(ExtractError):
            problem_front(problem, "none", 5.0)
        return
    front = problem_front(problem, "random", 5.0)
    for p in front:
        assert any(np.allclose(p.values, c, rtol=1e-12) for c in all_costs)
        fitting = [s for s, peak, joules in all_costs if peak <= p.values[1] + 1e-9
                   and joules <= p.values[2] + 1e-9]  # fmt: skip
        assert p.bound <= min(fitting) * (1 + 1e-6) + 1e-12
    fastest = min(s for s, _, _ in all_costs)
    assert front.points[0].values[0] == pytest.approx(fastest, rel=1e-9)


def test_a_problem_without_legal_rows_is_told_as_one() -> None:
    """Two layers have some, three and more have none: by enumeration, and by elimination."""
    assert labellings(ladder(7, 2)) and not labellings(ladder(7, 3))
    problem_front(ladder(7, 2), "two", 1.0)
    with pytest.raises(ExtractError, match="snapshot forty: no legal choice of rows was found"):
        problem_front(ladder(7, 40), "forty", 1.0)


@pytest.mark.parametrize("seed", range(40))
def test_the_checker_agrees_with_an_evaluation_time_by_time(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    for _ in range(5):
        rows = tuple(int(rng.integers(len(v))) for v in problem.variables)
        seconds, joules, profile = cost(problem, rows)
        found = row_costs(problem, rows)
        assert bool(found.violations) == (seconds == np.inf)
        if not found.violations:
            assert found.seconds == pytest.approx(seconds, rel=1e-12)
            assert found.joules == pytest.approx(joules, rel=1e-12)
            assert found.peak_bytes == max(profile)


def found_by_a_search(costs: tuple[float, float, float], bound: float) -> Any:
    """A stand-in for the search of SMALL that found rows (0, 0) and proved a bound."""
    archive = Archive([Candidate(np.array([0, 0]), *costs)], [Cut(bound, 0.0, 0.0, np.inf)])
    return lambda *_, **of: SimpleNamespace(
        searches=[SimpleNamespace(archive=archive)], run=lambda: None
    )


def test_bounds_are_those_that_were_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Race", found_by_a_search((4.0, 10.0, 2.0), 3.0))
    front = problem_front(problem_file.read(SMALL), "two", 1.0)
    assert front.points[0].bound == pytest.approx(3.0) and front.epsilon == pytest.approx(1 / 3)
    assert not front.exact


@pytest.mark.parametrize(
    ("costs", "bound", "what"),
    [((4.0, 10.0, 2.0), 4.1, "below the bound"), ((3.0, 10.0, 2.0), 1.0, "its costs are")],
)
def test_a_search_that_is_wrong_is_found_out(
    monkeypatch: pytest.MonkeyPatch, costs: Any, bound: float, what: str
) -> None:
    monkeypatch.setattr(module, "Race", found_by_a_search(costs, bound))
    with pytest.raises(ExtractError, match=what):
        problem_front(problem_file.read(SMALL), "two", 1.0)


def test_rows_that_are_not_there_are_violations() -> None:
    problem = problem_file.read(SMALL)
    assert "no row 2" in row_costs(problem, [0, 2]).violations[0]
    assert "1 rows for 2" in row_costs(problem, [0]).violations[0]
    assert "rows 0 of first and 1 of second" in row_costs(problem, [0, 1]).violations[0]


def test_equal_arrays_are_written_once() -> None:
    problem = random_problem(3)
    twice = Problem(problem.variables * 2, (), problem.times)
    once = problem_file.write(problem)
    assert len(problem_file.write(twice)["tables"]) <= len(once["tables"])


Change = Callable[[dict[str, Any]], object]
FAULTS: dict[str, tuple[Change, str, str]] = {
    "another version": (lambda d: d.update(version=2), r"\$\.version", "Invalid enum"),
    "an unknown field": (lambda d: d.update(extra=1), r"\$", "unknown field"),
    "no such table": (
        lambda d: d["variables"][0].update(joules=9), r"variables\[0\]\.joules", "no table 9"),
    "a table of another shape": (
        lambda d: d["pairs"][0].update(joules=0), r"pairs\[0\]\.joules", "of shape"),
    "a table of ragged rows": (
        lambda d: d["tables"][3].append([1]), r"tables\[3\]", "different lengths"),
    "a negative cost": (
        lambda d: d["tables"][0].append(-1), r"variables\[0\]", "shape|negative"),
    "negative seconds": (
        lambda d: d["tables"].__setitem__(0, [2, -1]), r"variables\[0\]\.seconds", "negative"),
    "bytes that are forbidden": (
        lambda d: d["tables"].__setitem__(2, [0, None]), r"uses\[0\]", "must be numbers"),
    "a time that is not there": (
        lambda d: d["variables"][1].update(uses=[[1, 4, 2]]), r"variables\[1\]\.uses", "times"),
    "a variable that is not there": (
        lambda d: d["pairs"][0].update(variables=[0, 2]), r"pairs\[0\]", "no variable 2"),
    "a pair with itself": (
        lambda d: d["pairs"][0].update(variables=[1, 1]), r"pairs\[0\]", "itself"),
    "a label that is not there": (
        lambda d: d["labels"].__setitem__(0, [0, 2]), r"pairs\[0\]\.labels", "labels from 0"),
    "too few labels": (
        lambda d: d["labels"].__setitem__(0, [0]), r"pairs\[0\]\.labels", "2 labels"),
    "constants for other times": (
        lambda d: d.update(constant=[1.0]), r"\$\.constant", "3 entries"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_refused_with_their_place(name: str) -> None:
    change, where, what = FAULTS[name]
    document = copy.deepcopy(SMALL)
    change(document)
    with pytest.raises(ExtractError, match=what) as caught:
        problem_file.read(document, "file.json")
    assert caught.match(r"file\.json: ") and caught.match(where)


def test_the_command_answers_snapshots(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved(tmp_path, SMALL)
    assert main([path, "--seconds", "10", "--json", "-o", str(tmp_path / "out")]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["values"] == {"seconds": 2.0, "peak_bytes": 18.0, "joules": 2.0}
    assert row["bound"] == pytest.approx(2.0) and row["proven"] and row["feasible"]
    assert json.loads((tmp_path / "out" / "small.json").read_text()) == {"first": 1, "second": 1}


def test_the_command_prints_fronts_of_snapshots(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, SMALL)
    assert main([path, "--seconds", "10", "--front", "-o", str(tmp_path / "out")]) == 0
    head, columns, *lines = capsys.readouterr().out.splitlines()
    assert head.startswith("small: front of 2 answers, exact")
    assert columns.split() == ["seconds", "peak_bytes", "joules", "gap"]
    assert [line.split()[:3] for line in lines] == [["2", "18", "2"], ["4", "10", "2"]]
    front = json.loads((tmp_path / "out" / "small.front.json").read_text())
    assert [p["rows"] for p in front["points"]] == [
        {"first": 1, "second": 1}, {"first": 0, "second": 0}]  # fmt: skip


def test_the_command_tells_what_is_wrong_with_a_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = [[[None, None], [None, None]], [[0]], [10, 10]]
    document = {**SMALL, "tables": [*SMALL["tables"][:3], *wrong]}  # type: ignore[index]
    assert main([saved(tmp_path, document), "--seconds", "5"]) == 1
    assert "pairs[0].joules" in capsys.readouterr().err
    forbidden = {**SMALL, "tables": [[None, None], *SMALL["tables"][1:]]}  # type: ignore[index]
    assert main([saved(tmp_path, forbidden), "--seconds", "5"]) == 1
    assert "every row is forbidden" in capsys.readouterr().err
