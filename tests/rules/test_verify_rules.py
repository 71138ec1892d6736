"""Verification of rules: what is not true is refused with an example, what is true passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.rules import Rule, load_book, load_books
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, book_names
from tapestry_egg.rules.language.receipts import content
from tapestry_egg.rules.verify import trust as trust_module
from tapestry_egg.rules.verify import verdicts as verify_module
from tapestry_egg.rules.verify.trust import (
    Finding,
    ensure_verified,
    tried_by_name,
    verified,
    verified_all,
)
from tapestry_egg.rules.verify.verdicts import RuleRefused, Verdict, verify_rule
from tests.rules.corpus import ENTRIES, named, rules_of

SHIPPED = [r for b in load_books(book_names()) for r in b.rules if r.ruleset in PROGRAM_RULESETS]


@pytest.mark.slow
@pytest.mark.parametrize("every", [24, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("book", sorted({r.where.rsplit(":", 2)[0] for r in SHIPPED}))
def test_shipped_rules_are_true_on_other_programs(book: str, every: int) -> None:
    """The receipts tell of the full check; here are fewer programs, of another seed."""
    rules = [r for r in SHIPPED if r.where.startswith(f"{book}:")]
    found = [verify_rule(r, seed=11, wanted=5) for r in rules[::every]]
    assert found.count(None) <= 1  # one only numbers the program's values


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("convert-dropped", "type"),
        ("transpose-dropped", "field"),
        ("exp-is-linear", "wide"),
        ("integer-division-distributes", "integer"),
        ("narrowing-called-exact", "actual"),
    ],
)
def test_each_kind_of_comparison_refuses_what_only_it_can_see(name: str, numbers: str) -> None:
    rule = named(name)
    with pytest.raises(RuleRefused) as caught:
        verify_rule(rule)
    assert caught.value.counterexample is not None
    assert caught.value.counterexample.numbers == numbers


def test_a_small_program_is_shown_where_one_fails() -> None:
    rule = named("slice-forgets-offset")
    with pytest.raises(RuleRefused) as caught:
        verify_rule(rule)
    assert caught.value.counterexample is not None
    (value,) = caught.value.counterexample.inputs.values()
    assert len(value.split(",")) <= 24


MINE = """
ruleset: algebra
rules:
  - name: mine
    law: "{law}"
    reason: none
    numerics: exact
    match: neg(neg(x))
    replace: {replace}
"""


def write(path: Path, replace: str = "x", law: str = "--x = x") -> Rule:
    path.write_text(MINE.format(replace=replace, law=law))
    return load_book(path).rules[0]


def test_a_verdict_is_kept_under_what_the_rule_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAPESTRY_EGG_CACHE", str(tmp_path / "cache"))
    calls: list[str] = []

    def counted(rule: Rule) -> object:
        calls.append(rule.name)
        return verify_rule(rule, wanted=3)

    monkeypatch.setattr(verify_module, "verify_rule", counted)
    rule = write(tmp_path / "mine.yaml")
    first = verified(rule)
    again = verified(write(tmp_path / "other.yaml", law="another text for people"))
    assert calls == ["mine"], "the text for people is not what was verified"
    assert first is not None and again is not None and first.instances == again.instances
    (kept,) = (tmp_path / "cache" / "rules").iterdir()
    kept.write_text("not JSON")
    verified(rule)
    assert len(calls) == 2, "a broken entry is as none"
    with pytest.raises(RuleRefused):
        verified(write(tmp_path / "mine.yaml", replace="neg(x)"))
    assert len(list((tmp_path / "cache" / "rules").iterdir())) == 1, "refusals are not kept"


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAPESTRY_EGG_CACHE", str(tmp_path / "file"))
    assert verified(write(tmp_path / "mine.yaml")) is not None


def test_books_are_verified_before_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAPESTRY_EGG_CACHE", str(tmp_path / "cache"))
    write(tmp_path / "bad.yaml", replace="neg(x)")
    with pytest.raises(RuleRefused, match="mine"):
        ensure_verified([load_book(tmp_path / "bad.yaml")])
    write(tmp_path / "good.yaml")
    ensure_verified([load_book(tmp_path / "good.yaml")])


@pytest.mark.slow
def test_processes_say_what_this_one_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same verdicts, in the order of the rules, counterexamples included."""
    monkeypatch.setattr(trust_module, "cache_folder", lambda: tmp_path)
    names = ("barrier", "unstack", "exp-is-linear", "convert-dropped", "sort-stable")
    *first, stable = rules_of(tmp_path, {name: ENTRIES[name] for name in names})
    rules = [*first, write(tmp_path / "mine.yaml", replace="neg(x)"), stable]
    here = verified_all(rules, again=True)
    monkeypatch.setattr(trust_module, "_FEW", 0)
    elsewhere = verified_all(rules, again=True)

    def told(found: Finding) -> object:
        if isinstance(found, Verdict):
            return replace(found, seconds=0.0)
        return type(found), str(found), getattr(found, "counterexample", None)

    assert list(map(told, here)) == list(map(told, elsewhere))
    assert [isinstance(v, RuleRefused) for v in elsewhere] == [False] * 2 + [True] * 3 + [False]
    kept = verified_all(rules)
    assert [v.seconds for v in kept if isinstance(v, Verdict)] == [0.0] * 3, "kept in the cache"


def test_a_rule_that_changed_meanwhile_is_tried_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trust_module, "cache_folder", lambda: tmp_path)
    rule = write(tmp_path / "mine.yaml")
    write(tmp_path / "mine.yaml", replace="neg(x)")  # which is not true
    monkeypatch.setattr(trust_module, "_FEW", 0)
    (verdict,) = verified_all([rule])
    assert isinstance(verdict, Verdict) and verdict.instances >= 3
    assert tried_by_name(rule.where, rule.name, content(rule)) is None


def test_a_rule_that_never_applies_is_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_module, "TRIES", 300)
    path = tmp_path / "never.yaml"
    path.write_text(MINE.format(replace="x", law="never") + "    guard: $x.rank > 9\n")
    with pytest.raises(RuleRefused, match=r"cannot be checked.*guard.*300 programs"):
        verify_rule(load_book(path).rules[0])


def test_faults_in_expressions_have_a_place(tmp_path: Path) -> None:
    path = tmp_path / "fault.yaml"
    path.write_text(MINE.format(replace="x", law="fault") + "    guard: $x.rnk > 9\n")
    with pytest.raises(RuleError, match=r"fault.yaml:10:\d+: .*'rnk' is not an attribute"):
        verify_rule(load_book(path).rules[0])


def test_a_class_that_claims_too_much_is_refused() -> None:
    rule = named("add-associates")
    assert verify_rule(rule, wanted=5) is not None
    with pytest.raises(RuleRefused, match="numerics class"):
        verify_rule(replace(rule, numerics="exact"))


@pytest.mark.slow
def test_a_kernel_without_one_of_its_parameters_is_told_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a template says only of some dims (which a reversal turns) must be given, too."""
    monkeypatch.setattr(verify_module, "TRIES", 600)
    file = tmp_path / "mine.yaml"
    file.write_text(
        "ruleset: algebra\nrules:\n- {name: r, law: l, reason: r, numerics: exact, "
        'match: "neg(s:rev(x))", replace: "rev(neg(x))"}\n'
    )
    (rule,) = load_book(file).rules
    with pytest.raises(RuleRefused, match=r"no value for dimensions\n.*dimensions=\.\.\."):
        verify_rule(rule)
