"""Other forms of programs: they cost less, and plans are made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.pipeline import Settings
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rewrite.streams.streamed import streams_of
from tapestry_egg.rewrite.terms.explore import explore
from tapestry_egg.rewrite.terms.rebuild import as_written, rebuild
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, PROGRAM_RULESETS, RuleBook, load_books
from tapestry_egg.schedule.one_device import program_seconds
from tests.rewrite.equal_forms import (
    BIG,
    BOOKS,
    H100,
    RULES,
    data,
    f32,
    forced,
    graph_of,
    kernels,
    run,
    struct,
    two,
)


def test_the_first_form_is_the_graph_as_given_and_others_cost_less() -> None:
    graph = graph_of(two, *BIG)
    given, best = forms(graph, BOOKS, H100)
    assert given == Form(graph)
    assert kernels(best.graph).count("dot_general") == 1
    assert best.rules == ("sum-of-contractions-rhs",) and best.saturated
    assert program_seconds(best.graph, H100) < 0.999 * program_seconds(graph, H100)
    assert (best.graph.inputs, best.graph.input_names) == (graph.inputs, graph.input_names)
    assert all(op.source.line for op in best.graph.operations)


def test_without_the_rules_there_is_no_better_form() -> None:
    rules = ("sum-of-contractions-rhs", "two-contractions-of-one-lhs")
    books = [b.without(*(r.name for r in b.rules if r.name in rules)) for b in BOOKS]
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
    assert found[0] == Form(graph, (), saturated=False, by_clock=budget.seconds == 0.0)
    for form in found:
        verify_graph(form.graph)


@pytest.mark.slow
def test_the_demo_model_is_saturated() -> None:
    from models import gpt2

    config = gpt2.config("demo")
    graph = graph_of(gpt2.step, *gpt2.abstract(config), donate_argnums=(0, 1))
    found = forms(graph, BOOKS, H100)
    assert len(graph.operations) > 2000 and found[0].saturated


def test_weakly_typed_factors_are_no_others_than_strongly_typed_ones() -> None:
    def powers(x: jax.Array) -> jax.Array:
        # JAX squares the weakly typed 1 again and again, and multiplies by it.
        return x * 1 ** jnp.broadcast_to(0, x.shape)

    graph = graph_of(powers, struct(4))
    assert any(graph.values[v].weak for op in graph.operations for v in op.outputs)
    rules = [r for b in load_books(DEFAULT_BOOKS) for r in b.rules]
    terms = explore(graph, [r for r in rules if r.ruleset in PROGRAM_RULESETS]).terms
    assert terms.saturated and len(terms.nodes) < len(graph.values)


# Plans


@pytest.mark.slow
def test_a_loss_takes_as_long_however_it_picks_the_label() -> None:
    def along(scores: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.take_along_axis(scores, labels[:, None], -1).squeeze(-1)

    def one_hot(scores: jax.Array, labels: jax.Array) -> jax.Array:
        return (jax.nn.one_hot(labels, scores.shape[-1]) * scores).sum(-1)

    def chosen(scores: jax.Array, labels: jax.Array) -> jax.Array:
        places = jnp.arange(scores.shape[-1])[None]
        return jnp.where(places == labels[:, None], scores, 0).sum(-1)

    def contracted(scores: jax.Array, labels: jax.Array) -> jax.Array:
        return jnp.einsum("bv,bv->b", jax.nn.one_hot(labels, scores.shape[-1]), scores)

    seconds = []
    for picked in (along, one_hot, chosen, contracted):

        def loss(logits: jax.Array, labels: jax.Array, picked: Any = picked) -> jax.Array:
            return -picked(jax.nn.log_softmax(logits), labels).mean()

        logits, labels = struct(16384, 32768), jax.ShapeDtypeStruct((16384,), jnp.int32)
        graph = graph_of(jax.value_and_grad(loss), logits, labels)
        found = forms(graph, load_books(DEFAULT_BOOKS), H100)
        seconds.append(min(program_seconds(f.graph, H100) for f in found))
    assert max(seconds) < 1.01 * min(seconds)


def padded(x: jax.Array, w: jax.Array, how: Any) -> jax.Array:
    x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=how) if how is not None else x
    padding = "VALID" if how is not None else "SAME"
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


#: Two ways to write a program of matrices or images, and whether they are the same.
WAYS: dict[str, tuple[Any, Any, bool]] = {
    "rows scaled": (lambda a, b: jnp.diag(a[0]) @ b, lambda a, b: a[0][:, None] * b, True),
    "columns scaled": (lambda a, b: b @ jnp.diag(a[0]), lambda a, b: b * a[0], True),
    "a trace": (lambda a, b: jnp.trace(a @ b), lambda a, b: (a * b.T).sum(), True),
    "a trace of turned": (lambda a, b: jnp.trace(a.T @ b), lambda a, b: (a * b).sum(), True),
    "rows moved": (lambda a, b: jnp.diag(a[0, 1:], 1) @ b, lambda a, b: a[0][:, None] * b, False),
    "beside a trace": (lambda a, b: jnp.trace(a @ b, 1), lambda a, b: (a * b.T).sum(), False),
    "an image": (lambda a, b: padded(a, b, 0), lambda a, b: padded(a, b, None), True),
    "an image in ones": (lambda a, b: padded(a, b, 1), lambda a, b: padded(a, b, None), False),
}


@pytest.mark.parametrize("name", WAYS)
def test_diagonals_and_margins_take_as_long_however_they_are_written(name: str) -> None:
    *ways, same = WAYS[name]
    image = "image" in name
    large = (struct(8, 64, 64, 64), struct(3, 3, 64, 64)) if image else (struct(2048, 2048),) * 2
    books = load_books(DEFAULT_BOOKS)
    found = [forms(graph_of(way, *large), books, H100) for way in ways]
    seconds = [min(program_seconds(f.graph, H100) for f in own) for own in found]
    assert not same or seconds[0] < 1.01 * seconds[1]
    rules = {r for f in found[0] for r in f.rules if "diagonal" in r or "padded" in r}
    assert bool(rules) == same
    small = ((2, 8, 8, 3), (3, 3, 3, 4)) if image else ((6, 6), (6, 6))
    inputs = [np.random.default_rng(k).normal(size=s).astype("f4") for k, s in enumerate(small)]
    for form in forms(graph_of(ways[0], *(struct(*s) for s in small)), books, H100, least_gain=0.0):
        np.testing.assert_allclose(run(form.graph, inputs)[0], ways[0](*inputs), 1e-4, 1e-5)


SCANS = [(jax.lax.cumsum, False), (jax.lax.cumsum, True), (jax.lax.cummax, False)]


@pytest.mark.parametrize(("scan", "gradient"), SCANS)
@pytest.mark.parametrize("axis", [0, 1])
def test_scans_from_the_end_take_as_long_by_reversals(scan: Any, gradient: bool, axis: int) -> None:
    """What the sum of the parts counts as free may be stored."""

    def turned(x: Any) -> Any:
        return jnp.flip(scan(jnp.flip(x, axis), axis=axis), axis)

    def given(x: Any) -> Any:
        return scan(x, axis=axis, reverse=True)

    def plan(f: Any) -> Any:
        made = jax.grad(lambda x: jnp.tanh(f(x)).sum()) if gradient else f
        return te.optimize(
            te.trace(made, struct(2048, 2048)), "h100:8", settings=Settings(front=False)
        )

    took = [plan(f).best().costs for f in (turned, given)]
    assert took[0].seconds <= 1.01 * took[1].seconds
    assert took[0].peak_bytes <= 1.01 * took[1].peak_bytes


def test_jit_runs_a_better_form() -> None:
    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.tanh(two(x, w, v))

    rng = np.random.default_rng(0)
    args = [rng.normal(size=s.shape).astype(np.float32) / 8 for s in BIG]
    fast = te.jit(step, target="h100:8", mesh=jax.devices()[:8], settings=Settings(work=1.0))
    assert fast.plan(*args).rules == ("sum-of-contractions-rhs",)
    np.testing.assert_allclose(fast(*args), jax.jit(step)(*args), rtol=1e-3, atol=1e-4)


def test_books_may_have_no_rules_of_algebra() -> None:
    graph = graph_of(two, *BIG)
    none = [replace(b, rules=()) for b in BOOKS]
    assert forms(graph, none, H100) == (Form(graph),)
    assert {r.ruleset for r in RULES} <= set(PROGRAM_RULESETS)
    assert isinstance(BOOKS[0], RuleBook)


@pytest.mark.slow
def test_the_program_as_written_is_one_choice_whatever_the_numbers_of_its_values() -> None:
    """A transpose of fused attention's result, which is merged with it, is made after it and has
    the smaller number: to compute the one from the other would be a circle."""

    def heads(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2), axis=-1)
        return (scores @ v).transpose(0, 2, 1, 3)

    given = jax.ShapeDtypeStruct((2, 64, 4, 16), jnp.float32)
    graph = streams_of(te.trace(heads, given, given, given).graph)[0]
    explored = explore(graph, RULES)
    first = as_written(explored.terms, [1.0] * len(explored.catalogue))
    place = graph.producers()
    values: dict[int, list[int]] = {}
    for v, c in explored.terms.class_of.items():
        values.setdefault(c, []).append(v)
    assert any(min(x) != min(x, key=lambda v: place.get(v, -1)) for x in values.values())
    assert rebuild(graph, explored.terms, explored.catalogue, first) is not None
