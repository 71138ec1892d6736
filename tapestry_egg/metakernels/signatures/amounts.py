"""Amounts of an operation that follow from its index extents: polynomials, what it holds beside its
operands while it runs, and what it reads or writes at scattered places."""

from __future__ import annotations

from dataclasses import dataclass

#: A polynomial over index extents: sum over terms of coefficient × product of the named extents.
#: `((2.0, (0, 1, 2)),)` is 2·n0·n1·n2.
Polynomial = tuple[tuple[float, tuple[int, ...]], ...]
#: Bytes of the scores that kernels in blocks compute at a time: what caches hold beside operands,
#: so that a block that is stored between two products is not read from memory. On CPUs 4 MiB were
#: the fastest of 2 to 16.
ROOM = 4 << 20
#: The least extent of a block of scores along the dim that is cut into blocks: with fewer, what is
#: read for a product takes longer than the product.
LEAST = 256
#: Where attention has more than so many blocks they are larger, up to `MOST` bytes of scores: each
#: is so many kernels more. On an H100 a step of GPT-2 in blocks of 4 MiB took thrice as long.
BLOCKS, MOST = 16, 16 << 20


@dataclass(frozen=True, slots=True)
class Scratch:
    """What a kernel takes beside operands and results while it runs, in bytes.

    Of one that runs in blocks of its scores a block holds what has `ROOM`, or where there are more
    than `BLOCKS` of them up to `MOST`, and one `row` at least; `blocks` of them are there at a
    time, `fused` where products compute what is made of them (`Target.epilogues`), and what
    `beside` says. Others have no blocks, and what `walked` says in the place of `beside` where
    products do that. All in index extents. Blocks lie along the longest of the index dims `along`,
    if there are any, and have `ROOM` and `LEAST` of it.
    """

    blocks: float
    scores: Polynomial
    row: Polynomial
    beside: Polynomial
    along: tuple[int, ...] = ()
    fused: float = 0.0
    walked: Polynomial = ()

    def bytes_at(self, extents: tuple[int, ...], epilogues: bool = False) -> float:
        """On a device whose part of the index space has these extents."""
        scores, least = evaluate(self.scores, extents), evaluate(self.row, extents)
        if self.along:
            least = LEAST * scores / max(extents[d] for d in self.along)
        else:
            least = max(least, min(scores / BLOCKS, float(MOST)))
        block = min(scores, max(float(ROOM), least))
        blocks = self.fused if epilogues else self.blocks
        beside = self.walked if epilogues else self.beside
        return blocks * block + evaluate(beside, extents)

    def block(self, extents: tuple[int, ...]) -> tuple[int, int]:
        """The index dim that blocks lie along, and the extent of one of them."""
        longest = max(self.along, key=lambda d: extents[d])
        row = evaluate(self.scores, extents) / max(1, extents[longest])
        fitting = 1 << max(0, int(ROOM // max(1.0, row)).bit_length() - 1)
        return longest, max(1, min(max(LEAST, fitting), extents[longest]))


@dataclass(frozen=True, slots=True)
class Blocks:
    """The kernels that each block of the scores of a kernel is (`Scratch`, with `along`) where a
    compiler stores what a product makes.

    `products` are the index dims (batch, m, n, k) of each product of matrices, whose operands are
    as wide as those of the kernel, and whose results are in float32 at least. Beside these there
    are so many `kernels` a block, which together move the bytes `moved` of all scores, and `again`
    for each block. All in index extents.
    """

    products: tuple[tuple[tuple[int, ...], ...], ...]
    moved: Polynomial
    again: Polynomial
    kernels: float


def evaluate(polynomial: Polynomial, extents: tuple[int, ...]) -> float:
    """Value of a polynomial at the given index extents."""
    total = 0.0
    for coefficient, dims in polynomial:
        term = coefficient
        for d in dims:
            term *= extents[d]
        total += term
    return total


@dataclass(frozen=True, slots=True)
class Scattered:
    """What a kernel reads, or adds to, at places that are data.

    Bytes of `elements`, each of `itemsize` bytes, count with those of operand `operand`; they are
    touched `times` times (2: read and written), in runs of `run` bytes that lie together, `unit`
    bytes by one instruction of its threads, each run anywhere among `within` bytes. `counted` says
    that memory's traffic has them already, once.
    """

    operand: int
    elements: Polynomial
    itemsize: int
    run: float
    unit: float
    within: float
    times: float
    counted: bool

    def bytes_at(self, extents: tuple[int, ...]) -> float:
        """Bytes of the elements themselves, once, where the index space has these extents."""
        return evaluate(self.elements, extents) * self.itemsize
