"""Kernels in blocks of scores: what was measured of them, and where they are one kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.machine.target import load_target
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.runtime.lower.kernels.streaming import _Scores
from tapestry_egg.schedule.one_device import block_work, least_seconds

PRODUCT = (((1,), (0,)), ((), ()))
HEADS = (((2,), (2,)), ((0,), (0,)))
TOKENS, WIDTH, WORDS = 32768, 512, 8192


def signature(
    kernel: str,
    params: Mapping[str, Any],
    inputs: Sequence[tuple[int, ...]],
    output: tuple[int, ...],
    dtype: str = "float32",
) -> OperationSignature:
    types = [TensorType(shape, dtype) for shape in inputs]
    return registry.signature(
        kernel, {**params, "dtype": dtype}, types, [TensorType(output, dtype)]
    )


def logarithm() -> OperationSignature:
    """Of the sum of exponentials of 8192 words, as LoRA of `benchmarks/bench_device.py` has it."""
    params = {"scores": PRODUCT, "axes": (1,)}
    return signature("dot_logsumexp", params, [(TOKENS, WIDTH), (WIDTH, WORDS)], (TOKENS,))


def gradient() -> OperationSignature:
    """Of the same, by what the words are scored of."""
    values = (((1,), (1,)), ((), ()))
    params = {"scores": PRODUCT, "shift": (0,), "values": values, "swapped": 0}
    inputs = [(TOKENS, WIDTH), (WIDTH, WORDS), (TOKENS,), (WIDTH, WORDS)]
    return signature("exp_dot", params, inputs, (TOKENS, WIDTH))


def attention(dtype: str = "float32") -> OperationSignature:
    """64 sequences of 512 rows in 8 heads."""
    params = {"scores": HEADS, "values": (((2,), (1,)), ((0,), (0,))), "swapped": 0}
    return signature("attention", params, [(512, 512, 64)] * 3, (512, 512, 64), dtype)


@pytest.mark.parametrize(
    ("made", "milliseconds"), [(logarithm, 1.96), (gradient, 4.95), (attention, 1.18)]
)
def test_an_h100_takes_what_was_measured(made: Any, milliseconds: float) -> None:
    """JAX's profiler, a step of LoRA in float32 (benchmarks/README.md)."""
    found = 1e3 * least_seconds(made(), load_target("h100:1"))
    assert found == pytest.approx(milliseconds, rel=0.15)


@pytest.mark.parametrize("target", ["v5e:1", "cpu:1"])
@pytest.mark.parametrize("made", [logarithm, gradient, attention])
def test_elsewhere_blocks_stay_where_they_are_made(made: Any, target: str) -> None:
    found = made()
    assert block_work(found, found.extents, load_target(target)) == (0.0, 0.0)


def test_what_cudnn_has_is_one_kernel() -> None:
    h100 = load_target("h100:1")
    found = attention("bfloat16")
    assert block_work(found, found.extents, h100) == (0.0, 0.0)
    assert least_seconds(found, h100) < 0.1 * least_seconds(attention(), h100)


def test_half_of_the_tokens_take_half_as_long() -> None:
    h100, found = load_target("h100:1"), gradient()
    half = tuple(n // 2 if n == TOKENS else n for n in found.extents)
    whole = block_work(found, found.extents, h100)[0]
    assert block_work(found, half, h100)[0] == pytest.approx(whole / 2)


@pytest.mark.parametrize("shape", [(TOKENS, WIDTH, WORDS), (96, 64, 5000), (8, 4, 1 << 20)])
def test_blocks_are_those_that_run(shape: tuple[int, int, int]) -> None:
    tokens, width, words = shape
    params = {"scores": PRODUCT, "axes": (1,)}
    found = signature("dot_logsumexp", params, [(tokens, width), (width, words)], (tokens,))
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((tokens, width), (width, words)))
    runs = _Scores(x, w, PRODUCT).along((1,))  # type: ignore[arg-type]
    assert found.scratch is not None
    dim, size = found.scratch.block(found.extents)
    assert (found.extents[dim], size) == (runs.extent, runs.size)
