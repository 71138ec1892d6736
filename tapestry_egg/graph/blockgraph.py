"""The block graph: tensors and the block operations between them, in program order."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError
from tapestry_egg.printable import printable


@dataclass(frozen=True)
class TensorType:
    """Shape and dtype of a tensor; `weak` is JAX's weak typing of scalars. Prints as `f32[8, 64]`.

    `dtype` is NumPy's or ml_dtypes' name (`float32`, `bfloat16`, `bool`) or, for extended types
    that have no bytes of their own on the host, JAX's (`key<fry>`).
    """

    shape: tuple[int, ...]
    dtype: str
    weak: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @cached_property
    def size(self) -> int:
        n = 1
        for d in self.shape:
            n *= d
        return n

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize(self.dtype)

    @cached_property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def strong(self) -> TensorType:
        """The same shape and dtype, not weakly typed."""
        return TensorType(self.shape, self.dtype) if self.weak else self

    def __str__(self) -> str:
        short = self.dtype
        for long, brief in _BRIEF:
            if short.startswith(long) and short[len(long) :].isdigit():
                short = brief + short[len(long) :]
                break
        return f"{short}[{', '.join(map(str, self.shape))}]"


_BRIEF = (("bfloat", "bf"), ("float", "f"), ("uint", "u"), ("int", "s"), ("complex", "c"))


@cache
def itemsize(dtype: str) -> int:
    """Bytes of one element of `dtype`; a PRNG key counts as its two 32-bit words.

    Raises GraphError for a dtype that neither NumPy nor ml_dtypes knows.
    """
    if dtype.startswith("key<"):
        return 16 if dtype == "key<rbg>" else 8
    if dtype == "float0":
        return 0
    try:
        return np.dtype(dtype).itemsize
    except TypeError:
        pass
    import ml_dtypes

    try:
        return np.dtype(getattr(ml_dtypes, dtype)).itemsize
    except (AttributeError, TypeError):
        raise GraphError(f"unknown dtype {dtype!r}", hint="Use a dtype that JAX accepts.") from None


@dataclass(frozen=True, slots=True)
class Source:
    """Where in the user's program an operation comes from."""

    file: str = ""
    line: int = 0
    column: int = 0
    function: str = ""
    text: str = ""  # the source line itself, when it can be read

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.file else "<unknown>"


#: The kernels whose operations have nested graphs, named here and nowhere else (but in the ledger,
#: which shares no code with what it checks).
SCAN, WHILE, COND = REGION_KERNELS = ("scan", "while", "cond")
#: The same as messages say them.
REGIONS_SAID = f"{SCAN}, {WHILE} and {COND}"


@dataclass(frozen=True)
class Operation:
    """One application of a kernel: value ids in, value ids out.

    `kernel` names a metakernel template (JAX's primitive name for traced programs); `params` are
    plain data (numbers, strings, lists, dicts; see `tracing/codec.py` for how JAX's parameter
    classes become plain). Control flow (`scan`, `while`, `cond`) is a region operation: `regions`
    holds the nested graphs in the order of JAX's parameters (scan: body; while: condition, body;
    cond: the branches). Values do not cross into a region except through its inputs.
    """

    kernel: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    params: Mapping[str, Any] = field(default_factory=dict)
    regions: tuple[BlockGraph, ...] = ()
    source: Source = Source()
    scope: str = ""  # JAX's name stack, e.g. "transpose(jvp(loss))/layer"
    remat: int | None = None  # operations of one jax.checkpoint region share a number
    effectful: bool = False
    # Of operations that were written several times and are one: at which lines others read it.
    places: tuple[Source, ...] | None = None

    @property
    def is_scan(self) -> bool:
        """Whether it is a loop of a known number of rounds."""
        return self.kernel == SCAN

    @property
    def is_while(self) -> bool:
        """Whether it is a loop that its condition ends."""
        return self.kernel == WHILE

    @property
    def is_branch(self) -> bool:
        """Whether one of its regions runs, which its first operand chooses."""
        return self.kernel == COND

    @property
    def rounds(self) -> int:
        """How often its regions are counted: the length of a scan, and once for any other."""
        return int(self.params["length"]) if self.is_scan else 1


def _same_array(a: np.ndarray, b: np.ndarray) -> bool:
    alike = a.shape == b.shape and a.dtype == b.dtype
    return a is b or (alike and a.tobytes() == b.tobytes())


@dataclass(frozen=True, repr=False)
class BlockGraph:
    """A program as tensors (`values`, by id) and operations in program order.

    Invariants, checked by `verify_graph`: every value is produced exactly once (as a graph input,
    a constant, or one operation's output) and before it is read.
    """

    name: str
    values: tuple[TensorType, ...]
    operations: tuple[Operation, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]  # value ids; the same id may leave more than once
    constants: Mapping[int, np.ndarray] = field(default_factory=dict)  # includes scalar literals
    input_names: tuple[str, ...] = ()  # pytree paths: "[0]['w']"
    output_names: tuple[str, ...] = ()
    donated: tuple[bool, ...] = ()
    prepared: Prepared | None = field(default=None, compare=False)

    def __eq__(self, other: object) -> bool:
        """Whether all is the same, constants bit by bit."""
        if not isinstance(other, BlockGraph):
            return NotImplemented
        if self is other:
            return True
        mine, theirs = self.constants, other.constants
        plain = [f.name for f in fields(self) if f.compare and f.name != "constants"]
        return (
            all(getattr(self, name) == getattr(other, name) for name in plain)
            and mine.keys() == theirs.keys()
            and all(_same_array(x, theirs[v]) for v, x in mine.items())
        )

    def __repr__(self) -> str:
        """One line; `tapestry-egg show` prints the operations."""
        return printable(
            f"BlockGraph({self.name}: {self.size} operations, "
            f"{len(self.inputs)} inputs, {len(self.outputs)} outputs)"
        )

    def same_type(self, one: int, other: int) -> bool:
        """Whether two values have the same shape and dtype."""
        a, b = self.values[one], self.values[other]
        return (a.shape, a.dtype) == (b.shape, b.dtype)

    @property
    def input_paths(self) -> tuple[str, ...]:
        """The paths by which a user names the inputs: by number where they have no names."""
        return self.input_names or tuple(f"[{i}]" for i in range(len(self.inputs)))

    @property
    def output_paths(self) -> tuple[str, ...]:
        """The same of the outputs."""
        return self.output_names or tuple(f"[{j}]" for j in range(len(self.outputs)))

    @property
    def size(self) -> int:
        """How many operations there are, those of regions included."""
        return len(self.operations) + sum(r.size for op in self.operations for r in op.regions)

    def walk(self) -> Iterator[Operation]:
        """All operations, each before those of its regions."""
        for op in self.operations:
            yield op
            for region in op.regions:
                yield from region.walk()

    def map_regions(self, change: Callable[[BlockGraph], BlockGraph]) -> BlockGraph:
        """The graph with the regions of its operations changed; itself where none is."""
        operations = []
        for op in self.operations:
            regions = tuple([change(r) for r in op.regions])
            same = all(a is b for a, b in zip(regions, op.regions, strict=True))
            operations.append(op if same else replace(op, regions=regions))
        same = all(a is b for a, b in zip(operations, self.operations, strict=True))
        return self if same else replace(self, operations=tuple(operations))

    def producers(self) -> dict[int, int]:
        """Value id -> index of the operation that produces it (inputs and constants are absent)."""
        return {v: i for i, op in enumerate(self.operations) for v in op.outputs}

    def __getstate__(self) -> dict[str, Any]:
        """Its fields alone: not what was found of it and is remembered."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def readers(self) -> dict[int, list[int]]:
        """Value id -> indices of the operations that read it, in program order."""
        out: dict[int, list[int]] = {v: [] for v in range(len(self.values))}
        for i, op in enumerate(self.operations):
            for v in dict.fromkeys(op.inputs):
                out[v].append(i)
        return out


def reached(
    operations: Sequence[Operation], outputs: Iterable[int]
) -> tuple[tuple[Operation, ...], set[int]]:
    """The operations that reach `outputs` or have an effect, in their order; and the values that
    they read or that are outputs."""
    needed = set(outputs)
    kept: list[Operation] = []
    for op in reversed(operations):
        if op.effectful or not needed.isdisjoint(op.outputs):
            kept.append(op)
            needed.update(op.inputs)
    return tuple(reversed(kept)), needed


def numbered(graph: BlockGraph, inputs: Sequence[int], outputs: Sequence[int]) -> BlockGraph:
    """The graph with other inputs and outputs, without values that nothing reads or makes; values
    have numbers in this order: inputs, constants, and what operations make."""
    read = {*outputs}.union(*(op.inputs for op in graph.operations))
    constants = [v for v in graph.constants if v in read]
    made = (v for op in graph.operations for v in op.outputs)
    number = {v: i for i, v in enumerate(itertools.chain(inputs, constants, made))}

    def of(values: Iterable[int]) -> tuple[int, ...]:
        return tuple([number[v] for v in values])

    return replace(
        graph,
        values=tuple([graph.values[v] for v in number]),
        operations=tuple(
            [replace(op, inputs=of(op.inputs), outputs=of(op.outputs)) for op in graph.operations]
        ),
        inputs=of(inputs),
        outputs=of(outputs),
        constants={number[v]: graph.constants[v] for v in constants},
    )


def without_unread(graph: BlockGraph) -> BlockGraph:
    """The graph without operations of which nothing is read. Regions stay as they are."""
    return replace(graph, operations=reached(graph.operations, graph.outputs)[0])


def given_up(graph: BlockGraph) -> tuple[bool, ...]:
    """Which inputs are given up to a call: the donated ones whose buffers `jax.jit` would take, for
    an output of the same shape and dtype each, the first ones first. It leaves the others alone."""
    outputs = Counter((graph.values[v].shape, graph.values[v].dtype) for v in graph.outputs)
    found = []
    for v, donated in zip(graph.inputs, graph.donated or (False,) * len(graph.inputs), strict=True):
        kind = (graph.values[v].shape, graph.values[v].dtype)
        found.append(donated and outputs[kind] > 0)
        outputs[kind] -= found[-1]
    return tuple(found)


@dataclass(frozen=True)
class Prepared:
    """How those of a graph's constants were made that a program computes from others, before it
    runs: `operations` in order, and the `constants` that they read."""

    operations: tuple[Operation, ...]
    constants: Mapping[int, np.ndarray]


def verify_graph(graph: BlockGraph, where: str = "") -> None:
    """Check the invariants of `BlockGraph`, nested regions included.

    Raises GraphError that names the operation and value at fault.
    """
    if not isinstance(graph, BlockGraph):
        raise GraphError(f"expected a graph, given a {type(graph).__name__}", where=where)
    where = where or str(graph.name)
    _check_fields(graph, where)
    n = len(graph.values)
    defined: set[int] = set()

    def define(v: int, by: str) -> None:
        if not 0 <= v < n:
            raise GraphError(f"value {v} of {by} is outside 0..{n - 1}", where=where)
        if v in defined:
            raise GraphError(f"value {v} is produced twice, again by {by}", where=where)
        defined.add(v)

    for v in graph.inputs:
        define(v, "the inputs")
    pending = getattr(graph.constants, "pending", ())  # not computed yet
    for v in graph.constants:
        define(v, "the constants")
        if v in pending:
            continue
        array = graph.constants[v]
        if tuple(np.shape(array)) != graph.values[v].shape:
            raise GraphError(
                f"constant {v} has shape {np.shape(array)}, declared {graph.values[v]}", where=where
            )
    for i, op in enumerate(graph.operations):
        name = f"operation {i} ({op.kernel}, {op.source})"
        for v in op.inputs:
            if v not in defined:
                raise GraphError(f"{name} reads value {v} before it is produced", where=where)
        for v in op.outputs:
            define(v, name)
        for r, region in enumerate(op.regions):
            verify_graph(region, where=f"{where} / {name} / region {r}")
        if op.regions or op.kernel in REGION_KERNELS:
            types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
            if fault := region_fault(op, *types):
                raise GraphError(f"{name}: {fault}", where=where)
    for v in graph.outputs:
        if v not in defined:
            raise GraphError(f"output value {v} is never produced", where=where)
    for field_name, names, of in (
        ("input_names", graph.input_names, graph.inputs),
        ("output_names", graph.output_names, graph.outputs),
        ("donated", graph.donated, graph.inputs),
    ):
        if names and len(names) != len(of):
            raise GraphError(f"{field_name} has {len(names)} entries for {len(of)}", where=where)


def _check_fields(graph: BlockGraph, where: str) -> None:
    """The types of a graph's parts, so that what follows can rely on them."""
    for part, what in ((graph.values, "values"), (graph.operations, "operations")):
        if not isinstance(part, tuple):
            raise GraphError(f"the {what} are not a tuple: {part!r:.100}", where=where)
    for v, type_ in enumerate(graph.values):
        if not isinstance(type_, TensorType) or not _is_shape(type_.shape):
            raise GraphError(f"value {v} has no tensor type: {type_!r}", where=where)
    if not isinstance(graph.constants, Mapping):
        raise GraphError(f"the constants are no mapping: {graph.constants!r:.100}", where=where)
    for ids, what in (
        (graph.inputs, "the inputs"),
        (graph.outputs, "the outputs"),
        (tuple(graph.constants), "the constants"),
    ):
        _check_ids(ids, what, where)
    for i, op in enumerate(graph.operations):
        if not isinstance(op, Operation):
            raise GraphError(f"operation {i} is a {type(op).__name__}", where=where)
        if not isinstance(op.regions, tuple):
            raise GraphError(f"the regions of operation {i} are no tuple", where=where)
        _check_ids(op.inputs, f"operation {i} ({op.kernel})", where)
        _check_ids(op.outputs, f"operation {i} ({op.kernel})", where)


_INT = frozenset((int,))


def _check_ids(ids: object, what: str, where: str) -> None:
    if not isinstance(ids, tuple) or not _INT.issuperset(map(type, ids)):
        raise GraphError(f"{what}: {ids!r:.100} are not numbers of values", where=where)


def _is_shape(shape: object) -> bool:
    return isinstance(shape, tuple) and all(
        [isinstance(n, int | np.integer) and n >= 0 for n in shape]
    )


def region_fault(
    op: Operation, operands: Sequence[TensorType], results: Sequence[TensorType]
) -> str:
    """What does not fit between a region operation and its nested graphs, `` if all does.

    They must take and give as many values as the kernel has it, of the same shapes and dtypes;
    those that a scan streams have its length as their first dim outside.
    """
    if op.kernel not in REGION_KERNELS:
        return f"only {REGIONS_SAID} have regions"
    flows = _flows(op, list(operands), list(results))
    if isinstance(flows, str):
        return flows
    ins = [len(r.inputs) for r in op.regions]
    outs = [len(r.outputs) for r in op.regions]
    expected = [len(taken) for taken, _ in flows], [len(given) for _, given in flows]
    if (ins, outs) != expected:
        return (
            f"the regions take {ins} values and give {outs}, expected {expected[0]}, {expected[1]}"
        )
    if op.is_while:
        carried = flows[1][0][int(op.params["body_nconsts"]) :]
        if [(t.shape, t.dtype) for t in carried] != [(t.shape, t.dtype) for t in results]:
            return "what is carried in differs in type from what comes out"
    for r, (region, flow) in enumerate(zip(op.regions, flows, strict=True)):
        for side, values, wanted in (
            ("input", region.inputs, flow[0]),
            ("output", region.outputs, flow[1]),
        ):
            for k, (v, type_) in enumerate(zip(values, wanted, strict=True)):
                if not 0 <= v < len(region.values):
                    continue  # the region's own check says so
                found = region.values[v]
                if (found.shape, found.dtype) != (type_.shape, type_.dtype):
                    return f"{side} {k} of region {r} is {found}, expected {type_}"
    return ""


_Flow = tuple[list[TensorType], list[TensorType]]


def _flows(
    op: Operation, operands: list[TensorType], results: list[TensorType]
) -> list[_Flow] | str:
    """The types that every region must take and give, or what keeps them from being known."""
    p, count = op.params, len(operands)
    if op.is_branch:
        if not op.regions:
            return "no branches"
        if not operands or operands[0].rank:
            return "no scalar that chooses the branch"
        return [(operands[1:], results)] * len(op.regions)
    if op.is_while:
        consts = p.get("cond_nconsts"), p.get("body_nconsts")
        if not all(isinstance(n, int) and 0 <= n <= count for n in consts):
            return "cond_nconsts and body_nconsts are missing or wrong"
        cond, body = int(consts[0]), int(consts[1])  # type: ignore[arg-type]
        carry = operands[cond + body :]
        return [
            (operands[:cond] + carry, [TensorType((), "bool")]),
            (operands[cond : cond + body] + carry, results),
        ]
    given = [p.get(name) for name in ("num_consts", "num_carry", "length")]
    if not all(isinstance(n, int) and n >= 0 for n in given):
        return "num_consts, num_carry and length are missing or wrong"
    consts_n, carry_n, length = (int(n) for n in given)  # type: ignore[arg-type]
    if consts_n + carry_n > count or carry_n > len(results):
        return "num_consts and num_carry are more than there are values"
    streams = (*operands[consts_n + carry_n :], *results[carry_n:])
    for type_ in streams:
        if type_.shape[:1] != (length,):
            return f"{type_} is streamed in {length} steps"

    def slices(types: list[TensorType]) -> list[TensorType]:
        return [TensorType(t.shape[1:], t.dtype) for t in types]

    return [
        (
            operands[: consts_n + carry_n] + slices(operands[consts_n + carry_n :]),
            results[:carry_n] + slices(results[carry_n:]),
        )
    ]
