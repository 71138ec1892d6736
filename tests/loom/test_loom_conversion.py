"""Block graphs as Loom graphs and back: nothing is lost, and shards are what the executor runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType
from tapestry_egg.loom import (
    LoomError,
    from_loom,
    loom_from_json,
    loom_to_json,
    sharded,
    to_loom,
    write_loom,
)
from tapestry_egg.loom.nodes import APPLICATION, IPF_SIGNATURE, OPERATION, body_of
from tapestry_egg.loom.read import PROGRAMS
from tapestry_egg.loom.write import _folded
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature
from tapestry_egg.reference.executor import execute
from tapestry_egg.tracing.graph_documents import graph_document
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import Projection, ZRange
from tests.loom.loom_graphs import add_with_mask, linear_relu, matmul_row_sum, sharded_add, uid


def program(x: Any, w: Any, b: Any) -> Any:
    """Maps, a contraction, a sort, windows, padding and control flow, with constants."""
    y = jax.nn.relu(x @ w + b)
    carried, stack = jax.lax.scan(lambda c, v: (c + v, c * 2), jnp.zeros(4), y)
    chosen = jax.lax.cond(carried[0] > 0, jnp.sin, jnp.cos, carried)
    table = jnp.asarray(np.arange(12.0, dtype=np.float32).reshape(3, 4))
    pooled = jax.lax.reduce_window(stack, -jnp.inf, jax.lax.max, (2, 2), (1, 2), "SAME")
    return jnp.sort(jnp.cumsum(chosen)), y[::2, 1:].sum(0), jnp.pad(y, 2), table @ chosen, pooled


@pytest.fixture(scope="module")
def graph() -> BlockGraph:
    args = (jnp.ones((6, 5)), jnp.ones((5, 4)), jnp.ones(4))
    return trace(program, *args, donate_argnums=(0,)).graph


def signature_at(graph: BlockGraph, i: int) -> Any:
    op = graph.operations[i]
    types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
    return registry.signature(op.kernel, op.params, *types, len(op.regions))


def cut(signature: Any, dims: Any, parts: int) -> tuple[ZRange, ...]:
    boxes = [ZRange.from_shape(signature.extents)]
    for d in dims:
        boxes = [b for box in boxes for b in box.split(d, -(-box.shape[d] // parts))]
    return tuple(boxes)


def random_covers(graph: BlockGraph, data: st.DataObject) -> dict[tuple[int, ...], Any]:
    """Some operations with a signature, cut in some of the dims that reach their outputs."""
    covers = {}
    nodes = [n for n in to_loom(graph).of_kind(OPERATION)]
    for i, node in enumerate(nodes):
        if node.tag(IPF_SIGNATURE) is None or not data.draw(st.booleans()):
            continue
        signature = signature_at(graph, i)
        dims = [d for d, dim in enumerate(signature.index) if dim.role == "map" and dim.size > 1]
        cuts = data.draw(st.lists(st.sampled_from(dims), unique=True)) if dims else []
        boxes = cut(signature, cuts, data.draw(st.integers(2, 3)))
        if len(boxes) > 1:
            covers[(i,)] = boxes
    return covers


@pytest.mark.slow
@settings(max_examples=15)
@given(data=st.data())
def test_a_sharded_program_comes_back_as_it_was(graph: BlockGraph, data: st.DataObject) -> None:
    covers = random_covers(graph, data)
    loom = to_loom(graph, covers)
    assert PROGRAMS.issues(loom) == []
    again, shards = from_loom(loom_from_json(loom_to_json(loom)))
    assert graph_document(again) == graph_document(graph)
    assert [op.source for op in again.operations] == [op.source for op in graph.operations]
    assert shards == covers


def test_the_shards_are_what_the_executor_reads_and_writes(graph: BlockGraph) -> None:
    """Every operation that can be cut, cut in two along each dim: as applications they are valid,
    and the executor gives the same results with them as whole."""
    covers = {}
    for i, node in enumerate(to_loom(graph).of_kind(OPERATION)):
        if node.tag(IPF_SIGNATURE) is not None and not graph.operations[i].regions:
            signature = signature_at(graph, i)
            dims = [d for d, dim in enumerate(signature.index) if dim.role == "map"]
            covers[(i,)] = cut(signature, dims, 2)
    assert PROGRAMS.issues(to_loom(graph, covers)) == []
    rng = np.random.default_rng(0)
    inputs = [rng.integers(-3, 4, graph.values[v].shape).astype(np.float32) for v in graph.inputs]
    for one, other in zip(execute(graph, inputs), execute(graph, inputs, covers), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_reduced_dim_is_read_whole(graph: BlockGraph) -> None:
    """The contraction of x[6, 5] and w[5, 4] has the index [6, 4]; each point reads 5 and 5."""
    loom = to_loom(graph)
    dot = next(n for n in loom.of_kind(OPERATION) if n.label == "dot_general")
    assert dot.tag("loom:IPFIndex") == {"start": [0, 0], "end": [6, 4]}
    inputs = dot.tag(IPF_SIGNATURE)["inputs"]
    assert [p["shape"] for listed in inputs.values() for p in listed] == [[1, 5], [5, 1]]


def test_a_cut_that_loom_cannot_say_is_refused(graph: BlockGraph) -> None:
    kernels = [op.kernel for op in graph.operations]
    dot, loop = kernels.index("dot_general"), kernels.index("scan")
    with pytest.raises(GraphError, match="cuts index dim k, whose role is reduce"):
        to_loom(graph, {(dot,): cut(signature_at(graph, dot), [2], 2)})
    with pytest.raises(GraphError, match="not a cover"):
        to_loom(graph, {(dot,): cut(signature_at(graph, dot), [0], 2)[:1]})
    with pytest.raises(GraphError, match="no operation at"):
        to_loom(graph, {(loop, 0, 1): []})


def test_an_operation_that_reads_beyond_its_operand_has_no_signature(
    graph: BlockGraph, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loom's projections stay inside their tensors: there is nothing to say what lies outside."""
    real = registry.signature

    def reaching(kernel: str, *rest: Any) -> Any:
        found = real(kernel, *rest)
        return replace(found, outside=("max", None)) if kernel.startswith("reduce_win") else found

    monkeypatch.setattr(registry, "signature", reaching)
    windows = [n for n in to_loom(graph).of_kind(OPERATION) if "window" in str(n.label)]
    assert [n.tag(IPF_SIGNATURE) for n in windows] == [None]
    assert PROGRAMS.issues(to_loom(graph)) == []


def test_an_operation_on_nothing_has_no_signature() -> None:
    graph = trace(lambda x: lax.reduce_xor(x, (0,)), jnp.ones((0, 5), jnp.int32)).graph
    loom = to_loom(graph)
    assert [n.tag(IPF_SIGNATURE) for n in loom.of_kind(OPERATION)] == [None]
    assert PROGRAMS.issues(loom) == []
    assert graph_document(from_loom(loom)[0]) == graph_document(graph)


def test_equal_graphs_make_equal_files(graph: BlockGraph, tmp_path: Path) -> None:
    for name in ("one.json", "two.json"):
        write_loom(to_loom(graph), tmp_path / name)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    again, _ = from_loom(loom_from_json(json.loads((tmp_path / "one.json").read_text())))
    assert graph_document(again) == graph_document(graph)


# ---- graphs of others --------------------------------------------------------------------------


def test_a_graph_of_others_without_shards() -> None:
    graph, covers = from_loom(loom_from_json(add_with_mask()))
    (op,) = graph.operations
    assert (op.kernel, op.inputs, op.outputs) == ("op:add", (0, 1, 2), (3,))
    assert op.params == {"mask_value": 12}
    assert (graph.inputs, graph.outputs, covers) == ((0, 1, 2), (3,), {})
    assert [str(t) for t in graph.values] == ["s32[10, 5]"] * 2 + ["bool[10, 5]", "s32[10, 5]"]


def test_shards_of_a_kernel_without_a_template_are_refused() -> None:
    with pytest.raises(GraphError, match="shards of op:add are of another index space"):
        from_loom(loom_from_json(sharded_add()))


def test_shards_of_a_kernel_that_we_know() -> None:
    """The worked addition under our name for it: tensors move to the origin, shards with them."""
    document = sharded_add()
    document["nodes"][3]["body"]["kernel"] = "add"
    graph, covers = from_loom(loom_from_json(document))
    assert covers == {(0,): ZRange.from_shape((10, 5)).split(0, 5)}
    a, b = np.arange(50, dtype=np.int32).reshape(10, 5), np.ones((10, 5), np.int32)
    (made,) = execute(graph, [a, b], covers)
    np.testing.assert_array_equal(made, a + 1)


def test_operations_are_put_in_order() -> None:
    document = linear_relu()
    document["nodes"].reverse()
    graph, _ = from_loom(loom_from_json(document))
    assert [op.kernel for op in graph.operations] == ["op:linear", "op:relu"]


def test_a_selection_of_a_part_is_sliced() -> None:
    """The second addend, a quarter of a larger tensor that does not start at 0."""
    document = add_with_mask()
    document["nodes"][1]["body"]["range"] = {"start": [190, 40], "end": [210, 60]}
    document["nodes"][4]["body"]["kernel"] = "add"
    del document["nodes"][4]["body"]["inputs"]["mask"], document["nodes"][2]
    graph, _ = from_loom(loom_from_json(document))
    assert [op.kernel for op in graph.operations] == ["slice", "add"]
    big = np.arange(400, dtype=np.int32).reshape(20, 20)
    (made,) = execute(graph, [np.zeros((10, 5), np.int32), big])
    np.testing.assert_array_equal(made, big[10:20, 10:15])


def test_an_invalid_graph_is_not_converted() -> None:
    document = matmul_row_sum()
    document["nodes"] = [n for n in document["nodes"] if n["id"] != uid(20)]
    with pytest.raises(LoomError, match="each element once"):
        from_loom(loom_from_json(document))


def test_our_graphs_can_be_sharded_anew(graph: BlockGraph) -> None:
    loom = to_loom(graph)
    dot = next(n for n in loom.of_kind(OPERATION) if n.label == "dot_general")
    halves = ZRange.from_shape((6, 4)).split(0, 3)
    anew = sharded(loom, dot.id, halves)
    own = [n for n in anew.of_kind(APPLICATION) if body_of(n).operationId == dot.id]
    assert len(own) == 2 and PROGRAMS.issues(anew) == []
    ((path, boxes),) = from_loom(anew)[1].items()
    assert graph.operations[path[0]].kernel == "dot_general"
    assert [b.shape for b in boxes] == [(3, 4, 5), (3, 4, 5)]


def test_dims_that_are_folded_away_may_run_backwards() -> None:
    """out[i] = Σ_k x[i - 2k + 8] for 5 terms: the index point i reads nine elements from i on."""
    signature = OperationSignature(
        kernel="reversed",
        index=(IndexDim("i", 3, "map"), IndexDim("k", 5, "reduce", "sum")),
        inputs=(Projection(((1, -2),), (8,), (1,)),),
        outputs=(Projection(((1, 0),), (0,), (1,)),),
        input_types=(TensorType((11,), "float32"),),
        output_types=(TensorType((3,), "float32"),),
    )
    folded = [_folded(p, signature) for p in (*signature.inputs, *signature.outputs)]
    assert folded == [Projection(((1,),), (0,), (9,)), Projection(((1,),), (0,), (1,))]
