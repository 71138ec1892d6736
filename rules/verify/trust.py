"""Trust: rules are verified before they are used, and once per content.

The rules that ship with tapestry-egg carry receipts (`verified.txt`: what each said when it was
last verified). Any other rule is verified when it is first used; that it passed is kept in the
cache folder, under a hash of the rule and of everything that judges it. `TAPESTRY_EGG_CACHE` names
another folder than the user's own.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from tapestry_egg import metakernels, reference, rules
from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import RuleError, TapestryError
from tapestry_egg.metakernels import registry
from tapestry_egg.parallel.executors import Processes, completed
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule, RuleBook, load_book
from tapestry_egg.rules.language.receipts import content, receipts

# What verifies takes long to load, and rules that have been verified do not need it.
if TYPE_CHECKING:
    from .verdicts import Verdict

#: What judges a rule: rules, templates and the kernels' references.
_FOLDERS = tuple(Path(m.__path__[0]) for m in (rules, metakernels, reference))

# So many rules are tried here sooner than processes have started.
_FEW = 8

# Signatures and programs hold no circles, but a collection walks over all that are kept.
_RARELY = 100_000

#: What verification says of a rule: nothing of one that rewrites nothing, or how it fails.
Finding: TypeAlias = "Verdict | RuleError | None"


def ensure_verified(books: Iterable[RuleBook]) -> None:
    """Verify the rules that have not been yet, several at a time.

    Raises RuleRefused for the first that fails, in the order of the books.
    """
    known = receipts()
    rules = [rule for book in books for rule in book.rules if content(rule) not in known]
    for found in verified_all(rules) if rules else ():
        if isinstance(found, RuleError):
            raise found


def verified(rule: Rule, again: bool = False) -> Verdict | None:
    """The verdict on a rule, from the cache if it is there; None for rules that rewrite nothing.

    Raises RuleRefused when the rule is not true.
    """
    (found,) = verified_all([rule], again)
    if isinstance(found, RuleError):
        raise found
    return found


def verified_all(rules: Sequence[Rule], again: bool = False) -> list[Finding]:
    """`verified` of every rule, in their order, what it raises among them.

    What is not in the cache is tried in processes of this machine; rules for kernels that only this
    process knows are tried here. Both give the same verdicts.
    """
    found: dict[int, Finding] = {}
    if not again:
        for k, rule in enumerate(rules):
            with suppress(OSError, ValueError, TypeError, KeyError):
                kept = json.loads(_path(rule).read_text(encoding="utf-8"))
                found[k] = _verdict(rule, kept, 0.0)
    left = [k for k in range(len(rules)) if k not in found]
    if left:
        from .verdicts import verify_rule
    tried: dict[int, Finding] = {}
    trying = [k for k in left if rules[k].ruleset in PROGRAM_RULESETS]
    # Those that take longest begin first, so that all processes end at about one time.
    trying.sort(key=lambda k: -rules[k].egg.count("(Op"))
    if not registry.added() and len(trying) > _FEW:
        with Processes() as pool:
            tried = _elsewhere(rules, trying, pool)
    for k in left:
        if k not in tried:
            try:
                tried[k] = verify_rule(rules[k])
            except RuleError as refused:
                tried[k] = refused
        _keep(rules[k], tried[k])
    return [(found | tried)[k] for k in range(len(rules))]


def _elsewhere(rules: Sequence[Rule], at: Sequence[int], executor: Executor) -> dict[int, Finding]:
    """What an executor says of the rules of some numbers; it may lack some."""
    from .verdicts import Counterexample, RuleRefused

    found: dict[int, Finding] = {}
    calls = [(rules[k].where, rules[k].name, content(rules[k])) for k in at]
    for j, told in completed(executor, tried_by_name, calls):
        if not isinstance(told, Mapping):
            continue  # a worker lost, or one that does not find the rule
        rule = rules[at[j]]
        if "what" not in told:
            found[at[j]] = _verdict(rule, told, told["seconds"]) if told else None
        elif told["refused"]:
            example = told["counterexample"]
            shown = None if example is None else Counterexample(**example)
            found[at[j]] = RuleRefused(
                told["what"], where=told["where"], hint=told["hint"], counterexample=shown
            )
        else:
            found[at[j]] = RuleError(told["what"], where=told["where"], hint=told["hint"])
    return found


def tried_by_name(where: str, name: str, said: str) -> dict[str, Any] | None:
    """Verify a rule of a file, as plain data: of a worker, which reads the file for itself.

    None where the rule is not there, or says something else than `said`.
    """
    from .verdicts import RuleRefused, verify_rule

    gc.set_threshold(_RARELY)
    with suppress(TapestryError):
        rule = _rules_of(where.rsplit(":", 2)[0]).get(name)
        if rule is None or content(rule) != said:
            return None
        try:
            verdict = verify_rule(rule)
            return {} if verdict is None else asdict(verdict)
        except RuleError as error:
            example = error.counterexample if isinstance(error, RuleRefused) else None
            return {
                "refused": isinstance(error, RuleRefused),
                "what": error.what,
                "where": error.where,
                "hint": error.hint,
                "counterexample": None if example is None else asdict(example),
            }
    return None


@cache
def _rules_of(path: str) -> dict[str, Rule]:
    return {rule.name: rule for rule in load_book(path).rules}


def _verdict(rule: Rule, told: Mapping[str, Any], seconds: float) -> Verdict:
    from .verdicts import Verdict

    numbers, kernels, proven = (
        tuple(map(str, told[key])) for key in ("numbers", "kernels", "proven")
    )
    count, cases = int(told["instances"]), int(told["cases"])
    return Verdict(rule.name, count, numbers, seconds, kernels, cases, proven)


def _keep(rule: Rule, found: Finding) -> None:
    from .verdicts import Verdict

    if isinstance(found, Verdict):
        told = {k: v for k, v in asdict(found).items() if k != "seconds"}
        with suppress(TapestryError):  # a folder that cannot be written costs time only
            write_atomic(_path(rule), json.dumps(told))


def _path(rule: Rule) -> Path:
    return cache_folder() / "rules" / f"{_key(rule)}.json"


def cache_folder() -> Path:
    """Where results are kept between runs."""
    own = os.environ.get("TAPESTRY_EGG_CACHE")
    if own:
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tapestry-egg"


def _key(rule: Rule) -> str:
    """A hash of a rule and of what judges it: templates, references, the verification, and whether
    there is a solver."""
    from .proofs import solver_installed

    said = content(rule) + rule.example + _judges() + str(solver_installed())
    return hashlib.sha256(said.encode()).hexdigest()[:40]


@cache
def _judges() -> str:
    found = hashlib.sha256()
    for folder in _FOLDERS:
        kept = (p for p in folder.rglob("*") if p.suffix == ".py" or "templates" in p.parts)
        for path in sorted(p for p in kept if p.is_file() and p.suffix != ".pyc"):
            found.update(path.name.encode())
            found.update(path.read_bytes())
    return found.hexdigest()
