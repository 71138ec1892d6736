"""The benchmark of measured runs: its programs, their pins, its tables."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from benchmarks.measured import rows, tables
from benchmarks.measured.predict import Prediction, dispatches, predict
from benchmarks.measured.predictions import predictions
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


def test_dispatches_count_loops_and_layers() -> None:
    def step(x: Any, stacked: Any) -> Any:
        y = jax.lax.fori_loop(0, 5, lambda _, y: jnp.sin(y) * 2.0, x)
        return y, stacked + 1.0

    graph = te.trace(step, jnp.ones(3), jnp.ones((7, 3))).graph
    once, of_layers = dispatches(graph), dispatches(graph, 7)
    assert of_layers - once == 6
    assert once > 10


def judged(seconds: float, measured: float, peak: float = 1e9, **changes: Any) -> tables.Judged:
    made = Prediction(seconds, seconds, peak, 0.0, 0.0, 10.0, 0.0)
    known = run(seconds=measured, peak_bytes=2e9, ran=measured > 0, **changes)
    return tables.Judged(known, made, seconds, 0.0)


def test_another_attention_kernel_takes_what_its_rates_say() -> None:
    made = Prediction(
        *(9.0, 9.0, 1e9, 0.0, 0.0, 10.0, 0.0),
        attention_seconds=2.0,
        attention_flops=6e12,
        attention_backward_flops=8e12,
    )
    assert tables.with_attention(run(), made) == 9.0
    assert tables.with_attention(run(attention=(2e12, 4e12)), made) == 9.0 - 2.0 + 3.0 + 2.0


def test_errors_and_the_one_factor() -> None:
    rows_ = [judged(1.0, 2.0, micro_batch=k, group=("1B", "1")) for k in range(4)]
    assert tables.factor(rows_) == pytest.approx(2.0)
    raw, scaled = tables.errors(rows_), tables.errors(rows_, 2.0)
    assert raw and scaled and (raw.median, scaled.median) == (1.0, 0.0)
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


def test_hosts_that_dispatch_slower_than_devices_compute_pace_a_step() -> None:
    known = run(seconds=1.0)
    made = Prediction(1.0, 1.0, 1e9, 0.0, 0.0, 300.0, 100.0)
    (row,) = tables.judged([known], {known.key(): made}, 0.01)
    assert row.seconds == 4.0
    (row,) = tables.judged([known], {known.key(): made}, 0.01, host=2.0)
    assert row.seconds == 8.0


def test_the_factor_on_the_hosts_time_is_that_of_runs_that_it_paces() -> None:
    made = Prediction(1.0, 1.0, 1e9, 0.0, 0.0, 300.0, 100.0)
    slow = [tables.Judged(run(seconds=s, group=("1B", "1")), made, 1.0, 4.0) for s in (5, 6, 9)]
    quick = tables.Judged(run(seconds=3.0, group=("1B", "1")), made, 1.0, 0.5)
    other = tables.Judged(run(seconds=40.0, group=("8B", "1")), made, 1.0, 4.0)
    assert tables.host_factor([*slow, quick, other]) == 1.5
    assert tables.host_factor([quick]) == 1.0


def test_gradients_are_summed_beside_the_last_backward_pass() -> None:
    """Two micro-batches of 3 s each: 2 s of the second are its backward pass."""
    made = Prediction(11.0, 11.0, 1e9, 0.0, 0.0, 0.0, 0.0, data_seconds=5.0, reducing_seconds=4.0)
    known = run(micro_batches=2, seconds=1.0)
    (row,) = tables.judged([known], {known.key(): made}, 0.01)
    assert row.seconds == pytest.approx(9.0)
    short = replace(made, reducing_seconds=1.5)
    (row,) = tables.judged([known], {known.key(): short}, 0.01)
    assert row.seconds == pytest.approx(9.5)


@pytest.mark.slow
def test_predictions_are_kept_and_those_of_other_code_made_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    made = Prediction(1.0, 1.0, 1e9, 0.0, 0.0, 1.0, 1.0)
    line = {"key": run().key(), "code": "of before", "made": made.as_dict()}
    file.write_text(json.dumps(line) + "\n")
    assert predictions([run()], file, stale=True, seconds=0.0) == {run().key(): made}
    assert predictions([run()], file, seconds=0.0) == {}


def test_rows_are_read_from_a_directory(tmp_path: Path) -> None:
    (tmp_path / "microbench.csv").write_text(
        "# source\nkind,hw,time_us\nlaunch,a,10\nlaunch,a,30\nlaunch,a,14\nother,a,99\n"
    )
    assert rows.launch_seconds(tmp_path) == pytest.approx(14e-6)


def test_a_pipeline_has_its_bubble() -> None:
    staged = run(stages=8, interleaved=2, micro_batches=7)
    assert rows.pipelined(staged, 1.0) == pytest.approx(1.5)
