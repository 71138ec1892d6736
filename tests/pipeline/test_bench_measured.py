"""The benchmark of measured runs: its programs, their pins, its tables."""

import json
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import tapestry_egg as te
from benchmarks.bench_measured import mosaic
from benchmarks.measured import held, nanotron, rows, tables
from benchmarks.measured.allocator import MIB, Allocator, OutOfMemory
from benchmarks.measured.predict import Prediction, by_rings, dispatches, predict
from benchmarks.measured.predictions import predictions
from benchmarks.measured.programs import Cut, Model, arguments, shapes, train_step
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import PlannedCollective

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
    slower = run(attention=(2e12, 4e12), data=1, micro_batches=1)
    assert tables.with_attention(slower, made) == 9.0 - 2.0 + 3.0 + 2.0
    (row,) = tables.judged([slower], {slower.key(): made}, 0.0)
    assert row.seconds == 12.0


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
    slow = [
        tables.Judged(run(seconds=s + 2.0, group=("1B", "1")), made, 1.0, 4.0, after_seconds=2.0)
        for s in (5, 6, 9)
    ]
    quick = tables.Judged(run(seconds=3.0, group=("1B", "1")), made, 1.0, 0.5)
    other = tables.Judged(run(seconds=40.0, group=("8B", "1")), made, 1.0, 4.0)
    assert tables.host_factor([*slow, quick, other]) == 1.5
    assert tables.host_factor([quick]) == 1.0


def test_gradients_are_summed_beside_the_last_backward_pass_or_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two micro-batches of 3 s each: 2 s of the second are its backward pass."""
    made = Prediction(11.0, 11.0, 1e9, 0.0, 0.0, 0.0, 0.0, data_seconds=5.0, reducing_seconds=4.0)
    wrapped, alone = (run(micro_batches=2, seconds=1.0, zero=z) for z in (0, 1))
    for sums, seconds in ((5.0, 10.0), (1.5, 7.0)):
        monkeypatch.setattr(nanotron, "summing_seconds", lambda _, sums=sums: sums)
        (row,) = tables.judged([wrapped], {wrapped.key(): made}, 0.01)
        assert row.seconds == pytest.approx(seconds)
        # ZeRO 1: all of it, and copies of every array on either device.
        (row,) = tables.judged([alone], {alone.key(): made}, 0.01)
        copies = 2 * len(nanotron.arrays(SMALL, 2)) * 0.01
        assert row.seconds == pytest.approx(7.0 + sums + copies)
        assert row.after_seconds == pytest.approx(copies)
    streamed = replace(made, ring_seconds=0.5)
    (more,) = tables.judged([wrapped], {wrapped.key(): streamed}, 0.01)
    (less,) = tables.judged([wrapped], {wrapped.key(): made}, 0.01)
    assert more.seconds == pytest.approx(less.seconds + 0.5)


def test_buckets_hold_all_gradients_from_the_last_array_on() -> None:
    model = Model(layers=4, width=2048, heads=16, hidden=8192, vocabulary=32768, sequence=8)
    arrays = nanotron.arrays(model, 2)
    leaves = jax.tree.leaves(shapes(model, 2), is_leaf=lambda x: type(x) is tuple)
    norms = 2048 * (2 * model.layers + 1)  # every device has them whole
    assert sum(arrays) - norms == (sum(int(np.prod(s)) for s in leaves) - norms) // 2
    found = nanotron.buckets(model, 2)
    assert sum(found) == 2 * sum(arrays)
    assert found[0] == 2 * arrays[-1]  # the head alone is more than the first may hold
    assert min(found[1:-1]) >= nanotron.BUCKET and found[1] == 2 * sum(arrays[-6:-1])
    # The first one is full with the first large array.
    tied = nanotron.buckets(replace(model, tied=True), 2)
    assert tied[0] == 2 * sum(arrays[-5:-1]) < nanotron.BUCKET
    # Bucket by bucket takes longer than at once, over hosts.
    spread = run(model=model, target="p5:4x8", data=4, tensor=8)
    assert nanotron.summing_seconds(spread) > nanotron.summing_seconds(replace(spread, zero=1)) > 0
    at_once = collective_seconds(
        "all_reduce", 4.0 * sum(nanotron.arrays(model, 8)), (0,), MeshShape(("d", "t"), (4, 8)),
        load_target("p5:4x8"),
    )  # fmt: skip
    assert nanotron.summing_seconds(replace(spread, zero=1)) == pytest.approx(at_once)
    assert nanotron.summing_seconds(replace(spread, data=1)) == 0.0


def test_blocks_are_split_joined_and_kept_for_other_streams() -> None:
    memory = Allocator(capacity=100 * MIB)
    small, first = memory.take(600), memory.take(5 * MIB)
    assert (small.size, memory.reserved) == (1024, 22 * MIB)  # segments of 2 and of 20 MiB
    second = memory.take(12 * MIB)
    assert memory.reserved == 22 * MIB  # the rest of that segment
    memory.give(first)
    memory.give(second, done=3.0)
    assert memory.take(16 * MIB, now=2.0).size == 16 * MIB and memory.reserved == 38 * MIB
    assert memory.take(16 * MIB, now=3.0).address == first.address and memory.reserved == 38 * MIB
    # What is left of a large block by up to 1 MiB stays with it.
    assert memory.take(2 * MIB + 1).size == 2 * MIB + 512
    whole = [memory.take(20 * MIB) for _ in range(3)]
    assert memory.reserved == 98 * MIB and memory.flushes == 0
    for block in whole[:2]:
        memory.give(block)
    assert memory.take(39 * MIB).size == 40 * MIB and memory.flushes == 1
    with pytest.raises(OutOfMemory):
        memory.take(40 * MIB)
    assert memory.most_in_use <= memory.reserved


def test_streams_that_collectives_read_are_kept_where_the_device_is_the_slower() -> None:
    model = Model(layers=4, width=2048, heads=16, hidden=8192, vocabulary=32768, sequence=2048)
    known = run(model=model, target="p5:2x8", tensor=8, micro_batch=8, micro_batches=1)
    stream = 2 * 8 * 2048 * 2048
    behind = held.reserved_bytes(known, 0.0)
    level = held.reserved_bytes(known, 100.0)
    assert behind - level > 4 * stream
    assert level < stream  # what does not fit elsewhere
    assert held.reserved_bytes(replace(known, micro_batch=512), 0.0) == float("inf")
    (row,) = tables.with_reserved([judged(1.0, 2.0)])
    assert row.reserved > 0 and row.peak_bytes == 1e9 + row.reserved
    assert not replace(row, reserved=float("inf")).fits


def test_three_steps_of_up_to_three_micro_batches_are_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After each of which the host waits for the device, to log it."""
    replay, asked = held._Steps.replay, []

    def steps(known: rows.Run, *counts: int) -> held._Steps:
        made = held._Steps(known, 0.0)
        replay(made, *counts)
        return made

    def noted(self: held._Steps, *counts: int) -> int:
        asked.append(counts)
        return replay(self, *counts)

    monkeypatch.setattr(held._Steps, "replay", noted)
    for count, replayed in ((2, 2), (8, 3)):
        held.reserved_bytes(run(micro_batches=count), 0.0)
        assert asked[-2:] == [(1, 1), (3, replayed)]
    one, two, more = (steps(run(), 1, n).launched for n in (1, 2, 3))
    assert more - two == two - one > 0
    assert steps(run(), 2, 3).launched == 2 * more
    assert steps(run(), 1, 1).host == steps(run(), 1, 1).device > 0.0


def test_what_ran_in_rings_is_priced_as_rings() -> None:
    """Two sums and three exchanges of the stream over two hosts; another value's sum stays."""
    spread = run(target="p5:2x8", data=1, tensor=16)
    stream = 2.0 * SMALL.sequence * SMALL.width
    mesh, machine = MeshShape(("d", "t"), (1, 16)), load_target("p5:2x8")
    plan: Any = SimpleNamespace(origin=SimpleNamespace(machine=machine), mesh=mesh)
    kinds = (
        ("all_reduce", 2, 1),
        ("all_to_all", 3, 1),
        ("all_reduce", 7, 0.5),
        ("all_gather", 4, 1),
    )
    moved = [
        PlannedCollective(kind, ("t",), 16, int(stream * part), 0.0, count)
        for kind, count, part in kinds
    ]

    def takes(kind: str, block: float) -> float:
        return collective_seconds(kind, block, (1,), mesh, machine)

    more = 2 * (takes("reduce_scatter", stream) - takes("all_reduce", stream))
    more += 3 * (takes("all_gather", stream / 16) - takes("all_to_all", stream))
    assert by_rings(spread, moved, plan) == pytest.approx(more) and more > 0


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


def test_what_is_gathered_beside_products_takes_no_time_of_its_own() -> None:
    made = Prediction(
        seconds=1.2, serial_seconds=1.2, peak_bytes=0, joules=0, wire_bytes=0, dispatches=10,
        collectives=0, data_seconds=0.3,
    )  # fmt: skip
    found = {run().key(): made}
    console = Console(file=StringIO())
    measured = replace(run(), seconds=1.0)
    told = mosaic([measured], found, 1e-3, console)["small"]
    assert told["predicted"] == told["devices"] == pytest.approx(0.9)
    told = mosaic([measured], found, 0.2, console)["small"]  # the host is the slower one
    assert told["predicted"] == pytest.approx(2.0)
    much = {run().key(): replace(made, data_seconds=0.8)}
    assert mosaic([measured], much, 1e-3, console)["small"]["devices"] == pytest.approx(0.8)


def test_a_pipeline_has_its_bubble() -> None:
    staged = run(stages=8, interleaved=2, micro_batches=7)
    assert rows.pipelined(staged, 1.0) == pytest.approx(1.5)
