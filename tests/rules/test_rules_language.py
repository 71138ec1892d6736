"""The rule language: terms, directions, families, guards, and faults that show their place."""

from __future__ import annotations

import random
from pathlib import Path
from textwrap import dedent
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.errors import RuleError
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules import Rule, load_book
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, book_names
from tapestry_egg.rules.language.families import FAMILIES, SELECTED, kernels_of
from tapestry_egg.rules.language.rewrites import Apply, Constant, Tensor, TermText
from tapestry_egg.rules.verify.examples import example_graph
from tapestry_egg.tracing.trace import trace

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


KERNELS: list[tuple[str, int, Any]] = [
    *((name, 1, getattr(jax.lax, name)) for name in ("exp", "sin", "cos", "tanh")),
    *((name, 2, getattr(jax.lax, name)) for name in ("add", "mul", "sub")),
]


def drawn_pattern(rng: random.Random, size: int) -> Any:
    """A term of so many kernels over x and y, as (name, function, operands)."""
    name, arity, function = rng.choice(KERNELS if size > 1 else KERNELS[:4])
    shares = [0] * arity
    for _ in range(size - 1):
        shares[rng.randrange(arity)] += 1
    inner = [drawn_pattern(rng, s) if s else rng.choice("xy") for s in shares]
    return (name, function, inner)


def shown(term: Any) -> str:
    return term if isinstance(term, str) else f"{term[0]}({', '.join(map(shown, term[2]))})"


def leaves(term: Any) -> list[str]:
    return [term] if isinstance(term, str) else [v for t in term[2] for v in leaves(t)]


def computed(term: Any, given: dict[str, Any]) -> list[Any]:
    """The values of a term and of its parts, operands first, the term's own last."""
    if isinstance(term, str):
        return [given[term]]
    parts = [computed(t, given) for t in term[2]]
    return [v for part in parts for v in part] + [term[1](*(part[-1] for part in parts))]


def matched(term: Any, value: Any, made: dict[Any, Any], given: dict[str, Any]) -> Any:
    """What x and y are where a term is this value; None where it is not."""
    if isinstance(term, str):
        return given if given.setdefault(term, value) == value else None
    kernel, operands = made.get(value, ("", ()))
    if kernel != term[0]:
        return None
    for inner, operand in zip(term[2], operands, strict=True):
        if matched(inner, operand, made, given) is None:
            return None
    return given


@pytest.mark.parametrize("size", [3, 4, 5, 6, 7])
def test_rules_fire_where_they_match_and_nowhere_else(tmp_path: Path, size: int) -> None:
    """Programs that hold a pattern several times, with parts of one as operands of another."""
    fired = 0
    for seed in range(40):
        rng = random.Random(1000 * size + seed)
        pattern = drawn_pattern(rng, size)
        while set(leaves(pattern)) != {"x", "y"}:
            pattern = drawn_pattern(rng, size)
        (rule,) = rules(tmp_path, f"match: {shown(pattern)}\nreplace: pow(x, y)")
        draws = [(rng.random(), rng.random()) for _ in range(4)]

        def program(a: Any, b: Any, pattern: Any = pattern, draws: Any = draws) -> Any:
            pool, ends = [a, b], []
            for first, second in draws:
                x, y = (pool[int(r * len(pool))] for r in (first, second))
                pool += computed(pattern, {"x": x, "y": y})
                ends.append(pool[-1])
            return ends

        graph = trace(program, *[jax.ShapeDtypeStruct((4,), jnp.float32)] * 2).graph
        found = explore(graph, [rule])
        class_of = found.terms.class_of
        made = {
            class_of[op.outputs[0]]: (op.kernel, tuple(class_of[v] for v in op.inputs))
            for op in graph.operations
        }
        expected = set()
        for c in made:
            given = matched(pattern, c, made, {})
            if given is not None:
                expected.add((c, (given["x"], given["y"])))
        got = {
            (c, n.operands)
            for c, nodes in enumerate(found.terms.nodes)
            for n in nodes
            if n.value < 0 and found.catalogue[n.signature].kernel == "pow"
        }
        assert got == expected, shown(pattern)
        fired += len(got)
    assert fired > 60


@pytest.mark.parametrize("size", [3, 6])
@pytest.mark.parametrize(
    ("relation", "atom"),
    [
        ("", "(= b a)"),
        ("", "(= c b) (= a c)"),
        ("(relation looked (T T)) (rule ((= q (Op1 s y))) ((looked q y)))", "(looked a b)"),
    ],
)
def test_variables_of_terms_are_known_wherever_atoms_name_them(
    tmp_path: Path, size: int, relation: str, atom: str
) -> None:
    """By the kernels around them, by what they equal, by the relations of the rule itself."""
    pattern = "x"
    for k in reversed(range(size)):
        pattern = f"(Op1 s{k} {pattern})"
    given = [f"s{k}" for k in range(size)]
    book = f"""
        ruleset: algebra
        rules:
          - name: sines
            law: chains of sines are exponentials
            reason: to see what is found
            numerics: reorders
            egg: |
              {relation} (rule ((= a {pattern}) {atom}) ((union b (Op1 wave x))))
            given: {given}
            wants:
              wave: {{kernel: exp, params: {{accuracy: null}}, inputs: "[$s0.inputs[0]]"}}
        """
    path = tmp_path / "mine.yaml"
    path.write_text(dedent(book), encoding="utf-8")

    def chain(x: Any) -> Any:
        for _ in range(size):
            x = jnp.sin(x)
        return x

    graph = trace(chain, jax.ShapeDtypeStruct((4,), jnp.float32)).graph
    found = explore(graph, load_book(path).rules)
    assert any("sines" in names for names in found.terms.made.values())
