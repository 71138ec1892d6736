"""Cost function networks: bounds are bounds, moves never lose, and small problems are solved."""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym import formats
from tapestry_egg.extract.gym.cfn import branch, solver
from tapestry_egg.extract.gym.cfn.aside import Aside
from tapestry_egg.extract.gym.cfn.network import program
from tapestry_egg.extract.gym.cfn.network.buckets import Buckets
from tapestry_egg.extract.gym.cfn.network.forest import Forest
from tapestry_egg.extract.gym.cfn.network.messages import Messages
from tapestry_egg.extract.gym.cfn.network.network import Network
from tapestry_egg.extract.gym.cfn.network.reductions import reduce
from tapestry_egg.extract.gym.cfn.search import Search
from tapestry_egg.extract.gym.cfn.solver import Result, solve
from tapestry_egg.extract.gym.cfn.trades import trade
from tapestry_egg.extract.gym.choices.check import evaluate
from tapestry_egg.extract.gym.choices.choices import ChoiceProblem
from tapestry_egg.extract.gym.formats import iopddl
from tapestry_egg.extract.gym.methods import extract
from tapestry_egg.parallel.deadline import TimeUp
from tests.gym import and_or, networks

#: Nothing but what a network needs: its rows and cells are those of the document.
AS_IT_IS = ("consistency",)


def network(document: dict[str, Any]) -> Network | None:
    reduced = reduce(iopddl.read(document, ""), AS_IT_IS)
    return None if reduced.infeasible is not None else reduced.network


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


@pytest.mark.slow
@given(networks.problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_a_bound_at_any_prices_is_a_bound(document: dict[str, Any], seed: int) -> None:
    least, net = networks.least(document), network(document)
    if least is None or net is None or not len(net):
        return
    rng = np.random.default_rng(seed)
    messages = Messages(net)
    for k in range(4):
        price = rng.random(len(net.uses.room)) * 2 * k
        paid = float(price @ net.uses.room)
        bound = messages.sweep(net.priced(price)) + net.constant - paid
        assert bound <= least + 1e-9 * (1 + abs(least) + paid)


@given(networks.problems())
@settings(max_examples=40)
def test_the_bound_on_a_tree_is_its_optimum(document: dict[str, Any]) -> None:
    inside = document["problem"]
    edges = inside["edges"]
    tree = [e for e, (a, b) in enumerate(edges["nodes"]) if b == a + 1]
    seen = {tuple(edges["nodes"][e]): e for e in tree}  # one table between two nodes
    edges["nodes"] = [list(ends) for ends in seen]
    edges["costs"] = [edges["costs"][e] for e in seen.values()]
    inside["usage_limit"] = 10**9
    least, net = networks.least(document), network(document)
    if least is None or net is None or not len(net):
        return
    messages = Messages(net)
    bound = max(messages.sweep(net.cost) for _ in range(8)) + net.constant
    assert bound == pytest.approx(least)
    assert net.value(messages.decode(net.cost)) >= least


def test_bounds_rise_to_a_gap_below_the_best() -> None:
    document = ring(9, 3, 4, 10**6)
    net = network(document)
    assert net is not None
    messages = Messages(net)
    bounds = [messages.sweep(net.cost) + net.constant for _ in range(60)]
    least = networks.least(document)
    assert least is not None
    assert bounds[0] < bounds[-1] <= least + 1e-9
    assert bounds[-1] > 0.6 * least


@pytest.mark.slow
@given(networks.problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_minimised_parts_are_as_enumerated(document: dict[str, Any], seed: int) -> None:
    """Whatever a move frees, no rows of those variables are better, the rest being fixed."""
    net = network(document)
    if net is None or not len(net):
        return
    rng = np.random.default_rng(seed)
    price = rng.random(len(net.uses.room))
    cost = net.priced(price)
    x = rng.integers(0, net.sizes)
    forest = Forest(net, rng.permutation(len(net)).tolist(), int(rng.integers(1, 8)))
    for move in (forest, Buckets(net, rng, int(rng.choice([2, 8, 64])))):
        y = move.minimise(x, cost)
        free = move.variables.tolist()
        assert all(x[i] == y[i] for i in range(len(net)) if i not in free)
        best = min(priced(net, cost, z) for z in others(net, x, free))
        assert priced(net, cost, y) == pytest.approx(best)


def others(net: Network, x: np.ndarray, free: list[int]) -> Any:
    from itertools import product

    for rows in product(*(range(int(net.sizes[i])) for i in free)):
        z = x.copy()
        z[free] = rows
        yield z


def priced(net: Network, cost: np.ndarray, x: np.ndarray) -> float:
    """Cells summed one by one; forbidden ones cost what the network says."""
    total = sum(float(cost[net.rows[i] + r]) for i, r in enumerate(x.tolist()))
    start = 0
    for a, b in zip(net.first.tolist(), net.second.tolist(), strict=True):
        cell = float(net.cells[start + x[a] * net.sizes[b] + x[b]])
        total += cell if np.isfinite(cell) else net.half.forbidden
        start += int(net.sizes[a] * net.sizes[b])
    return total


@pytest.mark.slow
@given(networks.problems(), st.integers(0, 2**32 - 1))
@settings(max_examples=60)
def test_trades_keep_the_limits_and_never_cost_more(document: dict[str, Any], seed: int) -> None:
    net = network(document)
    fitting = list(networks.answers(document))
    if net is None or not fitting:
        return
    lift = reduce(iopddl.read(document, ""), AS_IT_IS).lift
    rng = np.random.default_rng(seed)
    start = next(
        (
            x
            for x in others(net, np.zeros(len(net), int), list(range(len(net))))
            if tuple(lift(x).tolist()) in fitting
        ),
        None,
    )
    assert start is not None
    slack = net.slack(start)
    forest = Forest(net, rng.permutation(len(net)).tolist(), int(rng.integers(1, 8)))
    price = rng.random(len(net.uses.room))
    x, change = trade(net, forest, start, net.priced(price), price, slack)
    rows = tuple(lift(x).tolist())
    assert networks.peak(document, rows) <= document["problem"]["usage_limit"]
    before = networks.cost(document, tuple(lift(start).tolist()))
    assert networks.cost(document, rows) == before + change <= before
    assert slack.tolist() == net.slack(x).tolist()


def solved(problem: ChoiceProblem) -> Result:
    """Solved in one process by a clock that counts how often it is read: alike on any machine."""
    ticks = itertools.count()
    return solve(problem, 400.0, processes=1, clock=lambda: float(next(ticks)))


def check_solved(document: dict[str, Any]) -> None:
    """The answer is the best of all, proven, and costs what it is said to."""
    problem = iopddl.read(document, "")
    least = networks.least(document)
    found = solved(problem)
    assert found.proven
    if least is None:
        assert found.choice is None and found.infeasible is not None
        return
    assert found.choice is not None
    recount = evaluate(problem, found.choice)
    assert recount.feasible
    assert recount.values == (least,)
    assert found.bound == found.value == least


@example(networks.LATER[0])
@example(networks.LATER[1])
@given(networks.problems())
@settings(max_examples=60)
def test_small_problems_are_solved_and_proven(document: dict[str, Any]) -> None:
    check_solved(document)


@pytest.mark.parametrize("seed", range(0, 30, 10))
def test_small_connected_problems_are_solved_and_proven(seed: int) -> None:
    for s in range(seed, seed + 10):
        check_solved(networks.connected(s))


@pytest.mark.slow
@given(networks.problems(largest=9, unit=10**17))
@settings(max_examples=60)
def test_amounts_near_the_largest_integers_are_exact(document: dict[str, Any]) -> None:
    found = solved(iopddl.read(document, ""))
    least = networks.least(document)
    assert (found.value if found.choice is not None else None) == least


@given(networks.problems())
@settings(max_examples=20)
def test_the_program_agrees(document: dict[str, Any]) -> None:
    net, least = network(document), networks.least(document)
    if net is None or not program.fits(net):
        return
    found = program.solve(net, 20.0, np.zeros(0, dtype=np.int64))
    if least is None:
        assert found.infeasible
        return
    assert found.x is not None
    assert net.value(found.x) == least
    assert net.fits(found.x)
    assert least - 1 < found.bound <= least


def test_branching_says_when_it_gave_up() -> None:
    net = network(ring(10, 4, 3, 40))
    assert net is not None
    price = np.zeros(len(net.uses.room))
    short = branch.solve(net, price, np.inf, lambda: False, most=5)
    assert short is not None and not short.complete
    whole = branch.solve(net, price, np.inf, lambda: False, 1.0)
    assert whole is not None and whole.complete
    again = branch.solve(net, price, net.value(whole.x) if whole.x is not None else 0, bool, 1.0)
    assert again is not None and again.complete and again.x is None


def test_a_search_is_repeatable_and_its_bound_holds() -> None:
    document = ring(9, 3, 5, 30)
    net = network(document)
    least = networks.least(document)
    assert net is not None and least is not None
    values = []
    for _ in range(2):
        steps = iter(range(10**9))
        search = Search(net, 4000, 7, clock=lambda steps=steps: float(next(steps)))  # type: ignore[misc]
        found = search.run()
        assert found.bound <= least + 1e-6 and found.value >= least
        values.append((found.value, found.bound, found.steps))
    assert values[0] == values[1]


@pytest.mark.slow
def test_a_process_aside_tells_what_it_finds() -> None:
    document = ring(9, 3, 5, 30)
    net, least = network(document), networks.least(document)
    assert net is not None and least is not None
    aside = Aside(net, 60.0, 1, 1.0)
    search = Search(net, 60.0)
    try:
        while aside.open:
            time.sleep(0.05)
            aside.news(search)
    finally:
        aside.end()
    assert search.value == least
    assert least - 1 < search.bound <= least


def test_a_process_that_is_lost_loses_only_its_own_work() -> None:
    document = ring(9, 3, 5, 30)
    net = network(document)
    assert net is not None
    aside = Aside(net, 60.0, 1, 1.0)
    aside.child.process.kill()
    aside.child.process.wait()
    found = Search(net, 20.0, news=aside.news, step=1.0).run()
    aside.end()
    assert found.proven and found.value == networks.least(document)


@pytest.mark.slow
def test_the_table_of_methods_takes_networks(tmp_path: Path) -> None:
    document = ring(8, 3, 4, 25)
    (tmp_path / "ring.json").write_text(json.dumps(document))
    problem, _ = formats.read(tmp_path / "ring.json")
    found = extract(problem, 2.0)
    assert found.method == "network" and found.proven
    assert found.values == (networks.least(document),)
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
    assert found.values == ((4,) if edges else (3,))
    assert found.proven


@given(and_or.problems())
@settings(max_examples=5)
def test_a_problem_whose_choices_need_others_is_refused(problem: ChoiceProblem) -> None:
    with pytest.raises(ExtractError, match="choices need others"):
        solve(problem, 1.0)


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


def test_an_answer_is_kept_when_the_deadline_comes_in_the_middle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = iopddl.read(ring(40, 6, 4, 27), "")
    whole, values = solver.solve, []

    def late(problem: ChoiceProblem, seconds: float, seed: int, told: Any) -> Any:
        def once(choice: Any, value: float, bound: float) -> None:
            told(choice, value, bound)
            values.append(int(value))
            if len(values) == 2:
                raise TimeUp

        return whole(problem, seconds, seed, once, processes=1)

    monkeypatch.setattr(solver, "solve", late)
    monkeypatch.setattr(solver, "_CHECKING", 1e9)  # so that only the first is checked before
    found = extract(problem, 60.0)
    assert len(values) == 2 and values[1] < values[0]
    assert found.values == (values[1],) and "time was up" in found.notes
