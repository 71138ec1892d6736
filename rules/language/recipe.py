"""What a rule asks of Python, as data: a guard over signatures, and the signatures that it needs.

egglog computes no shapes. A rule that needs them names the signatures it looks at, and says in the
expression language of the metakernel templates when it holds and how what it builds is made:

    given: [s, t]                       variables of the rule that hold signature numbers
    guard: $t.kernel in [add, add_any]  the rule holds only where this does
    let: {n: "$s.inputs[0].shape[0]"}   names, evaluated when they are first used
    wants:                              names that the rule's actions may use as signatures
      plus:
        like: t                         kernel and parameters as those of a given one (or `kernel:`)
        inputs: "[$s.inputs[1], $s.inputs[1]]"   operand types
        params: {axis: 0}               parameters that differ, or all of them

Each given signature, and each wanted one, is a mapping with `kernel`, `params`, `inputs` (tensor
types), `output` (a tensor type) and `flops`. Rules written as terms (language.py) have their
`given` and `wants` made for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tapestry_egg.errors import RuleError, TemplateError
from tapestry_egg.metakernels.language.expressions import Expression, expressions
from tapestry_egg.yaml_nodes import YamlNode

# Where the files of the shipped books are.
_SHIPPED = f"{Path(__file__).parents[1] / 'books'}/"
#: A row of `want` has room for this many signatures.
MOST_GIVEN = 8


@dataclass(frozen=True)
class Want:
    """One signature to be made: kernel and parameters, and the types of its operands."""

    inputs: Expression
    kernel: str = ""
    like: str = ""
    params: Mapping[str, Expression] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """The guards of a rule, all of which must hold, and what it wants, over the signatures
    `given`."""

    given: tuple[str, ...]
    guards: tuple[Expression, ...]
    let: Mapping[str, Expression]
    wants: Mapping[str, Want]


def read_recipe(entry: Mapping[str, YamlNode], rule: YamlNode) -> Recipe | None:
    """The recipe in the fields of a rule written as egglog text; None when it has none.

    Raises RuleError with file, line and column.
    """
    if not any(k in entry for k in ("given", "guard", "let", "wants")):
        return None
    if "given" not in entry:
        raise rule.error("a rule with a guard or wants needs `given: [variables]`")
    names = entry["given"].texts()
    if not 1 <= len(names) <= MOST_GIVEN:
        raise entry["given"].error(f"`given` lists 1 to {MOST_GIVEN} variables of the rule")
    wanted = entry["wants"].mapping() if "wants" in entry else {}
    wants = {name: _want(node, names) for name, node in wanted.items()}
    if clash := set(wants) & set(names):
        raise rule.error(f"{min(clash)!r} is both given and wanted")
    return Recipe(names, read_guard(entry), read_expressions(entry, "let"), wants)


def read_guard(entry: Mapping[str, YamlNode]) -> tuple[Expression, ...]:
    """The expressions of `guard:`, one or a list of them. Raises RuleError with the place."""
    if "guard" not in entry:
        return ()
    guard = entry["guard"]
    several = guard.items() if guard.is_list else [guard]
    return tuple(checked(Expression.of(node)) for node in several)


def read_expressions(entry: Mapping[str, YamlNode], field: str) -> dict[str, Expression]:
    """The expressions of a field by name, parsed; none where there is no such field."""
    found = expressions(entry[field]) if field in entry else {}
    return {name: checked(expression) for name, expression in found.items()}


def _want(node: YamlNode, given: Sequence[str]) -> Want:
    entry = node.fields("a want", ("inputs",), ("like", "kernel", "params"))
    if ("like" in entry) == ("kernel" in entry):
        raise node.error("a want has `inputs`, and either `kernel` or `like`")
    like = entry["like"].text() if "like" in entry else ""
    if like and like not in given:
        raise entry["like"].error(f"{like!r} is not one of `given`")
    return Want(
        inputs=checked(Expression.of(entry["inputs"])),
        kernel=entry["kernel"].text() if "kernel" in entry else "",
        like=like,
        params=read_expressions(entry, "params"),
    )


def checked(expression: Expression) -> Expression:
    """The expression, parsed. Raises RuleError with the place of a fault.

    Those of the books that ship with tapestry-egg are parsed when they are first used: few of them
    are in one program, and tests parse them all.
    """
    if expression.origin.file.startswith(_SHIPPED):
        return expression
    try:
        expression.check()
    except TemplateError as e:
        raise RuleError(e.what, where=e.where, hint=e.hint) from None
    return expression
