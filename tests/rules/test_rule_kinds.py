"""Kinds of rules: a rule about any kernel that gives one result reaches a verdict, and what is said
of one that does not hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.metakernels.registry import templates
from tapestry_egg.rules import Rule
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule
from tests.rules.corpus import rules_of


def rule_of(folder: Path, match: str, replace: str, **more: Any) -> Rule:
    (rule,) = rules_of(folder, {"mine": {"match": match, "replace": replace, **more}})
    return rule


def identity(folder: Path, kernel: str) -> Rule:
    """A rule that leaves an operation as it is: sound, if it can be tried."""
    declared = templates()[kernel][0].inputs
    names = [f"x{k}" for k, o in enumerate(declared) if not o.optional]
    names += ["y"] if kernel == "select_n" else []
    operands = ", ".join(names)
    return rule_of(folder, f"s:{kernel}({operands})", f"s({operands})")


def several(kernel: str) -> bool:
    """Whether a kernel always gives several results."""
    return all(sum(o.count is None for o in t.outputs) > 1 for t in templates()[kernel])


# Of a product in the form of Q and R there are two, whatever the parameters.
KINDS = [k for k in templates() if not several(k) and k != "qr"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KINDS[2::23])
def test_a_rule_about_some_kernels_reaches_a_verdict(kernel: str, tmp_path: Path) -> None:
    verdict = verify_rule(identity(tmp_path, kernel), wanted=4)
    assert verdict is not None and verdict.instances >= 3


@pytest.mark.long
@pytest.mark.slow
def test_a_rule_about_any_kernel_reaches_a_verdict(tmp_path: Path) -> None:
    for kernel in KINDS:
        verdict = verify_rule(identity(tmp_path, kernel), wanted=4)
        assert verdict is not None and verdict.instances >= 3, kernel


def test_a_kernel_of_several_results_is_refused_when_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(RuleError, match=r"corpus.yaml:\d+:\d+: top_k gives 2 results"):
        rule_of(tmp_path, "top_k(x)", "x")


def test_what_a_rule_says_nothing_of_is_as_precise_as_its_pattern(tmp_path: Path) -> None:
    """`precision` of the pattern is taken over by a product that names none."""
    product = (
        "matmul{dimension_numbers=$s.params.dimension_numbers, "
        "preferred_element_type=$s.params.preferred_element_type}(x, w)"
    )
    assert verify_rule(rule_of(tmp_path, "s:matmul(x, w)", product)) is not None
    lost = product.replace("matmul{", "matmul{precision=none, ")
    with pytest.raises(RuleRefused, match="less precise"):
        verify_rule(rule_of(tmp_path, "s:matmul(x, w)", lost))


def test_a_counterexample_is_in_small_numbers_and_names_its_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(RuleRefused) as caught:
        verify_rule(rule_of(tmp_path, "sub(x, y)", "sub(y, x)", dtype="number"))
    shown = str(caught.value)
    assert "rule 'mine' is refused: its two sides differ" in shown
    found = re.search(r"Checked in arithmetic modulo \d+: x = (.*), y = (.*) gives left", shown)
    assert found is not None
    assert all(abs(int(n)) < 4 for text in found.groups() for n in re.findall(r"-?\d+", text))
