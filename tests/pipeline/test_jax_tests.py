"""The harness that runs JAX's own tests under `te.jit`: what counts as intended."""

from __future__ import annotations

import pytest

from benchmarks import jax_tests
from benchmarks.jax_tests import Category, Outcome, intended, report

SAME, DIFFERS, NUMBERS = "f.T.same", "f.T.differs", "f.T.numbers"
PLAIN = {t: Outcome(t, "passed", 0.1) for t in (SAME, DIFFERS, NUMBERS)}


def replaced(*failed: str) -> dict[str, Outcome]:
    return {
        t: Outcome(t, "failed", 0.1, "words", t == NUMBERS) if t in failed else o
        for t, o in PLAIN.items()
    }


def test_categories_are_few_and_say_why() -> None:
    found = intended()
    assert 0 < len(found) <= 5
    assert all(len(c.reason) > 40 and c.tests for c in found)
    patterns = [p for c in found for p in c.tests]
    assert len(patterns) == len(set(patterns))
    assert {p.partition(".")[0] for p in patterns} <= set(jax_tests.FILES)


@pytest.mark.parametrize(
    ("failed", "listed", "code"),
    [
        ((), (), 0),
        ((DIFFERS,), ("f.T.dif*",), 0),
        ((DIFFERS,), (), 1),
        ((), (DIFFERS,), 1),
        ((NUMBERS,), (NUMBERS,), 1),
    ],
)
def test_only_what_is_listed_may_differ_and_never_numbers(
    failed: tuple[str, ...], listed: tuple[str, ...], code: int
) -> None:
    assert report(PLAIN, replaced(*failed), [Category("c", "why", listed)]) == code
