"""Conversions between layouts beside those of `jax.jit`, and their numbers on eight devices."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from benchmarks.bench_reshards import MESHES, Pair, compiled, pairs, tables


def every_pair() -> dict[str, list[Pair]]:
    found = {}
    for mesh in MESHES:
        for rank, table in tables(mesh, "a100:8").items():
            found[f"{mesh}, rank {rank}"] = list(pairs(mesh, rank, table))
    return found


@pytest.mark.slow
def test_in_a_sample_of_pairs_the_partitioner_sends_no_less() -> None:
    for some in every_pair().values():
        few = random.Random(0).sample(some, min(3, len(some)))
        worse = [str(p) for p in map(compiled, few) if p.sends_more]
        assert not worse, "\n".join(worse)


@pytest.mark.long
def test_in_no_pair_the_partitioner_sends_less() -> None:
    worse = [p for some in every_pair().values() for p in map(compiled, some) if p.sends_more]
    assert not worse, "\n".join(map(str, worse))


CASES = [
    ((2, 4), P(("x", "y")), P(("y", "x")), ["permute"]),
    ((2, 4), P("x"), P("y"), ["permute", "all_gather"]),
    ((2, 4), P("y"), P("x"), ["permute", "all_gather"]),
    ((2, 4), P(), P("y", "x"), []),
    ((2, 4), P("y", "x"), P("x", "y"), ["permute"]),
    ((2, 4), P("y", "x"), P("x"), ["permute", "all_gather"]),
    ((2, 2, 2), P("x", ("y", "z")), P("z", ("x", "y")), ["permute"]),
    ((2, 2, 2), P(("x", "y", "z")), P("y", ("z", "x")), ["permute", "all_to_all"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "source", "target", "kinds"), CASES)
def test_conversions_give_the_array(
    sizes: tuple[int, ...], source: P, target: P, kinds: list[str]
) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(sizes), ("x", "y", "z")[: len(sizes)])
    before, after = NamedSharding(mesh, source), NamedSharding(mesh, target)
    step = te.jit(lambda x: x, in_shardings=before, out_shardings=after, target="cpu:8")
    x = jnp.arange(1024.0 * 1024).reshape(1024, 1024)
    y = step(jax.device_put(x, before))
    assert y.sharding.is_equivalent_to(after, 2)
    np.testing.assert_array_equal(y, x)
    plan = step.plan(x)
    assert sorted(c.kind for c in plan.collectives) == sorted(kinds)
    te.compile(plan, mesh)
