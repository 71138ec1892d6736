"""Samples: random operations of any kernel, made of what its template says.

Shapes come of the patterns of operands, dtypes and parameters of `samples:`. So a kernel of one's
own is drawn as those that ship are. Kernels whose parameters are more than a list of choices have
proposals of their own beside this (`proposals.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
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

from .draws import Draw, Known, Proposal

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
