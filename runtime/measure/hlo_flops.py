"""Flops of the products and convolutions in an HLO text."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from math import prod

import numpy as np

from .hlo_text import Computation, Instruction


def _dot_flops(computation: Computation, i: Instruction) -> float:
    left = computation.by_name[i.operands[0]].arrays[0].shape
    return 2.0 * i.arrays[0].size * prod(left[d] for d in _dims(i, "lhs_contracting_dims"))


def _convolution_flops(computation: Computation, i: Instruction) -> float:
    """2 × outputs × taps that hit the operand, not padding nor the holes of a dilation."""
    operand, kernel = (computation.by_name[o].arrays[0].shape for o in i.operands[:2])
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attributes["dim_labels"])
    assert labels is not None
    lhs, rhs, out = labels.groups()
    taps = 1
    window = _window(i)
    spatial = [c for c in out if c.isdigit()]
    for c in spatial:
        w = int(c)
        taps *= _taps(
            operand[lhs.index(c)],
            i.arrays[0].shape[out.index(c)],
            {key: values[w] for key, values in window.items()},
        )
    outputs = prod(n for n, c in zip(i.arrays[0].shape, out, strict=True) if not c.isdigit())
    return 2.0 * outputs * taps * kernel[rhs.index("i")]


def _taps(n: int, outputs: int, window: dict[str, tuple[int, int]]) -> int:
    """Pairs (output position, window position) of one dim that read one of its n elements."""

    def at(key: str, default: int) -> int:
        return window.get(key, (default, default))[0]

    start = np.arange(outputs) * at("stride", 1) - at("pad", 0)
    reads = start[:, None] + np.arange(at("size", 1)) * at("rhs_dilate", 1)
    hole = at("lhs_dilate", 1)
    return int(((reads >= 0) & (reads <= (n - 1) * hole) & (reads % hole == 0)).sum())


def _window(i: Instruction) -> dict[str, list[tuple[int, int]]]:
    """`{size=3x3 pad=1_1x1_1}` as numbers per dim; everything but padding is given twice."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, text in re.findall(r"(\w+)=([\dx_\-]+)", i.attributes.get("window", "")):
        entries = [part.split("_") for part in text.split("x")]
        found[key] = [(int(e[0]), int(e[-1])) for e in entries]
    return found


def _custom_call_flops(computation: Computation, i: Instruction) -> float:
    """Matrix products and convolutions that were handed to a library."""
    target = i.attributes.get("custom_call_target", "").strip('"')
    shapes = [a.shape for o in i.operands for a in computation.by_name[o].arrays[:1]]
    if "gemm" in target or "matmul" in target:
        dims = re.search(r'"?lhs_contracting_dim(?:ension)?s"?[:=][\[{]([^\]}]*)', i.rest)
        at = [int(d) for d in re.findall(r"\d+", dims.group(1))] if dims else [-1]
        return 2.0 * i.arrays[0].size * prod(shapes[0][d] for d in at)
    labels = re.match(r"(\w+)_(\w+)->(\w+)", i.attributes.get("dim_labels", ""))
    if "conv" in target.lower() and labels:
        # The activations on the output side, and the kernel, by what the call computes.
        result = i.arrays[0].shape
        outputs, kernel = result, shapes[1]
        if "BackwardInput" in target:
            outputs = shapes[0]
        elif "BackwardFilter" in target:
            outputs, kernel = shapes[1], result
        return 2.0 * prod(outputs) * prod(kernel) / kernel[labels.group(2).index("o")]
    return 0.0


def _dims(i: Instruction, key: str) -> Iterator[int]:
    return (int(d) for d in re.findall(r"\d+", i.attributes.get(key, "")))


#: Opcode -> the flops of one such instruction.
FLOPS: dict[str, Callable[[Computation, Instruction], float]] = {
    "dot": _dot_flops,
    "convolution": _convolution_flops,
    "custom-call": _custom_call_flops,
}
