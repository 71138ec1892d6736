"""`benchmarks.bench_device` from plans to table, on whatever device there is."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from benchmarks import bench_device
from benchmarks.device.kernels import Kernel, kernels
from benchmarks.programs import Made


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    value, grad = jax.value_and_grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
    return w - 0.1 * grad, value


@pytest.mark.slow
def test_plans_are_made_run_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    types = (
        jax.ShapeDtypeStruct((32, 16), jnp.float32),
        jax.ShapeDtypeStruct((8, 32), jnp.float32),
    )
    tiny = {"tiny": Kernel("pass", lambda x: x + 1, types[:1])}
    monkeypatch.setattr(bench_device, "kernels", lambda: tiny)
    monkeypatch.setattr(bench_device, "names", lambda: ["step"])
    monkeypatch.setattr(bench_device, "made", lambda name: Made(step, types, donated=(0,)))
    monkeypatch.setattr(bench_device, "LONG", 0.01)
    bench_device.plan(tmp_path, "cpu:1")
    rows = tmp_path / "rows.json"
    bench_device.run(tmp_path, rows, 1e9, [], 2, ["step"])
    told = json.loads(rows.read_text("utf-8"))["rows"]
    assert not [r for r in told if "error" in r or "skipped" in r]
    (kernel,) = (r for r in told if r["name"] == "tiny")
    assert 0 < kernel["device"] and kernel["planned"] > 0
    *plans, profile, jitted = (r for r in told if r["name"] == "step")
    assert jitted["plan"] == "jax.jit" and profile["plan"].endswith("by kernel")
    assert "dot_general" in [r[0] for r in profile["rows"]]
    for row in plans:
        assert row["sizes"] == pytest.approx(jitted["sizes"], rel=1e-5)
    capsys.readouterr()
    bench_device.show(rows)
    assert capsys.readouterr().out.count("\nstep") == len(plans) + 2


def test_every_kernel_has_a_name_and_arguments_that_it_takes() -> None:
    every = kernels()
    assert len(every) > 60
    for name in ("add one, 1 MiB", "transpose", "sort", "top 8", "adam", "float32 1x512x512x512"):
        jax.eval_shape(every[name].function, *every[name].types)
