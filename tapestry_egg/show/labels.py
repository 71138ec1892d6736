"""Where the names beside dots stand: near their dot, over nothing else, inside the frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

Anchor = Literal["start", "middle", "end"]

#: Font size of labels, in pixels.
SIZE = 11.5


@dataclass(frozen=True, slots=True)
class Box:
    """A rectangle of the page, y downwards."""

    left: float
    top: float
    right: float
    bottom: float

    def overlaps(self, other: Box) -> bool:
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def within(self, frame: Box) -> bool:
        return (
            self.left >= frame.left
            and self.right <= frame.right
            and self.top >= frame.top
            and self.bottom <= frame.bottom
        )


@dataclass(frozen=True, order=True, slots=True)
class Wish:
    """A name for the dot at (x, y). Lower ranks choose first; rank 0 is set in bold."""

    rank: int
    x: float
    y: float
    name: str


@dataclass(frozen=True, slots=True)
class Label:
    """A name with its place."""

    name: str
    bold: bool
    x: float
    y: float
    anchor: Anchor


# Where a label may stand relative to its dot, best first: above right (away from the inner corners
# of descending stairs), then around.
_BESIDE: tuple[tuple[float, float, Anchor], ...] = (
    (9, -7, "start"),
    (-9, 14, "end"),
    (10, 4, "start"),
    (-10, 4, "end"),
    (0, -11, "middle"),
    (0, 20, "middle"),
    (9, 15, "start"),
    (-9, -7, "end"),
)


def place_labels(wishes: Iterable[Wish], obstacles: Sequence[Box], frame: Box) -> list[Label]:
    """Give every wish a place that covers no obstacle and no other label; some may find none."""
    taken = list(obstacles)
    labels = []
    for wish in sorted(wishes):
        if found := _place(wish, taken, frame):
            labels.append(found[0])
            taken.append(found[1])
    return labels


def _place(wish: Wish, taken: Sequence[Box], frame: Box) -> tuple[Label, Box] | None:
    width = text_width(wish.name) * (1.08 if wish.rank == 0 else 1.0)
    offset = {"start": 0.0, "middle": width / 2, "end": width}
    for dx, dy, anchor in _BESIDE:
        x, y = wish.x + dx, wish.y + dy
        left = x - offset[anchor]
        box = Box(left - 2, y - 10, left + width + 2, y + 3)
        if box.within(frame) and not any(box.overlaps(t) for t in taken):
            return Label(wish.name, wish.rank == 0, x, y, anchor), box
    return None


def text_width(text: str, size: float = SIZE) -> float:
    """Pixels that `text` takes, estimated generously: fonts differ from reader to reader."""
    narrow = sum(c in "iljt.,:;|!'()[] " for c in text)
    wide = sum(c in "mwMW@%×" for c in text)
    return size * (0.6 * len(text) - 0.27 * narrow + 0.28 * wide)
