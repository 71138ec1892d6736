"""What templates say of how kernels round: which only move elements, which sum or multiply them."""

from __future__ import annotations

from tapestry_egg.graph.arrays import kind
from tapestry_egg.metakernels.signatures.signature import AROUND, OperationSignature

_ARITHMETIC = ("sum", "difference", "product", "quotient", "negative", "power")
# With fewer flops an element is exact where few digits suffice: what takes more is a series.
_SERIES = 10.0
# What is combined of these is one of them.
_CHOOSING = frozenset(("max", "min"))


def is_still(s: OperationSignature) -> bool:
    """Whether a kernel rounds nothing: it moves, chooses or converts elements, or counts."""
    return s.elements != "computed" or s.means in ("conversion", "negative", "count")


def moves(s: OperationSignature) -> bool:
    """Whether a kernel moves elements to places that are no data, and does no more."""
    dtypes = {t.dtype for t in (*s.input_types[:1], *s.output_types)}
    return s.elements == "kept" and not s.flops and s.scattered is None and len(dtypes) == 1


def combined(s: OperationSignature) -> set[str]:
    """The monoids under which a kernel combines elements."""
    found = {d.monoid for d in s.index if d.role in ("reduce", "scan") and d.monoid}
    return found | {x for x in s.outside if isinstance(x, str) and x != AROUND}


def is_polynomial(s: OperationSignature) -> bool:
    """Whether results are sums, products and quotients of numbers, or moved."""
    if s.means in _ARITHMETIC or moves(s):
        return True
    if s.fusion not in ("reduce", "kernel") or s.scattered or not combined(s) <= {"sum"}:
        return False
    plain = s.fusion == "reduce" or all(d.role != "whole" for d in s.index)
    return s.multiplies or (plain and linear_in(s) == set(range(len(s.inputs))))


def is_rational(s: OperationSignature) -> bool:
    """Whether results are exact where few digits suffice."""
    cheap = s.fusion == "loop" and all(c < _SERIES for c, _ in s.flops)
    return cheap or is_polynomial(s) or "prod" in combined(s)


def is_sum(s: OperationSignature) -> bool:
    """Whether elements of a result are made of many, in some order: complex products, too."""
    if s.means in ("product", "quotient", "power"):
        return s.output_types[0].dtype.startswith("complex")
    if s.fusion not in ("reduce", "kernel") or s.elements != "computed":
        return False
    some = combined(s)
    if some or kind(s.output_types[0].dtype) not in ("float", "complex"):
        return s.adds or bool(some - _CHOOSING)
    return s.adds or not s.scattered


def linear_in(s: OperationSignature) -> set[int]:
    """The operands that results are linear in, each by itself or with others."""
    laws = (x for x in s.passages if x.monoid_in == x.monoid_out == "sum")
    return {p for law in laws for p in law.inputs}


def passes_on(s: OperationSignature) -> bool:
    """Whether what reads a result reads the operands as they are, moved, scaled or added to."""
    scaled = s.means in _ARITHMETIC and s.means != "power"
    return scaled or s.means in ("conversion", "reading", "adding") or moves(s)
