"""Attention in the layers of Flax and Equinox becomes fused attention, and what is none stays."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.streams.streamed import count_streams, with_streams
from tapestry_egg.tracing.trace import trace
from tests.rewrite.library_attention import BATCH, FEATURES, HEADS, LAYERS, ROWS, modes
from tests.rewrite.test_streams import largest
from tests.tiers import tiers

TYPE = jax.ShapeDtypeStruct((BATCH, ROWS, FEATURES), jnp.float32)


@pytest.mark.parametrize("name", tiers(LAYERS, usual=2))
def test_layers_of_libraries(name: str) -> None:
    """In every mode no scores are left, and forward and backward give the layer's own numbers."""
    make, recognised = LAYERS[name]
    x = np.float32(np.random.default_rng(0).normal(size=TYPE.shape))
    for mode, function in modes(make()).items():
        graph = trace(function, TYPE).graph
        made = with_streams(graph)
        verify_graph(made)
        if recognised:
            assert count_streams(made) >= (1 if mode == "forward" else 2), mode
            assert largest(made) < BATCH * HEADS * ROWS * ROWS, mode
        if made is graph or mode not in ("forward", "gradient"):
            continue
        (got,), (want,) = execute(made, [x]), execute(graph, [x])
        a, b = np.asarray(got, np.float64), np.asarray(want, np.float64)
        limit = 2e-2 if "bfloat16" in name else 2e-5
        assert np.abs(a - b).max() <= limit * np.abs(b).max(), mode
