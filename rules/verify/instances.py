"""Instances: small programs that a rule's pattern matches, and what the rule makes of each.

The rule's own example comes first, then with other dtypes and extents; then programs that are drawn
for the pattern, operation by operation.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import combinations
from math import prod
from typing import Any

import numpy as np

from tapestry_egg.errors import RuleError, TapestryError, TemplateError
from tapestry_egg.graph.arrays import is_dtype, kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rewrite.terms.requests import Applied, Catalogue
from tapestry_egg.rules.language.book import Rule
from tapestry_egg.rules.language.rewrites import defaults
from tapestry_egg.yaml_nodes import plain_yaml

from .contractions import agrees, convolves
from .laws import Node, Side
from .proposals import BY_ARITY, propose, slice_beside
from .samples import DTYPES, LONGEST, MOST_ELEMENTS, SIZES, Draw, beside, chosen
from .values import named_dtypes

#: Where an example stands for so many programs, draws end after so many in a row that fail.
ENOUGH_GIVEN = 8
MOST_FAILED = 400
# A replacement with a tensor of more elements is not tried on that program.
_MOST_BUILT = 2**19
# How often parameters have the values that a guard speaks of.
_SAID = 0.9
# How often tensors have the dtypes and ranks that a guard speaks of, whatever else they are.
_GUARDED = 0.3
# Programs that an example stands for with its extents changed, for each of these dtypes.
_RESIZED = 8
_FLOATS = ("float32", "bfloat16", "float16")


_GROWING = ("exp", "exp2", "expm1", "cosh", "sinh", "cumlogsumexp", "logsumexp", "softmax")
#: Kernels through which an operand enters a sum as it is.
_LINEAR = frozenset(
    "add add_any sub neg mul div convert_element_type transpose reshape squeeze rev slice pad "
    "broadcast_in_dim concatenate stack tile gather scatter-add dynamic_slice".split()
)


@dataclass(frozen=True)
class Instance:
    """A program that a pattern matches: types of its inputs, the applied kernels by signature name
    (those of the pattern and those that the rule wants), and the law."""

    side: Side
    inputs: Mapping[str, TensorType]
    applied: Mapping[str, Applied]
    types: Mapping[str, TensorType]

    @property
    def size(self) -> int:
        """Elements of all inputs, and what makes parameters long: small ones are read first."""
        return sum(t.size + t.rank for t in self.inputs.values())

    @cached_property
    def summed(self) -> frozenset[str]:
        """Inputs that enter a contraction of the pattern as they are, moved or scaled, and scalars
        that scale a tensor."""
        found: set[str] = set()
        reached: set[str] = set()
        for node in reversed(self.side.nodes):
            applied = self.applied[node.signature]
            kernel, contracts = applied.kernel, applied.signature.contracts
            if contracts or (node.name in reached and kernel in _LINEAR):
                reached.update(node.operands)
            if contracts or kernel in ("mul", "div"):
                found |= {o for o in node.operands if o in self.inputs and not self.inputs[o].rank}
        return frozenset(found | (reached & set(self.inputs)))

    @cached_property
    def solved(self) -> frozenset[str]:
        """Inputs that the pattern decomposes or solves for: of what is nearly singular a result has
        no digits."""
        found = [(n.operands, self.applied[n.signature].signature) for n in self.side.nodes]
        return frozenset(read[0] for read, s in found if s.steps and not s.scattered)

    @cached_property
    def grows(self) -> bool:
        """Whether the pattern makes infinities of what is merely large."""
        return any(self.applied[n.signature].kernel in _GROWING for n in self.side.nodes)

    @cached_property
    def rounds(self) -> bool:
        """Whether numbers that round occur."""
        types = (t for a in self.applied.values() for t in (*a.inputs, a.output))
        return any(kind(t.dtype) in ("float", "complex") for t in types)

    @cached_property
    def has_empty(self) -> bool:
        """Whether a tensor without elements occurs."""
        return any(t.size == 0 for a in self.applied.values() for t in (*a.inputs, a.output))


@dataclass
class Drawn:
    """What a search for instances tried, and what kept the rule from firing."""

    tried: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    illegal: tuple[Instance, str] | None = None  # where a replacement is no program, and why

    def refuse(self, reason: str) -> None:
        """Count a reason."""
        self.refused[reason] = self.refused.get(reason, 0) + 1


# Drawing programs


def instances(
    rule: Rule,
    side: Side,
    seed: int,
    tries: int,
    drawn: Drawn,
    marks: Sequence[float] = (),
    unlike: Unlike | None = None,
) -> Iterator[Instance]:
    """Programs that the pattern matches and the guard admits, the rule's example first.

    What a turn draws depends on the seed and the number of the turn alone. `marks` are the numbers
    that the rule speaks of; with `unlike`, programs like those before are passed over. Raises
    RuleError, with its place, for a fault in one of the rule's expressions.
    """
    given = 0
    for found in _from_example(rule, side, random.Random(seed), drawn):
        if unlike is None or unlike.fresh(*found[:2]):
            for instance in _answered(rule, side, *found, drawn):
                given += 1
                if unlike is not None:
                    unlike.take(*found[:2], 0)
                yield instance
    failed = 0
    named = named_dtypes(rule)
    for turn in range(tries):
        drawn.tried += 1
        made = _draw(side, Draw(random.Random(f"{seed} {turn}"), turn, marks, named))
        if made is not None:
            failed = 0
            if unlike is None or unlike.fresh(*made[:2]):
                for instance in _answered(rule, side, *made, drawn):
                    if unlike is not None:
                        unlike.take(*made[:2], turn)
                    yield instance
            if unlike is not None and unlike.enough(turn):
                return
            continue
        failed += 1
        if given >= ENOUGH_GIVEN and failed > MOST_FAILED:
            return  # a pattern too long to be met by chance


def _answered(
    rule: Rule,
    side: Side,
    inputs: dict[str, TensorType],
    applied: dict[str, Applied],
    types: dict[str, TensorType],
    drawn: Drawn,
) -> Iterator[Instance]:
    recipe = rule.recipe
    wanted: dict[str, Applied] = {}
    if recipe is not None:
        missing = [g for g in recipe.given if g not in applied]
        if missing:
            if all(m not in {n.signature for n in side.nodes} for m in recipe.given):
                return  # a part of the rule that asks nothing
            raise RuleError(
                f"rule {rule.name!r} does not bind {missing[0]!r}, which is in `given`",
                where=rule.where,
            )
        catalogue = Catalogue()
        given = [catalogue.number(applied[g]) for g in recipe.given]
        found = catalogue.answer(rule, given)
        if found is None:
            if catalogue.reason and drawn.illegal is None:
                none = replace(side, built=())
                drawn.illegal = Instance(none, inputs, applied, types), catalogue.reason
            drawn.refuse(catalogue.reason or "the guard does not hold")
            return
        wanted = {name: catalogue.entries[n] for name, n in found.items()}
    # Types that the replacement has, operation by operation.
    types = dict(types)
    for node in side.built:
        entry = wanted.get(node.signature) or applied.get(node.signature)
        if entry is None:
            raise RuleError(
                f"rule {rule.name!r} builds with {node.signature!r}, which is neither bound by its"
                " body nor wanted",
                where=rule.where,
            )
        types[node.name] = entry.output
        if entry.output.size > _MOST_BUILT:
            return
    every = {**applied, **wanted}
    if all(map(_whole, every.values())):
        yield Instance(side, inputs, every, types)


def _whole(entry: Applied) -> bool:
    """Whether the rest of a signature, beside its types, can be told."""
    try:
        return bool(entry.signature)
    except TemplateError:  # the template contradicts itself on such operands
        return False


def _draw(
    side: Side, draw: Draw
) -> tuple[dict[str, TensorType], dict[str, Applied], dict[str, TensorType]] | None:
    types: dict[str, TensorType] = {}
    inputs: dict[str, TensorType] = {}
    applied: dict[str, Applied] = {}
    made = {n.name for n in side.nodes}
    usual = draw.dtype
    for name, value in side.constants.items():
        if not _holds(draw.dtype, value):
            return None
        types[name] = inputs[name] = TensorType((), draw.dtype)
    read = {o for n in side.nodes for o in n.operands} - made - side.constants.keys()
    for name in sorted(read & side.tensors.keys()):
        dtype, rank = side.tensors[name]
        if draw.chance(_GUARDED):
            own = dtype if dtype in DTYPES else usual
            types[name] = inputs[name] = TensorType(draw.shape(None if rank < 0 else rank), own)
    for node in side.nodes:
        known = [types.get(o) for o in node.operands]
        entry = applied.get(node.signature)
        if entry is None:
            wanted = side.dtypes.get(node.name, ())
            draw.dtype = usual if registry.allowed(usual, wanted) else chosen(wanted, draw)
            entry = _apply(side, node, known, applied, draw)
            draw.dtype = usual
            if entry is None:
                return None
            applied[node.signature] = entry
            if not node.operands:  # what is made of nothing has a dtype that others may have, too
                usual = draw.dtype = entry.output.dtype
        if len(entry.inputs) != len(known):
            return None
        for o, t in zip(node.operands, entry.inputs, strict=True):
            if types.setdefault(o, t) != t:
                return None
            if o not in made:
                inputs[o] = t
        if types.setdefault(node.name, entry.output) != entry.output:
            return None
    return inputs, applied, types


def _holds(dtype: str, value: float) -> bool:
    """Whether a dtype has a constant of this value, as a float has every one within its reach."""
    own = numpy_dtype(dtype)
    if kind(dtype) in ("int", "uint", "bool"):
        ends = (0, 1) if own.kind == "b" else (np.iinfo(own).min, np.iinfo(own).max)
        return value == int(value) and ends[0] <= value <= ends[1]
    return own.kind == "c" or bool(np.isfinite(np.asarray(value).astype(own)))


def _apply(
    side: Side,
    node: Node,
    known: Sequence[TensorType | None],
    applied: Mapping[str, Applied],
    draw: Draw,
) -> Applied | None:
    allowed = side.kernels[node.signature] or BY_ARITY.get(len(known), ())
    if not allowed:
        return None
    alike = [a for a in applied.values() if a.kernel in allowed and len(a.inputs) == len(known)]
    beside = [a for a in alike if a.kernel == "slice" and known[0] == a.inputs[0]]
    if beside and draw.chance(0.5):
        model = draw.rng.choice(beside)
        return applied_to("slice", slice_beside(model.params, model.inputs[0], draw), model.inputs)
    if alike and draw.chance(0.6):
        model = draw.rng.choice(alike)
        # The same types, or in another order, as parts of other lengths that make up as much.
        types = model.inputs if draw.chance(0.8) else model.inputs[::-1]
        inputs = [k or t for k, t in zip(known, types, strict=True)]
        entry = applied_to(model.kernel, model.params, inputs)
        if entry is not None and (len(allowed) == 1 or draw.chance(0.8)):
            return entry
    kernel = draw.rng.choice(allowed)
    said = {k: v for k, v in side.params[node.signature].items() if draw.chance(_SAID)}
    proposal = propose(kernel, known, draw, said)
    if proposal is None:
        return None
    params, inputs = proposal
    return applied_to(kernel, defaults(kernel, params), inputs)


def applied_to(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> Applied | None:
    """A kernel on operands of these types; None where no template fits, or not with one output."""
    try:
        if not jax_takes(kernel, params, inputs):
            return None
        types = registry.output_types(kernel, params, inputs)
    except TemplateError:
        return None
    if len(types) != 1 or any(n < 0 for n in types[0].shape):
        return None
    if any(t.size > (LONGEST if t.rank == 1 else MOST_ELEMENTS) for t in (*inputs, *types)):
        return None
    return Applied(kernel, params, tuple(inputs), types[0], None)


# The rule's own example


def _from_example(
    rule: Rule, side: Side, rng: random.Random, drawn: Drawn
) -> Iterator[tuple[dict[str, TensorType], dict[str, Applied], dict[str, TensorType]]]:
    if not rule.example.strip():
        return
    for dtype, text in _variants(rule.example, rng):
        try:
            graph = example_graph(text, f"{rule.where}: example")
        except TapestryError as e:
            if not dtype and isinstance(e, TemplateError):
                raise RuleError(
                    f"the example of rule {rule.name!r}: {e.what}", where=rule.where
                ) from None
            if not dtype:
                raise
            continue
        for found in _matches(graph, side):
            drawn.tried += 1
            yield found


def _variants(example: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """The example, then with other dtypes, then with other extents: equal ones stay equal,
    and 1 stays 1.

    What comes of that need not be a program.
    """
    yield "", example
    for dtype in ("float32", "int32"):
        yield dtype, re.sub(r"\b(float32|int32)\b", dtype, example)
    for old, new in _PRECISE:
        if re.search(old, example):
            yield "other parameters", re.sub(old, new, example)
    sizes = sorted({n for found in _SHAPES.finditer(example) for n in _NUMBER.findall(found[2])})
    for turn in range(2 * _RESIZED if _STEPS.search(example) else 0):
        found = _STEPS.sub(partial(_stepped, rng, turn), example)
        wider = {n: n if n == "1" else str(int(n) + rng.choice((0, 1, 2, 3))) for n in sizes}
        yield "other steps", _resized(found, wider)
    for turn in range(_RESIZED if sizes else 0):
        other = {n: n if n == "1" else str(rng.choice((1, 2, 3, 4, 5, 7))) for n in sizes}
        yield "resized", _resized(example, other).replace("float32", _FLOATS[turn % len(_FLOATS)])


def _stepped(rng: random.Random, turn: int, found: re.Match[str]) -> str:
    """Strides, dilations or padding other than an example's, of which any are a program."""
    if turn % 3 == 0 and "stride" not in found[1]:
        return found[0]  # strides alone
    if "padding" in found[1]:
        both = rng.choice((0, 1, 2))
        return found[1] + _NUMBER.sub(lambda _: str(both), found[2])
    return found[1] + _NUMBER.sub(lambda _: str(rng.choice((1, 2, 2, 3))), found[2])


def _resized(example: str, other: Mapping[str, str]) -> str:
    def shape(found: re.Match[str]) -> str:
        return found[1] + _NUMBER.sub(lambda n: other[n[0]], found[2])

    return _SHAPES.sub(shape, example)


_NUMBER = re.compile(r"-?\d+")
#: Parameters that say how precise results are or make promises, with other values.
_PRECISE = (
    ("precision: null", "precision: {$enum: [Precision, HIGHEST]}"),
    ("accuracy: null", "accuracy: {$enum: [AccuracyMode, HIGHEST]}"),
    ("(indices_are_sorted|unique_indices): false", r"\1: true"),
    ("GatherScatterMode, [A-Z_]+", "GatherScatterMode, PROMISE_IN_BOUNDS"),
    ("GatherScatterMode, [A-Z_]+", "GatherScatterMode, CLIP"),
    ("GatherScatterMode, [A-Z_]+", "GatherScatterMode, FILL_OR_DROP"),
    ("fill_value: [^,}]+", "fill_value: 1"),
)
#: Where the steps of windows stand in an example.
_STEPS = re.compile(
    r"(window_strides: |(?:[lr]hs|base|window)_dilation: |\bpadding: )(\[[\d, \[\]-]*\])"
)
#: Where extents stand in an example: the shapes of inputs, and parameters that are shapes.
_SHAPES = re.compile(
    r"((?:^\w+:\s*\w+|shape: |new_sizes: |slice_sizes: ))(\[[\d, ]*\])", re.MULTILINE
)


def _matches(
    graph: BlockGraph, side: Side
) -> Iterator[tuple[dict[str, TensorType], dict[str, Applied], dict[str, TensorType]]]:
    """Every way in which a pattern's operations are operations of a graph."""
    operations = [
        (
            op,
            Applied(
                op.kernel,
                op.params,
                tuple(graph.values[v] for v in op.inputs),
                graph.values[op.outputs[0]],
                None,
            ),
        )
        for op in graph.operations
        if len(op.outputs) == 1
        and jax_takes(op.kernel, op.params, [graph.values[v] for v in op.inputs])
    ]
    made = {n.name for n in side.nodes}

    def search(
        k: int, values: dict[str, int], applied: dict[str, Applied]
    ) -> Iterator[tuple[dict[str, int], dict[str, Applied]]]:
        if k == len(side.nodes):
            yield values, applied
            return
        node = side.nodes[k]
        for op, entry in operations:
            allowed = side.kernels[node.signature]
            if len(op.inputs) != len(node.operands) or (allowed and op.kernel not in allowed):
                continue
            if node.signature in applied and applied[node.signature] != entry:
                continue
            bound = dict(values)
            pairs = [*zip(node.operands, op.inputs, strict=True), (node.name, op.outputs[0])]
            if all(bound.setdefault(name, v) == v for name, v in pairs):
                yield from search(k + 1, bound, {**applied, node.signature: entry})

    for values, applied in search(0, {}, {}):
        types = {name: graph.values[v] for name, v in values.items()}
        inputs = {name: t for name, t in types.items() if name not in made}
        known = {n: float(graph.constants.get(values[n], np.nan)) for n in side.constants}
        if known == side.constants:
            yield inputs, applied, types


# The examples of rules: small programs as text, one operation a line.
#
#     x: float32[8, 512]
#     w: float32[512, 16]
#     a = dot_general(x, w) {dimension_numbers: [[[1], [0]], [[], []]], precision: null}
#     b = a(w, x)
#
# A line with `:` is an input, and one with `:` and `=` a scalar constant (`z: float32 = 0`).
# `{...}` holds the parameters in the plain form of `tracing/codec.py`; the name of an earlier
# operation in place of a kernel's takes kernel and parameters from there. Lines that are indented
# continue the one before. Values that nothing reads are the outputs.


_INPUT = re.compile(r"(\w+)\s*:\s*(\w+)\[([\d,\s]*)\]\s*$")
_CONSTANT = re.compile(r"(\w+)\s*:\s*(\w+)\s*=\s*(\S+)\s*$")
_OPERATION = re.compile(r"(\w+)\s*=\s*([\w-]+)\(([\w,\s]*)\)\s*(\{.*\})?\s*$", re.DOTALL)


def example_graph(text: str, where: str = "example") -> BlockGraph:
    """The program that an example's text describes.

    Raises RuleError that quotes the line at fault.
    """
    lines: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() and lines:
            lines[-1] += "\n" + line
        elif line.strip():
            lines.append(line)
    values: list[TensorType] = []
    numbers: dict[str, int] = {}
    operations: dict[str, Operation] = {}
    inputs: list[int] = []
    constants: dict[int, np.ndarray[Any, Any]] = {}

    def add(name: str, tensor: TensorType, line: str) -> int:
        if not is_dtype(tensor.dtype):
            raise RuleError(f"{tensor.dtype!r} is not a dtype: {line}", where=where)
        if name in numbers:
            raise RuleError(f"{name!r} is defined twice in the example: {line}", where=where)
        numbers[name] = len(values)
        values.append(tensor)
        return numbers[name]

    for line in lines:
        if found := _INPUT.match(line):
            shape = tuple(int(n) for n in found[3].split(",") if n.strip())
            inputs.append(add(found[1], TensorType(shape, found[2]), line))
        elif found := _CONSTANT.match(line):
            number = add(found[1], TensorType((), found[2]), line)
            constants[number] = _scalar(found[2], found[3], f"{where}: {line}")
        elif found := _OPERATION.match(line):
            reads = [n.strip() for n in found[3].split(",") if n.strip()]
            missing = [n for n in reads if n not in numbers]
            if missing:
                raise RuleError(f"{missing[0]!r} is not defined before: {line}", where=where)
            operands = tuple(numbers[n] for n in reads)
            model = operations.get(found[2])
            kernel = model.kernel if model else found[2]
            params = dict(model.params) if model else {}
            if found[4]:
                params.update(plain_yaml(found[4], RuleError, f"{where}: {line.splitlines()[0]}"))
            signature = registry.signature(kernel, params, [values[v] for v in operands])
            out = add(found[1], signature.output_types[0], line)
            operations[found[1]] = Operation(kernel, operands, (out,), params)
        else:
            raise RuleError(f"neither an input nor an operation: {line}", where=where)
    read = {v for op in operations.values() for v in op.inputs}
    names = {v: name for name, v in numbers.items()}
    given = {*inputs, *constants}
    outputs = tuple(v for v in range(len(values)) if v not in read and v not in given)
    graph = BlockGraph(
        name="example",
        values=tuple(values),
        operations=tuple(operations.values()),
        inputs=tuple(inputs),
        outputs=outputs,
        input_names=tuple(names[v] for v in inputs),
        output_names=tuple(names[v] for v in outputs),
        constants=constants,
    )
    verify_graph(graph)
    return graph


def _scalar(dtype: str, text: str, where: str) -> np.ndarray[Any, Any]:
    """A constant. Raises RuleError where the text is no number that the dtype has."""
    try:
        value = np.asarray(float(text))
        with np.errstate(all="ignore"):
            return value.astype(numpy_dtype(dtype))
    except (ValueError, TypeError) as e:
        raise RuleError(f"{text!r:.40} is no {dtype}: {e}", where=where) from None


# Admitted: whether JAX has an operation, as far as templates take it for granted.
#
# Templates are written for operations of programs that were traced. Those that are made up, or
# whose parameters a rule fixes, need not be such: a slice beyond the end of a tensor is none.


def jax_takes(kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]) -> bool:
    """Whether JAX has such an operation, as far as templates take it for granted."""
    if kernel == "dot_general":
        return agrees(params, *inputs)
    if kernel == "conv_general_dilated":
        return convolves(params, *inputs)
    if kernel == "dynamic_update_slice" and not _holds_update(*inputs[:2]):
        return False
    if kernel in _MOVES and not _MOVES[kernel](params, inputs[0].shape):
        return False
    axes = _axes(kernel, params)
    if not _distinct(axes, inputs[0].rank if inputs else 0):
        return False
    if kernel in ("argmax", "argmin") and any(not inputs[0].shape[d] for d in axes):
        return False  # of nothing there is no greatest one
    return registry.takes(kernel, params, inputs)


def _axes(kernel: str, params: Mapping[str, Any]) -> Sequence[int]:
    """The dims of its operand that an operation names."""
    if kernel in ("rev", "squeeze"):
        return tuple(params["dimensions"])
    if kernel in ("concatenate", "sort"):
        return (params["dimension"],)
    if kernel.startswith("cum"):
        return (params["axis"],)
    if kernel.startswith(("reduce_", "arg")) or kernel in ("softmax", "logsumexp"):
        return tuple(params.get("axes", ()))
    return ()


def _distinct(dims: Sequence[int], rank: int) -> bool:
    """Whether some numbers are dims of a tensor of this rank, each once."""
    return len(set(dims)) == len(dims) and all(0 <= d < rank for d in dims)


def _cuts(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a slice lies inside of a tensor, along every dim."""
    begin, end = params["start_indices"], params["limit_indices"]
    steps = params.get("strides") or [1] * len(shape)
    if not len(begin) == len(end) == len(steps) == len(shape):
        return False
    inside = all(0 <= a <= b <= n for a, b, n in zip(begin, end, shape, strict=True))
    return inside and min(steps, default=1) > 0


def _turns(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether every dim has one new place."""
    return sorted(params["permutation"]) == list(range(len(shape)))


def _reshapes(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether a reshape holds as many elements as its operand."""
    return prod(params["new_sizes"]) == prod(shape)


def _squeezes(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether what is dropped are dims of one element."""
    return all(0 <= d < len(shape) and shape[d] == 1 for d in params["dimensions"])


def _holds_update(x: TensorType, update: TensorType) -> bool:
    """Whether a tensor is as large as what is written into it, which templates take for granted."""
    pairs = zip(x.shape, update.shape, strict=False)
    return x.rank == update.rank and x.dtype == update.dtype and all(n >= k for n, k in pairs)


def _stretches(params: Mapping[str, Any], shape: Sequence[int]) -> bool:
    """Whether every extent is stretched to itself, or from 1, as JAX asks."""
    to, at = params["shape"], params["broadcast_dimensions"]
    if len(at) != len(shape) or any(not 0 <= d < len(to) for d in at):
        return False
    return all(n in (1, to[d]) for n, d in zip(shape, at, strict=True))


_MOVES: Mapping[str, Callable[[Mapping[str, Any], Sequence[int]], bool]] = {
    "broadcast_in_dim": _stretches,
    "slice": _cuts,
    "transpose": _turns,
    "reshape": _reshapes,
    "squeeze": _squeezes,
}


# Choice: which of the programs that a rule applies to it is tried on.


# Programs that differ in sizes and dtypes only are tried so often.
_ALIKE = 4
# So often are all kinds of shapes and all dtypes walked through at least.
_ROUNDS = 3
# So many programs do where none that is new was found in so many turns.
_SOME = 12
# Extents up to this are drawn all the time, whatever a rule speaks of.
_SMALL = 8
_VAIN = 1000


class Unlike:
    """Chooses programs that are unlike each other: in dtypes, in kinds of shapes, in kernels, in
    parameters, in extents beside the numbers `marks` that the rule speaks of. But for parameters,
    what is new in one of them is never left out for want of room."""

    def __init__(self, wanted: int, marks: Sequence[float] = ()) -> None:
        self.wanted, self.given = wanted, 0
        self.beside = frozenset(n for n in beside(marks) if n > _SMALL)
        self.last = 0
        self.seen: Counter[Any] = Counter()

    def fresh(self, inputs: Mapping[str, TensorType], applied: Mapping[str, Applied]) -> bool:
        rare, structure, both = self._features(inputs, applied)
        new = any(self.seen[f] < most for f, most in rare)
        usual = self.seen[structure] < _ALIKE and not self.seen[both]
        return (new and self.given < 3 * self.wanted) or (usual and self.given < self.wanted)

    def take(
        self, inputs: Mapping[str, TensorType], applied: Mapping[str, Applied], turn: int
    ) -> None:
        rare, structure, both = self._features(inputs, applied)
        self.seen.update([*(f for f, _ in rare), structure, both])
        self.given += 1
        self.last = turn

    def enough(self, turn: int) -> bool:
        """Whether drawing may end: every kind of shapes met every dtype some times, and as many
        programs were found as are wanted, or none that is new for long."""
        if turn <= _ROUNDS * len(DTYPES) * len(SIZES):
            return False
        return self.given >= self.wanted or (self.given >= _SOME and turn - self.last > _VAIN)

    def _features(
        self, inputs: Mapping[str, TensorType], applied: Mapping[str, Applied]
    ) -> tuple[list[tuple[Any, int]], Any, Any]:
        dtypes = tuple(t.dtype for t in inputs.values())
        kernels = tuple(a.kernel for a in applied.values())
        kinds = tuple(sorted({kind(d) for d in dtypes}))
        structure = tuple(
            (a.kernel, a.key[1], tuple(t.rank for t in a.inputs)) for a in applied.values()
        )
        ranks = {t.rank for a in applied.values() for t in (*a.inputs, a.output)}
        extents = {n for a in applied.values() for t in (*a.inputs, a.output) for n in t.shape}
        rare = [
            (("dtypes", dtypes), 1),
            (("kernels", kernels), 1),
            (("shapes", kinds, _oddities(applied)), 1),
            (("rank", max(ranks, default=0)), _ALIKE),
            *((("spelling", s), _ALIKE) for s in _spellings(applied)),
            *((("extent", n), 2) for n in sorted(self.beside & extents)),
        ]
        return rare, ("structure", structure), ("both", structure, dtypes)


def _spellings(applied: Mapping[str, Applied]) -> tuple[Any, ...]:
    """What is told by parameters: whether operations of one kernel have the same, and how many dims
    a product contracts and in what order it pairs them, what pads add and cut off, which slices
    have strides, what powers are taken, which convolutions leave a rest that no window covers."""
    of: dict[str, list[Any]] = {}
    for a in applied.values():
        of.setdefault(a.kernel, []).append((a.key[1], a.inputs))
    found: list[Any] = []
    for kernel, some in of.items():
        if len(some) > 1 and len({inputs for _, inputs in some}) == 1:
            found.append((kernel, len({params for params, _ in some}) > 1))
    pads = [a.params["padding_config"] for a in applied.values() if a.kernel == "pad"]
    if pads:
        found.append(("pad", *(_signs(config) for config in pads)))
    slices = [a for a in applied.values() if a.kernel == "slice"]
    if slices:
        found.append(("slice", *(_strided(a.params) for a in slices)))
    for a, b in combinations(slices, 2):
        if a.inputs == b.inputs:
            found.append(("slices", _relations(a.params, b.params)))
    rests = [_leaves_rest(a) for a in applied.values() if a.kernel == "conv_general_dilated"]
    if rests:
        found.append(("conv_general_dilated", *rests))
    found += [(a.kernel, a.params["y"]) for a in applied.values() if a.kernel == "integer_pow"]
    for a in applied.values():
        if a.kernel == "dot_general":
            (lhs, rhs), batch = a.params["dimension_numbers"]
            pairs = sorted(zip(lhs, rhs, strict=True))
            crossed = [r for _, r in pairs] != sorted(rhs)
            found.append((a.kernel, len(lhs), len(batch[0]), crossed))
    return tuple(dict.fromkeys(found))


def _strided(params: Mapping[str, Any]) -> bool:
    """Whether a slice leaves elements out between those that it keeps."""
    ends = zip(params["start_indices"], params["limit_indices"], strict=True)
    steps = params["strides"] or [1] * len(params["start_indices"])
    return any(step > 1 and b - a > 1 for step, (a, b) in zip(steps, ends, strict=True))


def _relations(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[str, ...]:
    """How two slices of one tensor lie to each other, in whatever dims."""
    of = [tuple(zip(p["start_indices"], p["limit_indices"], strict=True)) for p in (a, b)]
    found = set()
    for (begin, end), (other, last) in zip(*of, strict=True):
        if (begin, end) == (other, last):
            found.add("same")
        elif end == other or last == begin:
            found.add("beside")
        else:
            found.add("as long" if end - begin == last - other else "elsewhere")
    return tuple(sorted(found))


def _leaves_rest(conv: Applied) -> bool:
    """Whether the strides of a convolution leave elements at the end that no window covers."""
    p, (x, w) = conv.params, conv.inputs[:2]
    numbers = p["dimension_numbers"]
    for k, step in enumerate(p["window_strides"]):
        n, window = (
            t.shape[numbers[spec][k + 2]] for t, spec in ((x, "lhs_spec"), (w, "rhs_spec"))
        )
        whole = (n - 1) * p["lhs_dilation"][k] + 1 + sum(p["padding"][k])
        left = whole - ((window - 1) * p["rhs_dilation"][k] + 1)
        if n and left >= step and left % step:
            return True
    return False


def _signs(config: Sequence[Sequence[int]]) -> tuple[bool, bool]:
    """Whether a pad cuts off, and whether it adds."""
    ends = [n for low, high, _ in config for n in (low, high)]
    return any(n < 0 for n in ends), any(n > 0 for n in ends)


def _oddities(applied: Mapping[str, Applied]) -> tuple[str, ...]:
    """What is odd about the shapes that occur."""
    shapes = [t.shape for a in applied.values() for t in (*a.inputs, a.output)]
    extents = {n for shape in shapes for n in shape}
    found = {
        "empty": 0 in extents,
        "made of nothing": any(
            a.output.size and any(t.size == 0 for t in a.inputs) for a in applied.values()
        ),
        "deep": any(len(s) > 4 for s in shapes),
        "large": any(n > 16 for n in extents),
        "long": any(n > 100 for n in extents),
        "large and odd": any(n > 16 and n % 2 for n in extents),
        "thin": 1 in extents,
        "oblong": any(len(set(s)) > 1 for s in shapes),
        "scalar": () in shapes,
    }
    return tuple(k for k, holds in found.items() if holds)
