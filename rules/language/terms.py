"""Terms: the two sides of a rule as text, `t:add(s:matmul(x, w), s:matmul(x, v))`.

x                       any tensor; the same name is the same tensor
0, 1.5, z=0             a scalar constant of this value, in patterns; with a name, replacements
                        may use it
matmul(x, w)            a kernel, or a family of kernels (`families.py`), on operands
s:matmul(x, w)          the same, and its signature is called s
reduce[max](x)          the one kernel of a family that the bracket selects
transpose{permutation=$p}(x)   in a pattern: binds $p, or is compared where it is more than a
                                new name; in a replacement: the parameters of what is built
s(x, y)                 in a replacement: kernel and parameters as those of s
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import isfinite

from tapestry_egg.metakernels.language.expressions import Expression, Origin

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:-[a-z]+)*")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?")
_DEEPEST = 50
_CLOSING = {"(": ")", "[": "]", "{": "}"}


@dataclass(frozen=True)
class Tensor:
    """A variable of a rule that stands for any tensor."""

    name: str
    at: int = 0


@dataclass(frozen=True)
class Constant:
    """A scalar of a known value."""

    value: float
    name: str = ""
    at: int = 0


@dataclass(frozen=True)
class Apply:
    """A kernel on operands; `params` are (name, text, offset of the text)."""

    head: str
    operands: tuple[Term, ...]
    label: str = ""
    select: str = ""
    params: tuple[tuple[str, str, int], ...] = ()
    at: int = 0


Term = Tensor | Constant | Apply


def read_term(text: str, origin: Origin) -> Term:
    """The term that a text stands for. Raises TemplateError with the place of a syntax error."""
    reader = _Reader(text, origin)
    term = reader.term()
    reader.skip()
    if reader.at != len(text):
        raise reader.error(f"unexpected {text[reader.at]!r} after the term")
    return term


def applications(term: Term) -> Iterator[Apply]:
    """Every kernel of a term, operands before those that read them."""
    if isinstance(term, Apply):
        for operand in term.operands:
            yield from applications(operand)
        yield term


def tensors(term: Term) -> Iterator[Tensor]:
    """Every variable of a term, from left to right."""
    if isinstance(term, Tensor):
        yield term
    elif isinstance(term, Apply):
        for operand in term.operands:
            yield from tensors(operand)


class _Reader:
    """A recursive descent over one text."""

    def __init__(self, text: str, origin: Origin) -> None:
        self.text, self.origin, self.at = text, origin, 0
        self.depth = 0

    def error(self, what: str, at: int | None = None, hint: str = "") -> Exception:
        return self.origin.error(self.text, self.at if at is None else at, what, hint)

    def skip(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def take(self, sign: str) -> bool:
        self.skip()
        if self.text.startswith(sign, self.at):
            self.at += len(sign)
            return True
        return False

    def want(self, sign: str) -> None:
        if not self.take(sign):
            found = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
            raise self.error(f"expected {sign!r}, found {found}")

    def name(self) -> str:
        self.skip()
        found = _NAME.match(self.text, self.at)
        if found is None:
            shown = repr(self.text[self.at]) if self.at < len(self.text) else "the end"
            raise self.error(
                f"expected a name, found {shown}",
                hint="A term is a name, a number, or kernel(operands).",
            )
        self.at = found.end()
        return found[0]

    def number(self) -> float | None:
        """The number that follows; None where none does."""
        found = _NUMBER.match(self.text, self.at)
        if found is None:
            return None
        value = float(found[0])
        if not isfinite(value):
            raise self.error(f"{found[0]:.20} is beyond the numbers of a float64")
        self.at = found.end()
        return value

    def term(self) -> Term:
        self.skip()
        begin = self.at
        if (number := self.number()) is not None:
            return Constant(number, "", begin)
        head, label = self.name(), ""
        if self.take("="):
            self.skip()
            number = self.number()
            if number is None:
                raise self.error("expected a number", hint="`name=0` names a constant tensor.")
            return Constant(number, head, begin)
        if self.take(":"):
            label, head = head, self.name()
        select = ""
        if self.take("["):
            select = self.name()
            self.want("]")
        params = self.params()
        if not self.take("("):
            if label or select or params:
                raise self.error("expected '(': the operands of the kernel")
            return Tensor(head, begin)
        operands: list[Term] = []
        self.depth += 1
        if self.depth > _DEEPEST:
            raise self.error(f"a term of more than {_DEEPEST} levels")
        if not self.take(")"):
            operands.append(self.term())
            while self.take(","):
                operands.append(self.term())
            self.want(")")
        self.depth -= 1
        return Apply(head, tuple(operands), label, select, params, begin)

    def params(self) -> tuple[tuple[str, str, int], ...]:
        if not self.take("{"):
            return ()
        out: list[tuple[str, str, int]] = []
        while not self.take("}"):
            if out:
                self.want(",")
            key = self.name()
            self.want("=")
            self.skip()
            begin, end = self.at, self.value_end()
            if not self.text[begin:end].strip():
                raise self.error(f"parameter {key!r} has no value")
            out.append((key, self.text[begin:end].rstrip(), begin))
            self.at = end
        return tuple(out)

    def value_end(self) -> int:
        """Where the value of a parameter ends: at a comma or brace of its own level."""
        open_: list[str] = []
        for k in range(self.at, len(self.text)):
            c = self.text[k]
            if c in _CLOSING:
                open_.append(_CLOSING[c])
            elif open_ and c == open_[-1]:
                open_.pop()
            elif c in ",}" and not open_:
                return k
        raise self.error("'{' is never closed")


def parameter(text: str, origin: Origin, whole: str, at: int) -> Expression:
    """The expression of a parameter that stands at offset `at` of a term's text."""
    before = whole[:at]
    row = before.count("\n")
    column = at - (before.rfind("\n") + 1)
    place = Origin(
        origin.file,
        origin.line + row,
        column + (origin.column if row == 0 else 1),
        origin.folded,
    )
    return Expression(text, place)
