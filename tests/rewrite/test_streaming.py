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
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.recomputation.checkpoints import peak_alone
from tapestry_egg.runtime.lower.kernels import streaming
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
