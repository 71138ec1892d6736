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
from functools import cache, cached_property

from tapestry_egg.errors import RuleError, TemplateError
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.scopes import Names
from tapestry_egg.metakernels.registry import allowed, templates
from tapestry_egg.metakernels.signatures.parameters import plain
from tapestry_egg.rewrite.terms.requests import Form, rule_sides
from tapestry_egg.rules.language.book import Rule
from tapestry_egg.rules.language.families import FAMILIES

from .samples import dtypes_of, usual


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
    params: Mapping[str, Mapping[str, object]]  # signature -> parameters that the guard speaks of

    # tensor -> dtype (nothing: any) and rank (below zero: any) that the guard speaks of
    tensors: Mapping[str, tuple[str, int]]

    @cached_property
    def dtypes(self) -> Mapping[str, Sequence[str]]:
        """The dtypes, or kinds of these, that some tensors of the pattern must have: what reads
        them takes no others, and what they are made of has the same."""
        found: dict[str, Sequence[str]] = {}
        for node in reversed(self.nodes):
            if len(self.kernels[node.signature]) != 1:
                continue
            (kernel,) = self.kernels[node.signature]
            kept = found.get(node.name, ())
            if not _keeps_dtype(kernel):
                kept = found[node.name] = ()
            lists = dtypes_of(kernel, len(node.operands))
            for operand, own in zip(node.operands, lists, strict=True):
                found.setdefault(operand, [d for d in kept if allowed(usual(d), own)] or own)
        return found


@cache
def _keeps_dtype(kernel: str) -> bool:
    """Whether results of a kernel have the dtype of its operands."""
    texts = {o.dtype.text for t in templates()[kernel] for o in t.outputs}
    names = {o.name for t in templates()[kernel] for o in t.inputs}
    return all(text.lstrip("$").split(".")[0].split("[")[0] in names for text in texts)


def sides(rule: Rule) -> tuple[Side, ...]:
    """The laws of a rule's egglog text; those that unite nothing are left out.

    Raises RuleError when the operations of a body depend on each other in a circle.
    """
    found = []
    for body, actions in rule_sides(rule):
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
        {node.signature: _spoken(rule, node.signature) for node in nodes},
        _tensors(rule),
    )


def _tensors(rule: Rule) -> dict[str, tuple[str, int]]:
    """Tensors of which a guard asks for a dtype or a rank."""
    guards = rule.recipe.guards if rule.recipe else ()
    text = " and ".join(guard.text for guard in guards)
    dtypes = dict(re.findall(r"\$(\w+)\.dtype == (\w+)", text))
    ranks = dict(re.findall(r"\$(\w+)\.rank == (\d)\b", text))
    names = {*dtypes, *ranks}
    return {f"{n}_": (dtypes.get(n, ""), int(ranks.get(n, -1))) for n in sorted(names)}


def _spoken(rule: Rule, signature: str) -> dict[str, object]:
    """Parameters for which a guard asks for a value that depends on nothing."""
    found: dict[str, object] = {}
    for guard in rule.recipe.guards if rule.recipe else ():
        for match in re.finditer(_EQUAL.replace("NAME", re.escape(signature)), guard.text):
            for end in range(len(guard.text), match.end(), -1):
                text = guard.text[match.end() : end]
                if not _ENDS.match(guard.text, end) or "$" in text:
                    continue
                try:
                    found[match[1] or match[2]] = plain(Expression(text)(Names({})))
                except TemplateError:
                    continue
                break
    return found


# `$s.params.axis == ` and `get($s.params, axis) == `, and what may stand behind the value.
_EQUAL = r"(?:\$NAME\.params\.(\w+)|get\(\$NAME\.params, (\w+)\)) == "
_ENDS = re.compile(r"\s*(\)|\]|and\b|or\b|if\b|else\b|$)")


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
