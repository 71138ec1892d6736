"""The rule language: terms, directions, families, guards, and faults that show their place."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules import Rule, load_book
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, book_names
from tapestry_egg.rules.language.families import FAMILIES, SELECTED, kernels_of
from tapestry_egg.rules.language.rewrites import Apply, Constant, Tensor, TermText
from tapestry_egg.rules.verify.examples import example_graph

HEAD = """ruleset: algebra
rules:
  - name: mine
    law: "for people"
    reason: none
    numerics: reorders
"""


def rules(tmp_path: Path, body: str) -> tuple[Rule, ...]:
    path = tmp_path / "mine.yaml"
    path.write_text(HEAD + "".join(f"    {line}\n" for line in body.strip().splitlines()))
    return load_book(path).rules


def fires(rule: Rule, text: str) -> bool:
    """Whether a rule makes anything of a program."""
    found = explore(example_graph(text), [rule]).terms.made
    return any(rule.name in names for names in found.values())


def test_shipped_rules_on_programs_are_terms_but_for_those_that_need_the_next_sibling() -> None:
    books = [load_book(name) for name in book_names()]
    program = [r for b in books for r in b.rules if r.ruleset in PROGRAM_RULESETS]
    text = [r for r in program if not r.text]
    assert len(program) > 150 and {r.book for r in text} == {"fusion"}
    assert all("(following s" in r.egg for r in text)


def test_a_term_is_names_numbers_and_kernels_on_terms() -> None:
    term = TermText("t:reduce[max]{axes=[0, $a], k=none}(f(x, z=0), -1.5)").term()
    assert isinstance(term, Apply)
    assert (term.label, term.head, term.select) == ("t", "reduce", "max")
    assert [(k, v) for k, v, _ in term.params] == [("axes", "[0, $a]"), ("k", "none")]
    first, second = term.operands
    assert isinstance(first, Apply) and isinstance(second, Constant) and second.value == -1.5
    assert first.operands[0] == Tensor("x", first.operands[0].at)
    assert first.operands[1] == Constant(0.0, "z", first.operands[1].at)


def test_one_rule_serves_every_spelling_of_a_product(tmp_path: Path) -> None:
    (rule,) = rules(
        tmp_path,
        "match: t:plus(s:matmul(x, w), s:matmul(x, v))\nreplace: s(x, t(w, v))\ndtype: number",
    )
    for contract in ("[[1], [0]], [[], []]", "[[0], [1]], [[], []]", "[[1], [1]], [[0], [0]]"):
        text = f"""
x: float32[4, 4]
w: float32[4, 4]
v: float32[4, 4]
a = dot_general(x, w) {{dimension_numbers: [{contract}], precision: null,
  preferred_element_type: null, out_sharding: null}}
b = a(x, v)
c = add_any(a, b)
"""
        assert fires(rule, text)
        assert not fires(rule, text.replace("a(x, v)", "a(v, x)"))


def test_both_ways_are_two_rules_and_each_undoes_the_other(tmp_path: Path) -> None:
    there, back = rules(
        tmp_path,
        "match: f:map(t:transpose(x))\nreplace: t(f(x))\nway: both\nnumbers: 0".rsplit("\n", 1)[0],
    )
    assert (there.name, back.name) == ("mine", "mine-back")
    turned = "x: float32[2, 3]\na = transpose(x) {permutation: [1, 0]}\nb = exp(a) {accuracy: null}"
    mapped = "x: float32[2, 3]\na = exp(x) {accuracy: null}\nb = transpose(a) {permutation: [1, 0]}"
    assert fires(there, turned) and not fires(there, mapped)
    assert fires(back, mapped) and not fires(back, turned)


def test_parameters_bind_names_and_compare(tmp_path: Path) -> None:
    (rule,) = rules(
        tmp_path,
        "match: transpose{permutation=$p}(transpose{permutation=$p}(x))\nreplace: x",
    )
    twice = (
        "x: float32[2, 2, 2]\na = transpose(x) {{permutation: {0}}}\n"
        "b = transpose(a) {{permutation: {1}}}\nc = neg(b)"
    )
    assert fires(rule, twice.format("[1, 0, 2]", "[1, 0, 2]"))
    assert not fires(rule, twice.format("[1, 0, 2]", "[2, 1, 0]"))


def test_a_number_is_a_scalar_constant_of_that_value(tmp_path: Path) -> None:
    (rule,) = rules(tmp_path, "match: max(max(x, z=0), z=0)\nreplace: max(x, z)")
    relu = "z: float32 = {0}\nx: float32[4]\na = max(x, z)\nb = max(a, z)\nc = neg(b)"
    assert fires(rule, relu.format(0))
    assert not fires(rule, relu.format(1))


def test_order_matches_each_pair_once(tmp_path: Path) -> None:
    body = "match: [a:neg(x), b:neg(y)]\nreplace: [a(x), b(y)]\norder: [x, y]"
    (rule,) = rules(tmp_path, body)
    assert "(< at_x at_y)" in rule.egg


def test_families_hold_kernels_that_have_templates() -> None:
    for name, kernels in FAMILIES.items():
        for kernel in kernels:
            assert kernels_of(kernel) == (kernel,), (name, kernel)
    assert kernels_of("reduce", "max") == ("reduce_max",)
    assert all(
        k in FAMILIES[word]
        for word, of in SELECTED.items()
        for k in of.values()
        if word in FAMILIES and word != "scan"
    )


def test_egglog_text_may_stand_in_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "mine.egg").write_text(
        '(rule ((= a (Op1 s x)) (kernel s "neg") (= b (Op1 s a))) ((union b x)))\n'
    )
    (rule,) = rules(tmp_path, "include: mine.egg")
    assert fires(rule, "x: float32[2]\na = neg(x)\nb = neg(a)\nc = exp(b) {accuracy: null}")
    (tmp_path / "mine.egg").write_text("(rule ((= a (Op1 s x)) ((union a x)))\n")
    with pytest.raises(RuleError, match="unbalanced") as caught:
        load_book(tmp_path / "mine.yaml")
    assert caught.value.where.startswith(str(tmp_path / "mine.egg"))


FAULTS = [
    ("match: neg(neg(x)\nreplace: x", r"7:22: the text ends too early", "            ^"),
    (
        "match: neg(negg(x))\nreplace: x",
        r"7:16: there is no kernel or family negg",
        "Did you mean neg",
    ),
    ("match: neg(x)\nreplace: y", r"8:14: 'y' is not a tensor of the pattern", "^"),
    ("match: neg(x)\nreplace: map(x)", r"8:14: map stands for several kernels", "^"),
    ("match: x\nreplace: x", r"7:12: a pattern is a kernel on operands", "^"),
    (
        "match: matmul(x, w)\nreplace: matmul(w, x)",
        "8:14: no values for dimension_numbers of dot_general",
        "label it, `s:matmul(...)`, and write `s(w, x)`",
    ),
    (
        "match: neg(x)\nreplace: neg(transpose(x))",
        "8:18: no values for permutation of transpose",
        "Give them, transpose{permutation=...}(x).",
    ),
    ("match: neg(x)\nreplace: add(x, 0)", r"8:21: a replacement cannot make a constant", "z=0"),
    ("match: neg(x)\nreplace: transpose{permutation=[1 0]}(x)", r"8:39: unexpected '0'", "^"),
    (
        "match: neg(x)\nreplace: transpose{permutation=turn(1)}(x)",
        "8:36: there is no function turn",
        "^",
    ),
    ("match: neg(x)\nreplace: neg(\n  transpose{permutation=turn(1)}(x))", "8:14: there is", "^"),
    ("match: neg(x)\nreplace: |\n  neg(\n  transpose{permutation=turn(1)}(x))", "10:", "^"),
    ("match: s:neg(s:exp(x))\nreplace: x", "7:12: 's' is the label of another kernel too", "^"),
    ("match: neg(x)", "3:5: a rule with `match` needs `replace`", ""),
    ("match: neg(x)\nreplace: x\nway: back", "9:10: way is 'back'", "one or both"),
    ("match: neg(x)\nreplace: x\ndtype: big", "9:12: dtype is 'big'", "number"),
    ("match: neg(x)\nreplace: [x, x]", "8:14: 1 patterns, 2 replacements", ""),
    ("match: neg(x)\nreplace: x\ngaurd: true", "9:5: unknown key 'gaurd'", "Did you mean 'guard'"),
    ("match: neg(x)\nreplace: x\norder: [x, y]", "9:12: `order` lists", ""),
    ("matches: neg(x)\nreplace: x", "7:5: unknown key 'matches'", "Did you mean 'match'"),
    ("replace: x", "3:5: a rule needs either `match` and `replace`", ""),
]


@pytest.mark.parametrize(("body", "match", "shown"), FAULTS)
def test_faults_show_their_place(tmp_path: Path, body: str, match: str, shown: str) -> None:
    with pytest.raises(RuleError, match=f"mine.yaml:{match}") as caught:
        rules(tmp_path, body)
    assert shown in str(caught.value)


def test_a_kernel_that_is_made_twice_is_matched_twice_on_the_way_back(tmp_path: Path) -> None:
    body = "match: f:map(c:concat(x, y))\nreplace: c(f(x), f(y))\nway: both"
    there, back = rules(tmp_path, body)
    joined = """
x: float32[2]
y: float32[3]
c = concatenate(x, y) {dimension: 0}
a = neg(c)
"""
    apart = (
        "x: float32[2]\ny: float32[3]\na = neg(x)\nb = neg(y)\nc = concatenate(a, b) {dimension: 0}"
    )
    assert fires(there, joined) and fires(back, apart)
    assert not fires(back, apart.replace("b = neg(y)", "b = sign(y)"))
