"""Objectives of one's own as formulas: `seconds * joules`, and files of them, a line for each.

A formula has the named objectives in base units, numbers, amounts such as `4ms` or `40GiB`,
`+ - * / **`, `min`, `max` and parentheses. It is read, never executed.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tapestry_egg.errors import ExtractError
from tapestry_egg.formulas import Arithmetic, FormulaFault, Syntax, read_formula
from tapestry_egg.quantities import BYTES, ENERGY, MONEY, TIME
from tapestry_egg.yaml_nodes import compose_yaml_text, read_yaml_text

from .objectives import KNOWN, OBJECTIVES_BY_NAME, Objective

_LONGEST = 400
_UNITS: Mapping[str, float] = {
    unit: size
    for quantity in (BYTES, TIME, ENERGY, MONEY)
    for unit, size in (*quantity.units, *quantity.read)
    if unit.isalpha()
}
_AMOUNT = re.compile(
    rf"(?<![\w.])(\d+(?:\.\d+)?)\s?({'|'.join(sorted(_UNITS, key=len, reverse=True))})\b"
)
_ARITHMETIC: Arithmetic = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    # A power of something negative may be no real number, and then is no amount.
    "**": lambda x, y: math.nan if isinstance(z := float(x) ** float(y), complex) else z,
    "min": lambda *amounts: min(amounts),
    "max": lambda *amounts: max(amounts),
}
_SYNTAX = Syntax({"min": None, "max": None}, frozenset("+ - * / **".split()))
_HINT = "Such as seconds * joules, or 0.7 * seconds / 4ms + 0.3 * peak_bytes / 40GiB."


def formula(text: str, name: str = "", where: str = "") -> Objective:
    """The objective that a formula stands for, called `name` or by the formula.

    Raises ExtractError for what is no formula.
    """
    where = where or f"objective {name or text!r:.80}"
    if len(text) > _LONGEST:
        raise ExtractError(f"a formula of {len(text)} characters", where=where, hint=_HINT)
    plain = _AMOUNT.sub(lambda m: repr(float(m[1]) * _UNITS[m[2]]), text)
    try:
        read = read_formula(plain.strip(), _SYNTAX)
    except FormulaFault as fault:
        hint = fault.hint or _HINT
        raise ExtractError(f"{text!r:.80}: {fault.what}", where=where, hint=hint) from None
    if unknown := read.names - OBJECTIVES_BY_NAME.keys():
        raise ExtractError(f"{min(unknown)!r:.60} is no objective", where=where, hint=KNOWN)

    def of(plan: Any) -> float:
        try:
            return float(read(lambda name: OBJECTIVES_BY_NAME[name].value(plan), _ARITHMETIC))
        except (ZeroDivisionError, OverflowError):
            return float("inf")

    return Objective(name or text.strip(), of, formula=text.strip())


def load_objectives(path: str | Path) -> dict[str, Objective]:
    """The objectives of a YAML file by name, a line for each: `energy_delay: seconds * joules`.

    Raises ExtractError with its line for a file that holds anything else.
    """
    path = Path(path)
    text = read_yaml_text(path, ExtractError, str(path))
    root = compose_yaml_text(text, ExtractError, str(path))
    if root is None:
        raise ExtractError("no objectives", where=str(path), hint=f"NAME: FORMULA. {_HINT}")
    found: dict[str, Objective] = {}
    for name, (key, value) in root.entries("objectives, NAME: FORMULA").items():
        if not name.isidentifier() or name in OBJECTIVES_BY_NAME:
            raise key.error(f"{name!r:.60} is not a new name", KNOWN)
        found[name] = formula(value.text("a formula"), name, value.where)
    return found
