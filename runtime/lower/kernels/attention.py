"""Fused attention: cuDNN's kernels on its GPUs, and what they compute in blocks elsewhere.

`flash_attention` gives the output and, per row, the logarithm of the sum of exponentials;
`flash_attention_backward` reads both. A program that asks JAX for cuDNN's attention is traced to
these (`tracing/fused_attention.py`), and one that spells attention out is rewritten to them
(`rewrite/attention`); so both are planned on any machine and run on those without cuDNN, too.

Elsewhere it runs in blocks, one after another, of which only one has its scores in memory: of some
sequences, where all rows of one have room, else of some heads, else of some rows, which read all
keys again. Under a causal mask a block reads no more than the keys that rows of its part see.

If rows are sharded, a device has a block of them, with `offset` rows before it. All devices run one
program of fixed shapes, so it has a branch for every block (`in_rows`), each with the keys that the
rows of its block see.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tapestry_egg.metakernels.signatures.signature import BLOCKS, MOST, ROOM

from .late_fills import each_filled

#: What cuDNN's attention takes.
_CUDNN_DTYPES = ("bfloat16", "float16")
_CUDNN_WIDTH = 128
#: Arrays by what they are.
_Arrays = dict[str, jax.Array]
#: Parts of the rows that read different keys under a causal mask.
_PARTS = 8


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
    window: int,
    fill: float,
    offset: int = 0,
) -> list[jax.Array]:
    """[output, logarithm of the sum] of q[b, t, n, h], k[b, s, g, h] and v[b, s, g, h]. Under a
    causal mask row 0 of q sees the keys up to number `offset`."""
    batch, rows, heads, width = q.shape
    groups = k.shape[2]
    split = q.reshape(batch, rows, groups, heads // groups, width)
    scores = partial(_scores, scale=scale, causal=causal, window=window, fill=fill)

    def block(start: Any, first: int, parts: Any, sums: Any) -> Any:
        v = parts["v"]
        s = scores(parts["q"], parts["k"], parts.get("mask"), start=offset + start, first=first)
        weights, stats = _softmax(s)
        out = jnp.einsum(
            "bgrts,bsgh->btgrh", weights.astype(v.dtype), v, preferred_element_type=s.dtype
        )
        return (out.astype(v.dtype), stats.transpose(0, 3, 1, 2)), sums

    by_row, by_key = {"q": split}, {"k": k, "v": v}
    _place(mask, rows, by_row, by_key, split.shape)
    made, room = [], _room(split.shape, k.shape[1])
    for low, high, first, last in _parts(split.shape, k.shape[1], causal, window, offset):
        given = _seen(by_row, by_key, (low, high), (first, last))
        made.append(_in_blocks(partial(block, first=first), *given, low, room)[0])
    out, stats = (jnp.concatenate(x, axis=1) for x in zip(*made, strict=True))
    return [out.reshape(q.shape), stats.transpose(0, 2, 3, 1).reshape(batch, heads, rows)]


def flash_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    stats: jax.Array,
    out: jax.Array,
    grad: jax.Array,
    mask: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
    window: int,
    fill: float,
    offset: int = 0,
) -> list[jax.Array]:
    """Gradients by q, k and v, from the results of `flash_attention` and the output's gradient.

    Weights are of the scores and of `stats`, which say how much a row's keys weigh together. In
    rows whose keys are all at a fill of -1e30 they have lost their number, so weights are divided
    by their sum once more: blocks have all keys of their rows. So is what they are weighed with
    centred once more: rows of a single weight have no gradient, and what rounding leaves of one in
    `out` would be all there is. The barrier keeps a compiler from holding the forward pass's
    weights instead, since then those of all layers would be in memory at once.
    """
    q, k, v, out, grad = lax.optimization_barrier((q, k, v, out, grad))
    batch, rows, heads, width = q.shape
    keys, groups = k.shape[1:3]
    shape = (batch, rows, groups, heads // groups, width)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    scores = partial(_scores, scale=scale, causal=causal, window=window, fill=fill)
    delta = (grad.astype(wide) * out.astype(wide)).sum(-1).reshape(shape[:-1])

    def block(start: Any, first: int, parts: Any, sums: Any) -> Any:
        k, v = parts["k"], parts["v"]
        seen, query, given = parts.get("mask"), parts["q"], parts["grad"]
        s = scores(query, k, seen, start=offset + start, first=first)
        weights = _weights(s, parts["stats"].transpose(0, 2, 3, 1)[..., None].astype(wide))
        by_weight = product("btgrh,bsgh->bgrts", given, v)
        less = by_weight - parts["delta"].transpose(0, 2, 3, 1)[..., None]
        less -= (weights * less).sum(axis=-1, keepdims=True)
        by_score = weights * less * scale
        if seen is not None and seen.dtype == jnp.bool_:
            by_score = jnp.where(_as_scores(seen), by_score, 0.0)
        by_score = by_score.astype(query.dtype)
        dq = product("bgrts,bsgh->btgrh", by_score, k)
        dk = product("bgrts,btgrh->bsgh", by_score, query)
        dv = product("bgrts,btgrh->bsgh", weights.astype(v.dtype), given)
        return dq.astype(query.dtype), (sums[0] + dk, sums[1] + dv)

    sums_of_rows = stats.transpose(0, 2, 1).reshape(shape[:-1])
    by_row = {
        "q": q.reshape(shape), "grad": grad.reshape(shape), "delta": delta, "stats": sums_of_rows
    }  # fmt: skip
    by_key = {"k": k, "v": v}
    _place(mask, rows, by_row, by_key, shape)
    dk, dv = each_filled([(x.shape, 0.0, wide) for x in (k, v)], after=grad)
    made, room = [], _room(shape, keys)
    for begin, end, first, last in _parts(shape, keys, causal, window, offset):
        given = _seen(by_row, by_key, (begin, end), (first, last))
        sums = (dk[:, first:last], dv[:, first:last])
        dq, sums = _in_blocks(partial(block, first=first), *given, begin, room, sums)
        made.append(dq)
        dk, dv = dk.at[:, first:last].set(sums[0]), dv.at[:, first:last].set(sums[1])
    dq = jnp.concatenate(made, axis=1).reshape(q.shape)
    return [dq, dk.astype(k.dtype), dv.astype(v.dtype)]


def _scores(
    split: jax.Array,
    k: jax.Array,
    mask: jax.Array | None,
    *,
    scale: float,
    causal: bool,
    window: int,
    fill: float,
    start: Any,
    first: int,
) -> jax.Array:
    """[batch, group, head of the group, row, key] in float32 at least, of rows from `start` on and
    keys from `first` on."""
    wide = jnp.promote_types(split.dtype, jnp.float32)
    scores = scale * jnp.einsum("btgrh,bsgh->bgrts", split, k, preferred_element_type=wide)
    if mask is not None:
        placed = _as_scores(mask)
        flags = mask.dtype == jnp.bool_
        scores = jnp.where(placed, scores, fill) if flags else scores + placed.astype(wide)
    if causal:
        behind = start + jnp.arange(split.shape[1])[:, None]
        behind = behind - first - jnp.arange(k.shape[1])[None, :]
        seen = behind >= 0
        seen = seen & (behind < window) if window else seen
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _softmax(scores: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Weights over the last dim, none where no key is seen, and the logarithm of their sum."""
    top = scores.max(axis=-1)
    top = jnp.where(jnp.isneginf(top), 0.0, top)
    parts = jnp.exp(scores - top[..., None])
    total = parts.sum(axis=-1)
    return parts / jnp.where(total > 0, total, 1.0)[..., None], top + jnp.log(total)


def _weights(scores: jax.Array, stats: jax.Array) -> jax.Array:
    """The weights of `_softmax` from the logarithm of their sum, to its last place."""
    parts = jnp.exp(scores - jnp.where(jnp.isneginf(stats), 0.0, stats))
    total = parts.sum(axis=-1, keepdims=True)
    return parts / jnp.where(total > 0, total, 1.0)


def _as_scores(mask: jax.Array) -> jax.Array:
    """[batch, row, group, head of the group, key] in the order of scores."""
    return mask.transpose(0, 2, 3, 1, 4)


def _place(
    mask: jax.Array | None, rows: int, by_row: _Arrays, by_key: _Arrays, shape: Sequence[int]
) -> None:
    """The mask [batch, row, group, head of the group, key] among what has rows; among what has
    none, where it has one for all of them."""
    if mask is None:
        return
    batch, heads, _, keys = mask.shape
    split = (shape[2], shape[3]) if heads > 1 else (1, 1)
    made = mask.reshape(batch, *split, -1, keys).transpose(0, 3, 1, 2, 4)
    (by_row if mask.shape[2] == rows and rows > 1 else by_key)["mask"] = made


def _seen(
    by_row: _Arrays, by_key: _Arrays, rows: tuple[int, int], keys: tuple[int, int]
) -> tuple[_Arrays, _Arrays]:
    """What some rows and keys have of all."""

    def of_keys(name: str, x: jax.Array) -> jax.Array:
        dim = 4 if name == "mask" else 1
        return x if x.shape[dim] == 1 else lax.slice_in_dim(x, *keys, axis=dim)

    queries = {n: x[:, slice(*rows)] for n, x in by_row.items()}
    if "mask" in queries:
        queries["mask"] = of_keys("mask", queries["mask"])
    return queries, {n: of_keys(n, x) for n, x in by_key.items()}


def _parts(
    shape: Sequence[int], keys: int, causal: bool, window: int, offset: int
) -> Sequence[tuple[int, int, int, int]]:
    """Parts of the rows [low, high) with the keys [first, last) that they see: under a causal mask
    as many as there are blocks, up to a few."""
    rows = shape[1]
    blocks = 4 * prod(shape[:4]) * keys // ROOM
    size = max(1, -(-rows // min(_PARTS, max(1, blocks)))) if causal else rows
    out = []
    for low in range(0, rows, size):
        high = min(rows, low + size)
        seen = _seen_by(offset + low, offset + high, keys, window) if causal else (0, keys)
        out.append((low, high, *seen))
    return out


def _seen_by(low: int, high: int, keys: int, window: int) -> tuple[int, int]:
    """The keys [first, last) that rows [low, high) see under a causal mask, one at least."""
    last = max(1, min(keys, high))
    return (max(0, min(last - 1, low - window + 1)) if window else 0), last


def _room(shape: Sequence[int], keys: int) -> int:
    """Bytes of a block's scores, of all that there are."""
    return min(max(ROOM, 4 * prod(shape[:4]) * keys // BLOCKS), MOST)


def _block(shape: Sequence[int], keys: int, room: int) -> tuple[int, int, int]:
    """(batch, rows, groups) of a block, divisors of all of them, whose scores have room: all rows
    of a head, if they can be, since what has only some reads the keys of all again."""
    batch, rows, groups, shared = shape[:4]

    def most(extent: int, of_one: int) -> int:
        count = max(1, room // max(1, of_one))
        return max(n for n in range(1, extent + 1) if extent % n == 0 and n <= count)

    head = 4 * shared * rows * keys
    if groups * head <= room:
        return most(batch, groups * head), rows, groups
    if head <= room:
        return 1, rows, most(groups, head)
    return 1, most(rows, 4 * shared * keys), 1


def _cut(x: jax.Array, at: Sequence[Any], size: Sequence[int]) -> jax.Array:
    """The part of an array that belongs to a block by its first dims, batch, row (or key), group;
    dims that are the same for all are 1."""
    for dim, (start, extent) in enumerate(zip(at, size, strict=True)):
        if extent < x.shape[dim]:
            x = lax.dynamic_slice_in_dim(x, start, extent, dim)
    return x


def _in_blocks(
    run: Callable[..., Any], by_row: _Arrays, by_key: _Arrays, low: int, room: int, sums: Any = ()
) -> Any:
    """What `run` gives for blocks of sequences, heads or rows, each put in its place, and what it
    sums over the rows."""
    shape, keys = by_row["q"].shape, by_key["k"].shape[1]
    size = _block(shape, keys, room)
    counts = [whole // own for whole, own in zip(shape, size, strict=False)]

    def some(j: Any, sums: Any) -> tuple[Any, Sequence[Any], Sequence[Any]]:
        """Results of a block, what it sums, and where they go."""
        outer, row = j // counts[1], j % counts[1]
        at = (outer // counts[2] * size[0], row * size[1], outer % counts[2] * size[2])
        whole = (at[0], 0, at[2])
        parts = {n: _cut(x, at, size) for n, x in by_row.items()}
        for n, x in by_key.items():
            parts[n] = _cut(x, whole, (size[0], x.shape[1], size[2]))
        own = tuple(_cut(x, whole, (size[0], x.shape[1], size[2])) for x in sums)
        made, own = run(low + at[1], parts=parts, sums=own)
        return made, tuple(_put(x, y, whole) for x, y in zip(sums, own, strict=True)), at

    if prod(counts) == 1:
        return some(0, sums)[:2]

    first = jax.eval_shape(lambda: some(0, sums)[0])
    kinds, made_of = jax.tree.flatten(first)
    fills = [((*shape[:3], *x.shape[3:]), 0.0, x.dtype) for x in kinds]
    places = jax.tree.unflatten(made_of, each_filled(fills, after=by_row["q"]))

    def step(j: Any, carry: Any) -> Any:
        places, sums = carry
        made, sums, at = some(j, sums)
        return jax.tree.map(lambda x, y: _put(x, y, at), places, made), sums

    return lax.fori_loop(0, prod(counts), step, (places, tuple(sums)))


def _put(whole: jax.Array, part: jax.Array, at: Sequence[Any]) -> jax.Array:
    """An array with a block of it replaced."""
    if part.shape == whole.shape:
        return part
    return lax.dynamic_update_slice(whole, part, (*at, *[0] * (whole.ndim - len(at))))


def in_rows(
    bind: Callable[..., list[jax.Array]],
    operands: Sequence[jax.Array],
    number: Any,
    count: int,
    window: int,
) -> list[jax.Array]:
    """What either kernel gives under a causal mask of block `number` of `count` blocks of rows.

    `operands` are those of the kernel, with the rows of the block and all keys; `number` is traced.
    """
    rows, keys = operands[0].shape[1], operands[1].shape[1]

    def block(j: int) -> Callable[..., list[jax.Array]]:
        first, last = _seen_by(j * rows, (j + 1) * rows, keys, window)

        def run(*operands: jax.Array) -> list[jax.Array]:
            q, k, v, *rest = operands
            k, v = (lax.slice_in_dim(x, first, last, axis=1) for x in (k, v))
            if rest and rest[-1].ndim == 4 and len(rest) in (1, 4) and rest[-1].shape[3] > 1:
                rest[-1] = lax.slice_in_dim(rest[-1], first, last, axis=3)
            made = bind(q, k, v, *rest, offset=j * rows - first)
            around = [(0, 0), (first, keys - last), (0, 0), (0, 0)]
            return [
                x if n == 0 or len(made) == 2 else jnp.pad(x, around) for n, x in enumerate(made)
            ]

        return run

    return list(lax.switch(number, [block(j) for j in range(count)], *operands))


def runs_on_cudnn(dtype: Any, width: int) -> bool:
    """Whether cuDNN has attention of a dtype over heads of a width."""
    return dtype.name in _CUDNN_DTYPES and width % 8 == 0 and width <= _CUDNN_WIDTH


def by_cudnn(name: str, elsewhere: Callable[..., list[jax.Array]]) -> Callable[..., Any]:
    """The call of cuDNN's kernel; `elsewhere` for what it has not, or another JAX."""
    plain = 3 if name == "fwd" else 6

    def run(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        kernel = getattr(cudnn, f"_dot_product_attention_{name}_p", None)
        width = operands[0].shape[-1]
        if kernel is None or len(operands) != plain or not runs_on_cudnn(operands[0].dtype, width):
            return elsewhere(*operands, **params)
        if offset := params.pop("offset", 0):

            def at_first(*operands: jax.Array, **other: Any) -> list[jax.Array]:
                return run(*operands, **params | other)

            return after_rows(at_first, operands, offset, params["window"])
        none = jnp.zeros(0, operands[0].dtype)
        mask = cudnn.MaskType.CAUSAL if params["causal"] else cudnn.MaskType.NO_MASK
        more: dict[str, Any] = {"is_training": True} if name == "fwd" else {}
        # From JAX 0.12 on a function of the caller's may change scores; here none does.
        called = inspect.signature(getattr(cudnn, f"_dot_product_attention_{name}_cuda_lowering"))
        more |= {n: None for n in called.parameters if n in ("score_mod_name", "score_mod_jaxpr")}
        made = kernel.bind(
            *operands[:3],
            *[none] * 7,
            *operands[3:],
            scale=params["scale"],
            seed=42,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=mask,
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=params["window"] or None,
            **more,
        )
        return list(made)

    return run


def after_rows(
    run: Callable[..., list[jax.Array]], operands: Sequence[jax.Array], offset: int, window: int
) -> list[jax.Array]:
    """Causal attention of a block of rows with `offset` rows before it, by `run`, a kernel that
    counts rows from the first key, as cuDNN's does.

    All rows of the block see all of the first `offset` keys, and the others as in a square of their
    own; both together are one softmax. If a window hides some of the first keys, rows of zeros take
    the place of those before the block.
    """
    q, k, v, *rest = operands
    rows, keys = q.shape[1], k.shape[1]
    forward = not rest
    if window and offset + rows > window:

        def behind(x: jax.Array) -> jax.Array:
            dim = 1 if x.ndim == 4 else 2
            return jnp.pad(x, [(offset if d == dim else 0, 0) for d in range(x.ndim)])

        made = run(behind(q), k, v, *map(behind, rest))
        if forward:
            return [made[0][:, offset:], made[1][:, :, offset:]]
        return [made[0][:, offset:], *made[1:]]
    ends = [(0, min(offset, keys), False), (offset, keys, True)]
    parts = [
        run(q, k[:, a:b], v[:, a:b], *rest, causal=causal, window=0)
        for a, b, causal in ends
        if a < b
    ]
    if len(parts) == 1:
        return parts[0]
    (one, *of_one), (two, *of_two) = parts
    wide = jnp.float32
    if not forward:
        sums = one.astype(wide) + two.astype(wide)
        joined = [jnp.concatenate(x, axis=1) for x in zip(of_one, of_two, strict=True)]
        return [sums.astype(q.dtype), *joined]
    stats = jnp.logaddexp(of_one[0], of_two[0])
    shares = [jnp.exp(s - stats).transpose(0, 2, 1)[..., None] for s in (of_one[0], of_two[0])]
    out = one.astype(wide) * shares[0] + two.astype(wide) * shares[1]
    return [out.astype(q.dtype), stats]


#: Shapes and dtypes of what a kernel gives of such operands, without a trace of it.
_Types = Callable[..., list[tuple[tuple[int, ...], Any]]]


def _of_output(q: Any, k: Any, v: Any, *_: Any) -> list[tuple[tuple[int, ...], Any]]:
    batch, rows, heads = q.shape[:3]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    return [(q.shape, v.dtype), ((batch, heads, rows), wide)]


def _of_gradients(*operands: Any) -> list[tuple[tuple[int, ...], Any]]:
    return [(x.shape, x.dtype) for x in operands[:3]]


def _widened(run: Callable[..., list[jax.Array]], types: _Types) -> Callable[..., list[jax.Array]]:
    """The same in float32 at least, for CPUs.

    XLA has no product there of bfloat16 with a float32 result for every order of dims ("unsupported
    element type for DotThunk").
    """

    def wide(*operands: jax.Array, **params: Any) -> list[jax.Array]:
        made = run(
            *[
                x if x.dtype == jnp.bool_ else x.astype(jnp.promote_types(x.dtype, jnp.float32))
                for x in operands
            ],
            **params,
        )
        return [x.astype(t) for x, (_, t) in zip(made, types(*operands), strict=True)]

    return wide


def _primitive(
    name: str, half: str, run: Callable[..., list[jax.Array]], types: _Types
) -> Primitive:
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(lambda *operands, **params: jax.jit(partial(made.bind, **params))(*operands))

    def typed(*operands: Any, **_: Any) -> Any:
        like = operands[0]
        return [like.update(shape=s, dtype=t, weak_type=False) for s, t in types(*operands)]

    made.def_abstract_eval(typed)
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=True))
    cuda = mlir.lower_fun(by_cudnn(half, run), multiple_results=True)
    mlir.register_lowering(made, cuda, platform="cuda")
    cpu = mlir.lower_fun(_widened(run, types), multiple_results=True)
    mlir.register_lowering(made, cpu, platform="cpu")
    return made


flash_attention_p = _primitive("flash_attention", "fwd", flash_attention, _of_output)
flash_attention_backward_p = _primitive(
    "flash_attention_backward", "bwd", flash_attention_backward, _of_gradients
)
