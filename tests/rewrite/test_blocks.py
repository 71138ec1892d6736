"""The largest product of a program in blocks of rows: losses over vocabularies without logits."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.machine.target import load_target
from tapestry_egg.rewrite import fused_forms
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.recomputation.checkpoints import peak_alone
from tapestry_egg.rewrite.streams import blocks
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.forms_on_devices import draw
from tests.rewrite.loss_spellings import integers, largest

Array = Any
S = jax.ShapeDtypeStruct
VOCABULARY = 512


def one_hot(logits: Array, labels: Array) -> Array:
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(labels, logits.shape[-1]))


def picked(logits: Array, labels: Array) -> Array:
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)
    return -chosen[..., 0]


def numbered(logits: Array, labels: Array) -> Array:
    rows = jnp.arange(labels.shape[0])[:, None], jnp.arange(labels.shape[1])[None]
    return -jax.nn.log_softmax(logits)[(*rows, labels)]


def numbered_by_a_table(logits: Array, labels: Array) -> Array:
    rows = np.arange(labels.shape[0])[:, None], np.arange(labels.shape[1])[None]
    return -jax.nn.log_softmax(logits)[(*rows, labels)]


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


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("loss", [integers, one_hot, picked, numbered, numbered_by_a_table])
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


def table_with_a_start(x: Array, w: Array, labels: Array) -> Array:
    """Rows are added to a table that is not zero: it counts once."""
    return jnp.ones((8, w.shape[1]), x.dtype).at[labels].add(jax.nn.softmax(x @ w))


def greatest_of_each(x: Array, w: Array, labels: Array) -> Array:
    return jnp.ones((8, w.shape[1]), x.dtype).at[labels].max(jnp.sin(x @ w))


def rows_by_a_table(x: Array, w: Array, labels: Array) -> Array:
    """Every row of the product meets a row of a table."""
    return (w.T[labels, :16] * (jax.nn.softmax(x @ w) @ w.T)).sum(0)


def part_of_the_columns(x: Array, w: Array, labels: Array) -> Array:
    return jnp.cumsum(jax.nn.softmax((x @ w)[:, 3:401]), 1).sum(0)


def counted_columns(x: Array, w: Array, labels: Array) -> Array:
    scores = x @ w
    places = jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    return jnp.where(places > labels[:, None], scores, 0).sum(1)


def integer_sums(x: Array, w: Array, labels: Array) -> Array:
    return ((x @ w) > 1.0).astype(jnp.int8).sum(0, dtype=jnp.int8)


@pytest.mark.parametrize(
    "function",
    [
        rows_by_a_table,
        *(
            pytest.param(f, marks=pytest.mark.slow)
            for f in (
                table_with_a_start,
                greatest_of_each,
                part_of_the_columns,
                counted_columns,
                integer_sums,
            )
        ),
    ],
)
def test_blocks_give_what_the_whole_gives(function: Callable[..., Array]) -> None:
    check_blocks(function, streams=True)


def rows_by_number(x: Array, w: Array, labels: Array) -> Array:
    """Rows of the product are read where data say, which a block of them cannot tell."""
    return jax.nn.softmax(x @ w)[labels[:8]]


def running_sums(x: Array, w: Array, labels: Array) -> Array:
    return jnp.cumsum(jax.nn.softmax(x @ w), 0).sum(1)


def turned_around(x: Array, w: Array, labels: Array) -> Array:
    return (jnp.exp(x @ w)[::-1] * (x @ w)).sum(1)


def counted_rows(x: Array, w: Array, labels: Array) -> Array:
    scores = x @ w
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, scores.shape, 0) > 7, scores, 0).sum(1)


def padded_rows(x: Array, w: Array, labels: Array) -> Array:
    return jnp.pad(x @ w, ((0, 64), (0, 0))).sum(1)


def others_rows(x: Array, w: Array, labels: Array) -> Array:
    """Numbers of rows that count, but not from the first one."""
    return jax.nn.softmax(x @ w)[(jnp.arange(256) + 1) % 256, labels]


def rows_and_columns(x: Array, w: Array, labels: Array) -> Array:
    scores = jnp.tanh(x @ w)
    return (scores @ scores.T).sum(0)


@pytest.mark.parametrize(
    "function",
    [
        rows_by_number,
        running_sums,
        turned_around,
        counted_rows,
        padded_rows,
        others_rows,
        rows_and_columns,
    ],
)
def test_what_depends_on_the_place_of_rows_stays(function: Callable[..., Array]) -> None:
    check_blocks(function, streams=False)


def check_blocks(function: Callable[..., Array], streams: bool) -> None:
    columns = 512 if streams else 509  # a prime: there is nothing to cut but rows
    shapes = [S((256, 16), jnp.float32), S((16, columns), jnp.float32), S((256,), jnp.int32)]
    graph = trace(function, *shapes).graph
    made = blocks.with_blocks(graph)
    assert (made is not graph) == streams
    verify_graph(made)
    xs = draw(shapes, below=8)
    for got, want in zip(emit(made)(*xs), emit(graph)(*xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_blocks_that_are_the_same_by_both_rules_are_looked_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph = trace(step(picked), *arguments(jnp.float32)).graph
    assert blocks.with_blocks(graph) == blocks.with_blocks_of_largest(graph) != graph
    looked: list[BlockGraph] = []
    monkeypatch.setattr(
        fused_forms, "peak_alone", lambda g, target: looked.append(g) or peak_alone(g, target)
    )
    given = Form(graph)
    (lean,) = fused_forms._lean((given,), given, load_target("h100:8"), 0.0)
    assert lean.rules == (blocks.RULE,)
    assert all(a is b or a != b for a, b in combinations(looked, 2))


def test_what_is_read_along_two_dims_stays() -> None:
    """A value of the product's size that one reader takes by rows and another as a whole."""

    def both(x: Array, w: Array) -> tuple[Array, Array]:
        scores = x @ w
        table = jnp.tanh(x[:, :1] + w[:1])
        return (scores * table).sum(1), (scores @ table).sum(1)

    graph = trace(both, S((64, 4), jnp.float32), S((4, 64), jnp.float32)).graph
    assert blocks.with_blocks(graph) is graph


def test_effects_keep_their_order() -> None:
    """A loop is put where its operands are made; what prints after it prints after it."""

    def told(x: Array, w: Array, labels: Array) -> Array:
        loss = integers(x @ w, labels).sum()
        jax.debug.callback(lambda _: None, loss)
        jax.debug.callback(lambda _: None, x[0, 0, 0])
        return loss

    graph = trace(told, *arguments(jnp.float32)).graph
    made = blocks.with_blocks(graph)
    assert made is not graph

    def effects(graph: BlockGraph) -> list[Any]:
        return [op.params for op in graph.operations if op.effectful]

    assert len(effects(graph)) == 2
    assert effects(made) == effects(graph)


def test_a_loop_stands_where_what_it_computes_stood() -> None:
    """What needs nothing of it is not made, and held, before it for that."""

    def both(x: Array, w: Array, labels: Array, y: Array) -> Any:
        sooner = jnp.cos(y)
        return sooner, integers(x @ w, labels).mean(), jnp.sin(y)

    made = blocks.with_blocks(trace(both, *arguments(jnp.float32), S((8,), jnp.float32)).graph)
    names = [op.kernel for op in made.operations]
    assert names.index("cos") < names.index("scan") < names.index("sin")


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
