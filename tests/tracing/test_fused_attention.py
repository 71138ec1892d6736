"""Programs that ask JAX for cuDNN's attention, planned and run where there is none."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.graph.layout import Layout
from tapestry_egg.metakernels import registry
from tapestry_egg.runtime.lower.kernels.attention import (
    flash_attention,
    flash_attention_backward,
    flash_attention_backward_p,
    flash_attention_p,
)
from tapestry_egg.tracing.fused_attention import recognized
from tests.plans.plans import plan_by_hand
from tests.runtime.lowered import MESH, Y, check, numbers

Arrays = tuple[jax.Array, ...]


def operands(groups: int = 4) -> Arrays:
    rng = np.random.default_rng(0)
    shapes = [(4, 16, 8, 8), (4, 16, groups, 8), (4, 16, groups, 8)]
    return tuple(jnp.asarray(rng.normal(size=s), jnp.bfloat16) for s in shapes)


def loss(q: Any, k: Any, v: Any, implementation: str = "cudnn") -> Any:
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
    return jnp.mean(jnp.square(out.astype(jnp.float32)))


def step(q: Any, k: Any, v: Any) -> Any:
    return jax.value_and_grad(loss, (0, 1, 2))(q, k, v)


def kernels(program: te.Program) -> list[str]:
    return [op.kernel for op in program.graph.operations if op.kernel.startswith("flash")]


@pytest.mark.slow
@pytest.mark.parametrize("groups", [8, 4])
def test_it_is_two_kernels_that_run_anywhere(groups: int) -> None:
    xs = operands(groups)
    program = te.trace(step, *xs)
    assert kernels(program) == ["flash_attention", "flash_attention_backward"]
    ours = program(*xs)
    theirs = jax.value_and_grad(lambda *a: loss(*a, implementation="xla"), (0, 1, 2))(*xs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


@pytest.mark.slow
def test_a_forward_pass_alone() -> None:
    xs = operands()
    program = te.trace(loss, *xs)
    assert kernels(program) == ["flash_attention"]
    np.testing.assert_allclose(program(*xs), loss(*xs, implementation="xla"), rtol=0.02)


@pytest.mark.parametrize("causal", [True, False])
def test_batch_heads_and_rows_are_cut(causal: bool) -> None:
    """Gradients of keys sum over the heads of a group, and over rows; under a causal mask a block
    of rows must know its place."""
    graph = te.trace(step, *operands()).graph
    forward, backward = (op for op in graph.operations if op.kernel.startswith("flash"))

    def cut(op: Operation) -> dict[str, str]:
        types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
        found = registry.signature(op.kernel, {**op.params, "causal": causal}, *types)
        assert [found.index[d].name for d in found.placed] == ["t"] * causal
        return {d.name: d.role for d in found.index if d.role != "whole"}

    assert cut(forward) == {"b": "map", "g": "map", "r": "map", "t": "map"}
    assert cut(backward) == {"b": "map", "g": "map", "r": "reduce", "t": "reduce"}


@pytest.mark.slow
def test_a_plan_of_it_gives_its_numbers() -> None:
    xs = operands()
    settings = te.Settings(work=0.1, forms=0, recompute=0)
    front = te.optimize(te.trace(step, *xs), "cpu:4", settings=settings)
    run = te.compile(front.best("peak_bytes"))
    for a, b in zip(
        jax.tree.leaves(run(*xs)), jax.tree.leaves(te.trace(step, *xs)(*xs)), strict=True
    ):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= 0.02 * np.abs(b).max()


def test_without_a_trace_jax_is_as_it_was() -> None:
    te.trace(loss, *operands())
    with pytest.raises(Exception, match=r"[cC]u[dD][nN][nN]|compute"):
        loss(*operands())


def test_what_the_kernel_lacks_stays_jaxs_own() -> None:
    def biased(q: Any, k: Any, v: Any) -> Any:
        bias = jnp.zeros((1, 8, 16, 16), jnp.bfloat16)
        return jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn")

    program = te.trace(biased, *operands())
    assert kernels(program) == []
    assert program.graph.operations


def test_scores_that_a_function_changes_are_not_the_kernels() -> None:
    """JAX has them from 0.12 on."""
    rows, none = TensorType((2, 16, 4, 8), "bfloat16"), TensorType((0,), "bfloat16")
    params = {"mask_type": SimpleNamespace(name="NO_MASK"), "scale": 1.0}
    kernel, operands = "dot_product_attention_fwd_wrapper", [rows] * 3 + [none] * 7
    assert recognized(kernel, params | {"score_mod": None}, operands) is not None
    assert recognized(kernel, params | {"score_mod": jnp.tanh}, operands) is None


@pytest.mark.parametrize("dtypes", [("bfloat16",) * 3, ("float32", "float16", "bfloat16")])
@pytest.mark.parametrize("flags", [None, "bool", "float32"])
def test_the_types_of_results_are_those_that_the_blocks_give(
    dtypes: tuple[str, ...], flags: str | None
) -> None:
    """They are told without a trace of the blocks."""
    params = {"scale": 0.35, "causal": True, "window": 0, "fill": 0.0}
    shapes = (2, 256, 4, 8), (2, 192, 2, 8), (2, 192, 2, 8)
    given = [jax.ShapeDtypeStruct(s, t) for s, t in zip(shapes, dtypes, strict=True)]
    mask = [jax.ShapeDtypeStruct((2, 4, 256, 192), flags)] if flags else []

    def same(primitive: Any, run: Any, *operands: Any) -> list[Any]:
        told = jax.eval_shape(partial(primitive.bind, **params), *operands)
        made = jax.eval_shape(partial(run, **params), *operands)
        assert [(x.shape, x.dtype) for x in told] == [(x.shape, x.dtype) for x in made]
        return told

    out, stats = same(flash_attention_p, flash_attention, *given, *mask)
    gradient = flash_attention_backward_p, flash_attention_backward
    same(*gradient, *given, stats, out, out, *mask)


@pytest.mark.slow
def test_what_the_gradients_in_blocks_are_given_is_what_they_read() -> None:
    """A gather of what is not read would be planned, and dropped by XLA."""
    names = ("q", "k", "v", "stats", "out", "grad")
    xs = dict(zip(names, (numbers(4, 8, 2, 8, seed=k) for k in range(6)), strict=True))
    xs["stats"] = numbers(4, 2, 8) + 3.0

    def gradients(*given: Any) -> Any:
        params = {"scale": 0.35, "causal": True, "window": 0, "fill": 0.0}
        return flash_attention_backward_p.bind(*given, **params)

    program = te.trace(gradients, *xs.values())
    layouts = [Layout(((Y,), *((),) * (x.ndim - 1))) for x in xs.values()]
    whole = [Layout.replicated(4)] * 3
    plan = plan_by_hand(program.graph, MESH, {}, tuple(layouts), tuple(whole))
    check(replace(plan, program=program), *xs.values())
