"""Micro-batches: a train step written without accumulation, its batch split over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.omissions import of_forms
from tapestry_egg.rewrite.form import Form, Left
from tapestry_egg.rewrite.fused_forms import batched
from tapestry_egg.rewrite.recomputation.checkpoints import peak_alone
from tapestry_egg.rewrite.rows.cuts import Cut
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims
from tapestry_egg.rewrite.streams import batches, micro_batches
from tapestry_egg.rewrite.streams.batches import Batch, Inner
from tapestry_egg.rewrite.streams.micro_batches import batch, batch_of
from tapestry_egg.rewrite.streams.streamed import count_streams, with_streams
from tapestry_egg.runtime import compare, planned_collectives
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace

Array = Any
S = jax.ShapeDtypeStruct
SLOW = pytest.mark.slow
ROWS, TOKENS, WIDTH, HEADS, LAYERS, VOCABULARY = 8, 16, 16, 2, 2, 32


def shape(*dims: int, dtype: Any = jnp.float32) -> S:
    return S(dims, dtype)


def drawn(shapes: Any, below: int = VOCABULARY) -> Any:
    rng = np.random.default_rng(0)

    def one(s: S) -> Array:
        if jnp.issubdtype(s.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, below, s.shape), s.dtype)
        return jnp.asarray(0.3 * rng.normal(size=s.shape), s.dtype)

    return jax.tree.map(one, shapes)


def descended(loss: Callable[..., Array]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(w: Any, *data: Array) -> Any:
        value, g = jax.value_and_grad(loss)(w, *data)
        return jax.tree.map(lambda a, b: a - 0.1 * b, w, g), value

    return step


def hidden(w: Any, x: Array) -> Array:
    return jax.nn.gelu(x @ w["a"]) @ w["b"]


def mean(w: Any, x: Array, y: Array) -> Array:
    return jnp.mean((hidden(w, x) - y) ** 2)


def masked_mean(w: Any, x: Array, y: Array) -> Array:
    """Rows count by what the data say: not the same number in every micro-batch."""
    weight = (x[:, 0] > 0.1).astype(jnp.float32)
    return (((hidden(w, x) - y) ** 2).sum(-1) * weight).sum() / weight.sum()


def dropped(w: Any, x: Array, y: Array, key: Array) -> Array:
    h = jax.nn.gelu(x @ w["a"])
    h = jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0.0)
    return jnp.mean((h @ w["b"] - y) ** 2)


def by_columns(w: Any, x: Array, y: Array) -> Array:
    """The batch is the last dim."""
    return jnp.mean((w["b"].T @ jax.nn.gelu(w["a"].T @ x.T) - y.T) ** 2)


def merged(w: Any, x: Array, y: Array) -> Array:
    """Rows and what each of them holds in one dim."""
    x = x.reshape(ROWS * 4, WIDTH)
    x = jnp.concatenate([x, x**2], 1)[:, :WIDTH]
    return jnp.mean((hidden(w, x).reshape(ROWS, 4, -1) - y) ** 2)


MLP = {"a": shape(WIDTH, 64), "b": shape(64, 4)}
X, Y = shape(ROWS, WIDTH), shape(ROWS, 4)
PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "mean": (descended(mean), (MLP, X, Y)),
    "masked mean": (descended(masked_mean), (MLP, X, Y)),
    "dropout": (descended(dropped), (MLP, X, Y, shape(2, dtype=jnp.uint32))),
    "columns": (descended(by_columns), (MLP, X, Y)),
    "merged": (descended(merged), (MLP, shape(ROWS, 4, WIDTH), shape(ROWS, 4, 4))),
}


def clipped(w: Any, state: Any, x: Array, y: Array) -> Any:
    value, g = jax.value_and_grad(mean)(w, x, y)
    updates, state = OPTIMIZER.update(g, state, w)
    return optax.apply_updates(w, updates), state, value


OPTIMIZER = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2))
PROGRAMS["clipped"] = clipped, (MLP, jax.eval_shape(OPTIMIZER.init, MLP), X, Y)


def layer(x: Array, w: Any, dtype: Any) -> Array:
    w = jax.tree.map(lambda a: a.astype(dtype), w)
    h = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * w["g"]
    b, t, d = h.shape
    q, k, v = ((h @ w[n]).reshape(b, t, HEADS, d // HEADS) for n in "qkv")
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(d // HEADS)
    s = jnp.where(jnp.tril(jnp.ones((t, t), bool)), s.astype(jnp.float32), -1e30)
    p = jax.nn.softmax(s).astype(dtype)
    x = x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(b, t, d) @ w["o"]
    return x + jax.nn.gelu(x @ w["u"]) @ w["d"]


def transformer(w: Any, tokens: Array, remat: bool, dtype: Any) -> Array:
    """Layers in a scan, one table for both ends, and padding that does not count."""
    x = w["table"][tokens[:, :-1]].astype(dtype)

    def body(x: Array, w: Any) -> tuple[Array, None]:
        return layer(x, w, dtype), None

    x, _ = jax.lax.scan(jax.checkpoint(body) if remat else body, x, w["layers"])
    logits = (x @ w["table"].T.astype(dtype)).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
    counts = tokens[:, 1:] > 3
    return jnp.where(counts, each, 0.0).sum() / counts.sum()


D = WIDTH
LANGUAGE = {
    "table": shape(VOCABULARY, D),
    "layers": {
        **{n: shape(LAYERS, D, D) for n in "qkvo"},
        "u": shape(LAYERS, D, 4 * D),
        "d": shape(LAYERS, 4 * D, D),
        "g": shape(LAYERS, D),
    },
}


def check(
    function: Callable[..., Any],
    shapes: Any,
    steps: int,
    tolerance: float,
    exact: Callable[..., Any] | None = None,
) -> BlockGraph:
    """The program in parts, which gives what it gives whole, or what an `exact` one does."""
    graph = with_streams(trace(function, *shapes).graph)
    found = batch(graph)
    assert found is not None
    made = found.split(steps)
    assert made is not None
    verify_graph(made)
    assert not found.stacked
    arrays = [jnp.abs(x) for x in jax.tree.leaves(drawn(shapes))]  # second moments are squares
    whole = graph if exact is None else trace(exact, *shapes).graph
    results = zip(jax.jit(emit(made))(*arrays), jax.jit(emit(whole))(*arrays), strict=True)
    for got, want in results:
        a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
        assert np.abs(a - b).max(initial=0) <= tolerance * max(np.abs(b).max(initial=0), 1e-3)
    return made


@SLOW
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_batch_in_parts_gives_what_the_whole_gives(name: str) -> None:
    function, shapes = PROGRAMS[name]
    made = check(function, shapes, 4, 1e-5)
    loops = [op for op in made.operations if op.kernel == "scan"]
    assert [op.params["length"] for op in loops] == [4]
    body = loops[0].regions[0]
    products = [op for op in body.operations if op.kernel == "dot_general"]
    assert products and all(
        op.kernel not in ("dot_general", "erf", "tanh") for op in made.operations
    )
    # The optimizer, and what it clips by, runs once, on sums that are complete.
    assert sum(op.kernel == "sqrt" for op in body.operations) == 0


class Anew(Batch):
    """Labels that are found once more of everything, as often as anything is learnt."""

    def _pass(self) -> None:
        self.changed = set(range(len(self.graph.operations)))
        super()._pass()


def labels(found: Batch) -> Any:
    """All that is known of the operations and values of a graph, those of loops included."""
    how = {k: labels(x.body) if isinstance(x, Inner) else x for k, x in found.how.items()}
    demands = {(v, cut) for v, cuts in found.demands.items() for cut in cuts}
    sets = found.before, found.outside, found.late, found.rejected
    return found.label, how, demands, sets, found.wanted


@pytest.mark.parametrize("name", ["masked mean", "clipped", "transformer"])
def test_labels_that_follow_changes_are_those_of_all_labelled_anew(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "transformer":
        loss = partial(transformer, remat=True, dtype=jnp.float32)
        graph = trace(descended(loss), LANGUAGE, shape(ROWS, TOKENS, dtype=jnp.int32)).graph
    else:
        graph = trace(PROGRAMS[name][0], *PROGRAMS[name][1]).graph
    graph = with_batch_dims(graph)
    dims = [(v, d) for v in graph.inputs for d, n in enumerate(graph.values[v].shape) if n > 1]

    def every() -> list[Any]:
        kind = batches.Batch
        made = [kind(graph, graph.values[v].shape[d], {v: Cut(d)}) for v, d in dims]
        return [labels(x.labelled()) for x in made]

    followed = every()
    assert any(wanted for *_, wanted in followed)
    monkeypatch.setattr(batches, "Batch", Anew)
    assert every() == followed


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "dtype"), [(False, jnp.bfloat16), (True, jnp.float32)])
def test_layers_in_a_scan_are_taken_in(remat: bool, dtype: Any) -> None:
    """With attention that is recognised inside, and gradients carried in float32: in bfloat16 they
    are nearer to those of float32 than the program's own."""
    step = descended(partial(transformer, remat=remat, dtype=dtype))
    exact = descended(partial(transformer, remat=remat, dtype=jnp.float32))
    shapes = LANGUAGE, shape(ROWS, TOKENS + 1, dtype=jnp.int32)
    made = check(step, shapes, 4, 1e-5 if dtype == jnp.float32 else 2e-2, exact)
    (loop,) = [op for op in made.operations if op.kernel == "scan"]
    assert count_streams(loop.regions[0]) >= 2
    carried = loop.outputs[: loop.params["num_carry"]]
    assert len(carried) == 9  # one for the table, which is read twice, and the loss
    assert all(made.values[v].itemsize >= 4 for v in carried)


def normalised(w: Any, x: Array, y: Array) -> Array:
    h = x @ w["a"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean((jax.nn.gelu(h) @ w["b"] - y) ** 2)


def balanced(w: Any, x: Array, y: Array) -> Array:
    """As experts are balanced: shares of the whole batch, multiplied."""
    p = jax.nn.softmax(x @ w["a"])
    return jnp.mean((jax.nn.gelu(p) @ w["b"] - y) ** 2) + (p.mean(0) ** 2).sum()


@pytest.mark.slow
def test_sums_and_products_over_nothing_are_taken_in() -> None:
    def loss(w: Any, x: Array, y: Array) -> Array:
        h = hidden(w, x) + x[:, :0].sum(1, keepdims=True) + x[:, :0] @ w["b"][:0]
        return jnp.mean((h - y) ** 2)

    check(descended(loss), (MLP, X, Y), 2, 1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_rows_of_a_narrow_table_are_summed_in_float32(dtype: Any) -> None:
    """The sum inside the scatter, too."""

    def loss(table: Array, tokens: Array) -> Array:
        return (table[tokens].astype(jnp.float32) ** 2).sum()

    def step(table: Array, tokens: Array) -> Array:
        return table - 0.25 * jax.grad(loss)(table, tokens)

    table, tokens = shape(VOCABULARY, D, dtype=dtype), shape(ROWS, 8, dtype=jnp.int32)
    made = check(step, (table, tokens), 2, 0.02)
    (loop,) = [op for op in made.operations if op.kernel == "scan"]
    (body,) = loop.regions
    (scatter,) = [op for op in body.operations if op.kernel == "scatter-add"]
    assert body.values[scatter.outputs[0]].dtype == "float32"


@pytest.mark.slow
@pytest.mark.parametrize("loss", [normalised, balanced])
def test_what_needs_the_whole_batch_is_told(loss: Callable[..., Array]) -> None:
    shapes = MLP, shape(64, WIDTH), shape(64, 4)
    program = te.trace(descended(loss), *shapes)
    found = batch(program.graph)
    assert found is not None and found.late is not None
    made = found.split(2)  # what little of it there is
    arrays = jax.tree.leaves(drawn(shapes))
    for got, want in zip(
        emit(made or program.graph)(*arrays), emit(program.graph)(*arrays), strict=True
    ):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    told = batched(Form(program.graph), load_target("cpu:2"), None, limit=1000.0)
    assert not told.forms
    assert "test_micro_batches.py" in told.whole
    (note,) = of_forms([Form(program.graph, left=Left(whole=told.whole))], 1)
    assert note.kind == "batch-whole" and "test_micro_batches.py" in note.text


@pytest.mark.parametrize(
    ("rows", "parts"), [(12, [2, 4]), (16, [2, 4, 8, 16]), (15, [3, 5, 15]), (7, [7]), (1, [])]
)
def test_numbers_of_parts_are_powers_of_two_or_what_else_divides_the_rows(
    rows: int, parts: list[int]
) -> None:
    assert list(micro_batches.counts(rows)) == parts


def test_what_layers_make_with_rows_counts_as_often_as_they_run() -> None:
    def size(layers: int) -> int:
        def f(w: Array, x: Array) -> Array:
            return jax.lax.scan(lambda h, k: (jnp.tanh(h @ k), None), x, w)[0].sum()

        found = batch(trace(f, shape(layers, 4, 4), shape(ROWS, 4)).graph)
        assert found is not None
        return found.size

    one, two, six = map(size, (1, 2, 6))
    assert six - one == 5 * (two - one) > 0


def test_parts_of_less_than_a_row_for_each_device_are_searched_where_nothing_else_can_fit() -> None:
    """In four parts of 64 rows each of sixteen devices has one; in more, other dims are cut."""
    wide = {"a": shape(16, 1024), "b": shape(1024, 4)}
    graph = trace(descended(mean), wide, shape(64, 16), shape(64, 4)).graph
    found = batch(graph)
    assert found is not None
    machine = load_target("cpu:16")
    peaks = {n: peak_alone(made, machine) for n in (4, 8, 16, 64) if (made := found.split(n))}

    def parts(limit: float) -> list[int]:
        short = batched(Form(graph), machine, None, limit=limit / 16)
        return [int(f.rules[0].removeprefix("micro-batches-")) for f in short.forms]

    assert [parts(1.01 * peaks[n]) for n in (4, 8, 16)] == [[4], [8], [16]]
    assert parts(0.9 * peaks[64]) == [4]  # where none can fit, as if nothing were short


def test_where_none_fits_well_the_first_that_may_fit_is_searched_and_no_more_parts() -> None:
    """Weights hold most: in 32 parts as in 512 a step holds more than half of what there is."""
    wide = {"a": shape(16, 1024), "b": shape(1024, 4)}
    graph = trace(descended(mean), wide, shape(1024, 16), shape(1024, 4)).graph
    machine, found = load_target("cpu:2"), batch(graph)
    assert found is not None
    peaks = {n: peak_alone(made, machine) for n in (16, 32, 512) if (made := found.split(n))}
    assert 1.01 * peaks[32] < peaks[16] and peaks[512] > 1.01 * peaks[32] / 2
    short = batched(Form(graph), machine, None, limit=1.01 * peaks[32] / 2)
    assert max(int(f.rules[0].removeprefix("micro-batches-")) for f in short.forms) == 32


def test_dims_of_a_large_state_that_were_not_tried_are_told() -> None:
    """Forty tensors that come back as they went in, nothing else: any of them may be a batch."""
    state = {f"w{k:02}": shape(3 + k) for k in range(40)}
    program = te.trace(lambda state: jax.tree.map(lambda x: x - x.sum() / 7, state), state)
    assert batch_of(program.graph)[1] == 40 - 32
    told = batched(Form(program.graph), load_target("cpu:2"), None, limit=100.0)
    (note,) = of_forms([Form(program.graph, left=Left(states=told.untried))], 1)
    assert (note.kind, note.count) == ("batch-dims", 8)


@pytest.mark.slow
def test_memory_that_is_not_short_leaves_the_program_as_it_is() -> None:
    program, _ = big_step()
    target = load_target("cpu:8")
    assert not batched(Form(program.graph), target, None).forms
    assert not batched(Form(program.graph), target, None, limit=1e9).forms
    found = []
    for limit in (800e3, 20e3):
        short = batched(Form(program.graph), target, None, limit=limit)
        found.append([int(f.rules[0].removeprefix("micro-batches-")) for f in short.forms])
    (few, near), (again, many) = found
    assert few < near == again < many
    asked = batched(Form(program.graph), target, (3, 4), limit=1e9)
    assert [f.rules for f in asked.forms] == [("micro-batches-4",)]  # three parts are not equal


def big_step() -> tuple[te.Program, tuple[Any, ...]]:
    weights = {"a": shape(32, 64), "b": shape(64, 32)}
    shapes = weights, shape(4096, 32), shape(4096, 32)
    return te.trace(descended(masked_mean), *shapes), shapes


@pytest.mark.slow
def test_case_9_gradients_are_summed_over_devices_once(tmp_path: Path) -> None:
    """After the loop; and less is in memory, by plan and as compiled."""
    program, shapes = big_step()
    pins = {"[0]": (None, None), "[1]": ("x", None), "[2]": ("x", None)}
    plans = {}
    for counts in ((), (8,)):
        front = te.optimize(
            program,
            target="h100:8",
            pins=pins,
            mesh_shapes=[MeshShape(("x",), (8,))],
            settings=Settings(work=0.3, micro_batches=counts, recompute=0),
        )
        # Plans of still less memory combine parts of gradients in every step.
        own = [p for p in front.plans if p.micro_batches == (8 if counts else 1)]
        plans[len(counts)] = min(own, key=lambda p: p.costs.seconds)
        if counts:
            front.save(tmp_path / "front")
            loaded = te.load(tmp_path / "front").plans
            assert [p.costs for p in loaded] == [p.costs for p in front.plans]
    whole, split = plans[0], plans[1]
    assert "micro-batches-8" in split.rules
    assert "micro-batches: 8" in split.explain()
    assert split.costs.peak_bytes < 0.6 * whole.costs.peak_bytes
    arrays = drawn(shapes)
    want = jax.tree.leaves(program(*arrays))
    temporaries = []
    for plan in (whole, split):
        run = te.compile(plan, jax.devices()[:8])
        for a, b in zip(jax.tree.leaves(run(*arrays)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
        compiled = run.lower().compile()
        temporaries.append(compiled.memory_analysis().temp_size_in_bytes)
        assert compare(plan, compiled).equal
    assert temporaries[1] < 0.6 * temporaries[0]
    sums = [c for c in planned_collectives(split) if c.payload_bytes > 1000]
    assert {c.kind for c in sums} <= {"all_reduce", "reduce_scatter", "all_gather"} and sums
    assert all(c.count == 1 for c in sums)
    summed = [c.payload_bytes for c in sums if c.kind != "all_gather"]
    gradients = 4 * sum(np.prod(s.shape) for s in shapes[0].values())
    assert gradients <= sum(summed) < 1.01 * gradients, "and the loss with them, if anything"


@pytest.mark.long
@pytest.mark.parametrize("name", [*PROGRAMS, "transformer"])
def test_plans_in_micro_batches_give_the_numbers(name: str) -> None:
    """On eight devices, whatever layouts they choose."""
    if name == "transformer":
        function = descended(partial(transformer, remat=True, dtype=jnp.float32))
        shapes: tuple[Any, ...] = (LANGUAGE, shape(16, TOKENS + 1, dtype=jnp.int32))
    else:
        function, shapes = PROGRAMS[name]
    program = te.trace(function, *shapes)
    found = batch(with_streams(program.graph))
    assert found is not None
    made = found.split(2)
    assert made is not None
    front = te.optimize(
        replace(program, graph=made), target="cpu:8", settings=Settings(work=1.0, recompute=0)
    )
    arrays = jax.tree.map(lambda x: jnp.abs(x) if name == "clipped" else x, drawn(shapes))
    want = jax.tree.leaves(program(*arrays))
    for plan in dict.fromkeys((0, len(front.plans) - 1)):
        run = te.compile(front.plans[plan], jax.devices()[:8])
        for a, b in zip(jax.tree.leaves(run(*arrays)), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int32"])
def test_what_is_computed_of_zeros_alone_is_known_to_be_zeros(dtype: str) -> None:
    def program(x: jax.Array) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        z = jnp.zeros((4, 2), dtype)
        zeros = [z.reshape(8), z.T, -z, jnp.abs(z), z * z, z.astype("float16"), z[1:] + z[:3]]
        return zeros, [jnp.exp(z), z == z, jnp.ones_like(z), jnp.sum(z)], x

    graph, rows = trace(program, np.ones(16)).graph, Cut(0, 1)
    labels = Batch(graph, 16, {graph.inputs[0]: rows}).labelled().label
    assert [labels[v] for v in graph.outputs] == ["zero"] * 7 + ["free"] * 4 + [rows]
