"""Samples: random operations of any kernel, made of what its template says.

Shapes come of the patterns of operands, dtypes and parameters of `samples:`. So a kernel of one's
own is drawn as those that ship are. Odd cases are drawn on purpose and often: extents of 1, scalars
that broadcast, identity permutations, whole slices, repeated sizes.
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
from tapestry_egg.metakernels.language.template import Operand, Template
from tapestry_egg.metakernels.registry import allowed
from tapestry_egg.metakernels.signatures.parameters import plain, readable
from tapestry_egg.rules.language.rewrites import defaults

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


def propose(
    kernel: str,
    known: Known,
    draw: Draw,
    said: Mapping[str, Any] = NOTHING,
    other: Mapping[str, Any] | None = None,
) -> Proposal | None:
    """An operation of this kernel whose operands have the types that are known, and some of whose
    parameters are `said`; None where its template has none, or none was found. `other` are the
    parameters of an operation of this kernel that reads the same."""
    fits = [t for t in registry.templates().get(kernel, ()) if _takes(t, len(known))]
    if not fits:
        return None
    try:
        params, types = _Operation(draw.rng.choice(fits), kernel, known, draw, said, other).made()
        return defaults(kernel, params, types), types
    except (Mismatch, TemplateError):  # its shapes are none of the template's
        return None


def drawable(count: int) -> tuple[str, ...]:
    """Every kernel of so many operands and one result."""
    return tuple(
        kernel
        for kernel, entries in registry.templates().items()
        if any(_takes(t, count) and len(t.outputs) == 1 and not t.outputs[0].count for t in entries)
    )


def _takes(template: Template, count: int) -> bool:
    fixed = sum(not (o.many or o.optional) for o in template.inputs)
    many = any(o.many for o in template.inputs)
    return count == len(template.inputs) or count == fixed or (many and count > fixed)


class _Operation:
    """An operation as it is drawn: operands get their types, and parameters their values, in the
    order of `samples:`."""

    def __init__(
        self,
        template: Template,
        kernel: str,
        known: Known,
        draw: Draw,
        said: Mapping[str, Any],
        other: Mapping[str, Any] | None,
    ) -> None:
        self.template, self.draw, self.said = template, draw, said
        self.types = list(known)
        self.own = {o.name: places(template, o.name, len(known)) for o in template.inputs}
        self.bound: dict[str, Any] = {}
        self.names = Names({f"${k}": value for k, value in template.let.items()})
        self.names.update({"$kernel": kernel, "$draw": draw, "$other": readable(other)})
        self.names.update((f"${k}", readable(v)) for k, v in said.items())
        for operand in template.inputs:
            self._bind(operand, [t.shape for p in self.own[operand.name] if (t := known[p])])
        self.usual = next((t.dtype for t in known if t is not None), draw.dtype)
        static = _dtypes(template, kernel, len(known))
        if known and known[0] is None and static[0] and not allowed(self.usual, static[0]):
            self.usual = chosen(static[0], draw)  # which the other operands have, too

    def _bind(self, operand: Operand, shapes: Sequence[tuple[int, ...]]) -> None:
        """Bind the names of the operand's pattern, and the operand's own. Raises Mismatch."""
        if operand.pattern is not None and shapes:
            bind([(operand.pattern, shapes)], self.bound, self.names)
        self.names.update(self.bound)
        given = tuple(self.types[p] for p in self.own[operand.name])
        self.names[f"${operand.name}"] = given if operand.many else given[0] if given else None

    def made(self) -> Proposal:
        """Parameters and types. Raises Mismatch where none fit what is known."""
        rows, operands = self.template.samples, {o.name: o for o in self.template.inputs}
        for name, operand in operands.items():
            if name not in rows and f"{name}.shape" not in rows:
                word = operand.dtype and "$" not in operand.dtype.text and operand.dtype(self.names)
                self._give(operand, (word,) if isinstance(word, str) else word or ())
        params = dict(self.said)
        shapes: dict[int, tuple[int, ...]] = {}
        for name, text in rows.items():
            first, _, last = name.partition(".")
            if name in ("when", "unlike"):  # of whole operations (`registry.takes`, `unlike`)
                continue
            if last:
                for p in self.own[first]:
                    if self.types[p] is None:
                        shapes[p] = text(self.names)
                if first not in rows:
                    self._give(operands[first], (), shapes)
            elif name in operands:
                self._give(operands[name], text(self.names), shapes)
            elif name.startswith("$"):
                if name not in self.bound:
                    self.names[name] = self.bound[name] = text(self.names)
            elif name not in self.said:
                value = text(self.names)
                _need(value)  # else there is nothing that it could be, of operands of these shapes
                self.names[f"${name}"] = value = self.draw.rng.choice(value)
                params[name] = plain(value)
        return params, [t for t in self.types if t is not None]

    def _give(
        self,
        operand: Operand,
        dtypes: Sequence[str],
        shapes: Mapping[int, tuple[int, ...]] = NOTHING,  # type: ignore[assignment]
    ) -> None:
        """Choose the types of an operand that are open. Raises Mismatch if one that is known does
        not fit."""
        own = self.own[operand.name]
        for p in own:
            if self.types[p] is None:
                alike = [t.dtype for q in own if (t := self.types[q])] or [self.usual]
                dtype = alike[0] if allowed(alike[0], dtypes) else chosen(dtypes, self.draw)
                shape = shapes[p] if p in shapes else self._shape(operand)
                self.types[p] = TensorType(shape, dtype)
                self._bind(operand, [shape] if p in shapes else [])
        self._bind(operand, [])
        _need(all(allowed(t.dtype, dtypes) for p in own if (t := self.types[p])))

    def _shape(self, operand: Operand) -> tuple[int, ...]:
        """A shape as the pattern says; without one as other operands have, or that stretches to
        theirs."""
        if operand.pattern is not None:
            return _of(operand.pattern.axes(), self.bound, self.names, self.draw)
        model = next((t.shape for t in self.types if t is not None), None)
        if model is None or (not model and self.draw.chance(0.5)):
            return self.draw.shape()
        if operand.many or self.draw.chance(0.66):
            return model
        if self.draw.chance(0.66):
            return ()
        return tuple(1 if self.draw.chance(0.5) else n for n in model)


def _need(holds: Any) -> None:
    if not holds:
        raise Mismatch("no such operation")


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
        self._landmarks = [int(m) for m in landmarks if m == int(m) and abs(m) < 2**31]

    def extent(self) -> int:
        return self.rng.choice(self.extents)

    def rank(self, usual: Sequence[int]) -> int:
        """A rank out of those that a kernel likes, unless the kind of shapes asks for others.

        Scalars go with all kinds.
        """
        if self.ranks and 0 in usual and self.chance(0.3):
            return 0
        return self.rng.choice(self.ranks or tuple(usual))

    def shape(self, rank: int | Sequence[int] = (0, 1, 2, 2, 2, 3, 3, 4)) -> tuple[int, ...]:
        """A shape of this rank, or of one of these."""
        rank = rank if isinstance(rank, int) else self.rank(rank)
        if self.sizes.unlike and rank <= len(self.extents):
            return tuple(self.rng.sample(self.extents, rank))
        out = [self.extent() for _ in range(rank)]
        while len(out) > 1 and prod(out) > MOST_ELEMENTS // 4:
            out[out.index(max(out))] = 2
        return tuple(out)

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def between(self, low: int, high: int) -> int:
        """A whole number from `low` to `high`."""
        return self.rng.randint(low, high)

    def one(self, values: Sequence[Any]) -> Any:
        return self.rng.choice(values)

    def some(self, values: Sequence[Any], least: int = 0, most: int | None = None) -> Any:
        """Some of the values in their order. Raises ValueError where there are too few."""
        count = self.rng.randint(least, len(values) if most is None else most)
        return tuple(values[k] for k in sorted(self.rng.sample(range(len(values)), count)))

    def shuffled(self, values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(self.rng.sample(values, len(values)))

    def exactly(self, values: Sequence[Any], count: int) -> Any:
        """So many of the values in their order. Raises ValueError where there are too few."""
        return self.some(values, count, count)

    def within(self, count: int, others: int) -> Any:
        """Places for so many dims among others: behind them, or anywhere."""
        rank = count + others
        return self.exactly(range(others if self.chance(0.6) else 0, rank), count)

    def landmarks(self, most: int) -> tuple[int, ...]:
        """The numbers up to `most` that the rule speaks of, and those beside them."""
        return tuple(m + d for m in self._landmarks if 2 <= abs(m) <= most for d in (-1, 0, 1))

    def dtype_in(self, dtypes: Sequence[str] = ()) -> str:
        """One of these dtypes and kinds, of all if there are none: the usual one, or one that the
        rule speaks of."""
        if dtypes:
            return self.dtype if allowed(self.dtype, dtypes) else chosen(dtypes, self)
        own = self.named if self.named and self.chance(0.6) else (*self.dtypes, self.dtype)
        return self.rng.choice(own)

    def akin(self, shape: Sequence[int]) -> tuple[int, ...]:
        """A shape with some extents of another one, and others of its own."""
        kept = self.exactly(shape, min(len(shape), self.rng.choice((0, 1, 1, 1, 1, 2, 2, 3))))
        own = tuple(self.extent() for _ in range(self.rng.choice((0, 1, 1, 1, 1, 2))))
        cut = self.rng.randint(0, len(kept))
        made = (*kept[:cut], *own, *kept[cut:])
        return made if self.chance(0.6) else self.shuffled(made)

    def pairing(self, left: Sequence[int], right: Sequence[int]) -> Any:
        """Dims of equal extents to contract, and to go along as batch dims: `dimension_numbers` of
        a product."""
        dims = range(len(left))
        free = list(range(len(right)))
        pairs: list[tuple[int, int]] = []
        for d in dims if self.chance(0.5) else self.shuffled(dims):
            fits = [e for e in free if right[e] == left[d]]
            if fits:
                pairs.append((d, fits[0] if self.chance(0.4) else self.rng.choice(fits)))
                free.remove(pairs[-1][1])
        batches = self.rng.choice((0, 0, 0, 1, 1, 2)) if len(pairs) > 1 else 0
        rest = pairs[batches:]
        count = min(len(rest), self.rng.choice((0, 1, 1, 1, 1, 1, 1, 2, 2)))
        chosen = (rest[len(rest) - count :], pairs[:batches])
        return tuple(tuple(tuple(p[k] for p in some) for k in (0, 1)) for some in chosen)

    def regrouped(self, shape: Sequence[int]) -> tuple[int, ...]:
        """As many elements in other dims: merged, split, of extent 1, in another order."""
        sizes = list(shape)
        for _ in range(self.rng.choice((0, 1, 1, 2))):
            k = self.rng.randrange(max(1, len(sizes) - 1))
            parts = [n for n in (2, 3) if sizes and sizes[k] % n == 0] or [1]
            n = self.rng.choice(parts)
            step = self.rng.choice(("merge", "split", "one", "flat", "turn"))
            if step == "merge" and len(sizes) > 1:
                sizes[k : k + 2] = [sizes[k] * sizes[k + 1]]
            elif step == "split" and sizes:
                sizes[k : k + 1] = [n, sizes[k] // n]
            elif step == "one" and len(sizes) < 4:
                sizes.insert(k, 1)
            elif step == "flat":
                sizes = [prod(sizes)]
            elif step == "turn":
                self.rng.shuffle(sizes)
        return tuple(sizes)


def beside(landmarks: Sequence[float]) -> tuple[int, ...]:
    """Extents at and beside the whole numbers that a rule speaks of."""
    near = {int(m) + d for m in landmarks if m == int(m) and abs(m) < 600 for d in (-1, 0, 1, 2)}
    return tuple(sorted(n for n in near if n > 0)) or (1, 2, 3)
