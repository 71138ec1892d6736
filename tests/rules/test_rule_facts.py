"""Rules that assert facts: what no evaluation can see is not believed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapestry_egg.rules import load_book, load_books
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, book_names
from tapestry_egg.rules.language.receipts import content, receipts
from tapestry_egg.rules.verify.trust import ensure_verified
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule

HEAD = """\
ruleset: {ruleset}
rules:
  - name: mine
    law: none
    reason: none
    numerics: exact
    egg: |
"""


def written(path: Path, egg: str, ruleset: str = "algebra") -> Path:
    file = path / "mine.yaml"
    file.write_text(HEAD.format(ruleset=ruleset) + f"      {egg}\n")
    return file


@pytest.mark.parametrize(
    "egg",
    [
        '(rule ((= a (Op2 s x y))) ((splat x "0.0")))',  # then x + y = y by a rule of ours
        '(rule ((= a (Op2 s x y))) ((union a y) (splat x "1.0")))',
        '(rule ((= a (Op1 s x))) ((kernel s "neg")))',
        '(rule ((= a (Op1 s x))) ((member s "map")))',
        '(rule ((= a (Op1 s x))) ((set (wanted "a" "b" 1 2 3 4 5 6 7 8) s)))',
        "(rule ((= a (Op1 s x))) ((node1 3 s 4)))",
        "(rule ((= a (Op1 s x))) ((delete (Op1 s x))))",
        "(rule ((= a (Op1 s x))) ((union a (N 3))))",
        "(rule ((= a (Op1 s x))) ((let k (Leaf 2)) (union a k)))",
        "(rule ((= a (Op1 s x))) ((union a q)))",
        '(rule ((= a (Op1 s x))) ((change 0 1 "slice" 0 0 -1)))',
    ],
)
def test_a_rule_of_programs_may_only_unite(egg: str, tmp_path: Path) -> None:
    (rule,) = load_book(written(tmp_path, egg)).rules
    with pytest.raises(RuleRefused, match="'mine' is refused: it"):
        verify_rule(rule)


def test_a_relation_of_its_own_is_no_fact_about_programs(tmp_path: Path) -> None:
    egg = "(relation looked-at (T)) (rule ((= a (Op1 s x))) ((looked-at a)))"
    (rule,) = load_book(written(tmp_path, egg)).rules
    assert verify_rule(rule) is None


@pytest.mark.parametrize(
    ("ruleset", "egg"),
    [
        ("collectives", '(rule ((partial l m list base)) ((change l base "slice" list -1 m)))'),
        ("sharding", "(rule ((signature s)) ((strategy s (Whole) 0 0)))"),
        ("fold", "(rule ((corner s p k o box)) ((set (least s p k 0) 0)))"),
    ],
)
def test_rules_of_layouts_are_ours_or_refused(ruleset: str, egg: str, tmp_path: Path) -> None:
    book = load_book(written(tmp_path, egg, ruleset))
    with pytest.raises(RuleRefused, match="facts about layouts"):
        ensure_verified([book])


def test_all_rules_of_ours_carry_receipts() -> None:
    rules = [r for b in load_books(book_names()) for r in b.rules]
    missing = [r.name for r in rules if content(r) not in receipts()]
    assert not missing, "run `tapestry-egg verify --again --receipts`"
    layouts = [r for r in rules if r.ruleset not in PROGRAM_RULESETS]
    assert layouts and all(verify_rule(r) is None for r in layouts)
