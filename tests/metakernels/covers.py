"""Random covers of index spaces: boxes cut in two, again and again, at any place of any dim."""

from __future__ import annotations

import random
from collections.abc import Iterator

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.executor import Path
from tapestry_egg.zspace import ZRange


def random_cover(
    signature: OperationSignature, rng: random.Random, cuts: int = 3
) -> tuple[ZRange, ...]:
    """A disjoint cover in random order; neighbours need not be cut alike, nor evenly."""
    boxes = [ZRange.from_shape(signature.extents)]
    free = [d for d, dim in enumerate(signature.index) if dim.role in ("map", "reduce")]
    for _ in range(cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        dims = [d for d in free if box.shape[d] > 1]
        if not dims:
            boxes.append(box)
            continue
        d = rng.choice(dims)
        start, end = box.start[d], box.end[d]
        at = rng.randrange(start + 1, end)
        boxes.extend((box.with_dim(d, start, at), box.with_dim(d, at, end)))
    rng.shuffle(boxes)
    return tuple(boxes)


def operations(graph: BlockGraph, at: Path = ()) -> Iterator[tuple[Path, Operation, BlockGraph]]:
    """Every operation that runs a kernel, those of regions included, and the graph it is in."""
    for i, op in enumerate(graph.operations):
        if not op.regions:
            yield (*at, i), op, graph
        for r, region in enumerate(op.regions):
            yield from operations(region, (*at, i, r))


def random_covers(graph: BlockGraph, rng: random.Random) -> dict[Path, tuple[ZRange, ...]]:
    """A random cover for every operation of a graph."""
    covers = {}
    for path, op, inside in operations(graph):
        signature = registry.signature(
            op.kernel,
            op.params,
            tuple(inside.values[v] for v in op.inputs),
            tuple(inside.values[v] for v in op.outputs),
        )
        covers[path] = random_cover(signature, rng)
    return covers
