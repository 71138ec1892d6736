"""Programs whose best plan is known by name: what it does, that XLA compiles what it says, and that
its numbers are those of `jax.jit`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from models import moe
from tapestry_egg.pipeline import Settings
from tapestry_egg.rewrite.streams.large_inside import with_invariants_inside
from tapestry_egg.runtime import compare
from tests.runtime.lowered import numbers

Array = jax.Array
S = jax.ShapeDtypeStruct
EIGHT = [te.MeshShape(("x",), (8,))]


def is_run(
    plan: te.Plan, function: Callable[..., Any], given: Sequence[Any], within: float
) -> None:
    """On eight devices of this machine the plan gives what `jax.jit` gives, and sends and receives
    what it says."""
    run = te.compile(plan, jax.devices()[:8])
    wanted = jax.tree.leaves(jax.jit(function)(*given))
    for found, right in zip(jax.tree.leaves(run(*given)), wanted, strict=True):
        np.testing.assert_allclose(found, right, rtol=within, atol=within)
    assert compare(plan, run.compile()).equal


def drawn(*shapes: tuple[int, ...]) -> list[Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=s) / s[-1] ** 0.5, jnp.float32) for s in shapes]


def product(a: Array, b: Array, c: Array) -> Array:
    return (a @ b) @ c


@pytest.mark.slow
def test_a_product_whose_last_factor_is_cut_by_columns_makes_that_one_first() -> None:
    """(a·b)·c has one device's work of a·b on all of them, or gathers it; a·(b·c) sends nothing."""

    def front(size: int) -> te.Front:
        square = [S((size, size), jnp.float32)] * 3
        pins = {"[0]": (None, None), "[1]": (None, None), "[2]": (None, "x")}
        settings = Settings(work=2.0, merge=False)
        program = te.trace(product, *square)
        return te.optimize(program, "h100:8", mesh_shapes=EIGHT, pins=pins, settings=settings)

    plan = front(2048)[0]
    first, last = plan.graph.operations
    assert first.inputs == plan.graph.inputs[1:]
    assert last.inputs == (plan.graph.inputs[0], first.outputs[0])
    assert not plan.collectives and plan.gap < 1e-6
    is_run(front(256)[0], product, drawn(*[(256, 256)] * 3), 1e-3)


@pytest.mark.slow
def test_a_train_step_of_a_mixture_of_experts_takes_three_all_to_alls() -> None:
    """What the experts read, what they give, and the gradient of this: a block of `experts * groups
    * capacity * width` numbers, cut over the devices, each; no gradient of the first is made. The
    capacity is of both choices of a token, twice over, so that a block is `4 * tokens * width`.
    Where links have no latency nothing else as large moves."""

    def plan(groups: int, tokens: int, width: int, hidden: int) -> te.Plan:
        shapes = jax.eval_shape(lambda: moe.example(groups, tokens, width, hidden)[1])
        settings = Settings(front=False, recompute=0, work=3.0)
        program = te.trace(moe.step, *shapes)
        return te.optimize(program, "cpu:8", mesh_shapes=EIGHT, settings=settings).best("seconds")

    def exchanged(plan: te.Plan) -> list[int]:
        return [c.payload_bytes for c in plan.collectives if c.kind == "all_to_all"]

    large = plan(32, 256, 512, 2048)
    block = 4 * 32 * 256 * 512 * 4 // 8
    assert exchanged(large) == [block] * 3
    router_and_out = (512 * 512 + 512 * 8) * 4
    # Gradients of what all devices have are summed and scattered; the rest are a few numbers.
    wire = (3 * block + router_and_out) * 7 / 8
    assert wire <= large.costs.wire_bytes <= 1.001 * wire < 24e6
    small = plan(16, 64, 64, 128)
    assert len(exchanged(small)) == 3
    is_run(small, moe.step, moe.example(16, 64, 64, 128)[1], 1e-3)


def loss(x: Array, w: Array, labels: Array) -> Array:
    logits = x @ w
    of_label = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - of_label)


def gradients(x: Array, w: Array, labels: Array) -> tuple[Array, tuple[Array, Array]]:
    return jax.value_and_grad(loss, (0, 1))(x, w, labels)


def streamed(
    tokens: int, width: int, vocabulary: int, share: float, of: Any, work: float
) -> te.Plan:
    """The fastest plan of a loss within a share of what plans with all logits hold."""
    shapes = [
        S((tokens, width), jnp.float32),
        S((width, vocabulary), jnp.float32),
        S((tokens,), jnp.int32),
    ]
    program = te.trace(gradients, *shapes)
    settings = Settings(work=work, recompute=0, forms=0)
    whole = te.optimize(program, "h100:8", mesh_shapes=EIGHT, settings=settings)
    assert not _loops(whole.best("seconds")), "all logits at once, without a limit"
    peak = of(p.costs.peak_bytes for p in whole if not _loops(p))
    limits = {"peak_bytes": share * peak}
    short = te.optimize(program, "h100:8", mesh_shapes=EIGHT, settings=settings, limits=limits)
    plan = short.best("seconds", limits=limits)
    assert _loops(plan) and plan.costs.peak_bytes <= share * peak
    values = {v for r in _regions(plan) for v in r.values}
    assert max(v.size for v in values if v.shape) < tokens * vocabulary
    return plan


@pytest.mark.long
def test_a_loss_over_a_large_vocabulary_streams_under_a_memory_limit() -> None:
    """Logits of width 4096 are slow to recompute: a memory limit alone makes plans stream them."""
    plan = streamed(16384, 4096, 131072, 0.65, max, 3.0)
    assert plan.gap < 0.01 and plan.costs.seconds < 0.04, (
        "no more than a sixth more than without a limit"
    )


@pytest.mark.slow
def test_a_loss_that_streams_under_a_memory_limit_gives_the_numbers_of_jax() -> None:
    small = streamed(1024, 64, 4096, 0.9, min, 0.5)
    x, w = drawn((1024, 64), (64, 4096))
    labels = jnp.asarray(np.random.default_rng(1).integers(0, 4096, 1024), jnp.int32)
    is_run(small, gradients, (x, w, labels), 1e-4)


def _regions(plan: te.Plan) -> list[Any]:
    return [r for op in plan.graph.operations for r in op.regions]


def _loops(plan: te.Plan) -> bool:
    return any(op.kernel == "scan" for op in plan.graph.operations)


def update(w: dict[str, Array], x: Array, y: Array) -> dict[str, Array]:
    def loss(w: dict[str, Array]) -> Array:
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.mark.long
def test_eight_hosts_of_eight_use_three_axes_without_an_option() -> None:
    """The batch over hosts and a part of each, the layer over the rest: the fastest plan of all."""
    w = {"up": S((4096, 16384), jnp.float32), "down": S((16384, 4096), jnp.float32)}
    program = te.trace(update, w, *[S((65536, 4096), jnp.float32)] * 2)
    settings = {"work": 2.0, "recompute": 0, "forms": 0}
    front = te.optimize(program, "h100:8x8", settings=Settings(**settings))
    two = te.optimize(program, "h100:8x8", settings=Settings(max_axes=2, **settings))
    assert len(front[0].mesh.sizes) == 3 and front[0].mesh.devices == 64
    assert front[0].gap < 0.01 and front[0].costs.seconds < 0.99 * two[0].costs.seconds


# Programs that divide are divided: `te.jit` leaves no part of them whole on every device.


KEYS = jax.random.split(jax.random.key(0), 1024)


def recurrence(a: jax.Array, x: jax.Array) -> jax.Array:
    def both(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(both, (a, x))[1]


def chains(keys: jax.Array, x: jax.Array) -> Any:
    """A Metropolis chain for every key."""

    def chain(key: jax.Array, x: jax.Array) -> Any:
        def step(x: jax.Array, key: jax.Array) -> Any:
            one, other = jax.random.split(key)
            near = x + jax.random.normal(one, x.shape)
            taken = jnp.log(jax.random.uniform(other)) < jnp.sum(x**2 - near**2)
            return jnp.where(taken, near, x), taken

        return lax.scan(step, x, jax.random.split(key, 20))

    return jax.vmap(chain)(keys, x)


def noise(keys: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(keys)


def solved(a: jax.Array, b: jax.Array) -> Any:
    s = a @ jnp.swapaxes(a, -1, -2) + 4 * jnp.eye(a.shape[-1])
    return jnp.linalg.solve(s, b), jnp.linalg.cholesky(s), jnp.linalg.eigh(s)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "args", "dearest"),
    [
        (recurrence, (numbers(64, 8192), numbers(64, 8192, seed=1)), {"concatenate"}),
        (chains, (KEYS, numbers(1024, 16)), {"random_split", "scan"}),
        (noise, (KEYS, numbers(1024, 256)), {"random_bits"}),
        (solved, (numbers(256, 24, 24), numbers(256, 24, 8)), {"lu", "cholesky", "eigh"}),
    ],
)
def test_what_divides_is_divided(
    fn: Callable[..., Any], args: tuple[Any, ...], dearest: set[str]
) -> None:
    jitted = te.jit(fn, cache=False)
    out, wanted = jitted(*args), jax.jit(fn)(*args)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)
        assert x.addressable_shards[0].data.size * len(jax.devices()) == x.size
    plan = jitted.plan(*args)
    assert plan.mesh.devices == len(jax.devices())
    found = {op.kernel for op in plan.graph.operations}
    assert dearest <= found
    # What all devices hold of the results of these kernels together is the result once.
    for op, strategy in zip(plan.graph.operations, plan.body.strategies, strict=True):
        if op.kernel in dearest:
            for v, layout in zip(op.outputs, strategy.gives, strict=True):
                if plan.graph.values[v].size > 1:
                    cut = [plan.mesh.parts(axes) for axes in layout.dims]
                    assert np.prod(cut) == plan.mesh.devices, (op.kernel, layout)


# What is written into a donated or carried array moves no more than what is written.


CACHE, TOKEN = S((8, 4096, 64), jnp.float32), S((8, 64), jnp.float32)
PLACE = S((), jnp.int32)
TABLE, ROWS = S((1 << 16, 64), jnp.float32), S((96,), jnp.int32)
#: A pass over such an array on one device takes longer.
LITTLE = 8e-6


def updated(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(cache, token[:, None], (0, i, 0))


def set_(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return cache.at[:, i].set(token)


def added(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return cache.at[:, i].add(token)


def twice(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return updated(updated(cache, token, i), 2 * token, i + 1)


def fastest(fn: Any, *types: Any, target: str = "h100:1", **words: Any) -> te.Plan:
    program = te.trace(fn, *types, donate_argnums=0)
    return te.optimize(program, target, settings=Settings(work=1.0, merge=False), **words)[0]


@pytest.mark.slow
@pytest.mark.parametrize("fn", [updated, set_, added, twice])
def test_a_token_is_written_into_a_donated_cache(fn: Any) -> None:
    plan = fastest(fn, CACHE, TOKEN, PLACE)
    nbytes = np.prod(CACHE.shape) * 4
    assert plan.costs.seconds < LITTLE
    assert plan.costs.peak_bytes < 1.05 * nbytes


@pytest.mark.slow
def test_a_decoding_loop_takes_little_for_each_token() -> None:
    def decode(cache: jax.Array, tokens: jax.Array) -> jax.Array:
        def step(cache: jax.Array, x: Any) -> tuple[jax.Array, None]:
            return updated(cache, x[0], x[1]), None

        return lax.scan(step, cache, (tokens, jnp.arange(len(tokens))))[0]

    plan = fastest(decode, CACHE, S((64, *TOKEN.shape), jnp.float32))
    assert plan.costs.seconds < 64 * LITTLE
    assert plan.costs.peak_bytes < 1.1 * np.prod(CACHE.shape) * 4


@pytest.mark.slow
def test_what_is_written_may_lie_across_devices_along_two_dims() -> None:
    rng = np.random.default_rng(0)
    x, part = rng.normal(size=(16, 24)), rng.normal(size=(9, 11))
    program = te.trace(
        lambda x, part, i: lax.dynamic_update_slice(x, part, (i, 2 * i)),
        *[S(a.shape, jnp.float32) for a in (x, part)],
        PLACE,
        donate_argnums=0,
    )
    plan = te.optimize(
        program,
        "h100:8",
        mesh_shapes=[te.MeshShape(("x", "y"), (2, 4))],
        pins={"[0]": ("x", "y"), "[1]": (None, None), "result": ("x", "y")},
        settings=Settings(work=1.0, merge=False),
    )[0]
    run = te.compile(plan, jax.devices()[:8])
    for i in (0, 3, 5, 99):
        wanted = x.copy()
        at = min(i, 16 - 9), min(2 * i, 24 - 11)
        wanted[at[0] : at[0] + 9, at[1] : at[1] + 11] = part
        found = run(*[jnp.asarray(a, jnp.float32) for a in (x, part)], jnp.int32(i))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def descent(table: jax.Array, rows: jax.Array) -> jax.Array:
    return table - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[rows])))(table)


def momentum(moment: jax.Array, table: jax.Array, rows: jax.Array) -> jax.Array:
    return 0.9 * moment + 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[rows])))(table)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [descent, momentum])
def test_the_gradient_of_a_lookup_is_added_where_the_table_is(fn: Any) -> None:
    """No array of its zeros is made. Numbers on eight devices, some rows read several times."""
    rng = np.random.default_rng(0)
    table, moment = rng.normal(size=(2, *TABLE.shape))
    rows = rng.integers(0, 40, size=ROWS.shape)
    gradient = np.zeros(TABLE.shape)
    np.add.at(gradient, rows, np.cos(table[rows]))
    given = [table, rows] if fn is descent else [moment, table, rows]
    wanted = table - 0.1 * gradient if fn is descent else 0.9 * moment + 0.1 * gradient
    types = [S(x.shape, jnp.int32 if x is rows else jnp.float32) for x in given]
    plan = fastest(fn, *types, target="h100:8")
    sizes = {plan.graph.values[v].size for op in plan.graph.operations for v in op.outputs}
    scatter = next(op for op in plan.graph.operations if op.kernel == "scatter-add")
    assert scatter.outputs == plan.graph.outputs and max(sizes) == gradient.size
    made = {
        v for op in plan.graph.operations if op.kernel == "broadcast_in_dim" for v in op.outputs
    }
    assert scatter.inputs[0] not in made
    run = te.compile(plan, jax.devices()[:8])
    found = run(*[jnp.asarray(x, t.dtype) for x, t in zip(given, types, strict=True)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)


# Large values that a loop reads and does not change, if they are made one by one of small ones.
# They are planned as if they were written in the loop.


ROUNDS, N = 10, 1 << 15
Step = Callable[[jax.Array, jax.Array], jax.Array]


def points(n: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((n,), jnp.float32)] * 3


def distances(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x[:, None] - y[None]) ** 2


def sinkhorn(g: jax.Array, c: jax.Array) -> jax.Array:
    f = -jax.nn.logsumexp(g[None] - c, axis=1)
    return -jax.nn.logsumexp(f[:, None] - c, axis=0)


def matched(g: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.max(g[None] * c, axis=1)


def looped(step: Step, outside: bool, rounds: str = "fori_loop") -> Callable[..., Any]:
    """Rounds of a step that reads distances, which are computed before the loop or in it."""

    def run(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        before = distances(x, y)

        def one(g: jax.Array) -> jax.Array:
            return step(g, before if outside else distances(x, y))

        if rounds == "fori_loop":
            return lax.fori_loop(0, ROUNDS, lambda _, g: one(g), g)
        return lax.scan(lambda g, _: (one(g), jnp.sum(g)), g, None, ROUNDS)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("step", "rounds"), [(sinkhorn, "scan"), (matched, "fori_loop")])
def test_where_they_are_written_makes_no_difference(step: Step, rounds: str) -> None:
    settings = te.Settings(work=0.3, merge=False)
    plans = [
        te.optimize(
            te.trace(looped(step, outside, rounds), *points(N)), "h100:8", settings=settings
        )[0]
        for outside in (True, False)
    ]
    assert "invariants-inside" in plans[0].rules and not plans[1].rules
    assert plans[0].costs.seconds <= 1.05 * plans[1].costs.seconds
    assert (
        plans[0].costs.peak_bytes < 8 * points(N)[0].size * 4
    )  # of N ** 2 elements none is stored


@pytest.mark.slow
def test_rounds_that_make_them_compute_the_same() -> None:
    fn = looped(sinkhorn, True, "scan")
    given = [np.random.default_rng(k).normal(size=64).astype(np.float32) for k in range(3)]
    program = te.trace(fn, *points(64))
    inside = te.trace(fn, *points(64)).graph
    assert with_invariants_inside(inside) is not inside
    settings = te.Settings(work=0.3, merge=False)
    plans = te.optimize(program, "h100:8", settings=settings)
    plan = next(p for p in plans if p.mesh.devices == 8)
    found = te.compile(plan, jax.devices()[:8])(*given)
    for a, b in zip(found, jax.jit(fn)(*given), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_product_stays_before_the_loop() -> None:
    """To multiply again in every round is no small work, and what is given is not made at all."""
    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        c = x @ y
        return lax.fori_loop(0, ROUNDS, lambda _, g: jnp.tanh(g + c * y), x)

    graph = te.trace(product, square, square).graph
    assert with_invariants_inside(graph) is graph
