"""Rounding: how far off the truth a result may be at each of its elements.

A pattern's own roundings, and roundings of what it is given, move its result; how far, term by
term, is a running error analysis (Higham 2002, "Accuracy and Stability of Numerical Algorithms",
chapter 3). Here each term is measured instead of derived: one tensor at a time is moved by a few
roundings, and the pattern is computed on from there in 64 bits. What a replacement computes may be
as far off as these terms together: it then is what the pattern makes of inputs that are off by
roundings. Terms of the replacement count for nothing, or else the digits that it loses would excuse
themselves: 1 - logistic(x) has no digits left of logistic(-x) where x is large, and few are lost of
x*y + x*z beside x*(y + z), whose terms are as large where y is near to -z.

Factors in another order underflow in another place. A product, sum or quotient of the replacement
may do so where nothing but sums, products and numerators follows: what then is lost stays small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from .evaluate import FIELD, Array, Program
from .instances import Instance

#: Draws for what is summed. They are normal: of a few signs alone some sums hear nothing.
_DRAWS = 4
# Kernels that are linear in some operands only, by their places.
_LINEAR_IN = {"div": (0,), "attention": (2,), "exp_dot": (3,), "square": (), "integer_pow": ()}
# Kernels whose results are sums of products, and may underflow as these do.
_PRODUCTS = FIELD | {"attention", "exp_dot"}


def moved(
    program: Program,
    values: Mapping[str, Array],
    root: str,
    made: str,
    rounding: float,
    least: float,
    alone: bool,
    own: Mapping[str, float],
) -> Array:
    """How far roundings move each element of the result `root` of a pattern, `program` being both
    sides in 64 bits.

    `rounding` is that of inputs, relative, `least` the step between numbers that underflow;
    `alone`: no element of a result depends on several of an operand; `own`: the roundings of the
    pattern's operations, by the names of their results.
    """
    instance = program.instance
    first = program.evaluate(values)
    total = np.zeros(first[root].shape)
    constants = instance.side.constants
    for name, value in values.items():
        if name not in constants and value.dtype.kind in "fc":
            total += _furthest(program, first, name, root, rounding, 0.0, alone)
    for node in instance.side.nodes:
        by = own.get(node.name, 0.0)
        if by and first[node.name].dtype.kind in "fc":
            total += _furthest(program, first, node.name, root, by, least, alone)
    for name in _lost(instance, made):
        if first[name].dtype.kind in "fc":
            total += _furthest(program, first, name, made, 0.0, least, alone)
    return total


def _furthest(
    program: Program,
    first: Mapping[str, Array],
    name: str,
    end: str,
    rounding: float,
    least: float,
    alone: bool,
) -> Array:
    """How far one end moves as one tensor does, up or down."""
    shape = first[name].shape
    ways: list[Array | complex] = [1.0, -1.0]
    if not alone:
        ways += _apart(shape)
    if first[name].dtype.kind == "c":  # either part is rounded by itself
        ways += [complex(1, -1), complex(-1, 1)]
    far = np.zeros(first[end].shape)
    for by in ways:
        with np.errstate(all="ignore"):
            there = program.after(first, name, _moved(first[name], rounding, least, by), end)
            far = np.fmax(far, np.abs(there - first[end]))
    return far


@lru_cache(maxsize=64)
def _apart(shape: tuple[int, ...]) -> tuple[Array, ...]:
    """Ways in which the elements of a tensor move, each by its own; the same for all of a shape."""
    rng = np.random.default_rng(0)
    return tuple(rng.normal(size=shape) for _ in range(_DRAWS))


def _moved(x: Array, rounding: float, least: float, by: Array | complex) -> Array:
    """A tensor moved by roundings; either part of complex numbers by its own where `by` is such."""
    if isinstance(by, complex):
        return np.asarray(x + rounding * (x.real * by.real + 1j * x.imag * by.imag) + least * by)
    return np.asarray(x * (1 + rounding * by) + least * by)


def _lost(instance: Instance, made: str) -> Sequence[str]:
    """Tensors of a replacement that may underflow as nothing that follows makes more of it."""
    built = {n.name: n for n in instance.side.built}
    fine: dict[str, bool] = {}
    for node in reversed(instance.side.built):
        kernel = instance.applied[node.signature].kernel
        if node.name == made:
            fine[node.name] = True
        here = fine.get(node.name, False) and kernel in _PRODUCTS
        for place, operand in enumerate(node.operands):
            if operand in built:
                linear = here and place in _LINEAR_IN.get(kernel, range(place + 1))
                fine[operand] = fine.get(operand, True) and linear
    return [n for n, good in fine.items() if good and _kernel(instance, n) in _PRODUCTS]


def _kernel(instance: Instance, name: str) -> str:
    built = {n.name: n for n in instance.side.built}
    return instance.applied[built[name].signature].kernel
