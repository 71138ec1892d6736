"""Random train steps of pieces that module libraries have: a stack of layers of Flax NNX, Flax
linen or Equinox under a chain of optax. A stack prints as what makes it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import equinox as eqx
import flax.linen as linen
import jax
import jax.numpy as jnp
import optax
from flax import nnx
from hypothesis import strategies as st

#: Batch, length and channels of what goes through a stack.
BATCH, LENGTH, WIDTH = 8, 8, 16
HEADS = 4


@dataclass(frozen=True)
class Stack:
    """A train step: layers in order, what updates the weights, and how the step is written.

    `residual` says after which layers their input is added again.
    """

    library: str
    layers: tuple[str, ...]
    residual: tuple[bool, ...]
    optimizer: tuple[str, ...]
    loss: str = "squared"
    half: bool = False  # layers compute in bfloat16
    remat: bool = False  # each layer is computed again in the backward pass
    batches: int = 1  # gradients are summed over so many parts of the batch, in a loop
    members: int = 1  # so many models at once, by vmap


# What all libraries write alike: functions without weights


def _causal_mean(x: jax.Array) -> jax.Array:
    return jnp.cumsum(x, 1) / jnp.arange(1, x.shape[1] + 1, dtype=x.dtype)[:, None]


def _decaying(x: jax.Array) -> jax.Array:
    """A linear recurrence over time, by an associative scan."""
    rate = jax.nn.sigmoid(x)
    _, y = jax.lax.associative_scan(
        lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (rate, (1 - rate) * x), axis=1
    )
    return y


def _best(x: jax.Array) -> jax.Array:
    """Keeps the largest half of the channels."""
    least = jax.lax.top_k(x, x.shape[-1] // 2)[0][..., -1:]
    return jnp.where(x >= least, x, 0)


def _spectral(x: jax.Array) -> jax.Array:
    f = jnp.fft.rfft(x.astype(jnp.float32), axis=1)
    return jnp.fft.irfft(f * jnp.arange(f.shape[1])[:, None], n=x.shape[1], axis=1).astype(x.dtype)


PLAIN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "gelu": jax.nn.gelu,
    "gated": lambda x: jax.nn.silu(x) * x[..., ::-1],
    "softmax": lambda x: jax.nn.softmax(x, -1) * x.shape[-1],
    "shifted": lambda x: x - jnp.roll(x, 1, 1),
    "pooled": lambda x: x - x.mean(1, keepdims=True),
    "causal_mean": _causal_mean,
    "decaying": _decaying,
    "best": _best,
    "spectral": _spectral,
    "turned": lambda x: x.reshape(*x.shape[:2], HEADS, -1).swapaxes(2, 3).reshape(x.shape),
    "sorted": lambda x: jnp.sort(x, 1),
    "padded": lambda x: jnp.pad(x, ((0, 0), (1, 1), (0, 0)))[:, 2:],
}
#: Layers with weights, by library.
WEIGHTED = {
    "nnx": (
        *("dense", "norm", "rms", "groups", "batch", "conv", "attention"),
        *("dropout", "gru", "mix"),
    ),
    "linen": ("dense", "norm", "rms", "groups", "conv", "attention", "lstm", "mix", "spread"),
    "equinox": ("dense", "norm", "rms", "groups", "conv", "attention", "gru", "mix"),
}
UPDATES: dict[str, Callable[[], optax.GradientTransformation]] = {
    "clip": lambda: optax.clip_by_global_norm(1.0),
    "decay": lambda: optax.add_decayed_weights(1e-2, lambda p: jax.tree.map(_is_matrix, p)),
    "centralize": optax.centralize,
    "adam": lambda: optax.adam(1e-3),
    "adafactor": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=8),
    "lion": lambda: optax.lion(1e-3),
    "momentum": lambda: optax.sgd(optax.cosine_decay_schedule(0.1, 100), 0.9, nesterov=True),
    "rmsprop": lambda: optax.rmsprop(1e-3, centered=True),
    "lamb": lambda: optax.lamb(1e-3),
    "muon": lambda: optax.contrib.muon(1e-2),
    "several": lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    "finite": lambda: optax.apply_if_finite(optax.sgd(1e-2), 3),
    "ema": lambda: optax.ema(0.9),
}
_LAST = ("adam", "adafactor", "lion", "momentum", "rmsprop", "lamb", "muon", "several", "finite")


def _is_matrix(x: Any) -> bool:
    return bool(x.ndim > 1)


@st.composite
def stacks(draw: Any) -> Stack:
    """Stacks of up to five layers; shrinks to few layers and the plainest of everything."""
    library = draw(st.sampled_from(("nnx", "linen", "equinox")))
    names = ("dense", *[n for n in WEIGHTED[library] if n != "dense"], *PLAIN)
    layers = draw(st.lists(st.sampled_from(names), min_size=1, max_size=5))
    before = draw(st.lists(st.sampled_from(("clip", "decay", "centralize", "ema")), max_size=2))
    members = draw(st.sampled_from((1, 3))) if library == "equinox" else 1
    return Stack(
        library,
        ("dense", *layers),
        (False, *(draw(st.booleans()) for _ in layers)),
        (*before, draw(st.sampled_from(_LAST))),
        draw(st.sampled_from(("squared", "classes"))),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.sampled_from((1, 2))),
        members,
    )


def made(stack: Stack) -> tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]:
    """The step of a stack, and what makes its arguments: state, inputs, labels, key."""
    fresh, run = _LIBRARIES[stack.library](stack)
    tx = optax.chain(*(UPDATES[name]() for name in stack.optimizer))

    def arguments() -> tuple[Any, ...]:
        keys = jax.random.split(jax.random.key(0), stack.members)
        params = fresh(keys[0]) if stack.members == 1 else jax.vmap(fresh)(keys)
        x, y = jax.random.split(jax.random.key(1))
        inputs = jax.random.normal(x, (BATCH, LENGTH, WIDTH))
        labels = jax.random.randint(y, (BATCH, LENGTH), 0, WIDTH)
        return (params, tx.init(params)), inputs, labels, jax.random.key(2)

    def loss(params: Any, inputs: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
        x = inputs.astype(jnp.bfloat16 if stack.half else jnp.float32)
        y = run(params, x, key).astype(jnp.float32)
        if stack.loss == "classes":
            return optax.softmax_cross_entropy_with_integer_labels(y, labels).mean()
        return ((y - jax.nn.one_hot(labels, WIDTH)) ** 2).mean()

    def whole(params: Any, *batch: Any) -> jax.Array:
        if stack.members == 1:
            return loss(params, *batch)
        return jax.vmap(loss, (0, None, None, None))(params, *batch).sum()

    def gradients(params: Any, inputs: Any, labels: Any, key: jax.Array) -> tuple[Any, Any]:
        slope = jax.value_and_grad(whole)
        if stack.batches == 1:
            found: tuple[Any, Any] = slope(params, inputs, labels, key)
            return found
        n = stack.batches
        parts = jax.tree.map(lambda a: a.reshape(n, -1, *a.shape[1:]), (inputs, labels))

        def one(sums: Any, part: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, sums, slope(params, *part, key)), None

        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), params))
        sums, _ = jax.lax.scan(one, zero, parts)
        return jax.tree.map(lambda a: a / n, sums)

    def step(state: Any, inputs: Any, labels: Any, key: Any) -> Any:
        params, moments = state
        value, grads = gradients(params, inputs, labels, key)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step, arguments


_Run = Callable[[Any, jax.Array, jax.Array], jax.Array]


def _through(
    stack: Stack, layers: list[Any], apply: Callable[[Any, jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """An array through layers, each of them a plain function or one that `apply` takes."""
    for name, layer, again in zip(stack.layers, layers, stack.residual, strict=True):
        one = PLAIN[name] if name in PLAIN else partial(apply, layer)
        y = (jax.checkpoint(one) if stack.remat else one)(x).astype(x.dtype)
        x = x + y if again else y
    return x


class _Mixed(nnx.Module):
    """A dense layer over time."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(LENGTH, LENGTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = self.inner(x.swapaxes(1, 2)).swapaxes(1, 2)
        return y


def _nnx(stack: Stack) -> tuple[Callable[[jax.Array], Any], _Run]:
    kinds: dict[str, Callable[[nnx.Rngs], Any]] = {
        "dense": lambda r: nnx.Linear(WIDTH, WIDTH, rngs=r),
        "norm": lambda r: nnx.LayerNorm(WIDTH, rngs=r),
        "rms": lambda r: nnx.RMSNorm(WIDTH, rngs=r),
        "groups": lambda r: nnx.GroupNorm(WIDTH, num_groups=4, rngs=r),
        "batch": lambda r: nnx.BatchNorm(WIDTH, use_running_average=False, rngs=r),
        "conv": lambda r: nnx.Conv(WIDTH, WIDTH, (3,), feature_group_count=2, rngs=r),
        "attention": lambda r: nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=r),
        "dropout": lambda r: nnx.Dropout(0.1, rngs=r),
        "gru": lambda r: nnx.RNN(nnx.GRUCell(WIDTH, WIDTH, rngs=r), rngs=r),
        "mix": _Mixed,
    }
    definition: list[Any] = []

    def fresh(key: jax.Array) -> Any:
        rngs = nnx.Rngs(key)
        model = nnx.List([kinds[n](rngs) if n not in PLAIN else nnx.Dict() for n in stack.layers])
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        definition[:] = [graph, jax.eval_shape(lambda: rest)]
        return params

    def run(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        graph, shapes = definition
        # Counts, keys and moving statistics are as at the start.
        rest = jax.tree.map(
            lambda s: (
                key if jnp.issubdtype(s.dtype, jax.dtypes.prng_key) else jnp.zeros(s.shape, s.dtype)
            ),
            shapes,
        )
        model = nnx.merge(graph, params, rest)
        for name, layer, again in zip(stack.layers, model, stack.residual, strict=True):
            if name in PLAIN:
                y = PLAIN[name](x)
            elif stack.remat:
                y = nnx.remat(lambda m, x: m(x))(layer, x)
            else:
                y = layer(x)
            y = y.astype(x.dtype)
            x = x + y if again else y
        return x

    return fresh, run


def _linen(stack: Stack) -> tuple[Callable[[jax.Array], Any], _Run]:
    class Mixed(linen.Module):
        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            y: jax.Array = linen.Dense(LENGTH)(x.swapaxes(1, 2)).swapaxes(1, 2)
            return y

    class Spread(linen.Module):
        """Three layers with stacked weights, by a scan over them."""

        @linen.compact
        def __call__(self, x: jax.Array) -> jax.Array:
            class Body(linen.Module):
                @linen.compact
                def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
                    return jnp.tanh(linen.Dense(WIDTH)(x)).astype(x.dtype), None

            scanned = linen.scan(
                Body, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
            )
            y, _ = scanned()(x, None)
            made: jax.Array = y
            return made

    kinds: dict[str, Callable[[], Any]] = {
        "dense": lambda: linen.DenseGeneral((WIDTH,)),
        "norm": linen.LayerNorm,
        "rms": linen.RMSNorm,
        "groups": lambda: linen.GroupNorm(4),
        "conv": lambda: linen.Conv(WIDTH, (3,), padding="CAUSAL", kernel_dilation=2),
        "attention": lambda: linen.SelfAttention(HEADS),
        "lstm": lambda: linen.RNN(linen.OptimizedLSTMCell(WIDTH)),
        "mix": Mixed,
        "spread": Spread,
    }
    layers = [kinds[n]() if n in kinds else None for n in stack.layers]

    def fresh(key: jax.Array) -> Any:
        x = jnp.zeros((1, LENGTH, WIDTH))
        return [m.init(key, x) if m is not None else {} for m in layers]

    def run(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        bound = list(zip(layers, params, strict=True))
        return _through(stack, bound, lambda m, x: m[0].apply(m[1], x), x)

    return fresh, run


def _equinox(stack: Stack) -> tuple[Callable[[jax.Array], Any], _Run]:
    kinds: dict[str, Callable[[jax.Array], Any]] = {
        "dense": lambda k: eqx.nn.Linear(WIDTH, WIDTH, key=k),
        "norm": lambda k: eqx.nn.LayerNorm(WIDTH),
        "rms": lambda k: eqx.nn.RMSNorm(WIDTH),
        "groups": lambda k: eqx.nn.GroupNorm(4, WIDTH),
        "conv": lambda k: eqx.nn.Conv1d(WIDTH, WIDTH, 3, padding=1, key=k),
        "attention": lambda k: eqx.nn.MultiheadAttention(HEADS, WIDTH, key=k),
        "gru": lambda k: eqx.nn.GRUCell(WIDTH, WIDTH, key=k),
        "mix": lambda k: eqx.nn.Linear(LENGTH, LENGTH, key=k),
    }
    static: list[Any] = []

    def fresh(key: jax.Array) -> Any:
        model = [kinds[n](key) if n in kinds else None for n in stack.layers]
        params, rest = eqx.partition(model, eqx.is_inexact_array)
        static[:] = [rest]
        return params

    def apply(named: tuple[str, Any], x: jax.Array) -> jax.Array:
        name, layer = named

        def one(x: jax.Array) -> jax.Array:
            if name in ("dense", "norm", "rms"):
                y = jax.vmap(layer)(x)
            elif name == "attention":
                y = layer(x, x, x, jnp.tri(LENGTH, dtype=bool))
            elif name == "gru":
                _, y = jax.lax.scan(lambda h, x: (layer(x, h),) * 2, jnp.zeros(WIDTH), x)
            elif name == "mix":
                y = jax.vmap(layer, 1, 1)(x)
            else:
                y = layer(x.T).T
            made: jax.Array = y
            return made

        return jax.vmap(one)(x.astype(jnp.float32))

    def run(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
        model = eqx.combine(params, static[0])
        return _through(stack, list(zip(stack.layers, model, strict=True)), apply, x)

    return fresh, run


_LIBRARIES = {"nnx": _nnx, "linen": _linen, "equinox": _equinox}
