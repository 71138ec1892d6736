"""Facts: what a rule may do besides uniting what is equal.

Verification tries what a rule unites. A rule that asserts facts (a tensor is the constant 0, a
layout becomes another for nothing) changes what other rules believe, which nothing here can try; so
it is refused. Facts that can only keep rules from firing are allowed, and facts of relations that a
book declares for itself: the laws of rules that ask for them are tried without.
"""

from __future__ import annotations

import re
from functools import cache

from tapestry_egg.errors import RuleError
from tapestry_egg.rewrite.terms.requests import OPERATORS, Form, rule_sides
from tapestry_egg.rules.language.book import PROGRAM_RULESETS, Rule, schema
from tapestry_egg.rules.language.receipts import content, receipts

#: An order among values: bodies that ask for it fire less often, and that is all.
_HARMLESS = ("order", "following")


def refuse_facts(rule: Rule, refusal: type[RuleError]) -> None:
    """Raise `refusal` for a rule whose effect verification cannot see."""
    if rule.ruleset not in PROGRAM_RULESETS:
        if content(rule) not in receipts():
            raise refusal(
                f"rule {rule.name!r} is refused: it asserts facts about layouts ({rule.ruleset}), "
                "which no program can be tried on",
                where=rule.where,
                hint=f"Rules of one's own rewrite programs: {', '.join(PROGRAM_RULESETS)}.",
            )
        return
    for body, actions in rule_sides(rule):
        bound = _names(body)
        for action in actions:
            told = _asserted(action, bound)
            if told:
                raise refusal(
                    f"rule {rule.name!r} is refused: {told}, which no program can be tried on",
                    where=rule.where,
                    hint="A rule's actions are `union`s of what is equal, and `let`s.",
                )


def _asserted(action: Form, bound: set[str]) -> str:
    """What an action asserts that no evaluation can see; nothing for one that is in order.

    Names that it defines are added to those that are `bound`.
    """
    if not isinstance(action, list) or not action:
        return f"it does {action!r:.40}"
    head, *rest = action
    if head == "union" and len(rest) == 2:
        wrong = [f for f in rest if not _term(f, bound)]
        return f"it unites with {_shown(wrong[0])}" if wrong else ""
    if head == "let" and len(rest) == 2 and isinstance(rest[0], str):
        bound.add(rest[0])
        return "" if _term(rest[1], bound) else f"it makes {_shown(rest[1])}"
    if head == "set" and len(rest) == 2 and isinstance(rest[0], list):
        head = rest[0][0]
    if isinstance(head, str) and head in OPERATORS:
        return "" if _term(action, bound) else f"it makes {_shown(action)}"
    if isinstance(head, str) and (head in _HARMLESS or head not in _declared() | _COMMANDS):
        return ""
    return f"it asserts {_shown(action)}"


_COMMANDS = {"delete", "subsume", "panic", "extract", "let", "union", "set"}


@cache
def _declared() -> frozenset[str]:
    """Every relation, function and constructor of the schema."""
    named = re.findall(r"\((?:relation|function|constructor)\s+([^\s()]+)", schema())
    made = re.findall(r"^\s+\((\w+)", schema(), re.MULTILINE)
    return frozenset([*named, *made, *re.findall(r"\((Op\d|Leaf)\b", schema())])


def _term(form: Form, bound: set[str]) -> bool:
    """Whether a form is a tensor that the body binds, or operations on such."""
    if isinstance(form, str):
        return form in bound
    if not form or form[0] not in OPERATORS or len(form) < 2 or not isinstance(form[1], str):
        return False
    return all(_term(f, bound) for f in form[2:])


def _names(form: Form) -> set[str]:
    if isinstance(form, str):
        return {form}
    return {name for part in form for name in _names(part)}


def _shown(form: Form) -> str:
    text = form if isinstance(form, str) else f"({' '.join(map(_shown, form))})"
    return text if len(text) <= 60 else text[:57] + "..."
