"""Other forms of programs: every rule fires on its example, and every form gives equal numbers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tapestry_egg as te
from tapestry_egg.algebra import Explored, Form, explore, forms
from tapestry_egg.arrays import decode_dtype
from tapestry_egg.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.choose import as_written
from tapestry_egg.egraph import Budget
from tapestry_egg.errors import RuleError
from tapestry_egg.layout import MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rebuild import rebuild
from tapestry_egg.roofline import program_seconds
from tapestry_egg.rules.book import (
    PROGRAM_RULESETS,
    Rule,
    RuleBook,
    load_book,
    load_books,
    permitted,
)
from tapestry_egg.rules.example import example_graph
from tapestry_egg.runtime.emit import emit
from tapestry_egg.runtime.hlo import hlo_stats
from tapestry_egg.target import load_target
from tapestry_egg.trace import trace

BOOKS = load_books(("algebra", "fusion"))
RULES = [r for b in BOOKS for r in b.rules]
#: The rules of the other books that ship, each with its example.
MORE = [
    r
    for b in load_books(("linear", "structure", "reduction", "convolution", "expansion"))
    for r in b.rules
    if not r.name.endswith("-back")
]
H100 = load_target("h100:8")
f32 = jnp.float32


@contextmanager
def wide() -> Iterator[None]:
    """64-bit types for a while."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def data(graph: BlockGraph, seed: int = 0) -> list[np.ndarray]:
    """Random inputs: small integers, or normal numbers."""
    rng = np.random.default_rng(seed)
    out = []
    for v in graph.inputs:
        t = graph.values[v]
        drawn = rng.integers(-9, 10, t.shape) if "int" in t.dtype else rng.normal(size=t.shape)
        out.append(np.asarray(drawn, dtype=decode_dtype(t.dtype)))
    return out


def run(graph: BlockGraph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.jit(emit(graph))(*inputs)]


def agree(one: BlockGraph, other: BlockGraph) -> None:
    """Equal numbers: exactly for integers, to the last few bits of float64 otherwise."""
    inputs = data(one)
    for a, b in zip(run(one, inputs), run(other, inputs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype.kind == "f":
            close = 1e-11 if a.dtype == np.float64 else 1e-4
            np.testing.assert_allclose(a, b, rtol=close, atol=close)
        else:
            np.testing.assert_array_equal(a, b)


def forced(graph: BlockGraph, explored: Explored, rule: str) -> list[BlockGraph]:
    """The graph with each of the alternatives that a rule made, one at a time and all at once."""
    terms = explored.terms
    first = as_written(terms, [1.0] * len(explored.catalogue))
    choices = {
        c: k
        for c, nodes in enumerate(terms.nodes)
        for k, n in enumerate(nodes)
        if n.value < 0 and rule in terms.made.get((c, n.signature), ())
    }
    changes = [{}, *({c: k} for c, k in choices.items()), choices]
    out = []
    for change in changes:
        pick = [change.get(c, k) for c, k in enumerate(first)]
        built = rebuild(graph, terms, explored.catalogue, pick)
        if built is not None and rule in built.rules:
            out.append(built.graph)
    return out


@pytest.mark.parametrize("dtype", ["int32", "float64"])
@pytest.mark.parametrize("rule", [r for r in RULES if r.example], ids=lambda r: r.name)
def test_rules_fire_on_their_examples_and_both_sides_agree(rule: Rule, dtype: str) -> None:
    text = rule.example.replace("float32", dtype).replace("int32", dtype)
    with wide():
        graph = example_graph(text, rule.where)
        found = forced(graph, explore(graph, RULES), rule.name)
        assert found, "the rule does not fire on its example"
        assert any(g.operations != graph.operations for g in found)
        for other in found:
            agree(graph, other)


@pytest.mark.slow
@pytest.mark.parametrize("rule", MORE, ids=lambda r: r.name)
def test_more_rules_fire_on_their_examples_and_lower_to_equal_numbers(rule: Rule) -> None:
    with wide():
        graph = example_graph(rule.example, rule.where)
        found = forced(graph, explore(graph, [rule]), rule.name)
        assert found, "the rule does not fire on its example"
        for other in found:
            agree(graph, other)


def test_rules_without_an_example_build_nothing() -> None:
    for rule in (*RULES, *MORE):
        assert rule.law and rule.reason and (rule.example or "union" not in rule.egg), rule.name


@pytest.mark.parametrize("rule", [r for r in RULES if r.example], ids=lambda r: r.name)
def test_without_the_rule_its_form_is_gone(rule: Rule) -> None:
    graph = example_graph(rule.example)
    others = [r for r in RULES if r is not rule]
    assert not forced(graph, explore(graph, others), rule.name)


# Random programs: whatever is chosen, the numbers stay


@st.composite
def programs(draw: st.DrawFn) -> BlockGraph:
    """Products, sums, scalings, transposes and reshapes of 4 x 4 integer matrices."""
    square, scalar = TensorType((4, 4), "int32"), TensorType((), "int32")
    values = [square, square, square, scalar]
    squares, operations = [0, 1, 2], []
    for _ in range(draw(st.integers(2, 9))):
        a, b = draw(st.sampled_from(squares)), draw(st.sampled_from(squares))
        kind = draw(st.sampled_from(["dot", "dot", "dot", "add", "scale", "turn", "flat"]))
        made: list[tuple[str, tuple[int, ...], dict[str, Any], TensorType]] = []
        if kind == "dot":
            k = [[draw(st.integers(0, 1))], [draw(st.integers(0, 1))]]
            params = {
                "dimension_numbers": [k, [[], []]],
                "precision": None,
                "preferred_element_type": {"$dtype": "int32"},
                "out_sharding": None,
            }
            made.append(("dot_general", (a, b), params, square))
        elif kind == "add":
            made.append(("add", (a, b), {}, square))
        elif kind == "scale":
            pair = (a, 3) if draw(st.booleans()) else (3, a)
            made.append(("mul", pair, {"out_dtype": None}, square))
        elif kind == "turn":
            made.append(("transpose", (a,), {"permutation": [1, 0]}, square))
        else:
            for shape in ([2, 8], [4, 4]):
                params = {"new_sizes": shape, "dimensions": None, "sharding": None}
                last = (len(values) - 1 + len(made),) if made else (a,)
                made.append(("reshape", last, params, TensorType(tuple(shape), "int32")))
        for kernel, reads, params, tensor in made:
            values.append(tensor)
            operations.append(Operation(kernel, reads, (len(values) - 1,), params))
        squares.append(len(values) - 1)
    outputs = tuple(draw(st.sets(st.sampled_from(squares[3:]), min_size=1)))
    graph = BlockGraph("random", tuple(values), tuple(operations), (0, 1, 2, 3), outputs)
    verify_graph(graph)
    return graph


@settings(max_examples=25, deadline=None)
@given(programs(), st.randoms(use_true_random=False))
def test_any_choice_of_equal_operations_gives_equal_numbers(graph: BlockGraph, draw: Any) -> None:
    explored = explore(graph, RULES, Budget(iterations=4, rows=20_000, seconds=5.0))
    terms = explored.terms
    first = as_written(terms, [1.0] * len(explored.catalogue))
    inputs = data(graph)
    with jax.disable_jit():
        expected = [np.asarray(x) for x in emit(graph)(*inputs)]
        for _ in range(3):
            pick = [
                draw.randrange(len(nodes)) if draw.random() < 0.5 else first[c]
                for c, nodes in enumerate(terms.nodes)
            ]
            built = rebuild(graph, terms, explored.catalogue, pick)
            if built is not None:
                for a, b in zip(expected, emit(built.graph)(*inputs), strict=True):
                    np.testing.assert_array_equal(a, np.asarray(b))


# Forms


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, f32)


def two(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return x @ w + x @ v


def graph_of(fn: Callable[..., Any], *args: Any, **options: Any) -> BlockGraph:
    return trace(fn, *args, **options).graph


def kernels(graph: BlockGraph) -> list[str]:
    return [op.kernel for op in graph.operations]


BIG = (struct(4096, 512), struct(512, 256), struct(512, 256))


def test_the_first_form_is_the_graph_as_given_and_others_cost_less() -> None:
    graph = graph_of(two, *BIG)
    given, best = forms(graph, BOOKS, H100)
    assert given == Form(graph)
    assert kernels(best.graph).count("dot_general") == 1
    assert best.rules == ("sum-of-contractions-rhs",) and best.saturated
    assert program_seconds(best.graph, H100) < 0.999 * program_seconds(graph, H100)
    assert (best.graph.inputs, best.graph.input_names) == (graph.inputs, graph.input_names)
    assert all(op.source.line for op in best.graph.operations)


def test_without_the_rule_there_is_no_better_form() -> None:
    books = [b.without("sum-of-contractions-rhs") if b.name == "algebra" else b for b in BOOKS]
    assert forms(graph_of(two, *BIG), books, H100) == (Form(graph_of(two, *BIG)),)


def test_products_associate_only_where_that_saves_work() -> None:
    def chain(a: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
        return (a @ b) @ c

    slow = graph_of(chain, struct(4096, 64), struct(64, 4096), struct(4096, 64))
    assert [f.rules for f in forms(slow, BOOKS, H100)[1:]] == [("product-from-the-right",)]
    fast = graph_of(chain, struct(64, 4096), struct(4096, 64), struct(64, 4096))
    assert len(forms(fast, BOOKS, H100)) == 1


def test_three_small_products_of_one_input_become_one() -> None:
    def qkv(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        return [x @ w + 1.0 for w in ws]

    graph = graph_of(qkv, struct(256, 64), *[struct(64, 64)] * 3)
    best = forms(graph, BOOKS, H100)[1]
    assert "three-contractions-of-one-lhs" in best.rules
    assert kernels(best.graph).count("dot_general") == 1
    inputs = data(graph)
    for a, b in zip(run(graph, inputs), run(best.graph, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_a_product_that_depends_on_its_sibling_is_not_merged_with_it() -> None:
    def twice(x: jax.Array, w: jax.Array) -> jax.Array:
        return x @ jnp.tanh(x @ w)

    graph = graph_of(twice, struct(64, 64), struct(64, 64))
    explored = explore(graph, RULES)
    for other in forced(graph, explored, "two-contractions-of-one-lhs"):
        assert kernels(other).count("dot_general") == 2
    for form in forms(graph, BOOKS, H100):
        verify_graph(form.graph)


def test_bodies_of_loops_have_forms_too() -> None:
    def loop(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w + c @ v), None), x, length=5)[0]

    graph = graph_of(loop, struct(2048, 256), struct(256, 256), struct(256, 256))
    best = forms(graph, BOOKS, H100)[1]
    (scan,) = (op for op in best.graph.operations if op.regions)
    assert kernels(scan.regions[0]).count("dot_general") == 1
    inputs = [x * 0.05 for x in data(graph)]
    inputs = [x.astype(np.float32) for x in inputs]
    for a, b in zip(run(graph, inputs), run(best.graph, inputs), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_recomputations_are_not_merged_with_what_they_recompute() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w)))(w, x))

    graph = graph_of(jax.value_and_grad(loss), struct(64, 64), struct(64, 64))
    explored = explore(graph, RULES)
    first = as_written(explored.terms, [1.0] * len(explored.catalogue))
    built = rebuild(graph, explored.terms, explored.catalogue, first)
    assert built is not None and kernels(built.graph) == kernels(graph)
    assert len({op.remat for op in graph.operations}) > 1


def test_dtypes_narrower_than_the_result_are_left_alone() -> None:
    half = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)

    def mixed(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        wide = {"preferred_element_type": f32}
        return jnp.matmul(x, w, **wide) + jnp.matmul(x, v, **wide)

    graph = graph_of(mixed, jax.ShapeDtypeStruct((4096, 512), jnp.bfloat16), half, half)
    assert not any("sum-of-contractions-rhs" in f.rules for f in forms(graph, BOOKS, H100))


def test_donation_and_names_stay() -> None:
    def step(s: jax.Array, x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return s - two(x, w, v)

    graph = graph_of(step, struct(4096, 256), *BIG, donate_argnums=0)
    best = forms(graph, BOOKS, H100)[1].graph
    same = ("inputs", "input_names", "output_names", "donated", "constants", "name")
    assert all(getattr(best, k) == getattr(graph, k) for k in same)


@pytest.mark.parametrize("budget", [Budget(iterations=1), Budget(rows=5), Budget(seconds=0.0)])
def test_a_spent_budget_ends_cleanly(budget: Budget) -> None:
    graph = graph_of(two, *BIG)
    found = forms(graph, BOOKS, H100, budget)
    assert found[0] == Form(graph, (), saturated=False)
    for form in found:
        verify_graph(form.graph)


@pytest.mark.slow
def test_the_demo_model_takes_seconds() -> None:
    from models import gpt2

    config = gpt2.config("demo")
    graph = graph_of(gpt2.step, *gpt2.abstract(config), donate_argnums=(0, 1))
    begin = time.process_time()
    found = forms(graph, BOOKS, H100)
    assert time.process_time() - begin < 6.0  # about 1.5 on a quiet machine
    assert len(graph.operations) > 2000 and found[0].saturated


# Users' rules

IDEMPOTENT = """
ruleset: algebra
rules:
  - name: sorting-twice
    law: "sort(sort(x)) = sort(x)"
    reason: What is sorted stays as it is.
    numerics: {numerics}
    given: [s]
    guard: $s.kernel == sort
    egg: |
      (rule ((= a (Op1 s x)) (= b (Op1 s a))) ((union b a)))
"""


def sorted_twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sort(jnp.sort(x)) @ w


def front_of(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> Any:
    return optimize(
        trace(fn, *args),
        "h100:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        settings=Settings(seconds=3.0),
        **options,
    )


def test_a_users_rule_adds_a_form(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="exact"))
    args = (struct(8192, 8192), struct(8192, 8))
    without = front_of(sorted_twice, args)
    assert all(p.rules == () for p in without)
    front = front_of(sorted_twice, args, rules=[path])
    best = front.best("seconds")
    assert best.rules == ("sorting-twice",)
    assert kernels(best.graph).count("sort") == 1
    assert best.costs.seconds < without.best("seconds").costs.seconds


def test_rules_that_change_rounding_are_off_unless_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="changes_rounding"))
    books = load_books((*BOOKS, path))
    graph = graph_of(sorted_twice, struct(8192, 8192), struct(8192, 8))
    assert len(forms(graph, permitted(books, "reorders"), H100)) == 1
    assert len(forms(graph, permitted(books, "relaxed"), H100)) == 2
    with pytest.raises(RuleError, match="numerics"):
        permitted(books, "sloppy")


BAD = [
    ("guard: $s.kernel = sort", r"mine.yaml:9:\d+"),
    ("guard: $q.kernel == sort", r"\$q is not a name here"),
    ("guard: $s.kernal == sort", "not an attribute"),
    ("guard: true\n    wants: {t: {inputs: '[]'}}", "either `kernel` or `like`"),
    ("guard: true\n    wants: {t: {like: r, inputs: '[]'}}", "'r' is not one of `given`"),
    ("guard: true\n    wants: {t: {like: s, inputs: 3}}", "types of operands"),
]


@pytest.mark.parametrize(("text", "match"), BAD)
def test_faults_in_a_users_rule_are_named(tmp_path: Path, text: str, match: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="exact").replace("guard: $s.kernel == sort", text))
    graph = graph_of(sorted_twice, struct(64, 64), struct(64, 8))
    with pytest.raises(RuleError, match=match) as caught:
        forms(graph, [load_book(path)], H100)
    assert "mine.yaml:" in str(caught.value)


def test_given_must_be_bound_by_the_rule(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(IDEMPOTENT.format(numerics="exact").replace("given: [s]", "given: [s, r]"))
    graph = graph_of(sorted_twice, struct(64, 64), struct(64, 8))
    with pytest.raises(RuleError, match="does not bind 'r'"):
        forms(graph, [load_book(path)], H100)


def test_a_rule_that_equates_different_types_changes_no_type(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    text = IDEMPOTENT.format(numerics="exact")
    path.write_text(text.replace("(= b (Op1 s a))", "(= b (Op2 t a w))"))
    graph = graph_of(sorted_twice, struct(64, 64), struct(64, 8))
    for form in forms(graph, [load_book(path)], H100):
        assert [form.graph.values[v] for v in form.graph.outputs] == [
            graph.values[v] for v in graph.outputs
        ]


# Plans

NARROW = (struct(511, 65536), struct(65536, 5), struct(65536, 5))


def plans_without(*rules: str) -> Any:
    books = [
        b.without(*(r for r in rules if r in {x.name for x in b.rules}))
        for b in load_books(("sharding", "collectives", "algebra", "fusion"))
    ]
    return front_of(two, NARROW, books=books)


def reductions(plan: Any) -> list[tuple[str, int]]:
    return [(c.kind, c.count) for c in plan.collectives]


def test_a_sum_of_products_is_reduced_once_without_the_rule_and_with_it() -> None:
    other = tuple(r.name for b in BOOKS for r in b.rules if r.name != "order-of-siblings")
    plain = plans_without(*other).best("seconds")
    assert plain.rules == () and kernels(plain.graph).count("dot_general") == 2
    assert reductions(plain) == [("all_reduce", 1)], "partial sums pass through the addition"
    twice = plans_without(*other, "pass-partial-values-through").best("seconds")
    assert sum(n for _, n in reductions(twice)) == 2
    summed = plans_without().best("seconds")
    assert "sum-of-contractions-rhs" in summed.rules
    assert kernels(summed.graph).count("dot_general") == 1
    assert reductions(summed) == [("all_reduce", 1)]
    assert summed.costs.seconds < plain.costs.seconds < twice.costs.seconds
    compiled = te.compile(summed, jax.devices()[:8])
    inputs = data(summed.graph)
    np.testing.assert_allclose(
        np.asarray(compiled(*inputs)), two(*map(jnp.asarray, inputs)), rtol=1e-3, atol=5e-2
    )
    assert hlo_stats(compiled.compile()).by_kind() == {("all_reduce", 8): 511 * 5 * 4}


def test_jit_runs_a_better_form() -> None:
    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(two(x, w, v))

    rng = np.random.default_rng(0)
    args = [rng.normal(size=s.shape).astype(np.float32) / 8 for s in BIG]
    fast = te.jit(step, target="h100:8", mesh=jax.devices()[:8], settings=Settings(seconds=1.0))
    assert fast.plan(*args).rules == ("sum-of-contractions-rhs",)
    np.testing.assert_allclose(fast(*args), jax.jit(step)(*args), rtol=1e-3, atol=1e-4)


def test_books_may_have_no_rules_of_algebra() -> None:
    graph = graph_of(two, *BIG)
    none = [replace(b, rules=()) for b in BOOKS]
    assert forms(graph, none, H100) == (Form(graph),)
    assert {r.ruleset for r in RULES} <= set(PROGRAM_RULESETS)
    assert isinstance(BOOKS[0], RuleBook)
