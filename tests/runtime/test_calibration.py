"""Calibration in a process of its own: this machine's times become a target that plans are for."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds, kernel_seconds
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.target import load_target
from tapestry_egg.runtime.measure.calibrated_target import write_calibration
from tapestry_egg.runtime.measure.calibration import Calibration, driver_watts, like_target

SIZES = (64, 256)
FOUND = Calibration(
    platform="gpu",
    device="NVIDIA H100 80GB HBM3",
    devices=4,
    launch=2e-6,
    copy_rate=2e12,
    vector_rate=5e13,
    products={
        (1, m, n, k, "float32"): 1e-6 + m * n * k / 1e12
        for m in SIZES
        for n in SIZES
        for k in SIZES
    },
    collectives={
        (kind, group, size): 1e-5 * group + size / 1e11
        for kind in ("all_gather", "all_reduce")
        for group in (2, 4)
        for size in (1024, 1 << 20)
    },
    watts=(80.0, 650.0),
    memory=70_000_000_000,
)  # fmt: skip


def rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(x for x in path.read_text().splitlines() if x[0] != "#"))


@pytest.mark.slow
def test_eight_devices_of_a_cpu_are_measured_and_read_back(tmp_path: Path) -> None:
    out = tmp_path / "here.yaml"
    words = [sys.executable, "-m", "tapestry_egg", "calibrate", "--quick", "--json", "-o", str(out)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["target"] == f"{out}:8" and said["products"] == 8 and said["collectives"] == 24
    assert "measured" in done.stderr  # progress
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "here.yaml", "here_collectives.csv", "here_matmuls.csv",
    ]  # fmt: skip
    t, mesh = load_target(said["target"]), MeshShape(("x",), (8,))
    for row in rows(tmp_path / "here_matmuls.csv"):
        shape = [float(row[x]) for x in ("batch", "m", "n", "k")]
        gemm = Gemm(*shape, "float32", "float32", "float32")
        found = kernel_seconds(0.0, 0.0, "float32", t, True, gemm)
        assert 0 < found and 0 < float(row["float32*float32->float32"]) < 1e6
    times = [r for r in rows(tmp_path / "here_collectives.csv") if r["kind"] == "all_reduce"]
    (eight,) = [r for r in times if r["group"] == "8"]
    if float(eight["4096"]) <= float(eight["65536"]):
        found = collective_seconds("all_reduce", 65536.0, (0,), mesh, t)
        assert found == pytest.approx(float(eight["65536"]) * 1e-6)


def test_what_was_measured_is_what_the_target_says(tmp_path: Path) -> None:
    t = write_calibration(tmp_path / "mine.yaml", FOUND)
    assert t == load_target(f"{tmp_path}/mine.yaml:4") and t.name == "mine" and t.devices == 4
    assert t.hbm_bytes == 70_000_000_000 and t.hbm_bytes_per_second == 2e12
    assert t.launch_seconds == 2e-6 and t.rate("float32", False) == 5e13
    assert (t.power.idle_watts, t.power.max_watts) == (80, 650)
    assert dict(t.peak)["float32"] == pytest.approx(2 * 256**3 / (1e-6 + 256**3 / 1e12), rel=1e-5)
    mesh = MeshShape(("x", "y"), (2, 2))
    measured = collective_seconds("all_reduce", 2.0**20, (1,), mesh, t)
    assert measured == pytest.approx(2e-5 + 2**20 / 1e11, rel=1e-4)
    # Outer links are those of the known target, and a group of hosts is possible.
    assert [x.name for x in t.levels] == [x.name for x in load_target("h100:1").levels]
    assert load_target(f"{tmp_path}/mine.yaml:2x4").devices == 8


def test_one_device_without_a_driver_has_no_links(tmp_path: Path) -> None:
    one = replace(FOUND, devices=1, collectives={}, watts=None, memory=None)
    t, h100 = write_calibration(tmp_path / "one.yaml", one), load_target("h100:1")
    assert t.collectives is None and t.matmuls is not None
    assert t.power.max_watts == h100.power.max_watts and t.hbm_bytes == h100.hbm_bytes
    assert t.levels[0].bytes_per_second == pytest.approx(h100.levels[0].bytes_per_second)


def test_a_torus_keeps_its_shape(tmp_path: Path) -> None:
    tpu = replace(FOUND, platform="tpu", device="TPU v5 lite", watts=None)
    t = write_calibration(tmp_path / "tpu.yaml", tpu)
    assert t.levels[0].kind == "torus" and t.levels[0].max == (16, 16)


def test_unknown_devices_need_a_likeness(tmp_path: Path) -> None:
    assert like_target("NVIDIA H200", "gpu") == "h200" and like_target("TPU v6e", "tpu") == "v6e"
    strange = replace(FOUND, device="Abacus 3000")
    with pytest.raises(TargetError, match="no known target is like 'Abacus 3000'"):
        write_calibration(tmp_path / "mine.yaml", strange)
    assert not list(tmp_path.iterdir())
    assert write_calibration(tmp_path / "mine.yaml", strange, "a100").power.max_watts == 650
    with pytest.raises(TargetError, match="no name of a target file"):
        write_calibration(tmp_path / "mine.txt", FOUND)


def test_a_driver_that_is_not_there_or_talks_nonsense(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert driver_watts() is None
    tool = tmp_path / "nvidia-smi"
    for said, watts in (("95.5, 700.00", (95.5, 700.0)), ("[N/A], 700.00", None), ("", None)):
        tool.write_text(f"#!/bin/sh\necho '{said}'\n")
        tool.chmod(0o755)
        assert driver_watts() == watts
