"""Whether JAX has an operation, as far as templates take it for granted.

Templates are written for operations of programs that were traced. Those that are made up, or whose
parameters a rule fixes, need not be such: a slice beyond the end of a tensor is none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry

from .contractions import agrees, convolves


def jax_takes(kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]) -> bool:
    """Whether JAX has such an operation, as far as templates take it for granted."""
    if kernel == "dot_general":
        return agrees(params, *inputs)
    if kernel == "conv_general_dilated":
        return convolves(params, *inputs)
    if kernel == "dynamic_update_slice" and not _holds_update(*inputs[:2]):
        return False
    if kernel in _MOVES and not _MOVES[kernel](params, inputs[0].shape):
        return False
    axes = _axes(kernel, params)
    if not _distinct(axes, inputs[0].rank if inputs else 0):
        return False
    if kernel in ("argmax", "argmin") and any(not inputs[0].shape[d] for d in axes):
        return False  # of nothing there is no greatest one
    return registry.takes(kernel, params, inputs)


def _axes(kernel: str, params: Mapping[str, Any]) -> Sequence[int]:
    """The dims of its operand that an operation names."""
    if kernel in ("rev", "squeeze"):
        return tuple(params["dimensions"])
    if kernel in ("concatenate", "sort"):
        return (params["dimension"],)
    if kernel.startswith("cum"):
        return (params["axis"],)
    if kernel.startswith(("reduce_", "arg")) or kernel in ("softmax", "logsumexp"):
        return tuple(params.get("axes", ()))
    return ()


def _distinct(dims: Sequence[int], rank: int) -> bool:
    """Whether some numbers are dims of a tensor of this rank, each once."""
    return len(set(dims)) == len(dims) and all(0 <= d < rank for d in dims)


def _cuts(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a slice lies inside of a tensor, along every dim."""
    begin, end = params["start_indices"], params["limit_indices"]
    steps = params.get("strides") or [1] * len(shape)
    if not len(begin) == len(end) == len(steps) == len(shape):
        return False
    inside = all(0 <= a <= b <= n for a, b, n in zip(begin, end, shape, strict=True))
    return inside and min(steps, default=1) > 0


def _turns(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether every dim has one new place."""
    return sorted(params["permutation"]) == list(range(len(shape)))


def _reshapes(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a reshape holds as many elements as its operand."""
    return prod(params["new_sizes"]) == prod(shape)


def _squeezes(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether what is dropped are dims of one element."""
    return all(0 <= d < len(shape) and shape[d] == 1 for d in params["dimensions"])


def _holds_update(x: TensorType, update: TensorType) -> bool:
    """Whether a tensor is as large as what is written into it, which templates take for granted."""
    pairs = zip(x.shape, update.shape, strict=False)
    return x.rank == update.rank and x.dtype == update.dtype and all(n >= k for n, k in pairs)


def _stretches(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether every extent is stretched to itself, or from 1, as JAX asks."""
    to, at = params["shape"], params["broadcast_dimensions"]
    if len(at) != len(shape) or any(not 0 <= d < len(to) for d in at):
        return False
    return all(n in (1, to[d]) for n, d in zip(shape, at, strict=True))


_MOVES: Mapping[str, Callable[[Mapping[str, Any], Sequence[int]], bool]] = {
    "broadcast_in_dim": _stretches,
    "slice": _cuts,
    "transpose": _turns,
    "reshape": _reshapes,
    "squeeze": _squeezes,
}
