"""The laws of a monoid, checked on random states before a user's monoid is trusted."""

from __future__ import annotations

from typing import Any

import numpy as np

from .definition import Monoid
from .fold import State, combine, fold, wrap, zero
from .formula import MonoidError

#: Rounding errors of states of a few numbers near 1, in units of the dtype's epsilon.
_ULPS = 64

_DTYPES = {
    "bool": "bool",
    "int": "int32",
    "uint": "uint8",
    "float": "float64",
    "complex": "complex128",
}


def check_laws(monoid: Monoid, *, seed: int = 0, rounds: int = 16) -> None:
    """Raise MonoidError, naming the law and the states, where a law does not hold.

    Checked on `rounds` random arrays per kind of element: associativity, the zero on both sides,
    commutativity if claimed, and that the collective gives what combining in order gives. Integers
    and flags agree exactly, floats within 64 units in the last place; where the monoid calls a kind
    `exact`, brackets change nothing at all.
    """
    rng = np.random.default_rng(seed)
    for kind in monoid.kinds:
        for _ in range(rounds):
            a, b, c = (wrap(monoid, *_elements(monoid, kind, rng)) for _ in range(3))
            neutral = zero(
                monoid,
                {p.name: _dtype_of(monoid, p.name, kind) for p in monoid.element},
                (5,),
                {t: 2 for p in monoid.element for t in p.trailing},
            )
            ab = combine(monoid, a, b)
            _same(
                monoid,
                "(a•b)•c = a•(b•c)",
                combine(monoid, ab, c),
                combine(monoid, a, combine(monoid, b, c)),
                exact=kind in monoid.exact,
            )
            _same(monoid, "zero•a = a", combine(monoid, neutral, a), a)
            _same(monoid, "a•zero = a", combine(monoid, a, neutral), a)
            if monoid.commutative:
                _same(monoid, "a•b = b•a", ab, combine(monoid, b, a))
            if collective := monoid.native(kind):
                stacked = {k: np.stack([a[k], b[k], c[k]]) for k in a}
                over = _OVER_SHARDS[collective]
                made = {k: over.reduce(x, 0, dtype=x.dtype) for k, x in stacked.items()}
                _same(monoid, "mesh = a•b•c", made, fold(monoid, stacked))


#: What a collective does of shards that dim 0 counts.
_OVER_SHARDS = {"psum": np.add, "pmax": np.maximum, "pmin": np.minimum}


def _dtype_of(monoid: Monoid, part: str, kind: str) -> str:
    """The first part has the kind that is tested, others the first kind that they take."""
    if part == monoid.element[0].name:
        return _DTYPES[kind]
    return _DTYPES[next(p.kinds[0] for p in monoid.element if p.name == part)]


def _elements(monoid: Monoid, kind: str, rng: np.random.Generator) -> list[Any]:
    out: list[Any] = []
    for part in monoid.element:
        dtype = _dtype_of(monoid, part.name, kind)
        shape = (5, *(2 for _ in part.trailing))
        if dtype == "bool":
            out.append(rng.random(shape) < 0.5)
        elif dtype.startswith(("int", "uint")):
            out.append(rng.integers(0 if dtype[0] == "u" else -4, 5, shape).astype(dtype))
        elif dtype.startswith("complex"):
            out.append(rng.normal(size=shape) + 1j * rng.normal(size=shape))
        else:  # ties on purpose
            out.append(np.round(rng.normal(size=shape), 1))
    return out


def _same(monoid: Monoid, law: str, left: State, right: State, exact: bool = False) -> None:
    for name, x in left.items():
        y = right[name]
        numbers = x.dtype.kind in "fc"
        close = (
            np.array_equal(x, y, equal_nan=numbers)
            if exact or not numbers
            else np.allclose(x, y, rtol=_ULPS * 2.3e-16, atol=_ULPS * 2.3e-16, equal_nan=True)
        )
        if not close:
            at = int(np.argmax(np.asarray(x != y).reshape(-1)))
            raise MonoidError(
                f"{monoid.name} breaks the law {law}: {name} is {x.reshape(-1)[at]} on one side, "
                f"{y.reshape(-1)[at]} on the other",
                where=monoid.where,
                hint="Correct its formulas, or what it claims: `commutative`, `exact`, `mesh`.",
            )
