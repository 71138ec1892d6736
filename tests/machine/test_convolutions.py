"""Convolutions at the rates that were measured of as many channels."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.tables.gemm import Convolved
from tapestry_egg.machine.tables.kernel_rates import convolution_rate
from tapestry_egg.machine.target import load_target
from tapestry_egg.metakernels.signatures.signature import evaluate
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.one_device import program_seconds

CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


def convolution(
    dtype: str, batch: int, size: int, read: int, made: int, window: int, stride: int = 1
) -> tuple[Callable[..., jax.Array], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """`batch` square images of `size`, and the shapes of its two arguments."""

    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        strides = (stride, stride)
        return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=CHANNELS_LAST)

    image = jax.ShapeDtypeStruct((batch, size, size, read), dtype)
    return apply, image, jax.ShapeDtypeStruct((window, window, read, made), dtype)


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        (("bfloat16", 334, 56, 64, 128, 3, 2), 184e-6),
        (("float32", 167, 56, 64, 128, 3, 2), 182e-6),
        (("bfloat16", 64, 224, 3, 64, 7, 2), 492e-6),
        (("bfloat16", 334, 56, 32, 128, 3), 182e-6),
        (("float32", 167, 56, 32, 128, 3), 167e-6),
    ],
)
def test_convolutions_that_no_table_has_take_what_they_took(
    arguments: tuple[str, int, int, int, int, int, int], measured: float
) -> None:
    """On one H100, JAX 0.11.2. Where a stride of 2 has nothing to pad on one side, XLA pads the
    image by a kernel of its own: more than half of the time of the first two."""
    f, *types = convolution(*arguments)
    planned = program_seconds(te.trace(f, *types).graph, load_target("h100:1"))
    assert planned == pytest.approx(measured, rel=0.2)


def test_few_channels_are_slow() -> None:
    """The tables' products have 256 columns at least; one of 8 would take a twentieth of this."""
    f, *types = convolution("bfloat16", 1024, 56, 8, 8, 3)
    planned = program_seconds(te.trace(f, *types).graph, load_target("h100:1"))
    assert planned == pytest.approx(346e-6, rel=0.05)  # measured


def test_rates_are_of_the_channels_of_a_device() -> None:
    channels = np.array([64.0, 8.0, 64.0])
    rates = convolution_rate(Convolved(channels * 0, channels, channels * 0), "bfloat16", "h100")
    assert rates is not None
    assert rates[0] == rates[2] > 10 * rates[1]
    one = convolution_rate(Convolved(0.0, 8.0, 0.0), "bfloat16", "h100")
    assert one == rates[1]
    assert convolution_rate(Convolved(0.0, 8.0, 0.0), "bfloat16", "a100") is None
    assert convolution_rate(Convolved(channels * 0, channels, channels), "bfloat16", "v5e") is None


def test_a_gradient_of_a_strided_convolution_multiplies_as_much_as_that() -> None:
    """Nothing is multiplied between the elements of what is dilated."""
    f, x, w = convolution("float32", 4, 16, 8, 8, 4, 2)

    def gradient(w: jax.Array, g: jax.Array) -> jax.Array:
        (found,) = jax.linear_transpose(lambda x: f(x, w), x)(g)
        return found

    def flops(graph: te.Program) -> float:
        (s,) = (i.signature for i in flatten(graph.graph, {}).instances if i.signature.contracts)
        assert s.gemm is not None
        assert s.convolved(s.extents) is not None
        return evaluate(s.flops, s.extents)

    forward = flops(te.trace(f, x, w))
    assert forward == 2.0 * 4 * 8 * 8 * 8 * 8 * 16
    assert flops(te.trace(gradient, w, jax.eval_shape(f, x, w))) == forward


def test_plans_take_on_each_device_what_its_channels_take() -> None:
    """The search has the certificate's seconds, which finds windows and channels itself."""
    f, *types = convolution("bfloat16", 64, 56, 8, 8, 3)
    settings = te.Settings(work=0.1, recompute=0, forms=0, workers=1)
    front = te.optimize(te.trace(f, *types), "h100:8", settings=settings)
    (part,) = [p for p in front.best().costs_by("kernel").parts if "conv_general_dilated" in p.name]
    rate = convolution_rate(Convolved(0.0, 8.0, 0.0), "bfloat16", "h100")
    assert rate is not None
    launch = load_target("h100:8").launch_seconds
    assert part.seconds == pytest.approx(2.0 * 8 * 56 * 56 * 8 * 8 * 9 / rate + launch, rel=0.05)
