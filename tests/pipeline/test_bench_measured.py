"""The benchmark of measured runs: its programs, their pins, its tables."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from benchmarks.measured import rows, tables
from benchmarks.measured.predict import Prediction, predict
from benchmarks.measured.programs import Cut, Model, arguments, shapes, train_step

SMALL = Model(layers=2, width=64, heads=4, hidden=128, vocabulary=256, sequence=32)


def run(**changes: Any) -> rows.Run:
    base = rows.Run("small", ("small", "1"), SMALL, "h100:4", 2, 2, 0, 1, 2)
    return replace(base, **changes)


def parameters(tensor: int) -> Any:
    """The same random parameters, cut for one device or two."""
    rng = np.random.default_rng(0)
    whole = {
        k: jax.tree.map(lambda s: rng.normal(size=s) * 0.1, v, is_leaf=lambda x: type(x) is tuple)
        for k, v in shapes(SMALL, 1).items()
    }
    layer = whole["layers"]
    if tensor == 2:
        q, k, v = np.split(layer["qkv"][:, 0], 3, axis=2)  # [layers, width, heads, head]
        halves = [
            np.concatenate([x[:, :, 2 * t : 2 * t + 2] for x in (q, k, v)], 2) for t in (0, 1)
        ]
        layer["qkv"] = np.stack(halves, 1)
        layer["wo"] = layer["wo"].reshape(2, 2, 2, 16, 64)
        layer["up"] = layer["up"].reshape(2, 64, 2, 2, 64).transpose(0, 3, 1, 2, 4)
        layer["down"] = layer["down"].reshape(2, 2, 64, 64)
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), whole)


def loss(cut: Cut) -> float:
    """The loss of a step on the same tokens."""
    params = parameters(cut.tensor)
    given = arguments(SMALL, cut, 2, 2)
    state = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), given[1])
    tokens = np.random.default_rng(1).integers(0, 256, given[2].shape).astype(np.int32)
    program = te.trace(train_step(SMALL, cut), *given)
    return float(program(params, state, jnp.asarray(tokens))[2])


@pytest.mark.long
def test_a_program_cut_among_devices_computes_the_same() -> None:
    alone, together = loss(Cut(1, 1)), loss(Cut(2, 2))
    assert 4 < alone < 8
    assert together == pytest.approx(alone, rel=0.01)


@pytest.mark.long
def test_tensor_parallelism_moves_what_megatrons_does_and_no_more() -> None:
    # Per layer and micro-batch: f and g, forward and backward, and f's gather again.
    one = predict(run())
    more = predict(run(model=replace(SMALL, layers=4)))
    assert (more.collectives - one.collectives) / 2 == 2 * (2 * 4 + 2)
    apart = predict(run(sequence_parallel=False))
    assert apart.wire_bytes > 0


@pytest.mark.long
def test_states_over_data_take_less_memory_and_micro_batches_more_time() -> None:
    wide = replace(SMALL, width=512, hidden=1024, vocabulary=4096)
    whole, divided = (predict(run(model=wide, zero=z)).peak_bytes for z in (0, 1))
    leaves = jax.tree.leaves(shapes(wide, 2), is_leaf=lambda x: type(x) is tuple)
    count = sum(np.prod(s) for s in leaves)
    assert whole - divided >= 0.9 * 12 * count / 2 / 2
    assert predict(run(micro_batches=8)).seconds > 2 * predict(run()).seconds


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
