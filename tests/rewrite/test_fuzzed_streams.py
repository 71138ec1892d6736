"""Programs drawn at random, as they are and streamed: numbers of the reference on either side."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.rewrite.streams.blocks import with_blocks
from tapestry_egg.rewrite.streams.micro_batches import batch_along
from tapestry_egg.rewrite.streams.streamed import count_streams, with_streams
from tapestry_egg.tracing.trace import trace
from tests.rewrite import attention_variants, block_programs
from tests.rewrite.block_programs import agree, numbers

Array = Any
SEEDS = st.integers(0, 2**32 - 1)
#: Float32, beside the greatest number of a result.
ATTENTION = 2e-5


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_blocks_of_rows_give_what_the_whole_gives(seed: int) -> None:
    with block_programs.traced(seed) as (graph, inputs):
        made = with_blocks(graph)
        if made is not graph:
            agree(made, inputs, numbers(graph, inputs))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_a_batch_in_parts_gives_what_the_whole_gives(seed: int) -> None:
    """Any dim of any input as the batch."""
    with block_programs.traced(seed) as (graph, inputs):
        wanted = numbers(graph, inputs)
        for place, v in enumerate(graph.inputs):
            for dim in range(len(graph.values[v].shape)):
                found = batch_along(graph, place, dim)
                if found is None or len(found.how) < 2:
                    continue
                steps = next(k for k in range(2, found.rows + 1) if found.rows % k == 0)
                made = found.split(steps)
                if made is not None:
                    agree(made, inputs, wanted)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(SEEDS)
def test_attention_that_is_recognised_is_attention(seed: int) -> None:
    """Numbers of the program itself, or as near the truth. Where it gives NaN, anything."""
    function, inputs = attention_variants.variant(random.Random(seed))
    check_attention(function, inputs)


def check_attention(function: Any, inputs: Sequence[Array]) -> BlockGraph:
    graph = trace(function, *inputs).graph
    made = with_streams(graph)
    if made is graph:
        return made
    verify_graph(made)
    with jax.enable_x64(True):
        exact = jax.tree.leaves(function(*[x.astype(np.float64) for x in inputs]))
    for got, want, true in zip(numbers(made, inputs), numbers(graph, inputs), exact, strict=True):
        kept = np.isfinite(want) & np.isfinite(np.asarray(true))
        scale = np.abs(want[kept]).max(initial=1e-3)
        theirs = np.abs(want - true)[kept].max(initial=0.0)
        ours = np.abs(got - true)[kept].max(initial=0.0)
        assert ours <= 4.0 * theirs + ATTENTION * scale
    return made


def _inputs(rows: int = 6) -> list[Array]:
    rng = np.random.default_rng(0)
    return [np.float32(rng.normal(size=(2, rows, 2, 4))) for _ in range(3)]


@pytest.mark.slow
def test_a_factor_of_the_weights_counts_however_near_to_one() -> None:
    def attention(q: Array, k: Array, v: Array) -> Array:
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p * 1.004, v)

    def loss(q: Array, k: Array, v: Array) -> Array:
        return jnp.sin(attention(q, k, v)).sum()

    for function in (attention, jax.grad(loss, (0, 1, 2))):
        check_attention(function, _inputs())


@pytest.mark.parametrize(("fill", "kept"), [(-10.0, False), (-1e30, True)])
def test_what_is_added_to_a_row_shows_beside_a_small_fill(fill: float, kept: bool) -> None:
    """A softmax does not see what is added to all of a row, but for the numbers of its mask."""

    def attention(q: Array, k: Array, v: Array) -> Array:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) - 3.0 * q[:, :, 0, 0][:, None, :, None]
        mask = jnp.arange(6)[:, None] // 2 == jnp.arange(6)[None, :] // 2
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, s, fill)), v)

    assert (count_streams(check_attention(attention, _inputs())) == 1) == kept
