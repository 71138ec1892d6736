"""Rules that verification is tried on, from `corpus.yaml`: false ones, and true ones.

An entry has the fields of a rule in a book, but for what is the same in most: `numerics` is exact
unless it says so, its law is its name, and its reason is `why`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tapestry_egg.rules import Rule, load_book

_TABLE = yaml.safe_load(Path(__file__).with_name("corpus.yaml").read_text("utf-8"))


def rules_of(folder: Path, entries: Mapping[str, Mapping[str, Any]]) -> tuple[Rule, ...]:
    """The rules of these entries, read from a book that is written into a folder."""
    book = [
        {"name": name, "law": name, "reason": entry.get("why", name), "numerics": "exact"}
        | {key: value for key, value in entry.items() if key != "why"}
        for name, entry in entries.items()
    ]
    path = folder / "corpus.yaml"
    path.write_text(yaml.safe_dump({"rules": book}, sort_keys=False), "utf-8")
    return load_book(path).rules


with tempfile.TemporaryDirectory() as _folder:
    FALSE = rules_of(Path(_folder), _TABLE["refused"])
    TRUE = rules_of(Path(_folder), _TABLE["accepted"])

RULES = {rule.name: rule for rule in (*FALSE, *TRUE)}
