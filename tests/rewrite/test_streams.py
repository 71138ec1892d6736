"""Attention as people spell it becomes fused attention: the table, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.egraphs.process import Budget
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType, verify_graph
from tapestry_egg.machine.target import load_target
from tapestry_egg.metakernels import registry
from tapestry_egg.pipeline.omissions import of_forms
from tapestry_egg.rewrite import fused_forms
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.fused_forms import forms_with_streams
from tapestry_egg.rewrite.streams.streamed import streams_of, with_streams
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.runtime.lower.kernels import attention
from tapestry_egg.schedule.one_device import least_seconds
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.attention_spellings import BATCH, DTYPES, HEADS, MODES, SPELLINGS, program

CELLS = [(s, d, m) for s in SPELLINGS for d in DTYPES for m in MODES]
#: Spellings whose numbers are tried before every merge; those of the others are in the last tier.
FEW = {"einsum window", "segments"}
BOOKS = load_books(DEFAULT_BOOKS)
#: Other numbers of rows than any other dim has.
ROWS = 48
LEAST = float(np.finfo(np.float64).min)


def kernels(graph: BlockGraph) -> Iterator[str]:
    for op in graph.operations:
        yield op.kernel
        for region in op.regions:
            yield from kernels(region)


def largest(graph: BlockGraph) -> int:
    """Elements of the largest value that an operation makes or reads of a number's dtype."""
    mine = [
        graph.values[v].size
        for op in graph.operations
        for v in op.outputs
        if graph.values[v].dtype != "bool" and not op.regions
    ]
    inner = [largest(r) for op in graph.operations for r in op.regions]
    return max([0, *mine, *inner])


def streamed(name: str, dtype: str, mode: str) -> BlockGraph:
    function, shapes = program(name, dtype, mode, ROWS)
    made = with_streams(trace(function, *shapes).graph)
    verify_graph(made)
    return made


def gone(made: BlockGraph, mode: str) -> bool:
    found = set(kernels(made))
    wanted = {"flash_attention"} | ({"flash_attention_backward"} if mode != "forward" else set())
    return wanted <= found and largest(made) < BATCH * HEADS * ROWS * ROWS


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if k else ()) for k, n in enumerate(SPELLINGS)],
)
def test_no_scores_are_left(name: str) -> None:
    """Of every dtype and mode: the kernels are there, and nothing is as large as scores."""
    left = [(d, m) for s, d, m in CELLS if s == name and not gone(streamed(s, d, m), m)]
    assert not left


def error(got: object, exact: object) -> float:
    """The greatest difference beside the greatest number, over all results."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        off = float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))
        worst = float(np.maximum(worst, off))  # which keeps what is no number
    return worst


@pytest.mark.parametrize(
    "name",
    [pytest.param(s, marks=pytest.mark.slow if s in FEW else pytest.mark.long) for s in SPELLINGS],
)
def test_numbers_and_gradients_are_as_near_the_truth(name: str) -> None:
    """Off the numbers in float64 by no more than four times what the program itself is."""
    for dtype, modes in (
        ("float32", ("forward", "gradients")),
        ("bfloat16, preferred float32", ("scan",)),
    ):
        for mode in modes:
            function, shapes = program(name, dtype, mode, ROWS)
            graph = trace(function, *shapes).graph
            rng = np.random.default_rng(0)
            xs = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes]
            exact_function, _ = program(name, "float32", mode, ROWS)
            with jax.enable_x64(True):
                exact = jax.jit(exact_function)(*[x.astype(jnp.float64) for x in xs])
            theirs = error(jax.jit(emit(graph))(*xs), exact)
            ours = error(jax.jit(emit(with_streams(graph)))(*xs), exact)
            least = 1e-6 if dtype == "float32" else 4e-3
            assert ours <= 4.0 * max(theirs, least), (dtype, mode, ours, theirs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("einsum window", marks=pytest.mark.long),
        pytest.param("einsum iota", marks=pytest.mark.long),
        "segments",
    ],
)
def test_blocks_give_what_one_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many blocks of rows, of heads and of sequences, of which parts see different keys, in every
    kind of mask."""
    rng = np.random.default_rng(0)
    function, shapes = program(name, "float32", "gradients", ROWS)
    graph = with_streams(trace(function, *shapes).graph)
    xs = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes]
    whole = jax.jit(emit(graph))(*xs)
    jax.clear_caches()
    for room in (4 * ROWS * 3, 4 * ROWS * ROWS, 4 * ROWS * ROWS * HEADS):
        with monkeypatch.context() as patch:
            patch.setattr(attention, "ROOM", room)
            patch.setattr(attention, "MOST", room)
            blocks = jax.jit(emit(graph))(*xs)
        jax.clear_caches()
        assert error(blocks, whole) < 1e-5, room


@pytest.mark.parametrize(
    "fill",
    [-1e30, *(pytest.param(f, marks=pytest.mark.slow) for f in (LEAST, None))],
)
def test_float64_stays_float64(fill: float | None) -> None:
    """Sums of rows whose keys are all at a fill, which float32 does not hold; factors of a bias."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 48, 2, 8)) for _ in range(3))
    bias, seen = rng.normal(size=(1, 2, 48, 48)), np.ones((48, 48), bool)
    seen[3] = False

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array) -> object:
        def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
            s = (s + bias) / 3**0.5 if fill is None else jnp.where(seen, s, fill)
            return (jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)

    with jax.enable_x64(True):
        graph = with_streams(trace(gradients, q, k, v).graph)
        assert "flash_attention_backward" in set(kernels(graph))
        got, wanted = jax.jit(emit(graph))(q, k, v), jax.jit(gradients)(q, k, v)
    assert error(got, wanted) < 1e-13


def test_rows_of_a_single_weight_have_no_gradient() -> None:
    """What rounding leaves of one beside large scores is no more than in the program."""
    rng = np.random.default_rng(0)
    large = np.where(np.arange(48) > 0, 1e4, 0.01)[:, None, None].astype(np.float32)
    q, k, v, g = (rng.normal(size=(2, 48, 2, 8)).astype(np.float32) for _ in range(4))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array) -> object:
        def loss(q: jax.Array, k: jax.Array) -> jax.Array:
            s = jnp.einsum("bqhd,bkhd->bhqk", large * q, k)
            return (jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v) * g).sum()

        return jax.grad(loss, (0, 1))(q, k)

    graph = with_streams(trace(gradients, q, k, v, g).graph)
    assert "flash_attention_backward" in set(kernels(graph))
    with jax.enable_x64(True):
        wide = [np.asarray(x, np.float64) for x in (q, k, v, g)]
        exact = jax.jit(gradients)(*wide)
    theirs = error(jax.jit(gradients)(q, k, v, g), exact)
    assert error(jax.jit(emit(graph))(q, k, v, g), exact) <= 4.0 * max(theirs, 1e-6)


@pytest.mark.slow
def test_scores_are_never_compiled() -> None:
    """Of 4096 rows: temporaries of forward and backward pass hold a block of scores at most."""
    function, shapes = program("einsum iota", "float32", "gradients", 4096)
    graph = trace(function, *shapes).graph
    scores = 4 * BATCH * HEADS * 4096**2
    sizes = [
        jax.jit(emit(g)).lower(*shapes).compile().memory_analysis().temp_size_in_bytes
        for g in (graph, with_streams(graph))
    ]
    assert sizes[0] > scores > 2 * sizes[1]


def test_what_is_no_softmax_of_scores_stays() -> None:
    """Weights that are normalised over rows, shifted after the softmax, or masked after it."""

    def run(change: str, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        w = jax.nn.softmax(s, axis=2 if change == "rows" else 3)
        w = w + 0.01 if change == "shifted" else w
        w = jnp.where(jnp.tril(jnp.ones(w.shape[2:], bool)), w, 0.0) if change == "masked" else w
        return jnp.einsum("bhqk,bkhd->bqhd", w, v)

    shapes = [jax.ShapeDtypeStruct((2, 48, 4, 8), jnp.float32)] * 3
    for change in ("rows", "shifted", "masked"):
        graph = trace(lambda *xs, c=change: run(c, *xs), *shapes).graph
        assert with_streams(graph) is graph, change


@pytest.mark.parametrize(
    ("factors", "conditions", "calls", "operands", "ended"),
    [(1, 1, 1, 3, 0), (20, 1, 0, 0, 1), (1, 30, 1, 4, 1)],
)
def test_what_is_not_read_to_its_end_is_counted(
    factors: int, conditions: int, calls: int, operands: int, ended: int
) -> None:
    """Scores of many factors stay as they are, a mask of many conditions is an operand."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        for _ in range(factors):
            s = s * 0.9
        rows, keys = (lax.broadcasted_iota(jnp.int32, (48, 48), d) for d in (0, 1))
        seen = rows >= keys
        for n in range(conditions):
            seen = seen & (rows - keys < 50 + n)
        return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(seen, s, -jnp.inf)), v)

    shapes = [jax.ShapeDtypeStruct((2, 48, 4, 8), jnp.float32)] * 3
    graph = trace(run, *shapes).graph
    made, count = streams_of(graph)
    found = [op for op in made.operations if op.kernel == "flash_attention"]
    assert (len(found), count) == (calls, ended)
    assert [len(op.inputs) for op in found] == [operands] * calls
    (first, *_) = forms_with_streams(graph, BOOKS, load_target("h100:1"), Budget(iterations=0))
    assert first.left.softmaxes == ended
    assert sum("softmax" in note.text for note in of_forms([first], 1)) == ended


def test_forms_that_save_time_do_not_keep_out_one_that_saves_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Attention that runs in blocks is slower on one device than the program as given."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v).sum()

    shapes = [jax.ShapeDtypeStruct((16, 256, 4, 16), jnp.float32)] * 3
    graph = trace(jax.grad(run, (0, 1, 2)), *shapes).graph
    quicker = [Form(replace(graph, name=name)) for name in ("quicker", "quick")]
    monkeypatch.setattr(fused_forms, "forms", lambda of, *_, **__: (Form(of), *quicker))
    _, *first, fused = forms_with_streams(graph, BOOKS, load_target("h100:1"), slower=True)[:4]
    assert first == quicker
    assert fused.slower and set(kernels(fused.graph)) >= {"flash_attention"}


@pytest.mark.parametrize(
    ("name", "causal", "window", "operands"),
    [
        ("einsum", False, 0, 3),
        ("einsum tril", True, 0, 3),
        ("einsum window", True, 5, 3),
        ("jax.nn window", True, 5, 3),
        ("added mask", True, 0, 3),
        ("segments", False, 0, 4),
        ("bias", False, 0, 4),
    ],
)
def test_masks_are_read(name: str, causal: bool, window: int, operands: int) -> None:
    """A causal mask and a window are the kernel's own; other masks, and what is added, are read."""
    graph = streamed(name, "float32", "forward")
    (op,) = [op for op in graph.operations if op.kernel == "flash_attention"]
    assert (op.params["causal"], op.params["window"], len(op.inputs)) == (causal, window, operands)


@pytest.mark.parametrize(
    ("rows", "keys", "band"),
    [
        pytest.param(6, 6, True, marks=pytest.mark.slow),
        pytest.param(6, 5, True, marks=pytest.mark.slow),
        pytest.param(9, 4, False, marks=pytest.mark.slow),
    ],
)
def test_rows_that_see_no_key_are_no_band(rows: int, keys: int, band: bool) -> None:
    """Behind a window on few keys: the program takes the mean of all values there."""

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        behind = jnp.arange(rows)[:, None] - jnp.arange(keys)[None, :]
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        scores = jnp.where((behind >= 0) & (behind < 3), scores, -1e30)
        return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(2, n, 2, 4)), jnp.float32) for n in (rows, keys, keys))
    forms = attend, jax.grad(lambda *x: (attend(*x) ** 2).sum(), argnums=(0, 1, 2))
    for function in forms:
        graph = with_streams(trace(function, q, k, v).graph)
        (op,) = [op for op in graph.operations if op.kernel == "flash_attention"]
        assert op.params["causal"] == band
        assert error(jax.jit(emit(graph))(q, k, v), jax.tree.leaves(function(q, k, v))) < 1e-5


def test_what_is_masked_costs_nothing() -> None:
    """Half of the scores under a causal mask, fewer in a window; where no table has the kernel,
    what passes through memory counts too."""
    h100, seconds = load_target("h100:1"), {}
    for causal, window, dtype in [
        *((False, 0, "bfloat16"), (True, 0, "bfloat16"), (True, 1024, "bfloat16")),
        (True, 0, "float32"),
    ]:
        types = [TensorType((1, 8192, 32, 128), dtype)] * 3
        params = {"scale": 1.0, "causal": causal, "window": window, "fill": 0.0}
        found = registry.signature("flash_attention", params, types)
        seconds[causal, window, dtype] = least_seconds(found, h100)
    full, half, few, wide = seconds.values()
    assert 0.45 < half / full < 0.6 and 0.2 < few / half < 0.3 and wide > 2.0 * half
