"""The benchmark of measured runs: its programs, their pins, its tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measured import rows, tables
from benchmarks.measured.predict import Prediction
from benchmarks.measured.programs import Model

SMALL = Model(layers=2, width=64, heads=4, hidden=128, vocabulary=256, sequence=32)


def run(**changes: Any) -> rows.Run:
    base = rows.Run("small", ("small", "1"), SMALL, "h100:4", 2, 2, 0, 1, 2)
    return replace(base, **changes)


def judged(seconds: float, measured: float, peak: float = 1e9, **changes: Any) -> tables.Judged:
    made = Prediction(seconds, seconds, peak, 0.0, 0.0, 10.0, 0.0)
    known = run(seconds=measured, peak_bytes=2e9, ran=measured > 0, **changes)
    return tables.Judged(known, made, seconds, 0.0)


def test_errors_of_seconds_and_peaks() -> None:
    rows_ = [judged(1.0, 2.0, micro_batch=k, group=("1B", "1")) for k in range(4)]
    raw = tables.errors(rows_)
    assert raw and raw.median == 1.0
    peak = tables.peaks(rows_)
    assert peak and peak.bias == -0.5
    # What the framework's loss holds besides counts, for what fits, too.
    more = judged(1.0, 2.0, peak=1e9, loss_bytes=5e8)
    held = tables.peaks([more])
    assert held and held.bias == -0.25
    assert not judged(1.0, 2.0, peak=7.9e10, loss_bytes=2e9).fits


@pytest.mark.slow
def test_regret_is_of_the_first_choice_that_ran() -> None:
    group = [
        judged(1.0, 0.0, micro_batch=1),  # said to be the fastest, and failed
        judged(2.0, 9.0, micro_batch=2),
        judged(3.0, 3.0, micro_batch=3),
        judged(0.5, 3.0, peak=9e10, micro_batch=4),  # faster yet, but refused
    ]
    (choice,) = tables.choices(group)
    assert (choice.regret, choice.failed_before, choice.ran) == (3.0, 1, 3)
    said = tables.fit(group)
    assert (said.ran, said.said_to_fit, said.other_failures) == (3, 2, 1)


def test_runs_of_nanotron_have_its_attention_and_its_loss(tmp_path: Path) -> None:
    shape = {"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 131072, "seq": 4096}
    how = {"gpus": 16, "nodes": 2, "dp": 2, "tp": 8, "pp": 1, "zero": 1, "mbs": 4, "grad_acc": 32}
    ran = {"status": "ok", "step_s": "9.5", "gpu_mem_gb": "30", "row_consistent": 1, "tied": 0}
    line = {"model": "8B", **shape, **how, **ran}
    names, values = ",".join(line), ",".join(map(str, line.values()))
    failed = values.replace("ok,9.5,30", "failed_or_oom,,")
    (tmp_path / "ultrascale_h100.csv").write_text(f"# source\n{names}\n{values}\n{failed}\n")
    one, other = rows.ultrascale(tmp_path)
    assert one.attention == rows.FLASH_ATTENTION_2[128] and one.target == "p5:2x8"
    assert one.loss_bytes == 8.0 * 4 * 4096 * 131072 / 8 and one.peak_bytes == 30 * 2**30
    assert (one.seconds, one.ran, other.ran) == (9.5, True, False)


def test_runs_of_mosaic_are_fully_sharded_and_of_whole_micro_batches(tmp_path: Path) -> None:
    names = "source,model,layers,hidden,heads,ffn,vocab"
    names += ",seq,hw,chips,precision,mbs,gbs,recompute,tok_s_chip"
    of = "mosaicml/llm-foundry@1:README.md,MPT-7b,32,4096,32,16384,50368"
    lines = [
        f"{of},2048,h100_80gb,8,amp_bf16,6,96,none,10643",
        f"{of},2048,a100_80gb,16,amp_bf16,6,192,full,4641",
        f"{of},2048,h100_80gb,8,amp_bf16,6,100,none,10643",  # a part of a micro-batch
        f"{of},8192,h100_80gb,8,amp_bf16,1,8,none,10643",  # longer than is taken
        f"{of},2048,h100_80gb,8,amp_fp8,6,96,none,10643",
        f"{of},2048,a100_40gb,8,amp_bf16,6,96,none,10643",
        f"{of},2048,h100_80gb,512,amp_bf16,6,3072,none,10643",
    ]
    (tmp_path / "anchors_llm.csv").write_text("\n".join([names, *lines]))
    one, other = rows.mosaic(tmp_path)
    assert (one.target, one.data, one.zero, one.micro_batches, one.remat) == (
        *("h100:8", 8, 3, 2, "none"),
    )
    assert one.tokens / one.devices / one.seconds == pytest.approx(10643)
    assert one.attention == rows.FLASH_ATTENTION_2[128]
    assert (other.target, other.micro_batches, other.remat) == ("a100:2x8", 2, "full")
