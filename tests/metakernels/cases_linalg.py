"""Cases of decompositions and solvers, one per leading index."""

from __future__ import annotations

from jax import lax

from tapestry_egg.tracing.codec import primitive
from tests.metakernels.cases import Array, Case, Draw, of


def matrices(draw: Draw, *dims: int) -> Array:
    """Numbers or complex numbers [batch..., dims...]."""
    shape = (*draw.shape(0, 2), *dims)
    return draw.complexes(shape) if draw.coin() else draw.floats(shape)


@of("linalg", "lu", "qr", "geqrf", "svd", "householder_product")
def of_any_matrix(draw: Draw, kernel: str) -> Case:
    x = matrices(draw, draw.size(1, 5), draw.size(1, 5))
    full, more = draw.coin(), draw.coin()
    if kernel == "lu":
        return lax.linalg.lu, (x,)
    if kernel == "geqrf":
        return primitive(kernel).bind, (x,)
    if kernel == "qr":
        return lambda x: lax.linalg.qr(x, pivoting=more, full_matrices=full), (x,)
    if kernel == "svd":
        return lambda x: lax.linalg.svd(x, full_matrices=full, compute_uv=more), (x,)
    x = matrices(draw, *sorted((draw.size(1, 5), draw.size(1, 5)), reverse=True))
    taus = draw.floats((*x.shape[:-2], draw.size(0, x.shape[-1]))).astype(x.dtype)
    return lax.linalg.householder_product, (x, taus)


@of("linalg", "eigh", "eig", "schur", "hessenberg", "tridiagonal")
def of_a_square_matrix(draw: Draw, kernel: str) -> Case:
    n = draw.size(1, 4)
    x = matrices(draw, n, n)
    one, other = draw.coin(), draw.coin()
    if kernel == "eigh":
        return lambda x: lax.linalg.eigh(x, lower=one, symmetrize_input=False), (x,)
    if kernel == "eig":
        return (
            lambda x: lax.linalg.eig(
                x, compute_left_eigenvectors=one, compute_right_eigenvectors=other
            ),
            (x,),
        )
    if kernel == "schur":
        return lambda x: lax.linalg.schur(x, compute_schur_vectors=one), (x,)
    if kernel == "tridiagonal":
        return lambda x: lax.linalg.tridiagonal(x, lower=one), (x,)
    return lax.linalg.hessenberg, (x,)


@of("linalg", "lu_pivots_to_permutation")
def exchanges(draw: Draw, kernel: str) -> Case:
    count = draw.size(1, 4)
    size = count + draw.size(0, 2)
    pivots = draw.integers((*draw.shape(0, 2), count), 0, size)
    return lambda p: lax.linalg.lu_pivots_to_permutation(p, size), (pivots,)


@of("linalg", "ormqr")
def reflections(draw: Draw, kernel: str) -> Case:
    m, other = draw.size(1, 5), draw.size(1, 5)
    n = draw.size(1, m)
    x = matrices(draw, m, n)
    left, transpose = draw.coin(), draw.coin()
    taus = draw.floats((*x.shape[:-2], draw.size(1, n))).astype(x.dtype)
    c = draw.floats((*x.shape[:-2], *((m, other) if left else (other, m)))).astype(x.dtype)
    bind = primitive("ormqr").bind
    return lambda *xs: bind(*xs, left=left, transpose=transpose), (x, taus, c)


@of("linalg", "tridiagonal_solve")
def tridiagonal_solve(draw: Draw, kernel: str) -> Case:
    batch, n, sides = draw.shape(0, 2), draw.size(1, 5), draw.size(1, 4)
    lower, upper = draw.floats((*batch, n)), draw.floats((*batch, n))
    lower[..., 0] = upper[..., -1] = 0
    middle = draw.floats((*batch, n)) + 3
    b = draw.floats((*batch, n, sides))
    return lax.linalg.tridiagonal_solve, (lower, middle, upper, b)


@of("linalg", "symmetric_product")
def symmetric_product(draw: Draw, kernel: str) -> Case:
    batch, n, m = draw.shape(0, 2), draw.size(1, 4), draw.size(1, 4)
    alpha, beta = draw.choice((1.0, 0.5)), draw.choice((0.0, 2.0))
    bind = primitive("symmetric_product").bind
    return (
        lambda x, c: bind(x, c, alpha=alpha, beta=beta),
        (draw.floats((*batch, n, m)), draw.floats((*batch, n, n))),
    )
