"""Cases of reductions, cumulative operations, sorting and decompositions."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapestry_egg.tracing.codec import primitive
from tests.metakernels.cases import Case, Draw, of

Array = Any


@of("reduction", *(f"reduce_{name}" for name in "sum prod max min and or xor".split()))
def reduction(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(0, 4)
    axes = draw.some(range(len(shape)))
    if kernel in ("reduce_and", "reduce_or", "reduce_xor"):
        x = draw.choice((draw.integers, draw.flags))(shape)
    elif kernel in ("reduce_max", "reduce_min"):
        x = draw.choice((draw.floats, draw.integers, draw.flags))(shape)
    else:
        x = draw.any(shape)
    function = primitive(kernel)
    wanted = {"out_sharding": None} if kernel in ("reduce_sum", "reduce_max", "reduce_min") else {}
    given = {k: v for k, v in (*wanted.items(), ("axes", axes))}
    if kernel == "reduce_prod":
        return lambda x: lax.reduce_prod(x, axes), (x,)
    if hasattr(lax, kernel):
        return lambda x: getattr(lax, kernel)(x, axes), (x,)
    return lambda x: function.bind(x, **given), (x,)


@of("reduction", "psum")
def named_sum(draw: Draw, kernel: str) -> Case:
    x = draw.floats(draw.shape(1, 3))
    return jax.vmap(lambda x: lax.psum(x, "rows"), axis_name="rows"), (x,)


@of("reduction", "reduce")
def combined(draw: Draw, kernel: str) -> Case:
    """The greatest of several arrays' elements with what stands beside it, and a weighted sum."""
    shape = draw.shape(1, 3)
    axes = draw.some(range(len(shape)))
    xs = draw.integers(shape, -9, 9), draw.floats(shape)

    def greater(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        ahead = a[0] >= b[0]
        return jnp.where(ahead, a[0], b[0]), jnp.where(ahead, a[1], 0.5 * b[1])

    return lambda *xs: lax.reduce(xs, (np.int32(-9), np.float32(0)), greater, axes), xs


@of("reduction", "argmax", "argmin")
def position(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    axis = draw.size(0, len(shape) - 1)
    x = draw.choice((draw.floats, draw.integers))(shape)  # of integers, some are equal
    return lambda x: getattr(lax, kernel)(x, axis, np.int32), (x,)


@of("reduction", "sort")
def sort(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    axis, many = draw.size(0, len(shape) - 1), draw.size(1, 3)
    keys = draw.size(1, many)
    xs = tuple(draw.integers(shape, 0, 4) for _ in range(many))
    return lambda *xs: lax.sort(xs, dimension=axis, num_keys=keys), xs


@of("reduction", "top_k")
def top_k(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    axis = draw.size(0, len(shape) - 1)
    k = draw.size(1, shape[axis])
    x = draw.choice((draw.floats, draw.integers))(shape)
    return lambda x: lax.top_k(x, k, axis=axis), (x,)


@of("cumulative", *(f"cum{name}" for name in "sum prod max min logsumexp".split()))
def cumulative(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    axis, back = draw.size(0, len(shape) - 1), draw.coin()
    floats = kernel == "cumlogsumexp" or draw.coin()
    x = draw.floats(shape) if floats else draw.integers(shape, -3, 4)
    return lambda x: getattr(lax, kernel)(x, axis, back), (x,)


def definite(draw: Draw, batch: tuple[int, ...], n: int) -> np.ndarray:
    """Symmetric matrices that are far from singular."""
    x = draw.floats((*batch, n, n))
    return (x @ np.swapaxes(x, -1, -2) + 2 * np.eye(n)).astype(np.float32)


@of("linalg", "cholesky")
def cholesky(draw: Draw, kernel: str) -> Case:
    x = definite(draw, draw.shape(0, 2), draw.size(1, 4))
    return lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (x,)


@of("linalg", "triangular_solve")
def triangular_solve(draw: Draw, kernel: str) -> Case:
    batch, n, many = draw.shape(0, 2), draw.size(1, 4), draw.size()
    left, lower, transpose, unit = (draw.coin() for _ in range(4))
    a, b = definite(draw, batch, n), draw.floats((*batch, *((n, many) if left else (many, n))))
    return (
        lambda a, b: lax.linalg.triangular_solve(
            a, b, left_side=left, lower=lower, transpose_a=transpose, unit_diagonal=unit
        ),
        (a, b),
    )


@of("linalg", "fft")
def fft(draw: Draw, kernel: str) -> Case:
    kind = draw.choice(("FFT", "IFFT", "RFFT", "IRFFT"))
    lengths = tuple(draw.choice((2, 4, 6)) for _ in range(draw.size(1, 2)))
    lead = draw.shape(0, 2)
    if kind == "RFFT":
        x = draw.floats((*lead, *lengths))
    elif kind == "IRFFT":
        whole = draw.numbers.normal(size=(*lead, *lengths))
        axes = tuple(range(len(lead), len(lead) + len(lengths)))
        x = np.fft.rfftn(whole, axes=axes).astype(np.complex64)
    else:
        x = draw.complexes((*lead, *lengths))
    return lambda x: lax.fft(x, kind, lengths), (x,)
