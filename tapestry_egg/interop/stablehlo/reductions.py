"""Reductions, windows and sorts of StableHLO, as JAX has them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np

from .constants import ints, word
from .operations import Attributes

#: What reduces by an operation of two numbers, and what combines with the value it starts from.
_MONOIDS = {
    "add": ("reduce_sum", "add"),
    "multiply": ("reduce_prod", "mul"),
    "maximum": ("reduce_max", "max"),
    "minimum": ("reduce_min", "min"),
    "and": ("reduce_and", "bitwise_and"),
    "or": ("reduce_or", "bitwise_or"),
    "xor": ("reduce_xor", "bitwise_xor"),
}


#: A test of two elements of each of some arrays, by how these compare: -1, 0 or 1 each.
_Test = Callable[[Sequence[int]], bool]


def reduce(operation: Any, args: list[Any], runner: Any) -> Any:
    """A monoid's reduction where the body is one; else JAX's own, of any body."""
    from jax import lax

    dims = ints(operation.attributes["dimensions"])
    half = len(args) // 2
    arrays, starts = args[:half], args[half:]
    how = runner.combination(operation.regions[0])
    if arrays[0].dtype == bool:
        how = {"add": "or", "maximum": "or", "multiply": "and", "minimum": "and"}.get(how, how)
    if half == 1 and how in _MONOIDS:
        reducer, combine = _MONOIDS[how]
        found = getattr(lax, reducer)(arrays[0], dims)
        if _is_nothing(how, starts[0]):
            return found
        start = lax.broadcast_in_dim(starts[0], found.shape, ())
        return getattr(lax, combine)(start, found)

    def body(one: Any, two: Any) -> Any:
        pair = (one, two) if half == 1 else (*one, *two)
        made = runner.block(operation.regions[0].blocks[0], pair)
        return made[0] if half == 1 else tuple(made)

    if half == 1:
        return lax.reduce(arrays[0], starts[0], body, dims)
    return lax.reduce(tuple(arrays), tuple(starts), body, dims)


def _is_nothing(how: str, start: Any) -> bool:
    """Whether a reduction starts from a known value that changes no result."""
    if not isinstance(start, np.ndarray | np.generic):
        return False
    value = np.asarray(start)
    kind = value.dtype.kind
    if how in ("add", "xor", "or"):
        # Added to a sum of negative zeros, only the negative zero leaves the sign; JAX itself
        # starts from the positive one.
        return bool(value == 0)
    if how == "multiply":
        return bool(value == 1)
    if how == "and":
        return bool(value == (True if kind == "b" else ~np.zeros((), value.dtype)))
    if kind == "i" or kind == "u":
        info = np.iinfo(value.dtype)
        return bool(value == (info.min if how == "maximum" else info.max))
    if kind == "b":
        return bool(value == (how == "minimum"))
    return bool(value.astype(float) == (-np.inf if how == "maximum" else np.inf))


def reduce_window(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    how = runner.combination(operation.regions[0])
    if len(args) != 2 or how not in _MONOIDS:
        raise ValueError("a window whose elements are combined by more than one step")
    return lax.reduce_window(args[0], args[1], getattr(lax, _MONOIDS[how][1]), **_window(operation))


def _window(operation: Any) -> dict[str, Any]:
    has = Attributes(operation)
    size = has.ints("window_dimensions")
    steps = has.windows(len(size), "window_strides", "base_dilations", "window_dilations")
    return {
        "window_dimensions": size,
        "window_strides": steps[0],
        "padding": has.padding(len(size)),
        "base_dilation": steps[1],
        "window_dilation": steps[2],
    }


def select_and_scatter(operation: Any, args: list[Any], runner: Any) -> Any:
    """The gradient of a pooling: sums of what belongs to the chosen element of every window."""
    from jax import lax

    select, add = operation.regions
    chosen = [op.operation for op in select.blocks[0].operations]
    by = word(chosen[0].attributes["comparison_direction"]) if len(chosen) == 2 else ""
    if (
        by not in ("GE", "LE")
        or runner.combination(add) != "add"
        or not _is_nothing("add", args[2])
    ):
        raise ValueError("a choice and sum over windows that is no gradient of a pooling")
    window = _window(operation)

    def pool(x: Any) -> Any:
        low, over = (-np.inf, lax.max) if by == "GE" else (np.inf, lax.min)
        return lax.reduce_window(
            x,
            np.array(low, x.dtype),
            over,
            window["window_dimensions"],
            window["window_strides"],
            window["padding"],
        )

    import jax

    _, back = jax.vjp(pool, args[0])
    return back(args[1])[0]


def sort(operation: Any, args: list[Any], runner: Any) -> Any:
    """A sort by rising keys, which are the first arrays."""
    from jax import lax

    keys = _rising_keys(operation.regions[0].blocks[0])
    if not keys:
        raise ValueError("a sort by another order than that of its first arrays, rising")
    has = Attributes(operation)
    return lax.sort(
        tuple(args),
        dimension=has.number("dimension"),
        is_stable=has.flag("is_stable"),
        num_keys=keys,
    )


def _rising_keys(block: Any) -> int:
    """How many of the first arrays a sort's comparison goes by, rising, the first one first; 0
    where it is another comparison.

    Its arguments are two elements of each array. Selections by comparisons of floats only make
    zeros one zero and what is no number one such; what is left is held against the order of the
    arrays for each way in which their elements may compare.
    """
    side = {x: (k // 2, k % 2) for k, x in enumerate(block.arguments)}
    told: dict[Any, _Test] = {}
    *steps, end = [op.operation for op in block.operations]
    for op in steps:
        result, made_of = op.results[0], list(op.operands)
        sides = {side[x] for x in made_of if x in side}
        if op.name in ("stablehlo.and", "stablehlo.or") and all(x in told for x in made_of):
            told[result] = _joined(op.name, [told[x] for x in made_of])
        elif op.name == "stablehlo.compare" and len(sides) == 2:
            (k, first), (other, second) = (side[x] for x in made_of)
            direction = word(op.attributes["comparison_direction"])
            if direction not in ("LT", "EQ") or _is_float(op):
                return 0
            if (k, first, second) != (other, 0, 1):
                return 0
            told[result] = _compared(k, -1 if direction == "LT" else 0)
        elif op.name in ("stablehlo.compare", "stablehlo.select") and len(sides) == 1:
            side[result] = sides.pop()
        elif op.name != "stablehlo.constant":
            return 0
    (answer,) = end.operands
    keys = 1 + max((side[x][0] for op in steps for x in op.operands if x in side), default=-1)
    ways = product((-1, 0, 1), repeat=keys)
    rises = answer in told and all(told[answer](w) == (w < (0,) * keys) for w in ways)
    return keys if rises else 0


def _joined(name: str, parts: Sequence[_Test]) -> _Test:
    join = all if name == "stablehlo.and" else any
    return lambda way: join(part(way) for part in parts)


def _compared(k: int, wanted: int) -> _Test:
    return lambda way: way[k] == wanted


def _is_float(compare: Any) -> bool:
    """Whether a comparison is that of floats, of which what is no number is in no order."""
    has = compare.attributes
    return "compare_type" in has and word(has["compare_type"]) == "FLOAT"


def top_k(operation: Any, args: list[Any], runner: Any) -> Any:
    """The greatest of each row; as a composite, too, as which it is exported."""
    from jax import lax

    has = operation.attributes
    has = has["composite_attributes"] if "composite_attributes" in has else has
    return lax.top_k(args[0], operator.index(has["k"].value))


OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    "stablehlo.reduce": reduce,
    "stablehlo.reduce_window": reduce_window,
    "stablehlo.select_and_scatter": select_and_scatter,
    "stablehlo.sort": sort,
    "chlo.top_k": top_k,
}
