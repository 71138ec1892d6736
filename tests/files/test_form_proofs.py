"""A form in a file is believed where it follows from the program by the rules that it names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite import equivalence
from tapestry_egg.rewrite.attention.attention import with_fused_attention
from tapestry_egg.rewrite.equivalence import check_equivalent
from tapestry_egg.rewrite.terms import explore
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.tracing.codec import decode_params
from tapestry_egg.tracing.trace import trace

RULES = [r for b in load_books(DEFAULT_BOOKS) for r in b.rules]


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def graph_of(fn: Callable[..., Any], *arguments: Any) -> BlockGraph:
    return trace(fn, *arguments).graph


def form_of(given: BlockGraph, fn: Callable[..., Any], *arguments: Any) -> BlockGraph:
    """A program traced on its own, its new values numbered after those of the one given."""
    return numbered_after(given, graph_of(fn, *arguments))


def numbered_after(given: BlockGraph, form: BlockGraph) -> BlockGraph:
    number = {v: v for v in form.inputs}
    number |= {v: len(given.values) + v for op in form.operations for v in op.outputs}
    values = (*given.values, *form.values)
    operations = tuple(
        replace(
            op,
            inputs=tuple(number[v] for v in op.inputs),
            outputs=tuple(number[v] for v in op.outputs),
        )
        for op in form.operations
    )
    outputs = tuple(number[v] for v in form.outputs)
    return replace(form, values=values, operations=operations, outputs=outputs)


def with_inner(given: BlockGraph, form: BlockGraph) -> BlockGraph:
    """The program with the innermost loop body of a form, where both are loops in loops."""
    if not given.operations[-1].regions:
        return numbered_after(given, form)
    (loop,), (other,) = given.operations, form.operations
    (inner,), (theirs,) = loop.regions, other.regions
    return replace(given, operations=(replace(loop, regions=(with_inner(inner, theirs),)),))


def equal(given: BlockGraph, form: BlockGraph, *rules: str) -> bool:
    try:
        check_equivalent(given, replace(form, name=given.name), rules, lambda: RULES)
    except PlanError:
        return False
    return True


def test_a_form_is_equal_by_structure_or_by_the_rules_that_it_names() -> None:
    arguments = struct(8, 16), struct(16, 16), struct(16, 16)
    given = graph_of(lambda x, w, v: x @ w + x @ v, *arguments)
    form = form_of(given, lambda x, w, v: x @ (w + v), *arguments)
    rule = "sum-of-contractions-rhs"
    assert equal(given, given) and not equal(given, form)
    assert equal(given, form, rule)
    for other in (lambda x, w, v: x @ (w - v), lambda x, w, v: x @ (w + w)):
        assert not equal(given, form_of(given, other, *arguments), rule)


def test_a_rule_proves_what_it_makes_and_not_the_way_back() -> None:
    """The side that a rule replaces may hold for fewer numbers, or less exactly."""

    def twice_negated(x: jax.Array) -> jax.Array:
        return jnp.negative(jnp.negative(jnp.sin(x)))

    for one, other, proves in ((twice_negated, jnp.sin, True), (jnp.sin, twice_negated, False)):
        given = graph_of(one, struct(4))
        assert equal(given, form_of(given, other, struct(4)), "twice-negated") is proves


def test_a_proof_looks_at_little_first_and_is_found_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rules a form names; and what a region's form has proven, the program's finds."""
    sizes: list[int] = []

    def makes(graph: BlockGraph, *rest: Any) -> bool:
        sizes.append(len(graph.operations))
        return explore.makes(graph, *rest)

    monkeypatch.setattr(equivalence, "makes", makes)
    monkeypatch.setattr(equivalence, "_PROVEN", {})

    def chain(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def body(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            for _ in range(60):
                x = jnp.sin(x)
            return product(x, w, v)

        return body

    def looped(body: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda x, w, v: jax.lax.scan(lambda y, _: (body(y, w, v), ()), x, length=3)[0]

    arguments = struct(16, 16), struct(16, 16), struct(16, 16)
    one = chain(lambda x, w, v: x @ w + x @ v)
    other = chain(lambda x, w, v: x @ (w + v))
    for wrap in (lambda body: body, looped, lambda body: looped(looped(body))):
        given = graph_of(wrap(one), *arguments)
        form = with_inner(given, graph_of(wrap(other), *arguments))
        sizes.clear()
        assert equal(given, form, "twice-negated")
        assert len(sizes) <= 2 and all(n <= 3 for n in sizes), sizes
        sizes.clear()
        assert equal(given, form, "sum-of-contractions-lhs")
        assert not sizes


def test_order_and_repetition_do_not_matter_but_operands_do() -> None:
    given = graph_of(lambda x, y: jnp.sin(x) + jnp.cos(y), struct(4), struct(4))
    a, b, *rest = given.operations
    assert equal(given, replace(given, operations=(b, a, *rest)))
    assert not equal(given, replace(given, operations=(replace(a, inputs=b.inputs), b, *rest)))
    twice = graph_of(lambda x, y: jnp.sin(x) + jnp.cos(y) + jnp.sin(x), struct(4), struct(4))
    assert not equal(given, twice)


def test_effects_are_neither_lost_nor_added() -> None:
    def fn(x: jax.Array) -> jax.Array:
        jax.debug.print("{x}", x=x)
        return x * 2.0

    given = graph_of(fn, struct(4))
    effect = next(op for op in given.operations if op.effectful)
    without = tuple(op for op in given.operations if op is not effect)
    assert equal(given, given)
    assert not equal(given, replace(given, operations=without))
    assert not equal(given, replace(given, operations=(*given.operations, effect)))


@pytest.mark.slow
def test_a_form_whose_kernel_has_an_infinite_parameter_is_saved_and_loaded(tmp_path: Path) -> None:
    """Attention of one token over what a cache holds: scores behind it are minus infinity."""

    def decode(q: jax.Array, k: jax.Array, v: jax.Array, last: jax.Array) -> jax.Array:
        scores = jnp.einsum("bhd,bthd->bht", q, k) / 3.0
        seen = jnp.where(jnp.arange(16) <= last, scores, -jnp.inf)
        return jnp.einsum("bht,bthd->bhd", jax.nn.softmax(seen), v)

    rng = np.random.default_rng(0)
    shapes = (8, 4, 8), (8, 16, 4, 8), (8, 16, 4, 8)
    given = [*(rng.normal(size=s).astype(np.float32) for s in shapes), np.int32(9)]
    program = trace(decode, *given)
    graph, _ = with_fused_attention(program.graph)
    (fill,) = (op.params["fill"] for op in graph.operations if op.kernel == "flash_attention")
    assert fill == {"$float": "-inf"}
    wanted = decode(*given)
    np.testing.assert_allclose(execute(graph, given)[0], wanted, rtol=1e-4, atol=1e-6)
    front = te.optimize(program, "h100:8", settings=te.Settings(work=0.2, workers=1))
    assert "fused-attention" in {name for plan in front for name in plan.rules}
    front.save(tmp_path / "decode.front.json")
    loaded = te.load(tmp_path / "decode.front.json")
    for plan in loaded:
        np.testing.assert_allclose(te.compile(plan)(*given), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_a_parameter_that_is_no_finite_number_is_read_as_it_was_written(
    number: float, tmp_path: Path
) -> None:
    """JSON has no infinity: whoever makes an operation may have left it a float."""
    graph = trace(lambda x: jnp.maximum(x, 0.0), np.ones(4, np.float32)).graph
    (op,) = graph.operations
    given = replace(op, params={"one": float(number), "in_a_list": [1.0, [float(number)]]})
    te.save(replace(graph, operations=(given,)), tmp_path / "graph.json")
    (read,) = te.load(tmp_path / "graph.json").graph.operations
    found = decode_params(read.params)
    np.testing.assert_equal(found["one"], number)
    np.testing.assert_equal(found["in_a_list"][1][0], number)
