"""JAX's fused attention, as a trace meets it: on machines without cuDNN, and under its own names.

`jax.nn.dot_product_attention(implementation="cudnn")` looks for cuDNN while it is traced, on the
machine that traces. A plan is made for another one, so the question is answered with yes for the
time of the trace. What stands in the trace, a primitive with nine operands of which six are usually
empty, becomes the kernel `flash_attention`, or its backward pass, wherever it is no more than that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType

#: JAX's primitive -> the kernel that it is.
KERNELS = {
    "dot_product_attention_fwd_wrapper": "flash_attention",
    "dot_product_attention_bwd_wrapper": "flash_attention_backward",
}
# Operands between v and what only the backward pass reads: bias, lengths, offsets, page tables.
_FIRST, _EXTRAS = 3, 7
#: A version whose kernels have all that JAX asks for.
_VERSION = 91000
_MASKS = ("CAUSAL", "NO_MASK")
_LOCK = threading.RLock()
_ANSWERED = threading.local()


def recognized(
    kernel: str, params: Mapping[str, Any], operands: Sequence[TensorType]
) -> tuple[str, dict[str, Any], tuple[int, ...]] | None:
    """The kernel of ours that a call of cuDNN's is, its parameters, and which operands it reads.

    None where it is another primitive, or has what the kernel lacks: a bias, lengths, dropout, a
    window, another mask, scores that a function changes, other dims than batch, rows, heads, width.
    """
    if kernel not in KERNELS:
        return None
    mask = getattr(params.get("mask_type"), "name", "")
    extras = operands[_FIRST : _FIRST + _EXTRAS]
    if (
        mask not in _MASKS
        or params.get("dropout_rate")
        or params.get("layout")
        or params.get("sliding_window_length") is not None
        or params.get("score_mod") is not None
        or any(params.get("variadic_args", ()))
        or len(extras) != _EXTRAS
        or any(t.size for t in extras)
    ):
        return None
    read = (*range(_FIRST), *range(_FIRST + _EXTRAS, len(operands)))
    plain = {"scale": float(params["scale"]), "causal": mask == "CAUSAL", "window": 0, "fill": 0.0}
    return KERNELS[kernel], plain, read


def missing_results(types: Sequence[TensorType], ours: str) -> list[TensorType]:
    """What the kernel gives beside the results of a call: a forward pass that no backward pass
    follows leaves the logarithms of the sums out."""
    if ours != "flash_attention" or len(types) > 1:
        return []
    batch, rows, heads, _ = types[0].shape
    return [TensorType((batch, heads, rows), "float32")]


@contextmanager
def available() -> Iterator[None]:
    """Within it, in this thread, JAX takes cuDNN for present where it only traces."""
    try:
        from jax._src.cudnn import fused_attention_stablehlo as cudnn
    except ImportError:  # another version of JAX
        yield
        return
    with _LOCK:
        _answer(cudnn)
    before = getattr(_ANSWERED, "now", False)
    _ANSWERED.now = True
    try:
        yield
    finally:
        _ANSWERED.now = before


def _answer(cudnn: Any) -> None:
    """Let the two checks of JAX's module ask this one first; once."""
    for name, value in (("check_cudnn_version", _VERSION), ("check_compute_capability", True)):
        own = getattr(cudnn, name, None)
        if own is None or getattr(own, "asks_tapestry_egg", False):
            continue

        def asked(*args: Any, own: Any = own, value: Any = value) -> Any:
            return value if getattr(_ANSWERED, "now", False) else own(*args)

        asked.asks_tapestry_egg = True  # type: ignore[attr-defined]
        setattr(cudnn, name, asked)
