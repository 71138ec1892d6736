"""What expressions of the template language compute with, and the functions they may call."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import itemsize

from .signature import Polynomial, Role

Ints = tuple[int, ...]

#: No index space and no tensor of a template has more dims.
MOST_DIMS = 256
#: Nor longer ones: this many positions are still exact in every kind of number used.
MOST_ELEMENTS = 1 << 53


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor dim of a projection: start = coefficients · index + offset, and an extent."""

    coefficients: Ints
    offset: int = 0
    extent: int = 1

    def __add__(self, other: object) -> Row:
        if isinstance(other, int):
            return self._point(self.coefficients, self.offset + other)
        if isinstance(other, Row):
            other._point(other.coefficients, other.offset)
            both = zip(self.coefficients, other.coefficients, strict=True)
            return self._point(tuple(a + b for a, b in both), self.offset + other.offset)
        return NotImplemented

    __radd__ = __add__

    def __mul__(self, factor: object) -> Row:
        if not isinstance(factor, int):
            return NotImplemented
        return self._point(tuple(a * factor for a in self.coefficients), self.offset * factor)

    __rmul__ = __mul__

    def __neg__(self) -> Row:
        return self * -1

    def __sub__(self, other: object) -> Row:
        if isinstance(other, Row | int):
            return self + -other
        return NotImplemented

    def __rsub__(self, other: object) -> Row:
        return -self + other

    def _point(self, coefficients: Ints, offset: int) -> Row:
        if self.extent != 1:
            raise TypeError("`:+` must come last: a box cannot be moved or scaled")
        return Row(coefficients, offset)


@dataclass(frozen=True, slots=True)
class Cost:
    """A polynomial over index extents while it is being written down."""

    terms: Polynomial

    def __add__(self, other: object) -> Cost:
        if isinstance(other, int | float):
            other = Cost(((float(other), ()),))
        if isinstance(other, Cost):
            return Cost(self.terms + other.terms)
        return NotImplemented

    __radd__ = __add__

    def __mul__(self, other: object) -> Cost:
        if isinstance(other, int | float):
            return Cost(tuple((c * other, dims) for c, dims in self.terms))
        if isinstance(other, Cost):
            return Cost(
                tuple((a * b, (*d, *e)) for a, d in self.terms for b, e in other.terms),
            )
        return NotImplemented

    __rmul__ = __mul__

    def __getitem__(self, places: tuple[int, ...] | int) -> Cost:
        """The extents of some dims of a group, in the place of all of them."""
        ((one, dims),) = self.terms
        chosen = places if isinstance(places, tuple) else (places,)
        return Cost(((one, tuple(dims[k] for k in chosen)),))


@dataclass(frozen=True, slots=True)
class RoleOf:
    """A role of an index dim that names a monoid, as `reduce(sum)` evaluates to."""

    role: Role
    monoid: str


def is_extent(value: Any) -> bool:
    """Whether a value of the language is an integer from 0 to `MOST_ELEMENTS`."""
    if type(value) is int:
        return 0 <= value <= MOST_ELEMENTS
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and bool(0 <= value <= MOST_ELEMENTS)


def digits(source: Sequence[int], target: Sequence[int]) -> dict[str, Any]:
    """The common mixed-radix digits of two shapes of equal size, major to minor.

    `sizes` and `roles` are those of the digits. `source` and `target` hold, per dim of that shape,
    (coefficients over the digits, extent): the dim starts at coefficients · digits. Where the two
    shapes have no further common factor, the elements up to the next common boundary are one
    `whole` digit that both sides cover with full extents. Raises ValueError when sizes differ.
    """
    if prod(source) != prod(target):
        raise ValueError(f"shapes {tuple(source)} and {tuple(target)} differ in size")
    sizes: list[int] = []
    roles: list[str] = []
    # Per dim: the digits that it is made of, and the extent that is left below them.
    made: tuple[list[list[int]], list[list[int]]] = ([[] for _ in source], [[] for _ in target])
    left = (list(source), list(target))
    if prod(source) > 0:
        at = [0, 0]
        while True:
            for side in (0, 1):
                while at[side] < len(left[side]) and left[side][at[side]] == 1:
                    at[side] += 1
            i, j = at
            if i == len(left[0]):
                break
            common = gcd(left[0][i], left[1][j])
            if common > 1:
                made[0][i].append(len(sizes))
                made[1][j].append(len(sizes))
                left[0][i] //= common
                left[1][j] //= common
                sizes.append(common)
                roles.append("map")
                continue
            count = [left[0][i], left[1][j]]
            while count[0] != count[1]:
                short = int(count[0] > count[1])
                at[short] += 1
                count[short] *= left[short][at[short]]
            sizes.append(count[0])
            roles.append("whole")
            at = [at[0] + 1, at[1] + 1]

    def rows(side: int) -> tuple[tuple[Ints, int], ...]:
        out = []
        for own, extent in zip(made[side], left[side], strict=True):
            coefficients = [0] * len(sizes)
            place = extent
            for d in reversed(own):
                coefficients[d] = place
                place *= sizes[d]
            out.append((tuple(coefficients), extent))
        return tuple(out)

    return {
        "sizes": tuple(sizes),
        "roles": tuple(roles),
        "source": rows(0),
        "target": rows(1),
    }


def _complex(dtype: str) -> str:
    if kind(dtype) == "complex":
        return dtype
    return "complex128" if dtype == "float64" else "complex64"


def _real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


def aligned(shape: Sequence[int], sizes: Sequence[int], rows: Sequence[Row]) -> tuple[Row, ...]:
    """Rows of an operand under broadcasting, from the last dim on: dims of the full size follow the
    index, dims of size 1 stay at 0, and leading index dims may have no row."""
    if len(shape) > len(sizes):
        raise ValueError(f"rank {len(shape)} does not align with {len(sizes)} index dims")
    out = []
    lead = len(sizes) - len(shape)
    for n, size, row in zip(shape, sizes[lead:], rows[lead:], strict=True):
        if n not in (size, 1):
            raise ValueError(f"extent {n} does not align with an index dim of {size}")
        out.append(row if n == size else Row((0,) * len(row.coefficients)))
    return tuple(out)


def _broadcast(*shapes: Sequence[Any]) -> Ints:
    """The common shape of several, or of a list of them, aligned at their last dims."""
    if len(shapes) == 1 and any(isinstance(s, tuple) for s in shapes[0]):
        shapes = tuple(shapes[0])
    rank = max(map(len, shapes), default=0)
    out = []
    for extents in zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True):
        sizes = {n for n in extents if n != 1} or {1}
        if len(sizes) > 1:
            raise ValueError(f"extents {extents} do not broadcast")
        out.append(sizes.pop())
    return tuple(out)


def _broadcastable(*shapes: Sequence[Any]) -> bool:
    try:
        _broadcast(*shapes)
    except ValueError:
        return False
    return True


def _dot(coefficients: Sequence[int], rows: Sequence[Any]) -> Any:
    if len(coefficients) != len(rows):
        raise ValueError(f"{len(coefficients)} coefficients for {len(rows)} dims")
    total: Any = 0
    for c, row in zip(coefficients, rows, strict=True):
        if c:  # adding zeros would be right, and slow
            total = total + row * c
    return total


def _arrange(positions: Sequence[int], values: Sequence[Any]) -> tuple[Any, ...]:
    placed = dict(zip(positions, values, strict=True))
    if sorted(placed) != list(range(len(placed))) or len(placed) != len(positions):
        raise ValueError(f"positions {tuple(positions)} are not 0..{len(positions) - 1}")
    return tuple(placed[k] for k in range(len(placed)))


def _without(values: Sequence[Any], positions: Iterable[int]) -> tuple[Any, ...]:
    drop = {p + len(values) if p < 0 else p for p in positions}
    return tuple(v for k, v in enumerate(values) if k not in drop)


def _index(values: Sequence[Any], value: Any) -> int:
    return tuple(values).index(value)


def _prefix(lists: Sequence[Sequence[Any]]) -> int:
    """How many leading entries all lists have in common."""
    n = 0
    for entries in zip(*lists, strict=False):
        if any(e != entries[0] for e in entries):
            break
        n += 1
    return n


def _range(*ends: int) -> Ints:
    return tuple(_bounded(range(*ends)))


def _repeated(value: int, count: int) -> Ints:
    return (value,) * len(_bounded(range(count)))


def _bounded(places: range) -> range:
    if len(places) > _MOST_ENTRIES:
        raise ValueError(f"a list of {len(places)} entries")
    return places


_MOST_ENTRIES = 1 << 16  # of a list that a function makes up


def _fail(message: str) -> Any:
    raise ValueError(message)


def _record(name: str, *fields: Any) -> dict[str, Any]:
    """A parameter of several fields, as `tracing/codec.py` has it: names and values in turn."""
    if len(fields) % 2:
        raise ValueError("record(NAME, field, value, ...) has a name for every value")
    return {"$class": name, **dict(zip(fields[::2], fields[1::2], strict=True))}


def _numbers(values: tuple[Any, ...]) -> Any:
    return values[0] if len(values) == 1 and isinstance(values[0], tuple) else values


def _bits(dtype: str) -> int:
    """Bits of one element; integers of less than a byte say how many they have."""
    digits = dtype.removeprefix("u").removeprefix("int")
    return (
        int(digits)
        if dtype.endswith(f"int{digits}") and digits.isdecimal()
        else 8 * itemsize(dtype)
    )


def _greatest_prime(n: int) -> int:
    """The greatest prime factor of a number; 1 of 1 and of less."""
    if type(n) is not int or n.bit_length() > 53:
        raise TypeError(f"{n!r} is not a size")
    found, p = 1, 2
    while p * p <= n:
        if n % p == 0:
            found, n = p, n // p
        else:
            p += 1 if p == 2 else 2
    return max(found, n)


def _method(name: str) -> Callable[..., Any]:
    """The function that calls a method of its first argument with the others."""
    return lambda draw, *given: getattr(draw, name)(*given)


#: All that an expression can call. Every function is pure and total up to ValueError/TypeError.
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": abs,
    "aligned": aligned,
    "all": all,
    "any": any,
    "arrange": _arrange,
    "bits": _bits,
    "broadcast": _broadcast,
    "broadcastable": _broadcastable,
    "complex": _complex,
    "digits": digits,
    "dot": _dot,
    "enumerate": lambda values: tuple(enumerate(values)),
    "equal": lambda values: all(v == values[0] for v in values),
    "fail": _fail,
    "gcd": gcd,
    "get": lambda mapping, key, default=None: mapping.get(key, default),
    "greatest_prime": _greatest_prime,
    "index": _index,
    "integers": lambda values: all(type(v) is int for v in values),
    "kind": kind,
    "len": len,
    "log2": lambda n: max(1, (n - 1).bit_length()),
    "max": lambda *values: max(_numbers(values)),
    "min": lambda *values: min(_numbers(values)),
    "ones": lambda count: _repeated(1, count),
    "prefix": _prefix,
    "prod": prod,
    "range": _range,
    "real": _real,
    "record": _record,
    "reduce": lambda monoid: RoleOf("reduce", monoid),
    "reversed": lambda values: tuple(reversed(values)),
    "scan": lambda monoid: RoleOf("scan", monoid),
    "join": lambda monoid: RoleOf("join", monoid),
    "sorted": lambda values: tuple(sorted(values)),
    "sum": sum,
    "without": _without,
    "zeros": lambda count: _repeated(0, count),
    "zip": lambda *lists: tuple(zip(*lists, strict=True)),
}
#: What `samples:` can call beside these: methods of what draws there (`rules/verify/samples.py`).
DRAWN: Mapping[str, Callable[..., Any]] = {
    name: _method(name)
    for name in (
        *("akin", "between", "chance", "dtype_in", "exactly", "extent", "landmarks", "one"),
        *("pairing", "regrouped", "shape", "shuffled", "some", "within"),
    )
}
