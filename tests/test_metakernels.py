"""Every template against JAX: types, projections, laws and local parameters.

Small functions are traced; each equation's operands and results as JAX computes them are the oracle
for the NumPy references on the whole index space, and the reference on the whole is the oracle for
the references on blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tapestry_egg.blockgraph import TensorType
from tapestry_egg.codec import decode_params, encode_params, primitive
from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.reference import REFERENCES, reference
from tapestry_egg.metakernels.reference_call import numpy_dtype
from tapestry_egg.metakernels.signature import OperationSignature, Passage, evaluate
from tapestry_egg.zspace import ZRange

Array = Any
Program = tuple[Callable[..., Any], tuple[Any, ...]]

# Programs, by family. Extents have divisors to cut by.


def _floats(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Array:
    return jnp.asarray(rng.uniform(0.2, 0.9, shape) * rng.choice([1, -1], shape), dtype)


def _positive(rng: np.random.Generator, *shape: int) -> Array:
    return jnp.asarray(rng.uniform(0.2, 0.9, shape), np.float32)


def _integers(rng: np.random.Generator, *shape: int, low: int = -9, high: int = 10) -> Array:
    return jnp.asarray(rng.integers(low, high, shape), np.int32)


def _complex(rng: np.random.Generator, *shape: int) -> Array:
    return lax.complex(_floats(rng, *shape), _floats(rng, *shape))


def _extents(rng: np.random.Generator, count: int) -> tuple[int, ...]:
    return tuple(int(n) for n in rng.choice([2, 3, 4, 6, 8], count))


def elementwise_programs(rng: np.random.Generator) -> Iterator[Program]:
    shape = _extents(rng, 2)
    x, y, p, q = _floats(rng, *shape), _floats(rng, *shape), _positive(rng, *shape), 2.5
    i, j = _integers(rng, *shape), _integers(rng, *shape, low=1)
    u, b, z = i.astype(np.uint32), i > 0, _complex(rng, *shape)
    for name in (
        "floor ceil sign cbrt square exp exp2 expm1 tanh logistic sin cos tan asin acos atan sinh "
        "cosh asinh atanh erf erfc erf_inv neg abs is_finite bessel_i0e bessel_i1e stop_gradient"
    ).split():
        yield getattr(lax, name), (x,)
    for name in "log log1p sqrt rsqrt lgamma digamma".split():
        yield getattr(lax, name), (p,)
    yield (lambda p: lax.acosh(p + 1.0)), (p,)
    for method in lax.RoundingMethod:
        yield (lambda x, m=method: lax.round(x * 4, m)), (x,)
    for name in "population_count clz bitwise_not neg sign abs square".split():
        yield getattr(lax, name), (i,)
    for name in "real imag conj abs sign neg exp".split():
        yield getattr(lax, name), (z,)
    yield lax.conj, (x,)
    yield (
        (lambda x: (x**3, x**-2, lax.reduce_precision(x, 8, 7), lax.reduce_precision(x, 4, 3))),
        (x,),
    )
    yield (lambda x: checkpoint_name(jnp.copy(x), "saved")), (x,)
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.atan2):
        yield f, (x, y)
        yield f, (x, np.float32(q))
        yield f, (x, y[:1])
    yield lax.nextafter, (x, y)
    yield lax.pow, (p, y)
    yield (lambda x: x * 2.0 + 1.0), (x.astype(jnp.bfloat16),)
    for f in (lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min):
        yield f, (i, j)
    for f in (lax.bitwise_and, lax.bitwise_or, lax.bitwise_xor):
        yield f, (i, j)
        yield f, (b, ~b)
    for f in (lax.shift_left, lax.shift_right_logical, lax.shift_right_arithmetic):
        yield f, (i, j)
        yield f, (i, j * 9)
    yield primitive("mulhi").bind, (i * 99991, j * 99991)
    for f in (lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge):
        yield f, (x, y)
    for name in ("eq_to", "lt_to", "le_to"):
        yield primitive(name).bind, (x, jnp.where(b, y, x))
    yield lax.complex, (x, y)
    yield lax.add, (z, z)
    for f in (lax.igamma, lax.igammac):
        yield f, (p, p + 1)
    yield lax.zeta, (p + 2, p)
    yield lax.polygamma, (jnp.full(shape, 2.0, np.float32), p)
    yield lax.betainc, (p, p, p)
    yield lax.clamp, (np.float32(-0.3), x, y)
    yield lax.clamp, (-p, x, np.float32(0.3))
    yield lax.select_n, (b, x, y)
    yield lax.select_n, (jnp.asarray(True), x, y)
    yield lax.select_n, (jnp.abs(i) % 3, x, y, x + y)
    for to in (np.int32, np.float16, jnp.bfloat16, np.bool_, np.complex64):
        yield (lambda x, to=to: lax.convert_element_type(x * 9, to)), (x,)
    yield (lambda p: lax.convert_element_type(p * 9, np.uint8)), (p,)
    yield (lambda i: lax.convert_element_type(i, np.int8)), (i,)
    yield (lambda i: lax.convert_element_type(i, np.int32)), (i.astype(np.int8),)
    yield (lambda b: lax.convert_element_type(b, np.int32)), (b,)
    yield (lambda h: lax.convert_element_type(h, np.float32)), (x.astype(jnp.bfloat16),)
    yield (lambda x: lax.bitcast_convert_type(x, np.int32)), (x,)
    yield (lambda x: lax.bitcast_convert_type(x, np.uint8)), (x,)
    yield lax.optimization_barrier, ((x, y),)
    yield (lambda x: lax.optimization_barrier((x, x.sum(1)))), (x,)
    yield primitive("add_any").bind, (x, y)
    yield (lambda u: u + 1), (u,)


def movement_programs(rng: np.random.Generator) -> Iterator[Program]:
    a, b, c = _extents(rng, 3)
    x = _floats(rng, a, b, c)
    yield (lambda x: lax.broadcast_in_dim(x, (5, a, 4, b, c), (1, 3, 4))), (x,)
    yield (lambda x: lax.broadcast_in_dim(x[:1], (4, b, c), (0, 1, 2))), (x,)
    yield (lambda s: jnp.broadcast_to(s, (a, b))), (np.float32(2),)
    for shape in ((a * b, c), (a, b * c), (c, a * b), (a * b * c,), (1, a, b, 1, c), (b, c, a)):
        yield (lambda x, s=shape: lax.reshape(x, s)), (x,)
    for old, new in (
        ((12,), (3, 4)),
        ((2, 6), (4, 3)),
        ((4, 3), (3, 4)),
        ((8, 6), (12, 4)),
        ((4, 1, 6), (8, 3)),
        ((1,), ()),
        ((), (1, 1)),
        ((4, 6, 5), (24, 5)),
        ((3, 8, 2), (6, 8)),
        ((0, 4), (2, 0)),
    ):
        yield (lambda x, s=new: lax.reshape(x, s)), (_floats(rng, *old),)
    yield (lambda x: lax.squeeze(x, (1, 3))), (x.reshape(a, 1, b, 1, c),)
    yield (lambda x: lax.transpose(x, (2, 0, 1))), (x,)
    yield (lambda x: lax.rev(x, (0, 2))), (x,)
    yield (lambda x, y: lax.concatenate([x, y, x], 1)), (x, x[:, :1])
    yield (lambda x, y: jnp.stack([x, y], 1)), (x, x + 1)
    yield (lambda x: jnp.unstack(x, axis=1)), (x,)
    yield (lambda x: jnp.split(x, [1], 1)), (x,)
    yield (lambda x: jnp.tile(x, (1, 2, 4))), (x,)
    yield (lambda x: lax.slice(x, (1, 0, 0), (a, b, c - 1))), (x,)
    yield (lambda x: lax.slice(x, (0, 1, 0), (16, 8, 3), (2, 3, 1))), (_floats(rng, 16, 9, 4),)
    yield (lambda x: jnp.pad(x, ((0, 0), (1, 2), (0, 0)))), (x,)
    yield (lambda x: lax.pad(x, 1.5, ((0, 0, 0), (-1, 2, 1), (2, -1, 0)))), (x,)
    yield (lambda: lax.broadcasted_iota(np.int32, (a, b), 0)), ()
    yield (lambda: lax.broadcasted_iota(np.float32, (a, b), 1)), ()


def contraction_programs(rng: np.random.Generator) -> Iterator[Program]:
    a, b, c, d = _extents(rng, 4)
    x, y = _floats(rng, a, b, c), _floats(rng, d, c, a)
    yield (lambda x, y: jnp.einsum("abc,dca->abd", x, y)), (x, y)
    yield (lambda x, y: jnp.einsum("abc,dca->bd", x, y)), (x, y)
    yield (lambda x, y: jnp.einsum("abc,dca->d", x, y)), (x, y)
    yield (lambda x, y: lax.dot_general(x, y, (((2, 0), (1, 2)), ((), ())))), (x, y)
    yield (lambda x: x @ x.T), (_floats(rng, a, b),)
    yield (lambda x, v: x @ v), (_floats(rng, a, b), _floats(rng, b))
    yield (lambda v: jnp.outer(v, v)), (_floats(rng, b),)
    yield (
        (lambda i: lax.dot(i, i.T, preferred_element_type=np.int32)),
        (_integers(rng, a, b).astype(np.int8),),
    )
    yield (
        (lambda h: lax.dot(h, h.T, preferred_element_type=np.float32)),
        (_floats(rng, a, b, dtype=jnp.bfloat16),),
    )
    sizes = jnp.array([2, 1, 3], np.int32)
    batched = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
    yield (
        lambda x, y: lax.ragged_dot_general(x, y, sizes, batched),
        (_floats(rng, a, 6, c), _floats(rng, 3, a, c, b)),
    )
    free = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (0,), (0,))
    yield (
        lambda x, y: lax.ragged_dot_general(x, y, sizes, free),
        (_floats(rng, 6, a, c), _floats(rng, 3, c, b)),
    )
    summed = lax.RaggedDotDimensionNumbers((((1, 3), (1, 3)), ((0,), (0,))), (1,), ())
    yield (
        lambda x, y: lax.ragged_dot_general(x, y, sizes, summed),
        (_floats(rng, a, 6, b, c), _floats(rng, a, 6, d, c)),
    )
    rows, matrices = _floats(rng, 6, a), _floats(rng, 3, a, b)
    yield lax.ragged_dot, (rows, matrices, sizes)
    yield jax.grad(lambda r, m: lax.ragged_dot(r, m, sizes).sum(), (0, 1)), (rows, matrices)

    def conv(**k: Any) -> Callable[..., Any]:
        return functools.partial(lax.conv_general_dilated, **k)

    image, kernel = _floats(rng, 4, 6, 8, 8), _floats(rng, 4, 6, 3, 2)
    yield conv(window_strides=(1, 1), padding="SAME"), (image, kernel)
    yield conv(window_strides=(1, 2), padding="VALID"), (image, kernel)
    yield conv(window_strides=(1, 1), padding="VALID", rhs_dilation=(1, 2)), (image, kernel)
    yield conv(window_strides=(1, 1), padding="VALID"), (image, kernel[:, :, :1, :1])
    yield (
        conv(window_strides=(4, 4), padding="VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")),
        (_floats(rng, 2, 8, 8, 3), _floats(rng, 4, 4, 3, 6)),
    )
    yield (
        conv(window_strides=(1,), padding=[(1, 0)], feature_group_count=3),
        (
            _floats(rng, 2, 6, 5),
            _floats(rng, 12, 2, 2),
        ),
    )
    yield (
        conv(window_strides=(1,), padding="VALID", batch_group_count=2),
        (
            _floats(rng, 8, 4, 5),
            _floats(rng, 4, 4, 2),
        ),
    )
    yield (
        jax.grad(
            lambda x, k: conv(
                window_strides=(2, 1), padding="SAME", feature_group_count=2, rhs_dilation=(1, 2)
            )(x, k).sum(),
            (0, 1),
        ),
        (image, kernel[:, :3]),
    )


def reduction_programs(rng: np.random.Generator) -> Iterator[Program]:
    a, b, c = _extents(rng, 3)
    x = _floats(rng, a, b, c)
    flags = x > 0
    for axes in ((1,), (0, 2), (0, 1, 2)):
        for f in (jnp.sum, jnp.max, jnp.min):
            yield (lambda x, f=f, axes=axes: f(x, axes)), (x,)
    yield (lambda x: jnp.prod(x, 1)), (x,)
    yield (lambda f: (jnp.all(f, 1), jnp.any(f, (0, 2)))), (flags,)
    yield (lambda i: (i.sum(0), i.max(1))), (_integers(rng, a, b),)
    for name in ("reduce_and", "reduce_or", "reduce_xor"):
        yield (lambda i, n=name: primitive(n).bind(i, axes=(1,))), (_integers(rng, a, b),)
    yield (lambda f: lax.reduce_max_p.bind(f, axes=(1,), out_sharding=None)), (x,)
    yield (lambda x: (jnp.argmax(x, 1), jnp.argmin(x, 2))), (x,)
    yield (lambda x: lax.cumsum(x, 1)), (x,)
    yield (lambda x: (lax.cumsum(x, 2, reverse=True), lax.cumprod(x, 0))), (x,)
    yield (lambda x: (lax.cummax(x, 1), lax.cummin(x, 1), lax.cumlogsumexp(x, 2))), (x,)
    yield (lambda x: lax.sort(x, dimension=1)), (x,)
    yield (
        (lambda x, y: lax.sort((x, y, x + y), dimension=1, num_keys=2)),
        (
            _integers(rng, a, b),
            _integers(rng, a, b, low=0, high=2),
        ),
    )
    yield (lambda x: lax.top_k(x, 2)), (x,)
    yield (lambda x: lax.top_k(x, 2, axis=0)), (x,)
    yield jax.vmap(lambda x: lax.psum(x, "rows"), axis_name="rows"), (x,)


def window_programs(rng: np.random.Generator) -> Iterator[Program]:
    x = _floats(rng, 4, 8, 6)

    def pool(f: Any, start: float, window: Any, strides: Any, padding: Any, **k: Any) -> Any:
        return lambda x: lax.reduce_window(x, start, f, window, strides, padding, **k)

    for f, start in ((lax.add, 0.0), (lax.max, -np.inf), (lax.min, np.inf)):
        yield pool(f, start, (1, 2, 2), (1, 2, 2), "VALID"), (x,)
        yield pool(f, start, (1, 3, 1), (1, 1, 1), "VALID"), (x,)
        yield pool(f, start, (1, 3, 2), (1, 2, 1), "SAME"), (x,)
        yield pool(f, start, (1, 2, 2), (1, 1, 2), "VALID", window_dilation=(1, 3, 1)), (x,)
        yield pool(f, start, (1, 2, 2), (1, 1, 2), "VALID", base_dilation=(1, 2, 1)), (x,)
    for window, strides, padding in (
        ((1, 2, 2), (1, 2, 2), "VALID"),
        ((1, 3, 2), (1, 2, 2), "SAME"),
    ):
        pooled = pool(lax.max, -np.inf, window, strides, padding)
        yield jax.grad(lambda x, g=pooled: (g(x) * 1.5).sum()), (x,)
    ragged = pool(lax.max, -np.inf, (1, 3, 2), (1, 3, 2), "VALID")
    yield jax.grad(lambda x: (ragged(x) * 1.5).sum()), (_floats(rng, 4, 7, 6),)


def indexing_programs(rng: np.random.Generator) -> Iterator[Program]:
    a, b, c = (int(n) for n in rng.choice([2, 3, 4], 3))
    x, n = _floats(rng, 8, b, c), 4
    at = jnp.asarray(rng.integers(0, 8, (a, n)), np.int32)
    wild = jnp.asarray(rng.integers(-3, 11, (a, n)), np.int32)
    yield (lambda x, i: lax.dynamic_slice(x, (i, 0, 0), (3, b, c))), (x, np.int32(7))
    yield (lambda x, i: lax.dynamic_slice(x, (i, i, 0), (8, 1, c))), (x, np.int32(1))
    yield (lambda x, u, i: lax.dynamic_update_slice(x, u, (i, 0, 0))), (x, x[:3], np.int32(6))
    yield (lambda x, i: x[i]), (x, at)
    yield (lambda x, i: x.at[i].get(mode="clip")), (x, wild)
    yield (lambda x, i: x.at[i].get(mode="fill", fill_value=0)), (x, wild)
    yield (lambda x, i: x.at[i].get(mode="fill", fill_value=3.5)), (x, wild)
    yield (lambda x, i: x.at[i].get(mode="fill")), (x, wild)
    yield (lambda x, i: x.at[i].get(mode="fill")), (_integers(rng, 8, b), wild)
    yield (lambda x, i: x.at[i].get(mode="fill")), (x > 0, at)
    yield (lambda x, i: x[:, :, i]), (_floats(rng, a, b, 8), at)
    yield (lambda x, i, j: x[i, j]), (x, at, at % b)
    yield (lambda x, i: jnp.take_along_axis(x, i, 1)), (_floats(rng, a, 8), at)
    yield (lambda x, i: x[i]), (x, np.int32(3))
    yield jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,))), (_floats(rng, a, 8), at[:, 0])
    yield jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (1,))), (_floats(rng, a, 8), at[:, 0])
    yield jax.vmap(lambda x, i: x[i], (None, 0)), (x, at)
    dims = lax.GatherDimensionNumbers((0, 2), (), (0,))
    yield (
        (lambda x, i: lax.gather(x, i[..., None], dims, (1, 2), mode="clip")),
        (_floats(rng, 8, 6), at[0]),
    )
    u = _floats(rng, a, n, b, c)
    for name in ("add", "multiply", "max", "min", "set", "subtract"):
        yield (lambda x, i, u, f=name: getattr(x.at[i], f)(u)), (x, at, u)
        yield (lambda x, i, u, f=name: getattr(x.at[i], f)(u, mode="clip")), (x, wild, u)
        yield (lambda x, i, u, f=name: getattr(x.at[i], f)(u)), (x, wild, u)
    yield (
        (lambda x, i, u: x.at[:, i].set(u, unique_indices=True)),
        (
            _floats(rng, a, 8),
            jnp.asarray(rng.permutation(8)[:4], np.int32),
            _floats(rng, a, 4),
        ),
    )
    for name in ("set", "add"):
        yield (
            jax.vmap(lambda x, i, u, f=name: getattr(x.at[i], f)(u)),
            (_floats(rng, a, 8, c), at, _floats(rng, a, n, c)),
        )
    yield (lambda x, i, u: x.at[i, :2].add(u)), (x, at[0], _floats(rng, n, 2, c))
    yield (lambda x, i, u: x.at[i, i % b].add(u)), (x, at[0], _floats(rng, n, c))
    yield jax.grad(lambda x: jnp.take_along_axis(x, at, 1).sum()), (_floats(rng, a, 8),)
    yield (
        jax.grad(
            lambda x: jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (3,)))(x, at[:, 0]).sum()
        ),
        (_floats(rng, a, 8),),
    )
    yield (
        jax.grad(
            lambda x: jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (1,)))(x, at[:, 0]).sum()
        ),
        (_floats(rng, a, 8),),
    )
    yield jax.grad(lambda x: (x[at] * 2).sum()), (x,)


def linalg_programs(rng: np.random.Generator) -> Iterator[Program]:
    x = _floats(rng, 4, 3, 3)
    spd = x @ jnp.swapaxes(x, 1, 2) + 2 * jnp.eye(3)
    yield (lambda x: lax.linalg.cholesky(x, symmetrize_input=False)), (spd,)
    for left in (True, False):
        rhs = _floats(rng, 4, 3, 6) if left else _floats(rng, 4, 6, 3)
        for lower, transpose, unit in ((True, False, False), (False, True, True)):
            yield (
                functools.partial(
                    lax.linalg.triangular_solve,
                    left_side=left,
                    lower=lower,
                    transpose_a=transpose,
                    unit_diagonal=unit,
                ),
                (spd, rhs),
            )
    signal = _floats(rng, 4, 6, 8)
    yield (lambda x: lax.fft(x, "RFFT", (8,))), (signal,)
    yield (lambda x: lax.fft(x, "FFT", (6, 8))), (_complex(rng, 4, 6, 8),)
    yield (lambda x: lax.fft(x, "IFFT", (8,))), (_complex(rng, 4, 8),)
    yield (lambda x: lax.fft(x, "IRFFT", (8,))), (jnp.fft.rfft(signal[0]),)


FAMILIES: dict[str, Callable[[np.random.Generator], Iterator[Program]]] = {
    "elementwise": elementwise_programs,
    "movement": movement_programs,
    "contraction": contraction_programs,
    "reduction": reduction_programs,
    "window": window_programs,
    "indexing": indexing_programs,
    "linalg": linalg_programs,
}

#: Kernels that no program above reaches: other spellings.
_ELSEWHERE = {
    "copy_p",
    "scatter_add",
    "scatter_sub",
    "scatter_mul",
    "scatter_max",
    "scatter_min",
}
#: Kernels whose lowering on a block needs more than local parameters: the block's place.
_PLACED = ("iota", "gather", "scatter")


@dataclass(frozen=True, eq=False)
class Recorded:
    """One equation, with the values that JAX computed."""

    kernel: str
    params: dict[str, Any]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    operands: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]

    @property
    def signature(self) -> OperationSignature:
        return registry.signature(self.kernel, self.params, self.input_types, self.output_types)

    def __str__(self) -> str:
        return f"{self.kernel}{tuple(map(str, self.input_types))} {self.params}"


def _type(aval: Any) -> TensorType:
    return TensorType(tuple(aval.shape), str(aval.dtype), bool(aval.weak_type))


def _equations(jaxpr: Any, consts: Any, args: Any, found: list[Any]) -> list[Any]:
    """Evaluate a jaxpr; append (equation, operands, results) for each one, calls inlined."""
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(v: Any) -> Any:
        return jnp.asarray(v.val, v.aval.dtype) if hasattr(v, "val") else values[v]

    for e in jaxpr.eqns:
        ins = [read(v) for v in e.invars]
        inner = next((e.params[k] for k in ("jaxpr", "call_jaxpr") if k in e.params), None)
        if hasattr(inner, "jaxpr") and e.primitive.name not in ("scan", "while", "cond"):
            outs = _equations(inner.jaxpr, inner.consts, ins, found)
        else:
            made = e.primitive.bind(*ins, **e.params)
            outs = list(made) if e.primitive.multiple_results else [made]
            found.append((e, ins, outs))
        values.update(zip(e.outvars, outs, strict=True))
    return [read(v) for v in jaxpr.outvars]


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, jitted with as little optimization as XLA can do."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.device_get(jax.jit(function, compiler_options=fast)(*args))


@functools.cache
def recorded(family: str) -> tuple[Recorded, ...]:
    """Every equation of the family's programs; all of them run in one jitted call."""
    rng = np.random.default_rng(sorted(FAMILIES).index(family))
    programs = list(FAMILIES[family](rng))
    notes: list[Any] = []

    def run(arguments: Any) -> Any:
        values = []
        for (function, _), args in zip(programs, arguments, strict=True):
            closed = jax.make_jaxpr(function)(*args)
            found: list[Any] = []
            _equations(closed.jaxpr, closed.consts, jax.tree.leaves(args), found)
            for e, ins, outs in found:
                notes.append(e)
                values.append((ins, outs))
        return values

    values = compiled(run, [args for _, args in programs])
    out = []
    for e, (ins, outs) in zip(notes, values, strict=True):
        kernel = e.primitive.name
        out.append(
            Recorded(
                kernel,
                encode_params(e.params, kernel=kernel),
                tuple(_type(v.aval) for v in e.invars),
                tuple(_type(v.aval) for v in e.outvars),
                tuple(map(np.asarray, ins)),
                tuple(map(np.asarray, outs)),
            )
        )
    return tuple(out)


def all_recorded() -> Iterator[Recorded]:
    for family in FAMILIES:
        yield from recorded(family)


# The laws that are checked


def close(got: Array, want: Array, what: str, narrow: bool = False) -> None:
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    if got.dtype.kind in "biu":
        assert np.array_equal(got, want), f"{what}: {got} is not {want}"
        return
    narrow = narrow or got.dtype.itemsize < 4
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    tolerance = 2e-2 if narrow else 3e-4
    a, b = got.astype(wide), want.astype(wide)
    assert np.allclose(a, b, tolerance, tolerance, equal_nan=True), f"{what}: {a} is not {b}"


def box_of(array: Array, box: ZRange) -> Array:
    return array[(*(slice(s, e) for s, e in zip(box.start, box.end, strict=True)), ...)]


def zero(monoid: str, dtype: str) -> Any:
    kind = numpy_dtype(dtype)
    if monoid in ("max", "min"):
        if kind.kind in "iu":
            return np.iinfo(kind).min if monoid == "max" else np.iinfo(kind).max
        return -np.inf if monoid == "max" else np.inf
    return {"sum": 0, "prod": 1, "and": True, "or": False}[monoid]


COMBINE: dict[str, Callable[[Any, Any], Any]] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
}


def combine(monoid: str, a: Array, b: Array) -> Array:
    with np.errstate(all="ignore"):
        return COMBINE[monoid](a, b).astype(a.dtype)


def splittable(sig: OperationSignature, d: int, count: int) -> bool:
    """Whether the generic split rule cuts index dim d into `count` blocks.

    Outputs of a map dim get exactly the layout blocks of one tensor dim. An operand is read in such
    blocks too, or each of its dims that d moves is moved by d alone.
    """
    blocks = ZRange.from_shape(sig.extents).blocks(d, count)
    if sig.index[d].role not in ("map", "reduce") or sig.extents[d] % count:
        return False
    for q, (projection, tensor) in enumerate(
        zip((*sig.inputs, *sig.outputs), (*sig.input_types, *sig.output_types), strict=True)
    ):
        reached = projection.reaches(d)
        whole = ZRange.from_shape(tensor.shape)
        images = [projection.image(b).clip(whole) for b in blocks]
        in_blocks = len(reached) == 1 and images == list(whole.blocks(reached[0], count))
        if q >= len(sig.inputs):
            if (sig.index[d].role == "reduce" and reached) or (
                sig.index[d].role == "map" and not in_blocks
            ):
                return False
        elif reached and not in_blocks:
            for k in reached:
                others = [a for e, a in enumerate(projection.matrix[k]) if a and e != d]
                if others:
                    return False
    return True


def run_block(op: Recorded, sig: OperationSignature, box: ZRange, first: bool) -> tuple[Array, ...]:
    """The reference on the image boxes of one index block.

    Operands that start a reduction hold the monoid's zero except in the first block.
    """
    operands = []
    monoid = next((d.monoid for d in sig.index if d.role == "reduce"), None)
    for p, x in enumerate(op.operands):
        part = box_of(x, sig.operand_box(p, box))
        if p in sig.initial and not first and monoid:
            part = np.full_like(part, zero(monoid, op.input_types[p].dtype))
        operands.append(part)
    return reference(op.kernel, op.params, sig, operands, box)


def check_whole(op: Recorded, sig: OperationSignature) -> tuple[Array, ...]:
    made = run_block(op, sig, ZRange.from_shape(sig.extents), first=True)
    for q, (got, want) in enumerate(zip(made, op.results, strict=True)):
        if op.kernel == "cholesky":
            want = np.tril(want)  # JAX leaves the other triangle as it was
        close(got, want, f"output {q} of {op}")
    return made


def check_cut(
    op: Recorded, sig: OperationSignature, cuts: dict[int, int], whole: tuple[Array, ...]
) -> None:
    """Blocks of the index space, run one by one on their image boxes, assemble to the whole."""
    boxes = [ZRange.from_shape(sig.extents)]
    for d, count in cuts.items():
        boxes = [b for box in boxes for b in box.blocks(d, count)]
    reduced = [d for d in cuts if sig.index[d].role == "reduce"]
    for q, (want, projection) in enumerate(zip(whole, sig.outputs, strict=True)):
        made: dict[ZRange, Array] = {}
        for box in boxes:
            first = all(box.start[d] == 0 for d in reduced)
            got = run_block(op, sig, box, first)[q]
            at = projection.image(box)
            if at in made:
                assert reduced, f"two blocks of {op} give the same box {at}"
                got = combine(sig.index[reduced[0]].monoid or "", made[at], got)
            made[at] = got
        out = np.zeros_like(want)
        count = np.zeros(want.shape, int)
        for at, got in made.items():
            box_of(out, at)[...] = got
            box_of(count, at)[...] += 1
        assert (count == 1).all(), f"blocks of {op} do not cover output {q} exactly"
        close(out, want, f"output {q} of {op} cut {cuts}")


def check_passage(
    op: Recorded, sig: OperationSignature, law: Passage, rng: np.random.Generator
) -> None:
    """f(x•y) = f(x)•f(y) on the operands of the group, the others as they are."""

    def other(x: Array) -> Array:
        if x.dtype.kind in "iu":  # of any size: what wraps must wrap alike on both sides
            ends = np.iinfo(x.dtype)
            return rng.integers(ends.min, ends.max, x.shape, x.dtype)
        noise = rng.uniform(-2, 2, x.shape)
        if x.dtype.kind == "c":
            noise = noise + 1j * rng.uniform(-2, 2, x.shape)
        return noise.astype(x.dtype)

    xs = [other(x) if p in law.inputs else x for p, x in enumerate(op.operands)]
    ys = [other(x) if p in law.inputs else x for p, x in enumerate(op.operands)]
    both = [
        combine(law.monoid_in, x, y) if p in law.inputs else x
        for p, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    fx, fy, fxy = (
        run_block(replace(op, operands=v), sig, ZRange.from_shape(sig.extents), first=True)
        for v in (xs, ys, both)
    )
    narrow = any(x.dtype.kind not in "biu" and x.dtype.itemsize < 4 for x in op.operands)
    for q, (a, b, want) in enumerate(zip(fx, fy, fxy, strict=True)):
        close(combine(law.monoid_out, a, b), want, f"{law} of output {q} of {op}", narrow)


# Tests


@pytest.mark.parametrize("family", FAMILIES)
def test_references_agree_with_jax_whole_and_in_blocks(family: str) -> None:
    rng = np.random.default_rng(7)
    cut = 0
    for op in recorded(family):
        sig = op.signature
        if sig.opaque:
            continue
        whole = check_whole(op, sig)
        legal: dict[int, int] = {}
        for d in range(len(sig.index)):
            counts = [n for n in (2, 3, 4) if n <= sig.extents[d] and splittable(sig, d, n)]
            if counts:
                legal[d] = int(rng.choice(counts))
                check_cut(op, sig, {d: legal[d]}, whole)
                cut += 1
        if len(legal) > 1:
            pair = sorted(rng.choice(sorted(legal), 2, replace=False).tolist())
            roles = [sig.index[d].role for d in pair]
            if roles != ["reduce", "reduce"] or len({sig.index[d].monoid for d in pair}) == 1:
                check_cut(op, sig, {d: legal[d] for d in pair}, whole)
    assert cut > 5


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "elementwise"])
def test_jax_runs_on_image_boxes_with_the_local_parameters(family: str) -> None:
    rng = np.random.default_rng(8)
    calls, wanted = [], []
    for op in recorded(family):
        sig = op.signature
        dims = [d for d in range(len(sig.index)) if splittable(sig, d, 2)]
        if (
            sig.opaque
            or not dims
            or any(sig.outside)
            or op.kernel.startswith(_PLACED)
            or op.kernel == "cholesky"
        ):
            continue
        box = ZRange.from_shape(sig.extents).blocks(int(rng.choice(dims)), 2)[1]
        operands = [box_of(x, p.image(box)) for x, p in zip(op.operands, sig.inputs, strict=True)]
        shapes = [p.image(box).shape for p in sig.outputs]
        local = registry.localize(op.kernel, op.params, sig, [x.shape for x in operands], shapes)
        calls.append((primitive(op.kernel), decode_params(local, kernel=op.kernel), operands))
        wanted.append((op, reference(op.kernel, op.params, sig, operands, box)))

    def run(arguments: Any) -> Any:
        return [p.bind(*xs, **k) for (p, k, _), xs in zip(calls, arguments, strict=True)]

    made = compiled(run, [xs for _, _, xs in calls])
    for got, (op, want) in zip(made, wanted, strict=True):
        got = got if isinstance(got, list | tuple) else [got]
        for q, (a, b) in enumerate(zip(got, want, strict=True)):
            close(a, b, f"output {q} of {op} on a block")
    assert len(calls) > 3


@pytest.mark.parametrize("family", FAMILIES)
def test_declared_passages_hold(family: str) -> None:
    rng = np.random.default_rng(9)
    seen = 0
    for op in recorded(family):
        for law in op.signature.passages:
            check_passage(op, op.signature, law, rng)
            seen += 1
    assert seen > 2


def test_every_kernel_and_every_entry_occurs_in_a_program() -> None:
    kernels, entries, groups = set(), set(), set()
    for op in all_recorded():
        entry = registry.entry(op.kernel, op.params, op.input_types, op.output_types)
        if entry is None:
            continue
        kernels.add(op.kernel)
        entries.add(entry.origin)
        sig = op.signature
        for d, dim in enumerate(sig.index):
            if any(n <= dim.size and splittable(sig, d, n) for n in (2, 3, 4)):
                groups.add((entry.origin, dim.name.rstrip("0123456789")))
    known = {k for k in registry.templates() if k not in _ELSEWHERE}
    assert known == kernels
    assert set(REFERENCES) == set(registry.templates())
    for kernel in known:
        for entry in registry.templates()[kernel]:
            assert entry.origin in entries, f"{entry.origin} of {kernel} is never used"
            whole = {g for g, r in entry.roles.items() if r.text == "whole"}
            for group in set(entry.index or {"i": None}) - whole - _NEVER_CUT.get(kernel, set()):
                assert (entry.origin, group) in groups, f"{kernel}: @{group} was never cut"


#: Index groups that no operation can be cut along although their dims are not all `whole`.
_NEVER_CUT: dict[str, set[str]] = {"reduce_xor": {"r"}}


def test_unknown_kernels_and_regions_are_opaque() -> None:
    x = TensorType((4, 6), "float32")
    for kernel, regions in (("random_bits", 0), ("scan", 1), ("no_such_kernel", 0)):
        sig = registry.signature(kernel, {}, (x,), (x,), regions)
        assert (
            sig.opaque and sig.index == () and sig.inputs[0].image(ZRange((), ())).shape == (4, 6)
        )
        assert registry.localize(kernel, {"p": 1}, sig, [(4, 6)], [(4, 6)]) == {"p": 1}
    with pytest.raises(TemplateError, match="no template fits"):
        registry.signature("no_such_kernel", {}, (x,))


def test_wrong_output_types_are_an_error() -> None:
    x, y = TensorType((4, 6), "float32"), TensorType((4, 6), "int32")
    with pytest.raises(TemplateError, match=r"elementwise\.yaml.*f32\[4, 6\].*s32\[4, 6\]"):
        registry.signature("exp", {"accuracy": None}, (x,), (y,))


def test_tables_can_be_cut_by_rows() -> None:
    ops = [op for op in recorded("indexing") if op.input_types[0].shape[:1] == (8,)]
    read = next(op.signature for op in ops if op.kernel == "gather")
    rows = [d for d, dim in enumerate(read.index) if dim.role == "reduce"]
    assert [(read.index[d].size, read.index[d].monoid) for d in rows] == [(8, "sum")]
    assert splittable(read, rows[0], 4) and read.inputs[0].reaches(rows[0]) == (0,)
    assert all(
        dim.role == "map" and splittable(read, d, dim.size)
        for d, dim in enumerate(read.index)
        if d not in rows
    )
    write = next(op.signature for op in ops if op.kernel == "scatter-add")
    assert write.initial == (0,)
    updates = [d for d, dim in enumerate(write.index) if dim.role == "reduce"]
    assert [write.index[d].monoid for d in updates] == ["sum", "sum"]
    assert all(splittable(write, d, write.index[d].size) for d in range(len(write.index)))


def test_costs_are_polynomials_in_index_extents() -> None:
    f = functools.partial(TensorType, dtype="float32")
    dot = registry.signature(
        "dot_general",
        {"dimension_numbers": [[[1], [0]], [[], []]], "preferred_element_type": None},
        (f((8, 16)), f((16, 4))),
    )
    assert evaluate(dot.flops, dot.extents) == 2 * 8 * 16 * 4
    assert evaluate(dot.flops, (4, 4, 8)) == 2 * 4 * 4 * 8
    rows = next(op for op in recorded("indexing") if op.kernel == "gather")
    assert rows.signature.reads[0] is not None
    read = evaluate(rows.signature.reads[0], rows.signature.extents)
    assert read == rows.output_types[0].size < rows.input_types[0].size * 100


# What must fail


@pytest.fixture
def own_templates(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], None]]:
    """Puts templates before the package's own for the length of a test."""
    monkeypatch.setattr(registry, "_TEMPLATES", dict(registry.templates()))
    monkeypatch.setattr(registry, "_INSTANCES", {})
    monkeypatch.setattr(registry, "_SIGNATURES", {})

    def add(text: str) -> None:
        path = tmp_path / "own.yaml"
        path.write_text(text)
        registry.add_templates(path)

    yield add


def test_a_projection_that_reads_too_little_fails(own_templates: Callable[[str], None]) -> None:
    op = next(op for op in recorded("reduction") if op.kernel == "cumsum")
    own_templates("- {kernels: [cumsum], inputs: {x: }, out: {shape: $x.shape, dtype: $x.dtype}}")
    sig = op.signature
    d = op.params["axis"]
    assert splittable(sig, d, sig.extents[d])
    with pytest.raises(AssertionError, match="cumsum"):
        check_cut(op, sig, {d: sig.extents[d]}, check_whole(op, sig))


def test_a_wrong_monoid_fails(own_templates: Callable[[str], None]) -> None:
    op = next(op for op in recorded("reduction") if op.kernel == "reduce_max")
    own_templates(
        """
- kernels: [reduce_max]
  inputs: {x: }
  let: {kept: "without(range($x.rank), $axes)"}
  out: {shape: "$x.shape[$kept]", dtype: $x.dtype}
  index: {i: "$x.shape[$kept]", r: "$x.shape[$axes]"}
  roles: {r: reduce(sum)}
  project: {x: "arrange([$kept..., $axes...], [@i..., @r...])", out: "@i"}
"""
    )
    sig = op.signature
    d = next(d for d, dim in enumerate(sig.index) if dim.role == "reduce")
    with pytest.raises(AssertionError, match="reduce_max"):
        check_cut(op, sig, {d: sig.extents[d]}, check_whole(op, sig))


@pytest.mark.parametrize(
    ("kernel", "law"),
    [
        ("exp", Passage((0,), "sum", "sum")),
        ("add", Passage((0,), "sum", "sum")),
        ("div", Passage((1,), "sum", "sum")),
        ("neg", Passage((0,), "max", "max")),
    ],
)
def test_a_wrong_passage_fails(kernel: str, law: Passage) -> None:
    op = next(op for op in recorded("elementwise") if op.kernel == kernel)
    wrong = replace(op.signature, passages=(law,))
    with pytest.raises(AssertionError, match=kernel):
        check_passage(op, wrong, law, np.random.default_rng(0))


def test_a_reshape_does_not_run_on_a_box_with_gaps() -> None:
    six, two = TensorType((6,), "float32"), TensorType((2, 3), "float32")
    params = {"new_sizes": [2, 3], "dimensions": None, "sharding": None}
    sig = registry.signature("reshape", params, (six,), (two,))
    assert splittable(sig, 0, 2) and not splittable(sig, 1, 3)
    with pytest.raises(TemplateError, match="the operand box holds elements"):
        registry.localize("reshape", params, sig, [(4,)], [(2, 1)])
