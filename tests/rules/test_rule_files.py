"""Files of rules: what is wrong in one is named, with its place."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.errors import ExtractError, RuleError
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rules.language.book import load_book, load_books
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
