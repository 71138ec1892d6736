"""Text that comes from files, as it may be shown: what would steer a terminal is written out."""

from __future__ import annotations

import re
from xml.sax.saxutils import escape

# All control characters but tab and newline; marks that reorder text; halves of characters.
_STEERING = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def brief(value: object) -> str:
    """What a value is, in at most 60 characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of so many digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."


def printable(text: str) -> str:
    r"""The text with control characters written as escapes.

    >>> print(printable("a\x1b[31mb"))
    a\x1b[31mb
    """
    return _STEERING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def xml_text(text: str) -> str:
    """The text as XML character data; characters that XML cannot hold are dropped."""
    return escape(
        "".join(c for c in text if c in "\t\n" or (ord(c) >= 32 and c not in "\ufffe\uffff"))
    )
