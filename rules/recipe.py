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
types), `output` (a tensor type) and `flops`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ..errors import RuleError, TemplateError
from ..metakernels.language import Expression, Origin

#: A row of `want` has room for this many signatures.
MOST_GIVEN = 4


@dataclass(frozen=True)
class Want:
    """One signature to be made: kernel and parameters, and the types of its operands."""

    inputs: Expression
    kernel: str = ""
    like: str = ""
    params: Mapping[str, Expression] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    """The guard of a rule and what it wants, over the signatures `given`."""

    given: tuple[str, ...]
    guard: Expression | None
    let: Mapping[str, Expression]
    wants: Mapping[str, Want]


def read_recipe(path: Path, node: yaml.MappingNode) -> Recipe | None:
    """The recipe in a rule's YAML node; None when the rule has none.

    Raises RuleError with file, line and column.
    """
    fields = {k.value: v for k, v in node.value}
    if not any(k in fields for k in ("given", "guard", "let", "wants")):
        return None
    if "given" not in fields:
        raise _error(path, node, "a rule with a guard or wants needs `given: [variables]`")
    given = fields["given"]
    names = [n.value for n in given.value] if isinstance(given, yaml.SequenceNode) else []
    if not 1 <= len(names) <= MOST_GIVEN or not all(isinstance(n, str) for n in names):
        raise _error(path, given, f"`given` lists 1 to {MOST_GIVEN} variables of the rule")
    wants = {name: _want(path, value, names) for name, value in _mapping(path, fields.get("wants"))}
    clash = set(wants) & set(names)
    if clash:
        raise _error(path, node, f"{sorted(clash)[0]!r} is both given and wanted")
    guard = fields.get("guard")
    return Recipe(
        given=tuple(names),
        guard=None if guard is None else _expression(path, guard),
        let={k: _expression(path, v) for k, v in _mapping(path, fields.get("let"))},
        wants=wants,
    )


def _want(path: Path, node: Any, given: list[str]) -> Want:
    fields = dict(_mapping(path, node))
    unknown = set(fields) - {"like", "kernel", "inputs", "params"}
    if unknown:
        raise _error(path, node, f"unknown key {sorted(unknown)[0]!r}")
    if "inputs" not in fields or ("like" in fields) == ("kernel" in fields):
        raise _error(path, node, "a want has `inputs`, and either `kernel` or `like`")
    like = fields["like"].value if "like" in fields else ""
    if like and like not in given:
        raise _error(path, fields["like"], f"{like!r} is not one of `given`")
    return Want(
        inputs=_expression(path, fields["inputs"]),
        kernel=str(fields["kernel"].value) if "kernel" in fields else "",
        like=str(like),
        params={k: _expression(path, v) for k, v in _mapping(path, fields.get("params"))},
    )


def _mapping(path: Path, node: Any) -> list[tuple[str, Any]]:
    if node is None:
        return []
    if not isinstance(node, yaml.MappingNode):
        raise _error(path, node, "expected a mapping")
    return [(str(k.value), v) for k, v in node.value]


def _expression(path: Path, node: Any) -> Expression:
    if not isinstance(node, yaml.ScalarNode):
        raise _error(path, node, "expected an expression; quote one that starts with `[` or `{`")
    start, end = node.start_mark, node.end_mark
    quoted = int(node.style in ('"', "'"))
    origin = Origin(str(path), start.line + 1, start.column + 1 + quoted, start.line != end.line)
    expression = Expression(str(node.value), origin)
    try:
        expression.check()
    except TemplateError as e:
        raise RuleError(e.what, where=e.where, hint=e.hint) from None
    return expression


def _error(path: Path, node: Any, what: str) -> RuleError:
    mark = node.start_mark
    return RuleError(what, where=f"{path}:{mark.line + 1}:{mark.column + 1}")
