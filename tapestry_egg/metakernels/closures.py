"""Syntax trees of the template language as Python closures over a scope.

Every function here turns one kind of tree node into a closure; nothing is evaluated as Python.
Faults of Python's operators (a list where a number should be, an index out of range) become faults
at the node's position.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from ..blockgraph import TensorType
from .scopes import Inner, Scope, known
from .values import FUNCTIONS, Row

Compiled = Callable[[Scope], Any]
Node = Any  # a lark tree or token; their stubs tell children apart only at run time


class Fault(Exception):
    """A fault at an offset of a text; whoever knows the text's origin makes the error of it."""

    def __init__(self, at: int, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.at, self.what, self.hint = at, what, hint


_CAUGHT = (TypeError, ValueError, IndexError, KeyError, AttributeError, ZeroDivisionError)


def position(node: Any) -> int:
    """Offset of the first character of a token or tree."""
    at = getattr(node, "start_pos", None)
    if at is None:
        at = getattr(getattr(node, "meta", None), "start_pos", None)
    return int(at or 0)


def _fault(at: int, problem: Exception) -> NoReturn:
    text = str(problem)
    if isinstance(problem, KeyError):
        text = f"there is no entry {text}"
    raise Fault(at, text or type(problem).__name__) from None


def compile_tree(tree: Node) -> Compiled:
    """The closure that evaluates a syntax tree in a scope. Raises Fault for an unknown function."""
    return _NODES[str(tree.data)](tree)


def _constant(value: Any) -> Compiled:
    return lambda scope: value


def _literal(convert: Callable[[str], Any]) -> Callable[[Node], Compiled]:
    return lambda tree: _constant(convert(str(tree.children[0])))


def _name(tree: Node) -> Compiled:
    name, at = str(tree.children[0]), position(tree)

    def look_up(scope: Scope) -> Any:
        try:
            return scope[name]
        except KeyError:
            near = difflib.get_close_matches(name, known(scope), 1)
            what = "an index group" if name[0] == "@" else "a name"
            hint = f"Did you mean {near[0]}?" if near else ""
            raise Fault(at, f"{name} is not {what} here", hint) from None
        except ValueError as problem:
            _fault(at, problem)

    return look_up


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        quotient, remainder = divmod(a, b)
        if remainder:
            raise ValueError(f"{a} / {b} is not exact; `//` rounds down")
        return quotient
    return a / b


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    # Tuples and strings also know + and *, with meanings that shapes should not get by accident.
    def checked(a: Any, b: Any) -> Any:
        for v in (a, b):
            if isinstance(v, tuple | str) or v is None:
                raise TypeError(f"{v!r} is not a number")
        return function(a, b)

    return checked


_BINARY = {
    "+": _arithmetic(operator.add),
    "-": _arithmetic(operator.sub),
    "*": _arithmetic(operator.mul),
    "/": _arithmetic(_divide),
    "//": _arithmetic(operator.floordiv),
    "%": _arithmetic(operator.mod),
}
_COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


def _infix(table: Mapping[str, Callable[[Any, Any], Any]]) -> Callable[[Node], Compiled]:
    def compile_infix(tree: Node) -> Compiled:
        left, sign, right = tree.children
        a, b = compile_tree(left), compile_tree(right)
        at, function = position(sign), table[str(sign)]

        def apply(scope: Scope) -> Any:
            x, y = a(scope), b(scope)
            try:
                return function(x, y)
            except _CAUGHT as problem:
                _fault(at, problem)

        return apply

    return compile_infix


def _negate(tree: Node) -> Compiled:
    value, at = compile_tree(tree.children[1]), position(tree)

    def apply(scope: Scope) -> Any:
        try:
            return -value(scope)
        except _CAUGHT as problem:
            _fault(at, problem)

    return apply


def _extent(tree: Node) -> Compiled:
    start, size = map(compile_tree, tree.children)
    at = position(tree.children[1])

    def apply(scope: Scope) -> Any:
        row, extent = start(scope), size(scope)
        if not isinstance(extent, int) or extent < 0:
            raise Fault(at, f"{extent!r} is not an extent")
        if isinstance(row, int):
            row = Row((), row)  # a constant start; whoever builds the projection widens it
        if not isinstance(row, Row):
            raise Fault(at, f"{row!r} is not the start of a tensor dim")
        return Row(row.coefficients, row.offset, extent)

    return apply


def _choice(tree: Node) -> Compiled:
    yes, condition, no = map(compile_tree, tree.children)
    return lambda scope: yes(scope) if condition(scope) else no(scope)


def _both(tree: Node) -> Compiled:
    a, b = map(compile_tree, tree.children)
    return lambda scope: a(scope) and b(scope)


def _either(tree: Node) -> Compiled:
    a, b = map(compile_tree, tree.children)
    return lambda scope: a(scope) or b(scope)


def _inverse(tree: Node) -> Compiled:
    value = compile_tree(tree.children[0])
    return lambda scope: not value(scope)


def _membership(wanted: bool) -> Callable[[Node], Compiled]:
    def compile_membership(tree: Node) -> Compiled:
        value, container = map(compile_tree, tree.children)
        at = position(tree.children[1])

        def apply(scope: Scope) -> bool:
            values = container(scope)
            if not isinstance(values, tuple | Mapping):
                raise Fault(at, f"{values!r} is not a list")
            return (value(scope) in values) is wanted

        return apply

    return compile_membership


def _subscript(tree: Node) -> Compiled:
    base, place = map(compile_tree, tree.children)
    at = position(tree.children[1])

    def apply(scope: Scope) -> Any:
        values, key = base(scope), place(scope)
        if not isinstance(values, tuple | Mapping):
            raise Fault(at, f"{values!r} cannot be indexed")
        try:
            if isinstance(key, tuple):
                return tuple(values[k] for k in key)
            return values[key]
        except _CAUGHT:
            pass
        size = f"of length {len(values)}" if isinstance(values, tuple) else "given"
        raise Fault(at, f"there is no entry {key!r} in the list {size}")

    return apply


def _slice(tree: Node) -> Compiled:
    base = compile_tree(tree.children[0])
    ends = [None if t is None else compile_tree(t.children[0]) for t in tree.children[1:]]
    at = position(tree)

    def apply(scope: Scope) -> Any:
        values = base(scope)
        low, high = (None if e is None else e(scope) for e in ends)
        if not isinstance(values, tuple):
            raise Fault(at, f"{values!r} cannot be sliced")
        try:
            return values[low:high]
        except _CAUGHT as problem:
            _fault(at, problem)

    return apply


#: What expressions may ask of a tensor type; nothing else has attributes.
_OF_TENSORS = ("shape", "dtype", "rank", "size")


def _attribute(tree: Node) -> Compiled:
    head, tail = tree.children
    base, name, at = compile_tree(head), str(tail), position(tail)

    def apply(scope: Scope) -> Any:
        value = base(scope)
        if isinstance(value, TensorType) and name in _OF_TENSORS:
            return getattr(value, name)
        if isinstance(value, Mapping) and name in value:
            return value[name]
        known = sorted(value) if isinstance(value, Mapping) else _OF_TENSORS
        has = isinstance(value, Mapping | TensorType)
        hint = f"There are {', '.join(map(str, known))}." if has else ""
        raise Fault(at, f"{name!r} is not an attribute of {value!r:.60}", hint)

    return apply


def _call(tree: Node) -> Compiled:
    head, *rest = tree.children
    name, at = str(head), position(head)
    arguments = [compile_tree(t) for t in rest if t is not None]
    if name not in FUNCTIONS:
        near = difflib.get_close_matches(name, list(FUNCTIONS), 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(FUNCTIONS)}."
        raise Fault(at, f"there is no function {name}", hint)
    function = FUNCTIONS[name]

    def apply(scope: Scope) -> Any:
        values = [a(scope) for a in arguments]
        try:
            return function(*values)
        except _CAUGHT as problem:
            _fault(at, problem)

    return apply


def _list(tree: Node) -> Compiled:
    items: list[tuple[bool, Compiled, int]] = []
    for item in tree.children:
        spread = item.data == "spread"
        items.append((spread, compile_tree(item.children[0] if spread else item), position(item)))
    if not any(spread for spread, _, _ in items):
        plain = [value for _, value, _ in items]
        return lambda scope: tuple([value(scope) for value in plain])

    def apply(scope: Scope) -> tuple[Any, ...]:
        out: list[Any] = []
        for spread, value, at in items:
            v = value(scope)
            if not spread:
                out.append(v)
            elif isinstance(v, tuple):
                out.extend(v)
            else:
                raise Fault(at, f"`...` spreads a list, and {v!r} is none")
        return tuple(out)

    return apply


def _comprehension(tree: Node) -> Compiled:
    body, targets, source, condition = tree.children
    names = [str(t) for t in targets.children]
    value, values = compile_tree(body), compile_tree(source)
    test = None if condition is None else compile_tree(condition)
    at = position(source)

    def apply(scope: Scope) -> tuple[Any, ...]:
        inner = Inner(scope)
        out = []
        given = values(scope)
        if not isinstance(given, tuple):
            raise Fault(at, f"{given!r} is not a list")
        for v in given:
            if len(names) == 1:
                inner[names[0]] = v
            else:
                if not isinstance(v, tuple) or len(v) != len(names):
                    raise Fault(at, f"{v!r} does not unpack into {', '.join(names)}")
                inner.update(zip(names, v, strict=True))
            if test is None or test(inner):
                out.append(value(inner))
        return tuple(out)

    return apply


_NODES: dict[str, Callable[[Any], Compiled]] = {
    "attribute": _attribute,
    "binary": _infix(_BINARY),
    "both": _both,
    "call": _call,
    "choice": _choice,
    "compare": _infix(_COMPARE),
    "comprehension": _comprehension,
    "either": _either,
    "extent": _extent,
    "group": _name,
    "index": _subscript,
    "integer": _literal(int),
    "inverse": _inverse,
    "list": _list,
    "member": _membership(True),
    "negate": _negate,
    "no": lambda tree: _constant(False),
    "nothing": lambda tree: _constant(None),
    "real": _literal(float),
    "slice": _slice,
    "stranger": _membership(False),
    "text": _literal(lambda s: s[1:-1]),
    "variable": _name,
    "word": _literal(str),
    "yes": lambda tree: _constant(True),
}
