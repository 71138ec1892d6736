"""What splits do, by brute force over the shards: points to cells, one by one.

Nothing here uses `Projection.image`, the closed forms or the code under test.
"""

from __future__ import annotations

from itertools import combinations, permutations, product
from math import prod

from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.signatures.splits import (
    Access,
    Blocks,
    Gathered,
    Near,
    Partial,
    Replicated,
)
from tapestry_egg.zspace import Projection

Box = tuple[tuple[int, int], ...]  # per tensor dim: first cell, and the first after the last


def blocks_of(extent: int, n: int) -> list[range]:
    """The layout blocks of a dim: ⌈extent/n⌉ cells each, the last ones short or empty."""
    size = -(-extent // n)
    return [range(min(extent, j * size), min(extent, (j + 1) * size)) for j in range(n)]


def touched(
    p: Projection, shape: tuple[int, ...], extents: tuple[int, ...], parts: dict[int, int]
) -> dict[tuple[int, ...], Box | None]:
    """The least box around the cells that each shard touches, cut off at the tensor's edges; None
    where nothing is left."""
    out: dict[tuple[int, ...], Box | None] = {}
    for numbers in product(*(range(n) for n in parts.values())):
        own = [range(n) for n in extents]
        for (d, n), j in zip(parts.items(), numbers, strict=True):
            own[d] = blocks_of(extents[d], n)[j]
        cells = set()
        for i in product(*own):
            starts = [
                b + sum(a * x for a, x in zip(row, i, strict=True))
                for row, b in zip(p.matrix, p.offset, strict=True)
            ]
            cells.update(product(*(range(s, s + w) for s, w in zip(starts, p.shape, strict=True))))
        sides = [[c[k] for c in cells] for k in range(len(shape))]
        box = tuple(
            (max(0, min(s)), min(n, max(s) + 1)) for s, n in zip(sides, shape, strict=True) if s
        )
        out[numbers] = box if cells and all(a < b for a, b in box) else None
    return out


def moves(boxes: dict[tuple[int, ...], Box | None], column: int) -> bool:
    """Whether two shards that differ in one number only touch different boxes."""
    return any(
        a is not None and b is not None and a != b
        for i, a in boxes.items()
        for j, b in boxes.items()
        if all((x == y) == (c != column) for c, (x, y) in enumerate(zip(i, j, strict=True)))
    )


def margins(seen: list[tuple[int, int, int, bool]], extent: int, n: int) -> tuple[int, int] | None:
    """The margins of least magnitude for (block number, first, after, short); None where none
    serve. A shard with a short block of the index may touch less than the others."""
    size = -(-extent // n)
    near = sorted(range(-size, size + 1), key=abs)

    def serves(touched_end: int, widened_end: int, short: bool, sign: int) -> bool:
        end = max(0, min(extent, widened_end))
        return touched_end == end or (short and sign * touched_end < sign * end)

    lo = [m for m in near if all(serves(a, j * size - m, s, -1) for j, a, _, s in seen)]
    hi = [m for m in near if all(serves(b, (j + 1) * size + m, s, 1) for j, _, b, s in seen)]
    return (lo[0], hi[0]) if lo and hi else None


def is_short(extents: tuple[int, ...], parts: dict[int, int], numbers: tuple[int, ...]) -> bool:
    """Whether a shard's block of the index space has fewer points than the first one's."""
    return any(
        len(blocks_of(extents[d], n)[j]) < len(blocks_of(extents[d], n)[0])
        for (d, n), j in zip(parts.items(), numbers, strict=True)
    )


def as_blocks(
    p: Projection, shape: tuple[int, ...], extents: tuple[int, ...], parts: dict[int, int]
) -> dict[int, Access] | None:
    """Every way to deal the cut dims out over the tensor dims, in every order, is tried."""
    boxes = touched(p, shape, extents, parts)
    dims = tuple(parts)
    if not all(moves(boxes, c) for c in range(len(dims))):
        return None
    for where in product(range(len(shape)), repeat=len(dims)):
        found: dict[int, Access] = {}
        for k in range(len(shape)):
            own = [d for d, at in zip(dims, where, strict=True) if at == k]
            if not own and len({b[k] for b in boxes.values() if b is not None}) > 1:
                break
            for order in permutations(own):
                seen = []
                for numbers, box in boxes.items():
                    j = 0
                    for d in order:
                        j = j * parts[d] + numbers[dims.index(d)]
                    if box is not None:
                        seen.append((j, *box[k], is_short(extents, parts, numbers)))
                good = margins(seen, shape[k], prod(parts[d] for d in own))
                if good is not None or not own:
                    found.update({d: Blocks(k, *good, order[:i]) for i, d in enumerate(order)})
                    break
            else:
                break
        else:
            return found
    return None


def accesses(
    p: Projection, shape: tuple[int, ...], extents: tuple[int, ...], parts: dict[int, int]
) -> dict[int, Access]:
    boxes = touched(p, shape, extents, parts)
    found: dict[int, Access] = {
        d: Gathered() if moves(boxes, c) else Replicated() for c, d in enumerate(parts)
    }
    moving = [d for d, a in found.items() if a == Gathered()]
    for count in range(len(moving), 0, -1):
        for some in combinations(moving, count):
            blocks = as_blocks(p, shape, extents, {d: parts[d] for d in some})
            if blocks is not None:
                return with_near({**found, **blocks}, p, shape, extents, parts)
    return with_near(found, p, shape, extents, parts)


def with_near(
    found: dict[int, Access],
    p: Projection,
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    parts: dict[int, int],
) -> dict[int, Access]:
    """Dims that are gathered by now, near blocks where they are: first dims first."""
    for d in sorted(d for d, a in found.items() if a == Gathered()):
        n = parts[d]
        own = [k for k in range(len(shape)) if p.matrix[k][d]]
        if len(own) != 1 or extents[d] % n or shape[own[0]] % n or p.matrix[own[0]][d] < 0:
            continue
        (k,) = own
        if any(isinstance(a, Blocks | Near) and a.dim == k for a in found.values()):
            continue
        size, before, after = shape[k] // n, [0], [0]
        for j in range(n):
            cells = set()
            for i in product(
                *(range(m) if e != d else blocks_of(m, n)[j] for e, m in enumerate(extents))
            ):
                start = p.offset[k] + sum(a * x for a, x in zip(p.matrix[k], i, strict=True))
                cells.update(range(start, start + p.shape[k]))
            if not cells:
                break
            before.append(j * size - min(max(min(cells), 0), shape[k]))
            after.append(min(max(max(cells) + 1, 0), shape[k]) - (j + 1) * size)
        else:
            lo, hi = max(before), max(after)
            if lo <= size and hi <= size and 2 * (lo + hi) < (n - 1) * size:
                found[d] = Near(k, lo, hi)
    return found


def output_in_blocks(
    p: Projection,
    shape: tuple[int, ...],
    extents: tuple[int, ...],
    found: dict[int, Access],
    parts: dict[int, int],
) -> bool:
    """Whether every shard makes exactly its layout block: those without points an empty one."""
    own = {d: n for d, n in parts.items() if isinstance(found[d], Blocks)}
    for numbers, box in touched(p, shape, extents, own).items():
        block = [range(n) for n in shape]
        for k, extent in enumerate(shape):
            here = [d for d in own if found[d].dim == k]  # type: ignore[union-attr]
            here.sort(key=lambda d: len(found[d].above))  # type: ignore[union-attr]
            j = 0
            for d in here:
                j = j * own[d] + numbers[list(own).index(d)]
            block[k] = blocks_of(extent, prod(own[d] for d in here))[j]
        if all(block):
            if box != tuple((b.start, b.stop) for b in block):
                return False
        elif box is not None:
            return False
    return True


def brute(
    s: OperationSignature, parts: dict[int, int]
) -> tuple[list[dict[int, Access]], list[dict[int, Access]]] | None:
    """What `split` should find; None where the split is not legal."""
    if any(s.index[d].role == "whole" or s.index[d].size < 2 for d in parts):
        return None
    if 0 in s.extents and parts:
        return None
    reduces = [d for d in parts if s.index[d].role == "reduce"]
    if len({s.index[d].monoid for d in reduces}) > 1:
        return None
    inputs = [
        accesses(p, t.shape, s.extents, parts) for p, t in zip(s.inputs, s.input_types, strict=True)
    ]
    outputs = []
    for p, t in zip(s.outputs, s.output_types, strict=True):
        found = accesses(p, t.shape, s.extents, parts)
        for d, access in found.items():
            role = s.index[d].role
            if role != "reduce" and (access == Replicated()) != (role == "join"):
                return None
            if access == Gathered():
                return None
        if not output_in_blocks(p, t.shape, s.extents, found, parts):
            return None
        outputs.append(found)
    for d in reduces:
        if any(inputs[p][d] != Replicated() for p in s.initial):
            return None
        for port in [inputs[p] for p in s.initial] + outputs:
            if port[d] == Replicated():
                port[d] = Partial(str(s.index[d].monoid))
    return inputs, outputs
