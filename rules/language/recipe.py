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

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tapestry_egg.errors import RuleError, TemplateError
from tapestry_egg.metakernels.language.expressions import Expression, Origin

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


def read_recipe(path: Path, node: yaml.MappingNode) -> Recipe | None:
    """The recipe in the YAML node of a rule written as egglog text; None when it has none.

    Raises RuleError with file, line and column.
    """
    fields = {k.value: v for k, v in node.value}
    if not any(k in fields for k in ("given", "guard", "let", "wants")):
        return None
    if "given" not in fields:
        raise rule_error(path, node, "a rule with a guard or wants needs `given: [variables]`")
    given = fields["given"]
    names = [n.value for n in given.value] if isinstance(given, yaml.SequenceNode) else []
    if not 1 <= len(names) <= MOST_GIVEN or not all(isinstance(n, str) for n in names):
        raise rule_error(path, given, f"`given` lists 1 to {MOST_GIVEN} variables of the rule")
    wants = {
        name: _want(path, value, names) for name, value in read_mapping(path, fields.get("wants"))
    }
    clash = set(wants) & set(names)
    if clash:
        raise rule_error(path, node, f"{sorted(clash)[0]!r} is both given and wanted")
    return Recipe(
        given=tuple(names),
        guards=read_guard(path, fields.get("guard")),
        let={k: read_expression(path, v) for k, v in read_mapping(path, fields.get("let"))},
        wants=wants,
    )


def read_guard(path: Path, node: yaml.Node | None) -> tuple[Expression, ...]:
    """The expressions of `guard:`, one or a list of them. Raises RuleError with the place."""
    if node is None:
        return ()
    several = node.value if isinstance(node, yaml.SequenceNode) else [node]
    return tuple(read_expression(path, n) for n in several)


def _want(path: Path, node: Any, given: list[str]) -> Want:
    fields = dict(read_mapping(path, node))
    unknown = set(fields) - {"like", "kernel", "inputs", "params"}
    if unknown:
        raise rule_error(path, node, f"unknown key {sorted(unknown)[0]!r}")
    if "inputs" not in fields or ("like" in fields) == ("kernel" in fields):
        raise rule_error(path, node, "a want has `inputs`, and either `kernel` or `like`")
    like = fields["like"].value if "like" in fields else ""
    if like and like not in given:
        raise rule_error(path, fields["like"], f"{like!r} is not one of `given`")
    return Want(
        inputs=read_expression(path, fields["inputs"]),
        kernel=str(fields["kernel"].value) if "kernel" in fields else "",
        like=str(like),
        params={k: read_expression(path, v) for k, v in read_mapping(path, fields.get("params"))},
    )


def read_mapping(path: Path, node: Any) -> list[tuple[str, Any]]:
    """The entries of a YAML mapping, none when it is absent. Raises RuleError with the place."""
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise rule_error(path, node, "expected a mapping")
    return [(str(k.value), v) for k, v in node.value]


def read_expression(path: Path, node: Any) -> Expression:
    """The expression in a YAML scalar, parsed. Raises RuleError with the place of a fault."""
    if not isinstance(node, yaml.ScalarNode):
        raise rule_error(
            path, node, "expected an expression; quote one that starts with `[` or `{`"
        )
    expression = Expression(str(node.value), origin_of(path, node))
    checked(expression)
    return expression


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


def origin_of(path: Path, node: yaml.Node) -> Origin:
    """Where the text of a YAML scalar stands."""
    start, end = node.start_mark, node.end_mark
    quoted = int(getattr(node, "style", None) in ('"', "'"))
    return Origin(str(path), start.line + 1, start.column + 1 + quoted, start.line != end.line)


def rule_error(path: Path, node: yaml.Node, what: str, hint: str = "") -> RuleError:
    """The error about one node of a rule file."""
    mark = node.start_mark
    return RuleError(what, where=f"{path}:{mark.line + 1}:{mark.column + 1}", hint=hint)
