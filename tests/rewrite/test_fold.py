"""Folded programs: one copy of what repeats stands for all, and what is chosen holds in each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.rewrite import folded_program as fold_module
from tapestry_egg.rewrite import forms as forms_module
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.folded_program import Folded, Net, Stretch, _Folder, fold, unfold
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rewrite.terms.rebuild import as_written, rebuild
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.tracing.emit import emit
from tests.rewrite.equal_forms import BOOKS, H100, RULES, agree, data, graph_of, struct
from tests.rewrite.replay import replay

ALL = load_books(DEFAULT_BOOKS)


@pytest.fixture(autouse=True)
def short_programs_fold(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs of this module are short, so that they can be searched whole as well."""
    monkeypatch.setattr(fold_module, "LEAST_OPERATIONS", 24)
    yield


def network(x: jax.Array, layers: list[dict[str, jax.Array]]) -> jax.Array:
    """Residual layers, each with three products of one input."""
    for p in layers:
        q, k, v = x @ p["q"], x @ p["k"], x @ p["v"]
        x = x + jnp.tanh(q) * jnp.sin(k) + v
    return x


def step(x: jax.Array, layers: list[dict[str, jax.Array]]) -> Any:
    """A step of training: forward, backward, an update of every parameter."""
    grads = jax.grad(lambda p: jnp.sum(network(x, p)))(layers)
    return jax.tree.map(lambda p, g: p - 0.125 * g, layers, grads)


def remembering(x: jax.Array, layers: list[dict[str, jax.Array]]) -> Any:
    """The same, with every layer computed again in the backward pass."""

    def loss(layers: list[dict[str, jax.Array]]) -> jax.Array:
        y = x
        for p in layers:
            y = jax.checkpoint(lambda y, p: network(y, [p]))(y, p)
        return jnp.sum(y)

    return jax.grad(loss)(layers)


def layered(fn: Any, layers: int, width: int = 64) -> BlockGraph:
    square = struct(width, width)
    return graph_of(fn, struct(256, width), [dict(q=square, k=square, v=square)] * layers)


# Random programs


@st.composite
def chains(draw: st.DrawFn) -> BlockGraph:
    """A random cell of operations on 4 x 4 integers, repeated: each reads values of its own, of
    the cells before it, and of none; one cell may be another's with a difference."""
    square, scalar = TensorType((4, 4), "int32"), TensorType((), "int32")
    kinds = st.sampled_from(["dot", "dot", "add", "scale", "turn"])
    size = draw(st.integers(3, 6))
    cell = [
        (draw(kinds), draw(st.integers(-5, 5)), draw(st.integers(-8, 5)), draw(st.integers(0, 1)))
        for _ in range(size)
    ]
    count, odd = draw(st.integers(10, 16)), draw(st.integers(0, 40))
    values: list[TensorType] = [square, square, scalar, scalar]
    constants = {2: np.int32(2), 3: np.int32(3)}
    operations: list[Operation] = []
    made: list[int] = [0, 1]
    for k in range(count):
        values.append(square)
        weight = len(values) - 1
        before = list(made)
        mine: list[int] = []
        for kind, a, b, side in cell:
            pool = [weight, *before[-2:], *mine]
            reads = pool[a % len(pool)], pool[b % len(pool)] if b > -6 else 0
            params: dict[str, Any] = {}
            if kind == "dot":
                params = {
                    "dimension_numbers": [[[1], [side]], [[], []]],
                    "precision": None,
                    "preferred_element_type": {"$dtype": "int32"},
                    "out_sharding": None,
                }
                kernel = "dot_general"
            elif kind == "scale":
                kernel, params = "mul", {"out_dtype": None}
                reads = reads[0], 3 if k == odd else 2
            elif kind == "turn":
                kernel, params = "transpose", {"permutation": [0, 1] if k == odd else [1, 0]}
                reads = reads[:1]
            else:
                kernel = "add"
            values.append(square)
            operations.append(Operation(kernel, reads, (len(values) - 1,), params))
            mine.append(len(values) - 1)
        made += mine[-2:]
    weights = [v for v, t in enumerate(values) if t.rank and v > 1]
    produced = {v for op in operations for v in op.outputs}
    inputs = (0, 1, *(v for v in weights if v not in produced))
    graph = BlockGraph("chain", tuple(values), tuple(operations), inputs, (made[-1],), constants)
    verify_graph(graph)
    return graph


def check_copies(graph: BlockGraph, folded: Folded) -> None:
    """The parts are in the program, and own each of its operations once."""
    owned = check_parts(graph, folded)
    assert sorted(owned) == sorted(v for op in graph.operations for v in op.outputs)


def check_parts(graph: BlockGraph, folded: Folded) -> list[int]:
    """Every part is in the program as often as it says: with its values put in the place of the
    part's, each of its operations is one of the program's. Gives the values that they own."""
    producers = graph.producers()
    owners = {v: k for k, part in enumerate(folded.parts) for v in part.values}
    owned: list[int] = []
    for op in folded.graph.operations:
        k = owners[op.outputs[0]]
        part = folded.parts[k]
        for copy in range(len(part.values[op.outputs[0]])):
            there = graph.operations[producers[int(part.values[op.outputs[0]][copy])]]
            assert (there.kernel, there.params) == (op.kernel, op.params)
            assert there.inputs == tuple(int(part.values[v][copy]) for v in op.inputs)
            assert there.outputs == tuple(int(part.values[v][copy]) for v in op.outputs)
            assert there.remat == (None if op.remat is None else part.remat[op.remat][copy])
            if folded.weights[op.scope]:
                owned += there.outputs
        for v in op.inputs:
            if v in folded.graph.constants:
                for u in part.values[v].tolist():
                    same = graph.constants[u], folded.graph.constants[v]
                    np.testing.assert_array_equal(*same)
    return owned


@pytest.mark.slow
@settings(max_examples=60)
@given(chains())
def test_parts_are_in_the_program_as_often_as_they_say(graph: BlockGraph) -> None:
    folded = fold(graph)
    if folded:
        verify_graph(folded.graph)
        check_copies(graph, folded)
        assert len(folded.graph.operations) < len(graph.operations)


@settings(max_examples=40)
@given(chains(), st.integers(0, 10**6))
def test_a_part_claims_no_edge_that_some_copy_lacks(graph: BlockGraph, seed: int) -> None:
    """Even of operations thrown together, alike in kind only, a part says nothing false."""
    rng = np.random.default_rng(seed)
    net = Net(graph)
    models = np.sort(rng.choice(net.count, size=min(12, net.count), replace=False))
    alike = [np.flatnonzero(net.kind == net.kind[o]) for o in models]
    images = np.array([[o, *rng.choice(a, 3)] for o, a in zip(models, alike, strict=True)])
    builder = _Folder(graph, net)
    builder.part(Stretch(images, np.zeros(len(images), dtype=np.bool_), 0))
    folded = builder.folded()
    verify_graph(folded.graph)
    check_parts(graph, folded)


@settings(max_examples=12)
@given(chains(), st.randoms(use_true_random=False))
def test_any_choice_for_a_folded_program_gives_equal_numbers(graph: BlockGraph, draw: Any) -> None:
    folded = fold(graph)
    if not folded:
        return
    explored = explore(folded.graph, RULES, Budget(iterations=3, rows=20_000, seconds=5.0))
    terms, catalogue = explored.terms, explored.catalogue
    first = as_written(terms, [1.0] * len(catalogue))
    inputs = data(graph)
    with jax.disable_jit():
        (expected,) = [np.asarray(x) for x in emit(graph)(*inputs)]
        for _ in range(3):
            pick = [
                draw.randrange(len(nodes)) if draw.random() < 0.5 else first[c]
                for c, nodes in enumerate(terms.nodes)
            ]
            if rebuild(folded.graph, terms, catalogue, pick) is None:
                continue
            built = rebuild(graph, *unfold(graph, folded, terms, catalogue, pick))
            if built is not None:
                (found,) = [np.asarray(x) for x in emit(built.graph)(*inputs)]
                np.testing.assert_array_equal(expected, found)


# Programs of layers


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn", [network, *(pytest.param(f, marks=pytest.mark.long) for f in (step, remembering))]
)
def test_the_whole_has_the_form_that_it_has_unfolded(
    fn: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph = layered(fn, 26)
    folded = fold(graph)
    assert folded and len(folded.graph.operations) < 0.75 * len(graph.operations)
    found = forms(graph, BOOKS, H100)
    monkeypatch.setattr(forms_module, "fold", lambda _: None)
    whole = forms(graph, BOOKS, H100)
    assert len(found) == len(whole) > 1
    for one, other in zip(found, whole, strict=True):
        costs = program_seconds(one.graph, H100), program_seconds(other.graph, H100)
        assert costs[0] <= costs[1] * (1 + 1e-9)
        if costs[0] >= costs[1] * (1 - 1e-9):
            assert digest(one.graph) == digest(other.graph) and one.rules == other.rules
    agree(graph, found[1].graph, scale=0.05)
    rules: dict[str, object] = {r.name: r for b in BOOKS for r in b.rules}
    assert digest(replay(graph, found[1].steps, rules)[-1]) == digest(found[1].graph)


@pytest.mark.slow
def test_recomputed_layers_keep_their_numbers() -> None:
    def loss(x: jax.Array, layers: list[dict[str, jax.Array]]) -> jax.Array:
        for p in layers:
            x = jax.checkpoint(lambda x, p: x + jnp.sin(jnp.sin(x @ p["q"] + x @ p["k"])))(x, p)
        return jnp.sum(x)

    graph = layered(lambda x, layers: jax.grad(loss, argnums=1)(x, layers), 48, 128)
    assert fold(graph)
    best = forms(graph, BOOKS, H100, least_gain=1e-4)[1].graph
    producers = best.producers()
    reads = [
        (op, best.operations[producers[v]])
        for op in best.operations
        for v in op.inputs
        if v in producers
    ]
    summed = [
        (op.remat, weights.remat)
        for op, weights in reads
        if op.kernel == "dot_general" and op.remat is not None and weights.kernel == "add"
        if best.values[weights.outputs[0]].shape == (128, 128)
    ]
    assert len({one for one, _ in summed}) >= 40
    assert all(one == other for one, other in summed)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [network, step, remembering])
def test_depth_adds_nothing_to_search(fn: Any) -> None:
    short, long = fold(layered(fn, 26)), fold(layered(fn, 44))
    assert short and long
    assert len(short.graph.operations) == len(long.graph.operations)
    assert max(long.weights.values()) == max(short.weights.values()) + 18


@pytest.mark.parametrize("fn", [network, pytest.param(step, marks=pytest.mark.slow), remembering])
def test_the_folded_program_costs_what_the_whole_costs(fn: Any) -> None:
    graph = layered(fn, 26)
    folded = fold(graph)
    assert folded
    seconds = program_seconds(folded.graph, H100, folded.weights)
    assert seconds == pytest.approx(program_seconds(graph, H100), rel=1e-12)


@pytest.mark.slow
def test_a_deep_train_step_costs_what_its_folded_program_costs() -> None:
    from models import gpt2

    graph = graph_of(gpt2.train_step, *gpt2.abstract(gpt2.config("tiny", layers=10)))
    folded = fold(graph)
    assert folded and len(folded.graph.operations) < 0.6 * len(graph.operations)
    check_copies(graph, folded)
    seconds = program_seconds(folded.graph, H100, folded.weights)
    assert seconds == pytest.approx(program_seconds(graph, H100), rel=1e-9)


@pytest.mark.slow
def test_a_layer_that_differs_is_searched_on_its_own() -> None:
    def mixed(x: jax.Array, layers: list[dict[str, jax.Array]]) -> jax.Array:
        x = network(x, layers[:20])
        x = jnp.cos(x @ layers[20]["q"] + x @ layers[20]["k"]) * 3.0
        return network(x, layers[21:])

    graph = layered(mixed, 50)
    folded = fold(graph)
    assert folded
    check_copies(graph, folded)
    alone = [op for op in folded.graph.operations if folded.weights[op.scope] == 1.0]
    assert "cos" in [op.kernel for op in alone]
    best = forms(graph, ALL, H100)[1]
    assert {"sum-of-contractions-rhs", "three-contractions-of-one-lhs"} <= set(best.rules)


def test_what_does_not_repeat_is_not_folded() -> None:
    def different(x: jax.Array, *ws: jax.Array) -> jax.Array:
        for k, w in enumerate(ws):
            x = (jnp.tanh, jnp.sin, jnp.exp, jnp.cos)[k % 4](x @ w) * float(k + 1)
        return x

    sizes = range(8, 24)
    ws = [struct(n, n + 1) for n in sizes]
    assert fold(graph_of(different, struct(4, 8), *ws)) is None


def test_equal_bodies_of_loops_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def loops(x: jax.Array, layers: list[dict[str, jax.Array]]) -> jax.Array:
        for p in layers:
            x = jax.lax.scan(lambda c, _, p=p: (network(c, [p]), None), x, length=3)[0]
        return x

    graph = layered(loops, 6)
    searched: list[BlockGraph] = []
    true = forms_module.explore
    monkeypatch.setattr(
        forms_module, "explore", lambda g, *rest: searched.append(g) or true(g, *rest)
    )
    best = forms(graph, BOOKS, H100)[1]
    assert len(searched) == 2, "one body, and the program around the loops"
    bodies = [op.regions[0] for op in best.graph.operations if op.regions]
    assert len({digest(b) for b in bodies}) == 1 and len(bodies) == 6
    agree(graph, best.graph, scale=0.05)


def test_no_time_for_the_choice_leaves_the_program_as_it_is() -> None:
    graph = layered(network, 6)
    (only,) = forms(graph, BOOKS, H100, Budget(choice=0.0))
    assert only.graph == graph and not only.saturated
    assert forms(graph, BOOKS, H100)[1].saturated
    assert replace(only, saturated=True) == forms(graph, [], H100)[0]
