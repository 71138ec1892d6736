"""Losses of models nearly as wide as their vocabulary is large: logits are little larger than what
they are made of, and a program that holds a block of them is searched where memory is short."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import is_split
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.fused_forms import batched, forms_with_streams
from tapestry_egg.rewrite.streams import blocks
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.forms_on_devices import BOOKS, draw
from tests.rewrite.loss_spellings import (
    LOSSES,
    Loss,
    arguments,
    largest,
    narrow,
    next_tokens,
    normalised,
    step,
)
from tests.tiers import tiers

Array = Any
S = jax.ShapeDtypeStruct


def apart(got: Array, want: Array) -> float:
    """The greatest difference, as a share of the greatest number."""
    a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.abs(a - b).max() / np.abs(b).max())


def of_largest(found: tuple[Form, ...]) -> Iterator[Form]:
    return (f for f in found if blocks.OF_LARGEST in f.rules)


@pytest.mark.parametrize(
    "case", tiers(product(LOSSES, (jnp.float32, jnp.bfloat16)), usual=5), ids=lambda c: c[0]
)
def test_every_spelling_is_in_blocks_and_gives_the_numbers_of_jax(case: tuple[str, Any]) -> None:
    """512 rows of 96 logits, of a width of 32. Each row is computed as it was written, also where
    it is rounded; sums over rows are in float32, and rounded once: no number is further from that
    in float64 than JAX's own, but for a rounding."""
    loss, dtype = LOSSES[case[0]], case[1]
    shapes = arguments(loss, dtype, 128, 32, 96)
    graph = trace(step(loss), *shapes).graph
    assert blocks.with_blocks(graph) is graph
    made = blocks.with_blocks_of_largest(graph)
    verify_graph(made)
    assert largest(made) < 512 * 96 / 2
    xs = [0.1 * x if x.dtype != jnp.int32 else x for x in draw(shapes, below=96)]
    gots, wants = (jax.jit(emit(g))(*xs) for g in (made, graph))
    with jax.enable_x64(True):
        longer = [x.astype(jnp.float64) if x.dtype != jnp.int32 else x for x in xs]
        exact = jax.tree.leaves(step(loss)(*longer))
    for got, want, number in zip(gots, wants, exact, strict=True):
        rounded = 2.0**-9 if dtype == jnp.bfloat16 else 1e-5
        assert apart(got, number) <= apart(want, number) + rounded


@pytest.mark.parametrize("loss", [normalised, next_tokens])
def test_they_are_searched_where_memory_is_short(loss: Loss) -> None:
    """In 16 bits the rules know no program without these logits: 1 GiB, and 2 of float32."""
    graph = trace(step(loss), *arguments(loss, jnp.bfloat16, 4096, 4096, 32_000)).graph
    target = load_target("h100:1")
    assert not list(of_largest(forms_with_streams(graph, BOOKS, target)))
    (form,) = of_largest(forms_with_streams(graph, BOOKS, target, limit=2.0 * 2**30))
    assert largest(form.graph) * 4 == largest(graph) or loss is normalised
    assert form.slower


def test_they_take_the_place_of_what_rules_find() -> None:
    """In float32 these do, by making logits three times: it takes longer and holds more."""
    graph = trace(step(narrow), *arguments(narrow, jnp.float32, 4096, 4096, 32_000)).graph
    found = forms_with_streams(graph, BOOKS, load_target("h100:1"))
    (form,) = [f for f in found if f.slower]
    assert blocks.OF_LARGEST in form.rules


def test_they_are_left_where_micro_batches_hold_less_in_less_time() -> None:
    """README's hidden layer, with all that its batch is of: one dim of rows is in both."""

    def loss(up: Array, down: Array, x: Array) -> Array:
        return jnp.mean((jax.nn.relu(x @ up) @ down) ** 2)

    shapes = (
        S((1024, 4096), jnp.float32),
        S((4096, 1024), jnp.float32),
        S((8192, 1024), jnp.float32),
    )
    graph = trace(jax.grad(loss, (0, 1)), *shapes).graph
    target, limit = load_target("h100:8"), 24.0 * 2**20
    alone = forms_with_streams(graph, BOOKS, target, limit=limit)
    assert list(of_largest(alone))
    beside = forms_with_streams(
        graph, BOOKS, target, limit=limit, batches=lambda f: batched(f, target, None, limit)
    )
    assert any(is_split(rule) for f in beside for rule in f.rules)
    assert not list(of_largest(beside))
    assert beside[0].left.forms == alone[0].left.forms + 1


def test_hidden_layers_smaller_than_the_logits_stay() -> None:
    """They are twice as large as their operands, in this program and in bodies of its loops."""

    def loss(x: Array, up: Array, down: Array, w: Array, labels: Array) -> Array:
        def layer(x: Array, _: None) -> tuple[Array, None]:
            return x + jnp.tanh(x @ up) @ down, None

        x, _ = jax.lax.scan(layer, x + jnp.tanh(x @ up) @ down, None, length=2)
        return narrow(x, w, labels)

    x, w, labels = arguments(narrow, jnp.float32, 128, 64, 512)
    hidden = S((64, 192), jnp.float32), S((192, 64), jnp.float32)
    graph = trace(loss, x, *hidden, w, labels).graph
    made = blocks.with_blocks_of_largest(graph)
    loops = [op.params["length"] for op in made.operations if op.kernel == "scan"]
    assert loops == [2, 16]
    inner = next(op for op in made.operations if op.kernel == "scan" and op.params["length"] == 2)
    assert all(op.kernel != "scan" for op in inner.regions[0].operations)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_plans_within_a_limit_hold_less_than_the_logits(dtype: Any, tmp_path: Path) -> None:
    """16 384 rows of width 4096, beside operands and gradients; and a file with them is read."""
    shapes = arguments(narrow, dtype, 4096, 4096, 32_000)
    program = te.trace(step(LOSSES["mean_of_some"]), *shapes)
    ends = 2 * np.dtype(dtype).itemsize * (16_384 * 4096 + 4096 * 32_000)
    logits = 4 * 16_384 * 32_000
    settings, limits = Settings(work=1.0), {"peak_bytes": ends + 0.6 * logits}
    front = te.optimize(program, "h100:1", settings=settings, limits=limits)
    plans = [p for p in front.plans if blocks.OF_LARGEST in p.rules]
    assert plans
    assert front.best("seconds").costs.seconds < (60e-3 if dtype == jnp.float32 else 31e-3)
    front.save(tmp_path / "front")
    assert [p.costs for p in te.load(tmp_path / "front").plans] == [p.costs for p in front.plans]
