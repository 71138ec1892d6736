"""Fused attention: cuDNN's kernels on its GPUs, and what they compute spelled out elsewhere.

`flash_attention` gives the output and, per row, the logarithm of the sum of exponentials;
`flash_attention_backward` reads both. A program that asks JAX for cuDNN's attention is traced to
these (`tracing/fused_attention.py`), so it is planned on any machine and runs on those without
cuDNN, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

#: What cuDNN's attention takes.
_CUDNN_DTYPES = ("bfloat16", "float16")


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool
) -> list[jax.Array]:
    """[output, logarithm of the sum] of q[b, t, n, h], k[b, s, g, h] and v[b, s, g, h]."""
    scores = _scores(q, k, scale, causal)
    stats = jax.nn.logsumexp(scores, axis=-1)
    weights = jnp.exp(scores - stats[..., None]).astype(v.dtype)
    out = jnp.einsum("bgrts,bsgh->btgrh", weights, v, preferred_element_type=jnp.float32)
    batch, rows, heads, _ = q.shape
    return [out.reshape(q.shape).astype(q.dtype), stats.reshape(batch, heads, rows)]


def flash_attention_backward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    stats: jax.Array,
    out: jax.Array,
    grad: jax.Array,
    *,
    scale: float,
    causal: bool,
) -> list[jax.Array]:
    """Gradients by q, k and v, from the results of `flash_attention` and the output's gradient."""
    batch, rows, heads, width = q.shape
    groups = k.shape[2]
    shape = (batch, rows, groups, heads // groups, width)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    product = partial(jnp.einsum, preferred_element_type=wide)
    scores = _scores(q, k, scale, causal)
    weights = jnp.exp(scores - stats.reshape(*scores.shape[:-1], 1))
    given = grad.reshape(shape)
    delta = (grad.astype(wide) * out.astype(wide)).sum(-1).reshape(shape[:-1])
    by_weight = product("btgrh,bsgh->bgrts", given, v)
    by_score = weights * (by_weight - delta.transpose(0, 2, 3, 1)[..., None]) * scale
    by_score = by_score.astype(q.dtype)
    dq = product("bgrts,bsgh->btgrh", by_score, k).reshape(q.shape)
    dk = product("bgrts,btgrh->bsgh", by_score, q.reshape(shape))
    dv = product("bgrts,btgrh->bsgh", weights.astype(v.dtype), given)
    return [dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype)]


def _scores(q: jax.Array, k: jax.Array, scale: float, causal: bool) -> jax.Array:
    """[batch, group, head of the group, row, key] in float32 at least."""
    batch, rows, heads, width = q.shape
    keys, groups = k.shape[1:3]
    split = q.reshape(batch, rows, groups, heads // groups, width)
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum("btgrh,bsgh->bgrts", split, k, preferred_element_type=wide)
    if causal:
        seen = jnp.arange(rows)[:, None] >= jnp.arange(keys)[None, :]
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _by_cudnn(name: str, elsewhere: Callable[..., list[jax.Array]]) -> Callable[..., Any]:
    """The call of cuDNN's kernel; `elsewhere` for dtypes that it has not, or another JAX."""

    def run(*operands: jax.Array, scale: float, causal: bool) -> list[jax.Array]:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn

        kernel = getattr(cudnn, f"_dot_product_attention_{name}_p", None)
        if kernel is None or operands[0].dtype.name not in _CUDNN_DTYPES:
            return elsewhere(*operands, scale=scale, causal=causal)
        none = jnp.zeros(0, operands[0].dtype)
        mask = cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
        more = {"is_training": True} if name == "fwd" else {}
        made = kernel.bind(
            *operands[:3],
            *[none] * 7,
            *operands[3:],
            scale=scale,
            seed=42,
            dropout_rate=0.0,
            variadic_args=(False, False),
            mask_type=mask,
            layout=cudnn.AttentionLayout.BTNH.value,
            sliding_window_length=None,
            **more,
        )
        return list(made)

    return run


def _primitive(name: str, half: str, run: Callable[..., list[jax.Array]]) -> Primitive:
    made = Primitive(name)
    made.multiple_results = True
    made.def_impl(lambda *operands, **params: jax.jit(partial(run, **params))(*operands))

    def typed(*operands: Any, **params: Any) -> Any:
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in operands]
        outs = jax.eval_shape(partial(run, **params), *types)
        like = operands[0]
        return [like.update(shape=o.shape, dtype=o.dtype, weak_type=False) for o in outs]

    made.def_abstract_eval(typed)
    mlir.register_lowering(made, mlir.lower_fun(run, multiple_results=True))
    cuda = mlir.lower_fun(_by_cudnn(half, run), multiple_results=True)
    mlir.register_lowering(made, cuda, platform="cuda")
    return made


flash_attention_p = _primitive("flash_attention", "fwd", flash_attention)
flash_attention_backward_p = _primitive("flash_attention_backward", "bwd", flash_attention_backward)
