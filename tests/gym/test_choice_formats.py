"""Files of choice problems: what is read, what is written again, what is refused."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.check import evaluate
from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem

# f(g, g) or h; g is 3 or needs f, which would be a cycle.
EGRAPH: dict[str, Any] = {
    "nodes": {
        "f0": {"op": "f", "eclass": "F", "cost": 2, "children": ["g0", "g1"]},
        "g0": {"op": "g", "eclass": "G", "cost": 10**18, "children": []},
        "g1": {"op": "loop", "eclass": "G", "cost": 1, "children": ["f0"]},
        "h0": {"op": "h", "eclass": "F", "cost": 10**18 + 3},
    },
    "root_eclasses": ["F"],
}


def read(tmp_path: Path, document: Any) -> ChoiceProblem:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document))
    return formats.read(path)[0]


def test_children_are_nodes_in_the_file_and_classes_in_the_problem(tmp_path: Path) -> None:
    problem = read(tmp_path, EGRAPH)
    assert problem.classes == ("F", "G")
    assert problem.nodes == ("f0", "h0", "g0", "g1")
    assert [problem.children_of(n).tolist() for n in range(4)] == [[1, 1], [], [], [0]]
    assert problem.roots.tolist() == [0]
    assert problem.labels == ("f", "h", "g", "loop")


def test_costs_near_a_quintillion_stay_apart(tmp_path: Path) -> None:
    problem = read(tmp_path, EGRAPH)
    through_g = evaluate(problem, Choice(np.array([0, 2])))
    directly = evaluate(problem, Choice(np.array([1, -1])))
    assert through_g.cost == 10**18 + 2 and through_g.feasible
    assert directly.cost == 10**18 + 3 and directly.feasible


def test_a_cost_left_out_is_one_and_an_infinite_one_forbids(tmp_path: Path) -> None:
    nodes = {"a": {"op": "a", "eclass": "A"}, "b": {"op": "b", "eclass": "A", "cost": np.inf}}
    problem = read(tmp_path, {"nodes": nodes, "root_eclasses": ["A"]})
    assert problem.cost.tolist() == [1, 0]
    assert problem.allowed.tolist() == [True, False]
    assert "forbidden" in evaluate(problem, Choice(np.array([1]))).violations[0]


def test_a_root_without_nodes_is_a_class_that_cannot_be_had(tmp_path: Path) -> None:
    problem = read(tmp_path, {**EGRAPH, "root_eclasses": ["Z"]})
    assert problem.classes == ("F", "G", "Z") and problem.roots.tolist() == [2]
    choice = Choice(np.array([-1, -1, -1]))
    assert "class Z is needed and has no node" in evaluate(problem, choice).violations


def test_a_root_beside_others_that_names_no_class_is_left_out(tmp_path: Path) -> None:
    problem = read(tmp_path, {**EGRAPH, "root_eclasses": ["Z", "G"]})
    assert problem.roots.tolist() == [1]
    assert problem.remarks == ("root Z names no class and is left out",)


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_what_is_written_is_read_again(tmp_path: Path, suffix: str) -> None:
    problem = read(tmp_path, EGRAPH)
    path = tmp_path / "new" / f"again{suffix}"
    formats.write(problem, path, "egraph-serialize")
    again, form = formats.read(path)
    assert form == "egraph-serialize"
    assert (path.read_bytes()[:2] == b"\x1f\x8b") == (suffix == ".json.gz")
    for name in ("classes", "nodes", "labels"):
        assert getattr(again, name) == getattr(problem, name)
    for name in ("node_start", "child_start", "children", "roots"):
        assert np.array_equal(getattr(again, name), getattr(problem, name))
    assert np.array_equal(again.cost, problem.cost)


def test_a_chosen_node_per_needed_class_is_the_answer(tmp_path: Path) -> None:
    problem = read(tmp_path, EGRAPH)
    answer = formats.answer(problem, Choice(np.array([0, 2])), "egraph-serialize")
    assert answer == {"choices": {"F": "f0", "G": "g0"}}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"root_eclasses": [3]}, r"root_eclasses\[0\].*3 is no class"),
        ({"nodes": {"a": {"op": "a"}}}, r"nodes\['a'\].*no eclass"),
        (
            {"nodes": {"a": {"eclass": "F", "children": ["z"]}}},
            r"nodes\['a'\].*child 'z' is no node",
        ),
        ({"nodes": {"a": {"eclass": "F", "cost": "x"}}}, r"nodes\['a'\].*'x' is not a number"),
        ({"nodes": []}, "no known format"),
    ],
)
def test_a_malformed_file_says_where(tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(ExtractError, match=message.replace(".*", r"[\s\S]*")):
        read(tmp_path, {**EGRAPH, **change})


@pytest.mark.parametrize("data", [b"", b"{", gzip.compress(b"{}", mtime=0)[:-4]])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "broken.json"
    path.write_bytes(data)
    with pytest.raises(ExtractError, match=r"broken\.json: (cannot be decompressed|not JSON)"):
        formats.read(path)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExtractError, match="cannot be read"):
        formats.read(tmp_path / "none.json")
