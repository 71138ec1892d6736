"""Cuts: how blocks of rows pass through an operation, read from its projections alone.

Rows are one dim of a tensor, or the major part of one: a batch whose tokens were put into one dim
with it is cut there too. Where `digits` are asked for, rows may be any part of a dim, as those
tokens are. Nothing is known of any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.monoids import single_monoids
from tapestry_egg.zspace import Projection, ZRange


@dataclass(frozen=True, slots=True)
class Cut:
    """Rows lie along a dim of a tensor, `inner` elements of the dim to each, all of them `outer`
    times one after another."""

    dim: int
    inner: int = 1
    outer: int = 1

    def moved(self, by: int) -> Cut:
        """The same rows of a tensor with so many dims more before that one."""
        return Cut(self.dim + by, self.inner, self.outer)


@dataclass(frozen=True)
class Rows:
    """Where an operation has the rows: a cut per operand and per output, None where it has none.

    With `summed` the outputs are sums over rows. `started` is the operand that such a sum starts
    from, if it is not zero; then it may be another `monoid`'s.
    """

    signature: OperationSignature
    inputs: tuple[Cut | None, ...]
    outputs: tuple[Cut | None, ...]
    summed: bool = False
    started: int | None = None
    monoid: str | None = None

    @staticmethod
    def along(
        sig: OperationSignature,
        index: int,
        inner: int = 1,
        any_monoid: bool = False,
        digits: int = 0,
    ) -> Rows | None:
        """The rows of an operation are its index dim `index`, `inner` points to each; None where
        blocks of any of them do not give the blocks, or the partial sums, of what the whole gives.
        With `any_monoid` its results may be partial under others than sums. With `digits` rows may
        be any part of a dim, and are so many times one after another along this one.

        The signature remembers it: rows are followed through a program from many of its inputs.
        """
        known: dict[tuple[int, int, bool, int], Rows | None]
        known = sig.__dict__.setdefault("_rows", {})
        key = index, inner, any_monoid, digits
        if key not in known:
            known[key] = Rows._along(sig, *key)
        return known[key]

    @staticmethod
    def _along(
        sig: OperationSignature, index: int, inner: int, any_monoid: bool, digits: int
    ) -> Rows | None:
        dim = sig.index[index]
        if sig.opaque or sig.once or index in sig.placed or dim.role not in ("map", "reduce"):
            return None
        found: list[Cut | None] = []
        ports = (*zip(sig.inputs, sig.input_types, strict=True),)
        ports += (*zip(sig.outputs, sig.output_types, strict=True),)
        for projection, type_ in ports:
            dims = [k for k, row in enumerate(projection.matrix) if row[index]]
            if not dims:
                found.append(None)
                continue
            digit = _digit(sig, projection, type_, dims[0], index)
            if len(dims) > 1 or digit is None or (not digits and digit[1] > 1):
                return None
            found.append(Cut(dims[0], digit[0] * inner, digit[1] * max(digits, 1)))
        whole = ZRange.from_shape(sig.extents)
        if any(any(m != (0, 0) for m in sig.margins(p, whole)) for p in range(len(sig.inputs))):
            return None  # What lies outside is filled in by whoever runs the kernel.
        inputs, outputs = tuple(found[: len(sig.inputs)]), tuple(found[len(sig.inputs) :])
        if dim.role == "map":
            return None if None in outputs else Rows(sig, inputs, outputs)
        started = sig.initial[0] if sig.initial else None
        if outputs != (None,) or len(sig.initial) > 1:
            return None
        if started is None and dim.monoid != "sum" and not any_monoid:
            return None
        if started is not None and inputs[started] is not None:
            return None
        return Rows(sig, inputs, outputs, True, started, dim.monoid)

    @staticmethod
    def windows(sig: OperationSignature, index: int) -> Rows | None:
        """The same where operands are read in windows that slide along the index dim, so many rows
        at a step; None where an operand has no place for what lies outside of it. Its rows may be
        more or fewer than the steps make up."""
        if sig.opaque or sig.once or index in sig.placed or sig.index[index].role != "map":
            return None
        found: list[Cut | None] = []
        for p, projection in enumerate((*sig.inputs, *sig.outputs)):
            dims = [k for k, row in enumerate(projection.matrix) if row[index]]
            if not dims:
                found.append(None)
                continue
            row, q = projection.matrix[dims[0]], p - len(sig.inputs)
            step = row[index]
            if len(dims) > 1 or step < 1 or min(row) < 0:
                return None
            if q >= 0 and each_of(sig, projection, sig.output_types[q], dims[0], index) is None:
                return None
            if q < 0 and sig.beyond(p) not in single_monoids():
                type_ = sig.input_types[p]
                if each_of(sig, projection, type_, dims[0], index) is None:
                    return None
            found.append(Cut(dims[0], step))
        whole = ZRange.from_shape(sig.extents)
        for p, cut in enumerate(found[: len(sig.inputs)]):
            margins = enumerate(sig.margins(p, whole))
            if any(m != (0, 0) and (cut is None or k != cut.dim) for k, m in margins):
                return None
        inputs, outputs = tuple(found[: len(sig.inputs)]), tuple(found[len(sig.inputs) :])
        return None if None in outputs else Rows(sig, inputs, outputs)

    @staticmethod
    def anywhere(
        sig: OperationSignature, projection: Projection, type_: TensorType, cut: Cut
    ) -> Rows | None:
        """The same as `of`, where rows may be any part of a dim."""
        count = type_.shape[cut.dim] // (cut.inner * cut.outer)
        for index in range(len(sig.index)):
            digit = _digit(sig, projection, type_, cut.dim, index)
            if digit is None or cut.inner % digit[0] or cut.outer % digit[1]:
                continue
            inner, outer = cut.inner // digit[0], cut.outer // digit[1]
            if inner * outer * count == sig.index[index].size:
                return Rows.along(sig, index, inner, digits=outer)
        return None

    @staticmethod
    def of(
        sig: OperationSignature, projection: Projection, type_: TensorType, cut: Cut
    ) -> Rows | None:
        """The rows of an operation one of whose tensors, of this projection and type, has them at
        `cut`."""
        found = major(sig, projection, type_, cut.dim)
        if found is None:
            return None
        index, each = found
        if cut.inner % each:
            return None
        inner = cut.inner // each
        return None if sig.index[index].size % inner else Rows.along(sig, index, inner)


def major(
    sig: OperationSignature, projection: Projection, type_: TensorType, dim: int
) -> tuple[int, int] | None:
    """The index dim whose blocks are the blocks of a dim of a tensor, and how many elements of the
    dim each of its points has."""
    row = projection.matrix[dim]
    if not any(row):
        return None
    index = max(range(len(row)), key=lambda d: abs(row[d]))
    each = each_of(sig, projection, type_, dim, index)
    return None if each is None else (index, each)


def each_of(
    sig: OperationSignature, projection: Projection, type_: TensorType, dim: int, index: int
) -> int | None:
    """How many elements of a tensor's dim a point of an index dim has, if the dim is made of these,
    in order, and of nothing else."""
    digit = _digit(sig, projection, type_, dim, index)
    return digit[0] if digit is not None and digit[1] == 1 else None


def _digit(
    sig: OperationSignature, projection: Projection, type_: TensorType, dim: int, index: int
) -> tuple[int, int] | None:
    """The same, and how often all of these stand in the dim one after another, where other index
    dims say which of them."""
    row, each = projection.matrix[dim], projection.matrix[dim][index]
    if each < 1 or projection.offset[dim] or any(a < 0 for a in row):
        return None
    if not (span := each * sig.index[index].size):
        return None  # a dim of nothing
    steps = [(a, sig.index[d].size - 1) for d, a in enumerate(row) if d != index]
    steps = [(a, n) for a, n in steps if a and n]
    inside = sum(a * n for a, n in steps if a < span)
    around = sum(a * n for a, n in steps if a >= span)
    if inside + projection.shape[dim] != each or around + span != type_.shape[dim]:
        return None
    if any(a % span for a, _ in steps if a >= span) or type_.shape[dim] % span:
        return None
    return each, type_.shape[dim] // span
