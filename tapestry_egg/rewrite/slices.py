"""Stacks of slices: what a program makes of the slices of one array, in order, is that array.

A slice is what the projections of an operation say: elements of one operand, by equal steps in each
dim. Slices of one array whose starts are as far apart as its blocks are that array, reshaped. What
light operations make of slices, the same of each, they make of the whole. So a concatenation of
slices is the array in another shape, and so is a sum of slices that are padded to places side by
side; any other sum of slices is a sum over a dim.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.computed import Computed
from tapestry_egg.rewrite.rows.shifts import is_zero, place_of
from tapestry_egg.rewrite.streams.written import Read, Written
from tapestry_egg.tracing.needless import Steps, made_once, steps_of
from tapestry_egg.zspace import Projection

from .folded_program import Net

# Light operations between slices and what reads them, at most. No measurement is kept.
_DEPTH = 64

#: A value of every copy.
Values = tuple[int, ...]


@dataclass(frozen=True)
class Blocks:
    """Slices of one value that are blocks of it along `dim`, `count` of them: the elements from
    `start` on are `sizes` blocks one after another, each of so many elements. Slices are numbered
    by these blocks if they are `outer`, else by the elements of each; along the latter are
    `within` elements from `first` on. `steps` are those of each slice, in the other dims."""

    source: int
    steps: Steps
    shape: tuple[int, ...]
    dim: int
    start: int
    sizes: tuple[int, int]
    within: tuple[int, int, int]
    outer: bool

    def stack(self, x: Any) -> Any:
        """The slices of the value, in order: [slices, ...]."""
        import jax.numpy as jnp
        from jax import lax

        d, taken = self.dim, []
        for k, ((start, step), n) in enumerate(zip(self.steps, self.shape, strict=True)):
            whole = (self.start, 1, self.sizes[0] * self.sizes[1])
            taken.append(whole if k == d else (start, step, n))
        starts = [start for start, _, _ in taken]
        ends = [start + (n - 1) * step + 1 for start, step, n in taken]
        shape = [n for _, _, n in taken]
        if shape != [*x.shape]:
            x = lax.slice(x, starts, ends, [step for _, step, _ in taken])
        x = x.reshape(*shape[:d], *self.sizes, *shape[d + 1 :])
        first, step, n = self.within
        if n != self.sizes[1]:
            x = lax.slice_in_dim(x, first, first + (n - 1) * step + 1, step, axis=d + 1)
        return jnp.moveaxis(x, d if self.outer else d + 1, 0)


@dataclass(frozen=True)
class Alike:
    """What an operation makes of each of many: of what it reads there, or of a value that is the
    same for all."""

    op: Operation
    reads: tuple[Recipe | int, ...]


#: How a stack of many values is made.
Recipe = Blocks | Alike


class Slices:
    """What a program has of slices."""

    def __init__(self, graph: BlockGraph, net: Net) -> None:
        self.graph, self.net = graph, net
        self.steps: dict[int, tuple[int, Steps]] = {}  # of each slice its source, and where it is
        for op in graph.operations:
            taken = None if op.remat is not None else steps_of(op, graph.values)
            if taken is not None:
                self.steps[op.outputs[0]] = op.inputs[taken[0]], taken[1]
        self._found: dict[Values, Recipe | None] = {}
        #: What light operations make, with few of these between it and what others make.
        self.light: dict[int, Operation] = {}
        #: Of each value a number, equal where values may be slices of one array, or be made alike
        #: of such.
        self.number = _numbers(graph, net)
        self.kind = [*self.number]
        kinds: dict[Hashable, int] = {}
        depth: dict[int, int] = {}  # of what is made of slices
        for k, op in enumerate(graph.operations):
            levels = 1 + max([depth[u] for u in op.inputs if u in depth], default=_DEPTH)
            for v in op.outputs:
                key: Hashable = None
                if v in self.steps:
                    source, steps = self.steps[v]
                    key, depth[v] = (source, tuple([t for _, t in steps]), graph.values[v]), 0
                elif levels <= _DEPTH and is_light(graph, op):
                    self.light[v], depth[v] = op, levels
                    key = int(net.kind[k]), tuple([self.kind[u] for u in op.inputs])
                if key is not None:
                    self.kind[v] = -1 - kinds.setdefault(key, len(kinds))

    def order(self, values: Values) -> list[int] | None:
        """The order in which values are the slices of one array, or made alike of these; None if
        they are not."""
        for own in self._sliced(values, set()):
            starts = [[a for a, _ in self.steps[v][1]] for v in own]
            order = sorted(range(len(values)), key=starts.__getitem__)
            if self.recipe(tuple([values[k] for k in order])) is not None:
                return order
        return None

    def recipe(self, values: Values) -> Recipe | None:
        """How a stack of values is made of arrays that they are slices of, in order; None if they
        are not."""
        if values not in self._found:
            self._found[values] = None  # until it is known
            self._found[values] = self._blocks(values) or self._alike(values)
        return self._found[values]

    def _sliced(self, values: Values, seen: set[Values]) -> Iterator[Values]:
        """Slices of one array of which values are made, or which they are; those that were `seen`
        are left out."""
        if values in seen:
            return
        seen.add(values)
        if all(v in self.steps for v in values):
            yield values
            return
        if len({self.kind[v] for v in values}) == 1 and values[0] in self.light:
            for own in zip(*[self.light[v].inputs for v in values], strict=True):
                if not self.is_shared(own):
                    yield from self._sliced(own, seen)

    def is_shared(self, values: Values) -> bool:
        """Whether values are the same, or constants of the same elements."""
        if len({self.number[v] for v in values}) == 1:
            return True
        found = [self.graph.constants.get(v) for v in values]
        first = found[0]
        return first is not None and all(x is not None and np.array_equal(x, first) for x in found)

    def _alike(self, values: Values) -> Alike | None:
        net, ops = self.net, [op for v in values if (op := self.light.get(v)) is not None]
        alike = len({int(net.kind[net.producer[v]]) for v in values}) == 1
        if len(ops) < len(values) or not alike:
            return None
        reads: list[Recipe | int] = []
        for own in zip(*[op.inputs for op in ops], strict=True):
            found = own[0] if self.is_shared(own) else self.recipe(own)
            if found is None:
                return None
            reads.append(found)
        return Alike(ops[0], tuple(reads)) if any(not isinstance(r, int) for r in reads) else None

    def _blocks(self, values: Values) -> Blocks | None:
        """The slices of one array, each as far from the next one."""
        every = [self.steps.get(v) for v in values]
        types = {self.graph.values[v] for v in values}
        first = every[0]
        if first is None or len(types) > 1 or len(values) < 2:
            return None
        if any(own is None or own[0] != first[0] for own in every):
            return None
        (source, steps), shape = first, types.pop().shape
        found = [own[1] for own in every if own is not None]
        if any([t for _, t in own] != [t for _, t in steps] for own in found):
            return None
        starts = np.array([[a for a, _ in own] for own in found])
        moves = np.diff(starts, axis=0)
        dims = np.flatnonzero(moves.any(axis=0)).tolist()
        if len(dims) != 1 or (moves != moves[0]).any() or moves[0, dims[0]] < 1:
            return None
        (d,) = dims
        start, inside = steps[d]
        between = (int(moves[0, d]), len(values))
        within = (inside, shape[d])
        for outer, (each, count), (step, n) in (
            (True, between, within),
            (False, within, between),
        ):
            begin = min(start, self.graph.values[source].shape[d] - each * count)
            if begin >= 0 and start - begin + step * (n - 1) < each:
                sizes, part = (count, each), (start - begin, step, n)
                return Blocks(source, steps, shape, d, begin, sizes, part, outer)
        return None


def _numbers(graph: BlockGraph, net: Net) -> list[int]:
    """A number for each value: equal where the same operations make them of the same."""
    numbers: dict[object, int] = {}
    found = [-1] * len(graph.values)
    for v in (*graph.inputs, *graph.constants):
        own = int(net.given[v]) if v in graph.constants else -1 - v
        found[v] = numbers.setdefault(own, len(numbers))
    for k, op in enumerate(graph.operations):
        own = -1 - k if op.effectful else int(net.kind[k])
        reads = tuple([found[v] for v in op.inputs])
        for q, v in enumerate(op.outputs):
            found[v] = numbers.setdefault((own, reads, q), len(numbers))
    return found


def is_light(graph: BlockGraph, op: Operation) -> bool:
    """Whether compilers make an operation's result where they read it, and it may as well be made
    of many at once."""
    if len(op.outputs) > 1 or op.remat is not None or not registry.is_repeatable(op):
        return False
    own = registry.signature_in(graph, op)
    return own.fusion != "kernel" and not own.opaque


def with_slices_at_once(graph: BlockGraph, stacks: Collection[int]) -> BlockGraph:
    """The graph in which a stack of the slices of one array is that array; and of what is made of
    some values, `stacks`, concatenations of slices are so too, and sums of them sums over a dim."""
    graph = without_unread(graph)
    program = _Program(graph, {*stacks})
    written = program.written
    for op in graph.operations:
        write = program.joined(op) or program.summed(op)
        if write is None or not written.takes(write):
            if write is not None:
                program.made.clear()
            written.operations.append(replace(op, inputs=written.read(op.inputs)))
    made = written.program(graph)
    operations, outputs = made_once(made.operations, made.values, made.outputs, made.constants)
    return without_unread(replace(made, operations=tuple(operations), outputs=tuple(outputs)))


class _Program:
    """A program, and what is `written` of it."""

    def __init__(self, graph: BlockGraph, stacks: set[int]) -> None:
        self.graph, self.stacks = graph, stacks
        self.written = Written([*graph.values], dict(graph.constants))
        self.slices = Slices(graph, Net(graph))
        self.made: dict[int, int] = {}  # recipe, by its id -> the stack
        self.makers, self.computed = graph.producers(), Computed.of(graph)
        ends = {*graph.outputs}
        readers = graph.readers()
        sums = [self._is_sum(op) for op in graph.operations]
        self.inside = {
            op.outputs[0]
            for k, op in enumerate(graph.operations)
            if sums[k]
            and op.outputs[0] not in ends
            and len(own := readers[op.outputs[0]]) == 1
            and sums[own[0]]
            and graph.same_type(op.outputs[0], graph.operations[own[0]].outputs[0])
        }

    def joined(self, op: Operation) -> Callable[[], None] | None:
        """What writes an operation that puts slices side by side; None for any other."""
        values, dim = self.graph.values, _joins(self.graph, op)
        if dim is None:
            return None
        new = values[op.outputs[0]].rank > values[op.inputs[0]].rank
        alike = groupby(op.inputs, self.slices.kind.__getitem__)
        parts: list[Values] = [tuple(own) for _, own in alike]
        recipes = [self.slices.recipe(own) if len(own) > 1 else None for own in parts]
        if new:
            recipes = [r if len(parts) == 1 else None for r in recipes]
        else:
            recipes = [r if r is not None and self._is_of_stacks(r) else None for r in recipes]
        if not any(recipes):
            return None

        def write() -> None:
            pieces: list[int] = []
            for own, recipe in zip(parts, recipes, strict=True):
                if recipe is None:
                    pieces += self.written.read(own)
                else:
                    pieces.append(self._beside(recipe, dim, new, op))
            if len(pieces) > 1:
                (pieces[0],) = self.written.apply(lambda *xs: _joined(xs, dim), pieces, op)
            self.written.stands[op.outputs[0]] = pieces[0]

        return write

    def summed(self, op: Operation) -> Callable[[], None] | None:
        """What writes a sum of slices; None for any other operation."""
        if not self._is_sum(op) or not self.inside.isdisjoint(op.outputs):
            return None
        terms = self._terms(op)
        placed = {v: at for v in terms if (at := self._placed(v)) is not None}
        groups: dict[Hashable, list[int]] = {}
        for v in terms:
            inner, start = placed.get(v, (v, ()))
            groups.setdefault((len(start), self.slices.kind[inner]), []).append(v)
        found: list[Callable[[], int]] = []
        for own in groups.values():
            if len(own) > 1:
                made = self._side_by_side(own, placed, op) if own[0] in placed else None
                made = made or self._added(own, op)
                if made is not None:
                    found.append(made)
                    left = {*own}
                    terms = [v for v in terms if v not in left]
        if not found:
            return None

        def write() -> None:
            sums = [*[made() for made in found], *self.written.read(terms)]
            total = sums[0]
            for other in sums[1:]:
                result = self.written.value(self.graph.values[op.outputs[0]])
                self.written.operations.append(
                    replace(op, inputs=(total, other), outputs=(result,))
                )
                total = result
            self.written.stands[op.outputs[0]] = total

        return write

    def _is_sum(self, op: Operation) -> bool:
        """Whether an operation adds a value to another one of the type of the sum."""
        if registry.meaning(op.kernel) != "sum" or op.remat is not None or len(op.inputs) != 2:
            return False
        made = self.graph.values[op.outputs[0]]
        return any(self.graph.values[v] == made for v in op.inputs)

    def _terms(self, op: Operation) -> list[int]:
        """What a sum adds up, over the sums that it alone reads, but for zeros."""
        found: list[int] = []
        stack = [*op.inputs[::-1]]
        while stack:
            v = self._more_than_zero(stack.pop())
            if v in self.inside:
                stack += self.graph.operations[self.makers[v]].inputs[::-1]
            else:
                found.append(v)
        return found

    def _more_than_zero(self, v: int) -> int:
        """What a value adds to zero; itself if it is no such sum."""
        op = self.graph.operations[self.makers[v]] if v in self.makers else None
        if op is not None and registry.meaning(op.kernel) == "sum" and op.remat is None:
            rest = [u for u in op.inputs if not is_zero(self.computed, u)]
            if len(rest) == 1 and self.graph.values[rest[0]] == self.graph.values[v]:
                return rest[0]
        return v

    def _placed(self, v: int) -> tuple[int, tuple[int, ...]] | None:
        """The value that another one is around which there are zeros, and where it starts."""
        op = self.graph.operations[self.makers[v]] if v in self.makers else None
        if op is None or op.remat is not None:
            return None
        return place_of(self.graph, op, self.computed)

    def _side_by_side(
        self, values: list[int], placed: Mapping[int, tuple[int, tuple[int, ...]]], op: Operation
    ) -> Callable[[], int] | None:
        """What writes the sum of values that stand side by side among zeros."""
        own = sorted([placed[v] for v in values], key=lambda at: at[1])
        moves = np.diff(np.array([start for _, start in own]), axis=0)
        dims = np.flatnonzero(moves.any(axis=0)).tolist()
        recipe = self.slices.recipe(tuple([v for v, _ in own]))
        if len(dims) != 1 or recipe is None or not self._is_of_stacks(recipe):
            return None
        (d,), shape = dims, self.graph.values[own[0][0]].shape
        if (moves[:, d] != shape[d]).any():
            return None
        whole, start = self.graph.values[op.outputs[0]].shape, own[0][1]

        def write() -> int:
            made = self._beside(recipe, d, False, op)
            ends = [
                n - a - m
                for n, a, m in zip(whole, start, self.written.values[made].shape, strict=True)
            ]
            if any(start) or any(ends):
                (made,) = self.written.apply(lambda x: _padded(x, start, ends), (made,), op)
            return made

        return write

    def _added(self, values: list[int], op: Operation) -> Callable[[], int] | None:
        """What writes a sum of slices as one over a dim."""
        order = self.slices.order(tuple(values))
        if order is None:
            return None
        recipe = self.slices.recipe(tuple([values[k] for k in order]))
        if recipe is None or not self._is_of_stacks(recipe):
            return None
        return lambda: self.written.apply(_sum, (self._made(recipe, op),), op)[0]

    def _is_of_stacks(self, recipe: Recipe) -> bool:
        """Whether something is made of stacks that are there."""
        if isinstance(recipe, Blocks):
            return recipe.source in self.stacks
        return any(not isinstance(r, int) and self._is_of_stacks(r) for r in recipe.reads)

    def _beside(self, recipe: Recipe, dim: int, new: bool, like: Operation) -> int:
        """A stack whose arrays stand side by side along a dim, a new one or one that they have."""
        stack = self._made(recipe, like)
        return self.written.apply(lambda x: _unstacked(x, dim, new), (stack,), like)[0]

    def _made(self, recipe: Recipe, like: Operation) -> int:
        """The stack that a recipe makes."""
        if id(recipe) not in self.made:
            self.made[id(recipe)] = self._newly_made(recipe, like)
        return self.made[id(recipe)]

    def _newly_made(self, recipe: Recipe, like: Operation) -> int:
        written = self.written
        if isinstance(recipe, Blocks):
            return written.apply(recipe.stack, written.read((recipe.source,)), like)[0]
        reads: list[Read] = []
        for r in recipe.reads:
            if not isinstance(r, int):
                reads.append((self._made(r, like), True))
            elif r in self.graph.constants:
                reads.append(self.graph.constants[r])
            else:
                reads.append((written.read((r,))[0], False))
        return written.at_once(self.graph, recipe.op, reads)[0][0]


def _joins(graph: BlockGraph, op: Operation) -> int | None:
    """The dim along which an operation puts its operands side by side, or a new one along which it
    stacks them; None for one that does neither."""
    if op.regions or op.remat is not None or len(op.inputs) < 2 or len(op.outputs) != 1:
        return None
    if not any(t.moves for t in registry.templates().get(op.kernel, ())):
        return None
    own = registry.signature_in(graph, op)
    if own.moved != tuple(range(len(op.inputs))) or own.elements != "kept" or own.opaque:
        return None
    shape, rank = own.output_types[0].shape, own.output_types[0].rank
    if own.extents != shape or own.outputs[0] != Projection.identity(rank):
        return None
    one = np.eye(rank, dtype=int)
    rows = [np.array(p.matrix, dtype=int).reshape(-1, rank) for p in own.inputs]
    if any(type_.rank != len(of) for type_, of in zip(own.input_types, rows, strict=True)):
        return None
    missing = [d for d in range(rank) if not rows[0][:, d].any()]
    if len(rows[0]) == rank - 1 and len(missing) == 1:
        (d,) = missing
        alike = all(np.array_equal(of, np.delete(one, d, 0)) for of in rows)
        return d if alike and shape[d] == len(rows) else None
    if any(len(of) != rank for of in rows):
        return None
    offsets = np.array([p.offset for p in own.inputs])
    dims = np.flatnonzero(offsets.any(axis=0)).tolist()
    if len(dims) != 1 or not all(_is_identity(of, shape) for of in rows):
        return None
    (d,) = dims
    ends = np.cumsum([type_.shape[d] for type_ in own.input_types])
    side_by_side = (offsets[1:, d] == -ends[:-1]).all() and not offsets[0, d]
    return d if side_by_side and ends[-1] == shape[d] else None


def _is_identity(matrix: np.ndarray, shape: Sequence[int]) -> bool:
    """Whether a projection has each index dim in its own place, where that has several points."""
    several = np.array([n > 1 for n in shape])
    return np.array_equal(matrix[:, several], np.eye(len(shape), dtype=int)[:, several])


def _unstacked(x: Any, dim: int, new: bool) -> Any:
    """The arrays of a stack side by side along a dim of them, or along a new one."""
    import jax.numpy as jnp

    x = jnp.moveaxis(x, 0, dim)
    return x if new else x.reshape(*x.shape[:dim], -1, *x.shape[dim + 2 :])


def _joined(xs: Sequence[Any], dim: int) -> Any:
    """Arrays side by side."""
    import jax.numpy as jnp

    return jnp.concatenate(xs, dim)


def _padded(x: Any, before: Sequence[int], behind: Sequence[int]) -> Any:
    """An array with zeros around it."""
    import jax.numpy as jnp

    return jnp.pad(x, list(zip(before, behind, strict=True)))


def _sum(stack: Any) -> Any:
    """The sum of the arrays of a stack, in their own dtype, as sums of two are."""
    from jax import lax

    return lax.reduce(stack, np.zeros((), stack.dtype), lax.add, (0,))
