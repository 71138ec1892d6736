"""Programs and their equal forms, for tests of the algebra: shared functions and small programs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rewrite.terms.explore import Explored
from tapestry_egg.rewrite.terms.rebuild import as_written, rebuild
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace

BOOKS = load_books(("algebra", "fusion"))
RULES = [r for b in BOOKS for r in b.rules]
H100 = load_target("h100:8")
f32 = jnp.float32


@contextmanager
def wide() -> Iterator[None]:
    """64-bit types for a while."""
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", before)


def data(graph: BlockGraph, seed: int = 0) -> list[np.ndarray]:
    """Random inputs: small integers, or normal numbers."""
    rng = np.random.default_rng(seed)
    out = []
    for v in graph.inputs:
        t = graph.values[v]
        drawn = rng.integers(-9, 10, t.shape) if "int" in t.dtype else rng.normal(size=t.shape)
        drawn = drawn + 1j * rng.normal(size=t.shape) if "complex" in t.dtype else drawn
        out.append(np.asarray(drawn, dtype=decode_dtype(t.dtype)))
    return out


def run(graph: BlockGraph, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.jit(emit(graph))(*inputs)]


def agree(one: BlockGraph, other: BlockGraph, scale: float = 1.0) -> None:
    """Equal numbers: exactly for integers, to the last few bits of float64 otherwise. Inputs that
    are no integers are `scale` times normal numbers: many products in a row grow."""
    inputs = [x * x.dtype.type(scale) if x.dtype.kind == "f" else x for x in data(one)]
    for a, b in zip(run(one, inputs), run(other, inputs), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if a.dtype.kind in "fc":
            close = 1e-11 if a.dtype in (np.float64, np.complex128) else 1e-4
            np.testing.assert_allclose(a, b, rtol=close, atol=close)
        else:
            np.testing.assert_array_equal(a, b)


def forced(graph: BlockGraph, explored: Explored, rule: str) -> list[BlockGraph]:
    """The graph with each of the alternatives that a rule made, one at a time and all at once."""
    terms = explored.terms
    first = as_written(terms, [1.0] * len(explored.catalogue))
    choices = {
        c: k
        for c, nodes in enumerate(terms.nodes)
        for k, n in enumerate(nodes)
        if n.value < 0 and rule in terms.made.get((c, n.signature), ())
    }
    changes = [{}, *({c: k} for c, k in choices.items()), choices]
    out = []
    for change in changes:
        pick = [change.get(c, k) for c, k in enumerate(first)]
        built = rebuild(graph, terms, explored.catalogue, pick)
        if built is not None and rule in built.rules:
            out.append(built.graph)
    return out


def struct(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, f32)


def two(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
    return x @ w + x @ v


def graph_of(fn: Callable[..., Any], *args: Any, **options: Any) -> BlockGraph:
    return trace(fn, *args, **options).graph


def kernels(graph: BlockGraph) -> list[str]:
    return [op.kernel for op in graph.operations]


BIG = (struct(4096, 512), struct(512, 256), struct(512, 256))


def front_of(fn: Callable[..., Any], args: Sequence[Any], **options: Any) -> Any:
    return optimize(
        trace(fn, *args),
        "h100:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        settings=Settings(work=3.0),
        **options,
    )
