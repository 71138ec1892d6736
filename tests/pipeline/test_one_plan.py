"""Only the fastest plan is looked for, and further only if that is not within the limits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.pipeline import state

ONE = te.Settings(front=False, work=0.3, micro_batches=())
ROWS, WIDTH, WORDS = 4096, 64, 8192
#: Of one float32 for each row and word, all of which the fastest plan holds at once.
SCORES = 4 * ROWS * WORDS
ARGUMENTS = jax.ShapeDtypeStruct((ROWS, WIDTH), "f4"), jax.ShapeDtypeStruct((WIDTH, WORDS), "f4")


def loss(x: jax.Array, words: jax.Array) -> jax.Array:
    return jnp.mean(jax.nn.logsumexp(x @ words, axis=-1))


def deep(x: jax.Array, words: jax.Array) -> jax.Array:
    """Whose gradient keeps an array for each of its steps, or computes them again."""

    def of(x: jax.Array) -> jax.Array:
        for _ in range(8):
            x = x + jnp.tanh(jnp.sin(x) @ (words @ words.T))
        return jnp.mean(x**2)

    return jax.grad(of)(x)


def found(fn: Any, **options: Any) -> te.Front:
    options.setdefault("settings", ONE)
    return te.optimize(te.trace(fn, *ARGUMENTS), "h100:1", **options)


@pytest.mark.slow
def test_what_a_front_has_is_found_if_nothing_that_is_looked_for_first_fits() -> None:
    """Here what has the scores in blocks; and an error names the least that this holds."""
    assert found(loss).plans[0].costs.peak_bytes > SCORES
    within = found(loss, limits={"peak_bytes": SCORES / 8})
    assert all(p.costs.peak_bytes <= SCORES / 8 for p in within)
    assert within.plans[0].rules
    with pytest.raises(ExtractError, match=r"least found \d\.\d+ MiB"):
        found(loss, limits={"peak_bytes": 1 << 20})


@pytest.mark.slow
@pytest.mark.parametrize("long", [5, state.LONG])
def test_values_are_computed_again_only_if_memory_is_short(
    long: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To compute them takes time; and long programs are planned as given until nothing fits."""
    monkeypatch.setattr(state, "LONG", long)
    (given,) = found(deep).plans
    held = given.costs.peak_bytes
    assert not given.rules
    near = found(deep, limits={"peak_bytes": 1.5 * held})
    assert [p.rules for p in near] == [(), ("recompute",)]
    assert ("no-rules" in {n.kind for n in near.notes}) == (long == 5)
    (within,) = found(deep, limits={"peak_bytes": 0.7 * held})
    assert within.rules == ("recompute",)
