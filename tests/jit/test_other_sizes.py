"""Calls with arrays of other sizes begin with the mesh and the rules of the plan that is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.plans.plan import Plan

OTHER = {"other-size-meshes", "other-size-forms"}
WIDTH = 64


def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
    """Whose gradients rules make of one product."""

    def loss(w: dict[str, jax.Array]) -> jax.Array:
        a, b = x @ w["a"], x @ w["b"]
        return jnp.mean((jnp.tanh(a) * b @ w["c"].T) ** 2)

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, grads), value


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {k: rng.normal(size=(WIDTH, WIDTH)).astype("f4") / 8 for k in "abc"}


def batch(rows: int) -> np.ndarray:
    return np.random.default_rng(rows).normal(size=(rows, WIDTH)).astype("f4")


def kinds(front: te.Front) -> set[str]:
    return {n.kind for n in front.notes}


@pytest.fixture
def like(monkeypatch: pytest.MonkeyPatch) -> list[Plan | None]:
    """The plans that searches are given, in turn."""
    from tapestry_egg.pipeline import pipeline

    found: list[Plan | None] = []
    optimize = pipeline.optimize

    def search(*args: Any, **options: Any) -> te.Front:
        found.append(options.get("like"))
        return optimize(*args, **options)

    monkeypatch.setattr(pipeline, "optimize", search)
    return found


@pytest.mark.long
def test_another_batch_size_is_searched_where_the_plan_of_the_first_is(
    like: list[Plan | None],
) -> None:
    """And gives the numbers of the function."""
    run = te.jit(step, target="h100:8", cache=False)
    w = weights()
    first = run.plan(w, batch(4096))
    other = batch(2048)
    plan = run.plan(w, other)
    assert (plan.mesh, set(plan.rules) <= set(first.rules)) == (first.mesh, True)
    assert plan.bound > 0
    for got, wanted in zip(
        jax.tree.leaves(run(w, other)), jax.tree.leaves(step(w, other)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
    assert like == [None, first]


@pytest.mark.slow
def test_other_operations_are_no_other_sizes(like: list[Plan | None]) -> None:
    """Nor is what was asked for with settings of its own."""

    def one(x: jax.Array, twice: bool = False) -> jax.Array:
        return jnp.tanh(x @ x.T) if twice else x @ x.T

    run = te.jit(one, target="h100:2", cache=False, static_argnames="twice")
    run.plan(batch(64))
    run.plan(batch(64), twice=True)
    set_ = te.jit(one, target="h100:2", cache=False, settings=te.Settings(work=0.1))
    set_.plan(batch(64))
    set_.plan(batch(128))
    assert like == [None] * 4


@pytest.mark.slow
def test_nothing_begins_with_a_plan_for_which_memory_was_short(like: list[Plan | None]) -> None:
    """All of a front was searched for it, and is again."""
    run = te.jit(lambda x: x @ x.T, target="h100:2", cache=False, limits={"peak_bytes": "24KiB"})
    run.plan(batch(64))
    run.plan(batch(32))
    assert len(like) > 2 and not any(like)


@pytest.mark.slow
def test_what_a_plan_in_blocks_is_like_is_in_blocks_and_certified(tmp_path: Path) -> None:
    """Changes of a program are made again as they are; if that does not fit, all is searched."""

    def loss(x: jax.Array, words: jax.Array, t: jax.Array) -> jax.Array:
        scores = x @ words
        return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - jnp.sum(scores * t, -1))

    def traced(rows: int) -> te.Program:
        types = [jax.ShapeDtypeStruct(s, "f4") for s in ((rows, 64), (64, 8192), (8192,))]
        return te.trace(loss, *types)

    settings = te.Settings(work=0.3, micro_batches=(), front=False)
    limits = {"peak_bytes": "16MiB"}
    (known,) = te.optimize(traced(4096), "h100:1", limits=limits, settings=settings)
    assert known.rules == ("blocks-of-rows",)
    front = te.optimize(traced(2048), "h100:1", like=known, limits=limits, settings=settings)
    assert OTHER & kinds(front) == {"other-size-forms"}  # there is one mesh
    assert front.best().rules == known.rules and len(front.best().steps) == 1
    te.save(front, tmp_path / "front.json")
    assert te.load(tmp_path / "front.json").best().costs == front.best().costs
    given = te.optimize(traced(4096), "h100:1", settings=settings).best()
    further = te.optimize(traced(2048), "h100:1", like=given, limits=limits, settings=settings)
    assert not given.rules and further.best().rules and not kinds(further) & OTHER


@pytest.mark.slow
def test_a_plan_that_is_kept_on_disk_comes_first(tmp_path: Path, like: list[Plan | None]) -> None:
    """One that began with another size is kept beside it."""
    first, second = (
        te.jit(lambda x: jnp.tanh(x @ x.T), target="h100:2", cache=tmp_path) for _ in range(2)
    )
    first.plan(batch(64))
    begun = first.plan(batch(128))
    assert len(like) == 2 and like[1] is not None
    assert second.plan(batch(64)).costs == first.plan(batch(64)).costs
    assert second.plan(batch(128)).costs == begun.costs and len(like) == 2
    alone = te.jit(lambda x: jnp.tanh(x @ x.T), target="h100:2", cache=tmp_path)
    alone.plan(batch(128))
    assert like[2] is None and len(like) == 3  # nothing was known, so all is searched


def test_what_is_like_another_is_a_plan() -> None:
    program = te.trace(lambda x: x + 1, batch(8))
    with pytest.raises(ExtractError, match="is no plan"):
        te.optimize(program, "h100:2", like="p0")  # type: ignore[arg-type]
