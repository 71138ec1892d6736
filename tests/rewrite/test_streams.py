"""Attention as people spell it becomes fused attention: the table, and what it computes."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.rewrite.streams.streamed import with_streams
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace
from tests.rewrite.attention_spellings import BATCH, DTYPES, HEADS, MODES, SPELLINGS, program

CELLS = [(s, d, m) for s in SPELLINGS for d in DTYPES for m in MODES]
#: Other numbers of rows than any other dim has.
ROWS = 48


def kernels(graph: BlockGraph) -> Iterator[str]:
    for op in graph.operations:
        yield op.kernel
        for region in op.regions:
            yield from kernels(region)


def largest(graph: BlockGraph) -> int:
    """Elements of the largest value that an operation makes or reads of a number's dtype."""
    mine = [
        graph.values[v].size
        for op in graph.operations
        for v in op.outputs
        if graph.values[v].dtype != "bool" and not op.regions
    ]
    inner = [largest(r) for op in graph.operations for r in op.regions]
    return max([0, *mine, *inner])


def streamed(name: str, dtype: str, mode: str) -> BlockGraph:
    function, shapes = program(name, dtype, mode, ROWS)
    made = with_streams(trace(function, *shapes).graph)
    verify_graph(made)
    return made


def gone(made: BlockGraph, mode: str) -> bool:
    found = set(kernels(made))
    wanted = {"flash_attention"} | ({"flash_attention_backward"} if mode != "forward" else set())
    return wanted <= found and largest(made) < BATCH * HEADS * ROWS * ROWS


@pytest.mark.parametrize("name", SPELLINGS)
def test_no_scores_are_left(name: str) -> None:
    """Of every dtype and mode: the kernels are there, and nothing is as large as scores."""
    left = [(d, m) for s, d, m in CELLS if s == name and not gone(streamed(s, d, m), m)]
    assert not left


def error(got: object, exact: object) -> float:
    """The greatest difference beside the greatest number, over all results."""
    worst = 0.0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(exact), strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        worst = max(worst, float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)))
    return worst


@pytest.mark.slow
@pytest.mark.parametrize("name", SPELLINGS)
def test_numbers_and_gradients_are_as_near_the_truth(name: str) -> None:
    """Off the numbers in float64 by no more than four times what the program itself is."""
    for dtype in ("float32", "bfloat16", "bfloat16, preferred float32"):
        for mode in ("forward", "gradients", "scan"):
            function, shapes = program(name, dtype, mode, ROWS)
            graph = trace(function, *shapes).graph
            rng = np.random.default_rng(0)
            xs = [jnp.asarray(rng.normal(size=s.shape), s.dtype) for s in shapes]
            exact_function, _ = program(name, "float32", mode, ROWS)
            with jax.enable_x64(True):
                exact = jax.jit(exact_function)(*[x.astype(jnp.float64) for x in xs])
            theirs = error(jax.jit(emit(graph))(*xs), exact)
            ours = error(jax.jit(emit(with_streams(graph)))(*xs), exact)
            least = 1e-6 if dtype == "float32" else 4e-3
            assert ours <= 4.0 * max(theirs, least), (dtype, mode, ours, theirs)
