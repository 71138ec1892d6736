"""Disjoint covers: whether boxes fill a box, each of its points once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..zspace import ZRange


def overlaps(boxes: Sequence[ZRange]) -> Iterator[tuple[int, int, ZRange]]:
    """Pairs (by number) of boxes that share points, with what they share."""
    full = [i for i, box in enumerate(boxes) if not box.is_empty]
    if full and boxes[full[0]].rank == 0:
        yield from ((full[0], j, boxes[j]) for j in full[1:])
        return
    full.sort(key=lambda i: boxes[i].start[0])
    for at, i in enumerate(full):
        for j in full[at + 1 :]:
            if boxes[j].start[0] >= boxes[i].end[0]:
                break  # so do all that follow
            common = boxes[i].intersection(boxes[j])
            if common is not None and not common.is_empty:
                yield min(i, j), max(i, j), common


def cover_fault(boxes: Sequence[ZRange], whole: ZRange) -> str:
    """Why `boxes` are not a disjoint and exact cover of `whole`, `` where they are.

    A box outside, two that overlap, or points that none holds. The volumes are compared only where
    nothing overlaps or lies outside, so an overlap cannot make up for a gap.
    """
    for box in boxes:
        if box.rank != whole.rank or not whole.contains(box):
            return f"{box} is not inside {whole}"
    for i, j, common in overlaps(boxes):
        return f"{boxes[i]} and {boxes[j]} overlap in {common}"
    missing = whole.size - sum(box.size for box in boxes if not box.is_empty)
    return f"{missing} of the {whole.size} points of {whole} are left out" if missing else ""
