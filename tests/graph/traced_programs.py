"""Programs with everything that JAX programs have, as the tests of tracing trace them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

Array = jax.Array


def normal(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def mlp_params() -> dict[str, Any]:
    return {"w": [normal(8, 16), normal(16, 4, seed=1)], "b": [jnp.zeros(16), jnp.zeros(4)]}


def mlp_loss(params: dict[str, Any], x: Array, y: Array) -> Array:
    h = jax.nn.gelu(x @ params["w"][0] + params["b"][0])
    return jnp.mean((h @ params["w"][1] + params["b"][1] - y) ** 2)


def mlp_step(params: Any, x: Array, y: Array) -> Any:
    loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)


def gpt_params() -> dict[str, Any]:
    layer = {"qkv": normal(8, 24) * 0.3, "out": normal(8, 8) * 0.3, "up": normal(8, 16) * 0.3}
    return {
        "embed": normal(11, 8, seed=1),
        "layers": [{**layer, "down": normal(16, 8, seed=2) * 0.3}],
    }


def gpt_loss(params: Any, tokens: Array, key: Array) -> Array:
    x = params["embed"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for i, layer in enumerate(params["layers"]):
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.split(h @ layer["qkv"], 3, -1)
        scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k) / 2.0, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ v @ layer["out"]
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = x + jnp.where(keep, jax.nn.gelu(x @ layer["up"]) @ layer["down"], 0.0)
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gpt_step(params: Any, state: Any, tokens: Array, key: Array) -> Any:
    loss, grads = jax.value_and_grad(gpt_loss)(params, tokens, key)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def scan_grad(w: Array, x: Array) -> Any:
    def loss(w: Array) -> Array:
        def body(h: Array, a: Array) -> tuple[Array, Array]:
            h = jnp.tanh(h @ w + a)
            return h, h.sum()

        last, sums = lax.scan(body, jnp.zeros(4), x, reverse=True, unroll=2)
        return last.sum() + (sums**2).sum()

    return jax.value_and_grad(loss)(w)


def while_and_cond(x: Array) -> Any:
    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, y = state
        return i + 1, lax.cond(y.sum() > 0, jnp.sin, lambda v: v * 2.0 - i, y)

    steps, y = lax.while_loop(lambda s: (s[0] < 5) & (jnp.abs(s[1]).sum() < 50), body, (0, x))
    return (
        steps,
        lax.switch(steps % 3, [jnp.cos, jnp.exp, lambda v: v], y),
        lax.fori_loop(0, 3, lambda i, v: v + i, 0.5),
    )


@jax.custom_vjp
def clipped(x: Array) -> Array:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))


@jax.custom_jvp
def soft(x: Array) -> Array:
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda p, t: (soft(*p), t[0] * jax.nn.sigmoid(p[0])))


def custom_derivatives(x: Array) -> Any:
    return clipped(x), soft(x), jax.grad(lambda v: (clipped(v) * soft(v)).sum())(x), jax.nn.relu(x)


def remat(w: Array, x: Array) -> Any:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("h"))
    def block(w: Array, x: Array) -> Array:
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "h") @ w)

    def loss(w: Array) -> Array:
        inner = jax.checkpoint(lambda v: jnp.cos(jax.checkpoint(jnp.sin)(v) @ w))
        return (block(w, block(w, inner(x))) ** 2).sum()

    return jax.value_and_grad(loss)(w)


def remat_scan(ws: Array, x: Array) -> Any:
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None), prevent_cse=False)
    return jax.grad(lambda ws: lax.scan(layer, x, ws)[0].sum())(ws)


def dropout(key: Array, x: Array) -> Any:
    first, second = jax.random.split(key)
    keep = jax.random.bernoulli(first, 0.5, x.shape)
    return (
        jnp.where(keep, x / 0.5, 0),
        second,
        jax.random.key_data(second),
        jax.random.permutation(second, 5),
    )


def zoo(x: Array, i: Array) -> Any:
    spd = x @ x.T + 4 * jnp.eye(x.shape[0])
    return {
        "sort": lax.sort((x, -x), dimension=0, num_keys=2),
        "gather": (x[i], x.at[i].get(mode="fill", fill_value=jnp.nan), jnp.take(x, i, mode="clip")),
        "scatter": (x.at[i].add(1.0, mode="drop"), x.at[i].max(0.5), x.at[i].apply(jnp.sin)),
        "fft": jnp.fft.irfft(jnp.fft.rfft(x)),
        "cumsum": (jnp.cumsum(x, 1), lax.cumlogsumexp(x, 0, reverse=True)),
        "cholesky": jnp.linalg.cholesky(spd),
        "solve": jnp.linalg.solve(spd, x),
        "svd": jnp.linalg.svd(x, compute_uv=False),
        "reduce": lax.reduce(x, 0.0, lambda a, b: a + b * b, (0,)),
        "window": lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
        "any_window": lax.reduce_window(x, 1.0, lambda a, b: a * b + 1.0, (2, 2), (1, 1), "VALID"),
        "pool_grad": jax.grad(
            lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME").sum()
        )(x),
        "top_k": lax.top_k(x, 2),
        "argmax": jnp.argmax(x, 1),
        "pad": jnp.pad(x, ((1, 0), (0, 2)), constant_values=3.0),
        "dynamic": lax.dynamic_update_slice(x, x[:1], (i[0], 0)),
        "pow": (x**3, jnp.abs(x) ** 0.5, lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)),
        "bf16": (x.astype(jnp.bfloat16) * jnp.bfloat16(1.5)).sum(),
        "precision": lax.dot_general(x, x, (((1,), (1,)), ((), ())), precision="highest"),
        "algorithm": lax.dot(x, x.T, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        "ragged": lax.ragged_dot(x, jnp.ones((2, 8, 3)), jnp.array([1, 3])),
        "split": jnp.split(x, 2, 1),
        "complex": lax.complex(x, x) * (1 + 2j),
        "bits": lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4,)),
        "where": jnp.where(x > 0, x, jnp.nan),
        "index": jnp.digitize(x[0], jnp.array([-1.0, 0.0, 1.0])),
        "linear": jax.jit(jnp.linalg.inv)(spd),
        "clamp": jnp.clip(x, -0.5, 0.5),
        "round": (jnp.round(x), lax.reduce_precision(x, 5, 10)),
        "barrier": lax.optimization_barrier((x, i))[0],
        "platform": lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        "map": lax.map(lambda r: r.sum(), x),
        "assoc": lax.associative_scan(jnp.add, x),
        "hist": jnp.histogram(x, bins=4)[0],
    }


def convolutions(x: Array, k: Array) -> Any:
    def loss(k: Array) -> Array:
        y = lax.conv_general_dilated(
            x, k, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum()

    return jax.value_and_grad(loss)(k)


TABLE = np.arange(12, dtype=np.int32).reshape(3, 4)
KEY = jax.random.key(7, impl="rbg")


def closures(x: Array) -> Any:
    weak = jnp.broadcast_to(2.0, (3,))  # a weakly typed array
    noise = lax.map(lambda i: jax.random.normal(jax.random.fold_in(KEY, i), (3,)), jnp.arange(2))
    return x @ TABLE.astype(np.float32), weak * jnp.ones(3, jnp.bfloat16), weak, noise, TABLE, 3


def weak_types(x: Any, n: Any) -> Any:
    return x + 1, x * jnp.ones(2, jnp.bfloat16), n * 2, jnp.where(x > n, x, n), x, 2.5


def printing(x: Array) -> Any:
    jax.debug.print("x = {x} {}", "s", x=x)

    def body(c: Array, v: Array) -> tuple[Array, None]:
        jax.debug.print("c {}", c, ordered=True)
        return c + v, None

    return lax.scan(body, jnp.float32(0), x)[0]


class Pair(NamedTuple):
    left: Any
    right: Any


def structures(p: Pair, *, scale: Array, extra: Any) -> Any:
    out: dict[Any, Any] = {2: p.left * scale, 1: None}
    return Pair([p.right], (out, extra)), ()


def through(x: Array, y: Array) -> Any:
    unused = jnp.sin(y)  # dead
    _ = lax.scan(lambda c, a: (c + a, jnp.exp(a)), 0.0, unused)
    return y, x, x, jax.jit(lambda a: (a, 1.0))(x)


@dataclass
class Case:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]


def case(fn: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Case:
    return Case(fn, args, kwargs, options or {})


def gpt_case() -> Case:
    params = gpt_params()
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 7)))
    args = params, OPTIMIZER.init(params), tokens, jax.random.key(1)
    return case(gpt_step, *args, options={"donate_argnums": (0, 1)})


def nnx_case() -> Case:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.one, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            return self.drop(nnx.relu(self.norm(self.one(x))))

    definition, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def step(params: Any, rest: Any, x: Array) -> Any:
        def loss(p: Any) -> Any:
            net = nnx.merge(definition, p, rest, copy=True)
            return (net(x) ** 2).mean(), nnx.state(net)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return case(step, params, rest, normal(5, 4))


def equinox_case() -> Case:
    eqx = pytest.importorskip("equinox")
    arrays, static = eqx.partition(eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0)), eqx.is_array)

    def step(arrays: Any, x: Array) -> Any:
        return jax.grad(lambda a: jax.vmap(eqx.combine(a, static))(x).sum())(arrays)

    return case(step, arrays, normal(5, 4))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: case(mlp_step, mlp_params(), normal(5, 8), normal(5, 4)),
    "gpt": gpt_case,
    "scan-grad": lambda: case(scan_grad, normal(4, 4), normal(6, 4)),
    "while-cond": lambda: case(while_and_cond, normal(3)),
    "custom": lambda: case(custom_derivatives, normal(3)),
    "remat": lambda: case(remat, normal(4, 4), normal(3, 4)),
    "remat-scan": lambda: case(remat_scan, normal(3, 4, 4), normal(2, 4)),
    "dropout": lambda: case(dropout, jax.random.key(5), normal(3, 4)),
    "zoo": lambda: case(zoo, normal(4, 8), jnp.array([2, 0])),
    "conv": lambda: case(convolutions, normal(2, 5, 6, 3), normal(3, 2, 3, 4)),
    "closures": lambda: case(closures, normal(2, 3)),
    "weak": lambda: case(weak_types, 3.5, 2),
    "weak-array": lambda: case(weak_types, jnp.broadcast_to(2.0, (2,)), np.int16(3)),
    "printing": lambda: case(printing, normal(3)),
    "structures": lambda: case(
        structures, Pair(normal(3), normal(2)), scale=np.float32(2), extra=[normal(1), None]
    ),
    "through": lambda: case(through, normal(2), normal(3)),
    "vmap": lambda: case(jax.vmap(lambda v: lax.psum(v, "i"), axis_name="i"), normal(3, 2)),
    "nnx": nnx_case,
    "equinox": equinox_case,
}
#: Importing these libraries takes longer than the rest of the module.
SLOW = ("nnx", "equinox", "zoo", "gpt")
