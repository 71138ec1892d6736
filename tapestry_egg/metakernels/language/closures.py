"""Syntax trees of the template language as Python closures over a scope.

Every function here turns one kind of tree node into a closure; nothing is evaluated as Python.
Faults of Python's operators (a list where a number should be, an index out of range) become faults
at the node's position.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.signatures.values import DRAWN, FUNCTIONS, Cost, Row

from .faults import Fault
from .positional import DROP, INSERT, AugmentedRow, Diagonal, Fill
from .scopes import STEPS, Inner, Scope, known

# Arithmetic of the template language: exact between integers, of numbers alone, and not too large.
#
# Tuples and strings know `+` and `*` in Python, with meanings that shapes should not get by
# accident.


# Bits of the largest integer that is computed with.
_MOST_BITS = 4096


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        quotient, remainder = divmod(a, b)
        if remainder:
            raise ValueError(f"{a} / {b} is not exact; `//` rounds down")
        return quotient
    return a / b


def _power(a: Any, b: Any) -> Any:
    if not isinstance(a, int | float) or not isinstance(b, int | float):
        raise TypeError(f"{a!r} ^ {b!r} is not of numbers")
    if not isinstance(a, float) and abs(b) * max(1, abs(a).bit_length()) > _MOST_BITS:
        raise ValueError(f"{a} ^ {b} is too large")
    return a**b


def _arithmetic(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def checked(a: Any, b: Any) -> Any:
        if type(a) is int and type(b) is int and a.bit_length() <= _MOST_BITS:
            return function(a, b)  # nearly always
        if isinstance(a, Diagonal) and isinstance(b, tuple) and function is operator.add:
            return a + b
        for v in (a, b):
            if isinstance(v, tuple | str | TensorType) or v is None:
                raise TypeError(f"{v!r} is not a number")
        if isinstance(a, int) and isinstance(b, int) and a.bit_length() > _MOST_BITS:
            raise ValueError("the number is too large")
        return function(a, b)

    return checked


#: Sign -> the function of two values.
BINARY = {
    "+": _arithmetic(operator.add),
    "-": _arithmetic(operator.sub),
    "*": _arithmetic(operator.mul),
    "/": _arithmetic(_divide),
    "//": _arithmetic(operator.floordiv),
    "%": _arithmetic(operator.mod),
    "^": _arithmetic(_power),
}
#: Sign -> the comparison of two values.
COMPARE = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}


Compiled = Callable[[Scope], Any]
Node = Any  # a `Tree` or `Token` of the parser; which of them a child is, its tree says


_CAUGHT = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, GraphError)


def _fault(at: int, problem: Exception) -> NoReturn:
    text = str(problem)
    if isinstance(problem, KeyError):
        text = f"there is no entry {text}"
    raise Fault(at, text or type(problem).__name__) from None


def compile_tree(tree: Node) -> Compiled:
    """The closure that evaluates a syntax tree in a scope. Raises Fault for an unknown function."""
    return _NODES[str(tree.data)](tree)


def compile_text(tree: Node) -> Compiled:
    """The closure of a whole text's tree. Raises Fault, also for a text nested too deeply."""
    try:
        return compile_tree(tree)
    except RecursionError:
        raise Fault(0, "nested too deeply") from None


def _constant(value: Any) -> Compiled:
    return lambda scope: value


def _literal(convert: Callable[[str], Any]) -> Callable[[Node], Compiled]:
    return lambda tree: _constant(convert(str(tree.children[0])))


def _integer(tree: Node) -> Compiled:
    digits = str(tree.children[0])
    if len(digits) > _MOST_DIGITS:
        raise Fault(tree.start_pos, f"a number of {len(digits)} digits")
    return _constant(int(digits))


_MOST_DIGITS = 18


def _name(tree: Node) -> Compiled:
    name, at = str(tree.children[0]), tree.start_pos

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


def _infix(table: Mapping[str, Callable[[Any, Any], Any]]) -> Callable[[Node], Compiled]:
    def compile_infix(tree: Node) -> Compiled:
        left, sign, right = tree.children
        a, b = compile_tree(left), compile_tree(right)
        at, function = sign.start_pos, table[str(sign)]

        def apply(scope: Scope) -> Any:
            x, y = a(scope), b(scope)
            try:
                return function(x, y)
            except TypeError as problem:
                if "operand type" in str(problem) or "not supported" in str(problem):
                    what = f"{x!r:.60} {sign} {y!r:.60} has no value"
                    raise Fault(at, what) from None
                _fault(at, problem)
            except _CAUGHT as problem:
                _fault(at, problem)

        return apply

    return compile_infix


def _negate(tree: Node) -> Compiled:
    value, at = compile_tree(tree.children[1]), tree.start_pos

    def apply(scope: Scope) -> Any:
        try:
            return -value(scope)
        except _CAUGHT as problem:
            _fault(at, problem)

    return apply


def _extent(tree: Node) -> Compiled:
    start, size = map(compile_tree, tree.children)
    at = tree.children[1].start_pos

    def apply(scope: Scope) -> Any:
        row, extent = start(scope), size(scope)
        if not isinstance(extent, int) or isinstance(extent, bool) or extent < 0:
            raise Fault(at, f"{extent!r} is not an extent")
        if type(row) is int:
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
        at = tree.children[1].start_pos

        def apply(scope: Scope) -> bool:
            values = container(scope)
            if not isinstance(values, tuple | Mapping):
                raise Fault(at, f"{values!r} is not a list")
            return (value(scope) in values) is wanted

        return apply

    return compile_membership


_INDEXED = (tuple, dict, Mapping, Cost)  # a dict is one without asking what a mapping is


def _subscript(tree: Node) -> Compiled:
    base, place = map(compile_tree, tree.children)
    at = tree.children[1].start_pos

    def apply(scope: Scope) -> Any:
        values, key = base(scope), place(scope)
        if not isinstance(values, _INDEXED):
            raise Fault(at, f"{values!r} cannot be indexed")
        try:
            if isinstance(key, tuple) and not isinstance(values, Cost):
                return tuple(values[k] for k in key)
            return values[key]
        except _CAUGHT:
            pass
        size = f"of length {len(values)}" if isinstance(values, tuple) else "given"
        raise Fault(at, f"there is no entry {key!r} in the list {size}")

    return apply


def _slice(tree: Node) -> Compiled:
    base, ends = compile_tree(tree.children[0]), _ends(tree.children[1:])
    at = tree.start_pos

    def apply(scope: Scope) -> Any:
        values = base(scope)
        if not isinstance(values, tuple):
            raise Fault(at, f"{values!r} cannot be sliced")
        low, high = ends(scope)
        return values[low:high]

    return apply


#: What expressions may ask of a tensor type; nothing else has attributes.
_OF_TENSORS = ("shape", "dtype", "rank", "size")
#: And of one of which is known which value it is (`metakernels/decided.py`).
_OF_KNOWN = ("id", "number")


def _attribute(tree: Node) -> Compiled:
    head, tail = tree.children
    base, name, at = compile_tree(head), str(tail), tail.start_pos

    def apply(scope: Scope) -> Any:
        value = base(scope)
        if isinstance(value, TensorType) and name in _OF_TENSORS:
            return getattr(value, name)
        if isinstance(value, TensorType) and name in _OF_KNOWN and hasattr(value, name):
            return getattr(value, name)
        if isinstance(value, Mapping) and name in value:
            return value[name]
        if isinstance(value, tuple) and name == "size":
            return len(value)  # `$index.size`: the number of index dims
        if isinstance(value, Mapping):
            known, told = sorted(value), f"{value!r:.60}"
        elif isinstance(value, TensorType):
            more = [a for a in _OF_KNOWN if hasattr(value, a)]
            known, told = [*_OF_TENSORS, *more], f"a tensor, {value}"
        else:
            known, told = [], f"{value!r:.60}"
        hint = f"There are {', '.join(map(str, known))}." if known else ""
        raise Fault(at, f"{name!r} is not an attribute of {told}", hint)

    return apply


def _call(tree: Node) -> Compiled:
    head, *rest = tree.children
    name, at = str(head), head.start_pos
    arguments = [compile_tree(t) for t in rest if t is not None]
    function = FUNCTIONS.get(name) or DRAWN.get(name)
    if function is None:
        near = difflib.get_close_matches(name, [*FUNCTIONS, *DRAWN], 1)
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(FUNCTIONS)}."
        raise Fault(at, f"there is no function {name}", hint)

    def apply(scope: Scope) -> Any:
        values = [a(scope) for a in arguments]
        if name in DRAWN:
            try:
                values.insert(0, scope["$draw"])
            except KeyError:
                hint = "Only `samples:` may draw at random."
                raise Fault(at, f"{name} draws at random", hint) from None
        for v in values:
            if isinstance(v, tuple) and Fill in map(type, v):
                raise Fault(at, f"{name} is given {v!r}, whose size is not known here")
        try:
            return function(*values)
        except (TypeError, AttributeError):
            shown = ", ".join(f"{v!r:.60}" for v in values) or "nothing"
            raise Fault(at, f"{name} cannot take {shown}") from None
        except _CAUGHT as problem:
            _fault(at, problem)

    return apply


def _list(tree: Node) -> Compiled:
    return _entries(tree.children)


def _entries(items: list[Node]) -> Callable[[Scope], tuple[Any, ...]]:
    """What makes the list of these items, `...` among them."""
    if not any(item.data in _SPREADS for item in items):
        plain = [compile_tree(item) for item in items]
        return lambda scope: tuple([value(scope) for value in plain])
    made: list[tuple[bool, Compiled]] = []
    for item in items:
        spread = item.data in _SPREADS
        made.append((spread, _SPREADS[item.data](item) if spread else compile_tree(item)))

    def apply(scope: Scope) -> tuple[Any, ...]:
        out: list[Any] = []
        for spread, value in made:
            v = value(scope)
            if spread and isinstance(v, tuple):
                out.extend(v)
            else:
                out.append(v)
        return tuple(out)

    return apply


def _spread(tree: Node) -> Compiled:
    """`value...`: a list in place, or a scalar that fills the list that it stands in."""
    value, at = compile_tree(tree.children[0]), tree.start_pos
    ends = _ends(tree.children[2:4]) if len(tree.children) > 2 else None

    def apply(scope: Scope) -> Any:
        v = value(scope)
        part = None if ends is None else ends(scope)
        if isinstance(v, tuple):
            return v if part is None else v[part[0] : part[1]]
        if type(v) is int or (isinstance(v, str) and v in (INSERT, DROP)):
            return Fill(v, part, at)
        raise Fault(at, f"`...` spreads a list or repeats a number, and {v!r} is neither")

    return apply


def _standard(tree: Node) -> Compiled:
    """`...` alone, or a slice of it: filled with what its list has by default."""
    at, rest = tree.start_pos, tree.children[1:]
    ends = _ends(rest[:2]) if rest else None
    return lambda scope: Fill(None, None if ends is None else ends(scope), at)


_SPREADS: dict[str, Callable[[Node], Compiled]] = {
    "spread": _spread,
    "filling": _spread,
    "standard": _standard,
}


def _ends(trees: list[Node]) -> Callable[[Scope], tuple[int | None, int | None]]:
    """The two ends of a slice, both of them whole numbers or left out."""
    ends = [(None, 0) if t is None else (compile_tree(t.children[0]), t.start_pos) for t in trees]

    def apply(scope: Scope) -> tuple[int | None, int | None]:
        out: list[int | None] = []
        for end, at in ends:
            v = None if end is None else end(scope)
            if v is not None and type(v) is not int:
                raise Fault(at, f"{v!r} is not an integer")
            out.append(v)
        return out[0], out[1]

    return apply


def _diagonal(tree: Node) -> Compiled:
    entries, at = _entries([t for t in tree.children[1:] if t is not None]), tree.start_pos
    return lambda scope: Diagonal(entries(scope), at=at)


def _box(tree: Node) -> Compiled:
    """`MAP :> SHAPE` and `MAP + OFFSET :> SHAPE`; a plain list is a map here."""
    head, tail = tree.children
    moved = head.data == "binary" and str(head.children[1]) == "+"
    parts = [head.children[0], head.children[2]] if moved else [head]
    values, shape = [compile_tree(p) for p in parts], compile_tree(tail)
    places = [p.start_pos for p in (*parts, tail)]

    def apply(scope: Scope) -> Diagonal:
        lists = [v(scope) for v in (*values, shape)]
        for v, at in zip(lists[1:], places[1:], strict=True):
            if not isinstance(v, tuple):
                raise Fault(at, f"{v!r} is not a list", "MAP + OFFSET :> SHAPE are lists.")
        first = lists[0]
        if isinstance(first, tuple):
            first = Diagonal(first, at=places[0])
        if not isinstance(first, Diagonal) or first.shape is not None:
            raise Fault(places[0], f"{first!r} is not a map", "Write `[MAP] :> [SHAPE]`.")
        if moved and first.offset is not None:
            raise Fault(places[1], "the map already has an offset")
        return replace(first, offset=lists[1] if moved else first.offset, shape=lists[-1])

    return apply


def _augmented(tree: Node) -> Compiled:
    row, offset, extent = tree.children
    entries, at = _entries(row.children), tree.start_pos
    b, s = compile_tree(offset), compile_tree(extent)
    return lambda scope: AugmentedRow(entries(scope), b(scope), s(scope), at)


def _comprehension(tree: Node) -> Compiled:
    body, targets, source, condition = tree.children
    names = [str(t) for t in targets.children]
    value, values = compile_tree(body), compile_tree(source)
    test = None if condition is None else compile_tree(condition)
    at = source.start_pos

    def apply(scope: Scope) -> tuple[Any, ...]:
        inner = Inner(scope)
        out = []
        given = values(scope)
        if not isinstance(given, tuple):
            raise Fault(at, f"{given!r} is not a list")
        for v in given:
            if not inner.step():
                raise Fault(at, f"more than {STEPS} steps")
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
    "augmented": _augmented,
    "binary": _infix(BINARY),
    "both": _both,
    "box": _box,
    "call": _call,
    "choice": _choice,
    "compare": _infix(COMPARE),
    "comprehension": _comprehension,
    "diagonal": _diagonal,
    "either": _either,
    "extent": _extent,
    "group": _name,
    "index": _subscript,
    "integer": _integer,
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
