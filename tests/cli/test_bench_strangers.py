"""The runner of other libraries' programs: what it finds, and what it says of one program."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import agreement, bench_strangers
from benchmarks.listed import listed, missing
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books


def test_programs_are_found_without_their_libraries() -> None:
    found = {**listed("strangers"), **listed("libraries")}
    assert len(found) >= 80 and len({needs for needs in found.values()}) >= 27
    assert found["optax:speech_ctc"] == ("optax",)
    assert found["jaxopt:ridge_hypergradient"] == ("jaxopt",)
    assert missing(("numpy", "no_such_package")) == ("no_such_package",)


@pytest.mark.long
def test_a_program_runs_under_both_and_agrees(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    assert bench_strangers.main(["optax:schedule_free", "--calls", "--json", str(rows)]) == 0
    (row,) = json.loads(rows.read_text()).values()
    assert row["outcome"] == "equal" and row["te"][0] > 0.0 and row["jax"][1] > 0.0


def test_distances_see_types_of_difference() -> None:
    a = np.array([1.0, np.nan, np.inf])
    assert agreement.distance(a, a.copy()) == 0.0
    assert agreement.distance(a, np.array([1.0, np.nan, 3.0])) == np.inf
    assert agreement.distance(a, np.array([1.5, np.nan, np.inf])) == 0.5
    assert agreement.distance(np.array([1, 2]), np.array([1, 3])) == 0.5


def test_signs_of_gradients_that_are_rounding_and_subnormals_are_allowed() -> None:
    x = jax.random.normal(jax.random.key(0), (64,))

    @jax.jit
    def first_step(x: jax.Array) -> dict[str, jax.Array]:
        g = jnp.sum(x - jnp.mean(x))  # nothing but rounding
        return {"b": 1.0 - 1e-3 * g / (jnp.abs(g) + 1e-30), "x": x}

    def allows(expected: jax.Array, found: jax.Array) -> bool:
        allowed = agreement.allowance(np.asarray(expected), [np.asarray(expected)])
        return agreement.distance(np.asarray(expected), np.asarray(found)) <= allowed

    expected = agreement.leaves_of(first_step(x))
    allowed = agreement.allowances(first_step, (x,), (x,), expected)
    flipped = agreement.leaves_of({"b": 2.0 - first_step(x)["b"], "x": x})
    assert not agreement.difference(expected, flipped, allowed)
    wrong = agreement.leaves_of({"b": first_step(x)["b"] + 0.1, "x": x * 1.001})
    assert "['b']" in agreement.difference(expected, wrong, allowed)
    wrong |= {k: v for k, v in expected.items() if "['b']" in k}
    assert "['x']" in agreement.difference(expected, wrong, allowed)

    small = jnp.full(8, 3e-7, jnp.float16)  # six of the least numbers
    assert allows(small, small + jnp.float16(2e-7))
    assert not allows(small, small + jnp.float16(1e-4))


def test_every_expression_of_the_shipped_books_parses() -> None:
    """They are parsed when they are first used."""
    count = 0
    for rule in [r for book in load_books(DEFAULT_BOOKS) for r in book.rules if r.recipe]:
        assert rule.recipe is not None
        wants = rule.recipe.wants.values()
        given = [*rule.recipe.guards, *rule.recipe.let.values()]
        given += [e for w in wants for e in (w.inputs, *w.params.values())]
        for expression in given:
            expression.check()
            count += 1
    assert count > 300
