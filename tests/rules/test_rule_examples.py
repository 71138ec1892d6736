"""Rules on programs: each fires, and whatever is chosen gives equal numbers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rewrite.terms.rebuild import as_written, rebuild
from tapestry_egg.rules.language.book import Rule, load_books
from tapestry_egg.rules.verify.examples import example_graph
from tapestry_egg.rules.verify.instances import Drawn, Instance, instances
from tapestry_egg.rules.verify.laws import sides
from tapestry_egg.rules.verify.values import landmarks
from tapestry_egg.tracing.emit import emit
from tests.rewrite.equal_forms import RULES, agree, data, forced, run, wide
from tests.tiers import tiers

#: The rules of the other books that ship.
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


def programs_of(rule: Rule) -> Iterator[BlockGraph]:
    """A rule's example, or some programs that are drawn for its pattern."""
    if rule.example:
        yield example_graph(rule.example, rule.where)
        return
    for side in sides(rule):
        found = instances(rule, side, 0, 6000, Drawn(), landmarks(rule))
        yield from map(program_of, islice(filter(plain, found), 12))


def plain(instance: Instance) -> bool:
    """Whether a program has elements, none of them of few digits."""
    types = [t for a in instance.applied.values() for t in (*a.inputs, a.output)]
    return not instance.has_empty and not any("16" in t.dtype or "8" in t.dtype for t in types)


def program_of(instance: Instance) -> BlockGraph:
    """The pattern of an instance as a program."""
    side, names = instance.side, list(instance.inputs)
    values = [instance.inputs[n] for n in names]
    operations = []
    for node in side.nodes:
        entry = instance.applied[node.signature]
        reads = tuple(names.index(o) for o in node.operands)
        operations.append(Operation(entry.kernel, reads, (len(names),), dict(entry.params)))
        names.append(node.name)
        values.append(entry.output)
    constants = {
        names.index(n): np.asarray(v).astype(numpy_dtype(instance.inputs[n].dtype))
        for n, v in side.constants.items()
    }
    read = {v for op in operations for v in op.inputs}
    given = tuple(v for v in range(len(instance.inputs)) if v not in constants)
    made = tuple(v for v in range(len(instance.inputs), len(names)) if v not in read)
    return BlockGraph("drawn", tuple(values), tuple(operations), given, made, constants=constants)


def runs(graph: BlockGraph) -> bool:
    """Whether JAX's primitives take the drawn parameters: not all of a template's kernels do."""
    try:
        return bool(run(graph, data(graph)))
    except (TypeError, GraphError):
        return False


@pytest.mark.parametrize("rule", tiers(MORE, usual=4), ids=lambda r: r.name)
def test_more_rules_fire_and_lower_to_equal_numbers(rule: Rule) -> None:
    fired = 0
    with wide():
        for graph in filter(runs, programs_of(rule)):
            verify_graph(graph)
            found = forced(graph, explore(graph, [rule]), rule.name)
            for other in found:
                agree(graph, other)
            fired += any(other.operations != graph.operations for other in found)
            if fired == 3:
                break
    assert fired, "the rule fires on none of its programs"


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
