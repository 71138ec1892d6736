"""Contractions as products of matrices: batch, m, n and k by the projections alone."""

from __future__ import annotations

from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.metakernels.registry import signature_of
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate
from tapestry_egg.schedule.one_device import program_seconds
from tests.metakernels.cases import CASES, application
from tests.metakernels.contractions import gemm_of, is_contraction

SEEDS = st.integers(0, 2**32)


def signatures(function: object, *shapes: tuple[int, ...]) -> list[OperationSignature]:
    """Signatures of the contractions of a function of float32 arrays."""
    program = te.trace(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    graph = program.graph
    found = []
    for op in graph.operations:
        types = [tuple(graph.values[v] for v in vs) for vs in (op.inputs, op.outputs)]
        found.append(signature_of(op, types[0], types[1]))
    return [s for s in found if s.contracts]


@given(SEEDS)
def test_a_dot_is_the_product_that_its_dimension_numbers_say(seed: int) -> None:
    s = application("dot_general", seed).signature
    if not s.contracts:
        return  # an outer product sums nothing
    assert s.gemm is not None
    batch, m, n, k = s.gemm.shape(s.extents)
    x, w, out = s.input_types[0], s.input_types[1], s.output_types[0]
    assert batch * m * k == x.size
    assert batch * k * n == w.size
    assert batch * m * n == out.size


@pytest.mark.parametrize("groups", [1, 4])
def test_a_convolution_is_its_implicit_product(groups: int) -> None:
    def f(x, w):  # type: ignore[no-untyped-def]
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x, w, (2, 2), "VALID", dimension_numbers=numbers, feature_group_count=groups
        )

    (s,) = signatures(f, (5, 17, 9, 8), (3, 3, 8 // groups, 12))
    assert s.gemm is not None
    assert s.gemm.shape(s.extents) == (groups, 5 * 8 * 4, 12 // groups, 9 * 8 // groups)


def test_both_gradients_of_a_convolution_are_products_of_as_many_flops() -> None:
    def loss(x, w):  # type: ignore[no-untyped-def]
        return lax.conv(x, w, (1, 1), "VALID").sum()

    found = signatures(jax.grad(loss, (0, 1)), (4, 8, 10, 10), (16, 8, 3, 3))
    assert len(found) == 2
    for s in found:
        assert s.gemm is not None
        assert 2.0 * prod(s.gemm.shape(s.extents)) == evaluate(s.flops, s.extents)


def test_a_kernel_of_two_products_is_not_one() -> None:
    for seed in range(20):
        app = application("exp_dot", seed)
        (_, summed), (_, batch) = app.params["values"]
        if app.params["scores"][0][0] and app.input_types[3].rank > len(summed) + len(batch):
            assert app.signature.contracts
            assert app.signature.gemm is None


@pytest.mark.parametrize("kernel", CASES)
def test_another_account_finds_the_same_product(kernel: str) -> None:
    for seed in range(4):
        s = application(kernel, seed).signature
        assert s.contracts == (s.fusion == "kernel" and is_contraction(s))
        if not s.contracts:
            continue
        again = gemm_of(s, s.extents)
        if s.gemm is None:
            assert again is None
            continue
        assert again is not None
        assert (again.batch, again.m, again.n, again.k) == s.gemm.shape(s.extents)
        windows, found = s.convolved(s.extents), again.convolved
        assert (windows is None) == (found is None)
        if windows and found:
            assert (found.form, found.channels, found.padded) == pytest.approx(windows)
        assert again.lhs == s.input_types[s.gemm.lhs].dtype
        assert again.rhs == s.input_types[s.gemm.rhs].dtype


def test_a_product_runs_at_the_rate_of_its_operands() -> None:
    """Sums kept in float32 do not make a product of bfloat16 one of float32."""
    h100 = load_target("h100:1")
    seconds = []
    for kept in (jnp.bfloat16, jnp.float32):
        x = jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)
        kept_in = partial(jnp.dot, preferred_element_type=kept)
        seconds.append(program_seconds(te.trace(kept_in, x, x).graph, h100))
    assert seconds[1] == pytest.approx(seconds[0], rel=0.01)


def test_dots_and_convolutions_are_all_that_multiply_two_operands() -> None:
    drawn = [(k, application(k, n).signature) for k in CASES for n in range(4)]
    # A log-sum-exp of one class is a product, too.
    some = [(k, s) for k, s in drawn if k != "dot_logsumexp" or s.gemm is None or s.gemm.n]
    assert {k for k, s in some if s.multiplies} == {"dot_general", "conv_general_dilated"}
    assert all(bool(s.straight) == ("conv" in k) for k, s in some if s.multiplies)
    assert {k for k, s in drawn if s.gemm and len(s.inputs) == 2 and not s.multiplies} == {
        "dot_logsumexp"
    }


def test_an_outer_product_is_no_product_of_matrices() -> None:
    """XLA multiplies it element by element."""
    program = te.trace(
        lambda x, y: lax.dot_general(x, y, (((), ()), ((0,), (0,)))),
        *(jax.ShapeDtypeStruct((8, n), jnp.float32) for n in (4, 2)),
    )
    (op,) = program.graph.operations
    types = [tuple(program.graph.values[v] for v in vs) for vs in (op.inputs, op.outputs)]
    assert op.kernel == "dot_general"
    assert not signature_of(op, types[0], types[1]).multiplies
