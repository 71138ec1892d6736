"""Paths of a program's arguments and results by less than the whole of them.

`[0]['layers'][1]['up']` is a path; `up`, `layers[1]` and `['layers'][1]['up']` are parts of it that
name it, or all that is below it, where no other path has them; `[0]['layers'][*]['up']` is a
pattern of all such paths.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

_ENTRY = re.compile(r"\[([^\]]*)\]|\.?([^.\[\]]+)")


def matching(pattern: str, paths: Iterable[str]) -> list[str]:
    """The paths that a pattern with `*` fits, in their order."""
    literal = re.sub(r"\[(?!\*\])", "[[]", pattern).replace("[*]", "[[]*]")
    return [path for path in paths if "*" in pattern and fnmatchcase(path, literal)]


def named_by_part(part: str, paths: Sequence[str]) -> list[str]:
    """The paths, or what they have in common above them, whose last entries are `part`: several
    where it is no name of one thing. A part begins with a name, not with a number."""
    wanted = [word for word, _ in _entries(part)]
    if not wanted or wanted[0].isdecimal():
        return []
    found: dict[str, None] = {}
    for path in paths:
        entries = _entries(path)
        words = [word for word, _ in entries]
        for k in range(len(words) - len(wanted) + 1):
            if words[k : k + len(wanted)] == wanted:
                found[path[: entries[k + len(wanted) - 1][1]]] = None
    return list(found)


def _entries(path: str) -> list[tuple[str, int]]:
    """The entries of a path as bare words, each with where it ends in the path."""
    path = path.strip().replace('"', "'")
    return [((m[1] or m[2] or "").strip("'"), m.end()) for m in _ENTRY.finditer(path)]
