"""Kernels that stream over scores: the rules that make them, their plans, and what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.recomputation.checkpoints import peak_alone
from tapestry_egg.runtime.lower.kernels import streaming
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.tracing.trace import trace
from tests.rewrite.forms_on_devices import (
    BOOKS,
    compiled,
    draw,
    form_of,
    kernels,
    lean_form_of,
    run,
    types,
)
from tests.rewrite.loss_spellings import narrow, normalised, step

Array = Any


def masked(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    scores = jnp.where(mask, scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def plain(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 0.125
    return jax.nn.softmax(scores) @ jnp.moveaxis(v, 1, 2)


def grouped(q: Array, k: Array, v: Array) -> Array:
    """Two query heads to each head of keys and values."""
    b, t, h, d = q.shape
    q, k, v = q.reshape(b, t, h // 2, 2, d), k[:, :, : h // 2], v[:, :, : h // 2]
    scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * d**-0.5
    return jnp.einsum("bkgts,bskd->btkgd", jax.nn.softmax(scores), v).reshape(b, t, h, d)


def library(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def backwards(q: Array, k: Array, v: Array) -> Array:
    """Keys before queries, softmax over the first dim of the scores."""
    weights = jax.nn.softmax(jnp.einsum("bkhd,bqhd->khbq", k, q), axis=0)
    return jnp.einsum("khbq,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("target", ["h100:1", "v5e:1"])
@pytest.mark.parametrize("function", [masked, plain, grouped, library, backwards])
def test_attention_as_people_write_it_becomes_one_kernel(
    function: Callable[..., Any], target: str
) -> None:
    """To be faster, or on a GPU, where blocks of scores go through memory, to hold less."""
    graph = trace(function, *types(*[(4, 512, 8, 64)] * 3)).graph
    found = forms(graph, BOOKS, load_target(target), lean=True)
    (form,) = [f for f in found if "attention" in kernels(f)]
    assert not {"exp", "reduce_max", "dot_general", "softmax"} & kernels(form)


def test_blocks_of_float32_scores_are_no_faster_form_on_a_gpu() -> None:
    """Measured on an H100: attention in blocks takes eight times what its products do."""
    graph = trace(masked, *types(*[(4, 512, 8, 64)] * 3)).graph
    target = load_target("h100:1")
    found = forms(graph, BOOKS, target, lean=True)
    assert [f.slower for f in found if "attention" in kernels(f)] == [True]
    peaks = {f.slower: peak_alone(f.graph, target) for f in found}
    assert peaks[True] < 0.9 * peaks[False]


def test_scores_in_16_bits_are_recognised() -> None:
    form = lean_form_of(masked, *types(*[(4, 512, 8, 64)] * 3, dtype=jnp.bfloat16))
    assert "attention" in kernels(form)


def test_attention_that_is_cudnns_is_the_faster_form_on_a_gpu() -> None:
    """In 16 bits and without a mask: one kernel, no block of which goes through memory."""
    form = form_of(plain, *types(*[(4, 512, 8, 64)] * 3, dtype=jnp.bfloat16))
    assert "attention" in kernels(form)


def test_weights_with_other_readers_stay() -> None:
    """The model decides: weights that are wanted anyway are not computed a second time."""

    def both(q: Array, k: Array, v: Array) -> tuple[Array, Array]:
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
        return weights, jnp.einsum("bqk,bkd->bqd", weights, v)

    form = form_of(both, *types(*[(4, 512, 64)] * 3), target="cpu:1")
    assert "attention" not in kernels(form)


def test_softmax_alone_stays_as_it_is() -> None:
    assert form_of(jax.nn.softmax, *types((4096, 4096)), target="cpu:1").rules == ()


@pytest.mark.slow
@pytest.mark.parametrize("function", [pytest.param(masked, marks=pytest.mark.slow), grouped])
def test_plans_with_attention_agree_with_jax(function: Callable[..., Any]) -> None:
    """Two batches and four heads over eight devices; the keys' dim is never cut."""
    shapes = types(*[(2, 256, 4, 16)] * 3)
    plan = optimize(
        trace(function, *shapes),
        replace(load_target("cpu:8"), fuses=False),  # else one that stores its scores is faster
        mesh_shapes=[MeshShape(("x", "y"), (2, 4))],
        settings=Settings(work=2.0),
    ).best("seconds")
    assert kernels(plan) & {"attention", "flash_attention"}
    inputs = draw(shapes)
    got = te.compile(plan, jax.devices()[:8])(*inputs)
    np.testing.assert_allclose(got, jax.jit(function)(*inputs), rtol=2e-5, atol=2e-6)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 32, whatever the memory."""
    monkeypatch.setattr(streaming, "_ROOM", 1)
    monkeypatch.setattr(streaming, "_LEAST", 32)


@pytest.mark.slow
@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("function", "length"), [(masked, 100), (grouped, 96)])
def test_many_blocks_give_what_one_gives(function: Callable[..., Any], length: int) -> None:
    shapes = types(*[(2, length, 4, 8)] * 3)
    form = form_of(function, *shapes, target="v5e:1")
    assert "attention" in kernels(form)
    inputs = draw(shapes)
    (got,) = run(form, *inputs)
    np.testing.assert_allclose(got, jax.jit(function)(*inputs), rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_scores_are_never_stored() -> None:
    """8192 keys: 128 MiB of scores where the operands have 1 MiB each."""
    shapes = types(*[(1, 8192, 1, 32)] * 3)
    form = form_of(masked, *shapes, target="v5e:1")
    streamed = compiled(form, *shapes).memory_analysis().temp_size_in_bytes
    stored = jax.jit(masked).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
    assert stored > 250e6 and streamed < stored / 2


# The loss over a large vocabulary and its gradients, by kernels that never store the logits.


S = jax.ShapeDtypeStruct
STREAMED = {"dot_logsumexp", "exp_dot"}


def picked(x: Array, w: Array, labels: Array) -> Array:
    logits = x @ w
    of_label = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_label)


def tied(x: Array, table: Array, labels: Array) -> Array:
    """The table of embeddings transposed, as GPT-2 has it."""
    return picked(x, table.T, labels)


def arguments(tokens: int, width: int, vocabulary: int) -> list[S]:
    return [
        S((4, tokens // 4, width), jnp.float32),
        S((width, vocabulary), jnp.float32),
        S((4, tokens // 4), jnp.int32),
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "room"), [(narrow, 64 << 20), (normalised, 64 << 20), (picked, 1), (tied, 1)]
)
def test_loss_and_gradients_are_those_of_jax(
    loss: Callable[..., Any], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one block, and in many, of which the last is smaller: 8200 are 256 of 32, and 8."""
    monkeypatch.setattr(streaming, "_ROOM", room)
    monkeypatch.setattr(streaming, "_LEAST", 32)
    shapes = arguments(1024, 16, 8200)
    if loss is tied:
        shapes[1] = S((8200, 16), jnp.float32)
    form = lean_form_of(step(loss), *shapes)
    assert STREAMED <= kernels(form)
    assert peak_alone(form.graph, load_target("h100:1")) < 0.1 * 4 * 1024 * 8200
    inputs = draw(shapes, below=8200)
    for got, want in zip(
        run(form, *inputs), jax.tree.leaves(jax.jit(step(loss))(*inputs)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)


@pytest.mark.slow
def test_labels_outside_the_vocabulary_count_as_jax_counts_them() -> None:
    """nan in the loss, nothing in the gradients of the others."""
    shapes = arguments(1024, 16, 8192)
    form = lean_form_of(step(picked), *shapes)
    x, w, labels = draw(shapes, below=8192)
    labels = labels.at[0, 0].set(9000)
    for got, want in zip(
        run(form, x, w, labels), jax.tree.leaves(jax.jit(step(picked))(x, w, labels)), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=2e-4, atol=1e-7)


def test_logits_that_cost_less_to_store_are_stored() -> None:
    """Of wide operands: making the logits again takes longer than reading them."""
    form = form_of(step(picked), *arguments(1024, 4096, 8192))
    assert not STREAMED & kernels(form)


@pytest.mark.slow
def test_the_bypassed_form_is_one_that_single_changes_do_not_find() -> None:
    """Each alone holds more: only without the logits altogether is anything saved."""
    from tapestry_egg.rewrite import cheapest as cheapest_module

    graph = trace(step(picked), *arguments(1024, 16, 8192)).graph
    target = load_target("h100:1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cheapest_module, "bypass", lambda *given: given[4])
        single = forms(graph, BOOKS, target, lean=True)
    both = forms(graph, BOOKS, target, lean=True)
    least = [min(peak_alone(f.graph, target) for f in found) for found in (single, both)]
    assert least[1] < 0.5 * least[0]


@pytest.mark.slow
def test_logits_in_float32_stand_in_the_fastest_plan_and_not_in_the_leanest() -> None:
    """On an H100 their blocks go through memory: a logarithm of 8192 words took twice as long as
    its product, its gradient three times (benchmarks/README.md)."""
    graph = trace(step(picked), *arguments(16384, 512, 32768)).graph
    front = optimize(graph, "h100:1", settings=Settings(work=0.5))
    fastest, leanest = front.best("seconds"), front.best("peak_bytes")
    assert not STREAMED & kernels(fastest)
    assert STREAMED <= kernels(leanest)
    logits = 4 * 16384 * 32768
    assert leanest.costs.peak_bytes < 0.25 * logits < logits < fastest.costs.peak_bytes


@pytest.mark.slow
def test_plans_cut_what_is_summed() -> None:
    """Blocks of the vocabulary on every device: partial logarithms, combined under logaddexp."""
    shapes = arguments(1024, 16, 8192)
    front = optimize(
        trace(step(picked), *shapes),
        "h100:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        settings=Settings(work=0.5),
        pins={"[1]": (None, "x")},
    )
    streamed = [p for p in front.plans if STREAMED <= kernels(p)]  # others have blocks of rows
    plan = min(streamed, key=lambda p: p.costs.peak_bytes)
    monoids = {layout.monoid for s in plan.body.strategies for layout in s.gives}
    assert "logaddexp" in monoids
    inputs = draw(shapes, below=8192)
    got = te.compile(plan, jax.devices()[:8])(*inputs)
    for a, b in zip(
        jax.tree.leaves(got), jax.tree.leaves(jax.jit(step(picked))(*inputs)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-7)


def test_equal_programs_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several rulesets begin from one program, and try the same changes of it."""
    priced: list[tuple[BlockGraph, float]] = []

    def price(graph: BlockGraph, target: Target, weights: Any, passes: float) -> float:
        priced.append((graph, passes))
        return program_seconds(graph, target, weights, passes)

    monkeypatch.setattr("tapestry_egg.rewrite.forms.program_seconds", price)
    graph = trace(step(picked), *arguments(1024, 64, 8192)).graph
    found = forms(graph, BOOKS, load_target("v5e:1"), lean=True)
    assert len(found) > 2 and len(priced) > 2
    for k, (one, passes) in enumerate(priced):
        same = [g for g, p in priced[:k] if p == passes and g.operations == one.operations]
        assert not same
