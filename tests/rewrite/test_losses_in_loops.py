"""Losses under `jax.checkpoint` and in bodies of loops: no logits are left, forward or backward."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import tapestry_egg as te
from tapestry_egg.errors import TargetError
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.streams import blocks
from tapestry_egg.runtime.measure.compare import compare
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.forms_on_devices import draw
from tests.rewrite.loss_spellings import integers, largest
from tests.rewrite.test_blocks import numbered, one_hot, picked
from tests.tiers import tiers

Array = Any
Loss = Callable[..., Array]
S = jax.ShapeDtypeStruct
#: Of the logits, in float32, of 4 x 64 tokens.
BYTES = 4 * 256 * 512


def with_logsumexp(logits: Array, labels: Array) -> Array:
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jax.nn.logsumexp(logits, axis=-1) - chosen


def with_rows_of_labels(logits: Array, labels: Array) -> Array:
    rows = jax.nn.one_hot(labels, logits.shape[-1], dtype=logits.dtype)
    return -(jax.nn.log_softmax(logits) * rows).sum(-1)


def flattened(logits: Array, labels: Array) -> Array:
    """Tokens of all sequences in one dim, as ports from PyTorch have them."""
    rows = jax.nn.log_softmax(logits.reshape(-1, logits.shape[-1]))
    return -rows[jnp.arange(rows.shape[0]), labels.reshape(-1)]


SPELLINGS = (integers, one_hot, with_rows_of_labels, picked, with_logsumexp, numbered, flattened)


def wide(x: Array, w: Array) -> Array:
    return jnp.einsum("bsd,dv->bsv", x, w, preferred_element_type=jnp.float32)


def cast(x: Array, w: Array) -> Array:
    return (x @ w).astype(jnp.float32)


#: dtype of the operands, and how logits are made of them.
PRODUCTS = {
    "float32": (jnp.float32, cast),
    "bfloat16": (jnp.bfloat16, cast),
    "preferred": (jnp.bfloat16, wide),
}


def remade(mean: Loss) -> Loss:
    """The loss is computed again for its gradient."""
    return lambda x, w, labels: jax.checkpoint(lambda x, w: mean(x, w, labels))(x, w)


def in_a_loop(mean: Loss) -> Loss:
    """Every layer has a loss of its own."""

    def losses(x: Array, w: Array, labels: Array) -> Array:
        def layer(x: Array, c: Array) -> tuple[Array, Array]:
            return jnp.tanh(x * c), mean(x, w, labels)

        return jax.lax.scan(layer, x, jnp.array([0.5, 0.75], x.dtype))[1].sum()

    return losses


def of_parts(mean: Loss) -> Loss:
    """Tokens come a part at a time, with their labels."""

    def losses(x: Array, w: Array, labels: Array) -> Array:
        parts = (x.reshape(2, 2, *x.shape[1:]), labels.reshape(2, 2, -1))
        return jax.lax.scan(lambda sum, p: (sum + mean(p[0], w, p[1]), None), 0.0, parts)[0]

    return losses


MODES: dict[str, Callable[[Loss], Loss]] = {
    "remat": remade,
    "loop": in_a_loop,
    "remat in a loop": lambda mean: in_a_loop(remade(mean)),
    "loop over tokens": of_parts,
}


def step(mode: str, loss: Loss, kind: str = "float32") -> tuple[Loss, list[S]]:
    """Loss and gradients, and shapes of what they are of."""
    dtype, logits = PRODUCTS[kind]

    def mean(x: Array, w: Array, labels: Array) -> Array:
        return loss(logits(x, w), labels).mean()

    rows = 128 if mode == "loop over tokens" else 64  # the logits of a step are then as large
    shapes = [S((4, rows, 16), dtype), S((16, 512), dtype), S((4, rows), jnp.int32)]
    return jax.value_and_grad(MODES[mode](mean), (0, 1)), shapes


def named(case: tuple[str, str, Loss]) -> str:
    return f"{case[0]}-{case[1]}-{case[2].__name__}"


@pytest.mark.parametrize(
    "case", tiers(product(PRODUCTS, MODES, SPELLINGS), usual=5, fast=4), ids=named
)
def test_no_logits_are_left(case: tuple[str, str, Loss]) -> None:
    """Nothing is as large as a sixteenth of what loops kept for the backward pass, or of logits."""
    kind, mode, loss = case
    function, shapes = step(mode, loss, kind)
    graph = trace(function, *shapes).graph
    made = blocks.with_blocks(graph)
    verify_graph(made)
    assert largest(graph) >= BYTES // 4
    assert largest(made) <= BYTES // 4 // 16


def test_labels_enter_blocks_once() -> None:
    """The loss reads by them and its gradient adds by them: they would be sent twice."""

    def mean(x: Array, w: Array, labels: Array) -> Array:
        return flattened(x @ w, labels).mean()

    shapes = [S((4, 64, 16), "float32"), S((16, 512), "float32"), S((4, 64), "int32")]
    made = blocks.with_blocks(trace(jax.value_and_grad(mean, (0, 1)), *shapes).graph)
    (loop,) = [op for op in made.operations if op.kernel == "scan"]
    assert [made.values[v].dtype for v in loop.inputs].count("int32") == 1


@pytest.mark.parametrize(
    "case",
    tiers(product(["float32", "bfloat16"], MODES, [one_hot, numbered, flattened]), usual=3),
    ids=named,
)
def test_numbers_are_those_of_the_program(case: tuple[str, str, Loss]) -> None:
    """By the reference executor, which knows of no blocks."""
    kind, mode, loss = case
    function, shapes = step(mode, loss, kind)
    graph = trace(function, *shapes).graph
    xs = draw(shapes, below=512)
    bound = 1e-5 if kind == "float32" else 1e-2
    made = execute(blocks.with_blocks(graph), [np.asarray(x) for x in xs])
    for got, want in zip(made, jax.tree.leaves(jax.jit(function)(*xs)), strict=True):
        a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.abs(a - b).max() <= bound * np.abs(b).max()


@pytest.mark.slow
@pytest.mark.parametrize("machine", ["cpu:1", "h100:1"])
@pytest.mark.parametrize("mode", ["remat in a loop", "loop over tokens"])
def test_temporaries_hold_no_logits(mode: str, machine: str) -> None:
    """As XLA compiles them."""
    from benchmarks.devices import devices_of

    try:
        (device,) = devices_of(machine)
    except TargetError as missing:
        pytest.skip(str(missing))
    function, shapes = step(mode, picked, "bfloat16")
    graph = trace(function, *shapes).graph
    whole, part = (
        jax.jit(emit(g), in_shardings=SingleDeviceSharding(device))
        .lower(*shapes)
        .compile()
        .memory_analysis()
        .temp_size_in_bytes
        for g in (graph, blocks.with_blocks(graph))
    )
    assert part < BYTES
    assert 4 * part < whole


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["remat", pytest.param("loop", marks=pytest.mark.long)])
def test_plans_send_what_they_say_and_give_the_numbers(mode: str) -> None:
    """On eight devices: every plan in blocks of rows."""
    function, shapes = step(mode, with_logsumexp)
    settings = te.Settings(work=0.3, max_axes=1)
    front = te.optimize(trace(function, *shapes), target="cpu:8", settings=settings)
    plans = [p for p in front.plans if blocks.RULE in p.rules]
    assert plans
    xs = draw(shapes, below=512)
    want = jax.tree.leaves(jax.jit(function)(*xs))
    for plan in plans[:: len(plans) - 1 or 1]:
        run = te.compile(plan, jax.devices()[:8])
        compared = compare(plan, run.lower().compile())
        assert compared.equal, compared
        for a, b in zip(jax.tree.leaves(run(*xs)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)


@pytest.mark.slow
def test_what_is_drawn_is_drawn_as_often_as_written() -> None:
    """Noise beside a loss in blocks: twice before it, or once before a loop that reads it."""

    def loss(x: Array, w: Array) -> Array:
        return jax.nn.logsumexp(x @ w, -1).mean()

    def drawn(shape: tuple[int, ...]) -> Array:
        return jax.lax.rng_uniform(jnp.float32(0), jnp.float32(1), shape)

    def twice(x: Array, w: Array) -> Any:
        of = jax.checkpoint(loss)
        return jax.value_and_grad(of, 1)(x, w), drawn((64,)) - drawn((64,))

    def given(x: Array, w: Array) -> Any:
        noise = drawn((256, 512))

        def step(c: Array, _: None) -> Any:
            return c, (loss(x, w), jnp.cumsum(noise * c, 0)[-1])

        losses, sums = jax.lax.scan(step, jnp.float32(1), None, length=2)[1]
        return losses, sums[0] - sums[1]

    x, w = draw([S((2048, 16), "float32"), S((16, 4096), "float32")])
    made = blocks.with_blocks(trace(twice, x, w).graph)
    assert made is not trace(twice, x, w).graph
    assert np.abs(jax.jit(emit(made))(x, w)[-1]).max() > 0.1
    x, w = x[:256], w[:, :512]
    graph = trace(given, x, w).graph
    assert np.abs(jax.jit(emit(blocks.with_blocks(graph)))(x, w)[-1]).max() == 0
