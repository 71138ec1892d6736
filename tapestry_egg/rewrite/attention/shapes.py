"""New operations between values: dims brought into another order, grouped, or repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tapestry_egg.graph.blockgraph import Operation, TensorType

from .views import Atom, Dims, atoms_of, extent


@dataclass
class Builder:
    """Operations that are made for one place of a program; equal ones are made once."""

    values: list[TensorType]
    like: Operation  # source, scope and number of recomputation of what is made
    operations: list[Operation] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def make(
        self, kernel: str, inputs: Sequence[int], type_: TensorType, params: dict[str, Any]
    ) -> int:
        """The value of one operation with one result."""
        key = kernel, tuple(inputs), type_, repr(params)
        if key not in self.known:
            (self.known[key],) = self.several(kernel, inputs, [type_], params)
        return self.known[key]

    def several(
        self, kernel: str, inputs: Sequence[int], types: Sequence[TensorType], params: Any
    ) -> list[int]:
        """The values of one operation."""
        out = []
        for type_ in types:
            self.values.append(type_)
            out.append(len(self.values) - 1)
        like = self.like
        self.operations.append(
            Operation(
                kernel,
                tuple(inputs),
                tuple(out),
                params,
                source=like.source,
                scope=like.scope,
                remat=like.remat,
            )
        )
        return out

    def cast(self, v: int, dtype: str) -> int:
        """The value in a dtype."""
        type_ = self.values[v]
        if type_.dtype == dtype:
            return v
        params = {"new_dtype": {"$dtype": dtype}, "weak_type": False, "sharding": None}
        return self.make("convert_element_type", (v,), TensorType(type_.shape, dtype), params)

    def scaled(self, v: int, constant: int) -> int:
        """The value times a scalar."""
        return self.make("mul", (v, constant), self.values[v].strong, {"out_dtype": None})

    def reshaped(self, v: int, shape: tuple[int, ...]) -> int:
        """The value with its elements, in their order, in another shape."""
        type_ = self.values[v]
        if type_.shape == shape:
            return v
        params = {"new_sizes": list(shape), "dimensions": None, "sharding": None}
        return self.make("reshape", (v,), TensorType(shape, type_.dtype), params)

    def arranged(self, v: int, dims: Dims, groups: Sequence[Sequence[Atom]]) -> int:
        """The value `v` of these dims with one dim for each group of atoms, in that order. It is
        repeated along atoms that it has not, where it has others of the group; groups of which it
        has none get extent 1."""
        have = set(atoms_of(dims))
        wanted = [tuple(g) if have & set(g) else () for g in groups]
        order = [a for g in wanted for a in g]
        own = [a for a in order if a in have]
        if [a for a in atoms_of(dims)] != own:
            v = self.reshaped(v, tuple(n for _, n in atoms_of(dims)))
            at = list(atoms_of(dims))
            permutation = [at.index(a) for a in own]
            if permutation != sorted(permutation):
                type_ = TensorType(tuple(n for _, n in own), self.values[v].dtype)
                v = self.make("transpose", (v,), type_, {"permutation": permutation})
        if own != order:
            v = self.reshaped(v, tuple(n for _, n in own))
            shape = tuple(n for _, n in order)
            params = {
                "shape": list(shape),
                "broadcast_dimensions": [order.index(a) for a in own],
                "sharding": None,
            }
            type_ = TensorType(shape, self.values[v].dtype)
            v = self.make("broadcast_in_dim", (v,), type_, params)
        return self.reshaped(v, tuple(extent(g) for g in wanted))

    def put_back(self, v: int, groups: Sequence[Sequence[Atom]], dims: Dims, type_: Any) -> int:
        """The value whose dims are the groups as one with `dims` of that type."""
        flat = [a for g in groups for a in g]
        target = list(atoms_of(dims))
        if flat != target:
            v = self.reshaped(v, tuple(n for _, n in flat))
            permutation = [flat.index(a) for a in target]
            shape = tuple(n for _, n in target)
            made = TensorType(shape, self.values[v].dtype)
            v = self.make("transpose", (v,), made, {"permutation": permutation})
        v = self.reshaped(v, tuple(extent(d) for d in dims))
        return self.cast(v, type_.dtype)
