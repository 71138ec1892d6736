"""Parameters of operations as the template language sees them, and as keys of caches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import Operation

# What most parameters are made of; it needs no reading, and is its own key.
_ATOMS = frozenset((bool, int, float, str, type(None)))


def plain(value: Any) -> Any:
    """A value of the language as plain parameter data: lists stand for tuples."""
    if isinstance(value, tuple | list):
        return [plain(v) for v in value]
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return value


def readable(value: Any) -> Any:
    """A parameter as expressions see it: tuples, and dtypes, enums and primitives by name.

    Accepts the plain forms of `tracing/codec.py` and the Python objects that they stand for.
    """
    if type(value) in _ATOMS:
        return value
    if type(value) is list:
        return tuple([readable(v) for v in value])
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, Mapping):
        for tag, read in _TAGS.items():
            if tag in value:
                return read(value)
        return {k: readable(v) for k, v in value.items() if k != "$class"}
    if isinstance(value, tuple | list):
        if hasattr(value, "_fields"):
            return {k: readable(getattr(value, k)) for k in value._fields}
        return tuple(readable(v) for v in value)
    if isinstance(value, np.dtype):
        return value.name
    if is_dataclass(value):
        return {f.name: readable(getattr(value, f.name)) for f in fields(value)}
    return value


_TAGS: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "$dtype": lambda v: v["$dtype"],
    "$scalar_type": lambda v: v["$scalar_type"],
    "$enum": lambda v: v["name"] if "name" in v else v["$enum"][-1],
    "$list": lambda v: readable(v["$list"]),
    "$int": lambda v: int(v["$int"]),
    "$float": lambda v: float(v["$float"]),
    "$primitive": lambda v: v["$primitive"],
}


def hashable(value: Any) -> Any:
    """A key that equal parameters share."""
    if type(value) in _ATOMS:
        return value
    if isinstance(value, tuple | list):
        return tuple([v if type(v) in _ATOMS else hashable(v) for v in value])
    if isinstance(value, Mapping):
        return ("{}", *sorted([(k, hashable(v)) for k, v in value.items()]))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def exact(value: Any) -> Any:
    """A key that parameters share only if no reader can tell them apart: 1 is neither 1.0 nor True,
    and 0.0 is not -0.0."""
    if isinstance(value, tuple | list):
        return tuple([exact(v) for v in value])
    if isinstance(value, Mapping):
        return ("{}", *sorted((k, exact(v)) for k, v in value.items()))
    if isinstance(value, bool | float):
        return (type(value).__name__, repr(value))
    return hashable(value)


def exact_of(op: Operation) -> Any:
    """The exact key of an operation's parameters; the operation remembers it, as programs have most
    of their operations in common with their forms."""
    known = op.__dict__.get("_exact")
    if known is None:
        known = op.__dict__["_exact"] = exact(op.params)
    return known
