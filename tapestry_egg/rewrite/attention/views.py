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

    def _inside(self, op: Operation, dims: Dims, casts: bool) -> Dims | None:
        """The dims of the operand of a view; None for what is no view."""
        kernel, p = op.kernel, op.params
        if kernel == "stop_gradient" or kernel == "copy":
            return dims
        if not op.inputs:
            return None
        source = self.graph.values[op.inputs[0]]
        if kernel == "convert_element_type":
            target = self.graph.values[op.outputs[0]].dtype
            return dims if casts and source.dtype in _FLOATS and target in _FLOATS else None
        if kernel == "transpose":
            at = {int(d): dims[k] for k, d in enumerate(p["permutation"])}
            return tuple(at[d] for d in range(source.rank))
        if kernel == "broadcast_in_dim" and len(op.inputs) == 1:
            return tuple(
                dims[int(d)] if n > 1 else ()
                for n, d in zip(source.shape, p["broadcast_dimensions"], strict=True)
            )
        if kernel == "squeeze":
            gone = {int(d) % source.rank for d in p["dimensions"]}
            kept = iter(dims)
            return tuple(() if d in gone else next(kept) for d in range(source.rank))
        if kernel == "expand_dims":
            return tuple(d for k, d in enumerate(dims) if k not in p["dimensions"])
        if kernel == "reshape" and len(op.inputs) == 1:
            return regrouped([a for d in dims for a in d], source.shape)
        if kernel == "reduce_sum" and all(source.shape[int(a)] == 1 for a in p["axes"]):
            kept = iter(dims)
            return tuple(() if d in p["axes"] else next(kept) for d in range(source.rank))
        return None

    def outside(self, op: Operation, dims: Dims) -> Dims | None:
        """The dims of what a view makes of an operand with these dims; None for what is no view,
        or adds elements."""
        shape = self.graph.values[op.outputs[0]].shape
        kernel, p = op.kernel, op.params
        if kernel in ("convert_element_type", "stop_gradient", "copy"):
            return dims
        if kernel == "transpose":
            return tuple(dims[int(d)] for d in p["permutation"])
        if kernel == "reshape":
            return regrouped([a for d in dims for a in d], shape)
        if kernel in ("squeeze", "expand_dims"):
            return regrouped([a for d in dims for a in d], shape)
        if kernel == "broadcast_in_dim":
            at = dict(zip(p["broadcast_dimensions"], dims, strict=True))
            made = tuple(at.get(d, ()) for d in range(len(shape)))
            return made if all(extent(d) == n for d, n in zip(made, shape, strict=True)) else None
        return None

    def operand(self, v: int, dims: Dims) -> Dims:
        """The dims of an operand of elementwise arithmetic whose result has `dims`: none along
        what is repeated for it."""
        shape = self.graph.values[v].shape
        return tuple(d if n > 1 else () for n, d in zip(shape, dims, strict=True)) if shape else ()

    def splat(self, v: int) -> float | None:
        """The number that all elements of a value are, as far as its constants tell."""
        v, _ = self.see(v, tuple(() for _ in self.graph.values[v].shape))
        array = self.graph.constants.get(v)
        if array is None or array.size == 0 or array.dtype.names:
            return None
        if array.size > 1 and not (array == array.flat[0]).all():
            return None
        try:
            return float(np.asarray(array).flat[0])
        except (TypeError, ValueError):
            return None


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
