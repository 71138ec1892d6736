"""Trust: rules are verified before they are used, and once per content.

The rules that ship with tapestry-egg carry receipts (`verified.txt`: what each said when it was
last verified). Any other rule is verified when it is first used; that it passed is kept in the
cache folder, under a hash of the rule and of everything that judges it. `TAPESTRY_EGG_CACHE` names
another folder than the user's own.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from ..atomic import write_atomic
from ..errors import TapestryError
from .book import PROGRAM_RULESETS, Rule, RuleBook
from .verify import Verdict, verify_rule

_HERE = Path(__file__).parent
_RECEIPTS = _HERE / "verified.txt"


def ensure_verified(books: Iterable[RuleBook]) -> None:
    """Verify the rules that have not been yet. Raises RuleRefused for the first that fails."""
    for book in books:
        for rule in book.rules:
            if rule.ruleset in PROGRAM_RULESETS and content(rule) not in receipts():
                verified(rule)


def verified(rule: Rule, again: bool = False) -> Verdict | None:
    """The verdict on a rule, from the cache if it is there; None for rules that rewrite nothing.

    Raises RuleRefused when the rule is not true.
    """
    path = cache_folder() / "rules" / f"{_key(rule)}.json"
    if not again:
        with suppress(OSError, ValueError, TypeError, KeyError):
            kept = json.loads(path.read_text(encoding="utf-8"))
            return Verdict(
                rule.name,
                int(kept["instances"]),
                tuple(map(str, kept["numbers"])),
                0.0,
                tuple(map(str, kept["kernels"])),
            )
    verdict = verify_rule(rule)
    if verdict is not None:
        told = {
            "rule": rule.name,
            "instances": verdict.instances,
            "numbers": verdict.numbers,
            "kernels": verdict.kernels,
        }
        with suppress(TapestryError):  # a folder that cannot be written costs time only
            write_atomic(path, json.dumps(told))
    return verdict


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


def receipts() -> frozenset[str]:
    """Contents of the shipped rules as they were when last verified."""
    return _receipts(_RECEIPTS.stat().st_mtime_ns if _RECEIPTS.exists() else 0)


@cache
def _receipts(_: int) -> frozenset[str]:
    try:
        lines = _RECEIPTS.read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(line.split()[0] for line in lines if line and not line.startswith("#"))


def write_receipts(rules: Iterable[Rule]) -> None:
    """Note that these rules, which ship with tapestry-egg, have been verified."""
    lines = [f"{content(r)} {r.name}" for r in rules if r.ruleset in PROGRAM_RULESETS]
    head = "# Contents of the shipped rules that were verified (`tapestry-egg verify --receipts`)."
    write_atomic(_RECEIPTS, "\n".join([head, *lines]) + "\n")


def cache_folder() -> Path:
    """Where results are kept between runs."""
    own = os.environ.get("TAPESTRY_EGG_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tapestry-egg"


def _key(rule: Rule) -> str:
    """A hash of a rule and of what judges it: templates, references, and the verification."""
    return hashlib.sha256((content(rule) + rule.example + _judges()).encode()).hexdigest()[:40]


@cache
def _judges() -> str:
    found = hashlib.sha256()
    from .. import metakernels

    for folder in (_HERE, Path(metakernels.__file__).parent):
        kept = (
            p for p in folder.rglob("*") if p.suffix in (".py", ".lark") or "templates" in p.parts
        )
        for path in sorted(p for p in kept if p.is_file() and p.suffix != ".pyc"):
            found.update(path.name.encode())
            found.update(path.read_bytes())
    return found.hexdigest()
