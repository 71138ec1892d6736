"""Objectives of one's own as formulas: `seconds * joules`, and files of them, a line for each.

A formula has the named objectives in base units, numbers, amounts such as `4ms` or `40GiB`,
`+ - * / **`, `min`, `max` and parentheses. It is read, never executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tapestry_egg.errors import ExtractError
from tapestry_egg.quantities import BYTES, ENERGY, MONEY, TIME
from tapestry_egg.yaml_nodes import compose_yaml_text, read_yaml_text

from .objectives import KNOWN, OBJECTIVES_BY_NAME, Objective

_LONGEST, _DEEPEST = 400, 40
_UNITS: Mapping[str, float] = {
    unit: size
    for quantity in (BYTES, TIME, ENERGY, MONEY)
    for unit, size in (*quantity.units, *quantity.read)
    if unit.isalpha()
}
_AMOUNT = re.compile(
    rf"(?<![\w.])(\d+(?:\.\d+)?)\s?({'|'.join(sorted(_UNITS, key=len, reverse=True))})\b"
)
_OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
_FUNCTIONS: Mapping[str, Callable[..., float]] = {"min": min, "max": max}
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
        tree = ast.parse(plain.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ExtractError(f"{text!r:.80} is not a formula", where=where, hint=_HINT) from None
    compute = _compiled(tree, where)

    def of(plan: Any) -> float:
        try:
            return compute(plan)
        except (ZeroDivisionError, OverflowError):
            return float("inf")

    return Objective(name or text.strip(), of, formula=text.strip())


def _compiled(node: ast.expr, where: str, depth: int = 0) -> Callable[[Any], float]:
    if depth > _DEEPEST:
        raise ExtractError("the formula is nested too deep", where=where, hint=_HINT)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        number = float(str(node.value))
        return lambda _: number
    if isinstance(node, ast.Name):
        known = OBJECTIVES_BY_NAME.get(node.id)
        if known is None:
            raise ExtractError(f"{node.id!r:.60} is no objective", where=where, hint=KNOWN)
        return known.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        apply = _OPERATORS[type(node.op)]
        left, right = (_compiled(x, where, depth + 1) for x in (node.left, node.right))
        return lambda plan: _real(apply(left(plan), right(plan)))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.keywords:
        function = _FUNCTIONS.get(node.func.id)
        if function is not None and node.args:
            parts = [_compiled(x, where, depth + 1) for x in node.args]
            return lambda plan: function([part(plan) for part in parts])
    what = f"{ast.unparse(node)!r:.60} cannot stand in a formula"
    raise ExtractError(what, where=where, hint=_HINT)


def _real(number: Any) -> float:
    """A power of something negative may be no real number, and then is no amount."""
    return float(number) if isinstance(number, int | float) else float("nan")


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
