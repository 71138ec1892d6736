"""Programs whose best plan is known by name: what it does, that XLA compiles what it says, and that
its numbers are those of `jax.jit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from models import moe
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime import compare

Array = jax.Array
S = jax.ShapeDtypeStruct
EIGHT = [te.MeshShape(("x",), (8,))]


def is_run(
    plan: te.Plan, function: Callable[..., Any], given: Sequence[Any], within: float
) -> None:
    """On eight devices of this machine the plan gives what `jax.jit` gives, and sends and receives
    what it says."""
    run = te.compile(plan, jax.devices()[:8])
    wanted = jax.tree.leaves(jax.jit(function)(*given))
    for found, right in zip(jax.tree.leaves(run(*given)), wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=within, atol=within)
    assert compare(plan, run.compile()).equal


def drawn(*shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5, jnp.float32) for s in shapes]


def product(a: Array, b: Array, c: Array) -> Array:
    return (a @ b) @ c


@pytest.mark.slow
def test_a_product_whose_last_factor_is_cut_by_columns_makes_that_one_first() -> None:
    """(a·b)·c has one device's work of a·b on all of them, or gathers it; a·(b·c) sends nothing."""

    def front(size: int) -> te.Front:
        square = [S((size, size), jnp.float32)] * 3
        pins = {"[0]": (None, None), "[1]": (None, None), "[2]": (None, "x")}
        settings = Settings(work=2.0, merge=False)
        program = te.trace(product, *square)
        return te.optimize(program, "h100:8", mesh_shapes=EIGHT, pins=pins, settings=settings)

    plan = front(2048)[0]
    first, last = plan.graph.operations
    assert first.inputs == plan.graph.inputs[1:]
    assert last.inputs == (plan.graph.inputs[0], first.outputs[0])
    assert not plan.collectives and plan.gap < 1e-6
    is_run(front(256)[0], product, drawn(*[(256, 256)] * 3), 1e-3)


@pytest.mark.slow
def test_a_train_step_of_a_mixture_of_experts_takes_three_all_to_alls() -> None:
    """What the experts read, what they give, and the gradient of this: a block of `experts * groups
    * capacity * width` numbers, cut over the devices, each; no gradient of the first is made. The
    capacity is of both choices of a token, twice over, so that a block is `4 * tokens * width`.
    Where links have no latency nothing else as large moves."""

    def plan(groups: int, tokens: int, width: int, hidden: int) -> te.Plan:
        shapes = jax.eval_shape(lambda: moe.example(groups, tokens, width, hidden)[1])
        settings = Settings(front=False, recompute=0, work=3.0)
        program = te.trace(moe.step, *shapes)
        return te.optimize(program, "cpu:8", mesh_shapes=EIGHT, settings=settings).best("seconds")

    def exchanged(plan: te.Plan) -> list[int]:
        return [c.payload_bytes for c in plan.collectives if c.kind == "all_to_all"]

    large = plan(32, 256, 512, 2048)
    block = 4 * 32 * 256 * 512 * 4 // 8
    assert exchanged(large) == [block] * 3
    router_and_out = (512 * 512 + 512 * 8) * 4
    # Gradients of what all devices have are summed and scattered; the rest are a few numbers.
    wire = (3 * block + router_and_out) * 7 / 8
    assert wire <= large.costs.wire_bytes <= 1.001 * wire < 24e6
    small = plan(16, 64, 64, 128)
    assert len(exchanged(small)) == 3
    is_run(small, moe.step, moe.example(16, 64, 64, 128)[1], 1e-3)


def loss(x: Array, w: Array, labels: Array) -> Array:
    logits = x @ w
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_label)


def gradients(x: Array, w: Array, labels: Array) -> tuple[Array, tuple[Array, Array]]:
    return jax.value_and_grad(loss, (0, 1))(x, w, labels)


def streamed(
    tokens: int, width: int, vocabulary: int, share: float, of: Any, work: float
) -> te.Plan:
    """The fastest plan of a loss within a share of what plans with all logits hold."""
    shapes = [
        S((tokens, width), jnp.float32),
        S((width, vocabulary), jnp.float32),
        S((tokens,), jnp.int32),
    ]
    program = te.trace(gradients, *shapes)
    settings = Settings(work=work, recompute=0, forms=0)
    whole = te.optimize(program, "h100:8", mesh_shapes=EIGHT, settings=settings)
    assert not _loops(whole.best("seconds")), "all logits at once, without a limit"
    peak = of(p.costs.peak_bytes for p in whole if not _loops(p))
    limits = {"peak_bytes": share * peak}
    short = te.optimize(program, "h100:8", mesh_shapes=EIGHT, settings=settings, limits=limits)
    plan = short.best("seconds", limits=limits)
    assert _loops(plan) and plan.costs.peak_bytes <= share * peak
    values = {v for r in _regions(plan) for v in r.values}
    assert max(v.size for v in values if v.shape) < tokens * vocabulary
    return plan


@pytest.mark.long
def test_a_loss_over_a_large_vocabulary_streams_under_a_memory_limit() -> None:
    """Logits of width 4096 are slow to recompute: a memory limit alone makes plans stream them."""
    plan = streamed(16384, 4096, 131072, 0.65, max, 3.0)
    assert plan.gap < 0.01 and plan.costs.seconds < 0.04, (
        "no more than a sixth more than without a limit"
    )


@pytest.mark.slow
def test_a_loss_that_streams_under_a_memory_limit_gives_the_numbers_of_jax() -> None:
    small = streamed(1024, 64, 4096, 0.9, min, 0.5)
    x, w = drawn((1024, 64), (64, 4096))
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 4096, 1024), jnp.int32)
    is_run(small, gradients, (x, w, labels), 1e-4)


def _regions(plan: te.Plan) -> list[Any]:
    return [r for op in plan.graph.operations for r in op.regions]


def _loops(plan: te.Plan) -> bool:
    return any(op.kernel == "scan" for op in plan.graph.operations)


def update(w: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    def loss(w: dict[str, Array]) -> Array:
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.mark.long
def test_eight_hosts_of_eight_use_three_axes_without_an_option() -> None:
    """The batch over hosts and a part of each, the layer over the rest: the fastest plan of all."""
    w = {"up": S((4096, 16384), jnp.float32), "down": S((16384, 4096), jnp.float32)}
    program = te.trace(update, w, *[S((65536, 4096), jnp.float32)] * 2)
    settings = {"work": 2.0, "recompute": 0, "forms": 0}
    front = te.optimize(program, "h100:8x8", settings=Settings(**settings))
    two = te.optimize(program, "h100:8x8", settings=Settings(max_axes=2, **settings))
    assert len(front[0].mesh.sizes) == 3 and front[0].mesh.devices == 64
    assert front[0].gap < 0.01 and front[0].costs.seconds < 0.99 * two[0].costs.seconds
