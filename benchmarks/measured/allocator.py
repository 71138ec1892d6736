"""PyTorch's caching allocator for one device and stream (2.1, c10/cuda/CUDACachingAllocator.cpp).

Sizes are rounded to 512 bytes. Up to 1 MiB comes from segments of 2 MiB, larger ones from segments
of 20 MiB or, from 10 MiB, of their own size in steps of 2 MiB. The smallest free block that is
large enough serves, and is split where more is left than 1 MiB (of small ones: any). A block that
another stream reads is free only when that stream is done with it. Where the device has no memory,
segments that are free as a whole go back to it, and the request is tried once more.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

MIB = 2**20


class OutOfMemory(Exception):
    """The device has too little memory for a request."""


@dataclass(eq=False, slots=True)
class Block:
    """Bytes of a segment, between two others of it or its ends."""

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


@dataclass
class Allocator:
    """Blocks in use, free, and waiting for another stream; all amounts in bytes.

    `reserved` is what it has of the device, `in_use` what was asked for and not given back, and
    `most_in_use` the largest amount so far. `flushes` counts how often segments went back.
    """

    capacity: float
    reserved: int = 0
    in_use: int = 0
    most_in_use: int = 0
    flushes: int = 0
    _next: int = 0
    _free: dict[bool, list[tuple[int, int, Block]]] = field(
        default_factory=lambda: {True: [], False: []}
    )
    _waiting: list[tuple[float, Block]] = field(default_factory=list)

    def take(self, nbytes: float, now: float = 0.0) -> Block:
        """A block of so many bytes at the time `now`. Raises OutOfMemory."""
        size = max(512, -(-int(nbytes) // 512) * 512)
        self._collect(now)
        block = self._found(size) or self._segment(size)
        if block is None:
            self._collect(float("inf"))
            self._flush()
            block = self._found(size) or self._segment(size)
        if block is None:
            raise OutOfMemory
        left = block.size - size
        if left >= 512 if block.small else left > MIB:
            rest = Block(block.address + size, left, block.small, True, block, block.after)
            if block.after is not None:
                block.after.before = rest
            block.size, block.after = size, rest
            insort(self._free[rest.small], (rest.size, rest.address, rest))
        self.in_use += block.size
        self.most_in_use = max(self.most_in_use, self.in_use)
        return block

    def give(self, block: Block, done: float = float("-inf")) -> None:
        """Give back a block that another stream reads until the time `done`."""
        self.in_use -= block.size
        if done > float("-inf"):
            self._waiting.append((done, block))
        else:
            self._join(block)

    def _collect(self, now: float) -> None:
        done = [b for t, b in self._waiting if t <= now]
        if done:
            self._waiting = [(t, b) for t, b in self._waiting if t > now]
            for block in done:
                self._join(block)

    def _found(self, size: int) -> Block | None:
        pool = self._free[size <= MIB]
        k = bisect_left(pool, (size, -1))
        if k == len(pool):
            return None
        block = pool.pop(k)[2]
        block.free = False
        return block

    def _segment(self, size: int) -> Block | None:
        small = size <= MIB
        whole = (
            2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        )
        if self.reserved + whole > self.capacity:
            return None
        self.reserved += whole
        self._next += whole
        return Block(self._next - whole, whole, small)

    def _join(self, block: Block) -> None:
        """Make a block free, together with those beside it."""
        first, last = block.before, block.after
        if first is not None and first.free:
            self._remove(first)
            first.size, first.after = first.size + block.size, last
            if last is not None:
                last.before = first
            block = first
        if last is not None and last.free:
            self._remove(last)
            block.size, block.after = block.size + last.size, last.after
            if last.after is not None:
                last.after.before = block
        block.free = True
        insort(self._free[block.small], (block.size, block.address, block))

    def _remove(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size, block.address)))

    def _flush(self) -> None:
        self.flushes += 1
        for small, pool in self._free.items():
            whole = [x for x in pool if x[2].before is None and x[2].after is None]
            self.reserved -= sum(size for size, _, _ in whole)
            self._free[small] = [x for x in pool if x not in whole]
