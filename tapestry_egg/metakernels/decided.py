"""What is decided of an operation before any search, where operands are known: its template says.

`settled:` is the number that every element of the result then is, `same_as:` the operand that the
result is, `joins:` are operands that add nothing where they have no elements. Their texts may ask
of an operand for its `number`, which all of its elements are, and for its `id`: two operands of
one are one value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.scopes import Inner
from tapestry_egg.metakernels.language.template import Template

from . import registry
from .binding import places, ports


@dataclass(frozen=True, slots=True)
class KnownTensor(TensorType):
    """The type of an operand, which value it is, and who says what number its elements are."""

    id: int = -1
    numbers: Callable[[int], Any | None] = lambda _: None

    @property
    def number(self) -> bool | int | float | complex | None:
        """The number that every element is; None where they differ, or nothing says."""
        found = self.numbers(self.id)
        item: bool | int | float | complex | None = None if found is None else found.item()
        return item


@dataclass(frozen=True)
class Decided:
    """A template that says something, of the operands of one operation."""

    template: Template
    scope: Mapping[str, Any]
    operands: Sequence[TensorType]

    def settled(self, dtype: str) -> bool | int | float | complex | None:
        """The number that every element of the result, of a dtype, is; None where operands matter.
        Of integers it may be any that has the same bits."""
        text = self.template.settled
        value = None if text is None else text(self.scope)
        if text is not None and value is not None:
            if not isinstance(value, bool | int | float | complex):
                raise text.error(f"{value!r} is not a number")
            broken = isinstance(value, float) and not value.is_integer()
            if kind(dtype) != "complex" and isinstance(value, complex):
                raise text.error(f"{value!r} is no {dtype}")
            if kind(dtype) in ("int", "uint", "bool") and broken:
                raise text.error(f"{value!r} is no {dtype}")
        number: bool | int | float | complex | None = value
        return number

    def same_as(self) -> int | None:
        """The operand whose elements are those of the result, also where all others that it is
        joined to have none; None where it is none."""
        needed = self.needed()
        if self.template.joins and len(needed) == 1:
            return needed[0]
        text = self.template.same_as
        value = None if text is None else text(self.scope)
        if text is None or value is None:
            return None
        name, k = value if isinstance(value, tuple) and len(value) == 2 else (value, 0)
        if name not in [o.name for o in self.template.inputs] or not isinstance(k, int):
            raise text.error(f"{value!r} is neither an operand nor `[operand, number]`")
        own = places(self.template, name, len(self.operands))
        if not 0 <= k < len(own):
            raise text.error(f"there is no operand {k} of {name}")
        return own[k]

    def needed(self) -> tuple[int, ...]:
        """The operands without those that are joined and have no elements; one stays."""
        count = len(self.operands)
        joined = {p for n in self.template.joins for p in places(self.template, n, count)}
        kept = tuple(p for p in range(count) if p not in joined or self.operands[p].size)
        return kept or (0,)


def may_be_settled(kernel: str) -> bool:
    """Whether some template of a kernel says what number a result is."""
    return any(t.settled is not None for t in registry.templates().get(kernel, ()))


def may_be_an_operand(kernel: str) -> bool:
    """Whether some template of a kernel says which operand a result is, or which are joined."""
    return any(t.same_as is not None or t.joins for t in registry.templates().get(kernel, ()))


def all_in_one_part(kernel: str, operand: TensorType, results: Sequence[TensorType]) -> bool:
    """Whether one of the parts that a kernel cuts its operand in is the operand."""
    parts = any(t.parts is not None for t in registry.templates().get(kernel, ()))
    return parts and operand in results and sum([t.size > 0 for t in results]) == 1


def decided(
    kernel: str, params: Mapping[str, Any], operands: Sequence[KnownTensor]
) -> Decided | None:
    """What a template says of an operation, `params` plain data; None where none stands for it."""
    types = tuple(TensorType(x.shape, x.dtype, x.weak) for x in operands)
    found = registry.bound(kernel, params, types)
    if found is None:
        return None
    template, names = found
    return Decided(template, Inner(names, ports(template, operands, ())), operands)
