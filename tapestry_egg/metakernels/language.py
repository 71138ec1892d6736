"""Expressions of the template language: parsed with their positions, evaluated without `eval`.

An expression's text becomes a tree of small closures over a scope (a mapping from `$name`s and
`@group`s to values). Bare words stand for themselves: `map` is the string "map". Lists are tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import TemplateError
from .closures import Compiled, Fault, Node, compile_tree, position
from .scopes import Scope

if TYPE_CHECKING:
    from lark import Lark


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a text stands: the file, the line and the column (both from 1) of its first character.

    Texts that YAML has `folded` report that place for any fault in them.
    """

    file: str = "<text>"
    line: int = 1
    column: int = 1
    folded: bool = False

    def error(self, text: str, at: int, what: str, hint: str = "") -> TemplateError:
        """The error at offset `at` of `text`: its place, and the line with a caret below it."""
        before = text[:at]
        row = before.count("\n")
        column = at - (before.rfind("\n") + 1)
        shown = text.split("\n")[row] if text else ""
        if self.folded:
            where = f"{self.file}:{self.line}:{self.column}"
        else:
            indent = self.column if row == 0 else 1
            where = f"{self.file}:{self.line + row}:{indent + column}"
        return TemplateError(
            what,
            where=where,
            hint="\n  ".join(x for x in (shown, " " * column + "^", hint) if x),
        )


@dataclass(frozen=True, slots=True)
class Expression:
    """A text of the language with its origin; compiled on first use, once per distinct text."""

    text: str
    origin: Origin = Origin()

    def __call__(self, scope: Scope) -> Any:
        """Evaluate in `scope` (keys `$name` and `@group`). Raises TemplateError with the place."""
        try:
            return _expression(self.text)(scope)
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None

    def check(self) -> None:
        """Parse without evaluating. Raises TemplateError with the place of a syntax error."""
        try:
            _expression(self.text)
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None

    def error(self, what: str, hint: str = "") -> TemplateError:
        """An error about this expression as a whole."""
        return self.origin.error(self.text, 0, what, hint)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A shape pattern `[$batch..., $n, 1]`: binds names to extents, at most one to a list."""

    text: str
    origin: Origin = Origin()

    def match(self, shape: Sequence[int], names: dict[str, Any]) -> bool:
        """Bind this pattern's names into `names`. False when the shape does not fit, or when a
        name would have two values; `$_` and `$_...` bind nothing."""
        axes = self.axes()
        rest = next((k for k, (what, _) in enumerate(axes) if what == "rest"), None)
        spare = len(shape) - (len(axes) - (rest is not None))
        if spare < 0 or (rest is None and spare):
            return False
        at = 0
        for what, value in axes:
            got: Any
            if what == "rest":
                got, at = tuple(shape[at : at + spare]), at + spare
            else:
                got, at = shape[at], at + 1
            if what == "exactly":
                if got != value:
                    return False
            elif value != "$_" and names.setdefault(value, got) != got:
                return False
        return True

    def axes(self) -> tuple[tuple[str, Any], ...]:
        """The entries as (`rest` | `dim` | `exactly`, name or number)."""
        try:
            return _pattern(self.text)
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None


@dataclass(frozen=True, slots=True)
class Law:
    """A passage `sum(x, ys...) -> sum if ...` as written."""

    monoid_in: str
    ports: tuple[str, ...]
    monoid_out: str
    condition: Compiled | None


@dataclass(frozen=True, slots=True)
class PassageText:
    """The text of a passage with its origin."""

    text: str
    origin: Origin = Origin()

    def law(self) -> Law:
        """The passage, parsed. Raises TemplateError with the place."""
        try:
            return _passage(self.text)
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None

    def holds(self, scope: Scope) -> bool:
        """Whether the passage's condition, if it has one, is met in `scope`."""
        condition = self.law().condition
        try:
            return condition is None or bool(condition(scope))
        except Fault as fault:
            raise self.origin.error(self.text, fault.at, fault.what, fault.hint) from None


# Parsing


@cache
def _parser() -> Lark:
    from lark import Lark

    return Lark(
        Path(__file__).with_name("template.lark").read_text("utf-8"),
        parser="lalr",
        start=["expression", "pattern", "passage"],
        propagate_positions=True,
        maybe_placeholders=True,
    )


_SPELLING = {
    "VARIABLE": "`$name`",
    "GROUP": "`@group`",
    "NAME": "a word",
    "INT": "a number",
    "FLOAT": "a number",
    "STRING": "a quoted text",
    "ELLIPSIS": "`...`",
    "COMPARE": "a comparison",
    "PLUS": "`+`",
    "MINUS": "`-`",
    "TIMES": "`*`",
    "EXACT": "`/`",
    "FLOOR": "`//`",
    "MOD": "`%`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "DOT": "`.`",
    "$END": "the end",
}


def _expected(names: Iterable[str], parser: Lark) -> str:
    spelled = set()
    for name in names:
        if name in _SPELLING:
            spelled.add(_SPELLING[name])
        elif name != "WS":
            try:
                spelled.add(f"`{parser.get_terminal(name).pattern.value}`")
            except KeyError:
                spelled.add(name.lower())
    return f"Expected {', '.join(sorted(spelled)[:12])}." if spelled else ""


def _parse(text: str, start: str) -> Node:
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    parser = _parser()
    try:
        return parser.parse(text, start=start)
    except UnexpectedCharacters as e:
        expected, at = _expected(e.allowed or (), parser), int(e.pos_in_stream or 0)
        raise Fault(at, f"unexpected {text[at]!r}", expected) from None
    except UnexpectedToken as e:
        expected = _expected(e.accepts or e.expected or (), parser)
        if e.token.type == "$END":
            raise Fault(len(text.rstrip()), "the text ends too early", expected) from None
        at = int(e.token.start_pos or 0)
        raise Fault(at, f"unexpected {str(e.token)!r}", expected) from None


@cache
def _expression(text: str) -> Compiled:
    return compile_tree(_parse(text, "expression"))


@cache
def _pattern(text: str) -> tuple[tuple[str, Any], ...]:
    out: list[tuple[str, Any]] = []
    for axis in _parse(text, "pattern").children:
        if axis is None:
            continue
        what, token = str(axis.data), axis.children[0]
        if what == "exactly":
            out.append((what, int(token)))
            continue
        if what == "rest" and any(w == "rest" for w, _ in out):
            raise Fault(position(token), "a pattern can have only one `...`")
        out.append((what, str(token)))
    return tuple(out)


@cache
def _passage(text: str) -> Law:
    monoid_in, *ports, monoid_out, condition = _parse(text, "passage").children
    names = tuple(str(p.children[0]) + ("..." if p.children[1] else "") for p in ports)
    test = None if condition is None else compile_tree(condition)
    return Law(str(monoid_in), names, str(monoid_out), test)
