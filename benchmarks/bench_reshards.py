"""Conversions between layouts beside those that `jax.jit` makes, in bytes that a device sends.

    python -m benchmarks.bench_reshards                       # every pair, ranks 1 to 3; minutes
    python -m benchmarks.bench_reshards --sample 50 --seed 1  # some pairs of each mesh and rank

Every pair of layouts of a tensor on the meshes 8, 2x4 and 2x2x2 is converted twice: by the cheapest
path of a plan, and by `jax.jit` of the identity with the same shardings, compiled for eight CPU
devices. All dims have one extent, so pairs that differ only in the order of dims count once.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.graph.layout_algebra import LayoutAlgebra
from tapestry_egg.pipeline.rehearse import simulate_devices

if TYPE_CHECKING:
    from tapestry_egg.extract.choices.copies import CopyTable
    from tapestry_egg.plans.plan import Change

MESHES = (
    MeshShape(("x",), (8,)),
    MeshShape(("x", "y"), (2, 4)),
    MeshShape(("x", "y", "z"), (2,) * 3),
)
#: The extent of every dim of a tensor of so many dims: large, so that bytes decide the path.
EXTENTS = {1: 2**26, 2: 2**13, 3: 2**9}
RANKS = tuple(EXTENTS)


@dataclass(frozen=True)
class Pair:
    """A conversion, and how a plan and XLA make it: bytes that a device sends, and by what."""

    mesh: MeshShape
    tensor: TensorType
    source: Layout
    target: Layout
    steps: tuple[Change, ...]
    planned_bytes: float
    xla_bytes: float = 0.0
    xla_kinds: tuple[str, ...] = ()

    @property
    def sends_more(self) -> bool:
        """Whether the plan sends more than XLA does."""
        return self.planned_bytes > self.xla_bytes * (1 + 1e-9)

    def __str__(self) -> str:
        whole = self.tensor.nbytes
        path = " ".join(
            f"{s.kind}({','.join(self.mesh.names[a] for a in s.axes)})" for s in self.steps
        )
        xla = " ".join(self.xla_kinds) or "nothing"
        ends = f"{self.source.show(self.mesh):>14} -> {self.target.show(self.mesh):14}"
        return (
            f"{self.mesh!s:10} {ends} {self.planned_bytes / whole:7.4f}"
            f" {self.xla_bytes / whole:7.4f}  {path or 'nothing'} | {xla}"
        )


def tables(mesh: MeshShape, target: str) -> dict[int, CopyTable]:
    """The cheapest conversions between all layouts on a mesh, by the rank of the tensor."""
    from tapestry_egg.extract.choices.copies import StepCosts, copy_table
    from tapestry_egg.machine.target import load_target
    from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
    from tapestry_egg.shard.encode import Encoding, all_facts
    from tapestry_egg.shard.strategies import saturate

    algebra = LayoutAlgebra(mesh, RANKS, ())
    facts, books = all_facts(algebra, ()), load_books(DEFAULT_BOOKS)
    found = saturate(Encoding(None, algebra, (), (), facts), books)  # type: ignore[arg-type]
    costs = StepCosts(mesh, load_target(target))
    return {
        rank: copy_table(
            TensorType((n,) * rank, "float32"),
            [x for x in algebra.layouts if len(x.dims) == rank],
            [c for c in found.changes if len(c.source.dims) == rank],
            (),
            costs,
        )
        for rank, n in EXTENTS.items()
    }


def pairs(mesh: MeshShape, rank: int, table: CopyTable) -> Iterator[Pair]:
    """All conversions of a tensor of this rank, one of those that differ in the order of dims."""
    for a, b in itertools.permutations(table.layouts, 2):
        orders = itertools.permutations(zip(a.dims, b.dims, strict=True))
        if tuple(zip(a.dims, b.dims, strict=True)) == max(orders):
            at = table.number[a], table.number[b]
            yield Pair(mesh, table.tensor, a, b, table.path(a, b), float(table.wire[at]))


def compiled(pair: Pair) -> Pair:
    """The pair with what `jax.jit` of the identity sends, compiled for the devices at hand."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from tapestry_egg.runtime.measure.hlo import hlo_stats

    mesh = pair.mesh
    grid = Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)

    def sharding(layout: Layout) -> NamedSharding:
        names = [tuple(mesh.names[a] for a in axes) or None for axes in layout.dims]
        return NamedSharding(grid, PartitionSpec(*names))

    function = jax.jit(
        lambda x: x, in_shardings=sharding(pair.source), out_shardings=sharding(pair.target)
    )
    argument = jax.ShapeDtypeStruct(pair.tensor.shape, pair.tensor.dtype)
    stats = hlo_stats(function.lower(argument).compile())
    kinds = tuple(f"{c.kind}({c.group})" for c in stats.collectives)
    return replace(pair, xla_bytes=stats.wire_bytes, xla_kinds=kinds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the pairs in which a plan sends more than XLA, and the counts of each mesh and rank."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sample", type=int, help="pairs of each mesh and rank; all by default")
    parser.add_argument("--target", default="a100:8")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="print every pair")
    options = parser.parse_args(arguments)
    simulate_devices(8)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of each tensor that it gathers
    worse = 0
    for mesh in MESHES:
        for rank, table in tables(mesh, options.target).items():
            some = list(pairs(mesh, rank, table))
            if options.sample and options.sample < len(some):
                some = random.Random(options.seed).sample(some, options.sample)
            verdicts = Counter[str]()
            for pair in map(compiled, some):
                fewer = pair.planned_bytes < pair.xla_bytes * (1 - 1e-9)
                verdicts["more" if pair.sends_more else "less" if fewer else "equal"] += 1
                if pair.sends_more or options.all:
                    print(pair)
            worse += verdicts["more"]
            counts = ", ".join(f"{k} {n}" for k, n in sorted(verdicts.items()))
            print(f"{mesh}, rank {rank}: {len(some)} pairs; the plan sends {counts}", flush=True)
    return int(worse > 0)


if __name__ == "__main__":
    sys.exit(main())
