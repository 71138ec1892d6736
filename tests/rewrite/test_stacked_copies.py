"""Chains of products that are alike, made of stacks: the program's numbers, with fewer products."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.pipeline import Settings
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.stacked import RULE, with_stacked_copies
from tapestry_egg.rewrite.streams.streamed import RULESET
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.unbatched import DOUBLED, add_doubled

Array = Any
NEWTON = 0.05 * np.array([3.4445, -4.7750, 2.0315], np.float32)


def drawn(*shape: int, seed: int = 0) -> Array:
    rng = np.random.default_rng((seed, *shape))
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[-1]), jnp.float32)


def count(graph: BlockGraph) -> int:
    """Products of a program and its loops, as they are written."""
    kernels = (op for op in graph.walk() if not op.regions)
    return sum(op.kernel == "dot_general" for op in kernels)


def stacked(function: Callable[..., Any], *arguments: Any) -> tuple[BlockGraph, BlockGraph]:
    """A program, and what it is with stacks; which gives what JAX does, of the same types."""
    graph = trace(function, *arguments).graph
    made = with_stacked_copies(graph)
    verify_graph(made)
    flat = jax.tree.leaves(arguments)
    want = jax.tree.leaves(jax.jit(function)(*arguments))
    found = execute(made, [np.asarray(x) for x in flat])
    for a, b, v, w in zip(want, found, graph.outputs, made.outputs, strict=True):
        assert graph.values[v] == made.values[w]
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)
    return graph, made


def newton(x: Array) -> Array:
    """Some steps towards an orthogonal matrix, written out."""
    a, b, c = (float(x) for x in NEWTON)
    x = x / (jnp.linalg.norm(x) + 1e-6)
    for _ in range(3):
        y = x @ x.T
        x = a * x + (b * y + c * y @ y) @ x
    return x


def in_a_loop(x: Array) -> Array:
    """The same steps in a loop over their coefficients."""

    def body(x: Array, c: Array) -> tuple[Array, None]:
        y = x @ x.T
        return c[0] * x + (c[1] * y + c[2] * y @ y) @ x, None

    return lax.scan(body, x, jnp.asarray(np.tile(NEWTON, (3, 1))))[0]


def many(one: Callable[[Array], Array]) -> Callable[[list[Array], list[Array]], Any]:
    """A step of an optimiser that turns every moment by `one`."""

    def step(weights: list[Array], moments: list[Array]) -> Any:
        moments = [0.9 * m + 0.1 * w for w, m in zip(weights, moments, strict=True)]
        return [w - 0.1 * one(m) for w, m in zip(weights, moments, strict=True)], moments

    return step


def arrays(*shapes: tuple[int, int]) -> tuple[list[Array], list[Array]]:
    both = [[drawn(*s, seed=2 * k + n) for k, s in enumerate(shapes)] for n in range(2)]
    return both[0], both[1]


@pytest.mark.parametrize("one", [newton, in_a_loop])
def test_what_is_made_of_every_weight_is_made_of_stacks_by_shape(
    one: Callable[[Array], Array],
) -> None:
    shapes = [(8, 8), (8, 12)] * 5
    graph, made = stacked(many(one), *arrays(*shapes))
    assert count(made) == count(graph) // 5
    assert sum(op.kernel == "stack" for op in made.operations) == 2


def test_weights_of_layers_are_stacked_and_layers_are_not() -> None:
    def step(weights: list[Array], x: Array) -> Any:
        def loss(weights: list[Array]) -> Array:
            h = x
            for w in weights:
                h = h + jnp.tanh(h @ w)
            return (h * h).mean()

        gradients = jax.grad(loss)(weights)
        return [w - 0.1 * newton(g) for w, g in zip(weights, gradients, strict=True)]

    weights = [drawn(8, 8, seed=k) for k in range(6)]
    graph, made = stacked(step, weights, drawn(32, 8))
    # Each layer has a product forward and two backward, but the first, whose input is given.
    assert count(graph) == 6 * 9 + 6 * 3 - 1
    assert count(made) == 9 + 6 * 3 - 1


@pytest.mark.parametrize("decomposed", ["eigh", "cholesky", "sort"])
def test_what_devices_cannot_share_is_a_chain_of_its_own(decomposed: str) -> None:
    """Roots of the statistics of every weight, as Shampoo takes them; factors; ranks."""

    def one(x: Array) -> Array:
        a = x @ x.T + np.eye(8, dtype=np.float32)
        if decomposed == "cholesky":
            return jnp.linalg.cholesky(a)
        if decomposed == "sort":
            return lax.sort(a.ravel())
        values, vectors = jnp.linalg.eigh(a)
        return (vectors * values**-0.25) @ vectors.T @ x

    graph, made = stacked(lambda xs: [one(x) for x in xs], [drawn(8, 8, seed=k) for k in range(6)])
    kernels = [[op.kernel for op in g.operations].count(decomposed) for g in (graph, made)]
    assert kernels == [6, 1]


def test_copies_have_constants_of_their_own() -> None:
    def step(xs: list[Array]) -> list[Array]:
        own = [np.full((8, 8), 0.1 * max(k - 3, 0), np.float32) for k in range(6)]
        return [x @ w @ x.T @ x for x, w in zip(xs, own, strict=True)]

    graph, made = stacked(step, [drawn(8, 8, seed=k) for k in range(6)])
    assert count(made) == count(graph) // 6


def test_what_all_copies_read_is_not_stacked() -> None:
    def step(xs: list[Array], w: Array) -> list[Array]:
        return [(x @ w) @ w for x in xs]

    graph, made = stacked(step, [drawn(8, 8, seed=k) for k in range(5)], drawn(8, 8, seed=9))
    assert count(graph) == 10 and count(made) == 2
    assert sum(op.kernel == "stack" for op in made.operations) == 1


def test_what_all_copies_make_is_made_once() -> None:
    def step(xs: list[Array], w: Array) -> list[Array]:
        return [(x @ (w @ w)) @ (w @ w) for x in xs]

    graph, made = stacked(step, [drawn(8, 8, seed=k) for k in range(5)], drawn(8, 8, seed=9))
    assert (count(graph), count(made)) == (11, 3)


@pytest.mark.parametrize("one", range(5))
def test_what_one_copy_has_of_its_own_may_be_what_all_read(one: int) -> None:
    graph, made = stacked(
        lambda xs: [(x @ xs[one]) @ x for x in xs], [drawn(8, 8, seed=k) for k in range(5)]
    )
    assert (count(graph), count(made)) == (10, 2)


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_two_copies_are_stacked_and_one_is_not(copies: int) -> None:
    graph, made = stacked(many(newton), *arrays(*[(8, 8)] * copies))
    assert count(made) == count(graph) // copies
    assert (made is graph) == (copies == 1)


def test_a_chain_of_layers_stays_as_it_is() -> None:
    def layers(x: Array, ws: list[Array]) -> Array:
        for w in ws:
            x = jnp.tanh(x @ w @ w.T)
        return x

    graph = trace(layers, drawn(4, 8), [drawn(8, 8, seed=k) for k in range(6)]).graph
    assert with_stacked_copies(graph) is graph


def test_chains_that_wait_for_each_other_are_not_one() -> None:
    """The turned weights of one half scale what the other half turns."""

    def step(xs: list[Array]) -> list[Array]:
        first = [newton(x) for x in xs[:4]]
        scale = sum(x.sum() for x in first)
        return first + [newton(x * scale) for x in xs[4:]]

    graph, made = stacked(step, [drawn(8, 8, seed=k) for k in range(8)])
    assert count(made) == count(graph) // 4


def heads(ws: list[list[Array]], x: Array) -> Array:
    """Attention written as a loop over heads, each with a mask of its own."""

    def head(q: Array, k: Array, v: Array) -> Array:
        scores = (x @ q) @ (x @ k).T / 2
        scores = jnp.where(jnp.tril(jnp.ones((32, 32), bool)), scores, -1e9)
        return jax.nn.softmax(scores) @ (x @ v)

    return jnp.concatenate([head(*w) for w in ws], -1)


def test_heads_in_a_loop_are_made_at_once() -> None:
    ws = [[drawn(8, 4, seed=3 * k + n) for n in range(3)] for k in range(5)]
    graph, made = stacked(heads, ws, drawn(32, 8, seed=20))
    assert (count(graph), count(made)) == (25, 5)
    # The mask is the same in all heads, and is not stacked.
    assert kernels(made).count("stack") == 3
    # The heads side by side are their stack in another shape.
    assert {"slice", "concatenate"}.isdisjoint(kernels(made))


def test_gradients_of_heads_are_stacked_apart_from_what_they_are_made_of() -> None:
    def loss(ws: list[list[Array]], x: Array) -> Array:
        return (heads(ws, x) ** 2).sum()

    ws = [[drawn(8, 4, seed=3 * k + n) for n in range(3)] for k in range(5)]
    graph, made = stacked(jax.grad(loss, argnums=(0, 1)), ws, drawn(32, 8, seed=20))
    assert count(made) <= count(graph) - 20


def kernels(graph: BlockGraph) -> list[str]:
    return [op.kernel for op in graph.operations]


#: How each of four copies reads its own part of one array: the array, and the part.
PARTS: dict[str, tuple[tuple[int, ...], Callable[[Array, int], Array]]] = {
    "of the first dim": ((4, 8, 8), lambda w, i: w[i]),
    "of another dim": ((8, 4, 8), lambda w, i: w[:, i]),
    "of the last dim": ((8, 8, 4), lambda w, i: w[..., i]),
    "blocks": ((8, 32), lambda w, i: w[:, 8 * i : 8 * i + 8]),
    "blocks of rows": ((32, 8), lambda w, i: jnp.split(w, 4)[i]),
    "every fourth": ((8, 32), lambda w, i: w[:, i::4]),
    "some of all": ((8, 42), lambda w, i: w[:, 8 * i + 7 : 8 * i + 15]),
    "every fourth of some": ((8, 41), lambda w, i: w[:, 5 + i : 37 : 4]),
    "the middle of blocks": ((8, 48), lambda w, i: w[:, 12 * i + 3 : 12 * i + 11]),
    "every other in blocks": ((8, 64), lambda w, i: w[:, 16 * i + 1 : 16 * i + 16 : 2]),
    "in two dims": ((5, 9, 12), lambda w, i: w[i + 1, 1:, 2:10]),
    "converted": ((4, 8, 8), lambda w, i: w[i].astype(jnp.bfloat16).astype(jnp.float32)),
    "scaled": ((4, 8, 8), lambda w, i: jnp.tanh(w[i].T) * w[i]),
    "backwards": ((4, 8, 8), lambda w, i: w[3 - i]),
    "in any order": ((4, 8, 8), lambda w, i: w[(2, 0, 3, 1)[i]]),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_stack_of_the_slices_of_an_array_is_that_array(part: str) -> None:
    shape, of = PARTS[part]

    def step(w: Array, x: Array) -> list[Array]:
        return [x @ (own := of(w, i)) @ own.T for i in range(4)]

    graph, made = stacked(step, drawn(*shape), drawn(6, 8))
    assert (count(graph), count(made)) == (8, 2)
    assert {"stack", "concatenate"}.isdisjoint(kernels(made))


@pytest.mark.parametrize(
    "of", ["overlapping", "far apart", "of two arrays", "too few behind", "by other steps"]
)
def test_a_stack_of_other_slices_is_a_copy(of: str) -> None:
    def step(w: Array, v: Array, x: Array) -> list[Array]:
        parts = {
            "overlapping": [w[:, 6 * i : 6 * i + 8] for i in range(4)],
            "far apart": [w[:, i : i + 8] for i in (0, 9, 16, 33)],
            "of two arrays": [u[:, 8 * i : 8 * i + 8] for u in (w, v) for i in range(2)],
            "too few behind": [w[:, 11 * i : 11 * i + 8] for i in range(4)],
            "by other steps": [w[:, 8 * i : 8 * i + 8 * t : t] for i, t in enumerate((1, 2, 1, 2))],
        }[of]
        return [x @ own @ own.T for own in parts]

    graph, made = stacked(step, drawn(8, 41), drawn(8, 41, seed=1), drawn(6, 8))
    assert (count(graph), count(made)) == (8, 2)
    assert kernels(made).count("stack") == 1


#: What is made of all copies, of gates too.
WHOLES: dict[str, Callable[[list[Array], Array], Array]] = {
    "sum": lambda ys, g: sum(ys[1:], ys[0]),
    "sum from zero": lambda ys, g: sum(ys),
    "sum in pairs": lambda ys, g: (ys[0] + ys[2]) + (ys[3] + ys[1]),
    "sum with more": lambda ys, g: (ys[0] + ys[1]) + (g[:, :1] + (ys[2] + ys[3])),
    "weighted sum": lambda ys, g: sum(g[:, i : i + 1] * y for i, y in enumerate(ys)),
    "sum of functions": lambda ys, g: sum(jnp.tanh(y) * y.T @ y[:1].T for y in ys),
    "side by side": lambda ys, g: jnp.concatenate(ys, -1),
    "below each other": lambda ys, g: jnp.concatenate(ys),
    "beside more": lambda ys, g: jnp.concatenate([g, *ys, g], 1),
    "stacked": lambda ys, g: jnp.stack(ys),
    "stacked within": lambda ys, g: jnp.stack(ys, 1),
    "padded": lambda ys, g: sum(jnp.pad(y, ((0, 0), (8 * i, 24 - 8 * i)))
                                for i, y in enumerate(ys)),
    "padded within": lambda ys, g: sum(jnp.pad(y, ((2, 1), (8 * i + 3, 26 - 8 * i)))
                                       for i, y in enumerate(ys)),
    "written": lambda ys, g: jnp.stack([y.sum(-1) for y in ys], -1),
}  # fmt: skip


@pytest.mark.parametrize("whole", WHOLES)
def test_what_is_made_of_all_copies_is_made_of_their_stack(whole: str) -> None:
    def step(w: Array, x: Array, g: Array) -> Array:
        return WHOLES[whole]([x @ w[i] @ w[i] for i in range(4)], g)

    _, made = stacked(step, drawn(4, 8, 8), drawn(8, 8), drawn(8, 4))
    parts = [made.values[v] for op in made.operations if op.kernel == "slice" for v in op.outputs]
    assert not [t for t in parts if t.rank == 3 and t.shape[0] < 4]
    assert "stack" not in kernels(made)
    added = [op for op in made.operations if op.kernel in ("add", "add_any")]
    assert len(added) <= (whole == "sum with more")
    joined = [op for op in made.operations if op.kernel == "concatenate"]
    assert len(joined) == (whole == "beside more")


@pytest.mark.parametrize("apart", [5, 7, 9, 12])
def test_sums_of_copies_that_do_not_touch_or_overlap_stay_sums(apart: int) -> None:
    def step(w: Array, x: Array) -> Array:
        places = [((0, 0), (apart * i, apart * (3 - i))) for i in range(4)]
        ys = [x @ w[i] @ w[i] for i in range(4)]
        return sum(jnp.pad(y, at) for y, at in zip(ys, places, strict=True))

    _, made = stacked(step, drawn(4, 8, 8), drawn(8, 8))
    assert count(made) == 2 and kernels(made).count("pad") == 4


@pytest.mark.parametrize("body", ["scan", "while", "cond", "scan of scans"])
def test_copies_in_a_body_are_stacked_there(body: str) -> None:
    def once(x: Array, w: Array) -> Array:
        return x / 2 + sum(jnp.tanh(x @ w[i]) @ w[i] for i in range(4))

    def step(w: Array, x: Array) -> Array:
        def scan(x: Array, w: Array) -> tuple[Array, None]:
            return once(x, w), None

        if body == "scan":
            return lax.scan(scan, x, w)[0]
        if body == "scan of scans":
            return lax.scan(lambda x, _: (lax.scan(scan, x, w)[0], None), x, None, length=2)[0]
        if body == "while":
            return lax.fori_loop(0, x.astype(jnp.int32).max() + 3, lambda k, x: once(x, w[0]), x)
        return lax.cond(x.sum() > 0, lambda x: once(x, w[0]), lambda x: x, x)

    graph, made = stacked(step, 0.3 * drawn(3, 4, 8, 8), drawn(8, 8))
    assert (count(graph), count(made)) == (8, 2)
    assert "stack" not in [op.kernel for op in made.walk()]


def experts(x: Array, gates: Array, up: Array, down: Array) -> Array:
    """A mixture of experts that all see all tokens, in a loop."""
    y: Any = 0
    for i in range(up.shape[0]):
        y = y + gates[:, i : i + 1] * (jax.nn.gelu(x @ up[i]) @ down[i])
    return y


@pytest.mark.parametrize("copies", [4, 5, 8])
def test_gradients_of_experts_are_made_at_once(copies: int) -> None:
    def loss(*arguments: Array) -> Array:
        return (experts(*arguments) ** 2).sum()

    shapes = (32, 8), (32, copies), (copies, 8, 16), (copies, 16, 8)
    arguments = [drawn(*s, seed=k) for k, s in enumerate(shapes)]
    _, made = stacked(jax.grad(loss, argnums=(0, 1, 2, 3)), *arguments)
    assert count(made) == 6
    assert {"slice", "pad", "stack", "concatenate"}.isdisjoint(kernels(made))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_slices(data: st.DataObject) -> None:
    """Slices by any steps, in an array of any size."""
    n, width, step = (data.draw(st.integers(a, b)) for a, b in ((4, 5), (1, 3), (1, 4)))
    apart, first = (data.draw(st.integers(a, b)) for a, b in ((1, 9), (0, 3)))
    behind, dim = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 1))
    size = first + (n - 1) * apart + (width - 1) * step + 1 + behind
    order = data.draw(st.permutations(range(n)))
    whole = data.draw(st.sampled_from(["list", "sum", "join", "stack"]))

    def program(w: Array, x: Array) -> Any:
        def part(i: int) -> Array:
            start = first + i * apart
            own = lax.slice_in_dim(w, start, start + (width - 1) * step + 1, step, axis=dim)
            return x @ jnp.moveaxis(own, dim, 1)

        ys = [jnp.tanh(y := part(i)) @ y.T for i in order]
        return {"list": lambda: ys, "sum": lambda: sum(ys), "join": lambda: jnp.concatenate(ys, 1),
                "stack": lambda: jnp.stack(ys, 1)}[whole]()  # fmt: skip

    shape = (size, 6) if dim == 0 else (6, size)
    _, made = stacked(program, drawn(*shape), drawn(5, 6))
    assert count(made) == 2


def test_effects_keep_their_order() -> None:
    """What the first copies give is printed before something else that is there already."""

    def step(xs: list[Array], y: Array) -> list[Array]:
        first = [newton(x) for x in xs[:2]]
        jax.debug.print("{}", first[0])
        jax.debug.print("{}", y)
        return first + [newton(x) for x in xs[2:]]

    graph = trace(step, [drawn(8, 8, seed=k) for k in range(5)], drawn(3, seed=9)).graph
    made = with_stacked_copies(graph)
    assert count(made) == count(graph) // 5
    printed = [
        [g.values[op.inputs[0]].shape for op in g.operations if op.effectful] for g in (graph, made)
    ]
    assert printed == [[(8, 8), (3,)]] * 2


def test_chains_with_a_kernel_that_has_no_rule_for_stacks_stay_as_they_are(tmp_path: Path) -> None:
    """So may be a user's own. Another chain reads what that one makes."""
    add_doubled(tmp_path)

    def step(xs: list[Array]) -> list[Array]:
        first = [DOUBLED.bind(x @ x.T @ x) @ x.T for x in xs]
        whole = sum(y.sum() for y in first)
        return [(y * whole) @ y @ y for y in first]

    arguments = [drawn(8, 8, seed=k) for k in range(5)]
    graph = trace(step, arguments).graph
    made = with_stacked_copies(graph)
    verify_graph(made)
    kernels = [op.kernel for op in made.operations]
    assert kernels.count("doubled") == 5 and count(made) == 15 + 2
    both = jax.jit(lambda *flat: (emit(graph)(*flat), emit(made)(*flat)))
    for want, found in zip(*both(*arguments), strict=True):
        np.testing.assert_allclose(found, want, rtol=2e-5)


def test_what_costs_more_to_stack_than_to_make_stays_as_it_is() -> None:
    """Products of matrices and vectors read each matrix once, as stacking them does."""

    def step(us: list[Array], ws: list[Array], x: Array) -> list[Array]:
        return [u @ (w @ x) for u, w in zip(us, ws, strict=True)]

    matrix, vector = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8192, 8192), (8192,)))
    graph = trace(step, [matrix] * 5, [matrix] * 5, vector).graph
    assert with_stacked_copies(graph) is graph


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_random_copies(data: st.DataObject) -> None:
    """Random programs that are made of several arrays, some of which read what all have."""
    steps = data.draw(
        st.lists(
            st.tuples(st.sampled_from(["x@x", "x@w", "tanh", "x+y", "x*s", "x.T"]), st.booleans()),
            min_size=2,
            max_size=6,
        )
    )
    kinds = data.draw(st.integers(1, 2))
    together = data.draw(st.booleans())  # what is read next is made of all copies

    def one(x: Array, w: Array, kind: int) -> tuple[Array, list[Array]]:
        y, out = x, []
        for name, leaves in steps:
            if kind and name == "tanh":
                name = "x@w"
            x, y = (
                {
                    "x@x": lambda x=x: x @ x.T,
                    "x@w": lambda x=x: x @ w,
                    "tanh": lambda x=x: jnp.tanh(x),
                    "x+y": lambda x=x, y=y: x + y,
                    "x*s": lambda x=x: x * x.mean(),
                    "x.T": lambda x=x: x.T,
                }[name](),
                x,
            )
            out += [x] if leaves else []
        return x, out

    def program(xs: list[Array], w: Array) -> Any:
        found = [one(x, w, k % kinds) for k, x in enumerate(xs)]
        if together:
            whole = sum([x.sum() for x, _ in found])
            found += [one(x * whole, w, k % kinds) for k, (x, _) in enumerate(found)]
        return found

    copies = data.draw(st.integers(4, 6))
    stacked(program, [drawn(5, 5, seed=k) for k in range(copies)], drawn(5, 5))


MATRIX = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
FEW_ROWS = jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16)


@pytest.mark.parametrize(
    ("rows", "one", "kind"),
    [
        (MATRIX, lambda x, w: newton(w), "stacks-all"),
        (FEW_ROWS, lambda x, w: x @ w @ w, "stacks-slower"),
        (FEW_ROWS, lambda x, w: (x[0] @ w) @ w.T, "stacks-small"),
        (MATRIX, lambda x, w: x @ w, ""),
    ],
)
def test_notes_say_which_chains_were_stacked(
    rows: jax.ShapeDtypeStruct, one: Callable[[Array, Array], Array], kind: str
) -> None:
    program = te.trace(lambda x, ws: [one(x, w) for w in ws], rows, [MATRIX] * 5)
    front = te.optimize(program, "h100:8", settings=Settings(work=0.05, front=False))
    told = {n.kind: n.count for n in front.notes if n.kind.startswith("stacks")}
    assert told == ({kind: 1} if kind else {})
    assert any(s.rules == (RULE,) for p in front.plans for s in p.steps) <= (kind == "stacks-all")


def test_devices_turn_whole_weights() -> None:
    """Muon's steps on 16 weights: with stacks a plan is more than twice as fast as without."""
    shape = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    program = te.trace(many(newton), [shape] * 16, [shape] * 16, donate_argnums=(0, 1))
    front = te.optimize(program, "h100:8", settings=Settings(work=0.5))
    fastest = {RULE in p.rules: p.costs.seconds for p in reversed(front.plans)}
    assert RULE in front.plans[0].rules
    every = load_books(DEFAULT_BOOKS)
    books = [b for b in every if all(r.ruleset != RULESET for r in b.rules)]
    others = te.optimize(program, "h100:8", books=books, settings=Settings(work=0.5))
    assert others.plans[0].costs.seconds > 2.0 * fastest[True]


def test_plans_on_devices_give_the_numbers() -> None:
    given_ = arrays(*[(16, 24)] * 8)
    want = jax.jit(many(in_a_loop))(*given_)
    program = te.trace(many(in_a_loop), *given_)
    plan = te.optimize(program, "h100:8", settings=Settings(work=0.2)).plans[0]
    assert RULE in plan.rules
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        got = te.compile(plan, jax.devices("cpu")[: plan.mesh.devices])(*given_)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-5)
