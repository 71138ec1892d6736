"""Views and selectors: tensors that are other tensors read in another order, by affine maps.

Every cell of a view is one cell of its base: cell v is cell A·v + b. Selecting, permuting,
reversing, slicing with a step, and repeating along a new dim are such maps, they compose, and cost
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tapestry_egg.errors import TapestryError, TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.zspace import Projection, ZRange

from . import registry

Ints = tuple[int, ...]


class ViewError(TapestryError):
    """A view or selector is malformed, or does not fit its tensor."""


@dataclass(frozen=True, slots=True)
class View:
    """A tensor of `shape`: its cell v is cell `matrix`·v + `offset` of a tensor of shape `base`.

    `matrix` has a row per dim of the base and a column per dim of the view. Raises ViewError where
    the pieces do not fit, or where some cell would be outside the base.
    """

    base: Ints
    shape: Ints
    matrix: tuple[Ints, ...]
    offset: Ints

    def __post_init__(self) -> None:
        if any(len(row) != len(self.shape) for row in self.matrix) or not (
            len(self.matrix) == len(self.offset) == len(self.base)
        ):
            raise ViewError(f"a map {self.matrix}, {self.offset} does not lead to {self.base}")
        image = self.projection().image(ZRange.from_shape(self.shape))
        if not image.is_empty and not ZRange.from_shape(self.base).contains(image):
            raise ViewError(f"the view reaches {image} of a tensor of shape {self.base}")

    @staticmethod
    def of(base: Sequence[int]) -> View:
        """The tensor itself."""
        n = len(base)
        eye = tuple(tuple(int(k == d) for d in range(n)) for k in range(n))
        return View(tuple(base), tuple(base), eye, (0,) * n)

    # Elementary views of this view

    def select(self, dim: int, index: int) -> View:
        """Without dim `dim`, at `index` of it; both may count from the end."""
        d = self._dim(dim)
        i = index + self.shape[d] if index < 0 else index
        if not 0 <= i < self.shape[d]:
            raise ViewError(f"there is no index {index} in dim {dim} of {self.shape}")
        return self._columns([c for c in range(self.rank) if c != d], {d: i})

    def slice(
        self, dim: int, start: int | None = None, stop: int | None = None, step: int | None = None
    ) -> View:
        """Every `step`-th index of dim `dim` from `start` to before `stop`, as Python slices."""
        d = self._dim(dim)
        if step == 0:
            raise ViewError("a slice cannot have step 0")
        taken = range(self.shape[d])[start:stop:step]
        scale = {d: taken.step}
        first = {d: taken.start} if taken else {}
        sizes = [len(taken) if c == d else n for c, n in enumerate(self.shape)]
        return self._columns(range(self.rank), first, scale, sizes)

    def reverse(self, *dims: int) -> View:
        """The given dims backwards."""
        out = self
        for dim in dims:
            out = out.slice(dim, step=-1)
        return out

    def permute(self, order: Sequence[int]) -> View:
        """Dim `order[k]` in place k, as `numpy.transpose`."""
        dims = [self._dim(d) for d in order]
        if sorted(dims) != list(range(self.rank)):
            raise ViewError(f"{tuple(order)} is not an order of the dims of {self.shape}")
        return self._columns(dims)

    def unsqueeze(self, dim: int, size: int = 1) -> View:
        """With a new dim of extent `size` in place `dim`, along which everything repeats."""
        if not -self.rank - 1 <= dim <= self.rank or size < 0:
            raise ViewError(f"there is no place {dim} for a dim of {size} in {self.shape}")
        d = dim % (self.rank + 1)
        return View(
            self.base,
            (*self.shape[:d], size, *self.shape[d:]),
            tuple((*row[:d], 0, *row[d:]) for row in self.matrix),
            self.offset,
        )

    def broadcast(self, shape: Sequence[int]) -> View:
        """Of another shape by NumPy's rule: dims of 1 repeat, and new ones come in front."""
        if len(shape) < self.rank:
            raise ViewError(f"{self.shape} does not broadcast to {tuple(shape)}")
        out = self
        for n in reversed(shape[: len(shape) - self.rank]):
            out = out.unsqueeze(0, n)
        for d, (have, want) in enumerate(zip(out.shape, shape, strict=True)):
            if have == 1 != want:
                out = out.select(d, 0).unsqueeze(d, want)
            elif have != want:
                raise ViewError(f"{self.shape} does not broadcast to {tuple(shape)}")
        return out

    def diagonal(self, one: int = 0, other: int = 1) -> View:
        """The cells where two dims of equal extent have equal indices; the dim comes last."""
        a, b = self._dim(one), self._dim(other)
        if a == b or self.shape[a] != self.shape[b]:
            raise ViewError(f"dims {one} and {other} of {self.shape} have no diagonal")
        rest = [c for c in range(self.rank) if c not in (a, b)]
        return View(
            self.base,
            (*(self.shape[c] for c in rest), self.shape[a]),
            tuple((*(row[c] for c in rest), row[a] + row[b]) for row in self.matrix),
            self.offset,
        )

    def split(self, dim: int, sizes: Sequence[int]) -> View:
        """Dim `dim` as several, row-major: [6] as [2, 3] maps (i, j) to 3i + j."""
        d = self._dim(dim)
        if prod(sizes) != self.shape[d]:
            raise ViewError(f"dim {dim} of {self.shape} is not of {tuple(sizes)}")
        steps = [prod(sizes[k + 1 :]) for k in range(len(sizes))]
        return View(
            self.base,
            (*self.shape[:d], *sizes, *self.shape[d + 1 :]),
            tuple((*r[:d], *(r[d] * s for s in steps), *r[d + 1 :]) for r in self.matrix),
            self.offset,
        )

    def at(self, selector: str) -> View:
        """The view that a selector picks out: `"..., :2:2, +, +3, 0"`.

        One entry per dim, from the left: an index drops the dim, `a:b:step` slices it, `+` and `+k`
        make a new dim of extent 1 or k, and `...` stands for as many whole dims as are left over;
        without it they are at the end. Raises ViewError with the entry at fault.
        """
        entries = [e.strip() for e in selector.split(",")] if selector.strip() else []
        if entries.count("...") > 1:
            raise ViewError(f"{selector!r} has two `...`")
        spare = self.rank - sum(not e.startswith("+") and e != "..." for e in entries)
        if spare < 0:
            raise ViewError(f"{selector!r} has entries for more dims than {self.shape} has")
        out, d = self, 0
        for entry in entries:
            if entry == "...":
                d += spare
            elif found := re.fullmatch(r"\+(\d*)", entry):
                out, d = out.unsqueeze(d, int(found[1] or 1)), d + 1
            elif re.fullmatch(r"-?\d+", entry):
                out = out.select(d, int(entry))
            elif found := re.fullmatch(r"(-?\d+)?:(-?\d+)?(?::(-?\d+)?)?", entry):
                ends = [None if g is None else int(g) for g in found.groups()]
                out, d = out.slice(d, *ends), d + 1
            else:
                raise ViewError(
                    f"{entry!r} in {selector!r} is no selector",
                    hint="Write an index, a:b:step, +k for a new dim, or `...`.",
                )
        return out

    # What it is

    @property
    def rank(self) -> int:
        return len(self.shape)

    def then(self, outer: View) -> View:
        """The view `outer` of this view, as a view of this one's base."""
        if outer.base != self.shape:
            raise ViewError(f"a view of {outer.base} does not apply to {self.shape}")
        return View(
            self.base,
            outer.shape,
            tuple(
                tuple(
                    sum(a * outer.matrix[j][d] for j, a in enumerate(row))
                    for d in range(outer.rank)
                )
                for row in self.matrix
            ),
            tuple(
                b + sum(a * o for a, o in zip(row, outer.offset, strict=True))
                for row, b in zip(self.matrix, self.offset, strict=True)
            ),
        )

    def projection(self) -> Projection:
        """The same as an index projection: each cell of the view reads one cell of the base."""
        return Projection(self.matrix, self.offset, (1,) * len(self.base), index_rank=self.rank)

    def read(self, array: np.ndarray) -> np.ndarray:
        """The view of an array, without a copy. Raises ViewError for an array of another shape."""
        if array.shape != self.base:
            raise ViewError(f"an array of shape {array.shape} is not a base of {self.base}")
        if 0 in self.shape:
            return np.empty(self.shape, array.dtype)
        first = array[tuple(slice(b, None) for b in self.offset)]
        steps = tuple(
            sum(row[d] * s for row, s in zip(self.matrix, array.strides, strict=True))
            for d in range(self.rank)
        )
        return np.lib.stride_tricks.as_strided(first, self.shape, steps, writeable=False)

    def show(self, names: Sequence[str] = ()) -> str:
        """What is read for the view's dims i0, i1, ..: `[3-i0, 2i1]`."""
        return self.projection().show(names)

    def __str__(self) -> str:
        return f"{list(self.base)} as {list(self.shape)} by {self.show()}"

    def _dim(self, dim: int) -> int:
        if not -self.rank <= dim < self.rank:
            raise ViewError(f"{self.shape} has no dim {dim}")
        return dim % self.rank

    def _columns(
        self,
        dims: Sequence[int],
        at: Mapping[int, int] | None = None,
        scale: Mapping[int, int] | None = None,
        sizes: Sequence[int] | None = None,
    ) -> View:
        """The given dims in this order, scaled, with fixed amounts of some dims added."""
        shape = self.shape if sizes is None else sizes
        scale = scale or {}
        return View(
            self.base,
            tuple(shape[d] for d in dims),
            tuple(tuple(row[d] * scale.get(d, 1) for d in dims) for row in self.matrix),
            tuple(
                b + sum(row[d] * i for d, i in (at or {}).items())
                for row, b in zip(self.matrix, self.offset, strict=True)
            ),
        )


# ---- views in graphs ---------------------------------------------------------------------------


def view_of(operation: Operation, source: Ints, target: Ints) -> View | None:
    """The operation as a view of its operand; None where it is none, or the identity.

    Whatever keeps elements and reads one of them for each of its own is a view, as its projections
    say; a reshape only where it splits dims and adds or drops dims of 1. An operation whose
    parameters do not fit its types is none.
    """
    types = [TensorType(shape, "float32") for shape in (source, target)]
    try:
        sig = registry.signature(operation.kernel, operation.params, types[:1], types[1:])
    except TemplateError:
        return None
    if sig.opaque or sig.means or sig.elements != "kept" or sig.stored or any(sig.outside):
        return None
    read, made = sig.inputs[0], sig.outputs[0]
    if any(n != 1 for n in (*read.shape, *made.shape)):
        return None
    columns: list[Ints] = []  # per dim of the view, by how much it moves along those of the base
    for row, n in zip(made.matrix, target, strict=True):
        dims = [d for d, a in enumerate(row) if a and sig.extents[d] != 1]
        if len(dims) > 1 or (dims and row[dims[0]] != 1):
            return None
        columns.append(tuple(r[dims[0]] if dims and n != 1 else 0 for r in read.matrix))
    matrix = tuple(zip(*columns, strict=True)) if columns else ((),) * len(source)
    found = View(source, target, matrix, tuple(read.offset))
    return None if source == target and found == View.of(source) else found


def folded_views(graph: BlockGraph) -> dict[int, tuple[int, View]]:
    """Values that are views, as views of values that are none: value -> (base, view).

    Chains of views are one view of where they start. Values inside regions are not looked at.
    """
    found: dict[int, tuple[int, View]] = {}
    for op in graph.operations:
        if len(op.inputs) != 1 or len(op.outputs) != 1 or op.regions:
            continue
        (v,), (w,) = op.inputs, op.outputs
        made = view_of(op, graph.values[v].shape, graph.values[w].shape)
        if made is not None:
            base, before = found.get(v, (v, View.of(graph.values[v].shape)))
            found[w] = (base, before.then(made))
    return found
