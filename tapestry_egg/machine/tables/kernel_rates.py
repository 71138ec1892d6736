"""Kernels with rates of their own: measured flop/s by device, dtype and shape, read from tables.

A template says with `measured:` at which coordinates tables hold its kernel; those of convolutions
follow from their projections (`OperationSignature.convolved`). The first one must be as given, for
all others the nearest in the logarithm counts, and along the last one rates are interpolated in its
logarithm and end where the table does. Where no table speaks for a kernel on a device, the roofline
of its flops and bytes does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import pairwise
from math import log

import numpy as np

from tapestry_egg.errors import TargetError
from tapestry_egg.machine.tables.gemm import Amount, Convolved
from tapestry_egg.yaml_nodes import YamlNode, compose_yaml_text

#: Dtypes that run as another one does.
_LIKE = {"float16": "bfloat16", "uint32": "int32"}


@dataclass(frozen=True, slots=True)
class Rate:
    """Flop/s of a kernel on some devices, for operands of one dtype, at the given coordinates."""

    devices: tuple[str, ...]
    dtype: str
    at: tuple[float, ...]
    flops: float


def kernel_rate(kernel: str, at: Sequence[float] | None, dtype: str, device: str) -> float | None:
    """Measured flop/s of a kernel at some coordinates; None where no table holds it."""
    if at is None:
        return None
    return _rate(kernel, tuple(at), _LIKE.get(dtype, dtype), device)


def convolution_rate(convolved: Convolved[Amount], dtype: str, device: str) -> Amount | None:
    """Measured flop/s of convolutions of so many channels; None where no table holds them."""
    forms, channels = convolved.form, convolved.channels
    if not isinstance(channels, np.ndarray):
        return _convolution_rate(float(forms), float(channels), dtype, device)
    pairs, back = np.unique(np.stack([forms, channels]), axis=1, return_inverse=True)
    rates = [_convolution_rate(f, c, dtype, device) for f, c in pairs.T.tolist()]
    known = [r for r in rates if r is not None]
    if len(known) < len(rates):
        return None
    out: Amount = np.array(known)[back.reshape(-1)]
    return out


def _convolution_rate(form: float, channels: float, dtype: str, device: str) -> float | None:
    """Of a form of which nothing was measured in a dtype the rate of the one that it is a kind of:
    groups along one dim run as groups do."""
    found = kernel_rate("convolution", (form, channels), dtype, device)
    return found or (
        kernel_rate("convolution", (2.0, channels), dtype, device) if form > 3 else None
    )


def has_rates(kernel: str) -> bool:
    """Whether a kernel is a library's own somewhere."""
    return kernel in _shipped()


@cache
def _rate(kernel: str, at: tuple[float, ...], dtype: str, device: str) -> float | None:
    rows = [
        r
        for r in _shipped().get(kernel, ())
        if device in r.devices and r.dtype == dtype and len(r.at) == len(at)
    ]
    rows = [r for r in rows if not at or r.at[0] == at[0]]
    for k in range(1, len(at) - 1):
        nearest = min((abs(log(r.at[k] / at[k])) for r in rows), default=0.0)
        rows = [r for r in rows if abs(log(r.at[k] / at[k])) == nearest]
    return _interpolated(sorted((r.at[-1], r.flops) for r in rows), at[-1]) if rows else None


def _interpolated(points: Sequence[tuple[float, float]], at: float) -> float:
    """Linear in the logarithm of the place; the first and last value beyond the ends."""
    for (low, a), (high, b) in pairwise(points):
        if low <= at <= high:
            share = (log(at) - log(low)) / (log(high) - log(low))
            return a + share * (b - a)
    return points[0][1] if at < points[0][0] else points[-1][1]


@cache
def _shipped() -> Mapping[str, tuple[Rate, ...]]:
    found: dict[str, tuple[Rate, ...]] = {}
    folder = resources.files("tapestry_egg.machine") / "kernels"
    for file in sorted(folder.iterdir(), key=lambda f: f.name):
        if file.name.endswith(".yaml"):
            for kernel, rates in _read(file.read_text("utf-8"), f"kernels/{file.name}").items():
                found[kernel] = found.get(kernel, ()) + rates
    return found


def _read(text: str, file: str) -> Mapping[str, tuple[Rate, ...]]:
    root = compose_yaml_text(text, TargetError, file)
    if root is None:
        return {}

    def row(node: YamlNode) -> Rate:
        given = node.fields("a row", ("devices", "dtype", "at", "flops"))
        places = given["at"].items()
        at = tuple(x.number(zero=not k) for k, x in enumerate(places))
        dtype, flops = given["dtype"].text(), given["flops"].number()
        return Rate(given["devices"].texts(), dtype, at, flops)

    return {
        kernel: tuple(row(x) for x in node.items())
        for kernel, node in root.mapping("kernels with their rates").items()
    }
