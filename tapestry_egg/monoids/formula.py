"""Formulas of monoids: elementwise arithmetic such as `a.total + b.total`.

They run on NumPy and on JAX arrays alike: what they compute with is a table of functions
(`arithmetic`), so both have one text and no shared code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tapestry_egg.errors import TapestryError
from tapestry_egg.formulas import Formula, FormulaFault, Syntax, read_formula

#: Function name -> its number of arguments.
FUNCTIONS: Mapping[str, int] = {
    "abs": 1,
    "exp": 1,
    "isnan": 1,
    "log": 1,
    "max": 2,
    "min": 2,
    "sqrt": 1,
    "where": 3,
}
_SYNTAX = Syntax(
    FUNCTIONS,
    frozenset("+ - * / == != <= >= < > and or not negate".split()),
    dotted=True,
)


class MonoidError(TapestryError):
    """A monoid is malformed, breaks its laws, or does not fit the values given."""


def parse_formula(text: str, where: str = "") -> Formula:
    """Read a formula. Raises MonoidError with a caret below the place of a fault."""
    try:
        return read_formula(text, _SYNTAX)
    except FormulaFault as fault:
        shown = [text.replace("\n", " ").strip(), " " * fault.at + "^", fault.hint]
        hint = "\n  ".join(x for x in shown if x)
        raise MonoidError(fault.what, where=where, hint=hint) from None


def arithmetic(xp: ModuleType) -> dict[str, Callable[..., Any]]:
    """What formulas compute with, from `numpy` or `jax.numpy`."""
    return {
        "abs": xp.abs,
        "exp": xp.exp,
        "isnan": lambda x: x != x,
        "log": xp.log,
        "max": xp.maximum,
        "min": xp.minimum,
        "sqrt": xp.sqrt,
        "where": xp.where,
        "and": xp.bitwise_and,
        "or": xp.bitwise_or,
        "not": xp.invert,
        "+": xp.add,
        "-": xp.subtract,
        "*": xp.multiply,
        "/": xp.divide,
        "negate": xp.negative,
        "==": xp.equal,
        "!=": xp.not_equal,
        "<=": xp.less_equal,
        ">=": xp.greater_equal,
        "<": xp.less,
        ">": xp.greater,
    }
