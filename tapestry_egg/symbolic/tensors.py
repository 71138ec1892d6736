"""Symbolic tensors, and the programs that they are the results of."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import (
    BlockGraph,
    Operation,
    Source,
    TensorType,
    itemsize,
    verify_graph,
)
from tapestry_egg.graph.pytrees import LEAF, encode_treedef
from tapestry_egg.graph.sources import caller
from tapestry_egg.metakernels.views import View, ViewError
from tapestry_egg.tracing.trace import Program

_NUMBERS = itertools.count()


@dataclass(frozen=True, eq=False)
class Application:
    """One act of applying a kernel: what it reads, and what it gives."""

    kernel: str
    operands: tuple[Tensor, ...]
    params: Mapping[str, Any]
    types: tuple[TensorType, ...]
    source: Source


@dataclass(frozen=True, eq=False, repr=False)
class Tensor:
    """A symbolic tensor: a shape and a dtype, and what makes it: a kernel, or nothing.

    `x[1:, ::2]` and `x["..., :2, +3, 0"]` are views of it (see `metakernels/views.py` for the
    language of selectors), as are `transposed`, `reversed` and `repeated`. `@`, `+` and the like
    mean nothing here: kernels do, by their names.
    """

    type: TensorType
    name: str = ""
    made_by: Application | None = None
    output: int = 0
    value: np.ndarray | None = None  # of a constant
    number: int = field(default_factory=lambda: next(_NUMBERS))  # in the order of being made

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> str:
        return self.type.dtype

    def __repr__(self) -> str:
        maker = f" of {self.made_by.kernel}" if self.made_by else ""
        return f"Tensor({self.name}{': ' if self.name else ''}{self.type}{maker})"

    def __getitem__(self, selector: Any) -> Tensor:
        """The part that a selector picks out, given as text or as Python's indices and slices.

        Raises ViewError for one that does not fit.
        """
        return self.seen(View.of(self.shape).at(selector_text(selector)))

    def transposed(self, *order: int) -> Tensor:
        """Dim `order[k]` in place k; without an order, all dims from the last to the first."""
        return self.seen(View.of(self.shape).permute(order or range(len(self.shape))[::-1]))

    def reversed(self, *dims: int) -> Tensor:
        """The given dims backwards."""
        return self.seen(View.of(self.shape).reverse(*dims))

    def repeated(self, *shape: int) -> Tensor:
        """Broadcast to a shape: dims of 1 repeat, and new ones come in front."""
        return self.seen(View.of(self.shape).broadcast(shape))

    def seen(self, view: View) -> Tensor:
        """A view of the tensor. Raises ViewError for one that no kernel gives (a diagonal)."""
        out, source = self, caller()
        for kernel, params, shape in steps_of(view):
            type_ = TensorType(shape, self.dtype)
            out = Tensor(type_, made_by=Application(kernel, (out,), params, (type_,), source))
        return out

    def __iter__(self) -> Iterator[Tensor]:
        raise TypeError("a symbolic tensor is not iterable: index it")


def tensor(name: str, shape: Sequence[int], dtype: str = "float32") -> Tensor:
    """A symbolic tensor that the program takes: `te.tensor("x", (100, 12))`.

    Raises GraphError for a shape or dtype that no tensor has.
    """
    dims = tuple(shape)
    if not all(isinstance(n, int | np.integer) and n >= 0 for n in dims):
        raise GraphError(f"{shape!r} is not a shape", where=f"tensor {name!r}")
    itemsize(str(np.dtype(dtype)) if not isinstance(dtype, str) else dtype)
    return Tensor(TensorType(tuple(int(n) for n in dims), str(dtype)), name)


def constant(value: Any) -> Tensor:
    """A tensor that the program holds: a number, or an array of NumPy's."""
    array = np.asarray(value)
    if array.dtype == np.float64 and not isinstance(value, np.ndarray):
        array = array.astype(np.float32)  # numbers as JAX takes them
    if array.dtype == np.int64 and not isinstance(value, np.ndarray):
        array = array.astype(np.int32)
    return Tensor(TensorType(array.shape, str(array.dtype)), value=array)


def program(
    results: Any, *, inputs: Sequence[Tensor] | None = None, name: str = "program"
) -> Program:
    """The program that makes `results`, a tensor or a pytree of them, from what they are made of.

    It takes these by position, in the order of `inputs` (default: in which they were made), is
    given to `te.optimize` and `te.save` like a traced one, and runs if its kernels do: call it.
    Raises GraphError for results that are no tensors, and for a tensor that is read but not among
    `inputs`.
    """
    import jax

    leaves, tree = jax.tree.flatten(results)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(results)]
    if not leaves or not all(isinstance(x, Tensor) for x in leaves):
        raise GraphError(f"{results!r:.80} are no symbolic tensors", where=f"program {name}")
    reached = _reached(leaves)
    free = [t for t in reached if t.made_by is None and t.value is None]
    given = sorted(free, key=lambda t: t.number) if inputs is None else list(inputs)
    if missing := [t for t in free if all(t is not g for g in given)]:
        raise GraphError(
            f"{missing[0]!r} is read, but not among the inputs", where=f"program {name}"
        )
    if len({t.name for t in given}) < len(given):
        raise GraphError("two inputs have one name", where=f"program {name}")
    graph = _graph(name, given, reached, leaves, paths)
    verify_graph(graph)
    arguments: dict[str, Any] = {"tuple": [LEAF] * len(given)}
    return Program(graph, {"tuple": [arguments, {"dict": []}]}, encode_treedef(tree))


def _reached(results: Sequence[Tensor]) -> list[Tensor]:
    """All tensors that results are made of, each after what it is made of."""
    found: dict[Tensor, None] = {}
    waiting = list(reversed(results))
    while waiting:
        tensor = waiting[-1]
        operands = tensor.made_by.operands if tensor.made_by else ()
        missing = [t for t in operands if t not in found]
        if missing and tensor not in found:
            waiting.extend(reversed(missing))
            continue
        found.setdefault(waiting.pop())
    return list(found)


def _graph(
    name: str,
    inputs: Sequence[Tensor],
    reached: Sequence[Tensor],
    results: Sequence[Tensor],
    paths: Sequence[str],
) -> BlockGraph:
    values: list[TensorType] = []
    number: dict[Tensor, int] = {}
    outputs_of: dict[Application, tuple[int, ...]] = {}

    def new(type_: TensorType) -> int:
        values.append(type_)
        return len(values) - 1

    constants: dict[int, np.ndarray] = {}
    operations: list[Operation] = []
    for t in inputs:
        number[t] = new(t.type)
    for t in reached:
        if t in number:
            continue
        if t.value is not None:
            number[t] = new(t.type)
            constants[number[t]] = t.value
            continue
        made = t.made_by
        assert made is not None, "an input is numbered"
        if made not in outputs_of:
            outputs_of[made] = tuple(new(type_) for type_ in made.types)
            operands = tuple(number[o] for o in made.operands)
            operations.append(
                Operation(
                    made.kernel, operands, outputs_of[made], dict(made.params), source=made.source
                )
            )
        number[t] = outputs_of[made][t.output]
    return BlockGraph(
        name=name,
        values=tuple(values),
        operations=tuple(operations),
        inputs=tuple(number[t] for t in inputs),
        outputs=tuple(number[t] for t in results),
        constants=constants,
        input_names=tuple(t.name or f"[{i}]" for i, t in enumerate(inputs)),
        output_names=tuple(paths),
        donated=(False,) * len(inputs),
    )


# Views of symbolic tensors as the kernels that make them, and selectors as Python writes them.


#: A kernel of one operand, its parameters, and the shape that comes out.
Step = tuple[str, Mapping[str, Any], tuple[int, ...]]


def selector_text(selector: Any) -> str:
    """Python's indices, slices, `...` and None in the language of selectors; texts are in it.

    Raises ViewError for an entry that is none of these.
    """
    if isinstance(selector, str):
        return selector
    entries = selector if isinstance(selector, tuple) else (selector,)
    return ", ".join(map(_entry, entries))


def _entry(entry: Any) -> str:
    if entry is Ellipsis:
        return "..."
    if entry is None:
        return "+"
    if isinstance(entry, slice):
        start, stop, step = (
            "" if n is None else str(int(n)) for n in (entry.start, entry.stop, entry.step)
        )
        return f"{start}:{stop}:{step}"
    if isinstance(entry, int) and not isinstance(entry, bool):
        return str(entry)
    raise ViewError(
        f"{entry!r} is no selector", hint="Write an index, a:b:step, `...` or None; or a text."
    )


def steps_of(view: View) -> Iterator[Step]:
    """The kernels that make a view of a tensor, one after the other.

    Raises ViewError for a view of which a dim of the tensor follows several dims, or two the same.
    """
    rows = [[(d, n) for d, n in enumerate(row) if n] for row in view.matrix]
    followed = [row[0][0] for row in rows if row]
    if any(len(row) > 1 for row in rows) or len(set(followed)) < len(followed):
        raise ViewError(f"no kernel gives the view {view}")
    # One step of every dim: a step of -2 is one of 2, and what comes out is turned round.
    first, last, step, turned = [], [], [], []
    for k, (row, begin) in enumerate(zip(rows, view.offset, strict=True)):
        by = row[0][1] if row else 1
        count = view.shape[row[0][0]] if row else 1
        end = begin + by * (count - 1)
        low, high = (min(begin, end), max(begin, end)) if count else (0, -1)
        first.append(low)
        last.append(high + 1)
        step.append(abs(by) if count > 1 else 1)
        turned += [k] if by < 0 and count > 1 else []
    sizes = [len(range(a, b, s)) for a, b, s in zip(first, last, step, strict=True)]
    if (first, last) != ([0] * len(view.base), list(view.base)) or any(s > 1 for s in step):
        strides = step if any(s > 1 for s in step) else None
        params = {"start_indices": first, "limit_indices": last, "strides": strides}
        yield _step("slice", params, sizes)
    if turned:
        yield _step("rev", {"dimensions": turned}, sizes)
    dropped = [k for k, row in enumerate(rows) if not row]
    if dropped:
        yield _step("squeeze", {"dimensions": dropped}, [view.shape[d] for d in followed])
    if followed != sorted(followed):
        order = sorted(range(len(followed)), key=followed.__getitem__)
        sizes = [view.shape[d] for d in sorted(followed)]
        yield _step("transpose", {"permutation": order}, sizes)
    if len(followed) < len(view.shape):
        params = {
            "shape": list(view.shape),
            "broadcast_dimensions": sorted(followed),
            "sharding": None,
        }
        yield _step("broadcast_in_dim", params, view.shape)


def _step(kernel: str, params: Mapping[str, Any], shape: Iterable[int]) -> Step:
    return kernel, params, tuple(shape)
