"""The harness that runs JAX's own tests under `te.jit`: what counts as intended."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import jax_tests
from benchmarks.jax_tests import Category, Outcome, intended, main, report

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


TESTS = """
import unittest, jax, jax.numpy as jnp, numpy as np
from jax import jit
from jax._src import test_util as jtu

class Tiny(jtu.JaxTestCase):
    def test_numbers(self):
        print("no line of its own", end="", flush=True)
        self.assertAllClose(jit(lambda x: x * 2)(jnp.arange(3.0)), np.arange(3.0) * 2)
    def test_own_kind(self):
        self.assertNotIn("tapestry", type(jax.jit(lambda x: x)).__module__)
    def test_end(self):
        import os
        os._exit(3)
"""


@pytest.mark.long
def test_a_checkout_is_run_twice_and_a_test_may_end_its_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "tiny_test.py").write_text(TESTS)
    kept = tmp_path / "out.json"
    assert main([str(tmp_path), "tiny_test", "--json", str(kept)]) == 1
    shown = capsys.readouterr().out
    assert "NOT INTENDED tiny_test.Tiny.test_own_kind" in shown
    assert "test_numbers" not in shown and "2 tests, 1 differ" in shown
    assert jax_tests._read(kept)["te.jit"]["tiny_test.Tiny.test_end"].words == "the process ended"
