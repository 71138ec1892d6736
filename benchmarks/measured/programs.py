"""Train steps of large language models as ordinary JAX programs.

Parameters and products in bfloat16, gradients accumulated in float32 over micro-batches, float32
master weights under Adam; layers and micro-batches in scans; attention by cuDNN's kernel, or with
its scores as an array.

Batches lie over the mesh axis `d`. Tensor parallelism is Megatron's, and cannot be planned away:
what it cuts has a dim of its own, of one entry per device, that lies over the axis `t`. Its
operator f broadcasts the residual stream along that dim (and sums over it in the backward pass), g
sums partial products over it, so that these are the collectives. The residual stream lies over
batch and, with `sequence`, over tokens; without, it is replicated over `t`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

Tree = Any
BF16, F32 = jnp.bfloat16, jnp.float32


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder. `gated`: SwiGLU, RMS norms, rotary positions and no biases, as Llama's;
    else GELU, layer norms with learned positions, as GPT's."""

    layers: int
    width: int
    heads: int
    hidden: int
    vocabulary: int
    sequence: int
    tied: bool = False
    gated: bool = True
    groups: int = 0  # of keys and values; 0: as many as heads
    stored: bool = False  # attention stores its scores, as before there were fused kernels

    @property
    def kv(self) -> int:
        return self.groups or self.heads

    @property
    def head(self) -> int:
        return self.width // self.heads


@dataclass(frozen=True)
class Cut:
    """How a run divides: over `data` and `tensor` devices, the stream over tokens or not."""

    data: int
    tensor: int
    sequence: bool = True

    def at(self, x: jax.Array, *dims: str | None) -> jax.Array:
        """The value under the constraint that its dims lie over the named axes."""
        sizes, auto = (self.data, self.tensor), (AxisType.Auto, AxisType.Auto)
        mesh = AbstractMesh(sizes, ("d", "t"), axis_types=auto)
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*dims)))

    def stream(self, x: jax.Array) -> jax.Array:
        """The residual stream [batch, tokens, width]."""
        return self.at(x, "d", "t" if self.sequence else None, None)


def shapes(model: Model, tensor: int) -> Tree:
    """Shapes of the parameters; those of layers are stacked, and what `tensor` devices divide has
    a dim for them."""
    n, t, d, f = model.layers, tensor, model.width, model.hidden // tensor
    heads, groups = model.heads // tensor, model.kv // tensor
    layer: dict[str, tuple[int, ...]] = {
        "qkv": (n, t, d, heads + 2 * groups, model.head),
        "wo": (n, t, heads, model.head, d),
        "up": (n, t, d, 2, f) if model.gated else (n, t, d, f),
        "down": (n, t, f, d),
        "norm1": (n, d),
        "norm2": (n, d),
    }
    out: dict[str, Any] = {"embedding": (model.vocabulary, d), "layers": layer, "norm": (d,)}
    if not model.tied:
        out["head"] = (model.vocabulary, d)
    if not model.gated:
        out["positions"] = (model.sequence, d)
    return out


def layouts(zero: int) -> Tree:
    """Per parameter the axes of its dims: of the copy that computes, and of the optimizer's.

    Tensor parallelism cuts heads, hidden features and the vocabulary; ZeRO cuts the optimizer's
    copies (stage 1) or all (stage 3) over `d` too, along the width.
    """
    rows = {
        "qkv": (None, "t", "w", None, None),
        "wo": (None, "t", None, None, "w"),
        "up": (None, "t", "w"),
        "down": (None, "t", None, "w"),
        "norm1": (None, "w"),
        "norm2": (None, "w"),
        "embedding": ("t", "w"),
        "head": ("t", "w"),
        "norm": ("w",),
        "positions": (None, "w"),
    }

    def over(cut: bool) -> dict[str, tuple[str | None, ...]]:
        axis = "d" if cut else None
        return {k: tuple([axis if a == "w" else a for a in v]) for k, v in rows.items()}

    return {"computes": over(zero == 3), "optimizes": over(zero >= 1)}


def pins(model: Model, cut: Cut, zero: int) -> dict[str, tuple[str | None, ...]]:
    """The pins of `train_step`'s inputs by path: parameters, optimizer's state, tokens."""
    how = layouts(zero)
    found: dict[str, tuple[str | None, ...]] = {"[1]['step']": (), "[2]": (None, "d", None)}
    tree = jax.tree_util.tree_flatten_with_path(shapes(model, cut.tensor), is_leaf=_is_shape)[0]
    for path, _ in tree:
        name = path[-1].key
        where = jax.tree_util.keystr(path)
        found[f"[0]{where}"] = how["computes"][name]
        for part in ("master", "mean", "square"):
            found[f"[1]['{part}']{where}"] = how["optimizes"][name]
    return found


def arguments(
    model: Model, cut: Cut, batch: int, micro: int
) -> tuple[Tree, Tree, jax.ShapeDtypeStruct]:
    """Shapes of `train_step`'s arguments for `micro` micro-batches of `batch` sequences."""

    def tree(dtype: Any) -> Tree:
        return jax.tree.map(
            lambda s: jax.ShapeDtypeStruct(s, dtype), shapes(model, cut.tensor), is_leaf=_is_shape
        )

    state = {"master": tree(F32), "mean": tree(F32), "square": tree(F32)}
    state["step"] = jax.ShapeDtypeStruct((), F32)
    tokens = jax.ShapeDtypeStruct((micro, batch, model.sequence), jnp.int32)
    return tree(BF16), state, tokens


def _is_shape(x: Any) -> bool:
    return isinstance(x, tuple)


def _norm(model: Model, scale: jax.Array, x: jax.Array) -> jax.Array:
    """Root-mean-square or layer norm; as in fused kernels, only its operand is kept."""

    def norm(scale: jax.Array, x: jax.Array) -> jax.Array:
        wide = x.astype(F32)
        if not model.gated:
            wide = wide - jnp.mean(wide, -1, keepdims=True)
        wide = wide * lax.rsqrt(jnp.mean(jnp.square(wide), -1, keepdims=True) + 1e-5)
        return wide.astype(BF16) * scale

    return jax.checkpoint(norm)(scale, x)


def _rotary(x: jax.Array) -> jax.Array:
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half, dtype=F32) / half)
    angle = jnp.arange(x.shape[1], dtype=F32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle).astype(BF16), jnp.sin(angle).astype(BF16)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _spread(cut: Cut, x: jax.Array) -> jax.Array:
    """Megatron's f: the stream, once for each device that divides what follows."""
    copies = jnp.broadcast_to(x[None], (cut.tensor, *x.shape))
    return cut.at(copies, "t", "d", None, None)


def _columns(cut: Cut, dims: str, x: jax.Array, weights: jax.Array) -> jax.Array:
    """The product of the stream with weights of which each device has some columns. What is
    gathered for it is not kept: the backward pass gathers it again."""

    def product(x: jax.Array, weights: jax.Array) -> jax.Array:
        return jnp.einsum(dims, _spread(cut, cut.stream(x)), weights)

    again = cut.sequence and cut.tensor > 1
    return (jax.checkpoint(product) if again else product)(x, weights)


def _summed(cut: Cut, parts: jax.Array) -> jax.Array:
    """Megatron's g: the sum of what each device has."""
    return cut.stream(lax.reduce_sum(cut.at(parts, "t", "d", None, None), (0,)))


def _fused_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def _stored_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Scores and weights in bfloat16 as arrays, the softmax between them one kernel."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(F32) * q.shape[-1] ** -0.5
    rows, keys = scores.shape[-2:]
    seen = jnp.arange(rows)[:, None] >= jnp.arange(keys)[None, :]
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1).astype(BF16)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def _attention(model: Model, cut: Cut, remat: str, h: jax.Array, p: Tree) -> jax.Array:
    made = _columns(cut, "tbsd,tdhk->bsthk", h, p["qkv"])
    made = cut.at(made, "d", None, "t", None, None)
    batch, rows = h.shape[:2]
    heads, groups = model.heads // cut.tensor, model.kv // cut.tensor
    parts = made[..., :heads, :], made[..., heads : heads + groups, :], made[..., -groups:, :]
    q, k, v = (x.reshape(batch, rows, -1, model.head) for x in parts)
    if model.gated:
        q, k = _rotary(q), _rotary(k)
    mix = _stored_attention if model.stored else _fused_attention
    mixed = (jax.checkpoint(mix) if remat == "attention" else mix)(q, k, v)
    mixed = mixed.reshape(batch, rows, cut.tensor, -1, model.head)
    mixed = cut.at(mixed, "d", None, "t", None, None)
    return _summed(cut, jnp.einsum("bsthk,thkd->tbsd", mixed, p["wo"]))


def _feed_forward(model: Model, cut: Cut, h: jax.Array, p: Tree) -> jax.Array:
    if model.gated:
        both = _columns(cut, "tbsd,tdgf->tbsgf", h, p["up"])
        both = cut.at(both, "t", "d", None, None, None)
        up = jax.checkpoint(jax.nn.silu)(both[..., 0, :]) * both[..., 1, :]
    else:
        up = _columns(cut, "tbsd,tdf->tbsf", h, p["up"])
        up = jax.checkpoint(jax.nn.gelu)(cut.at(up, "t", "d", None, None))
    return _summed(cut, jnp.einsum("tbsf,tfd->tbsd", up, p["down"]))


def _layer(model: Model, cut: Cut, remat: str, x: jax.Array, p: Tree) -> jax.Array:
    x = cut.stream(x + _attention(model, cut, remat, _norm(model, p["norm1"], x), p))
    return cut.stream(x + _feed_forward(model, cut, _norm(model, p["norm2"], x), p))


def loss(model: Model, cut: Cut, remat: str, params: Tree, tokens: jax.Array) -> jax.Array:
    """Mean cross-entropy of predicting each token from those before it, in nats."""
    x = params["embedding"][tokens]
    if not model.gated:
        x = x + params["positions"]
    x = cut.stream(x)

    def body(x: jax.Array, p: Tree) -> tuple[jax.Array, None]:
        return _layer(model, cut, remat, x, p), None

    x, _ = lax.scan(jax.checkpoint(body) if remat == "full" else body, x, params["layers"])
    copies = _spread(cut, _norm(model, params["norm"], x))
    head = params["embedding"] if model.tied else params["head"]
    head = head.reshape(cut.tensor, -1, model.width)
    logits = cut.at(jnp.einsum("tbsd,tvd->bstv", copies, head), "d", None, "t", None)
    logits = logits.reshape(*tokens.shape, -1).astype(F32)
    wanted = jnp.roll(tokens, -1, axis=1)
    # A comparison, not a gather: its gradient is subtracted from the softmax in place.
    here = jnp.arange(model.vocabulary) == wanted[..., None]
    picked = jnp.sum(jnp.where(here, logits, 0.0), axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def train_step(
    model: Model, cut: Cut, remat: str = "none"
) -> Callable[..., tuple[Tree, Tree, Any]]:
    """(parameters, optimizer's state, tokens[micro, batch, rows]) to the next two and a loss.

    `remat`: `full` recomputes every layer in the backward pass, `attention` what is between q, k, v
    and its output.
    """

    def step(params: Tree, state: Tree, tokens: jax.Array) -> tuple[Tree, Tree, jax.Array]:
        grad = jax.value_and_grad(lambda p, x: loss(model, cut, remat, p, x))

        def micro(total: tuple[Tree, jax.Array], x: jax.Array) -> tuple[Any, None]:
            value, grads = grad(params, x)
            more = jax.tree.map(lambda a, g: a + g.astype(F32), total[0], grads)
            return (more, total[1] + value), None

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, F32), params)
        (grads, value), _ = lax.scan(micro, (zeros, jnp.zeros((), F32)), tokens)
        count = state["step"] + 1.0

        def adam(w: Any, m: Any, s: Any, g: Any) -> tuple[Any, Any, Any]:
            g = g / tokens.shape[0]
            m, s = 0.9 * m + 0.1 * g, 0.95 * s + 0.05 * jnp.square(g)
            move = (m / (1 - 0.9**count)) / (jnp.sqrt(s / (1 - 0.95**count)) + 1e-8)
            return w - 3e-4 * (move + 0.1 * w), m, s

        made = jax.tree.map(adam, state["master"], state["mean"], state["square"], grads)
        is_leaf = lambda x: isinstance(x, tuple)  # noqa: E731
        master, mean, square = (
            jax.tree.map(lambda x, k=k: x[k], made, is_leaf=is_leaf) for k in range(3)
        )
        state = {"master": master, "mean": mean, "square": square, "step": count}
        return jax.tree.map(lambda w: w.astype(BF16), master), state, value / tokens.shape[0]

    return step
