"""NumPy implementations of contractions, reductions, scans, windows and decompositions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np

from .call import Array, Call, Reference, wide, zero
from .movement import pad

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def dot(
    lhs: Array, rhs: Array, contract: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]
) -> Array:
    """A product as dot_general does it: batch dims, then the free dims of either side."""
    left = list(_LETTERS[: lhs.ndim])
    right = list(_LETTERS[lhs.ndim : lhs.ndim + rhs.ndim])
    for a, b in (*zip(*contract, strict=True), *zip(*batch, strict=True)):
        right[b] = left[a]
    shared = [left[a] for a in batch[0]]
    summed = [left[a] for a in contract[0]]
    free = [x for x in left + right if x not in shared + summed]
    # A contracted letter occurs twice, a free one once.
    out = shared + [x for k, x in enumerate(free) if x not in free[:k]]
    return np.asarray(np.einsum(f"{''.join(left)},{''.join(right)}->{''.join(out)}", lhs, rhs))


def _dot_general(call: Call) -> Array:
    contract, batch = call.params["dimension_numbers"]
    lhs, rhs = (_at_least(wide(x), call.dtype()) for x in call.operands)
    return dot(lhs, rhs, contract, batch)


def _at_least(x: Array, dtype: np.dtype[Any]) -> Array:
    """Integers accumulate in the output's width."""
    return x.astype(dtype) if x.dtype.kind in "biu" and dtype.kind in "iu" else x


def _ragged_dot(call: Call) -> Array:
    lhs, rhs = (_at_least(wide(x), call.dtype()) for x in call.operands[:2])
    sizes = [int(n) for n in call.operands[2]]
    dims = call.params["ragged_dot_dimension_numbers"]
    contract, batch = dims["dot_dimension_numbers"]
    ragged = dims["lhs_ragged_dimensions"][0]
    groups = dims["rhs_group_dimensions"]
    end = np.cumsum([0, *sizes])
    if ragged in contract[0]:
        other = contract[1][contract[0].index(ragged)]
        return np.stack(
            [
                dot(
                    np.take(lhs, range(a, b), ragged),
                    np.take(rhs, range(a, b), other),
                    contract,
                    batch,
                )
                for a, b in pairwise(end)
            ]
        )
    dropped = [d - sum(g < d for g in groups) for d in (*contract[1], *batch[1])]
    inner = (contract[0], dropped[: len(contract[1])])
    outer = (batch[0], dropped[len(contract[1]) :])
    free = [d for d in range(lhs.ndim) if d not in (*contract[0], *batch[0])]
    axis = len(batch[0]) + free.index(ragged)
    parts = [
        dot(np.take(lhs, range(a, b), ragged), np.take(rhs, g, groups[0]), inner, outer)
        for g, (a, b) in enumerate(pairwise(end))
    ]
    rest = np.zeros_like(
        dot(
            np.take(lhs, range(end[-1], lhs.shape[ragged]), ragged),
            np.take(rhs, 0, groups[0]),
            inner,
            outer,
        )
    )
    return np.concatenate([*parts, rest], axis)


def _conv(call: Call) -> Array:
    p, spec = call.local, call.params["dimension_numbers"]
    x, y = (_at_least(wide(x), call.dtype()) for x in call.operands)
    lhs, rhs = np.transpose(x, spec["lhs_spec"]), np.transpose(y, spec["rhs_spec"])
    space = range(lhs.ndim - 2)
    lhs = pad(lhs, (1, 1, *p["lhs_dilation"]), ((0, 0), (0, 0), *p["padding"]), 0)
    channels, batches = p["feature_group_count"], p["batch_group_count"]
    reach = [(rhs.shape[2 + d] - 1) * p["rhs_dilation"][d] + 1 for d in space]
    size = [max(0, (lhs.shape[2 + d] - reach[d]) // p["window_strides"][d] + 1) for d in space]
    out = np.zeros((lhs.shape[0] // batches, rhs.shape[0], *size), lhs.dtype)
    outer, inner = rhs.shape[0] // (channels * batches), rhs.shape[1]
    for group in range(channels * batches):
        g, h = (group, 0) if batches == 1 else (0, group)
        mine = slice(group * outer, (group + 1) * outer)
        rows = slice(h * out.shape[0], (h + 1) * out.shape[0])
        read = lhs[rows, g * inner : (g + 1) * inner]
        for w in np.ndindex(*rhs.shape[2:]):
            at = tuple(
                slice(w[d] * p["rhs_dilation"][d], None, p["window_strides"][d]) for d in space
            )
            seen = read[(slice(None), slice(None), *at)]
            seen = seen[(slice(None), slice(None), *(slice(n) for n in size))]
            out[:, mine] += np.einsum("nk...,ok->no...", seen, rhs[(mine, slice(None), *w)])
    return np.transpose(out, np.argsort(spec["out_spec"]))


def _reduction(function: Callable[..., Any]) -> Reference:
    def apply(call: Call) -> Array:
        x = wide(call.operands[0])
        axes = tuple(call.params["axes"])
        return np.asarray(function(x, axis=axes)) if axes else x

    return apply


def _exact(function: Any) -> Callable[..., Any]:
    # NumPy widens sums of narrow integers; theirs wrap in their own width.
    def apply(x: Array, axis: tuple[int, ...]) -> Array:
        return np.asarray(function.reduce(x, axis=axis, dtype=x.dtype))

    return apply


def _extreme(function: Callable[..., Any], monoid: str) -> Reference:
    """Of nothing at all, the neutral element."""

    def apply(call: Call) -> Array:
        x, axes = wide(call.operands[0]), tuple(call.params["axes"])
        if not axes:
            return x
        if any(x.shape[d] == 0 for d in axes):
            return np.full(call.shape(), zero(monoid, call.dtype()))
        return np.asarray(function(x, axis=axes))

    return apply


def _arg(function: Callable[..., Any]) -> Reference:
    return lambda call: function(call.operands[0], axis=call.params["axes"][0])


def _scan(function: Any) -> Reference:
    def apply(call: Call) -> Array:
        x, axis = wide(call.operands[0]), call.params["axis"]
        if not call.params.get("reverse"):
            return np.asarray(function.accumulate(x, axis=axis, dtype=x.dtype))
        back = function.accumulate(np.flip(x, axis), axis=axis, dtype=x.dtype)
        return np.flip(back, axis)

    return apply


def _sort(call: Call) -> tuple[Array, ...]:
    axis, keys = call.params["dimension"], call.params["num_keys"]
    # In 16 bits NumPy does not know that NaN comes last.
    order = np.lexsort(tuple(wide(x) for x in reversed(call.operands[:keys])), axis=axis)
    return tuple(np.take_along_axis(x, order, axis) for x in call.operands)


def _top_k(call: Call) -> tuple[Array, Array]:
    x, k = call.operands[0], call.params["k"]
    axis = call.params.get("axis", -1) % x.ndim
    # The greatest first, of equals the first: the last of those sorted from the back.
    back = np.argsort(np.flip(wide(x), axis), axis=axis, kind="stable")
    order = x.shape[axis] - 1 - np.flip(back, axis)
    best = np.take(order, range(k), axis)
    return np.take_along_axis(x, best, axis), best


def _reduce_window(function: Any, least: str) -> Reference:
    def apply(call: Call) -> Array:
        p, x = call.local, wide(call.operands[0])
        kept = call.operands[0].dtype
        fill: Any = 0
        if least:
            ends = np.iinfo(kept) if kept.kind in "iu" else None
            bounds = (ends.min, ends.max) if ends else (-np.inf, np.inf)
            fill = bounds[least == "max"]
        x = pad(x, p["base_dilation"], p["padding"], fill)
        strides, dilation = p["window_strides"], p["window_dilation"]
        out: Any = None
        for w in np.ndindex(*p["window_dimensions"]):
            at = tuple(
                slice(w[d] * dilation[d], w[d] * dilation[d] + (n - 1) * strides[d] + 1, strides[d])
                for d, n in enumerate(call.shape())
            )
            out = x[at] if out is None else function(out, x[at])
        return np.asarray(out)

    return apply


def _select_and_scatter_add(call: Call) -> Array:
    source, operand = map(wide, call.operands)
    p = call.local
    better = np.greater_equal if p["select_prim"] == "ge" else np.less_equal
    out = np.zeros_like(operand)
    for at in np.ndindex(*source.shape):
        best: tuple[int, ...] | None = None
        ranges = []
        for d, i in enumerate(at):
            low = i * p["window_strides"][d] - p["padding"][d][0]
            ranges.append(
                range(max(0, low), min(operand.shape[d], low + p["window_dimensions"][d]))
            )
        for place in product(*ranges):
            if best is None or not better(operand[best], operand[place]):
                best = place
        if best is not None:
            out[best] += source[at]
    # Windows that reach into the tiles of a shard reach out of them too.
    ends = zip(call.outputs[0].start, call.inputs[1].start, call.shape(), strict=True)
    return out[tuple(slice(t - s, t - s + n) for t, s, n in ends)]


def _fft(call: Call) -> Array:
    x, lengths = wide(call.operands[0]), call.params["fft_lengths"]
    axes = tuple(range(x.ndim - len(lengths), x.ndim))
    functions: dict[str, Callable[..., Any]] = {
        "FFT": np.fft.fftn,
        "IFFT": np.fft.ifftn,
        "RFFT": np.fft.rfftn,
        "IRFFT": np.fft.irfftn,
    }
    return np.asarray(functions[call.params["fft_type"]](x, s=lengths, axes=axes))


def _cholesky(call: Call) -> Array:
    lower = np.tril(wide(call.operands[0]))
    strict = np.tril(lower, -1)
    return np.linalg.cholesky(lower + np.conj(np.swapaxes(strict, -1, -2)))


def _triangular_solve(call: Call) -> Array:
    a, b = map(wide, call.operands)
    p = call.params
    a = np.tril(a) if p["lower"] else np.triu(a)
    if p["unit_diagonal"]:
        n = a.shape[-1]
        a = a * (1 - np.eye(n)) + np.eye(n)
    a = np.conj(a) if p["conjugate_a"] else a
    a = np.swapaxes(a, -1, -2) if p["transpose_a"] else a
    if p["left_side"]:
        return np.linalg.solve(a, b)
    return np.swapaxes(np.linalg.solve(np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2)), -1, -2)


ALGEBRA: dict[str, Reference] = {
    "argmax": _arg(np.argmax),
    "argmin": _arg(np.argmin),
    "cholesky": _cholesky,
    "conv_general_dilated": _conv,
    "cumlogsumexp": _scan(np.logaddexp),
    "cummax": _scan(np.maximum),
    "cummin": _scan(np.minimum),
    "cumprod": _scan(np.multiply),
    "cumsum": _scan(np.add),
    "dot_general": _dot_general,
    "fft": _fft,
    "psum": _reduction(_exact(np.add)),
    "ragged_dot_general": _ragged_dot,
    "reduce_and": _reduction(_exact(np.bitwise_and)),
    "reduce_max": _extreme(np.max, "max"),
    "reduce_min": _extreme(np.min, "min"),
    "reduce_or": _reduction(_exact(np.bitwise_or)),
    "reduce_prod": _reduction(_exact(np.multiply)),
    "reduce_sum": _reduction(_exact(np.add)),
    "reduce_window_max": _reduce_window(np.maximum, "min"),
    "reduce_window_min": _reduce_window(np.minimum, "max"),
    "reduce_window_sum": _reduce_window(np.add, ""),
    "reduce_xor": _reduction(_exact(np.bitwise_xor)),
    "select_and_scatter_add": _select_and_scatter_add,
    "sort": _sort,
    "top_k": _top_k,
    "triangular_solve": _triangular_solve,
}
