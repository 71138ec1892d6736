"""Programs of all kinds through `te.jit` on eight devices, held against `jax.jit`.

The front's fastest plan, its smallest and one between them are run, since a wrong plan hides where
only the fastest one is run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime import hlo_stats

QUICK = Settings(work=0.1)
Case = tuple[Callable[..., Any], tuple[Any, ...]]
Build = Callable[[], Case]
PROGRAMS: dict[str, Build] = {}
DIVISIBLE: dict[str, Build] = {}  # programs whose work divides by eight


def program(build: Build) -> Build:
    PROGRAMS[build.__name__] = build
    return build


def divisible(build: Build) -> Build:
    DIVISIBLE[build.__name__] = build
    return build


def normal(*shape: int, seed: int = 0, scale: float = 1.0, dtype: Any = np.float32) -> jax.Array:
    rng = np.random.default_rng(seed + sum(shape))
    return jnp.asarray(rng.normal(size=shape) * scale, dtype)


def integers(high: int, *shape: int, dtype: Any = np.int32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).integers(0, high, shape), dtype)


def train(loss: Callable[..., jax.Array]) -> Callable[..., Any]:
    """A step of gradient descent on the first argument."""

    def step(params: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: (p - 0.1 * g).astype(p.dtype), params, grads), value

    return step


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
    return -jnp.mean(picked)


def perceptron(sizes: list[int], dtype: Any = np.float32) -> list[jax.Array]:
    pairs = pairwise(sizes)
    return [normal(a, b, scale=a**-0.5, dtype=dtype) for a, b in pairs]


def forward(params: list[jax.Array], x: jax.Array) -> jax.Array:
    for w in params[:-1]:
        x = jax.nn.relu(x @ w)
    return x @ params[-1]


# Programs whose work divides by eight


@divisible
def mlp() -> Case:
    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        return jnp.mean((forward(params, x) - y) ** 2)

    return train(loss), (perceptron([64, 256, 256, 16]), normal(64, 64), normal(64, 16))


@divisible
def convolutions() -> Case:
    def conv(x: jax.Array, w: jax.Array, stride: int, groups: int = 1) -> jax.Array:
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (stride, stride), "SAME", dimension_numbers=numbers, feature_group_count=groups
        )

    def loss(params: Any, x: Any, labels: Any) -> jax.Array:
        x = jax.nn.relu(conv(x, params["stem"], 1))
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID") / 4
        x = jax.nn.relu(conv(x, params["depthwise"], 1, groups=16))
        x = jax.nn.relu(conv(x, params["down"], 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        return cross_entropy(x.reshape(x.shape[0], -1) @ params["head"], labels)

    params = {
        "stem": normal(3, 3, 3, 16, scale=0.2),
        "depthwise": normal(3, 3, 1, 16, scale=0.2),
        "down": normal(3, 3, 16, 32, scale=0.1),
        "head": normal(128, 10, scale=0.1),
    }
    return train(loss), (params, normal(16, 16, 16, 3), integers(10, 16))


@divisible
def experts() -> Case:
    def loss(params: Any, x: Any, y: Any) -> jax.Array:
        values, chosen = lax.top_k(jax.nn.softmax(x @ params["gate"]), 2)
        values = values / values.sum(-1, keepdims=True)
        combine = jnp.einsum("tk,tke->te", values, jax.nn.one_hot(chosen, 8))
        hidden = jax.nn.silu(jnp.einsum("td,edh->teh", x, params["up"]))
        out = jnp.einsum("teh,ehd,te->td", hidden, params["down"], combine)
        return jnp.mean((out - y) ** 2)

    params = {
        "gate": normal(32, 8, scale=0.2),
        "up": normal(8, 32, 64, scale=0.2),
        "down": normal(8, 64, 32, scale=0.1),
    }
    return train(loss), (params, normal(64, 32), normal(64, 32))


@divisible
def lstm() -> Case:
    def loss(params: Any, xs: Any, labels: Any) -> jax.Array:
        def cell(carry: Any, x: jax.Array) -> Any:
            h, c = carry
            i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None

        zero = jnp.zeros((xs.shape[0], 32))
        (h, _), _ = lax.scan(cell, (zero, zero), jnp.swapaxes(xs, 0, 1))
        return cross_entropy(h @ params["out"], labels)

    params = {
        "x": normal(16, 128, scale=0.2),
        "h": normal(32, 128, scale=0.2),
        "out": normal(32, 10),
    }
    return train(loss), (params, normal(16, 12, 16), integers(10, 16))


PROGRAMS.update(DIVISIBLE)


# All others


@program
def dropout_adam() -> Case:
    import optax

    optimizer = optax.adam(1e-3)

    def step(params: Any, state: Any, key: Any, x: Any, labels: Any) -> Any:
        key, now = jax.random.split(key)

        def loss(params: Any) -> jax.Array:
            h = jax.nn.gelu(x @ params[0])
            h = jnp.where(jax.random.bernoulli(now, 0.8, h.shape), h / 0.8, 0)
            return cross_entropy(h @ params[1], labels)

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, key, value

    params = perceptron([16, 32, 10])
    key = jax.random.key(0)
    return step, (params, optimizer.init(params), key, normal(32, 16), integers(10, 32))


@program
def indivisible() -> Case:
    def f(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return y, y.sum(0), y.reshape(-1), jnp.sort(y, 1), jnp.cumsum(y, 0), y[::2]

    return f, (normal(13, 7), normal(7, 11))


@program
def ragged_experts() -> Case:
    def f(x: Any, gate: Any, up: Any) -> jax.Array:
        chosen = jnp.argmax(x @ gate, -1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=8).astype(jnp.int32)
        return jnp.zeros((64, 16)).at[order].set(lax.ragged_dot(x[order], up, sizes))

    return f, (normal(64, 32), normal(32, 8), normal(8, 32, 16))


@program
def control_flow() -> Case:
    def f(w: Any, x: Any) -> Any:
        def body(carry: Any, t: Any) -> Any:
            carry = lax.cond(t % 2 == 0, lambda c: jnp.tanh(c @ w), lambda c: c * 0.5, carry)
            carry = lax.switch(t % 3, [jnp.sin, jnp.cos, lambda c: c], carry)
            return carry, carry.sum()

        y, sums = lax.scan(body, x, jnp.arange(6))
        reach = lax.fori_loop(0, 5, lambda i, c: c.at[i].set(c[i] + i), y)
        return reach, sums, lax.associative_scan(jnp.add, y, axis=1)

    return f, (normal(16, 16, scale=0.3), normal(8, 16))


@program
def while_loop() -> Case:
    def f(x: Any) -> Any:
        def unfinished(state: Any) -> Any:
            return (jnp.max(jnp.abs(state[0] ** 2 - x)) > 1e-4) & (state[1] < 50)

        def newton(state: Any) -> Any:
            return 0.5 * (state[0] + x / state[0]), state[1] + 1

        # The count starts as a Python number: its result is weakly typed.
        return lax.while_loop(unfinished, newton, (jnp.ones_like(x), 0))

    return f, (jnp.abs(normal(32)) + 0.5,)


@program
def while_loops_under_vmap() -> Case:
    """Every example has a condition of its own, and constants in condition and body."""

    def one(x: Any, limit: Any, key: Any) -> Any:
        def grow(state: Any) -> Any:
            return state[0] * 1.5 + 0.1, state[1] + 1, jax.random.fold_in(state[2], 1)

        y, n, key = lax.while_loop(lambda s: s[0] < limit, grow, (jnp.abs(x), 0, key))
        return y, n, jax.random.uniform(key)

    def f(x: Any, limits: Any, keys: Any) -> Any:
        return jax.vmap(one)(x, limits, keys)

    return f, (normal(16), 5 + 3 * jnp.abs(normal(16)), jax.random.split(jax.random.key(0), 16))


@program
def sort_gather_fft() -> Case:
    def f(x: Any, table: Any, places: Any) -> Any:
        spectrum = jnp.fft.rfft(x)
        return (
            jnp.sort(x, 0),
            jnp.argsort(x, 1),
            lax.top_k(x, 3),
            table[places],
            table.at[places[:, 0]].add(1.0),
            jax.ops.segment_sum(x, places[:, 0] % 5, 5),
            lax.dynamic_slice(x, (places[0, 0], 0), (4, 8)),
            lax.dynamic_update_slice(x, x[:4, :4], (3, places[0, 1])),
            jnp.abs(spectrum),
            jnp.fft.irfft(spectrum * 2),
            jnp.linalg.cholesky(x[:8, :8] @ x[:8, :8].T + 9 * jnp.eye(8)),
        )

    return f, (normal(16, 32), normal(24, 16), integers(24, 16, 4))


@program
def many_dtypes() -> Case:
    def f(a: Any, u: Any, m: Any, h: Any, z: Any) -> Any:
        return (
            (a @ a.T, a // 3, a.max(0), (a > 3).any(0), a.astype(jnp.int8), jnp.mean(a)),
            (u >> 2, lax.clz(u), u.astype(jnp.uint8)),
            (jnp.where(m, a, -a), ~m, m.all(0), m.sum()),
            (h @ h.T, h.astype(jnp.bfloat16) * 2, h.sum(0)),
            (z @ z.T, jnp.abs(z), jnp.sum(z), jnp.exp(1j * jnp.real(z))),
        )

    half = normal(16, 8, dtype=np.float16)
    complexes = (normal(16, 8) + 1j * normal(16, 8, seed=5)).astype(jnp.complex64)
    words, flags = integers(99, 16, 8, dtype=np.uint32), integers(2, 16, 8).astype(bool)
    return f, (integers(9, 16, 8), words, flags, half, complexes)


@program
def empty_tensors() -> Case:
    def f(x: Any, y: Any) -> Any:
        joined = jnp.concatenate([x, y])
        return x + 1, joined, x.sum(0), x @ jnp.ones((4, 3)), x.T @ x, x.reshape(4, 0), x.mean(1)

    return f, (jnp.zeros((0, 4)), normal(8, 4))


@program
def boundaries() -> Case:
    """Inputs as outputs, outputs twice, constants, Python numbers, nothing, an unused input."""

    def f(x: Any, n: Any, unused: Any, none: Any) -> Any:
        y = x * 2
        return y, [y, x], {"n": n, "none": none}, (jnp.ones((3, 4)), 7, 2.5, True), (), n + 1

    return f, (normal(8, 8), 3, normal(5), None)


@program
def random_keys() -> Case:
    def f(key: Any, raw: Any) -> Any:
        a, b = jax.random.split(key)
        return (
            jax.random.normal(a, (16, 8)),
            jax.random.permutation(b, 16),
            jax.random.categorical(a, jnp.zeros((8, 4))),
            key,
            jax.random.uniform(jax.random.split(raw)[0], (13,)),
        )

    return f, (jax.random.key(3), jax.random.PRNGKey(4))


@program
def custom_derivatives() -> Case:
    @jax.custom_vjp
    def clip(x: jax.Array) -> jax.Array:
        return jnp.clip(x, -1, 1)

    clip.defvjp(lambda x: (clip(x), None), lambda _, g: (g * 2,))

    def loss(w: Any, x: Any) -> jax.Array:
        layer = jax.checkpoint(lambda h: jnp.tanh(h @ w))
        return jnp.sum(clip(layer(layer(x))))

    return train(loss), (normal(8, 8), normal(16, 8))


# What plans and compiles for more than a second, and for some ten.
SLOW = {
    "control_flow",
    "convolutions",
    "custom_derivatives",
    "dropout_adam",
    "experts",
    "indivisible",
    "many_dtypes",
    "mlp",
    "ragged_experts",
    "random_keys",
    "sort_gather_fft",
    "while_loops_under_vmap",
}
LONG = {"convolutions", "lstm"}
#: Of what other plans are run every time: loops, branches, uneven shards, experts, a train step.
OTHERS = {"control_flow", "experts", "indivisible", "mlp", "many_dtypes", "while_loop"}


def marked(name: str, slow: set[str], long: set[str]) -> Any:
    """A name as a parameter of the tier of its test."""
    marks = [pytest.mark.long] if name in long else [pytest.mark.slow] if name in slow else []
    return pytest.param(name, marks=marks)


@functools.cache
def jitted(name: str) -> tuple[Any, tuple[Any, ...], Any]:
    """A program planned once for all tests, its arguments, and what JAX makes of them."""
    fn, args = PROGRAMS[name]()
    return te.jit(fn, settings=QUICK), args, jax.jit(fn)(*args)


def copies(args: Any) -> Any:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, jax.Array) else x, args)


def assert_same(got: Any, expected: Any, where: str) -> None:
    """Same structure, types and weak types; integers equal, floats close for their precision."""
    assert jax.tree.structure(got) == jax.tree.structure(expected), where
    for i, (x, y) in enumerate(zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)):
        if jax.dtypes.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type), f"{where}, {i}"
        if not jnp.issubdtype(y.dtype, jnp.inexact):
            np.testing.assert_array_equal(x, y, err_msg=f"{where}, output {i}")
            continue
        near = 100 * float(jnp.finfo(y.dtype).eps)
        wide = np.complex128 if jnp.iscomplexobj(y) else np.float64
        a, b = np.asarray(x).astype(wide), np.asarray(y).astype(wide)
        scale = max(1.0, float(np.max(np.abs(b[np.isfinite(b)]), initial=0.0)))
        np.testing.assert_allclose(a, b, near, near * scale, err_msg=f"{where}, output {i}")


def flops(compiled: Any) -> float:
    return hlo_stats(compiled).flops


# A plan that the certificate refuses is left out with a warning: a defect, here an error.
@pytest.mark.filterwarnings("error:a plan is left out")
@pytest.mark.parametrize("name", [marked(n, SLOW, LONG) for n in PROGRAMS])
def test_program_gives_what_jax_gives(name: str) -> None:
    optimized, args, expected = jitted(name)
    assert_same(optimized(*copies(args)), expected, "te.jit")


@pytest.mark.filterwarnings("error:a plan is left out")
@pytest.mark.parametrize("name", [marked(n, {*PROGRAMS}, {*PROGRAMS} - OTHERS) for n in PROGRAMS])
def test_other_plans_give_what_jax_gives(name: str) -> None:
    optimized, args, expected = jitted(name)
    plans = optimized.front(*args).plans
    smallest = min(range(len(plans)), key=lambda i: plans[i].costs.peak_bytes)
    for i in sorted({len(plans) // 2, smallest}):
        assert_same(te.compile(plans[i])(*copies(args)), expected, f"{plans[i].name}")


@pytest.mark.slow
@pytest.mark.parametrize("share", [pytest.param(0.999, marks=pytest.mark.long), 0.5])
@pytest.mark.parametrize("name", [marked(n, set(), {*DIVISIBLE} - {"mlp"}) for n in DIVISIBLE])
def test_limit_below_replication_divides_the_work(name: str, share: float) -> None:
    fn, args = DIVISIBLE[name]()
    alone = te.optimize(te.trace(fn, *args), "cpu:1", settings=QUICK).best("seconds")
    limits = {"peak_bytes": alone.costs.peak_bytes * share}
    optimized = te.jit(fn, limits=limits, settings=QUICK)
    whole = flops(jax.jit(fn).lower(*args).compile())
    assert flops(optimized.compiled(*args).compile()) <= whole / 4
    assert_same(optimized(*copies(args)), jax.jit(fn)(*args), "te.jit")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize(
    "sizes", [(1,), (2, 1), *(pytest.param(n, marks=pytest.mark.slow) for n in ((8,), (1, 4, 2)))]
)
def test_meshes_of_both_kinds(sizes: tuple[int, ...], kind: AxisType) -> None:
    names = ("x", "y", "z")[: len(sizes)]
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = jax.make_mesh(sizes, names, (kind,) * len(sizes), devices=devices)
    step, (params, x) = (
        train(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)),
        (
            normal(16, 32),
            normal(24, 16),
        ),
    )
    expected = jax.jit(step)(params, x)
    with jax.set_mesh(mesh):
        optimized = te.jit(step, mesh=mesh, settings=Settings(work=0.3, recompute=0, forms=0))
        assert_same(optimized(params, x), expected, str(mesh))


@pytest.mark.slow
def test_static_donated_and_keyword_arguments() -> None:
    def f(state: Any, n: int, *, scale: Any, mode: str = "sum") -> Any:
        return jax.tree.map(lambda s: s * n + scale, state), mode

    def g(state: Any, n: int, *, scale: Any, mode: str = "sum") -> Any:
        new, _ = f(state, n, scale=scale, mode=mode)
        return new

    options: dict[str, Any] = {"donate_argnums": 0, "static_argnums": 1, "static_argnames": "mode"}
    state = {"a": normal(8, 8), "b": normal(16), "none": None}
    expected = jax.jit(g, **options)(copies(state), 3, scale=jnp.float32(2), mode="mean")
    optimized = te.jit(g, settings=QUICK, **options)
    assert_same(optimized(copies(state), 3, scale=jnp.float32(2), mode="mean"), expected, "te.jit")


@pytest.mark.slow
def test_sixty_four_bits() -> None:
    with jax.enable_x64(True):
        x, i = np.random.default_rng(0).normal(size=(8, 8)), np.arange(8)

        def f(x: Any, i: Any) -> Any:
            return jnp.linalg.solve(x @ x.T + 5 * jnp.eye(8), x), jnp.arange(8) + i, jnp.sum(i)

        assert_same(te.jit(f, settings=QUICK)(x, i), jax.jit(f)(x, i), "te.jit")


@pytest.mark.slow
def test_jit_minimises_what_it_is_asked_to() -> None:
    """Few bytes and few flops are worth a plan of their own, not only the fastest with fewest."""

    def f(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w).sum(0)

    args = (normal(64, 64), normal(64, 64))
    fastest = te.jit(f, settings=QUICK, numerics="relaxed").plan(*args)
    limits = {"flops": fastest.costs.flops * 1.01}
    frugal = te.jit(f, minimize="wire_bytes", limits=limits, settings=QUICK)
    assert {"wire_bytes", "flops"} <= set(frugal.front(*args).objectives)
    assert frugal.plan(*args).costs.wire_bytes <= fastest.costs.wire_bytes
    assert frugal.plan(*args).costs.flops <= limits["flops"]
    assert_same(frugal(*args), jax.jit(f)(*args), "te.jit")
    with pytest.raises(te.TapestryError, match="numerics"):
        te.jit(f, settings=QUICK, numerics="exactly").plan(*args)
