"""Receipts: what the rules that ship with tapestry-egg said when they were last verified.

A rule is known by its content: a hash of all that it says to the machine. Its name, and what it
says to people, are no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tapestry_egg.atomic import write_atomic

from .book import Rule

_RECEIPTS = Path(__file__).with_name("verified.txt")


def content(rule: Rule) -> str:
    """A hash of all that a rule says to the machine."""
    recipe = rule.recipe
    said: list[Any] = [rule.egg, rule.numerics, rule.ruleset]
    if recipe is not None:
        said += [recipe.given, [g.text for g in recipe.guards]]
        said += [sorted((k, e.text) for k, e in recipe.let.items())]
        for name, want in sorted(recipe.wants.items()):
            params = sorted((k, e.text) for k, e in want.params.items())
            said.append([name, want.kernel, want.like, want.inputs.text, params])
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:32]


def receipts() -> Mapping[str, str]:
    """What verification last said of the shipped rules, by their contents."""
    return _receipts(_RECEIPTS.stat().st_mtime_ns if _RECEIPTS.exists() else 0)


@cache
def _receipts(_: int) -> Mapping[str, str]:
    try:
        lines = _RECEIPTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    kept = [line.split(None, 1) for line in lines if line and not line.startswith("#")]
    return {parts[0]: parts[-1].partition(": ")[2] for parts in kept}


def write_receipts(rules: Iterable[tuple[Rule, str]]) -> None:
    """Note what was said of these rules, which ship with tapestry-egg."""
    lines = [f"{content(rule)} {rule.name}: {words}".rstrip() for rule, words in rules]
    head = "# Contents of the shipped rules that were verified (`tapestry-egg verify --receipts`)."
    write_atomic(_RECEIPTS, "\n".join([head, *lines]) + "\n")
