"""Expressions of the template language: parsed with their positions, evaluated without `eval`.

An expression's text becomes a tree of small closures over a scope (a mapping from `$name`s and
`@group`s to values). Bare words stand for themselves: `map` is the string "map". Lists are tuples.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tapestry_egg.errors import TemplateError
from tapestry_egg.syntax_trees import KeptTrees, parser_of
from tapestry_egg.yaml_nodes import YamlNode

from .closures import Compiled, Node, compile_text
from .faults import NOWHERE, Fault, Origin
from .scopes import Scope

if TYPE_CHECKING:
    from lark import Lark

__all__ = ["Expression", "Law", "Origin", "PassageText", "expressions"]


@dataclass(frozen=True, slots=True)
class Expression:
    """A text of the language with its origin; compiled on first use, once per distinct text."""

    text: str
    origin: Origin = NOWHERE

    @classmethod
    def of(cls, node: YamlNode) -> Expression:
        """The expression in a YAML scalar, not parsed yet."""
        return cls(node.text("an expression"), Origin.of(node))

    def __call__(self, scope: Scope) -> Any:
        """Evaluate in `scope` (keys `$name` and `@group`). Raises TemplateError with the place."""
        try:
            return _expression(self.text)(scope)
        except Fault as fault:
            raise self.fault(fault) from None
        except RecursionError:
            raise self.error("nested too deeply") from None

    def check(self) -> None:
        """Parse without evaluating. Raises TemplateError with the place of a syntax error."""
        try:
            _expression(self.text)
        except Fault as fault:
            raise self.fault(fault) from None

    def texts(self) -> Iterator[Expression]:
        """The expression itself: of the forms that a shape can have, the plain one."""
        yield self

    def fault(self, fault: Fault) -> TemplateError:
        """The error for a fault in this text, found while it or its value was evaluated."""
        return self.origin.error(self.text, fault.at, fault.what, fault.hint)

    def error(self, what: str, hint: str = "") -> TemplateError:
        """An error about this expression as a whole."""
        return self.origin.error(self.text, 0, what, hint)


def expressions(node: YamlNode) -> dict[str, Expression]:
    """The expressions of a YAML mapping by name, not parsed yet."""
    return {name: Expression.of(value) for name, value in node.mapping().items()}


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
    origin: Origin = NOWHERE

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
def _expression(text: str) -> Compiled:
    return compile_text(parse(text, "expression"))


@cache
def _passage(text: str) -> Law:
    monoid_in, *ports, monoid_out, condition = parse(text, "passage").children
    names = tuple(str(p.children[0]) + ("..." if p.children[1] else "") for p in ports)
    test = None if condition is None else compile_text(condition)
    return Law(str(monoid_in), names, str(monoid_out), test)


# Texts of the template language to syntax trees, and what was expected where that fails.


_STARTS = ("expression", "pattern", "passage")
_LONGEST = 5_000  # characters; templates are written by people
_DEEPEST = 60  # brackets within brackets


_SPELLING = {
    "VARIABLE": "`$name`",
    "GROUP": "`@group`",
    "NAME": "a word",
    "INT": "a number",
    "FLOAT": "a number",
    "STRING": "a quoted text",
    "DIAGONAL": "`D[`",
    "ELLIPSIS": "`...`",
    "COMPARE": "a comparison",
    "PLUS": "`+`",
    "MINUS": "`-`",
    "TIMES": "`*`",
    "EXACT": "`/`",
    "FLOOR": "`//`",
    "MOD": "`%`",
    "POWER": "`^`",
    "LSQB": "`[`",
    "RSQB": "`]`",
    "LPAR": "`(`",
    "RPAR": "`)`",
    "COMMA": "`,`",
    "COLON": "`:`",
    "DOT": "`.`",
    "EQUAL": "`=`",
    "VBAR": "`|`",
    "STAR": "`*`",
    "$END": "the end",
}


def parse(text: str, start: Literal["expression", "pattern", "passage"]) -> Node:
    """The syntax tree of a text. Raises Fault with the offset and what was expected there."""
    known = KEPT.tree_of(text, start)
    return parsed(text, start) if known is None else known


def parsed(text: str, start: str) -> Node:
    """The syntax tree of a text, which is parsed now. Raises Fault as `parse` does."""
    from lark.exceptions import UnexpectedCharacters, UnexpectedToken

    if len(text) > _LONGEST:
        raise Fault(0, f"a text of {len(text)} characters, at most {_LONGEST} are read")
    depth = 0
    for at, c in enumerate(text):
        depth += (c in "([") - (c in ")]")
        if depth > _DEEPEST:
            raise Fault(at, f"more than {_DEEPEST} brackets within brackets")
    parser = parser_of(KEPT.grammar, _STARTS)
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
        if text[max(0, at - 1) : at + 1] == ">:":
            expected = "The sign between a map and a shape is `:>`."
        raise Fault(at, f"unexpected {str(e.token)!r}", expected) from None


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


# Trees made ahead of the texts of all templates and rule books that ship with tapestry-egg.
#
# `parsed.json` holds them; `python -m tapestry_egg.rules.language.parse_ahead` writes it anew.


_HERE = Path(__file__).parent

#: The trees of shipped texts of the template language.
KEPT = KeptTrees(_HERE / "template.lark", _HERE / "parsed.json")
