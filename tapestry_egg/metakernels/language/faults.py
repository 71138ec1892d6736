"""Faults of texts and files of the template language, and where they stand."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from tapestry_egg.errors import TemplateError
from tapestry_egg.yaml_nodes import YamlNode


class Fault(Exception):
    """A fault at an offset of a text; whoever knows the text's origin makes the error of it."""

    def __init__(self, at: int, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.at, self.what, self.hint = at, what, hint


class Mismatch(Exception):
    """Why a template does not stand for an operation: no fault of the template."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a text stands: the file, the line and the column (both from 1) of its first character.

    Texts that YAML has `folded` report that place for any fault in them.
    """

    file: str = "<text>"
    line: int = 1
    column: int = 1
    folded: bool = False

    @classmethod
    def of(cls, node: YamlNode) -> Origin:
        """Where the text of a YAML node starts."""
        start, end = node.raw.start_mark, node.raw.end_mark
        style = getattr(node.raw, "style", None)
        if style == "|":
            # The indentation of block scalars is not in the node; two spaces is ours.
            return cls(node.file, start.line + 2, 1)
        quoted = int(style in ('"', "'"))
        folded = style == ">" or (start.line != end.line and end.column > 0)
        return cls(node.file, start.line + 1, start.column + 1 + quoted, folded)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"

    def inside(self, text: str, at: int) -> Origin:
        """Where offset `at` of `text` stands."""
        if self.folded:
            return self
        row, column = _row_and_column(text, at)
        column += self.column if row == 0 else 1
        return replace(self, line=self.line + row, column=column)

    def error(self, text: str, at: int, what: str, hint: str = "") -> TemplateError:
        """The error at offset `at` of `text`: its place, and the line with a caret below it."""
        row, column = _row_and_column(text, at)
        shown = text.split("\n")[row] if text else ""
        if len(shown) > _SHOWN:
            cut = max(0, column - _SHOWN // 2)
            shown, column = shown[cut : cut + _SHOWN], column - cut
        return TemplateError(
            what,
            where=str(self.inside(text, at)),
            hint="\n  ".join(x for x in (shown, " " * column + "^", hint) if x),
        )


def _row_and_column(text: str, at: int) -> tuple[int, int]:
    before = text[:at]
    return before.count("\n"), at - (before.rfind("\n") + 1)


_SHOWN = 160  # characters of a long line that an error shows, around the fault

#: The origin of texts that are in no file.
NOWHERE = Origin()


@dataclass(frozen=True, slots=True)
class Text:
    """A text of the language with its origin."""

    text: str
    origin: Origin = NOWHERE

    #: What is missing where a file has something else.
    WHAT: ClassVar[str]

    @classmethod
    def of(cls, node: YamlNode) -> Self:
        """The text in a YAML scalar, not parsed yet."""
        return cls(node.text(cls.WHAT), Origin.of(node))

    def fault(self, fault: Fault) -> TemplateError:
        """The error for a fault in this text, found while it or its value was evaluated."""
        return self.origin.error(self.text, fault.at, fault.what, fault.hint)
