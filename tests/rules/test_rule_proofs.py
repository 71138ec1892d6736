"""Proofs of rules: what a solver says of laws of single elements."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapestry_egg.rules import Rule, load_book
from tapestry_egg.rules.verify import proofs as proofs_module
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule

TEXT = """\
ruleset: algebra
rules:
  - name: mine
    law: none
    reason: none
    numerics: {numerics}
    match: {match}
    replace: {replace}
    guard: {guard}
"""


def rule(path: Path, match: str, replace: str, guard: str, numerics: str = "exact") -> Rule:
    file = path / "mine.yaml"
    file.write_text(TEXT.format(match=match, replace=replace, guard=guard, numerics=numerics))
    return load_book(file).rules[0]


def test_wrapping_laws_are_proven_over_integers(tmp_path: Path) -> None:
    pytest.importorskip("z3")
    law = rule(tmp_path, "sub(x, y)", "add(x, neg(y))", "kind($x.dtype) in [int, uint]")
    verdict = verify_rule(law)
    assert verdict is not None and {"int8", "int32", "uint8"} <= set(verdict.proven)
    assert "proven over ℤ (int" in str(verdict) and "tested over floats on" in str(verdict)


@pytest.mark.slow
def test_piecewise_laws_are_proven_over_the_reals(tmp_path: Path) -> None:
    pytest.importorskip("z3")
    same = "$x == $y and kind($x.dtype) == float"
    law = rule(tmp_path, "min(x, max(x, y))", "x", same, "reorders")  # NaN may be anything
    verdict = verify_rule(law)
    assert verdict is not None and verdict.proven == ("reals",)


def test_of_functions_only_that_equals_give_equals_is_known(tmp_path: Path) -> None:
    pytest.importorskip("z3")
    odd = rule(tmp_path, "sin(neg(x))", "neg(sin(x))", "kind($x.dtype) == float")
    verdict = verify_rule(odd)
    assert verdict is not None and not verdict.proven
    assert str(verdict).startswith("tested on ")


def test_the_one_value_that_no_draw_meets_is_found(tmp_path: Path) -> None:
    """640 x + 1 wraps to no even number; 1640531527 x is 20260203 for exactly one x of 2**32."""
    pytest.importorskip("z3")
    needle = rule(tmp_path, "eq(mul(x, 1640531527), 20260203)", "ne(x, x)", "$x.dtype == int32")
    with pytest.raises(RuleRefused) as caught:
        verify_rule(needle)
    found = caught.value.counterexample
    assert found is not None and "True" in found.pattern and "True" not in found.replacement


def test_without_a_solver_rules_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proofs_module, "solver_installed", lambda: False)
    law = rule(tmp_path, "sub(x, y)", "add(x, neg(y))", "kind($x.dtype) in [int, uint]")
    verdict = verify_rule(law)
    assert verdict is not None and not verdict.proven and verdict.cases > 500
    assert str(verdict).startswith("tested on ")
