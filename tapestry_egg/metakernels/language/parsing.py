"""Texts of the template language to syntax trees, and what was expected where that fails."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tapestry_egg.syntax_trees import KeptTrees, parser_of

from .closures import Node
from .faults import Fault

if TYPE_CHECKING:
    from lark import Lark

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
