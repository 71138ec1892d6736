"""Notes of a front as lines: what was not searched under a heading, what else is told before it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tapestry_egg.columns import WIDTH, wrapped

# What notes begin with that tell of something else than an omission: what happened to a search or
# to the user's words, and what a bound or a price is.
_HAPPENED = re.compile(
    r"interrupted\b|a worker was lost\b|the time limit of\b|the constraint\b|(what )?the mesh\b"
    r"|no plan leaves the arguments\b"
)
_EXPLAINS = re.compile(
    r"in \d+ of \d+ plans\b|however collectives\b|what if:"
    r"|\d+ operations? without a template\b"
)


def happened(notes: Sequence[str]) -> list[str]:
    """The notes of what happened to a search, or of what it could not heed."""
    return [note for note in notes if _HAPPENED.match(note)]


def parted(notes: Sequence[str]) -> tuple[list[str], list[str]]:
    """The notes that tell of what is here, and those of what was not searched."""
    told = [note for note in notes if _HAPPENED.match(note) or _EXPLAINS.match(note)]
    return told, [note for note in notes if note not in told]


def note_lines(notes: Sequence[str], width: int = WIDTH) -> list[str]:
    """The notes as lines no wider than `width`, and where to read what bounds cover."""
    if not notes:
        return []
    told, omitted = parted(notes)
    lines = [*told, *(["not searched:"] if omitted else []), *(f"  {note}" for note in omitted)]
    return wrapped("\n".join([*lines, "what bounds cover: docs/bounds.md"]), width).split("\n")
