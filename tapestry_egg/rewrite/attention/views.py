"""Values seen through views: which digits of which dims a value depends on, and where it is stored.

Every dim of a value is a list of *atoms*, digits of a mixed radix from major to minor; a dim of
extent 1 has none. Transposes, broadcasts and reshapes only rearrange atoms. Where a reshape cuts
through an atom, `Split` says how, and who reads the program starts again with finer ones.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeVar

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection

#: A digit: a name and its extent.
Atom = tuple[Any, int]
Read = TypeVar("Read")
#: Per dim of a value its atoms.
Dims = tuple[tuple[Atom, ...], ...]

_FLOATS = ("bfloat16", "float16", "float32", "float64")


class Split(Exception):
    """An atom must be read as several, of these extents."""

    def __init__(self, atom: Atom, extents: tuple[int, ...]) -> None:
        super().__init__(atom, extents)
        self.atom, self.extents = atom, extents


@dataclass
class Views:
    """A graph whose values are looked at through views."""

    graph: BlockGraph
    splits: dict[Atom, tuple[Atom, ...]] = field(default_factory=dict)
    ended: bool = False  # whether reading what a value is made of ended at a limit

    def __post_init__(self) -> None:
        self.maker: dict[int, Operation] = {
            v: op for op in self.graph.operations for v in op.outputs if len(op.outputs) == 1
        }

        self._views: dict[Any, OperationSignature | None] = {}
        self.readers: dict[int, list[Operation]] = {}
        for op in self.graph.operations:
            for u in dict.fromkeys(op.inputs):
                self.readers.setdefault(u, []).append(op)
        #: value -> the first one that is made the same way, by operations that are as light as
        #: those of masks
        self.first: dict[int, int] = {}
        known: dict[Any, int] = {}
        for v, array in self.graph.constants.items():
            if array.size == 1:
                of = str(array.dtype), self.graph.values[v].shape, array.tobytes()
                self.first[v] = known.setdefault(of, v)
        for op in self.graph.operations:
            if registry.is_light(op, self.graph.values):
                (v,) = op.outputs
                inputs = tuple(self.first.get(u, u) for u in op.inputs)
                key = op.kernel, inputs, repr(op.params), self.graph.values[v]
                self.first[v] = known.setdefault(key, v)

    def fresh(self, name: Any, extents: Sequence[int]) -> Dims:
        """New dims of these extents, split as has been found necessary."""
        return tuple(self._finest(((name, k), n)) if n > 1 else () for k, n in enumerate(extents))

    def _finest(self, atom: Atom) -> tuple[Atom, ...]:
        parts = self.splits.get(atom)
        return (atom,) if parts is None else tuple(a for p in parts for a in self._finest(p))

    def split(self, found: Split) -> None:
        """Read an atom as several from now on. Raises ValueError for one that is split already."""
        if found.atom in self.splits:
            raise ValueError(f"{found.atom} is split already")
        name, _ = found.atom
        self.splits[found.atom] = tuple(((name, k), n) for k, n in enumerate(found.extents))

    def settled(self, read: Callable[[], Read]) -> Read:
        """What `read` returns once no atom has to be finer for it. That comes to an end: an atom is
        split once, and into smaller ones."""
        while True:
            try:
                return read()
            except Split as found:
                self.split(found)

    def see(
        self, v: int, dims: Dims, casts: bool = True, until: Container[int] = ()
    ) -> tuple[int, Dims]:
        """What `v`, whose dims are `dims`, is a view of, and the dims of that; through casts
        between floats, too, unless `casts` is false, and no further than a value of `until`."""
        while v not in until and (op := self.maker.get(v)) is not None:
            inner = self._inside(op, dims, casts)
            if inner is None:
                break
            v, dims = op.inputs[0], inner
        return v if v in until else self.first.get(v, v), dims

    def signature(self, op: Operation) -> OperationSignature:
        """The signature of an operation without regions."""
        return registry.signature_in(self.graph, op)

    def _view(self, op: Operation, casts: bool) -> OperationSignature | None:
        """The signature of an operation that keeps the elements of its one operand, as they are or
        as floats of another dtype; None for any other."""
        key = op.outputs[:1], casts
        if key not in self._views:
            self._views[key] = self._viewed(op, casts)
        return self._views[key]

    def _viewed(self, op: Operation, casts: bool) -> OperationSignature | None:
        if op.regions or len(op.inputs) != 1 or len(op.outputs) != 1:
            return None
        sig = self.signature(op)
        source, made = sig.input_types[0].dtype, sig.output_types[0].dtype
        if sig.opaque or sig.stored or sig.placed or sig.means == "layout" or 0 in sig.extents:
            return None
        if sig.means == "conversion":
            return sig if casts and source in _FLOATS and made in _FLOATS else None
        one = all(d.size == 1 for d in sig.index if d.role == "reduce" and d.monoid == "sum")
        kept = sig.elements == "kept" or (sig.fusion == "reduce" and sig.reduces and one)
        return sig if kept and source == made else None

    def _inside(self, op: Operation, dims: Dims, casts: bool) -> Dims | None:
        """The dims of the operand of a view; None for what is no view."""
        sig = self._view(op, casts)
        if sig is None or sig.inputs[0] is sig.outputs[0]:
            return dims if sig else None  # element by element
        return self.passed(sig, 1, dims, (0,))[0]

    def outside(self, op: Operation, dims: Dims) -> Dims | None:
        """The dims of what a view makes of an operand with these dims; None for what is no view,
        or adds elements."""
        sig = self._view(op, True)
        return self.passed(sig, 0, dims, (1,))[0] if sig else None

    def passed(
        self, sig: OperationSignature, port: int, dims: Dims, to: Sequence[int], name: Any = None
    ) -> list[Dims | None]:
        """The dims of some ports of an operation, which are numbers of operands and then of
        results, where those of one port are `dims`: None where the elements are not those of index
        dims in order. Index dims that it does not have are new, under a `name`, or nothing is
        known of them without one. Raises Split where an atom lies in two index dims."""
        of: dict[int, tuple[Atom, ...]] = {d: () for d, n in enumerate(sig.extents) if n == 1}
        found = _digits(sig, port)
        if found is None:
            return [None] * len(to)
        for digits, own in zip(found, dims, strict=True):
            of.update(zip(digits, regrouped(own, [sig.extents[d] for d in digits]), strict=True))
        rest = [d for d in range(len(sig.index)) if d not in of]
        if name is not None:
            of.update(zip(rest, self.fresh(name, [sig.extents[d] for d in rest]), strict=True))
        made: list[Dims | None] = []
        for k in to:
            rows = _digits(sig, k)
            if rows is None or not of.keys() >= {d for digits in rows for d in digits}:
                made.append(None)
                continue
            there = tuple(tuple(a for d in digits for a in of[d]) for digits in rows)
            shape = (*sig.input_types, *sig.output_types)[k].shape
            made.append(there if tuple(map(extent, there)) == shape else None)
        return made

    def summed(self, op: Operation) -> list[int] | None:
        """The dims of its operand over which an operation sums; None if it is no such sum."""
        if op.regions or len(op.inputs) != 1 or len(op.outputs) != 1:
            return None
        sig = self.signature(op)
        sums = {d for d, dim in enumerate(sig.index) if (dim.role, dim.monoid) == ("reduce", "sum")}
        if sig.fusion != "reduce" or len(sums) < sig.reduces:
            return None
        return [k for k, row in enumerate(sig.inputs[0].matrix) if any(row[d] for d in sums)]

    def is_product(self, op: Operation) -> bool:
        """Whether an operation is a product of two matrices, or of batches of them."""
        return len(op.inputs) == 2 and not op.regions and self.signature(op).is_product

    def operand(self, v: int, dims: Dims) -> Dims:
        """The dims of an operand of elementwise arithmetic whose result has `dims`: none along
        what is repeated for it."""
        shape = self.graph.values[v].shape
        return tuple(d if n > 1 else () for n, d in zip(shape, dims, strict=True)) if shape else ()

    def splat(self, v: int) -> float | None:
        """The number that all elements of a value are, as far as its constants tell."""
        while (op := self.maker.get(v)) is not None and self._view(op, True):
            v = op.inputs[0]
        array = self.graph.constants.get(v)
        if array is None or array.size == 0 or array.dtype.names:
            return None
        if array.size > 1 and not (array == array.flat[0]).all():
            return None
        try:
            return float(np.asarray(array).flat[0])
        except (TypeError, ValueError):
            return None


def _digits(sig: OperationSignature, port: int) -> list[list[int]] | None:
    """Per dim of a tensor the index dims that it is made of, from major to minor; None where they
    are not its digits. The signature remembers it."""
    known: dict[int, list[list[int]] | None] = sig.__dict__.setdefault("_digits", {})
    if port not in known:
        known[port] = _digits_of((*sig.inputs, *sig.outputs)[port], sig.extents)
    return known[port]


def _digits_of(projection: Projection, extents: Sequence[int]) -> list[list[int]] | None:
    if any(projection.offset) or any(n != 1 for n in projection.shape):
        return None
    found = []
    for row in projection.matrix:
        digits = [d for d, a in enumerate(row) if a and extents[d] > 1]
        digits.sort(key=lambda d: -row[d])
        unit = 1
        for d in reversed(digits):
            if row[d] != unit:
                return None
            unit *= extents[d]
        found.append(digits)
    return found


def extent(atoms: Iterable[Atom]) -> int:
    """Elements along some atoms."""
    return prod(n for _, n in atoms)


def atoms_of(dims: Dims) -> tuple[Atom, ...]:
    """All atoms of a value, from major to minor."""
    return tuple(a for d in dims for a in d)


def regrouped(atoms: Sequence[Atom], shape: Sequence[int]) -> Dims:
    """The atoms as dims of a shape. Raises Split where one lies in two of them."""
    out: list[tuple[Atom, ...]] = []
    rest = list(atoms)
    for n in shape:
        mine: list[Atom] = []
        have = 1
        while have < n:
            if not rest:
                raise ValueError(f"{atoms} are fewer than {tuple(shape)}")
            atom = rest.pop(0)
            if n % (have * atom[1]):
                needed = n // have
                if n % have == 0 and atom[1] % needed == 0:
                    raise Split(atom, (needed, atom[1] // needed))
                raise ValueError(f"{atoms} are not digits of {tuple(shape)}")
            mine.append(atom)
            have *= atom[1]
        out.append(tuple(mine))
    return tuple(out)


def renamed(dims: Dims, names: Mapping[Atom, Atom]) -> Dims:
    """The dims with some atoms under other names."""
    return tuple(tuple(names.get(a, a) for a in d) for d in dims)


def unified(ours: Dims, theirs: Dims, free: Iterable[Atom]) -> dict[Atom, Atom] | None:
    """Names under which the `free` atoms of `theirs` make them equal to `ours`; None if none do."""
    loose, names = set(free), dict[Atom, Atom]()
    for a, b in zip(atoms_of(ours), atoms_of(theirs), strict=False):
        if b in loose and a[1] == b[1] and names.setdefault(b, a) == a:
            continue
        if a != b:
            return None
    same = [extent(d) for d in ours] == [extent(d) for d in theirs]
    return names if same and len(atoms_of(ours)) == len(atoms_of(theirs)) else None
