"""Values: what the inputs of small programs hold when a rule is tried on them.

A rule that fails fails somewhere: on ties, beyond a bound, at the least integer, where a mask hides
a NaN. So inputs are drawn from families, each of which is one such place, and every family meets
every rule: all inputs from one family first, then the families mixed over the inputs. Chance only
chooses within a family.

`landmarks` are the constants of the rule, in its terms, guards, lets and parameters: values lie
around, exactly at, between and far beyond them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rules.language.book import Rule

from .samples import DTYPES

Array = NDArray[Any]
#: The numbers that a rule speaks of, in order.
Landmarks = tuple[float, ...]

#: Families of finite numbers that no law over the reals may fail on. Magnitudes stay where the
#: usual functions have values: what overflows says nothing about a law.
FINITE = (
    *("normal", "unit", "ties", "around", "tens", "zeros", "beyond", "halves"),
    *("small", "equal", "one-hot", "rising", "falling", "magnitudes", "dominant"),
)
#: Families that a law must hold on in a program's own dtype where it reorders: far from its ends.
MODERATE = ("normal", "unit", "ties", "around", "tens", "one-hot", "high")
#: The same, and where products and exponentials of numbers that are none too large end.
ROUNDED = (*MODERATE, "low", "tiny", "near", "scales")
#: Families for laws that claim equal bits, and for integers: the ends of a dtype too.
EXTREME = (*FINITE, "extremes", "pool", "midway")
#: Families that hold what is no number: masks are made of them.
MASKS = ("infinite", "below", "above", "nan")

_FEW = (-1.0, 0.0, 1.0, 2.0)


@dataclass(frozen=True)
class Ends:
    """The ends of a dtype: its special values, in order of interest."""

    values: tuple[float | int, ...]
    least: float | int
    most: float | int
    tiny: float = 0.0  # a number whose square is nothing
    normal: float = 1.0  # the least with all digits
    eps: float = 0.0  # from 1 to the next greater


def landmarks(rule: Rule) -> tuple[float, ...]:
    """Every number that a rule speaks of, with zero and one."""
    found = {0.0, 1.0}
    for text in _texts(rule):
        for number in _NUMBER.findall(text):
            value = float(number)
            if np.isfinite(value):
                found |= {value, abs(value)}
    return tuple(sorted(found))


def named_dtypes(rule: Rule) -> tuple[str, ...]:
    """Every dtype that a rule speaks of."""
    words = {w for text in _texts(rule) for w in _WORD.findall(text)}
    return tuple(d for d in dict.fromkeys(DTYPES) if d in words)


def _texts(rule: Rule) -> list[str]:
    texts = [rule.egg]
    recipe = rule.recipe
    if recipe is not None:
        texts += [g.text for g in recipe.guards]
        texts += [e.text for e in recipe.let.values()]
        texts += [w.inputs.text for w in recipe.wants.values()]
        texts += [e.text for w in recipe.wants.values() for e in w.params.values()]
    return texts


_WORD = re.compile(r"[a-z][a-z0-9_]*")
# A number that is not a part of a name: float32, Op2 and log1p hold none.
_NUMBER = re.compile(r"(?<![\w.$])-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])")


@cache
def ends(dtype: str) -> Ends:
    """The special values of a real dtype."""
    own = numpy_dtype(dtype)
    if kind(dtype) in ("int", "uint"):
        i = np.iinfo(own)
        low, high = int(i.min), int(i.max)
        some = {low, low + 1, low // 2, -2, -1, 0, 1, 2, high // 2, high // 2 + 1, high - 1, high}
        return Ends(tuple(sorted(v for v in some if low <= v <= high)), low, high)
    import ml_dtypes

    f = ml_dtypes.finfo(own)
    top, tiny, eps = float(f.max), float(f.tiny), float(f.eps)
    least = float(f.smallest_subnormal)
    steps = (top, top / 2, 1 + eps, 1.0, 1 - eps / 2, eps, tiny, least, 0.0)
    return Ends((*steps, *(-v for v in steps)), -top, top, 0.25 * least**0.5, tiny, eps)


_Floats = Callable[[np.random.Generator, tuple[int, ...], Landmarks, Ends], Array]


@cache
def around(marks: Landmarks) -> Array:
    """Values at, just beside, and between constants."""
    both = sorted({0.0, *marks, *(-m for m in marks)})
    out: list[float] = []
    for m in both:
        step = abs(m) or 1.0
        for part in (0.0, 2.0**-20, 2.0**-8, 2.0**-4, 0.5):
            out += [m + step * part, m - step * part]
    out += [(a + b) / 2 for a, b in pairwise(both)]
    return np.asarray(tuple(dict.fromkeys(out)))


@cache
def beyond(marks: Landmarks) -> Array:
    """Values outside of all constants, near and far."""
    found = sorted({abs(m) for m in marks} - {0.0})
    return np.asarray(
        [s * m * by for m in found for by in (1.5, 3.0, 20.0, 300.0) for s in (1, -1)]
    )


@cache
def _special(marks: Landmarks, e: Ends) -> Array:
    """Any special value of a dtype and of a rule."""
    some = [*_FEW, *around(marks), *beyond(marks), *e.values, 0.5, -1.5, 3.0, -7.0, 100.0]
    return np.clip(np.asarray(some, np.float64), e.least, e.most)


def _chosen(rng: np.random.Generator, values: Array, shape: tuple[int, ...]) -> Array:
    return np.asarray(values[rng.integers(len(values), size=shape)])


def _pick(values: Sequence[float]) -> _Floats:
    held = np.asarray(values, np.float64)
    return lambda rng, shape, marks, ends: _chosen(rng, held, shape)


def _signs(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    return np.where(rng.random(shape) < 0.5, -1.0, 1.0)


def _small(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    """As small as the smallest constant, and smaller than any sum would show."""
    least = min((abs(m) for m in marks if m), default=1.0)
    sizes = (
        least * 10.0 ** rng.uniform(-1, 1, shape)
        if least < 0.1
        else 10.0 ** rng.uniform(-9, -1, shape)
    )
    return np.asarray(_signs(rng, shape) * sizes)


def _tiny(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    """Numbers whose products underflow, and zeros."""
    sizes = e.tiny * rng.uniform(0.5, 1.0, shape)
    return np.where(rng.random(shape) < 0.3, 0.0, _signs(rng, shape) * sizes)


def _scales(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    """Numbers of every magnitude, down to the smallest with all digits, up to where products of
    three may overflow."""
    low, high = np.log2(e.normal), np.log2(e.most) / 3
    return np.asarray(_signs(rng, shape) * 2.0 ** rng.uniform(low, high, shape))


def _midway(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    """Numbers midway between two of fewer digits, and beside such: they are rounded up or down by
    a digit that a dtype in between does not have."""
    digits = 2.0 ** rng.choice((3, 7, 10, 23), shape)
    ties = 1 + (rng.integers(0, 8, shape) + 0.5) / digits
    return np.asarray(_signs(rng, shape) * (ties + e.eps * rng.choice((-1, 0, 1), shape)))


def near(rng: np.random.Generator, other: Array) -> Array:
    """Numbers beside those of another tensor, all with its sign or all with the other: what is left
    of a sum of both has few digits."""
    apart = 2.0 ** -rng.uniform(4, 20)
    sign = rng.choice((-1.0, 1.0))
    held = other.astype(np.float64) * sign * (1 + apart * rng.normal(size=other.shape))
    return np.asarray(held.astype(other.dtype))


def _end_of_exponentials(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Where those of e (above 88.7) and, in one draw of two, those of 2 (128) end in float32."""
    low, high = ((85.0, 100.0), (125.0, 140.0))[int(rng.random() < 0.5)]
    return rng.uniform(low, high, shape)


def _one_hot(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    out = np.zeros(shape)
    if out.size:
        out.reshape(-1)[int(rng.integers(out.size))] = rng.choice((1.0, -1.0, 3.0))
    return out


def _sorted(rng: np.random.Generator, shape: tuple[int, ...], step: int) -> Array:
    drawn = np.sort(rng.normal(size=int(np.prod(shape))))[::step]
    return np.asarray(drawn.reshape(shape))


def _dominant(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    """Matrices far from singular, positive definite, and symmetric in one draw of two."""
    x = rng.normal(size=shape)
    if len(shape) < 2 or shape[-1] != shape[-2]:
        return x
    x = x / 2 / max(1, shape[-1])
    if rng.random() < 0.5:
        x = (x + np.swapaxes(x, -1, -2)) / 2
    return np.asarray(x + np.eye(shape[-1]) * rng.integers(1, 4, shape[-1]))


def _equal(rng: np.random.Generator, shape: tuple[int, ...], marks: Landmarks, e: Ends) -> Array:
    return np.full(shape, _chosen(rng, np.append(around(marks), (2.0, -3.0)), ()))


def _with(values: Sequence[float], share: float) -> _Floats:
    def draw(rng: np.random.Generator, shape: tuple[int, ...], m: Landmarks, e: Ends) -> Array:
        usual = rng.normal(size=shape)
        chosen = share if usual.size > 1 else 1.0  # the only number is one of these
        return np.where(rng.random(shape) < chosen, rng.choice(np.asarray(values), shape), usual)

    return draw


_FLOATS: Mapping[str, _Floats] = {
    "normal": lambda rng, shape, m, e: rng.normal(size=shape),
    "unit": lambda rng, shape, m, e: rng.uniform(0.1, 0.9, shape),
    "tens": lambda rng, shape, m, e: np.clip(rng.normal(size=shape) * 40, -100, 100),
    "high": lambda rng, shape, m, e: _end_of_exponentials(rng, shape),
    "low": lambda rng, shape, m, e: -_end_of_exponentials(rng, shape),
    "tiny": _tiny,
    "magnitudes": lambda rng, shape, m, e: (
        rng.normal(size=shape) * 10.0 ** rng.integers(-3, 4, shape)
    ),
    "scales": _scales,
    "near": lambda rng, shape, m, e: rng.normal(size=shape),
    "midway": _midway,
    "around": lambda rng, shape, m, e: _chosen(rng, around(m), shape),
    "beyond": lambda rng, shape, m, e: _chosen(rng, beyond(m), shape),
    "small": _small,
    "ties": _pick(_FEW),
    "halves": lambda rng, shape, m, e: rng.integers(-7, 8, shape) / 2,
    "equal": _equal,
    "one-hot": _one_hot,
    "dominant": _dominant,
    "rising": lambda rng, shape, m, e: _sorted(rng, shape, 1),
    "falling": lambda rng, shape, m, e: _sorted(rng, shape, -1),
    "zeros": _pick((0.0, -0.0, 0.0, 1.0)),
    "extremes": lambda rng, shape, m, e: _chosen(rng, np.asarray(e.values), shape),
    "pool": lambda rng, shape, m, e: _chosen(rng, _special(m, e), shape),
    "infinite": _with((np.inf, -np.inf, 0.0), 0.4),
    "below": _with((-np.inf,), 0.6),
    "above": _with((np.inf,), 0.6),
    "nan": _with((np.nan, 0.0), 0.4),
}


def _integers(
    family: str,
    rng: np.random.Generator,
    shape: tuple[int, ...],
    marks: Landmarks,
    dtype: np.dtype[Any],
) -> Array:
    low, high = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
    width = 8 * dtype.itemsize

    def some(values: Iterable[float], shape: tuple[int, ...] = shape) -> Array:
        held = sorted({int(v) for v in values if low <= v <= high})
        return _chosen(rng, np.asarray(held, dtype), shape)

    whole = [int(m) for m in marks if abs(m) <= 2.0**63]
    nearby = [m + d for m in (*whole, *(-m for m in whole)) for d in (-2, -1, 0, 1, 2)]
    if family in ("unit", "small", "ties", "high", "low", "tiny"):
        return some((0, 1, 2) if family != "ties" else (-1, 0, 1, 2))
    if family in ("tens", "rising", "falling"):
        drawn = rng.integers(max(low, -20), min(high, 20), shape, dtype=dtype, endpoint=True)
        if family == "tens":
            return drawn
        step = 1 if family == "rising" else -1
        return np.asarray(np.sort(drawn.reshape(-1))[::step].reshape(shape))
    if family == "around":
        return some(nearby)
    if family == "beyond":
        return some([*(3 * m for m in nearby), *(2**k for k in range(width)), 0])
    if family == "halves":
        return some((*range(-3, 10), width - 1, width, width + 1, 2 * width))
    if family == "equal":
        return np.full(shape, some((*nearby, low, high, 2), ()))
    if family in ("one-hot", "zeros"):
        out = np.zeros(shape, dtype)
        if out.size and family == "one-hot":
            out.reshape(-1)[int(rng.integers(out.size))] = rng.choice(
                np.asarray([v for v in (1, -1, high, low) if v >= low], dtype)
            )
        return out
    if family in ("extremes", "infinite"):
        return some(ends(dtype.name).values)
    if family == "pool":
        return some([*ends(dtype.name).values, *nearby, *range(-9, 10), width - 1, width, 100])
    return np.asarray(rng.integers(low, high, shape, dtype=dtype, endpoint=True))


def _flags(family: str, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    if family == "zeros":
        return np.zeros(shape, bool)
    if family == "equal":
        return np.full(shape, bool(rng.random() < 0.5))
    if family in ("unit", "high"):
        return np.ones(shape, bool)
    if family == "one-hot":
        return np.asarray(_one_hot(rng, shape, (), Ends((), 0, 0)) != 0)
    return np.asarray(rng.random(shape) < 0.5)


def drawn(
    t: TensorType, family: str, rng: np.random.Generator, marks: Landmarks, as_dtype: str
) -> Array:
    """Values of a tensor of type `t` out of a family, held in `as_dtype`.

    They are values of t's own dtype even where that one is wider. Raises TemplateError for dtypes
    of which there are no values.
    """
    what, own = kind(t.dtype), t.dtype
    if what == "bool":
        return _flags(family, rng, t.shape)
    if what in ("int", "uint"):
        return _integers(family, rng, t.shape, marks, numpy_dtype(own))
    if what == "complex":
        part = "float32" if own == "complex64" else "float64"
        finite = "normal" if family in MASKS or family == "extremes" else family
        real, imaginary = (
            _FLOATS[finite](rng, t.shape, marks, ends(part)).astype(part) for _ in range(2)
        )
        return np.asarray(real + 1j * imaginary).astype(numpy_dtype(as_dtype))
    if t.dtype == "key<fry>":
        keys = np.zeros(t.shape, numpy_dtype(own))
        keys["words"] = rng.integers(0, 2**32, (*t.shape, 2), np.uint32)
        return keys
    if what != "float":
        raise TemplateError(f"no values of dtype {t.dtype} can be drawn")
    limits = ends(own)
    values = np.asarray(_FLOATS[family](rng, t.shape, marks, limits), np.float64)
    if family not in MASKS:
        values = np.clip(values, limits.least, limits.most)
    held = values.astype(numpy_dtype(own))
    return held if as_dtype == own else held.astype(numpy_dtype(as_dtype))


def mixtures(families: Sequence[str], operands: int, turn: int, most: int) -> list[tuple[str, ...]]:
    """Families for several operands at once, a different one for each; other ones every turn.

    Over the turns every operand meets every family beside every family of the others.
    """
    n = len(families)
    out = []
    for k in range(most if operands > 1 else 0):
        at = turn * most + k
        # The pair (at, at // n) counts through all pairs; further operands step at other paces.
        out.append(
            tuple(families[(at * (p + 1) + (at // n) * p * p + p) % n] for p in range(operands))
        )
    return out
