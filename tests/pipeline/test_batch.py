"""Batches: what is skipped, what fails alone, what resumes. The search itself is stood in for."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.errors import ExtractError, TapestryError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.files import admission, files
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.parallel.executors import Processes
from tapestry_egg.pipeline import pipeline
from tapestry_egg.pipeline.batch import MANIFEST, BatchRequest, Outcome, optimize_all, run_batch
from tapestry_egg.plans.plan import BodyPlan, Costs, Plan, Strategy
from tapestry_egg.progress import Phase
from tapestry_egg.tracing.trace import Program
from tests.parallel.worker_calls import Inline

SETTINGS = BatchRequest("cpu:2", ("seconds", "peak_bytes"))


def graph(name: str) -> BlockGraph:
    type_ = TensorType((4,), "float32")
    return BlockGraph(name, (type_, type_), (Operation("neg", (0,), (1,)),), (0,), (1,))


def front(program: Any) -> Front:
    """Two plans that leave everything whole."""
    whole = Layout.replicated(1)
    body = BodyPlan(program.graph, (whole,), (whole,), (Strategy(((),), (whole,), (whole,)),))
    mesh = MeshShape(("x",), (2,))
    costs = [Costs(1.0, 200, 3.0), Costs(2.0, 100, 3.0)]
    plans = tuple(
        Plan(f"p{i}", mesh, "cpu:2", body, c, bound=c.seconds, program=program)
        for i, c in enumerate(costs)
    )
    return Front(plans, ("seconds", "peak_bytes"), "cpu:2", program.graph.name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the graphs that were optimized; those called `bad...` fail."""
    made: list[str] = []

    def optimize(program: Any, **settings: Any) -> Front:
        name = program.graph.name
        made.append(name)
        settings["on_progress"](Phase("extract", "half", 0.5, "2x"))
        if name == "bad":
            raise ExtractError("no plan meets the limits", where="limits", hint="Raise it.")
        if name == "bad-bug":
            raise ZeroDivisionError("a defect")
        return front(program)

    monkeypatch.setattr(pipeline, "optimize", optimize)
    monkeypatch.setattr(admission, "admit", lambda *_: None)  # costs are made up, too
    return made


@pytest.fixture
def graphs(tmp_path: Path) -> Callable[..., list[Path]]:
    def write(*names: str) -> list[Path]:
        paths = [tmp_path / f"{name}.json" for name in names]
        for name, path in zip(names, paths, strict=True):
            files.save(graph(name), path)
        return paths

    return write


def go(
    paths: list[Path], out: Path, settings: BatchRequest = SETTINGS, **more: Any
) -> list[Outcome]:
    return list(run_batch(paths, settings, out, on_progress=more.pop("heard", [].append), **more))


def test_each_graph_gets_its_files_and_its_line(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    heard: list[Phase] = []
    outcomes = go(graphs("a", "b"), tmp_path / "out", heard=heard.append)
    assert [o.name for o in outcomes] == calls == ["a", "b"]
    assert [(o.plans, o.seconds_best, o.peak_least, o.gap) for o in outcomes] == [
        (2, 1, 100, 0)
    ] * 2
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        *(f"{n}.front.{kind}" for n in "ab" for kind in ("json", "svg")),
        MANIFEST,
    }
    assert [p.subject for p in heard] == ["a 2x", "b 2x"]


def test_a_second_run_does_nothing_until_something_changes(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    paths, out = graphs("a", "b"), tmp_path / "out"
    first = go(paths, out)
    second = go(paths, out)
    assert calls == ["a", "b"]
    assert all(o.skipped for o in second)
    assert [o.plans for o in second] == [o.plans for o in first]
    # Another graph, other settings, a result that is gone, and `again`: each is work.
    files.save(BlockGraph("a", *_more()), paths[0])
    go(paths, out)
    assert calls[2:] == ["a"]
    go(paths, out, BatchRequest("cpu:2", ("seconds", "peak_bytes"), limits=(("peak_bytes", 1e9),)))
    assert calls[3:] == ["a", "b"]
    (out / "b.front.json").unlink()
    go(paths, out, BatchRequest("cpu:2", ("seconds", "peak_bytes"), limits=(("peak_bytes", 1e9),)))
    assert calls[5:] == ["b"]
    go(paths, out, again=True)
    assert calls[6:] == ["a", "b"]


@pytest.mark.parametrize("executor", [None, Inline()])
def test_searches_are_resumed_beside_their_fronts(
    executor: Any, graphs: Callable[..., list[Path]], tmp_path: Path, monkeypatch: Any
) -> None:
    read: list[bytes] = []

    def optimize(program: Any, **settings: Any) -> Front:
        """Adds a byte to what the search has."""
        path: Path | None = settings["resume"]
        if path is not None:
            read.append(path.read_bytes() if path.exists() else b"")
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(read[-1] + program.graph.name.encode())
        return front(program)

    monkeypatch.setattr(pipeline, "optimize", optimize)
    monkeypatch.setattr(admission, "admit", lambda *_: None)
    out, paths, resumed = tmp_path / "out", graphs("a", "b"), replace(SETTINGS, resume=True)
    go(paths, out, executor=executor)
    assert not read and not list(out.glob("*.npz"))
    for _ in range(2):
        assert not any(o.skipped for o in go(paths, out, resumed, executor=executor))
    assert read == [b"", b"", b"a", b"b"]
    assert (out / "b.search.npz").read_bytes() == b"bb"
    # What was resumed is as current as what was searched at once.
    assert all(o.skipped for o in go(paths, out, executor=executor))


def _more() -> tuple[Any, ...]:
    """The fields of a graph other than `graph`'s."""
    type_ = TensorType((4,), "float32")
    one = np.ones(4, np.float32)
    add = Operation("add", (0, 2), (1,))
    return (type_,) * 3, (add,), (0,), (1,), {2: one}


def test_a_changed_rule_file_is_a_change(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    rules = tmp_path / "mine.yaml"
    settings = BatchRequest("cpu:2", ("seconds",), rules=(str(rules),))
    rules.write_text("rules: []\n")
    paths = graphs("a")
    go(paths, tmp_path / "out", settings)
    go(paths, tmp_path / "out", settings)
    assert calls == ["a"]
    rules.write_text("rules: []  # now otherwise\n")
    go(paths, tmp_path / "out", settings)
    assert calls == ["a", "a"]


def test_failures_are_told_and_stop_nothing(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    paths = [*graphs("bad", "bad-bug"), tmp_path / "missing.json", *graphs("good")]
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    outcomes = {o.name: o for o in go([*paths, broken], tmp_path / "out")}
    assert outcomes["bad"].error == "limits: no plan meets the limits\n  Raise it."
    assert "internal error" in outcomes["bad-bug"].error
    assert "ZeroDivisionError: a defect" in outcomes["bad-bug"].error
    assert "missing.json: cannot be read" in outcomes["missing"].error
    assert "broken.json:1:" in outcomes["broken"].error
    assert not outcomes["good"].error
    assert list(json.loads((tmp_path / "out" / MANIFEST).read_text())) == ["good"]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "good.front.json",
        "good.front.svg",
        MANIFEST,
    }


def test_an_interruption_keeps_what_is_done(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    paths, out = graphs("a", "b"), tmp_path / "out"
    batch = run_batch(paths, SETTINGS, out, on_progress=[].append)
    assert next(batch).name == "a"
    batch.close()
    assert [o.skipped for o in go(paths, out)] == [True, False]
    assert calls == ["a", "b"]


def test_a_broken_manifest_counts_as_none(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    go(graphs("a"), out)
    for text in ("{", "[]", '{"a": 3}', '{"a": {"key": null}}'):
        (out / MANIFEST).write_text(text)
        assert [o.skipped for o in go(graphs("a"), out)] == [False]


def test_two_graphs_of_one_name_are_refused_before_any_work(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    (first,) = graphs("a")
    second = tmp_path / "deeper" / "a.json"
    files.save(graph("a"), second)
    with pytest.raises(TapestryError, match="written over"):
        go([first, second], tmp_path / "out")
    assert calls == [] and not (tmp_path / "out").exists()


def test_a_front_file_holds_the_front_and_its_graph_once(tmp_path: Path) -> None:
    made = front(Program.of(graph("a")))
    path = tmp_path / "a.front.json"
    files.save(made, path)
    assert files.load(path, certify=False) == made
    document = json.loads(path.read_text())
    assert len(document["graphs"]) == 1 and len(document["plans"]) == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d["plans"][1].update(graph=7), r"\$\.plans\[1\]\.graph: there is no graph 7"),
        (lambda d: d.update(objectives=3), r"\$\.objectives"),
        (lambda d: d.update(colour="red"), "colour"),
        (lambda d: d["plans"][0]["mesh"].update(sizes=[2, 2]), r"\$\.plans\[0\]\.mesh"),
        (lambda d: d.pop("graphs"), "graphs"),
    ],
)
def test_a_front_file_that_is_wrong_is_refused_at_the_place(
    tmp_path: Path, change: Callable[[Any], None], said: str
) -> None:
    path = tmp_path / "a.front.json"
    files.save(front(Program.of(graph("a"))), path)
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    with pytest.raises(TapestryError, match=said):
        files.load(path)


def test_several_programs_give_a_front_or_an_error_each(calls: list[str]) -> None:
    """In threads here: the search is stood in for. Names need not be those of files."""
    heard: list[Phase] = []
    with ThreadPoolExecutor(1) as threads:
        found = optimize_all(
            {"one/two": graph("a"), "worse": graph("bad"), "three": Program.of(graph("c"))},
            "cpu:2",
            ("seconds", "peak_bytes"),
            limits={"peak_bytes": "1 GiB"},
            executor=threads,
            on_progress=heard.append,
        )
    assert calls == ["a", "bad", "c"] and list(found) == ["one/two", "worse", "three"]
    first, worse, third = found.values()
    assert isinstance(first, Front) and first.graph_name == "a" and len(first) == 2
    assert isinstance(third, Front) and third.best().program is not None
    assert isinstance(worse, TapestryError) and "no plan meets the limits" in str(worse)


def test_a_lost_worker_costs_its_own_graph_which_is_done_again(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    heard: list[Phase] = []
    paths = graphs("a", "b", "c")
    outcomes = go(paths, tmp_path / "out", executor=Inline(0), heard=heard.append)
    assert [(o.name, o.error) for o in outcomes] == [("b", ""), ("c", ""), ("a", "")]
    assert ["gone" in p.text for p in heard] == [True]
    outcomes = go(paths, tmp_path / "other", executor=Inline(0, 3))
    assert {o.name: bool(o.error) for o in outcomes} == {"a": True, "b": False, "c": False}
    assert "gone, twice" in outcomes[-1].error and "--workers" in outcomes[-1].error
    assert sorted(json.loads((tmp_path / "other" / MANIFEST).read_text())) == ["b", "c"]


def test_an_interrupted_front_is_kept_but_not_taken_for_done(
    graphs: Callable[..., list[Path]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def optimize(program: Any, **_: Any) -> Front:
        return replace(front(program), notes=(INTERRUPTED,))

    monkeypatch.setattr(pipeline, "optimize", optimize)
    batch = run_batch(graphs("a", "b"), SETTINGS, tmp_path / "out", on_progress=[].append)
    assert next(batch).notes == (INTERRUPTED,)
    with pytest.raises(KeyboardInterrupt):
        next(batch)
    kept = files.load(tmp_path / "out" / "a.front.json", certify=False)
    assert (
        isinstance(kept, Front) and kept.notes == (INTERRUPTED,) and str(INTERRUPTED) in str(kept)
    )
    assert not (tmp_path / "out" / MANIFEST).exists()


@pytest.mark.slow
def test_side_by_side_gives_the_same_fronts(
    graphs: Callable[..., list[Path]], tmp_path: Path
) -> None:
    heard: list[Phase] = []
    settings = BatchRequest("cpu:2", ("seconds", "peak_bytes"), seconds=0.5)
    with Processes(2) as pool:
        out = tmp_path / "out"
        outcomes = go(graphs("a", "b"), out, settings, executor=pool, heard=heard.append)
    assert sorted(o.name for o in outcomes) == ["a", "b"]
    assert all(o.plans > 0 and not o.error for o in outcomes)
    assert {(p.subject, p.step) for p in heard} == {
        (x, each.name) for x in "ab" for each in pipeline.PASSES
    }


def test_two_batches_in_one_folder_keep_each_others_entries(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path
) -> None:
    """Also where both have read the manifest before either writes into it."""
    out = tmp_path / "out"
    one = run_batch(graphs("a", "b"), SETTINGS, out, on_progress=[].append)
    other = run_batch(graphs("c", "d"), SETTINGS, out, on_progress=[].append)
    for batch in (one, other, one, other):
        next(batch)
    assert set(json.loads((out / MANIFEST).read_text())) == {"a", "b", "c", "d"}
    assert all(o.skipped for o in go(graphs("a", "b", "c", "d"), out))


@pytest.mark.parametrize("damage", [b"", b"{}", None])
def test_a_front_that_was_damaged_is_done_again(
    graphs: Callable[..., list[Path]], calls: list[str], tmp_path: Path, damage: bytes | None
) -> None:
    paths, out = graphs("a"), tmp_path / "out"
    go(paths, out)
    path = out / "a.front.json"
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"1", b"2", 1) if damage is None else damage)
    (outcome,) = go(paths, out)
    assert not outcome.skipped and calls == ["a", "a"] and path.read_bytes() == whole
