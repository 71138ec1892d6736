"""Laws: what a rule's egglog text says, as operations that it matches and that it builds.

What is read here is the egglog text that runs, not the text that its author wrote: operations of
the body, kernels and constants that it asks for, and the terms that its actions build. Anything
else in a body (an order among values, say) can only keep a rule from firing, so it is ignored: the
law must hold without it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.errors import RuleError
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.scopes import Names
from tapestry_egg.metakernels.signatures.parameters import plain
from tapestry_egg.rewrite.terms.requests import Form, parse, rule_sides
from tapestry_egg.rules.language.book import Rule, commands
from tapestry_egg.rules.language.families import FAMILIES


@dataclass(frozen=True)
class Node:
    """An operation of a pattern or of what is built: a signature's name, and operand names."""

    name: str
    signature: str
    operands: tuple[str, ...]


@dataclass(frozen=True)
class Side:
    """One egglog rule as a law: the pattern's operations, operands first, and what each root of
    the pattern is equal to, with the operations that build it."""

    nodes: tuple[Node, ...]
    built: tuple[Node, ...]
    unions: tuple[tuple[str, str], ...]
    kernels: Mapping[str, tuple[str, ...]]  # signature -> kernels that it may be of
    constants: Mapping[str, float]  # tensor of rank 0 -> its value
    params: Mapping[str, Mapping[str, object]]  # signature -> parameters that the guard fixes


def sides(rule: Rule) -> tuple[Side, ...]:
    """The laws of a rule's egglog text; those that unite nothing are left out.

    Raises RuleError when the operations of a body depend on each other in a circle.
    """
    found = []
    for _, _, text in commands(rule.egg):
        for body, actions in rule_sides(parse(text)):
            side = _side(rule, body, actions)
            if side.unions:
                found.append(side)
    return tuple(found)


class _Flat:
    """Nested operator terms as nodes with names; equal ones share theirs."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.nodes: dict[tuple[str, tuple[str, ...]], str] = {}
        self.names: dict[str, str] = {}

    def name(self, form: Form) -> str:
        if isinstance(form, str):
            return self.names.get(form, form)
        head, *rest = form
        if not _is_operation(form):
            raise ValueError(head)
        key = (str(rest[0]), tuple(self.name(f) for f in rest[1:]))
        return self.nodes.setdefault(key, f"{self.stem}{len(self.nodes)}")


def _is_operation(form: Form) -> bool:
    return isinstance(form, list) and bool(form) and re.fullmatch(r"Op\d", str(form[0])) is not None


def _side(rule: Rule, body: Sequence[Form], actions: Sequence[Form]) -> Side:
    flat = _Flat("body ")
    kernels: dict[str, tuple[str, ...]] = {}
    constants: dict[str, float] = {}
    for atom in body:
        if not isinstance(atom, list):
            continue
        head, *rest = atom
        if head == "=" and any(map(_is_operation, rest)):
            named = [f for f in rest if isinstance(f, str)]
            operations = [f for f in rest if _is_operation(f)]
            for operation in operations:
                flat.name(operation)
                assert isinstance(operation, list)
                key = (str(operation[1]), tuple(flat.name(f) for f in operation[2:]))
                if named and flat.nodes[key].startswith("body "):
                    old, flat.nodes[key] = flat.nodes[key], named[0]
                    flat.names[old] = named[0]
        elif _is_operation(atom):
            flat.name(atom)
        elif head == "kernel" and isinstance(rest[0], str):
            kernels[rest[0]] = (str(rest[1]).strip('"'),)
        elif head == "member" and isinstance(rest[0], str):
            kernels[rest[0]] = FAMILIES[str(rest[1]).strip('"')]
        elif head == "splat" and isinstance(rest[0], str):
            constants[rest[0]] = float(str(rest[1]).strip('"'))
    nodes = [Node(name, s, operands) for (s, operands), name in flat.nodes.items()]
    for node in nodes:
        kernels.setdefault(node.signature, _hinted(rule, node.signature))
    made = _Flat("made ")
    unions = []
    for action in actions:
        if not isinstance(action, list):
            continue
        if action[0] == "let" and isinstance(action[1], str):
            made.names[action[1]] = made.name(action[2])
        elif action[0] == "union":
            unions.append((made.name(action[1]), made.name(action[2])))
    return Side(
        _ordered(rule, nodes),
        tuple(Node(name, s, operands) for (s, operands), name in made.nodes.items()),
        tuple(unions),
        kernels,
        constants,
        {node.signature: _fixed(rule, node.signature) for node in nodes},
    )


def _fixed(rule: Rule, signature: str) -> dict[str, object]:
    """Parameters that a pattern gives a value that depends on nothing."""
    found: dict[str, object] = {}
    begin = re.compile(rf"get\(\${signature}\.params, (\w+)\) == \((.*)\)$", re.DOTALL)
    for guard in rule.recipe.guards if rule.recipe else ():
        if (match := begin.match(guard.text)) and "$" not in match[2]:
            found[match[1]] = plain(Expression(match[2])(Names({})))
    return found


def _hinted(rule: Rule, signature: str) -> tuple[str, ...]:
    """Kernels that a rule's guards speak of for a signature; all that can be drawn if none."""
    found: list[str] = []
    for guard in rule.recipe.guards if rule.recipe else ():
        name = re.escape(f"${signature}.kernel")
        found += re.findall(rf"{name} == ([\w-]+)", guard.text)
        for several in re.findall(rf"{name} in \[([^\]]*)\]", guard.text):
            found += [k.strip() for k in several.split(",")]
    return tuple(found)


def _ordered(rule: Rule, nodes: Sequence[Node]) -> tuple[Node, ...]:
    left = {n.name: n for n in nodes}
    out: list[Node] = []
    while left:
        ready = [n for n in left.values() if not any(o in left for o in n.operands)]
        if not ready:
            raise RuleError(
                f"the operations of rule {rule.name!r} depend on each other", where=rule.where
            )
        for node in ready:
            out.append(left.pop(node.name))
    return tuple(out)
