"""Measured runs: what JAX's profiler says of a plan, beside what was planned and compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import tapestry_egg as te
from tapestry_egg.runtime.measure.measurement import _events

ROOT = Path(__file__).parents[2]

#: A train step with a loop and donated weights, on a plan that moves something; its record and what
#: was compiled. In a process of its own: a process has one profile at a time.
CHILD = """
import json, sys
import jax, jax.numpy as jnp
import tapestry_egg as te
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.runtime import compare

def step(w, x):
    def loss(w):
        h, _ = jax.lax.scan(lambda h, k: (jnp.tanh(h @ k), None), x @ w["in"], w["stack"])
        return jnp.sum(h ** 2)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))

if __name__ == "__main__":
    w = {"in": jnp.ones((64, 64)), "stack": jnp.ones((3, 64, 64))}
    program = te.trace(jax.jit(step, donate_argnums=0), w, jnp.ones((32, 64)))
    front = te.optimize(program, "cpu:4", settings=Settings(work=0.1, workers=1))
    plan = front.best("peak_bytes")
    run = te.compile(plan)
    found = te.measure(run, w, jnp.ones((32, 64)), steps=2)
    found.save(sys.argv[1])
    print(found)
    print(front.what_if(**found.rates()))
    rows = [(r.kind, r.group, r.planned_count, r.compiled_count)
            for r in compare(plan, run.compile()).rows]
    print(json.dumps(rows))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, object], list[object]]:
    folder = tmp_path_factory.mktemp("measured")
    (folder / "child.py").write_text(CHILD)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "child.py", "record.json"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads((folder / "record.json").read_text())
    return done.stdout, record, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_every_collective_is_measured_as_often_as_compiled(told) -> None:  # type: ignore[no-untyped-def]
    _, record, compiled = told
    assert compiled
    rows = {r["name"]: r for r in record["rows"] if r["kind"] == "collective"}
    for kind, group, planned, runs in compiled:
        row = rows[f"{kind} over {group}"]
        assert row["planned_count"] == planned and row["planned_seconds"] > 0
        assert row["measured_count"] == runs
        assert 0 < row["least_seconds"] <= row["measured_seconds"]


@pytest.mark.slow
def test_kernels_are_measured_and_loops_run_as_often_as_they_do(told) -> None:  # type: ignore[no-untyped-def]
    _, record, _ = told
    products = next(r for r in record["rows"] if r["name"] == "dot_general")
    # One product before the loop, three forward, six backward and one for the first weight.
    assert products["planned_count"] == 11 and products["measured_count"] >= 11
    kernels = [i for i in record["instructions"] if i["kind"] == "kernel"]
    assert any(i["what"] == "dot_general" and i["count"] == 3 for i in kernels)
    assert not any(i["name"].startswith("while") for i in kernels)
    assert all(i["seconds"] >= i["least_seconds"] > 0 for i in record["instructions"])


@pytest.mark.slow
def test_the_record_says_whose_it_is(told) -> None:  # type: ignore[no-untyped-def]
    text, record, _ = told
    text = " ".join(text.split())
    assert record["format"] == "tapestry-egg measurement 1" and record["steps"] == 2
    assert record["target"] == "cpu:4" and record["device"] == "cpu"
    assert record["step_seconds"] > 0 and record["planned_seconds"] > 0
    assert f"plan {record['plan']} of step, planned for cpu:4, run on cpu" in text
    assert "What if: " in text and "times the bandwidth of every link" in text


def test_only_a_compiled_plan_is_measured() -> None:
    with pytest.raises(te.TapestryError, match="cannot be measured"):
        te.measure(print)  # type: ignore[arg-type]


def test_devices_with_planes_of_their_own() -> None:
    """A GPU's plane tells each operation on the line of operations, and again on its streams."""

    def event(name: str, **stats: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, duration_ns=2e3, stats=tuple(stats.items()))

    ops = [event("%dot.1 = f32[8]", hlo_module="jit_step"), event("x", hlo_op="add.2")]
    ops.append(event("y", hlo_op="mul.3", hlo_module="jit_other"))
    lines = [
        SimpleNamespace(name="XLA Ops", events=ops),
        SimpleNamespace(name="Stream #7(Compute)", events=ops),
        SimpleNamespace(name="XLA Modules", events=[event("jit_step", hlo_module="jit_step")]),
    ]
    plane = SimpleNamespace(name="/device:GPU:1", lines=lines)
    host = SimpleNamespace(
        name="/host:CPU", lines=[SimpleNamespace(name="python", events=[event("call")])]
    )
    assert list(_events([host, plane], "jit_step")) == [
        ("dot.1", "/device:GPU:1", pytest.approx(2e-6)),
        ("add.2", "/device:GPU:1", pytest.approx(2e-6)),
    ]


def test_kernels_of_gpus_are_read_off_their_streams() -> None:
    """Which have no line of operations: every kernel says of which operation and module it is."""
    kernels = [
        SimpleNamespace(name=name, duration_ns=2000.0, stats=tuple(said.items()))
        for name, said in (
            ("nvjet_hsh", {"hlo_op": "dot.3", "hlo_module": "jit_step"}),
            ("copy", {"hlo_op": "copy", "hlo_module": "jit_copy"}),
            ("memset", {}),
        )
    ]
    stream = SimpleNamespace(name="Stream #14(Compute)", events=kernels)
    gpu = SimpleNamespace(name="/device:GPU:0", lines=[stream])
    found = list(_events([gpu], "jit_step"))
    assert found == [("dot.3", "/device:GPU:0", pytest.approx(2e-6))]
