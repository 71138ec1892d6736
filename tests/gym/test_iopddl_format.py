"""IOPDDL files: read, written, and their costs recounted."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.check import evaluate
from tapestry_egg.extract.gym.choices import Choice
from tapestry_egg.extract.gym.formats import iopddl
from tests.gym import networks


def small() -> dict[str, Any]:
    """Three nodes in a row; the cheapest answer (1, 0, 1) exceeds the limit at time 2."""
    return networks.document(
        intervals=[[0, 3], [2, 4], [5, 5]],
        costs=[[8, 1], [2, 6], [0, 4]],
        usages=[[3, 7], [6, 1], [50, 50]],
        edges=[(0, 1, [0, 5, 3, 2]), (2, 1, [9, 9, 1, 2])],
        limit=10,
    )


def chosen(problem: Any, x: tuple[int, ...]) -> Choice:
    return Choice(problem.node_start[:-1] + np.array(x, dtype=np.int64))


def test_a_table_is_row_major_in_the_order_of_its_nodes() -> None:
    document = small()
    problem = iopddl.read(document, "small")
    # 1 + 2 + 4, then row 1 column 0 of the first table, and row 1 column 0 of the second
    assert evaluate(problem, chosen(problem, (1, 0, 1))).cost == 1 + 2 + 4 + 3 + 1
    assert networks.cost(document, (1, 0, 1)) == 11


def test_an_interval_ends_before_its_end_and_an_empty_one_holds_nothing() -> None:
    document = small()
    problem = iopddl.read(document, "small")
    assert not evaluate(problem, chosen(problem, (1, 0, 1))).feasible  # 7 + 6 at time 2
    assert evaluate(problem, chosen(problem, (0, 0, 1))).violations == ()  # 3 + 6
    document["problem"]["nodes"]["intervals"][1][0] = 3
    problem = iopddl.read(document, "small")
    assert evaluate(problem, chosen(problem, (1, 0, 1))).feasible


@pytest.mark.slow
@given(networks.problems())
def test_reading_counts_as_the_contest_does(document: dict[str, Any]) -> None:
    problem = iopddl.read(document, "").verify()
    sizes = [len(c) for c in document["problem"]["nodes"]["costs"]]
    for x in (tuple(0 for _ in sizes), tuple(k - 1 for k in sizes)):
        found = evaluate(problem, chosen(problem, x))
        over = networks.peak(document, x) > document["problem"]["usage_limit"]
        assert found.feasible == (not over and not networks.forbidden(document, x))
        if found.feasible:
            assert found.cost == networks.cost(document, x)
        assert iopddl.answer(problem, chosen(problem, x)) == list(x)


@pytest.mark.slow
@given(networks.problems())
def test_what_is_written_reads_back(document: dict[str, Any]) -> None:
    problem = iopddl.read(document, "")
    again = iopddl.read(json.loads(json.dumps(iopddl.write(problem))), "")
    for name in ("node_start", "allowed"):
        assert (getattr(problem, name) == getattr(again, name)).all()
    assert (problem.cost == again.cost).all()
    assert (problem.pairs.cost == again.pairs.cost).all()
    assert (problem.pairs.legal == again.pairs.legal).all()
    assert (problem.usage.amount == again.usage.amount).all()
    assert (problem.usage.lower == again.usage.lower).all()
    assert (problem.usage.upper == again.usage.upper).all()
    assert problem.usage.limit == again.usage.limit


def test_compressed_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "small.json.gz"
    path.write_bytes(gzip.compress(json.dumps(small()).encode()))
    problem, form = formats.read(path)
    assert (form, len(problem.classes), problem.name) == ("iopddl", 3, "small")
    formats.write(problem, tmp_path / "again.json", "iopddl")
    assert json.loads((tmp_path / "again.json").read_text()) == small()


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", "usages", 1), [6], "node 1"),
        (("nodes", "costs", 0), [], "node 0"),
        (("edges", "costs", 1), [1, 2, 3], "edge 1: 4 costs expected"),
        (("edges", "nodes", 0), [0, 3], "not there"),
        (("edges", "nodes", 0), [0, 1, 2], "two nodes"),
        (("nodes", "costs", 0), [1, 1.5], "integers"),
        (("nodes", "costs", 0), [1, 2**63], "integer"),
        (("nodes", "intervals", 0), [3, 1], "interval"),
    ],
)
def test_what_does_not_fit_together_is_told(
    tmp_path: Path, path: tuple[Any, ...], value: Any, message: str
) -> None:
    document = small()
    inside = document["problem"]
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(ExtractError, match=message):
        formats.read(tmp_path / "bad.json")


def test_a_problem_beyond_the_format_is_not_written() -> None:
    problem = iopddl.read(small(), "")
    from dataclasses import replace

    with pytest.raises(ExtractError, match="no integer"):
        iopddl.write(replace(problem, cost=problem.cost / 2))
