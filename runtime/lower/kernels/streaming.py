"""Kernels that stream over scores: JAX primitives, in blocks that are never all stored.

Their templates are `metakernels/templates/streaming.yaml`.

Scores x·w are made, used and forgotten in blocks along their longest dim that only one of x and w
has, so that a block stays in a cache. A softmax over several blocks carries
the greatest score so far, the sum of exponentials and the weighted sum, as in Milakov and
Gimelshein, "Online normalizer calculation for softmax" (2018) and Rabe and Staats, "Self-attention
does not need O(n²) memory" (2021). Attention without a mask is cuDNN's on GPUs that have it in
16 bits, and `jax.nn.dot_product_attention` where all scores are one block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tapestry_egg.metakernels.signatures.signature import LEAST, ROOM

from .attention import by_cudnn, flash_attention, runs_on_cudnn
from .late_fills import each_filled, filled

#: Bytes and least extent of a block of scores: of the plan, whatever machine traces it.
_ROOM, _LEAST = ROOM, LEAST

Numbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclass(frozen=True)
class _Scores:
    """The scores of two operands: which dims of which operand each of their dims is."""

    x: jax.Array
    w: jax.Array
    numbers: Numbers

    @property
    def places(self) -> list[dict[int, int]]:
        """Per dim of the scores: operand (0: x, 1: w) -> its dim."""
        (xk, wk), (xb, wb) = self.numbers
        both = [{0: a, 1: b} for a, b in zip(xb, wb, strict=True)]
        left = [{0: d} for d in range(self.x.ndim) if d not in (*xk, *xb)]
        right = [{1: d} for d in range(self.w.ndim) if d not in (*wk, *wb)]
        return [*both, *left, *right]

    @property
    def shape(self) -> tuple[int, ...]:
        sides = (self.x, self.w)
        return tuple(sides[p].shape[d] for p, d in (next(iter(at.items())) for at in self.places))

    def along(self, dims: Sequence[int]) -> _Blocks:
        """Blocks along the longest of some dims that a single operand has."""
        own = [d for d in dims if len(self.places[d]) == 1]
        own = own or [d for d in dims]
        dim = max(own, key=lambda d: self.shape[d])
        row = 4 * prod(self.shape) // max(1, self.shape[dim])
        size = max(_LEAST, 1 << max(0, (_ROOM // max(1, row)).bit_length() - 1))
        return _Blocks(dim, self.shape[dim], min(size, self.shape[dim]))

    def block(self, dim: int, start: Any, size: int) -> jax.Array:
        """The scores of a block along one dim, in float32 at least."""
        sides = [self.x, self.w]
        for p, d in self.places[dim].items():
            sides[p] = lax.dynamic_slice_in_dim(sides[p], start, size, d)
        wide = jnp.promote_types(self.x.dtype, jnp.float32)
        return lax.dot_general(sides[0], sides[1], self.numbers, preferred_element_type=wide)


@dataclass(frozen=True)
class _Blocks:
    """Equal blocks along one dim of the scores, and what remains at its end."""

    dim: int
    extent: int
    size: int

    def run(self, step: Callable[[Any, Any, int], Any], carry: Any) -> Any:
        """`carry = step(carry, start, size)` for every block in turn."""
        count = self.extent // self.size if self.size else 0
        if self.extent - count * self.size:
            carry = step(carry, count * self.size, self.extent - count * self.size)
        if count == 1:
            return step(carry, 0, self.size)
        return lax.fori_loop(0, count, lambda j, c: step(c, j * self.size, self.size), carry)


def _cut(x: jax.Array, dims: Sequence[int], at: _Blocks, start: Any, size: int) -> jax.Array:
    """The part of an operand whose dims stand for those of the scores that belongs to a block."""
    if at.dim not in dims or x.shape[list(dims).index(at.dim)] != at.extent:
        return x
    return lax.dynamic_slice_in_dim(x, start, size, list(dims).index(at.dim))


def _aligned(x: jax.Array, dims: Sequence[int], rank: int) -> jax.Array:
    """Dim k of x at place dims[k] of so many dims, extent 1 elsewhere."""
    sizes = [1] * rank
    for k, d in enumerate(dims):
        sizes[d] = x.shape[k]
    return jnp.transpose(x, sorted(range(len(dims)), key=lambda k: dims[k])).reshape(sizes)


def _product(weights: jax.Array, v: jax.Array, values: Numbers, swapped: int) -> jax.Array:
    (pc, vc), (pb, vb) = values
    wide = jnp.promote_types(v.dtype, jnp.float32)
    weights = weights.astype(v.dtype)
    if swapped:
        return lax.dot_general(v, weights, ((vc, pc), (vb, pb)), preferred_element_type=wide)
    return lax.dot_general(weights, v, values, preferred_element_type=wide)


def _of_rows(x: jax.Array, v: jax.Array, values: Numbers, swapped: int) -> jax.Array:
    """Per row of weights a number, `x` with extent 1 along what is contracted, at the result."""
    (pc, vc), (pb, vb) = values
    free = [d for d in range(x.ndim) if d not in (*pc, *pb)]
    rows = jnp.transpose(x, (*pb, *free, *pc)).reshape([x.shape[d] for d in (*pb, *free)])
    more = [1] * (v.ndim - len(vc) - len(vb))
    batch, rest = rows.shape[: len(pb)], rows.shape[len(pb) :]
    return rows.reshape((*batch, *more, *rest) if swapped else (*batch, *rest, *more))


def _weight(x: jax.Array, shift: jax.Array) -> jax.Array:
    """exp(x - shift), 0 where nothing has been seen yet."""
    return jnp.where(jnp.isneginf(x), 0.0, jnp.exp(x - shift))


def _finite(top: jax.Array) -> jax.Array:
    return jnp.where(jnp.isneginf(top), 0.0, top)


def softmax(x: jax.Array, *, axes: Sequence[int]) -> jax.Array:
    """Softmax over `axes`."""
    return jax.nn.softmax(x, axis=tuple(axes))


def logsumexp(x: jax.Array, *, axes: Sequence[int]) -> jax.Array:
    """log Σ exp(x) over `axes`."""
    return jax.nn.logsumexp(x, axis=tuple(axes))


def dot_logsumexp(
    x: jax.Array, w: jax.Array, *, scores: Numbers, axes: Sequence[int], dtype: Any
) -> jax.Array:
    """log Σ exp(x·w) over the dims `axes` of the scores."""
    of = _Scores(x, w, scores)
    axes = tuple(axes)
    rows = tuple(1 if d in axes else n for d, n in enumerate(of.shape))
    at = of.along(axes)
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def step(carry: Any, start: Any, size: int) -> Any:
        top, total = carry
        s = of.block(at.dim, start, size)
        new = jnp.maximum(top, s.max(axes, keepdims=True))
        shift = _finite(new)
        return new, total * _weight(top, shift) + jnp.exp(s - shift).sum(axes, keepdims=True)

    begin = tuple(each_filled([(rows, -jnp.inf, wide), (rows, 0.0, wide)], after=x))
    top, total = at.run(step, begin)
    return (
        (_finite(top) + jnp.log(total))
        .reshape([n for d, n in enumerate(rows) if d not in axes])
        .astype(dtype)
    )


def exp_dot(
    x: jax.Array,
    w: jax.Array,
    z: jax.Array,
    v: jax.Array,
    *,
    scores: Numbers,
    shift: Sequence[int],
    values: Numbers,
    swapped: int,
    dtype: Any,
) -> jax.Array:
    """exp(x·w - z)·v; blocks lie along the longest dim, whether it is contracted or kept."""
    of = _Scores(x, w, scores)
    (pc, vc), (pb, vb) = values
    rank = len(of.shape)
    result = jax.eval_shape(
        partial(_product, values=values, swapped=swapped),
        jax.ShapeDtypeStruct(of.shape, v.dtype),
        v,
    )
    at = of.along(range(rank))
    own = {**dict(zip(pb, vb, strict=True)), **dict(zip(pc, vc, strict=True))}
    of_v = [next((d for d, e in own.items() if e == k), -1) for k in range(v.ndim)]
    free = [d for d in range(rank) if d not in (*pc, *pb)]
    extra = [-1] * (v.ndim - len(vc) - len(vb))
    dims = [*pb, *extra, *free] if swapped else [*pb, *free, *extra]

    def part(start: Any, size: int) -> jax.Array:
        s = of.block(at.dim, start, size)
        low = _aligned(_cut(z, shift, at, start, size), shift, rank)
        return _product(jnp.exp(s - low), _cut(v, of_v, at, start, size), values, swapped)

    def step(carry: jax.Array, start: Any, size: int) -> jax.Array:
        made = part(start, size)
        if at.dim in pc:
            return carry + made
        return lax.dynamic_update_slice_in_dim(carry, made, start, dims.index(at.dim))

    return at.run(step, filled(result.shape, 0.0, result.dtype, after=z)).astype(dtype)


def attention(
    x: jax.Array,
    w: jax.Array,
    v: jax.Array,
    mask: jax.Array | None = None,
    fill: jax.Array | None = None,
    *,
    scores: Numbers,
    values: Numbers,
    swapped: int,
    dtype: Any,
    mask_dims: Sequence[int] = (),
    cudnn: bool = False,
) -> jax.Array:
    """softmax(x·w)·v, the scores being `fill` where `mask` does not hold; by cuDNN where it is."""
    of = _Scores(x, w, scores)
    (pc, vc), (pb, vb) = values
    axes, rank = tuple(pc), len(of.shape)
    result = jax.eval_shape(
        partial(_product, values=values, swapped=swapped),
        jax.ShapeDtypeStruct(of.shape, v.dtype),
        v,
    )
    at = of.along(axes)
    if mask is None:
        called = _dot_product_attention(of, v, values, swapped, at, cudnn)
        if called is not None:
            return called.astype(dtype)
    own = {**dict(zip(pb, vb, strict=True)), **dict(zip(pc, vc, strict=True))}
    of_v = [next((d for d, e in own.items() if e == k), -1) for k in range(v.ndim)]
    rows = tuple(1 if d in axes else n for d, n in enumerate(of.shape))
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def step(carry: Any, start: Any, size: int) -> Any:
        top, total, sums = carry
        s = of.block(at.dim, start, size)
        if mask is not None:
            holds = _aligned(_cut(mask, mask_dims, at, start, size), mask_dims, rank)
            s = jnp.where(holds, s, jnp.asarray(fill, wide))
        new = jnp.maximum(top, s.max(axes, keepdims=True))
        shift = _finite(new)
        weights, old = jnp.exp(s - shift), _weight(top, shift)
        made = _product(weights, _cut(v, of_v, at, start, size), values, swapped)
        sums = sums * _of_rows(old, v, values, swapped) + made
        return new, total * old + weights.sum(axes, keepdims=True), sums

    numbers = ((rows, -jnp.inf), (rows, 0.0), (result.shape, 0.0))
    begin = tuple(each_filled([(*own, wide) for own in numbers], after=x))
    _, total, sums = at.run(step, begin)
    return (sums / _of_rows(total, v, values, swapped)).astype(dtype)


def _dot_product_attention(
    of: _Scores, v: jax.Array, values: Numbers, swapped: int, at: _Blocks, cudnn: bool
) -> jax.Array | None:
    """By cuDNN's or JAX's attention, where its layout can be had and it needs no more memory."""
    (pc, vc), (pb, vb) = values
    (xk, wk), (xb, wb) = of.numbers
    rank = len(of.shape)
    usual = list(pb) == list(range(len(xb))) and list(pc) == [rank - 1] and len(xk) == 1
    one_value = v.ndim - len(vb) == 2 and of.w.ndim - len(wb) == 2 and rank == len(xb) + 2
    if not (usual and one_value) or not of.x.dtype == of.w.dtype == v.dtype:
        return None
    (free,) = (d for d in range(v.ndim) if d not in (*vc, *vb))
    if v.shape[free] != of.x.shape[xk[0]]:
        return None
    cudnn = cudnn and runs_on_cudnn(v.dtype, v.shape[free])
    if not cudnn and at.size < at.extent:
        return None
    (query,) = (d for d in range(of.x.ndim) if d not in (*xk, *xb))
    (key,) = (d for d in range(of.w.ndim) if d not in (*wk, *wb))

    def btnh(a: jax.Array, batch: Sequence[int], row: int, feature: int) -> jax.Array:
        """[heads, rows, features], all batch dims together being heads, as one batch of BTNH."""
        lead = prod(a.shape[d] for d in batch)
        a = jnp.transpose(a, (row, *batch, feature))
        return a.reshape(1, a.shape[0], lead, a.shape[-1])

    operands = (
        btnh(of.x, xb, query, xk[0]),
        btnh(of.w, wb, key, wk[0]),
        btnh(v, vb, vc[0], free),
    )
    if cudnn:
        fused = by_cudnn("fwd", flash_attention)
        out = fused(*operands, scale=1.0, causal=False, window=0, fill=0.0)[0]
    else:
        out = jax.nn.dot_product_attention(*operands, scale=1.0, implementation="xla")
    batch = [of.shape[d] for d in range(len(xb))]
    out = out[0].transpose(1, 2, 0) if swapped else out[0].transpose(1, 0, 2)
    return out.reshape(*batch, *out.shape[1:])


def new_primitive(
    name: str, run: Callable[..., jax.Array], cuda: Callable[..., jax.Array] | None = None
) -> Primitive:
    """The primitive of a kernel that JAX has none for: it runs as JAX runs `run`."""
    made = Primitive(name)
    made.def_impl(run)

    def typed(*operands: Any, **params: Any) -> Any:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        out = jax.eval_shape(partial(run, **params), *types)
        return operands[0].update(shape=out.shape, dtype=out.dtype, weak_type=False)

    made.def_abstract_eval(typed)
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=False))
    if cuda is not None:
        mlir.register_lowering(made, mlir.lower_fun(cuda, multiple_results=False), platform="cuda")
    return made


softmax_p = new_primitive("softmax", softmax)
logsumexp_p = new_primitive("logsumexp", logsumexp)
dot_logsumexp_p = new_primitive("dot_logsumexp", dot_logsumexp)
exp_dot_p = new_primitive("exp_dot", exp_dot)
attention_p = new_primitive("attention", attention, partial(attention, cudnn=True))
