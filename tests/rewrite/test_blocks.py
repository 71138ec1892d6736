"""The largest product of a program in blocks of rows: losses over vocabularies without logits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.pipeline import Settings
from tapestry_egg.rewrite.streams import blocks
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.forms_on_devices import draw

Array = Any
S = jax.ShapeDtypeStruct
VOCABULARY = 512


def integers(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def one_hot(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def picked(logits: Array, labels: Array) -> Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen[..., 0]


def step(loss: Callable[..., Array]) -> Callable[..., Array]:
    def mean(x: Array, w: Array, labels: Array) -> Array:
        return loss((x @ w).astype(jnp.float32), labels).mean()

    return jax.value_and_grad(mean, (0, 1))


def arguments(dtype: Any, tokens: int = 64, vocabulary: int = VOCABULARY) -> list[S]:
    return [
        S((4, tokens, 16), dtype),
        S((16, vocabulary), dtype),
        S((4, tokens), jnp.int32),
    ]


def largest(graph: BlockGraph) -> int:
    mine = [graph.values[v].size for op in graph.operations for v in op.outputs]
    return max([0, *mine, *(largest(r) for op in graph.operations for r in op.regions)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("loss", [integers, one_hot, picked])
def test_logits_are_there_a_block_at_a_time(loss: Callable[..., Array], dtype: Any) -> None:
    shapes = arguments(dtype)
    graph = trace(step(loss), *shapes).graph
    made = blocks.with_blocks(graph)
    verify_graph(made)
    assert largest(made) * 16 == largest(graph)
    xs = draw(shapes, below=VOCABULARY)
    for got, want in zip(jax.jit(emit(made))(*xs), jax.jit(emit(graph))(*xs), strict=True):
        a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.abs(a - b).max() <= (1e-5 if dtype == jnp.float32 else 1e-2) * np.abs(b).max()


def test_what_needs_all_rows_at_once_stays() -> None:
    """Logits that leave the program, and rows that are normalised by each other."""

    def kept(x: Array, w: Array, labels: Array) -> Array:
        logits = x @ w
        return integers(logits, labels).mean(), logits

    def together(x: Array, w: Array, labels: Array) -> Array:
        logits = x @ w
        return integers(logits / logits.std((0, 1)), labels).mean()

    for function in (kept, together):
        graph = trace(function, *arguments(jnp.float32)).graph
        assert blocks.with_blocks(graph) is graph


@pytest.mark.slow
def test_a_plan_holds_less_and_gives_the_numbers(tmp_path: Path) -> None:
    """On eight devices; and from disk, where the loop is made again."""
    shapes = arguments(jnp.float32, 512, 8192)
    program = te.trace(step(integers), *shapes)
    front = te.optimize(program, target="cpu:8", settings=Settings(work=4.0))
    plans = [p for p in front.plans if blocks.RULE in p.rules]
    assert plans
    xs = draw(shapes, below=8192)
    got = te.compile(plans[-1], jax.devices()[:8])(*xs)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(program(*xs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    front.save(tmp_path / "front")
    assert [p.costs for p in te.load(tmp_path / "front").plans] == [p.costs for p in front.plans]
