"""The benchmark that runs every plan: its programs can be called, and it tells bad plans."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from benchmarks import bench_plans, programs, unseen
from tapestry_egg.runtime.measure.numerics import accuracy, as_written, standard


@pytest.mark.parametrize("name", programs.SMALL)
def test_unseen_programs_are_made_at_sizes_that_run(name: str) -> None:
    function, arguments = unseen.drawn(unseen.make(name, **programs.SMALL[name]))
    described = unseen.make(name, **programs.SMALL[name])[1]
    assert jax.tree.map(jnp.shape, arguments) == jax.tree.map(jnp.shape, described)
    assert all(np.isfinite(np.asarray(x, float)).all() for x in jax.tree.leaves(arguments))
    assert sum(x.size for x in jax.tree.leaves(arguments)) < 100_000
    jax.eval_shape(function, *arguments)


def test_every_program_that_is_compiled_is_also_run() -> None:
    assert set(programs.compiled_ones()) <= set(programs.run_ones())
    assert {f"unseen:{n}" for n in programs.SMALL} == {
        n for n in programs.run_ones() if n.startswith("unseen:")
    }


def test_the_original_rounds_to_16_bits_where_it_says_so() -> None:
    def product(x: Any) -> Any:
        half = x.astype(jnp.bfloat16)
        return (half @ half).astype(jnp.float32)

    (found,) = as_written(product, (np.random.default_rng(0).normal(size=(8, 8)),))
    assert (found == found.astype(jnp.bfloat16).astype(np.float32)).all()


# Drawn in float64 alike, and not.
@pytest.mark.parametrize("dtype", [pytest.param(jnp.float32, marks=pytest.mark.slow), float])
def test_a_gradient_that_is_scaled_is_told_beside_random_numbers(dtype: Any) -> None:
    def step(key: Any, w: Any) -> Any:
        kept = jax.random.uniform(key, w.shape, dtype) < 0.9
        return jax.grad(lambda w: jnp.sum(jnp.tanh(jnp.where(kept, w, 0.0) @ w) ** 2))(w)

    w = jnp.asarray(np.random.default_rng(0).normal(size=(16, 16)), jnp.float32)
    reference, original = standard(step, lambda: (jax.random.key(0), w))
    (found,) = jax.tree.leaves(step(jax.random.key(0), w))
    assert accuracy(reference, original, [found])[0].ok
    assert not accuracy(reference, original, [found * 1.01])[0].ok


def test_complex_numbers_are_judged_by_both_of_their_parts() -> None:
    x = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    arguments = (x + 1j * x[::-1],)
    reference, original = standard(jnp.fft.fft2, lambda: arguments)
    (found,) = original
    assert reference[0].dtype == np.complex128
    assert accuracy(reference, original, [found])[0].ok
    assert not accuracy(reference, original, [found.real + 1.01j * found.imag])[0].ok


def test_what_is_no_number_agrees_with_its_like_alone() -> None:
    exact = np.array([1.0, np.inf, -np.inf, np.nan, 1e9])
    once = np.array([*exact[:4], np.inf], np.float16)  # what overflows is asked of no plan

    def ok(*changed: float) -> bool:
        return accuracy([exact], [once], [np.array(changed, np.float16)])[0].ok

    assert ok(*once) and ok(1.0, np.inf, -np.inf, np.nan, 7.0)
    for k, wrong in enumerate((1.1, -np.inf, np.nan, 0.0)):
        assert not ok(*(wrong if k == j else y for j, y in enumerate(once)))
    assert not ok(np.nan, np.inf, -np.inf, np.nan, np.inf)


@pytest.mark.slow  # to compile
def test_a_plan_is_good_that_runs_and_bad_that_gives_other_numbers_or_sends_other_bytes() -> None:
    w = jnp.asarray(np.random.default_rng(0).normal(size=(64, 64)), jnp.float32)
    made = programs.Made(lambda w: jnp.tanh(w @ w), (w,), (0,))
    plan = te.optimize(made.trace(), "cpu:8", settings=te.Settings(work=0.05)).best("peak_bytes")
    exact = [np.tanh(np.asarray(w, float) @ np.asarray(w, float))]
    once = [np.asarray(made.function(w))]

    def row(**changed: Any) -> dict[str, Any]:
        given = {"reference": exact, "original": once, "made": made, **changed}
        return bench_plans.ran(plan, groups=["result"], **given)

    good = row()
    assert bench_plans.good(good) and good["wire"] and good["ratio"] < 4.0
    assert not bench_plans.good(row(reference=[exact[0] * 1.01], original=[once[0] * 1.01]))
    assert not bench_plans.good({**good, "wire": {"all_gather 8": [4, 8]}})
    other = replace(made, function=lambda w: w, arguments=(w[:8],))
    failed = row(made=other)
    assert not bench_plans.good(failed) and "fails" in failed
    assert "2 bad" in bench_plans.total({"one": {"plans": [good, failed, {**good, "ratio": 9.0}]}})
    assert "BAD" in bench_plans.lines("one", {"plans": [failed]})[0]
