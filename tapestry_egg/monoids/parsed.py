"""Trees made ahead of the formulas that ship with tapestry-egg.

`parsed.json` holds them; `python -m tapestry_egg.monoids.parsed` writes it anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .definition import Monoid, read_monoids
from .formula import KEPT, Formula, parsed


def shipped_texts() -> dict[str, list[str]]:
    """The texts of all formulas of `monoids.yaml`, by how they start."""
    shipped = read_monoids(Path(__file__).with_name("monoids.yaml"))
    return {"start": sorted({f.text for monoid in shipped for f in _formulas(monoid)})}


def _formulas(monoid: Monoid) -> list[Formula]:
    found: list[Any] = [getattr(monoid, f.name) for f in fields(monoid)]
    if monoid.mesh is not None:
        found += [monoid.mesh.formulas, monoid.mesh.terms]
    tables = [table for table in found if isinstance(table, Mapping)]
    return [formula for table in tables for formula in table.values()]


def document() -> str:
    """What `parsed.json` should hold."""
    return KEPT.document(shipped_texts(), lambda text, _: parsed(text))


if __name__ == "__main__":
    KEPT.file.write_text(document(), "utf-8")
