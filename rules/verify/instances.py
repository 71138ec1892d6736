"""Instances: small programs that a rule's pattern matches, and what the rule makes of each.

The rule's own example comes first, then with other dtypes and extents; then programs that are drawn
for the pattern, operation by operation."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from tapestry_egg.errors import RuleError, TapestryError, TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rewrite.terms.requests import Applied, Catalogue
from tapestry_egg.rules.language.book import Rule

from .examples import example_graph
from .facts import passes_on
from .laws import Node, Side
from .samples import DTYPES, LONGEST, MOST_ELEMENTS, Draw, chosen, drawable, propose
from .unlike import Unlike
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
            own = self.applied[node.signature].signature
            if own.contracts or (node.name in reached and passes_on(own)):
                reached.update(node.operands)
            if own.contracts or own.means in ("product", "quotient"):
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
            shape = draw.shape() if rank < 0 else draw.shape(rank)
            types[name] = inputs[name] = TensorType(shape, own)
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
    allowed = side.kernels[node.signature] or drawable(len(known))
    if not allowed:
        return None
    alike = [a for a in applied.values() if a.kernel in allowed and len(a.inputs) == len(known)]
    beside = [a for a in alike if list(a.inputs) == list(known)]
    other = draw.rng.choice(beside) if beside and draw.chance(0.5) else None
    if alike and other is None and draw.chance(0.6):
        model = draw.rng.choice(alike)
        # The same types, or in another order, as parts of other lengths that make up as much.
        types = model.inputs if draw.chance(0.8) else model.inputs[::-1]
        inputs = [k or t for k, t in zip(known, types, strict=True)]
        entry = applied_to(model.kernel, model.params, inputs)
        if entry is not None and (len(allowed) == 1 or draw.chance(0.8)):
            return entry
    kernel = other.kernel if other else draw.rng.choice(allowed)
    said = {k: v for k, v in side.params[node.signature].items() if draw.chance(_SAID)}
    proposal = propose(kernel, known, draw, said, other.params if other else None)
    return proposal and applied_to(kernel, *proposal)


def applied_to(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]
) -> Applied | None:
    """A kernel on operands of these types; None where no template fits, or not with one output."""
    try:
        if not registry.valid(kernel, params, inputs):
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
        and registry.valid(op.kernel, op.params, [graph.values[v] for v in op.inputs])
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
