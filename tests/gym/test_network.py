"""Problems of costs in pairs: reductions lose nothing, small ones are solved, answers are legal."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.check import evaluate, row_costs
from tapestry_egg.extract.gym.choices import ChoiceProblem
from tapestry_egg.extract.gym.extraction import Extraction, extract
from tapestry_egg.extract.gym.formats import iopddl
from tapestry_egg.extract.gym.memory_front import Solving
from tapestry_egg.extract.gym.network import Unanswerable, reduced
from tapestry_egg.parallel.deadline import TimeUp
from tests.gym import and_or, networks


def ring(count: int, sizes: int, seed: int, limit: int) -> dict[str, Any]:
    """Nodes in a ring with random chords: no small cut, all present for some time."""
    rng = np.random.default_rng(seed)
    ends = [(i, (i + 1) % count) for i in range(count)]
    ends += [(int(a), int(b)) for a, b in rng.integers(0, count, (count // 2, 2)) if a != b]
    tables = rng.integers(0, 100, (len(ends), sizes * sizes)).tolist()
    return networks.document(
        [[i, i + 6] for i in range(count)],
        rng.integers(0, 30, (count, sizes)).tolist(),
        rng.integers(0, 9, (count, sizes)).tolist(),
        [(a, b, t) for (a, b), t in zip(ends, tables, strict=True)],
        limit,
    )


#: What is always there makes the first of two moments the one that binds, for two nodes together.
ONE_BINDS = networks.document(
    [[0, 2], [0, 1], [0, 2], [1, 2]],
    [[0, 3], [0], [0, 3], [0, 1]],
    [[1, 0], [1], [1, 0], [1, 0]],
    [],
    2,
)


@example(ONE_BINDS)
@example(networks.LATER[1])
@given(networks.problems())
@settings(max_examples=60, deadline=None)
def test_reductions_keep_a_best_answer_and_what_answers_cost(document: dict[str, Any]) -> None:
    problem, least = iopddl.read(document, ""), networks.least(document)
    try:
        form = reduced(problem)
    except Unanswerable:
        assert least is None
        return
    best = None
    for rows in product(*(range(len(v)) for v in form.problem.variables)):
        found = row_costs(form.problem, rows)
        if found.violations or found.peak_bytes > form.limit:
            continue
        x = tuple((form.nodes(np.array(rows)) - problem.node_start[:-1]).tolist())
        assert found.seconds + form.constant == networks.cost(document, x)
        assert networks.peak(document, x) <= document["problem"]["usage_limit"]
        assert not networks.forbidden(document, x)
        best = min(networks.cost(document, x), networks.cost(document, x) if best is None else best)
    assert best == least


def check_solved(document: dict[str, Any]) -> None:
    """The answer is the best of all, proven, and costs what it is said to."""
    problem, least = iopddl.read(document, ""), networks.least(document)
    found = extract(problem, 60.0)
    assert found.proven
    if least is None:
        assert found.choice is None and found.reason
        return
    assert found.choice is not None
    recount = evaluate(problem, found.choice)
    assert recount.feasible
    assert recount.cost == found.value == least
    assert found.bound == least


@example(networks.LATER[1])
@given(networks.problems())
@settings(max_examples=60, deadline=None)
def test_small_problems_are_solved_and_proven(document: dict[str, Any]) -> None:
    check_solved(document)


@pytest.mark.parametrize("seed", range(0, 30, 10))
def test_small_connected_problems_are_solved_and_proven(seed: int) -> None:
    for s in range(seed, seed + 10):
        check_solved(networks.connected(s))


@pytest.mark.slow
@given(networks.problems(largest=9, unit=10**17))
@settings(max_examples=40, deadline=None)
def test_of_amounts_near_the_largest_integers_answers_are_legal(document: dict[str, Any]) -> None:
    """Their sums are rounded up, so that something may be missed, and nothing is said of that."""
    problem, least = iopddl.read(document, ""), networks.least(document)
    found = extract(problem, 0.5)
    if least is None:
        assert found.choice is None
    elif found.choice is not None:
        assert evaluate(problem, found.choice).feasible and found.value >= least
        assert found.bound <= least


@pytest.mark.slow
def test_the_table_of_methods_takes_networks(tmp_path: Path) -> None:
    document = ring(8, 3, 4, 25)
    (tmp_path / "ring.json").write_text(json.dumps(document))
    problem, _ = formats.read(tmp_path / "ring.json")
    found = extract(problem, 30.0)
    assert found.method == "network" and found.proven
    assert found.value == networks.least(document)
    assert any(note.startswith("variables 8 -> ") for note in found.notes)


def test_limits_that_nothing_keeps_are_an_answer() -> None:
    document = networks.document([[0, 2], [1, 4]], [[1, 2], [0]], [[5, 6], [7]], [], 11)
    found = extract(iopddl.read(document, "tight"), 2.0)
    assert not found.feasible
    assert "time 1" in found.reason and "12" in found.reason


@pytest.mark.parametrize("edges", [[], [(0, 0, [0, 9, 9, 5])]])
def test_one_node_alone_or_with_itself(edges: list[Any]) -> None:
    document = networks.document([[0, 1]], [[4, 3]], [[1, 2]], edges, 2)
    found = extract(iopddl.read(document, ""), 2.0)
    assert found.value == (4 if edges else 3)
    assert found.proven


@given(and_or.problems())
@settings(max_examples=5)
def test_a_problem_whose_choices_need_others_is_refused(problem: ChoiceProblem) -> None:
    with pytest.raises(ExtractError, match="choices need others"):
        reduced(problem)


def test_a_second_thread_tells_what_it_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    document = ring(9, 3, 5, 30)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    solving = Solving(iopddl.read(document, ""), None, time.perf_counter() + 60.0, 0)
    solving.rival.run()  # all of it, before the first begins
    assert solving.rival.proven and solving.search.rows is None
    solving.run()
    least = networks.least(document)
    assert solving.value == least and solving.search.proven
    assert least is not None and least - 1 < solving.bound <= least


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_prints_the_best_so_far(tmp_path: Path, number: int) -> None:
    """A problem too large to be proven, ended once a first answer is told."""
    document = ring(400, 9, 1, 27)
    (tmp_path / "ring.json").write_text(json.dumps(document))
    command = [sys.executable, "-m", "tapestry_egg.extract", str(tmp_path / "ring.json")]
    running = subprocess.Popen(
        [*command, "--json", "--progress", "--seconds", "300", "-o", str(tmp_path / "out")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for line in running.stderr:
        if "best -" not in line:
            running.send_signal(number)
            break
    out, _ = running.communicate()
    row = json.loads(out)
    assert running.returncode == 130
    assert "interrupted" in row["notes"] and row["feasible"]
    rows = tuple(json.loads((tmp_path / "out" / "small.json").read_text()))
    assert networks.peak(document, rows) <= 27
    assert networks.cost(document, rows) == row["values"]["cost"] >= row["bound"]


def test_an_answer_is_kept_when_the_deadline_comes_in_the_middle() -> None:
    def stop(found: Extraction) -> None:
        if found.feasible:
            raise TimeUp

    found = extract(iopddl.read(ring(40, 6, 4, 27), ""), 60.0, told=stop)
    assert found.choice is not None and not found.proven
    assert "time was up" in found.notes


def tight(seed: int, count: int = 40, share: float = 1.0) -> dict[str, Any]:
    """A ladder of nodes whose lightest strategies forbid each other, limited to what a hidden
    answer needs, times a share.

    Neighbours may not both take a strategy of the lighter half unless the hidden answer does.
    """
    rng = np.random.default_rng(seed)
    size = 5
    hidden = rng.integers(0, size, count)
    usages = np.sort(rng.integers(1, 1000, (count, size)), axis=1)
    edges = []
    for a, b in [(i, j) for i in range(count) for j in (i + 1, i + 3) if j < count]:
        table = rng.integers(0, 50, (size, size))
        table[:2, :2] = networks.INFINITE
        table[hidden[a], hidden[b]] = int(rng.integers(0, 50))
        edges.append((a, b, table.ravel().tolist()))
    begin = rng.integers(0, 12, count)
    document = networks.document(
        [[int(s), int(s) + int(d)] for s, d in zip(begin, rng.integers(1, 9, count), strict=True)],
        rng.integers(0, 50, (count, size)).tolist(),
        usages.tolist(),
        edges,
        0,
    )
    peak = networks.peak(document, tuple(hidden.tolist()))
    document["problem"]["usage_limit"] = int(share * peak)
    return document


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_answers_within_tight_limits_are_found(seed: int) -> None:
    document = tight(seed, share=1.02)
    solving = Solving(iopddl.read(document, ""), None, time.perf_counter() + 30.0, 0)
    solving.search.open()
    assert solving.search.rows is not None


@pytest.mark.slow
def test_limits_that_nothing_was_found_for_say_what_is_near() -> None:
    """Lower and lower, until no answer is found; it says which usage is, and at what time."""
    for share in (0.9, 0.8, 0.7, 0.6, 0.5):
        document = tight(0, 20, share)
        found = extract(iopddl.read(document, ""), 5.0)
        if found.choice is None:
            break
    assert found.proven and not found.feasible
    assert f"the limit is {document['problem']['usage_limit']}" in found.reason
    assert "at time" in found.reason
