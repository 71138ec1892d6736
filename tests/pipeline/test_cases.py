"""Sharding cases with a known optimum: what is sent is what the formula says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime import compare

Array = Any
S = jax.ShapeDtypeStruct
pytestmark = pytest.mark.slow


def planned(function: Callable[..., Any], shapes: Any, target: str, pins: Any) -> te.Front:
    """The front on one mesh axis of eight devices."""
    return te.optimize(
        te.trace(function, *shapes),
        target,
        pins=pins,
        mesh_shapes=[te.MeshShape(("x",), (8,))],
        settings=Settings(work=1.0, recompute=0, forms=0),
    )


def sent(plan: te.Plan) -> Mapping[str, list[int]]:
    """Kind of collective -> payloads in bytes, those of what runs several times as often."""
    found: dict[str, list[int]] = {}
    for c in plan.collectives:
        found.setdefault(c.kind, []).extend([c.payload_bytes] * c.count)
    return found


def run_all(function: Callable[..., Any], shapes: Any, pins: Any) -> None:
    """Every plan at small shapes gives the numbers of the program, and moves what it says."""
    rng = np.random.default_rng(0)

    def drawn(s: S) -> Array:
        if s.dtype == jnp.int32:
            return jnp.asarray(rng.integers(0, 64, s.shape), s.dtype)
        return jnp.asarray(rng.normal(size=s.shape), s.dtype)

    arguments = [drawn(s) for s in shapes]
    want = function(*arguments)
    front = planned(function, shapes, "cpu:8", pins)
    for plan in front.plans:
        run = te.compile(plan, jax.devices()[:8])
        np.testing.assert_allclose(run(*arguments), want, rtol=2e-5, atol=2e-5)
        assert compare(plan, run.lower().compile()).equal


def cross_entropy(h: Array, w: Array, labels: Array) -> Array:
    logits = h @ w
    picked = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def losses(tokens: int, width: int, vocabulary: int) -> tuple[S, ...]:
    return (
        S((tokens, width), jnp.float32),
        S((width, vocabulary), jnp.float32),
        S((tokens,), jnp.int32),
    )


def test_case_18_a_loss_over_a_vocabulary_that_is_cut() -> None:
    """Three numbers for each token: its greatest logit, the sum, and that of its label."""
    pins = {"[0]": (None, None), "[1]": (None, "x")}
    best = planned(cross_entropy, losses(1024, 1024, 32768), "h100:8", pins).best()
    assert sent(best) == {"all_reduce": [4 * 1024] * 3}
    run_all(cross_entropy, losses(16, 8, 64), pins)


def normalised(x: Array) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5)


def test_case_20_a_norm_over_a_dim_that_is_cut() -> None:
    """Two numbers for each row: its mean, and its variance."""
    pins = {"[0]": (None, "x"), "result": (None, "x")}
    rows = 65536
    best = planned(normalised, [S((rows, 1024), jnp.float32)], "h100:8", pins).best()
    assert sent(best) == {"all_reduce": [4 * rows] * 2}
    assert best.costs.peak_bytes >= 2 * 4 * rows * 1024 / 8  # the argument and the result
    run_all(normalised, [S((24, 64), jnp.float32)], pins)


def attended(q: Array, k: Array, v: Array) -> Array:
    scores = jnp.einsum("bhd,bshd->bhs", q, k) / 8.0
    return jnp.einsum("bhs,bshd->bhd", jax.nn.softmax(scores), v)


def test_case_24_decoding_with_keys_that_are_cut() -> None:
    """A head's greatest score, its sum, and what it reads of the values; never keys or values."""
    batch, heads, width = 8, 16, 64

    def shapes(keys: int) -> list[S]:
        cache = S((batch, keys, heads, width), jnp.float32)
        return [S((batch, heads, width), jnp.float32), cache, cache]

    cut = (None, "x", None, None)
    pins = {"[0]": (None, None, None), "[1]": cut, "[2]": cut}
    best = planned(attended, shapes(32768), "h100:8", pins).best()
    moved = sorted(n for sizes in sent(best).values() for n in sizes)
    assert moved == [4 * batch * heads, 4 * batch * heads, 4 * batch * heads * width]
    assert sent(best).keys() <= {"all_reduce", "reduce_scatter"}
    run_all(attended, shapes(32), pins)
