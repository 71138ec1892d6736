"""The runner of other libraries' programs: what it finds, and what it says of one program."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks import agreement, bench_libraries, libraries
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books


def test_programs_are_found_without_their_libraries() -> None:
    found = libraries.programs()
    assert len(found) >= 80
    assert found["optax:ctc"] == ("optax",)
    assert "equinox" in found["kidger:diffrax_neural_ode"]
    assert libraries.missing(("numpy", "no_such_package")) == ("no_such_package",)


@pytest.mark.long
def test_a_program_runs_under_both_and_agrees() -> None:
    outcome = bench_libraries.measure("optax:chained")
    assert outcome["outcome"] == "equal", outcome
    assert outcome["te"]["seconds"] > 0.0 and outcome["jax"]["cpu"] > 0.0
    assert bench_libraries.totals({"optax:chained": outcome})["equal"] == 1


def test_distances_see_types_of_difference() -> None:
    a = np.array([1.0, np.nan, np.inf])
    assert agreement.distance(a, a.copy()) == 0.0
    assert agreement.distance(a, np.array([1.0, np.nan, 3.0])) == np.inf
    assert agreement.distance(a, np.array([1.5, np.nan, np.inf])) == 0.5
    assert agreement.distance(np.array([1, 2]), np.array([1, 3])) == 0.5


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
