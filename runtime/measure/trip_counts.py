"""How often loops of a compiled module run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import ceil

from .hlo_text import Computation, Instruction, Module

#: Scope of a loop that a plan counts as one round, however often it runs. XLA may find that out.
ONE_ROUND = "rounds_not_planned"


@dataclass(frozen=True)
class Scope:
    """A computation as called: its parameters are `arguments`, values of the callers' scopes.

    In the body of a loop only those elements of the parameter that every trip passes on unchanged
    have the value that the caller gave.
    """

    module: Module
    computation: Computation
    arguments: tuple[tuple[Scope, str], ...] = ()
    loop: bool = False

    def call(self, name: str, operands: tuple[str, ...], *, loop: bool = False) -> Scope:
        return Scope(
            self.module,
            self.module.computations[name],
            tuple((self, o) for o in operands),
            loop,
        )


def is_one_round(loop: Instruction) -> bool:
    """Whether the plan counts a loop as one round."""
    return f"/{loop.op_name}".endswith(f"/{ONE_ROUND}/while")


def trips(scope: Scope, loop: Instruction) -> int | None:
    """How often a while loop runs: XLA's annotation, or its induction worked out; None where
    that does not tell, and where a plan counts one round."""
    if is_one_round(loop):
        return None
    known = re.search(r'known_trip_count"?\s*[:=]\s*\{"?n"?\s*[:=]\s*"?(\d+)', loop.rest)
    if known:
        return int(known.group(1))
    condition = loop.attributes["condition"].lstrip("%")
    body = scope.call(loop.attributes["body"].lstrip("%"), loop.operands)
    first = _comparison(scope.call(condition, loop.operands))
    second = _comparison(body.call(condition, (body.computation.root.name,)))
    if first is None or second is None or first[2] != second[2]:
        return None
    direction, start, bound = first
    step = second[1] - start
    if direction in ("GT", "GE"):
        start, bound, step = -start, -bound, -step
    if direction in ("LE", "GE"):
        bound += 1
    if direction == "NE" and step and (bound - start) % step == 0:
        return max(0, (bound - start) // step)
    if direction in ("LT", "LE", "GT", "GE") and step > 0:
        return max(0, ceil((bound - start) / step))
    return None


def _comparison(scope: Scope) -> tuple[str, int, int] | None:
    """The comparison that a condition is, at its scope's values: direction and both sides."""
    root: Instruction = scope.computation.root
    for _ in range(8):
        if root.opcode == "compare":
            sides = [_evaluate(scope, o) for o in root.operands]
            if sides[0] is None or sides[1] is None:
                return None
            return root.attributes.get("direction", ""), sides[0], sides[1]
        if root.opcode in ("fusion", "call"):
            scope = scope.call(root.called[0], root.operands)
            root = scope.computation.root
        elif root.opcode in _PASSES:
            root = scope.computation.by_name[root.operands[0]]
        else:
            return None
    return None


_PASSES = ("copy", "bitcast", "convert", "reshape", "optimization-barrier", "copy-done")


def _evaluate(scope: Scope, name: str, depth: int = 0) -> int | None:
    """Value of an integer scalar that is constant on entry, or None."""
    i = scope.computation.by_name.get(name)
    if i is None or depth > 64:
        return None
    if i.opcode == "constant":
        return int(i.argument) if re.fullmatch(r"-?\d+", i.argument) else None
    if i.opcode in _PASSES:
        return _evaluate(scope, i.operands[0], depth + 1)
    if i.opcode == "parameter":
        place = int(i.argument)
        if scope.loop or place >= len(scope.arguments):
            return None
        return _evaluate(*scope.arguments[place], depth + 1)
    if i.opcode == "get-tuple-element":
        return _element(scope, i.operands[0], int(i.attributes["index"]), depth + 1)
    if i.opcode in ("add", "subtract"):
        a, b = (_evaluate(scope, o, depth + 1) for o in i.operands)
        if a is None or b is None:
            return None
        return a + b if i.opcode == "add" else a - b
    if i.opcode in ("fusion", "call"):
        inner = scope.call(i.called[0], i.operands)
        return _evaluate(inner, inner.computation.root.name, depth + 1)
    return None


def _element(scope: Scope, name: str, index: int, depth: int) -> int | None:
    i = scope.computation.by_name.get(name)
    if i is None or depth > 64:
        return None
    if i.opcode == "tuple":
        return _evaluate(scope, i.operands[index], depth + 1)
    if i.opcode in _PASSES:
        return _element(scope, i.operands[0], index, depth + 1)
    if i.opcode == "parameter":
        place = int(i.argument)
        if place >= len(scope.arguments) or (scope.loop and not _invariant(scope, i.name, index)):
            return None
        return _element(*scope.arguments[place], index, depth + 1)
    return None


def _invariant(scope: Scope, parameter: str, index: int) -> bool:
    """Whether every trip of a loop body hands element `index` on as it came."""
    root = scope.computation.root
    if root.opcode != "tuple" or index >= len(root.operands):
        return False
    i = scope.computation.by_name.get(root.operands[index])
    return (
        i is not None
        and i.opcode == "get-tuple-element"
        and i.operands[0] == parameter
        and int(i.attributes["index"]) == index
    )
