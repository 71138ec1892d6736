"""Rules that verification is tried on, from `corpus.yaml`: false ones, and true ones.

An entry has the fields of a rule in a book, but for what is the same in most: `numerics` is exact
unless it says so, its law is its name, and its reason is `why`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tapestry_egg.rules import Rule, load_book

Entries = Mapping[str, Mapping[str, Any]]

_TABLE: dict[str, dict[str, Entries]] = yaml.load(
    Path(__file__).with_name("corpus.yaml").read_text("utf-8"),
    getattr(yaml, "CSafeLoader", yaml.SafeLoader),
)
ENTRIES = {name: x for part in _TABLE.values() for own in part.values() for name, x in own.items()}


def rules_of(folder: Path, entries: Entries) -> tuple[Rule, ...]:
    """The rules of these entries, read from a book that is written into a folder."""
    book = [
        {"name": name, "law": name, "reason": entry.get("why", name), "numerics": "exact"}
        | {key: value for key, value in entry.items() if key != "why"}
        for name, entry in entries.items()
    ]
    path = folder / "corpus.yaml"
    path.write_text(yaml.safe_dump({"rules": book}, sort_keys=False), "utf-8")
    return load_book(path).rules


def _read(entries: Entries) -> tuple[Rule, ...]:
    with tempfile.TemporaryDirectory() as folder:
        return rules_of(Path(folder), entries)


#: Those that `make test` tries.
SOME_FALSE, SOME_TRUE = (_read(_TABLE["usual"][word]) for word in ("refused", "accepted"))


@cache
def every_false() -> tuple[Rule, ...]:
    return SOME_FALSE + _read(_TABLE["others"]["refused"])


@cache
def every_true() -> tuple[Rule, ...]:
    return SOME_TRUE + _read(_TABLE["others"]["accepted"])


def named(name: str) -> Rule:
    """The rule of this name, in its first direction."""
    return _read({name: ENTRIES[name]})[0]
