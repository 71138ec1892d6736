"""What kernels take in memory beside their operands and results, as their templates say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.instantiate import instantiate
from tapestry_egg.metakernels.language.template_file import read_templates
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.runtime.lower.kernels import streaming
from tapestry_egg.runtime.lower.kernels.attention import flash_attention_backward_p

S = jax.ShapeDtypeStruct


def signature(kernel: str, fn: Callable[..., Any], *shapes: tuple[int, ...]) -> OperationSignature:
    """Of the one operation of this kernel in a program of bfloat16 arrays."""
    graph = te.trace(fn, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).graph
    (op,) = [op for op in graph.operations if op.kernel == kernel]
    types = [[graph.values[v] for v in vs] for vs in (op.inputs, op.outputs)]
    return registry.signature(op.kernel, op.params, *types)


SIZES = jnp.array([3, 5], jnp.int32)


def rows_by_group(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w, SIZES)


def groups_of_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.sum(rows_by_group(x, w)))(w)


def test_a_product_of_ragged_groups_holds_one_more_result() -> None:
    found = signature("ragged_dot_general", rows_by_group, (8, 4), (2, 4, 16))
    assert found.scratch is not None
    assert found.scratch.bytes_at(found.extents) == 2 * 8 * 16


def test_its_gradient_holds_both_operands_once_more() -> None:
    found = signature("ragged_dot_general", groups_of_rows, (8, 4), (2, 4, 16))
    assert found.scratch is not None
    assert found.scratch.bytes_at(found.extents) == 2 * 8 * 4 + 2 * 8 * 16
    halved = tuple(n // 2 if n == 16 else n for n in found.extents)
    assert found.scratch.bytes_at(halved) == 2 * 8 * 4 + 2 * 8 * 8


@pytest.mark.parametrize(
    ("window", "stride", "numbers"),
    [((2, 1), 2, 4.0), ((2, 1), 1, 4.0), ((5, 7), 1, 4.0 * 2 + 2.0)],
)
def test_a_gradient_of_pooling_holds_where_windows_chose(
    window: tuple[int, int], stride: int, numbers: float
) -> None:
    """One number for windows of few places; for others one per dim, and the element."""

    def pooled(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, window, (stride, 1), "SAME").sum()

    found = signature("select_and_scatter_add", jax.grad(pooled), (8, 8))
    assert found.scratch is not None
    assert found.scratch.bytes_at(found.extents) == numbers * 8 // stride * 8


@pytest.mark.parametrize(
    ("padding", "held"),
    # Nothing where cuDNN pads both sides alike, else the padded operand, 9 × 9.
    [((1, 1), [0, 0, 0]), ((0, 1), [2 * 4 * 81, 2 * 4 * 81, 2 * 4 * 81])],
)
def test_a_convolution_padded_on_one_side_holds_a_padded_operand(
    padding: tuple[int, int], held: list[int]
) -> None:
    """So do both gradients: that by the operand is cut out of a padded one."""

    def total(x: jax.Array, k: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, k, (2, 2), (padding, padding))
        return (y * y).sum()

    shapes = ((2, 4, 8, 8), (3, 4, 3, 3))
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    graph = te.trace(jax.grad(total, (0, 1)), *arguments).graph
    found = []
    for op in graph.operations:
        if op.kernel == "conv_general_dilated":
            types = [[graph.values[v] for v in vs] for vs in (op.inputs, op.outputs)]
            made = registry.signature(op.kernel, op.params, *types)
            assert made.scratch is not None
            found.append(made.scratch.bytes_at(made.extents))
    assert found == pytest.approx([4 * n for n in held], rel=0.01)


def streamed(kernel: str, of: dict[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A kernel over scores of `rows` × `keys`, and its operands."""
    x, w = S((of["rows"], 32), jnp.float32), S((32, of["keys"]), jnp.float32)
    scores = (((1,), (0,)), ((), ()))
    if kernel == "dot_logsumexp":
        run = partial(streaming.dot_logsumexp_p.bind, scores=scores, axes=(1,), dtype="float32")
        return run, [x, w]
    by_key = (((1,), (0,)), ((), ()))
    products = {"scores": scores, "values": by_key, "swapped": 0, "dtype": "float32"}
    v = S((of["keys"], 32), jnp.float32)
    if kernel == "attention":
        return partial(streaming.attention_p.bind, **products), [x, w, v]
    z = S((of["rows"],), jnp.float32)
    return partial(streaming.exp_dot_p.bind, shift=(0,), **products), [x, w, z, v]


@pytest.mark.parametrize("of", [{"rows": 512, "keys": 8192}, {"rows": 16384, "keys": 2048}])
@pytest.mark.parametrize("kernel", ["dot_logsumexp", "exp_dot", "attention"])
def test_kernels_that_stream_hold_a_block_of_scores(kernel: str, of: dict[str, Any]) -> None:
    """As XLA allocates it: 4 MiB of 16, and 256 columns of 16384 rows, 16 of 128."""
    run, operands = streamed(kernel, of)
    (op,) = te.trace(run, *operands).graph.operations
    types = [operands, [jax.eval_shape(run, *operands)]]
    tensors = [[TensorType(t.shape, t.dtype.name) for t in ts] for ts in types]
    found = registry.signature(op.kernel, op.params, *tensors)
    assert found.scratch is not None
    temporary = jax.jit(run).lower(*operands).compile().memory_analysis().temp_size_in_bytes
    assert temporary == pytest.approx(found.scratch.bytes_at(found.extents), rel=0.3)


def test_blocks_are_the_plans_whatever_machine_lowers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def lowered(platform: str) -> str:
        run, operands = streamed("exp_dot", {"rows": 1024, "keys": 8192})
        traced = jax.jit(lambda *xs: run(*xs)).trace(*operands)
        return str(traced.lower(lowering_platforms=(platform,)).as_text())

    here = {p: lowered(p) for p in ("cpu", "cuda")}
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert {p: lowered(p) for p in ("cpu", "cuda")} == here
    assert here["cpu"] == here["cuda"]


@pytest.mark.parametrize(("dtype", "by"), [("bfloat16", True), ("float32", False)])
def test_attention_for_gpus_is_cudnns_on_a_machine_without(dtype: str, by: bool) -> None:
    run, operands = streamed("attention", {"rows": 512, "keys": 8192})
    given = [S(x.shape, jnp.dtype(dtype)) for x in operands]
    traced = jax.jit(run).trace(*given)
    assert ("fmha" in traced.lower(lowering_platforms=("cuda",)).as_text()) == by
    assert "fmha" not in traced.lower(lowering_platforms=("cpu",)).as_text()


def test_gradients_of_attention_for_gpus_are_cudnns() -> None:
    rows, params = S((2, 16, 4, 8), jnp.bfloat16), {"causal": True, "window": 0, "fill": 0.0}
    given = [rows] * 3 + [S((2, 4, 16), jnp.float32)] + [rows] * 2
    run = partial(flash_attention_backward_p.bind, scale=0.5, **params)
    lowered = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",))
    assert "fmhaSoftmaxBackward" in lowered.as_text()


@pytest.mark.parametrize(("target", "blocks"), [("h100:8", 3.0), ("v5e:2x4", 2.0)])
def test_gradients_of_attention_hold_scores_and_weights(target: str, blocks: float) -> None:
    """And of weights and scores, unless products compute these of them."""
    q = S((2, 16, 4, 8), jnp.float32)
    stats = S((2, 4, 16), jnp.float32)
    made = TensorType(q.shape, "float32")
    params = {"scale": 1.0, "causal": False, "window": 0, "fill": 0.0}
    types = [made, made, made, TensorType(stats.shape, "float32"), made, made]
    found = registry.signature("flash_attention_backward", params, types, [made] * 3)
    assert found.scratch is not None
    epilogues = te.load_target(target).epilogues
    beside = 4 * 2 * 4 * 16 * (8 + 2 * 8 + 8)
    expected = blocks * 4 * 2 * 4 * 16 * 16 + beside
    assert found.scratch.bytes_at(found.extents, epilogues) == expected


BLOCKS = """
f:
  index: "[$a]"
  inputs: {x: {shape: "[$a]", dtype: $d, ipf: "[1] :> [1]"}}
  outputs: {out: {dtype: $d}}
  scratch: {blocks: 2.0, fused: %s, scores: 4.0 * @a, row: 4.0 * @a, beside: 8.0 * @a}
"""


def test_products_hold_no_more_blocks_than_others(tmp_path: Path) -> None:
    path, given = tmp_path / "own.yaml", (TensorType((4,), "float32"),)

    def made(fused: str) -> OperationSignature:
        path.write_text(BLOCKS % fused)
        (template,) = read_templates(path)
        return instantiate(template, "f", {}, given, None).signature

    scratch = made("0.5").scratch
    assert scratch is not None
    assert [scratch.bytes_at((4,), epilogues) for epilogues in (False, True)] == [64.0, 40.0]
    for number in ("2.5", "-1.0"):
        with pytest.raises(TemplateError, match="is no number of blocks up to"):
            made(number)
