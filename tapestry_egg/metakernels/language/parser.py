"""The grammar of the template language: texts to syntax trees, and what was expected in them.

    expression  values, shapes, index sizes:            [$batch..., 2 * $n]
                projections as rows:                    [@b..., 2*@y + @ky - 1 :+ 3]
                projections by position:                [..., 1, 0] :> [..., 1, $inner]
    pattern     shapes that bind names:                 [$batch..., $shape=($h, $w), $n[$i], 1]
    passage     laws of partial values:                 sum(x, y) -> sum if kind($x.dtype) == float

Operators bind as in Python, `^` is power, and `:>` binds loosest. docs/template-language.md
explains every form.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Literal

from .faults import Fault

_LONGEST = 5_000  # characters; templates are written by people
_DEEPEST = 60  # brackets within brackets

_TOKENS = re.compile(
    r"""[ \t\f\r\n]*(?:
    (?P<variable>\$\.?[A-Za-z_][A-Za-z0-9_]*)
    |(?P<group>@[A-Za-z_][A-Za-z0-9_]*)
    |(?P<word>[A-Za-z_][A-Za-z0-9_]*)
    |(?P<text>'[^'\n]*'|"[^"\n]*")
    |(?P<real>\d+\.\d+(?:[eE][+-]?\d+)?|\d+[eE][+-]?\d+)
    |(?P<integer>\d+)
    |(?P<sign>\.\.\.|:>|:\+|->|==|!=|<=|>=|//|[][(){},:.|=<>+*/%^-])
    |(?P<end>$)
    )""",
    re.VERBOSE,
)
_SPELLED = {
    "variable": "`$name`",
    "group": "`@group`",
    "word": "a word",
    "text": "a quoted text",
    "real": "a number",
    "integer": "a number",
    "end": "the end",
}
#: How strongly operators bind. Each has on its right what binds as strongly as the second number
#: says, at least; those in `_ONCE` do not follow one another.
_BOX, _CHOICE, _EXTENT, _OR, _AND, _NOT, _COMPARE, _SUM, _PRODUCT, _UNARY, _POWER = range(1, 12)
_INFIX = {
    ":>": (_BOX, _CHOICE, "box"),
    ":+": (_EXTENT, _SUM, "extent"),
    "or": (_OR, _AND, "either"),
    "and": (_AND, _NOT, "both"),
    **dict.fromkeys(("==", "!=", "<=", ">=", "<", ">"), (_COMPARE, _SUM, "compare")),
    "in": (_COMPARE, _SUM, "member"),
    "not": (_COMPARE, _SUM, "stranger"),
    **dict.fromkeys("+-", (_SUM, _PRODUCT, "binary")),
    **dict.fromkeys(("*", "/", "//", "%"), (_PRODUCT, _UNARY, "binary")),
    "^": (_POWER, _UNARY, "binary"),
}
_ONCE = (_BOX, _EXTENT, _COMPARE, _POWER)
_WORDS = {"true": "yes", "false": "no", "none": "nothing"}


@cache
def _operators(level: int, most: int) -> frozenset[str]:
    """What operators bind so strongly, for messages."""
    found = {"if"} if level <= _CHOICE <= most else set()
    found |= {sign for sign, (own, _, _) in _INFIX.items() if level <= own <= most}
    kinds = {"compare": "a comparison", "binary": "an operator"}
    return frozenset(kinds.get(_INFIX[x][2] if x in _INFIX else "", f"`{x}`") for x in found)


class Token(str):
    """A word of a text, and the offset of its first character."""

    __slots__ = ("kind", "start_pos")
    kind: str
    start_pos: int


class Tree:
    """A node of a syntax tree: what it is, its parts, and the offset of its first character."""

    __slots__ = ("children", "data", "start_pos")

    def __init__(self, data: str, children: list[Node], start_pos: int) -> None:
        self.data, self.children, self.start_pos = data, children, start_pos


#: A part of a tree; None for one that may be missing, and is.
Node = Tree | Token | None
Start = Literal["expression", "pattern", "passage"]


def parse(text: str, start: Start) -> Tree:
    """The syntax tree of a text. Raises Fault with the offset and what was expected there."""
    try:
        return Parser(text).whole(start)
    except RecursionError:
        raise Fault(0, "nested too deeply") from None


class Parser:
    """A descent through one text; `expected` is what could have stood at the token at hand.

    Raises Fault for a text that is too long, or nested too deeply.
    """

    def __init__(self, text: str) -> None:
        if len(text) > _LONGEST:
            raise Fault(0, f"a text of {len(text)} characters, at most {_LONGEST} are read")
        depth = 0
        for at, c in enumerate(text):
            depth += (c in "([") - (c in ")]")
            if depth > _DEEPEST:
                raise Fault(at, f"more than {_DEEPEST} brackets within brackets")
        self.text, self.at = text, 0
        self.expected: set[str] = set()
        self.tokens: list[Token] = []
        self._read()

    def whole(self, start: Start) -> Tree:
        found = getattr(self, start)()
        self.of("end")
        assert isinstance(found, Tree)
        return found

    # Tokens

    def _read(self) -> None:
        at, text = 0, self.text
        while True:
            found = _TOKENS.match(text, at)
            if found is None:
                lead = len(text) - len(text[at:].lstrip(" \t\f\r\n"))
                token, kind, at = Token(text[lead]), "unknown", len(text)
                token.start_pos = lead
            else:
                kind = str(found.lastgroup)
                token, at = Token(found[kind]), found.end()
                token.start_pos = found.start(kind)
            token.kind = kind
            self.tokens.append(token)
            if kind in ("end", "unknown"):
                return

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def next(self) -> Token:
        """The token at hand, and go on to the next."""
        token = self.tokens[self.at]
        self.at += 1
        self.expected.clear()
        return token

    def take(self, sign: str) -> Token | None:
        """The sign or keyword at hand, if it is that one."""
        token = self.tokens[self.at]
        if token == sign and token.kind in ("sign", "word"):
            return self.next()
        self.expected.add(f"`{sign}`")
        return None

    def want(self, sign: str) -> Token:
        """The sign or keyword at hand, which must be that one."""
        token = self.take(sign)
        if token is None:
            raise self.unexpected()
        return token

    def of(self, *kinds: str) -> Token:
        """The token at hand, which must be of one of these kinds."""
        if self.token.kind not in kinds:
            self.expected |= {_SPELLED[kind] for kind in kinds}
            raise self.unexpected()
        return self.next()

    def unexpected(self) -> Fault:
        """The fault of the token at hand."""
        spelled, token = sorted(self.expected)[:12], self.token
        expected = f"Expected {', '.join(spelled)}." if spelled else ""
        if token.kind == "end":
            return Fault(len(self.text.rstrip()), "the text ends too early", expected)
        at = token.start_pos
        if self.text[max(0, at - 1) : at + 1] == ">:":
            expected = "The sign between a map and a shape is `:>`."
        return Fault(at, f"unexpected {str(token)!r}", expected)

    def separated(self, read: Callable[[], Node]) -> list[Node]:
        """One or more parts between commas."""
        found = [read()]
        while self.take(","):
            found.append(read())
        return found

    # Expressions

    def expression(self, level: int = _BOX) -> Node:
        """A text whose operators bind as strongly as `level`, at least."""
        start, most = self.token.start_pos, _POWER
        left: Node
        if level <= _NOT and self.take("not"):
            left, most = Tree("inverse", [self.expression(_NOT)], start), _NOT
        elif level <= _UNARY and (sign := self.take("-")):
            left, most = Tree("negate", [sign, self.expression(_UNARY)], start), _UNARY
        else:
            left = self.postfix()
        while True:
            token = self.tokens[self.at]
            if token == "if" and level <= _CHOICE <= most:
                self.next()
                condition = self.expression(_OR)
                self.want("else")
                left = Tree("choice", [left, condition, self.expression(_CHOICE)], start)
                most = _BOX
                continue
            found = _INFIX.get(token) if token.kind in ("sign", "word") else None
            if found is None or not level <= found[0] <= most:
                self.expected |= _operators(level, most)
                return left
            own, right, data = found
            self.next()
            if token == "not":
                self.want("in")
            parts = [left, token] if data in ("compare", "binary") else [left]
            left = Tree(data, [*parts, self.expression(right)], start)
            most = own - 1 if own in _ONCE else own

    def postfix(self) -> Node:
        start = self.token.start_pos
        found = self.atom()
        while True:
            if self.take("."):
                found = Tree("attribute", [found, self.of("word")], start)
            elif self.take("["):
                low = None if self.token == ":" else self.end_of_slice("lower")
                if low is not None and self.take("]"):
                    found = Tree("index", [found, *low.children], start)
                else:
                    self.want(":")
                    found = Tree("slice", [found, low, self.upper()], start)
            else:
                return found

    def end_of_slice(self, name: str) -> Tree:
        start = self.token.start_pos
        return Tree(name, [self.expression()], start)

    def upper(self) -> Tree | None:
        """What stands behind the colon of a slice, and its end."""
        high = None if self.token == "]" else self.end_of_slice("upper")
        self.want("]")
        return high

    def atom(self) -> Node:
        token = self.token
        start = token.start_pos
        if token.kind in ("variable", "group", "text", "real", "integer"):
            return Tree(token.kind, [self.next()], start)
        if token.kind == "word":
            if token in _WORDS:
                self.next()
                return Tree(_WORDS[token], [], start)
            self.next()
            if token == "D" and self.take("["):
                items = [None] if self.token == "]" else self.separated(self.item)
                self.want("]")
                return Tree("diagonal", [token, *items], start)
            if self.take("("):
                given = [None] if self.token == ")" else self.separated(self.expression)
                self.want(")")
                return Tree("call", [token, *given], start)
            return Tree("word", [token], start)
        if self.take("("):
            inner = self.expression()
            self.want(")")
            return inner
        if self.take("["):
            return self.list(start)
        self.expected |= {s for kind, s in _SPELLED.items() if kind != "end"}
        raise self.unexpected()

    def list(self, start: int) -> Tree:
        """What follows an opening bracket: a list, an augmented row or a comprehension."""
        if self.take("]"):
            return Tree("list", [], start)
        first = self.token.start_pos
        items = [self.item()]
        plain = not (isinstance(items[0], Tree) and items[0].data in _FILLS)
        if plain and self.take("for"):
            begin = self.token.start_pos
            targets = Tree("targets", self.separated(lambda: self.of("variable")), begin)
            self.want("in")
            source = self.expression(_OR)
            condition = self.expression(_OR) if self.take("if") else None
            self.want("]")
            return Tree("comprehension", [items[0], targets, source, condition], start)
        while self.take(","):
            items.append(self.item())
        if self.take("|"):
            offset = self.expression()
            self.want("|")
            extent = self.expression()
            self.want("]")
            return Tree("augmented", [Tree("entries", items, first), offset, extent], start)
        self.want("]")
        return Tree("list", items, start)

    def item(self) -> Node:
        start = self.token.start_pos
        value = [] if self.token == "..." else [self.expression()]
        dots = self.take("...")
        if dots is None:
            return value[0]
        if not self.take("["):
            return Tree("spread" if value else "standard", [*value, dots], start)
        low = None if self.token == ":" else self.end_of_slice("lower")
        self.want(":")
        parts = [*value, dots, low, self.upper(), self.take("...")]
        return Tree("filling" if value else "standard", parts, start)

    # Patterns and passages

    def pattern(self) -> Tree:
        start = self.token.start_pos
        self.want("[")
        axes = None if self.token == "]" else self.axes()
        self.want("]")
        return Tree("pattern", [axes], start)

    def axes(self) -> Tree:
        start = self.token.start_pos
        return Tree("axes", self.separated(self.axis), start)

    def axis(self) -> Tree:
        start = self.token.start_pos
        if self.token.kind == "integer":
            return Tree("exactly", [self.next()], start)
        if self.take("*"):
            return Tree("rest", [self.of("variable", "word")], start)
        if self.take("+"):
            return Tree("some", [self.of("variable", "word"), self.take("...")], start)
        self.expected |= {"a number"} if self.token.kind not in ("variable", "word") else set()
        name = self.of("variable", "word")
        if dots := self.take("..."):
            if not self.take("["):
                return Tree("rest", [name, dots], start)
            self.want(":")
            count = self.expression()
            self.want("]")
            return Tree("counted", [name, dots, count], start)
        index: list[Node] = []
        if self.take("["):
            index = [self.of("variable")]
            self.want("]")
        if not self.take("="):
            return Tree("indexed" if index else "dim", [name, *index], start)
        close = "]" if self.take("[") else ")"
        if close == ")":
            self.want("(")
        members = self.axes()
        self.want(close)
        return Tree("group_each" if index else "group_of", [name, *index, members], start)

    def passage(self) -> Tree:
        start = self.token.start_pos
        monoid = self.of("word")
        self.want("(")
        ports = self.separated(self.port)
        self.want(")")
        self.want("->")
        parts: list[Node] = [monoid, *ports, self.of("word")]
        return Tree("passage", [*parts, self.expression(_OR) if self.take("if") else None], start)

    def port(self) -> Tree:
        start = self.token.start_pos
        return Tree("port", [self.of("word"), self.take("...")], start)


_FILLS = ("spread", "filling", "standard")
