"""Kinds of rules: about every kernel, with every parameter that promises or loses something.

`kinds.yaml` holds false and sound ones in short. Beside it, a rule about any kernel that gives one
result reaches a verdict.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tapestry_egg.errors import RuleError
from tapestry_egg.metakernels.registry import templates
from tapestry_egg.rules import Rule, load_book
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule
from tests.tiers import tiers

TABLE = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text("utf-8"))
_KEYS = {"m": "match", "r": "replace", "n": "numerics", "d": "dtype", "g": "guard", "l": "let"}
FALSE, SOUND = list(TABLE["refused"]), list(TABLE["accepted"])


def written(folder: Path, name: str, short: dict[str, Any]) -> Rule:
    """The rule of an entry of the table, read from a file."""
    entry = {"name": name, "law": name, "reason": short.get("why", "it holds"), "numerics": "exact"}
    entry |= {_KEYS[k]: v for k, v in short.items() if k in _KEYS}
    path = folder / "kinds.yaml"
    path.write_text(yaml.safe_dump({"rules": [entry]}), "utf-8")
    (rule,) = load_book(path).rules
    return rule


def check_false(folder: Path, name: str) -> None:
    with pytest.raises(RuleRefused) as caught:
        verify_rule(written(folder, name, TABLE["refused"][name]))
    assert caught.value.counterexample is not None, f"{name} was not tried: {caught.value}"


def check_sound(folder: Path, name: str) -> None:
    verdict = verify_rule(written(folder, name, TABLE["accepted"][name]))
    assert verdict is not None and verdict.instances >= 3


def test_the_table_is_long_enough_to_mean_something() -> None:
    assert len(FALSE) >= 400 and len(SOUND) >= 80


@pytest.mark.parametrize("name", tiers(FALSE[::32], fast=2))
def test_some_that_are_false_are_refused_with_a_counterexample(name: str, tmp_path: Path) -> None:
    check_false(tmp_path, name)


@pytest.mark.slow
@pytest.mark.parametrize("name", SOUND[::37])
def test_some_that_are_sound_pass(name: str, tmp_path: Path) -> None:
    check_sound(tmp_path, name)


@pytest.mark.long
@pytest.mark.slow
def test_all_that_are_false_are_refused(tmp_path: Path) -> None:
    for name in FALSE:
        check_false(tmp_path, name)


@pytest.mark.long
@pytest.mark.slow
def test_all_that_are_sound_pass(tmp_path: Path) -> None:
    for name in SOUND:
        check_sound(tmp_path, name)


def identity(folder: Path, kernel: str) -> Rule:
    """A rule that leaves an operation as it is: sound, if it can be tried."""
    declared = templates()[kernel][0].inputs
    names = [f"x{k}" for k, o in enumerate(declared) if not o.optional]
    names += ["y"] if kernel == "select_n" else []
    operands = ", ".join(names)
    return written(folder, kernel, {"m": f"s:{kernel}({operands})", "r": f"s({operands})"})


def several(kernel: str) -> bool:
    """Whether a kernel always gives several results."""
    return all(sum(o.count is None for o in t.outputs) > 1 for t in templates()[kernel])


# Of a product in the form of Q and R there are two, whatever the parameters.
KINDS = [k for k in templates() if not several(k) and k != "qr"]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", KINDS[::23])
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
    with pytest.raises(RuleError, match=r"kinds.yaml:\d+:\d+: top_k gives 2 results"):
        written(tmp_path, "mine", {"m": "top_k(x)", "r": "x"})


def test_what_a_rule_says_nothing_of_is_as_precise_as_its_pattern(tmp_path: Path) -> None:
    """`precision` of the pattern is taken over by a product that names none."""
    short = {
        "m": "s:matmul(x, w)",
        "r": "matmul{dimension_numbers=$s.params.dimension_numbers, "
        "preferred_element_type=$s.params.preferred_element_type}(x, w)",
    }
    assert verify_rule(written(tmp_path, "kept", short)) is not None
    short["r"] = short["r"].replace("matmul{", "matmul{precision=none, ")
    with pytest.raises(RuleRefused, match="less precise"):
        verify_rule(written(tmp_path, "lost", short))


def test_a_counterexample_is_in_small_numbers_and_names_its_arithmetic(tmp_path: Path) -> None:
    with pytest.raises(RuleRefused) as caught:
        verify_rule(written(tmp_path, "mine", {"m": "sub(x, y)", "r": "sub(y, x)", "d": "number"}))
    shown = str(caught.value)
    assert "rule 'mine' is refused: its two sides differ" in shown
    found = re.search(r"Checked in arithmetic modulo \d+: x = (.*), y = (.*) gives left", shown)
    assert found is not None
    assert all(abs(int(n)) < 4 for text in found.groups() for n in re.findall(r"-?\d+", text))
