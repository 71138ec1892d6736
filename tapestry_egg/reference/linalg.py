"""Decompositions and solvers of matrices by SciPy's LAPACK, one matrix after the other.

They compute in the operand's own precision: another one may turn the sign of a vector around.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from .call import Array, Call, Reference


def _each(*ranks: int) -> Callable[[Callable[..., Sequence[Array]]], Reference]:
    """A reference from a function of the call and one matrix (or vector) of every operand; `ranks`
    says how many trailing dims are one."""

    def wrap(one: Callable[..., Sequence[Array]]) -> Reference:
        def apply(call: Call) -> tuple[Array, ...]:
            leading = call.operands[0].shape[: call.operands[0].ndim - ranks[0]]
            count = len(call.signature.outputs)
            outs = tuple(np.zeros(call.shape(q), call.dtype(q)) for q in range(count))
            for at in np.ndindex(*leading):
                made = one(call, *(x[at] for x in call.operands))
                for out, x in zip(outs, made, strict=True):
                    out[at] = x
            return outs

        return apply

    return wrap


def _lapack(name: str, x: Array) -> Any:
    """The routine of that name for the dtype of x: `orgqr` is `ungqr` where x is complex."""
    from scipy.linalg.lapack import get_lapack_funcs

    if x.dtype.kind == "c":
        name = {"org": "ung", "orm": "unm", "sye": "hee", "syt": "het"}.get(
            name[:3], name[:3]
        ) + name[3:]
    return get_lapack_funcs((name,), (x,))[0]


def _square(x: Array) -> Array:
    if x.shape[0] != x.shape[1]:
        raise ValueError(f"a matrix of {x.shape} is not square")
    return x


@_each(2)
def _lu(call: Call, x: Array) -> Sequence[Array]:
    lu, pivots, _ = _lapack("getrf", x)(x)
    return lu, pivots, _permutation(pivots, x.shape[0])


def _permutation(pivots: Array, size: int) -> Array:
    order = np.arange(size)
    for i, p in enumerate(pivots):
        order[[i, p]] = order[[p, i]]
    return order


@_each(1)
def _pivots_to_permutation(call: Call, pivots: Array) -> Sequence[Array]:
    return (_permutation(pivots, call.params["permutation_size"]),)


@_each(2)
def _qr(call: Call, x: Array) -> Sequence[Array]:
    m, n = x.shape
    columns = call.shape(0)[-1]
    if not x.size:
        return (np.eye(m, columns), np.zeros((columns, n)), np.zeros(n))[: len(call.outputs)]
    if call.params.get("pivoting"):
        packed, order, taus, *_ = _lapack("geqp3", x)(x)
    else:
        packed, taus, *_ = _lapack("geqrf", x)(x)
        order = None
    wide = np.zeros((m, columns), x.dtype)
    wide[:, : min(n, columns)] = packed[:, : min(n, columns)]
    q = _lapack("orgqr", x)(wide, taus)[0]
    r = np.triu(packed)[:columns]
    return (q, r) if order is None else (q, r, order - 1)


@_each(2)
def _geqrf(call: Call, x: Array) -> Sequence[Array]:
    packed, taus, *_ = _lapack("geqrf", x)(x)
    return packed, taus


@_each(2, 1)
def _householder(call: Call, x: Array, taus: Array) -> Sequence[Array]:
    if not x.size or not taus.size:
        return (np.eye(*x.shape),)
    return (_lapack("orgqr", x)(x, taus)[0],)


@_each(2, 1, 2)
def _ormqr(call: Call, x: Array, taus: Array, c: Array) -> Sequence[Array]:
    side = "L" if call.params["left"] else "R"
    turned = "C" if x.dtype.kind == "c" else "T"
    trans = turned if call.params["transpose"] else "N"
    room = 64 * max(c.shape)
    return (_lapack("ormqr", x)(side, trans, x[:, : len(taus)], taus, c, room)[0],)


@_each(2)
def _svd(call: Call, x: Array) -> Sequence[Array]:
    vectors = call.params["compute_uv"]
    u, s, v, _ = _lapack("gesdd", x)(
        x, compute_uv=int(vectors), full_matrices=int(call.params["full_matrices"])
    )
    return (s, u, v) if vectors else (s,)


@_each(2)
def _eigh(call: Call, x: Array) -> Sequence[Array]:
    values, vectors, _ = _lapack("syevd", x)(_square(x), lower=int(call.params["lower"]))
    return vectors, values


@_each(2)
def _eig(call: Call, x: Array) -> Sequence[Array]:
    left = call.params["compute_left_eigenvectors"]
    right = call.params["compute_right_eigenvectors"]
    *values, vl, vr, _ = _lapack("geev", x)(_square(x), compute_vl=int(left), compute_vr=int(right))
    w = values[0] + 1j * values[1] if len(values) == 2 else values[0]
    return (w, *(_unpacked(w, v) for v, asked in ((vl, left), (vr, right)) if asked))


def _unpacked(w: Array, v: Array) -> Array:
    """LAPACK keeps the vectors of a conjugate pair as one real and one imaginary column."""
    if v.dtype.kind == "c":
        return v
    out = v.astype(np.complex128)
    for j in np.flatnonzero(w.imag > 0):
        out[:, j], out[:, j + 1] = v[:, j] + 1j * v[:, j + 1], v[:, j] - 1j * v[:, j + 1]
    return out


@_each(2)
def _schur(call: Call, x: Array) -> Sequence[Array]:
    found = _lapack("gees", x)(lambda *_: None, _square(x))
    t, vectors = found[0], found[-3]
    return (t, vectors) if call.params["compute_schur_vectors"] else (t,)


@_each(2)
def _hessenberg(call: Call, x: Array) -> Sequence[Array]:
    h, taus, _ = _lapack("gehrd", x)(_square(x))
    return h, taus


@_each(2)
def _tridiagonal(call: Call, x: Array) -> Sequence[Array]:
    a, d, e, taus, _ = _lapack("sytrd", x)(_square(x), lower=int(call.params["lower"]))
    return a, d, e, taus


@_each(1, 1, 1, 2)
def _tridiagonal_solve(call: Call, dl: Array, d: Array, du: Array, b: Array) -> Sequence[Array]:
    n = len(d)
    if not len(dl) == n == len(du) == len(b):
        raise ValueError(f"diagonals of {len(dl)}, {n}, {len(du)} and {len(b)} rows")
    full = np.diag(d) + np.diag(dl[1:], -1) + np.diag(du[: n - 1], 1)
    return (np.linalg.solve(full.astype(np.result_type(full, np.float64)), b),)


def _symmetric_product(call: Call) -> Array:
    x, c = call.operands
    p = call.params
    return p["alpha"] * (x @ np.swapaxes(x, -1, -2)) + p["beta"] * c


LINALG: dict[str, Reference] = {
    "eig": _eig,
    "eigh": _eigh,
    "geqrf": _geqrf,
    "hessenberg": _hessenberg,
    "householder_product": _householder,
    "lu": _lu,
    "lu_pivots_to_permutation": _pivots_to_permutation,
    "ormqr": _ormqr,
    "qr": _qr,
    "schur": _schur,
    "svd": _svd,
    "symmetric_product": _symmetric_product,
    "tridiagonal": _tridiagonal,
    "tridiagonal_solve": _tridiagonal_solve,
}
