"""The same program gives the same front, whatever the clock, the hashes of strings and the number
of workers."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import pytest

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.extract.engine.archive import Archive
from tapestry_egg.extract.engine.race import Effort, Race, searches_of
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize, settings
from tests.extract.random_problems import ladder
from tests.rewrite.equal_forms import graph_of, struct, two

# What a child process plans: a name, the objectives and limits, and how hard.
PLANS = """
import sys
import jax, jax.numpy as jnp
import tapestry_egg as te
from tapestry_egg.pipeline import Settings

name, out, workers = sys.argv[1], sys.argv[2], int(sys.argv[3])
S = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)

def mlp(ws, x, y):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)

def step(ws, x, y):
    return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(mlp)(ws, x, y))

def over(ws, x):
    y, s = jax.lax.scan(lambda c, w: (jnp.tanh(c @ w), c.sum()), x, ws)
    return jnp.mean(y ** 2) + s.sum()

def scanned(ws, x):
    return ws - 0.1 * jax.grad(over)(ws, x)

def readme(w, x, y):
    def loss(w, x, y):
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y))

three = ("seconds", "peak_bytes", "joules")
cases = {
    "readme": (readme, ({"up": S(1024, 4096), "down": S(4096, 1024)}, S(8192, 1024), S(8192, 1024)),
               three, {}, {"work": 0.3}),
    "mlp": (step, ([S(256, 256)] * 3, S(4096, 256), S(4096, 256)), ("seconds", "peak_bytes"),
            {"peak_bytes": "8MiB"}, {}),
    "recomputed": (step, ([S(128, 128)] * 8, S(16384, 128), S(16384, 128)), three, {},
                   {"recompute": 2}),
    "scanned": (scanned, (S(6, 256, 256), S(1024, 256)), (*three, "wire_bytes"), {}, {}),
}
function, arguments, objectives, limits, more = cases[name]
front = te.optimize(
    te.trace(function, *arguments), "h100:4", objectives, limits=limits,
    settings=Settings(**{"work": 1.0, "workers": workers, **more}),
)
assert not any("another run" in str(note) for note in front.notes), front.notes
front.save(out)
"""


def planned(name: str, out: Path, workers: int) -> subprocess.Popen[bytes]:
    """A process that writes the front to a file, with hashes and niceness of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": str(workers), "JAX_PLATFORMS": "cpu"}
    environment["OPENBLAS_NUM_THREADS"] = str(workers)
    command = ["nice", "-n", str(5 * workers - 5), sys.executable, "-c", PLANS]
    return subprocess.Popen([*command, name, str(out), str(workers)], env=environment)


def read(out: Path) -> bytes:
    data = out.read_bytes()
    return gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "readme",
        pytest.param("recomputed", marks=pytest.mark.long),
        pytest.param("mlp", marks=pytest.mark.long),
        pytest.param("scanned", marks=pytest.mark.long),
    ],
)
def test_a_front_is_the_same_in_a_slower_process(name: str, tmp_path: Path) -> None:
    """The second one gives way to the first, and to all else that runs."""
    outs = [tmp_path / "one.json", tmp_path / "other.json"]
    running = [planned(name, out, workers) for workers, out in enumerate(outs, 1)]
    assert [each.wait() for each in running] == [0, 0]
    assert read(outs[0]) == read(outs[1])


def told(archive: Archive) -> list[tuple[object, ...]]:
    """All that an archive says, to the bit."""
    plans = [(c.rows.tobytes(), c.costs) for c in archive.candidates]
    return [*plans, *((c.value, c.bytes_price, c.joule_price, c.peak) for c in archive.cuts)]


def test_a_search_counts_its_work_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock on which every look takes a second: no step is left out, and none is added."""
    found = []
    for slow in (False, True):
        if slow:
            ticks = map(float, count())
            monkeypatch.setattr(time, "perf_counter", ticks.__next__)
        searches = searches_of([ladder(1, 90)], 0.0)  # too long to be closed
        Race(searches, Effort(work=0.1, seconds=1e9, gap=0.0)).run()
        found.append((searches[0].work.units, told(searches[0].archive)))
        assert searches[0].work.units >= 0.1 and not searches[0].archive.by_clock
    assert found[0] == found[1]


@pytest.mark.slow
def test_more_work_is_done_where_more_is_allowed() -> None:
    spent = []
    for work in (0.1, 0.4):
        searches = searches_of([ladder(1, 90)], 0.0)
        Race(searches, Effort(work=work, gap=0.0)).run()
        spent.append(searches[0].work.units)
    assert 0.1 <= spent[0] < 0.4 <= spent[1]


GRAPH = graph_of(two, struct(512, 64), struct(64, 32), struct(64, 32))
SHAPES = [MeshShape(("x",), (4,))]


@pytest.mark.slow
def test_a_front_that_the_clock_ended_says_so() -> None:
    settings = Settings(seconds=0.001, gap=0.0)
    front = optimize(GRAPH, "h100:4", mesh_shapes=SHAPES, settings=settings)
    (note,) = [str(n) for n in front.notes if n.kind == "time-limit"]
    assert "time limit of 0.001 s" in note and "another run may give another front" in note
    asked = optimize(GRAPH, "h100:4", mesh_shapes=SHAPES, settings=Settings(work=5.0))
    assert not [n for n in asked.notes if n.kind == "time-limit"]


def test_rules_that_the_clock_ended_are_told() -> None:
    brief = Settings(work=1.0, algebra=Budget(seconds=0.0), budget=Budget(seconds=0.0))
    notes = optimize(GRAPH, "h100:4", mesh_shapes=SHAPES, settings=brief).notes
    assert any("rules on the program" in n.text for n in notes)
    assert any("rules on layouts" in n.text for n in notes)


def test_the_limit_of_time_is_far_away_unless_it_is_asked_for() -> None:
    default = Settings()
    work = default.most_work(3000)
    assert default.most_work(30) < work == 4.0 and default.most_seconds(3000) >= 10 * work
    asked = Settings(seconds=5.0)
    assert asked.most_seconds(30) == 5.0 and asked.most_work(30) == float("inf")
    both = Settings(seconds=5.0, work=2.0)
    assert (both.most_seconds(30), both.most_work(30)) == (5.0, 2.0)


def test_more_work_is_done_where_tables_are_large_unless_it_is_asked_for() -> None:
    passing = [0.4, 0.6]  # a pass over all tables is a unit
    assert Settings().most_work(30, passing) > 10 * Settings().most_work(30)
    assert Settings().most_seconds(30, passing) >= 10 * Settings().most_work(30, passing)
    assert Settings(work=2.0).most_work(30, passing) == 2.0
    assert Settings(seconds=5.0).most_seconds(30, passing) == 5.0


def test_more_work_is_done_for_many_networks_of_a_program_that_is_not_small() -> None:
    few, many = [0.0] * 2, [0.0] * 24
    assert Settings().most_work(1500, many) > 2 * Settings().most_work(1500, few)
    assert Settings().most_work(10, many) < 1.1 * Settings().most_work(10, few)


def test_a_race_has_the_work_that_its_tables_want(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two axes of a mesh make larger tables than one, and are searched longer for it."""
    given: list[float] = []
    run = Race.run

    def noting(race: Race) -> None:
        given.append(race.effort.work)
        run(race)

    monkeypatch.setattr(Race, "run", noting)
    monkeypatch.setattr(settings, "_WORK", 0.0)
    for shapes in ([MeshShape(("x",), (8,))], [MeshShape(("x", "y"), (2, 4))]):
        optimize(GRAPH, "h100:8", mesh_shapes=shapes)
    one, two = given
    assert one < two
