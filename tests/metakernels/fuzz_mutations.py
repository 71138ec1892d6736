"""Random damage to texts and documents, the same for the same seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

#: Characters that mean something in YAML, in JSON or in the template language.
_MARKS = "[](){}$@#&*!|>'\"%,:;.?+-=<>/\\^~` \t\n\r\0\x85é∀\u202e0123456789abcxyzD_"
_TOKENS = [
    *("...", ":>", ":+", "[:", ":]", "D[", "new", "drop", "$.index", "$.shape", "$k", "$each"),
    *("if", "else", "for", "in", "not", "and", "or", "true", "none", "-1", "0", "1", "2", "1.5"),
    *("1e400", "99999999999999999999", "1000000000", "$n", "$x", "@i", "@m", "[]", "[1]", "()"),
    *("^ 9", "^ 99999", "/ 0", "% 0", "// 0", "range(9 ^ 9)", "ones(1000000000)", "- -", "''"),
    *("fail('x')", "$params", "$kernel", ".shape", ".size", ".dtype", "[0]", "[-9]", "[:-1]"),
    *("[0... | 0 | 1]", "digits([4], [2, 2])", "[$i for $i in range(3)]", "kind(1)", "len(1)"),
    *("&a", "*a", "<<: *a", "!!python/object:os.system", "---", "...", "? ", "- ", "{", "}", "|"),
    *("a: b", "~", "null", "inputs:", "kernels:", "ipf:", "reduce:", "transform:", "affineMap:"),
]


def damaged_text(text: str, rng: random.Random) -> str:
    """The text with one to four small changes: characters, tokens and lines."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.choice((0, 1, 1, 2, 5, 20)))
        match rng.randrange(7):
            case 0:
                text = text[:at] + text[to:]
            case 1:
                text = text[:at] + rng.choice(_MARKS) + text[to:]
            case 2:
                text = text[:at] + rng.choice(_TOKENS) + text[to:]
            case 3:
                text = text[:at] + f" {rng.choice(_TOKENS)} " + text[at:]
            case 4:
                piece = rng.randrange(len(text) + 1)
                text = text[:at] + text[piece : piece + rng.randrange(1, 30)] + text[at:]
            case 5:
                lines = text.split("\n")
                i, j = rng.randrange(len(lines)), rng.randrange(len(lines))
                lines[i], lines[j] = lines[j], lines[i]
                text = "\n".join(lines)
            case _:
                lines = text.split("\n")
                i = rng.randrange(len(lines))
                lines[i] = rng.choice(
                    ("", "  " + lines[i], lines[i][2:], lines[i] + "\n" + lines[i])
                )
                text = "\n".join(lines)
    return text


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) inside a document."""
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])


def damaged_document(document: Any, rng: random.Random, junk: Sequence[Any]) -> Any:
    """A copy with one to five changes: entries removed, moved, renamed, replaced."""
    document = json.loads(json.dumps(document))
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        spots = list(places(document))
        if not spots:
            return rng.choice(junk)
        holder, key = rng.choice(spots)
        value = holder[key]
        match rng.randrange(7):
            case 0:
                del holder[key]
            case 1:
                other, other_key = rng.choice(spots)
                holder[key] = copy.deepcopy(other[other_key])
            case 2 if isinstance(holder, dict):
                names = ["$handle", "$class", "$jaxpr", "x", "0", "-1", "", *map(str, holder)]
                holder[rng.choice(names)] = holder.pop(key)
            case 3 if isinstance(value, int | float):
                holder[key] = value + rng.choice((-1, 1, 7, 2**40, 2**70, 0.5))
            case 4 if isinstance(value, str) and value:
                holder[key] = damaged_text(value, rng)
            case 5 if isinstance(value, list):
                holder[key] = value * rng.choice((2, 3)) if rng.random() < 0.5 else value[::-1]
            case _:
                holder[key] = copy.deepcopy(rng.choice(junk))
    return document
