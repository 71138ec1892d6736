"""What depends on constants alone is computed once: it costs nothing, and rules may count on it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Prepared, verify_graph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.runtime.compiled import compile
from tapestry_egg.schedule.one_device import program_seconds
from tapestry_egg.tracing.constants import prepare, prepared_operations, with_prepared
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace

H100 = load_target("h100:1")
RNG = np.random.default_rng(0)


def normal(*shape: int) -> Any:
    return RNG.normal(size=shape).astype(np.float32)


def kernels(graph: BlockGraph) -> list[str]:
    return [op.kernel for op in graph.operations]


W, V = normal(64, 32), normal(64, 32)


def joined(x: jax.Array) -> jax.Array:
    """Reads two constants through operations that need nothing else."""
    return x @ jnp.concatenate([jnp.asarray(W) * 2.0, jnp.transpose(jnp.asarray(V.T))], axis=1)


def test_operations_on_constants_are_replaced_by_their_results() -> None:
    graph = trace(joined, np.zeros((8, 64), np.float32)).graph
    done = prepare(graph)
    verify_graph(done)
    assert set(kernels(graph)) > {"dot_general"} and kernels(done) == ["dot_general"]
    # Of the constants only the joined one is left.
    (kept,) = (a for a in done.constants.values() if a.ndim)
    np.testing.assert_array_equal(kept, np.concatenate([W * 2, V], axis=1))
    x = normal(8, 64)
    one, other = (np.asarray(jax.jit(emit(g))(x)[0]) for g in (graph, done))
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_what_other_forms_prepare_again_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self: compiled.append("one") or compile_(self)
    )

    def scaled(by: float, x: jax.Array) -> jax.Array:
        return x * jnp.sqrt(jnp.arange(6, dtype=jnp.float32) + by)

    def late(x: jax.Array) -> jax.Array:
        return scaled(4.5, jnp.tanh(x))

    found = []
    for f in (partial(scaled, 4.5), late, partial(scaled, 5.5)):  # values have other numbers
        (root,) = (a for a in prepare(trace(f, normal(6)).graph).constants.values() if a.ndim)
        found.append(root)
    assert len(compiled) == 2
    for root, by in zip(found, (4.5, 4.5, 5.5), strict=True):
        np.testing.assert_allclose(root, np.sqrt(np.arange(6) + by), rtol=1e-6)


def test_what_is_prepared_is_compiled_as_one_program(monkeypatch: pytest.MonkeyPatch) -> None:
    def masked(x: jax.Array) -> jax.Array:
        at = jnp.arange(8) * 3 - 1
        return x + jnp.where(at[:, None] > at[None, :], at[:, None], 0).astype(np.float32)

    graph = trace(masked, normal(8, 8)).graph
    assert len(prepared_operations(graph)) > 3
    compiled: list[str] = []
    compile_ = jax.stages.Lowered.compile
    monkeypatch.setattr(
        jax.stages.Lowered, "compile", lambda self: compiled.append("one") or compile_(self)
    )
    events: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.append(name))
    try:
        prepare(graph)
    finally:
        jax.monitoring.clear_event_listeners()
    assert sum(e.endswith("backend_compile_duration") for e in events) == len(compiled) == 1


def test_a_graph_without_such_operations_is_returned_as_it_is() -> None:
    graph = trace(lambda x: jnp.sin(x) + W, normal(64, 32)).graph
    assert prepare(graph) is graph


def test_what_is_computed_from_constants_costs_nothing() -> None:
    both = np.concatenate([W * 2, V], axis=1)
    x = np.zeros((8, 64), np.float32)
    as_one = trace(lambda x: x @ both, x).graph
    assert program_seconds(trace(joined, x).graph, H100) == program_seconds(as_one, H100)


def test_broadcasts_of_constants_are_not_stored() -> None:
    bias = normal(4)
    graph = trace(lambda x: x + jnp.broadcast_to(bias, x.shape), normal(256, 4)).graph
    assert "broadcast_in_dim" in kernels(graph)
    assert prepared_operations(graph) == []


def test_a_few_numbers_made_of_nothing_are_constants() -> None:
    graph = trace(lambda x: x * jnp.arange(4.0), np.zeros(4, np.float32)).graph
    assert kernels(prepare(graph)) == ["mul"]


def test_operations_with_an_argument_effects_or_no_operands_stay() -> None:
    def f(x: jax.Array) -> jax.Array:
        jax.debug.print("{w}", w=jnp.asarray(W)[0, 0])
        noise = jax.random.uniform(jax.random.key(0), W.shape)
        return x + jnp.arange(2048.0).reshape(W.shape) + jnp.asarray(W) * noise

    graph = trace(f, W).graph
    done = prepare(graph)
    assert "debug_print" in " ".join(kernels(done)) or "debug_callback" in kernels(done)
    assert {"iota", "add"} <= set(kernels(done))


def test_constants_of_a_file_take_no_more_room_than_any_machine_has() -> None:
    """A few operations, each on 16 times as much as before, end the process that computes them."""

    def grown(x: jax.Array, times: int) -> jax.Array:
        made = jnp.asarray(np.ones(16, np.float32))
        for _ in range(times):
            made = jnp.concatenate([made] * 16)
        return x + made[:16]

    x = jax.ShapeDtypeStruct((16,), jnp.float32)
    small, large = (trace(partial(grown, times=n), x).graph for n in (3, 9))
    assert prepare(small, trusted=False).prepared is not None
    with pytest.raises(GraphError, match="constants of 64 bytes are made into"):
        prepare(large, trusted=False)
    *first, rest = large.operations
    before = Prepared(tuple(first), large.constants)
    with pytest.raises(GraphError, match="constants of 64 bytes are made into"):
        with_prepared(replace(large, operations=(rest,), constants={}), before)


def test_results_that_leave_the_program_are_constants_that_leave() -> None:
    graph = trace(lambda x: (x, jnp.asarray(W) + V), W).graph
    done = prepare(graph)
    assert done.operations == ()
    out = jax.jit(emit(done))(W)
    np.testing.assert_array_equal(out[1], W + V)


def layer(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
    """x·w + x·v: one product where w + v may be formed beforehand."""
    return x @ w + x @ v


def test_a_rule_may_spend_on_fixed_weights_what_it_may_not_spend_on_arguments() -> None:
    w, v, x = normal(2048, 2048), normal(2048, 2048), normal(1, 2048)
    books = load_books(("algebra",))
    cpu = load_target("cpu:1")
    given = forms(trace(layer, w, v, x).graph, books, cpu)
    fixed = forms(trace(partial(layer, w, v), x).graph, books, cpu)
    assert len(given) == 1
    assert fixed[1].rules == ("sum-of-contractions-rhs",)
    assert kernels(prepare(fixed[1].graph)) == ["dot_general"]
    assert program_seconds(fixed[1].graph, cpu) < 0.6 * program_seconds(fixed[0].graph, cpu)


def test_nodes_that_need_constants_only_are_free() -> None:
    w, v, x = normal(64, 32), normal(64, 32), normal(8, 64)
    rules = [r for b in load_books(("algebra",)) for r in b.rules]
    for fn, args, free in ((layer, (w, v, x), []), (partial(layer, w, v), (x,), ["add"])):
        explored = explore(trace(fn, *args).graph, rules)
        nodes = [n for nodes in explored.terms.nodes for n in nodes if n.free]
        assert [explored.catalogue[n.signature].kernel for n in nodes] == free


@pytest.mark.parametrize("devices", [1, 2])
def test_plans_hold_what_was_prepared(devices: int) -> None:
    w, v, x = normal(256, 256), normal(256, 256), normal(4, 256)
    program = trace(partial(layer, w, v), x)
    shape = MeshShape(("x",), (devices,)) if devices > 1 else MeshShape((), ())
    front = optimize(program, f"cpu:{devices}", mesh_shapes=(shape,), settings=Settings(work=1.0))
    fastest = min(front.plans, key=lambda p: p.costs.seconds)
    assert kernels(fastest.graph) == ["dot_general"]
    found = compile(fastest)(x)
    np.testing.assert_allclose(np.asarray(found), x @ w + x @ v, rtol=1e-3, atol=1e-3)


def test_merged_contractions_read_the_prepared_stack_as_it_lies() -> None:
    def three(w: Any, v: Any, u: Any, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) + (x @ v) * jnp.sin(x @ u)

    weights = [normal(256, 128) for _ in range(3)]
    graph = trace(partial(three, *weights), normal(8, 256)).graph
    done = prepare(forms(graph, load_books(("fusion",)), H100)[1].graph)
    assert kernels(done).count("dot_general") == 1
    ((stack, array),) = done.constants.items()
    # As an argument, so that XLA cannot copy it beforehand.
    opened = replace(done, inputs=(*done.inputs, stack), constants={}, input_names=(), donated=())
    compiled = jax.jit(emit(opened)).lower(normal(8, 256), array).compile()
    assert " dot(" in compiled.as_text()
    assert " copy(" not in compiled.as_text() and " transpose(" not in compiled.as_text()
