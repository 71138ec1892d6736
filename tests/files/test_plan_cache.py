"""Fronts on disk: found again only for the same question, never believed when damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.files import fingerprint, plan_cache
from tapestry_egg.files.plan_cache import PLACE, SIZE, PlanCache, chosen_cache, plan_key
from tapestry_egg.files.plan_message import packed, unpacked
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import pipeline
from tapestry_egg.pipeline.jit.planning import plan_once
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.rules.language.book import load_book

QUICK = Settings(work=0.1, workers=1, recompute=0, forms=0)
TARGET = load_target("cpu:4")
X = jnp.ones((16, 8))


def program(scale: float = 2.0) -> te.Program:
    def f(x: Any) -> Any:
        return jnp.tanh(x * scale) @ x.T

    return te.trace(f, X)


@pytest.fixture(scope="module")
def front() -> Front:
    return te.optimize(program(), TARGET, settings=QUICK)


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch, front: Front) -> list[int]:
    """Grows with every search; what is found is a front that is known."""
    found: list[int] = []

    def search(*_: Any, **__: Any) -> Front:
        found.append(1)
        return front

    monkeypatch.setattr(pipeline, "optimize", search)
    return found


def key(**changed: Any) -> str:
    asked = {"objectives": ("seconds",), "limits": {}, "settings": QUICK, "rules": ()}
    given = {"program": program(), "target": TARGET}
    given.update({k: v for k, v in changed.items() if k in given})
    options = asked | {k: v for k, v in changed.items() if k not in given}
    return plan_key(given["program"], given["target"], options)


def same(a: Front, b: Front) -> bool:
    known = [fingerprint.plan_fingerprint(p) for p in a.plans]
    return (
        known == [fingerprint.plan_fingerprint(p) for p in b.plans]
        and [replace(p, body=q.body) for p, q in zip(a.plans, b.plans, strict=True)]
        == list(b.plans)
        and replace(a, plans=()) == replace(b, plans=())
    )


def test_a_key_is_the_same_wherever_the_program_stands() -> None:
    def f(x: Any) -> Any:
        return jnp.tanh(x * 2.0) @ x.T

    assert key(program=te.trace(f, X)) == key()


@pytest.mark.slow
def test_a_key_is_the_same_in_another_process() -> None:
    code = "from tests.files.test_plan_cache import key; print(key())"
    root = Path(__file__).parents[2]
    out = subprocess.run(
        [sys.executable, "-c", code],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert out.stdout.split() == [key()], out.stderr


def test_a_key_changes_with_everything_that_decides_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = load_book("algebra")
    keys = {
        "as it is": key(),
        "a constant": key(program=program(3.0)),
        "a shape": key(program=te.trace(lambda x: jnp.tanh(x * 2.0) @ x.T, X[:8])),
        "donation": key(program=te.trace(lambda x: x, X, donate_argnums=0)),
        "no donation": key(program=te.trace(lambda x: x, X)),
        "another count": key(target=load_target("cpu:8")),
        "another machine": key(target=load_target("h100:4")),
        "one of its figures": key(target=replace(TARGET, hbm_bytes=1 << 30)),
        "objectives": key(objectives=("joules",)),
        "limits": key(limits={"peak_bytes": "1MiB"}),
        "pins": key(pins={"[0]": ("x",)}),
        "state": key(state={"[0]": "[0]"}),
        "numerics": key(numerics="relaxed"),
        "settings": key(settings=replace(QUICK, work=0.4)),
        "rules": key(rules=(book,)),
        "fewer rules": key(rules=(replace(book, rules=book.rules[1:]),)),
    }
    monkeypatch.setattr(te, "__version__", "9.9")
    keys["version"] = key()
    monkeypatch.undo()
    monkeypatch.setattr(plan_cache, "code_digest", lambda: "other")
    keys["code"] = key()
    assert len(set(keys.values())) == len(keys), keys


def test_a_key_does_not_change_with_what_decides_nothing() -> None:
    assert key(settings=replace(QUICK, workers=7)) == key()
    assert key(on_progress=print) == key()


_RULE = """
ruleset: algebra
rules:
  - name: mul-commutes
    law: 'x*y = y*x'
    reason: 'x*y = y*x'
    numerics: exact
    match: f:mul(x, y)
    replace: mul(y, x)
    guard: $x == $y
"""


def test_a_key_follows_what_the_rules_of_a_file_say(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(_RULE)
    before = key(rules=(path,))
    path.write_text(f"# a remark\n{_RULE}")
    assert key(rules=(path,)) == before
    path.write_text(_RULE.replace("$x == $y", "$x.shape == $y.shape"))
    assert key(rules=(path,)) != before


@pytest.mark.slow
def test_a_front_packed_is_the_front(front: Front) -> None:
    again = unpacked(packed(front, program()), mine := program())
    assert same(front, again)
    assert all(p.program is mine for p in again.plans)


def test_large_constants_stay_at_home() -> None:
    table = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)

    def traced(table: Any) -> te.Program:
        return te.trace(lambda x: x @ table, jnp.ones((8, 64)))

    found = te.optimize(traced(table), TARGET, settings=QUICK)
    data = packed(found, traced(table))
    assert len(data) < table.nbytes / 4
    assert same(found, unpacked(data, traced(table)))


def test_callbacks_are_those_of_this_process() -> None:
    said = []

    def traced(name: str) -> te.Program:
        def host(x: Any) -> Any:
            said.append(name)
            return np.asarray(x) + 1

        return te.trace(lambda x: jax.pure_callback(host, x, x) * 2, X)

    theirs = traced("theirs")
    data = packed(te.optimize(theirs, "cpu:1", settings=QUICK), theirs)
    plan = unpacked(data, traced("ours")).plans[0]
    np.testing.assert_allclose(te.compile(plan)(X), (X + 1) * 2)
    assert set(said) == {"ours"}


def test_source_lines_are_those_of_this_process(front: Front) -> None:
    def f(x: Any) -> Any:
        return jnp.tanh(x * 2.0) @ x.T

    here = te.trace(f, X)
    again = unpacked(packed(front, program()), here)
    lines = {op.source.line for op in here.graph.operations}
    for plan in again.plans:
        assert {op.source.line for op in plan.graph.operations} <= lines
    assert lines.isdisjoint(op.source.line for op in program().graph.operations)


def test_a_front_is_found_again_after_lines_were_added_above(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Also what is told of collectives: they stand where their readers do now."""

    def above(x: Any) -> Any:
        return jnp.tanh(x @ x.T) @ x

    def f(x: Any) -> Any:
        return jnp.tanh(x @ x.T) @ x

    square = jax.ShapeDtypeStruct((512, 512), jnp.float32)
    earlier, here = te.trace(above, square, name="f"), te.trace(f, square, name="f")
    front = te.optimize(earlier, TARGET, settings=Settings(work=0.3, workers=1))
    assert any(c.source for p in front.plans for c in p.collectives)
    cache = PlanCache(tmp_path)
    cache.put(key(), front, earlier)
    found = cache.get(key(), here)
    assert found is not None and not recwarn.list
    lines = {f"{op.source.file}:{op.source.line}" for op in here.graph.operations}
    assert {c.source for p in found.plans for c in p.collectives} <= {"", *lines}


def test_what_was_planned_once_is_found(tmp_path: Path, searches: list[int], front: Front) -> None:
    def plan(cache: Any = tmp_path, **asked: Any) -> Front:
        return plan_once(program(), TARGET, asked, search, cache=cache)

    def search() -> Front:
        return pipeline.optimize(program(), TARGET)

    assert same(plan(), front)
    assert same(plan(), front)
    assert len(searches) == 1
    plan(limits={"peak_bytes": 1e9})
    assert len(searches) == 2
    plan(cache=False)
    assert len(searches) == 3


def test_an_interrupted_search_is_not_kept(tmp_path: Path, front: Front) -> None:
    cut = replace(front, notes=(INTERRUPTED,))
    plan_once(program(), TARGET, {}, lambda: cut, cache=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["bit", "cut", "empty", "moved", "text"])
def test_a_damaged_entry_is_planned_again_and_replaced(
    fault: str, tmp_path: Path, searches: list[int], front: Front
) -> None:
    def plan() -> Front:
        return plan_once(program(), TARGET, {}, search, cache=tmp_path)

    def search() -> Front:
        return pipeline.optimize(program(), TARGET)

    plan()
    (path,) = tmp_path.iterdir()
    data = bytearray(path.read_bytes())
    if fault == "bit":
        data[len(data) // 2] ^= 4
    elif fault == "moved":  # the front of something else
        other = plan_once(program(3.0), TARGET, {}, search, cache=tmp_path)
        (stranger,) = set(tmp_path.iterdir()) - {path}
        data = bytearray(stranger.read_bytes())
        assert same(other, front)
    path.write_bytes({"cut": data[:-7], "empty": b"", "text": b"hello\n"}.get(fault, data))
    before = len(searches)
    with pytest.warns(UserWarning, match="a kept plan is not used"):
        assert same(plan(), front)
    assert len(searches) == before + 1
    assert same(plan(), front)
    assert len(searches) == before + 1


def test_a_folder_that_cannot_be_written_costs_time_only(
    tmp_path: Path, searches: list[int], front: Front
) -> None:
    (tmp_path / "file").write_text("")

    def search() -> Front:
        return pipeline.optimize(program(), TARGET)

    for _ in range(2):
        assert same(plan_once(program(), TARGET, {}, search, cache=tmp_path / "file"), front)
    assert len(searches) == 2


def test_entries_used_longest_ago_go_first(tmp_path: Path, front: Front) -> None:
    size = len(packed(front, program())) + 100
    cache = PlanCache(tmp_path, 4 * size)
    names = ["a", "b", "c", "d"]
    for age, name in enumerate(names):
        cache.put(name, front, program())
        os.utime(tmp_path / f"{name}.front", (1000 + age, 1000 + age))
    assert cache.get("a", program()) is not None  # now it is the last one used
    cache.put("e", front, program())
    assert {p.stem for p in tmp_path.iterdir()} == {"a", "c", "d", "e"}


def test_what_a_killed_write_left_is_removed(tmp_path: Path, front: Front) -> None:
    old, new = tmp_path / ".x.front.1-1.tmp", tmp_path / ".y.front.1-1.tmp"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (1000, 1000))
    PlanCache(tmp_path).put("a", front, program())
    assert {p.name for p in tmp_path.iterdir()} == {new.name, "a.front"}


def test_a_front_larger_than_a_quarter_of_the_folder_is_not_kept(
    tmp_path: Path, front: Front
) -> None:
    PlanCache(tmp_path, 100).put("a", front, program())
    assert not list(tmp_path.iterdir())


def test_many_writers_of_one_entry(tmp_path: Path, front: Front) -> None:
    from concurrent.futures import ThreadPoolExecutor

    cache = PlanCache(tmp_path, 1 << 20)

    def work(k: int) -> bool:
        cache.put("a", front, program())
        found = cache.get("a", program())
        return found is not None and same(found, front)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(12)))
    assert [p.name for p in tmp_path.iterdir()] == ["a.front"]


def test_where_fronts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_cache(None) is None  # the suite turns it off
    assert chosen_cache(tmp_path) == PlanCache(tmp_path)  # what is asked for counts
    monkeypatch.setenv(PLACE, str(tmp_path / "kept"))
    assert chosen_cache(None) == chosen_cache(True) == PlanCache(tmp_path / "kept")
    assert chosen_cache(False) is None
    monkeypatch.delenv(PLACE)
    monkeypatch.setenv("TAPESTRY_EGG_CACHE", str(tmp_path / "all"))
    monkeypatch.setenv(SIZE, "2MiB")
    assert chosen_cache(None) == PlanCache(tmp_path / "all" / "plans", 2 << 20)
    monkeypatch.setenv(SIZE, "much")
    with pytest.raises(TapestryError, match=SIZE):
        chosen_cache(None)


def searches_counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one with each search from now on."""
    searched: list[int] = []
    search = pipeline.optimize

    def counted(*args: Any, **kwargs: Any) -> Front:
        searched.append(1)
        return search(*args, **kwargs)

    monkeypatch.setattr(pipeline, "optimize", counted)
    return searched


@pytest.mark.slow
def test_te_jit_finds_its_plan_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = searches_counted(monkeypatch)
    for _ in range(2):
        run = te.jit(
            lambda x: jnp.tanh(x) @ x.T, mesh=jax.devices()[:4], settings=QUICK, cache=tmp_path
        )
        np.testing.assert_allclose(run(X), jnp.tanh(X) @ X.T, rtol=1e-5)
    assert len(searched) == 1


@pytest.mark.slow
def test_a_pin_by_line_is_of_what_stands_there_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """The same operations at other lines: another value is pinned, and planned for once."""
    searched = searches_counted(monkeypatch)
    first = "def f(x):\n  y = jnp.tanh(x)\n  z = jnp.sin(y)\n  return z.T\n"
    moved = "def f(x):\n\n  y = jnp.tanh(x)\n  z = jnp.sin(y)\n  return z.T\n"
    for text, kernel in ((first, "sin"), (moved, "tanh"), (first, "sin"), (moved, "tanh")):
        names: dict[str, Any] = {"jnp": jnp}
        exec(compile(text, "moving.py", "exec"), names)
        pins = {"moving.py:3": ("x",)}
        run = te.jit(names["f"], mesh=jax.devices()[:4], pins=pins, settings=QUICK, cache=tmp_path)
        graph = run.plan(X).graph
        (asked,) = (op for op in graph.operations if op.kernel == "sharding_constraint")
        assert graph.operations[graph.producers()[asked.inputs[0]]].kernel == kernel
    assert len(searched) == 2 and not recwarn.list
