"""The programs of the zoo that are nowhere else: they learn, trace, and are what XLA runs."""

from __future__ import annotations

import importlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import tapestry_egg as te
from benchmarks import bench_long, zoo

pytestmark = pytest.mark.slow  # to compile


@pytest.mark.long
@pytest.mark.parametrize("name", ["dlrm", "pinn", "unet"])
def test_it_learns_and_is_the_same_program(name: str) -> None:
    step, (state, *batch) = importlib.import_module(f"models.{name}").example()
    program = te.trace(step, state, *batch)
    run, losses = jax.jit(step), []
    for got, want in zip(
        jax.tree.leaves(program(state, *batch)), jax.tree.leaves(run(state, *batch)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)
    for _ in range(20):
        state, value = run(state, *batch)
        losses.append(float(value))
    assert losses[-1] < 0.9 * losses[0]


UNROLLED = ("ViT-H", "GPT-3 175B", "LoRA on a GPT of 1.3B", "two layers of Mamba")
FULL = [
    pytest.param(x, id=x.name, marks=[pytest.mark.long] if x.name in UNROLLED else [])
    for x in zoo.FULL
]


@pytest.mark.parametrize("entry", FULL)
def test_full_sizes_trace_as_shapes(entry: zoo.Entry) -> None:
    assert zoo.program(entry).graph.size > 10


@pytest.mark.long
def test_a_long_step_takes_less_memory_than_fsdp_by_hand() -> None:
    long = bench_long.long_step(bench_long.SMALL)
    written, hand = (bench_long.by_hand(long, 2.0, merge) for merge in (False, True))
    layouts = set(jax.tree.leaves(long.layouts))
    assert layouts == {PartitionSpec("x"), PartitionSpec(None, "x")} and not hand.rules
    front = bench_long.found(long, 2.0)
    least = min(p.costs.peak_bytes for p in front)
    assert least < 0.95 * min(written.costs.peak_bytes, hand.costs.peak_bytes)
    assert hand.costs.seconds < 0.6 * written.costs.seconds
    # Beside FSDP with its collectives merged: nearly as fast where no more is held, and much faster
    # where hardly more is.
    for more, slower in ((1.0, 1.02), (1.03, 0.95)):
        within = [p for p in front if p.costs.peak_bytes <= more * hand.costs.peak_bytes]
        assert min(p.costs.seconds for p in within) < slower * hand.costs.seconds
