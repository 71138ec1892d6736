"""Formulas of monoids: a text such as `a.total + b.total`, parsed and computed without `eval`.

A formula is elementwise arithmetic. It runs on NumPy and on JAX arrays alike: what it computes
with is a table of functions (`arithmetic`), so both have one text and no shared code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from tapestry_egg.errors import TapestryError
from tapestry_egg.syntax_trees import KeptTrees, parser_of

#: Function name -> its number of arguments.
FUNCTIONS: Mapping[str, int] = {
    "abs": 1,
    "exp": 1,
    "isnan": 1,
    "log": 1,
    "max": 2,
    "min": 2,
    "sqrt": 1,
    "where": 3,
}
#: Reductions over the devices of a mesh axis, or over the shards of a simulated one.
MESH_FUNCTIONS: Mapping[str, int] = {"pmax": 1, "pmin": 1, "psum": 1}

_DEEPEST = 100  # operations within operations, so that no formula exhausts the stack
_DIGITS = 18  # of a number, so that it is one to NumPy too

_HERE = Path(__file__).parent
#: The trees of the formulas that ship; `python -m tapestry_egg.monoids.parsed` writes them anew.
KEPT = KeptTrees(_HERE / "formula.lark", _HERE / "parsed.json")
_START = "start"  # the grammar's one beginning

Arithmetic = Mapping[str, Callable[..., Any]]
_Closure = Callable[[Callable[[str], Any], Arithmetic], Any]


class MonoidError(TapestryError):
    """A monoid is malformed, breaks its laws, or does not fit the values given."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula: its text, the names and functions in it, and how to compute it."""

    text: str
    names: frozenset[str]
    functions: frozenset[str]
    outermost: str  # the function that makes the result: `psum` for `psum(x)`, else ``
    _run: _Closure

    def __call__(self, value: Callable[[str], Any], arithmetic: Arithmetic) -> Any:
        """The result, where `value` gives the arrays of the names."""
        return self._run(value, arithmetic)


def parse_formula(text: str, where: str = "") -> Formula:
    """Read a formula. Raises MonoidError with a caret below the place of a fault."""
    try:
        tree: Any = KEPT.tree_of(text, _START) or parsed(text, where)
    except RecursionError:
        raise MonoidError("the formula is nested too deeply", where=where) from None
    names: set[str] = set()
    functions: set[str] = set()
    run = _compile(tree, text, where, names, functions, 0)
    outermost = str(tree.children[0]) if tree.data == "call" else ""
    return Formula(text, frozenset(names), frozenset(functions), outermost, run)


def parsed(text: str, where: str = "") -> Any:
    """The syntax tree of a formula, which is parsed now. Raises MonoidError as `parse_formula`."""
    from lark.exceptions import UnexpectedInput

    try:
        return parser_of(KEPT.grammar, (_START,)).parse(text)
    except UnexpectedInput as e:
        at = min(int(e.pos_in_stream if e.pos_in_stream is not None else len(text)), len(text))
        if at < 0 or getattr(getattr(e, "token", None), "type", "") == "$END":
            at = len(text)
        what = f"unexpected {text[at]!r}" if at < len(text) else "the formula ends too early"
        raise _fault(text, at, what, where) from None


def arithmetic(xp: ModuleType) -> dict[str, Callable[..., Any]]:
    """What formulas compute with, from `numpy` or `jax.numpy`; without the mesh functions."""
    return {
        "abs": xp.abs,
        "exp": xp.exp,
        "isnan": lambda x: x != x,
        "log": xp.log,
        "max": xp.maximum,
        "min": xp.minimum,
        "sqrt": xp.sqrt,
        "where": xp.where,
        "and": xp.bitwise_and,
        "or": xp.bitwise_or,
        "not": xp.invert,
        "+": xp.add,
        "-": xp.subtract,
        "*": xp.multiply,
        "/": xp.divide,
        "negate": xp.negative,
        "==": xp.equal,
        "!=": xp.not_equal,
        "<=": xp.less_equal,
        ">=": xp.greater_equal,
        "<": xp.less,
        ">": xp.greater,
    }


def _compile(
    tree: Any, text: str, where: str, names: set[str], functions: set[str], depth: int
) -> _Closure:
    def sub(child: Any) -> _Closure:
        return _compile(child, text, where, names, functions, depth + 1)

    if depth > _DEEPEST:
        raise MonoidError("the formula is nested too deeply", where=where)
    kind, children = tree.data, tree.children
    if kind == "number":
        token = str(children[0])
        if len(token) > _DIGITS:
            at = children[0].start_pos
            raise _fault(text, at, f"a number has at most {_DIGITS} digits", where)
        number = int(token) if token.isdigit() else float(token)
        return lambda value, ops: number
    if kind == "name":
        name = str(children[0])
        names.add(name)
        return lambda value, ops: value(name)
    if kind in ("negate", "inverse"):
        inner, how = sub(children[0]), "negate" if kind == "negate" else "not"
        return lambda value, ops: ops[how](inner(value, ops))
    if kind == "binary":
        left, sign, right = sub(children[0]), str(children[1]), sub(children[2])
        return lambda value, ops: ops[sign](left(value, ops), right(value, ops))
    called, arguments = str(children[0]), [sub(c) for c in children[1:]]
    wanted = FUNCTIONS.get(called, MESH_FUNCTIONS.get(called))
    if wanted != len(arguments):
        what = (
            f"there is no function {called!r}"
            if wanted is None
            else f"{called} takes {wanted} argument{'' if wanted == 1 else 's'}, not "
            f"{len(arguments)}"
        )
        known = ", ".join(sorted({**FUNCTIONS, **MESH_FUNCTIONS}))
        raise _fault(text, children[0].start_pos, what, where, f"Functions are {known}.")
    functions.add(called)
    return lambda value, ops: ops[called](*(argument(value, ops) for argument in arguments))


def _fault(text: str, at: int, what: str, where: str, hint: str = "") -> MonoidError:
    shown = [text.replace("\n", " "), " " * at + "^", hint]
    return MonoidError(what, where=where, hint="\n  ".join(x for x in shown if x))
