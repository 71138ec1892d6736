"""Rules on programs: each fires on its example, and whatever is chosen gives equal numbers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rewrite.terms.rebuild import as_written, rebuild
from tapestry_egg.rules.language.book import Rule, load_books
from tapestry_egg.rules.verify.examples import example_graph
from tapestry_egg.tracing.emit import emit
from tests.rewrite.equal_forms import RULES, agree, data, forced, wide
from tests.tiers import tiers

#: The rules of the other books that ship, each with its example.
MORE = [
    r
    for b in load_books(("linear", "structure", "reduction", "convolution", "expansion", "lookups"))
    for r in b.rules
    if not r.name.endswith("-back")
]


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


@pytest.mark.parametrize("rule", tiers(MORE, usual=4), ids=lambda r: r.name)
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


@pytest.mark.slow
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
