"""Arithmetic of the template language: exact between integers, of numbers alone, and not too large.

Tuples and strings know `+` and `*` in Python, with meanings that shapes should not get by accident.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType

from .positional import Diagonal

# Bits of the largest integer that is computed with.
_MOST_BITS = 4096


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        quotient, remainder = divmod(a, b)
        if remainder:
            raise ValueError(f"{a} / {b} is not exact; `//` rounds down")
        return quotient
    return a / b


def _power(a: Any, b: Any) -> Any:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        raise TypeError(f"{a!r} ^ {b!r} is not of numbers")
    if not isinstance(a, float) and abs(b) * max(1, abs(a).bit_length()) > _MOST_BITS:
        raise ValueError(f"{a} ^ {b} is too large")
    return a**b


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(a: Any, b: Any) -> Any:
        if type(a) is int and type(b) is int and a.bit_length() <= _MOST_BITS:
            return function(a, b)  # nearly always
        if isinstance(a, Diagonal) and isinstance(b, tuple) and function is operator.add:
            return a + b
        for v in (a, b):
            if isinstance(v, tuple | str | TensorType) or v is None:
                raise TypeError(f"{v!r} is not a number")
        if isinstance(a, int) and isinstance(b, int) and a.bit_length() > _MOST_BITS:
            raise ValueError("the number is too large")
        return function(a, b)

    return checked


#: Sign -> the function of two values.
BINARY = {
    "+": _arithmetic(operator.add),
    "-": _arithmetic(operator.sub),
    "*": _arithmetic(operator.mul),
    "/": _arithmetic(_divide),
    "//": _arithmetic(operator.floordiv),
    "%": _arithmetic(operator.mod),
    "^": _arithmetic(_power),
}
#: Sign -> the comparison of two values.
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
