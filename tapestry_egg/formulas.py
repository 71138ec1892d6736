"""Formulas: arithmetic in Python's syntax, checked node by node and never executed.

What a formula computes with is a table of functions by name and sign, so that one text runs on
numbers, on NumPy's arrays and on JAX's.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

#: Operations within operations, so that no formula exhausts the stack.
_DEEPEST = 100
#: Digits of a whole number, so that it is one to NumPy too.
_DIGITS = 18
_LONG = re.compile(rf"(?<![\w.])\d{{{_DIGITS + 1},}}(?![\w.])")
_SIGNS: Mapping[type[ast.AST], str] = {
    **{ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"},
    **{ast.Eq: "==", ast.NotEq: "!=", ast.LtE: "<=", ast.GtE: ">=", ast.Lt: "<", ast.Gt: ">"},
    **{ast.And: "and", ast.Or: "or", ast.Not: "not", ast.USub: "negate"},
}

Arithmetic = Mapping[str, Callable[..., Any]]
#: Computes a formula from the values of its names and what it computes with.
Computation = Callable[[Callable[[str], Any], Arithmetic], Any]


class FormulaFault(Exception):
    """What is wrong with a formula at an offset of its text."""

    def __init__(self, what: str, at: int = 0, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.at, self.hint = what, at, hint


@dataclass(frozen=True, slots=True)
class Syntax:
    """What formulas may hold: functions with their numbers of arguments (None: one or more), signs,
    and names of two parts such as `a.total`."""

    functions: Mapping[str, int | None]
    signs: frozenset[str]
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class Formula:
    """A formula: its text, the names in it, and how to compute it."""

    text: str
    names: frozenset[str]
    _run: Computation

    def __call__(self, value: Callable[[str], Any], arithmetic: Arithmetic) -> Any:
        """The result, where `value` gives the values of the names."""
        return self._run(value, arithmetic)


def read_formula(text: str, syntax: Syntax) -> Formula:
    """The formula in a text, whose lines and ends are no part of it. Raises FormulaFault."""
    plain = text.replace("\n", " ").strip()
    if number := _LONG.search(plain):
        raise FormulaFault(f"a number has at most {_DIGITS} digits", number.start())
    if "#" in plain:
        raise FormulaFault("'#' cannot stand in a formula", plain.index("#"))
    try:
        tree = ast.parse(plain, mode="eval").body
    except SyntaxError as e:
        lead = len(text) - len(text.lstrip())
        raise FormulaFault(
            f"is not a formula: {e.msg}", lead + max(0, (e.offset or 1) - 1)
        ) from None
    except (ValueError, RecursionError, MemoryError):
        raise FormulaFault("the formula is nested too deeply") from None
    reader = _Reader(syntax)
    run = reader.read(tree)
    return Formula(text, frozenset(reader.names), run)


class _Reader:
    """Turns nodes into closures, and notes names."""

    def __init__(self, syntax: Syntax) -> None:
        self.syntax = syntax
        self.names: set[str] = set()

    def read(self, node: ast.expr, depth: int = 0) -> Computation:
        if depth > _DEEPEST:
            raise FormulaFault("the formula is nested too deeply", node.col_offset)

        def signed(sign: ast.AST, *parts: ast.expr) -> Computation:
            name = _SIGNS.get(type(sign), "")
            if name not in self.syntax.signs:
                raise self._misplaced(node)
            return _applied(name, [self.read(part, depth + 1) for part in parts])

        match node:
            case ast.Constant(value=number) if type(number) in (int, float):
                return lambda value, ops: number
            case ast.Name(id=name):
                return self._named(name)
            case ast.Attribute(value=ast.Name(id=first), attr=second) if self.syntax.dotted:
                return self._named(f"{first}.{second}")
            case ast.UnaryOp(op=sign, operand=one):
                return signed(sign, one)
            case ast.BinOp(left=one, op=sign, right=other):
                return signed(sign, one, other)
            case ast.Compare(left=one, ops=[sign], comparators=[other]):
                return signed(sign, one, other)
            case ast.BoolOp(op=sign, values=values):
                whole, *rest = [signed(sign, *values[:2]), *values[2:]]
                for other in rest:
                    whole = _applied(_SIGNS[type(sign)], [whole, self.read(other, depth + 1)])
                return whole
            case ast.Call(func=ast.Name(id=name), args=given, keywords=[]):
                self._check_call(node, name, len(given))
                return _applied(name, [self.read(part, depth + 1) for part in given])
        raise self._misplaced(node)

    def _named(self, name: str) -> Computation:
        self.names.add(name)
        return lambda value, ops: value(name)

    def _check_call(self, node: ast.expr, name: str, given: int) -> None:
        known = self.syntax.functions
        hint = f"Functions are {', '.join(sorted(known))}."
        if name not in known:
            raise FormulaFault(f"there is no function {name!r}", node.col_offset, hint)
        wanted = known[name]
        if given != wanted if wanted is not None else not given:
            count = "some arguments" if wanted is None else f"{wanted} argument"
            count += "s" if wanted and wanted > 1 else ""
            raise FormulaFault(f"{name} takes {count}, not {given}", node.col_offset, hint)

    def _misplaced(self, node: ast.expr) -> FormulaFault:
        what = f"{ast.unparse(node)!r:.60} cannot stand in a formula"
        return FormulaFault(what, node.col_offset)


def _applied(name: str, parts: list[Computation]) -> Computation:
    return lambda value, ops: ops[name](*(part(value, ops) for part in parts))
