"""`python -m tapestry_egg.extract` on files, and the checker that stands behind it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.extract.__main__ import main
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.check import evaluate
from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem, Pairs, Usage
from tests.gym import and_or
from tests.gym.test_and_or import hard

ROOT = Path(__file__).resolve().parents[2]


def saved(tmp_path: Path, name: str, problem: ChoiceProblem) -> str:
    path = tmp_path / name
    formats.write(problem, path, "egraph-serialize")
    return str(path)


def small() -> ChoiceProblem:
    return and_or.problem_of(
        [[(1, [1, 2]), (4, [2]), (9, [])], [(1, [])], [(10**18, []), (1, [])]], [0]
    )


def rows_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_each_file_gets_its_line_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [saved(tmp_path, "one.json", small()), saved(tmp_path, "two.json.gz", hard(0))]
    assert main([*paths, "--seconds", "60", "--json"]) == 0
    one, two = rows_of(capsys.readouterr().out)
    assert one["name"] == "one" and one["values"] == {"cost": 3} and one["bound"] == 3
    assert one["feasible"] and one["proven"] and one["gap"] == 0.0
    assert two["name"] == "two" and two["proven"]


def test_the_table_has_value_bound_gap_seconds_and_method(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([saved(tmp_path, "one.json", small())]) == 0
    head, line = capsys.readouterr().out.splitlines()
    assert head.split() == ["file", "value", "bound", "gap", "seconds", "proven", "method"]
    assert line.split()[:4] == ["one", "3", "3", "0.000%"] and line.split()[5] == "yes"


@pytest.mark.slow
def test_the_chosen_nodes_cost_what_was_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, "one.json", hard(1))
    main([path, "--json", "-o", str(tmp_path / "out")])
    (row,) = rows_of(capsys.readouterr().out)
    chosen = json.loads((tmp_path / "out" / "one.json").read_text())["choices"]
    nodes = json.loads(Path(path).read_text())["nodes"]
    assert all(nodes[n]["eclass"] == c for c, n in chosen.items())
    assert sum(nodes[n]["cost"] for n in chosen.values()) == row["values"]["cost"]
    needed = {nodes[d]["eclass"] for n in chosen.values() for d in nodes[n]["children"]}
    assert needed | {"0"} == set(chosen)


def test_a_bad_file_does_not_stop_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    impossible = tmp_path / "none.json"
    impossible.write_text('{"nodes": {}, "root_eclasses": ["a"]}')
    paths = [str(tmp_path / "missing.json"), str(impossible), saved(tmp_path, "c.json", small())]
    assert main([*paths, "--json"]) == 1
    missing, none, good = rows_of(capsys.readouterr().out)
    assert "cannot be read" in missing["error"]
    assert not none["feasible"] and none["reason"] == "root a has no nodes"
    assert good["values"] == {"cost": 3}


def test_e_graphs_have_no_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([saved(tmp_path, "one.json", small()), "--front"]) == 1
    assert "needs a limit" in capsys.readouterr().err


def test_the_command_imports_no_heavy_packages() -> None:
    code = (
        "import sys; from tapestry_egg.extract.__main__ import main\n"
        "heavy = {'jax', 'jaxlib', 'egglog', 'scipy', 'sympy', 'numba', 'ortools', 'highspy'}\n"
        "sys.exit(str(heavy & set(sys.modules) or '') or 0)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def checked(problem: ChoiceProblem, *nodes: int) -> tuple[str, ...]:
    return evaluate(problem, Choice(np.array(nodes))).violations


def test_the_checker_names_what_is_wrong() -> None:
    problem = and_or.problem_of([[(1, [1]), (2, [])], [(1, [0]), (float("inf"), [])]], [0])
    assert checked(problem, 1, -1) == ()
    assert "class 0 is needed and has no node" in checked(problem, -1, -1)
    assert "class 1 is needed and has no node" in checked(problem, 0, -1)
    assert "node 0.0 is not of class 1" in checked(problem, 0, 0)[0]
    assert "node 1.1 is forbidden" in checked(problem, 0, 3)
    assert "on or above a cycle" in checked(problem, 0, 2)[0]
    assert "class 1 has a node and is not needed" in checked(problem, 1, 2)
    assert "1 entries for 2 classes" in checked(problem, 0)


def pairwise(limit: int) -> ChoiceProblem:
    """Two classes of two nodes with a table, one entry forbidden, and usage over time."""
    base = and_or.problem_of([[(1, []), (2, [])], [(10**18, []), (4, [])]], [0, 1])
    table = np.array([5, 6, 7, 0])
    legal = np.array([True, True, True, False])
    pairs = Pairs(np.array([0]), np.array([1]), np.array([0, 4]), table, legal)
    lower, upper = np.array([0, 0, 2, 1]), np.array([2, 1, 4, 3])
    usage = Usage(lower, upper, np.array([3, 8, 5, 4]), limit)
    return replace(base, pairs=pairs, usage=usage).verify()


def test_pairs_are_paid_when_both_ends_are_active() -> None:
    assert evaluate(pairwise(100), Choice(np.array([0, 2]))).cost == 10**18 + 6
    assert evaluate(pairwise(100), Choice(np.array([0, 3]))).cost == 11
    assert "forbidden together" in checked(pairwise(100), 1, 3)[0]


def test_usage_is_counted_where_intervals_meet() -> None:
    # Node 0.0 is there at times 0 and 1, node 1.1 at 1 and 2: together at time 1.
    assert checked(pairwise(7), 0, 3) == ()
    assert "7 is used at time 1, the limit is 6" in checked(pairwise(6), 0, 3)
    assert checked(pairwise(6), 0, 2) == ()
