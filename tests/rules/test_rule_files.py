"""Files of rules: what is wrong in one is named, with its place."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.errors import ExtractError, RuleError
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, book_names, load_book, load_books
from tapestry_egg.rules.language.receipts import content, receipts
from tapestry_egg.rules.verify.trust import ensure_verified
from tapestry_egg.rules.verify.verdicts import RuleRefused, verify_rule
from tapestry_egg.tracing.trace import trace

GOOD = """\
ruleset: collectives
rules:
  - name: mine
    law: "l -> l"
    reason: None.
    numerics: exact
    egg: |
      (rule ((partial l m list base)) ((change l base "all_reduce" list -1 m)))
"""

EGGLESS = GOOD[: GOOD.index("    egg:")]


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        ("rules: [", ":2:1", "YAML"),
        ("- a\n- b\n", ":1:1", "mapping"),
        ("ruleset: fold\n", ":1:1", "rules"),
        ("ruleset: fold\nrulez: []\nrules: []\n", ":2:1", "rulez"),
        ("rules:\n  - 3\n", ":2:5", "mapping"),
        ("rules:\n  - name: a\n", ":2:5", "law"),
        (GOOD.replace("numerics: exact", "numerics: sloppy"), ":6:15", "sloppy"),
        (GOOD + "    colour: red\n", ":9:5", "colour"),
        (GOOD + "    ruleset: nowhere\n", ":9:14", "nowhere"),
        (GOOD + "    law: again\n", ":9:5", "'law' is given twice"),
        (GOOD + "    guard: 1 +\n", ":3:5", "given"),
        (GOOD.replace("law: ", "law: [a] #"), ":4:10", "'law' is not a text"),
        (EGGLESS + "    egg: [a, b]\n", ":7:10", "'egg' is not a text"),
        (EGGLESS + "    include: nowhere.egg\n", ":7:14", "cannot read"),
        (EGGLESS + "    include: .\n", ":7:14", "cannot read"),
        (GOOD.replace("-1 m)))", "-1 m))"), ":8:7", "parenthes"),
        (GOOD.replace("(rule (", "(delete-everything (", 1), ":8:7", "delete-everything"),
    ],
)
def test_malformed_rule_files_say_where(text: str, place: str, what: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(RuleError) as e:
        load_book(path)
    assert f"{path}{place}" in e.value.where, e.value.where
    assert what in str(e.value)


@pytest.mark.parametrize(
    "egg",
    [
        '(rule ((nonsense l)) ((change l l "slice" 0 0 -1)))',
        "(rule ((partial l m list base)) ((change l base all_reduce list -1 m)))",
        "(rule ((partial l m list base)) ((change l base)))",
    ],
)
def test_rules_that_egglog_refuses_are_named(egg: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.rsplit("\n      ", 1)[0] + f"\n      {egg}\n")
    shape = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = trace(lambda w, x: jnp.tanh(x @ w).sum(0), shape, shape)
    with pytest.raises(RuleError, match="mine") as e:
        optimize(
            program,
            "h100:2",
            books=("sharding", "collectives"),
            rules=(path,),
            settings=Settings(work=30.0),
        )
    assert f"{path}:3" in e.value.where


def test_rule_names_are_unique(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD.replace("mine", "all-gather"))
    with pytest.raises(RuleError, match="defined twice"):
        load_books(["collectives", path])
    with pytest.raises(RuleError, match="no rule"):
        load_book("collectives").without("nonsense")
    with pytest.raises(RuleError, match="unknown rule book"):
        load_book("nonsense")
    with pytest.raises(RuleError, match="cannot be read"):
        load_book(tmp_path / "absent.yaml")


def test_a_book_that_ships_is_read_once(tmp_path: Path) -> None:
    assert load_book("fusion") is load_book("fusion")
    own = tmp_path / "mine.yaml"
    own.write_text(GOOD)
    before = load_book(own)
    own.write_text(GOOD.replace("None.", "Some."))
    assert (before.rules[0].reason, load_book(own).rules[0].reason) == ("None.", "Some.")


def test_books_without_a_rule_that_shares_work_are_told_what_they_lack() -> None:
    program = trace(jnp.tanh, jax.ShapeDtypeStruct((8, 8), jnp.float32))
    with pytest.raises(ExtractError, match=r"(?s)no rule says how devices share.*`sharding`"):
        optimize(program, "cpu:2", books=(), settings=Settings(work=0.1))


# Rules that assert facts: what no evaluation can see is not believed.


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
