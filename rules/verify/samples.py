"""Samples: random operations of any kernel, made of what its template says.

Shapes come of the patterns of operands, dtypes and parameters of `samples:`. So a kernel of one's
own is drawn as those that ship are. Kernels whose parameters are more than a list of choices have
proposals of their own beside this (`proposals.py`).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.binding import places
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.patterns import Axis, bind
from tapestry_egg.metakernels.language.scopes import Names
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.metakernels.registry import allowed
from tapestry_egg.metakernels.signatures.parameters import readable

NOTHING: Mapping[str, Any] = {}
#: What stands for a kind of dtypes where a tensor has another.
_USUAL = {
    "float": "float32",
    "complex": "complex64",
    "int": "int32",
    "uint": "uint32",
    "bool": "bool",
    "key": "key<fry>",
}


def sampled(
    kernel: str, known: Known, draw: Draw, said: Mapping[str, Any] = NOTHING
) -> Proposal | None:
    """An operation of this kernel whose operands have the types that are known, and some of whose
    parameters are `said`; None where its template has none, or none was found."""
    fits = [t for t in registry.templates().get(kernel, ()) if _takes(t, len(known))]
    if not fits:
        return None
    try:
        return _operation(draw.rng.choice(fits), kernel, known, draw, said)
    except (Mismatch, TemplateError):  # its shapes are none of the template's
        return None


def _takes(template: Template, count: int) -> bool:
    fixed = sum(not (o.many or o.optional) for o in template.inputs)
    many = any(o.many for o in template.inputs)
    return count == len(template.inputs) or count == fixed or (many and count > fixed)


def _operation(
    template: Template, kernel: str, known: Known, draw: Draw, said: Mapping[str, Any]
) -> Proposal | None:
    names = Names({})
    names["$kernel"] = kernel
    shapes = _shapes(template, known, names, draw)
    types: list[TensorType | None] = list(known)
    usual = next((t.dtype for t in known if t is not None), draw.dtype)
    static = _dtypes(template, kernel, len(known))
    if known and known[0] is None and static[0] and not allowed(usual, static[0]):
        usual = chosen(static[0], draw)  # which the other operands have, too

    def give(name: str, dtypes: Sequence[str]) -> bool:
        """Choose the dtype of an operand that is open; whether that of one that is known fits."""
        own = places(template, name, len(known))
        for p in own:
            if types[p] is None:
                dtype = usual if allowed(usual, dtypes) else chosen(dtypes, draw)
                types[p] = TensorType(shapes[p], dtype)
        given = tuple(t for p in own if (t := types[p]) is not None)
        many = any(o.name == name and o.many for o in template.inputs)
        names[f"${name}"] = given if many else given[0] if given else None
        return all(allowed(t.dtype, dtypes) for t in given)

    for operand in template.inputs:
        if operand.name not in template.samples:
            word = operand.dtype and "$" not in operand.dtype.text and operand.dtype(names)
            give(operand.name, (word,) if isinstance(word, str) else word or ())
    params = dict(said)
    names.update((f"${k}", readable(v)) for k, v in said.items())
    for name, text in template.samples.items():
        if name in said:
            continue
        value = text(names)
        if name == "when":
            if not value:
                return None
        elif any(o.name == name for o in template.inputs):
            if not give(name, value):
                return None
        elif value:
            params[name] = names[f"${name}"] = draw.rng.choice(value)
        else:
            return None  # nothing that the parameter could be, of operands of these shapes
    return params, [t for t in types if t is not None]


def chosen(dtypes: Sequence[str], draw: Draw) -> str:
    """One out of a list of dtypes and kinds."""
    word = draw.rng.choice(dtypes)
    alike = [d for d in draw.dtypes if kind(d) == word]
    return draw.rng.choice(alike) if alike and draw.chance(0.3) else usual(word)


def usual(word: str) -> str:
    """The dtype that stands for a kind of dtypes, or the dtype itself."""
    return _USUAL.get(word, word)


def dtypes_of(kernel: str, count: int) -> tuple[tuple[str, ...], ...]:
    """Per operand the dtypes and kinds that the kernel takes there, as far as its template says
    without regard to parameters; empty where it says nothing."""
    for template in registry.templates().get(kernel, ()):
        if _takes(template, count):
            return _dtypes(template, kernel, count)
    return ((),) * count


@cache
def _dtypes(template: Template, kernel: str, count: int) -> tuple[tuple[str, ...], ...]:
    found: list[tuple[str, ...]] = [()] * count
    names = Names({})
    names["$kernel"] = kernel
    for name, text in template.samples.items():
        if any(o.name == name for o in template.inputs):
            try:
                value = text(names)
            except TemplateError:  # it depends on parameters, or on other operands
                continue
            for p in places(template, name, count):
                found[p] = value
    return tuple(found)


# Shapes


def _shapes(template: Template, known: Known, names: Names, draw: Draw) -> list[tuple[int, ...]]:
    """The shapes of all operands; names of their patterns are bound into `names`.

    Raises Mismatch where the known ones do not fit.
    """
    bound: dict[str, Any] = {}
    for operand in template.inputs:
        own = [t for p in places(template, operand.name, len(known)) if (t := known[p])]
        if operand.pattern is not None and own:
            bind([(operand.pattern, [t.shape for t in own])], bound, names)
    shapes: list[tuple[int, ...]] = [()] * len(known)
    free = next((t.shape for t in known if t is not None), None)
    for operand in template.inputs:
        for p in places(template, operand.name, len(known)):
            if (t := known[p]) is not None:
                shapes[p] = t.shape
            elif operand.pattern is not None:
                shapes[p] = _of(operand.pattern.axes(), bound, names, draw)
            else:
                free = draw.shape() if free is None else free
                shapes[p] = free
    names.update(bound)
    return shapes


def _of(
    axes: Sequence[Axis], bound: dict[str, Any], names: Mapping[str, Any], draw: Draw
) -> tuple[int, ...]:
    shape: list[int] = []
    for axis in axes:
        value = bound.get(axis.name) if axis.name and not axis.index else None
        if axis.kind == "exactly":
            value = axis.extent
        elif axis.kind == "group":
            value = _of(axis.members, bound, names, draw)
        elif value is None and axis.kind == "dim":
            value = draw.extent()
        elif value is None:
            least = 1 if axis.kind == "some" else 0
            rank = axis.count(names) if axis.count else draw.rng.choice((least, 1, 1, 2))
            value = draw.shape(rank)
        if axis.name and not axis.index:
            bound.setdefault(axis.name, value)
        shape += value if isinstance(value, tuple) else [value]
    return tuple(shape)


# Draws: shapes and dtypes of programs to try rules on, every kind of shape with every dtype.
#
# The kinds of shapes and the dtypes are lists, walked through in step: no rule is spared one of
# them by chance. Chance only chooses within a kind.


#: Parameters, and the types of all operands.
Proposal = tuple[dict[str, Any], list[TensorType]]
Known = Sequence[TensorType | None]
#: The dtypes that instances have in turn, common ones more often.
DTYPES = (
    *("float32", "int32", "bfloat16", "float32", "int8", "float32", "complex64", "uint8"),
    *("float32", "bool", "float16", "float32", "uint32", "bfloat16", "float32", "int16"),
    *("float64", "int32", "float8_e4m3fn", "int64", "uint16", "complex128", "uint64"),
)


@dataclass(frozen=True)
class Sizes:
    """A kind of shapes: the extents that dims have, and ranks (none: those that a kernel likes)."""

    name: str
    extents: tuple[int, ...]
    ranks: tuple[int, ...] = ()
    unlike: bool = False  # no two dims of a tensor have one extent, as long as there are others


#: The kinds of shapes that instances have in turn.
SIZES = (
    Sizes("small", (1, 1, 2, 2, 2, 3, 3, 4)),
    Sizes("equal", (3,)),
    Sizes("unlike", (2, 3, 4, 5, 7), unlike=True),
    Sizes("thin", (1, 1, 2)),
    Sizes("deep", (1, 2, 2, 3), (5, 6, 7, 8)),
    Sizes("deep and equal", (2,), (5, 6, 7)),
    Sizes("empty", (0, 1, 2, 3)),
    Sizes("even", (2, 4, 6)),
    Sizes("primes", (5, 7, 11, 13), unlike=True),
    Sizes("small", (1, 2, 2, 3, 3, 4)),
    Sizes("large", (17, 19, 24, 32, 2, 3), (1, 2, 2)),
    Sizes("landmarks", ()),
    Sizes("long", (600,), (1,)),
    Sizes("long and thin", (300, 1, 2), (2,), unlike=True),
)
#: A tensor of more elements is not drawn, but for lists that are longer than a dtype counts.
MOST_ELEMENTS = 4096
LONGEST = 5 * 2**14
#: Numbers that dtypes do not count up to: there places along a dim are no longer what they were.
_COUNTED = {
    **{"int8": 128, "uint8": 256, "float8_e4m3fn": 17, "bfloat16": 257},
    **{"float16": 2049, "int16": 2**15, "uint16": 2**16},
}


class Draw:
    """A source of random choices, with the one dtype that most tensors of an instance have."""

    def __init__(
        self,
        rng: random.Random,
        turn: int,
        landmarks: Sequence[float] = (),
        named: Sequence[str] = (),
    ) -> None:
        self.rng = rng
        self.dtypes = DTYPES
        self.named = named  # dtypes that the rule speaks of: every other turn has one of them
        self.dtype = DTYPES[turn % len(DTYPES)]
        if named and turn % 2:
            self.dtype = named[turn // 2 % len(named)]
        self.sizes = SIZES[sum(divmod(turn, len(DTYPES))) % len(SIZES)]
        self.extents = self.sizes.extents or beside(landmarks)
        if self.sizes.name == "long":
            ends = [_COUNTED[d] * 5 // 4 for d in (self.dtype, *named) if d in _COUNTED]
            self.extents = (max(ends),) if ends else self.extents
        self.ranks = self.sizes.ranks
        self.landmarks = [int(m) for m in landmarks if m == int(m) and abs(m) < 2**31]

    def extent(self) -> int:
        return self.rng.choice(self.extents)

    def rank(self, usual: Sequence[int]) -> int:
        """A rank out of those that a kernel likes, unless the kind of shapes asks for others.

        Scalars go with all kinds.
        """
        if self.ranks and 0 in usual and self.chance(0.3):
            return 0
        return self.rng.choice(self.ranks or tuple(usual))

    def shape(self, rank: int | None = None) -> tuple[int, ...]:
        rank = self.rank((0, 1, 2, 2, 2, 3, 3, 4)) if rank is None else rank
        if self.sizes.unlike and rank <= len(self.extents):
            return tuple(self.rng.sample(self.extents, rank))
        out = [self.extent() for _ in range(rank)]
        while len(out) > 1 and prod(out) > MOST_ELEMENTS // 4:
            out[out.index(max(out))] = 2
        return tuple(out)

    def tensor(self, rank: int | None = None) -> TensorType:
        return TensorType(self.shape(rank), self.dtype)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def subset(self, values: Sequence[int], least: int = 0) -> list[int]:
        """Some of the values in their order, at least so many."""
        if len(values) < least:
            return []
        count = self.rng.randint(least, len(values))
        return sorted(self.rng.sample(list(values), count))


def beside(landmarks: Sequence[float]) -> tuple[int, ...]:
    """Extents at and beside the whole numbers that a rule speaks of."""
    near = {int(m) + d for m in landmarks if m == int(m) and abs(m) < 600 for d in (-1, 0, 1, 2)}
    return tuple(sorted(n for n in near if n > 0)) or (1, 2, 3)


def first(known: Known, draw: Draw, rank: int | None = None) -> TensorType:
    """The first type that is known, or a new one."""
    return next((t for t in known if t is not None), None) or draw.tensor(rank)
