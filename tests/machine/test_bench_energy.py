"""The benchmark of measured joules: what it counts of a row, and its two predictions."""

from dataclasses import astuple

import pytest

from benchmarks.bench_energy import machine, predicted, predicted_seconds, work

ROW = {
    "dp": "2", "tp": "2", "pp": "1", "layers": "1", "hidden": "1024", "ffn": "4096", "seq": "128",
    "mbs": "1", "gbs": "2", "heads": "8", "kv_heads": "8", "clock_mhz": "1050",
    "precision_name": "float16",
}  # fmt: skip


def test_work_by_hand() -> None:
    weights = 4 * 1024**2 + 3 * 1024 * 4096
    tokens = 2 * 128
    layer = 2 * tokens * weights + 4 * 2 * 128 * 128 * 1024
    done = work(ROW)
    assert done.flops == (4 * layer + 6 * tokens * 1024 * 152_064) / 4
    assert done.hbm_bytes - done.beside_bytes == 8 * weights / 2
    assert done.bubble == 0
    assert work({**ROW, "pp": "2", "dp": "1"}).bubble == pytest.approx(1 / 3)


def test_a_step_takes_all_its_parts_and_waits_for_its_pipeline() -> None:
    done, target = work(ROW), machine(ROW)
    seconds = predicted_seconds(ROW)
    assert seconds > done.flops / target.rate("float16", True)
    piped = {**ROW, "pp": "2", "dp": "1"}
    busy = predicted_seconds(piped) * (1 - work(piped).bubble)
    assert busy < predicted_seconds(piped)
    assert all(x >= 0 for x in astuple(done))
    assert predicted(ROW, 2 * seconds) > predicted(ROW, seconds)
