"""Values as sums of products: what elementwise arithmetic computes, whatever its spelling.

A *monomial* is a number times powers of leaves. A leaf is a stored value seen through views, a sum
over some atoms of another sum of products, or a mask (1 where it holds, else 0). Equal sums of
products are equal over the reals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import Meaning

from .views import Atom, Dims, Views, atoms_of

#: ("value", id, dims), ("sum", atoms, sum of products), ("mask", id, dims), ("unmask", id, dims)
Leaf = tuple[Any, ...]
#: Leaf -> its power.
Powers = frozenset[tuple[Leaf, int]]
#: Powers -> their number.
Sum = Mapping[Powers, float]

# What is read of a value: terms, and operations one behind the other. Attention has two terms, the
# longest spelling of `tests/rewrite/attention_spellings.py` far fewer operations; where there are
# more, the softmax is counted and told in the front's notes.
_MOST_TERMS = 8
_MOST_DEPTH = 24
_NONE: Powers = frozenset()
#: Rounding of numbers that are multiplied in another order.
_SAME = 1e-5


class Foreign(Exception):
    """A sum of products that is none of those that are looked for."""


class TooLarge(Foreign):
    """More terms, or more levels, than are read."""


def number(x: float) -> Sum:
    """A constant."""
    return {_NONE: x} if x else {}


def leaf(name: Leaf) -> Sum:
    """A leaf by itself."""
    return {frozenset(((name, 1),)): 1.0}


def free_atoms(name: Leaf) -> set[Atom]:
    """The atoms along which a leaf varies."""
    if name[0] != "sum":
        return set(atoms_of(name[2]))
    inside = {a for powers, _ in name[2] for x, _ in powers for a in free_atoms(x)}
    return inside - set(name[1])


def plus(a: Sum, b: Sum, sign: float = 1.0) -> Sum:
    """The sum of two, or with the sign -1 their difference."""
    out = dict(a)
    for powers, x in b.items():
        out[powers] = out.get(powers, 0.0) + sign * x
    return _small({k: x for k, x in out.items() if x})


def times(a: Sum, b: Sum) -> Sum:
    """The product of two."""
    out: dict[Powers, float] = {}
    for p, x in a.items():
        for q, y in b.items():
            key = _multiplied(p, q)
            out[key] = out.get(key, 0.0) + x * y
    return _small({k: x for k, x in out.items() if x})


def power(a: Sum, n: int) -> Sum | None:
    """A monomial to a power; None for longer sums."""
    if len(a) != 1:
        return None
    ((powers, x),) = a.items()
    if any(name[0] == "mask" for name, _ in powers) and n < 0:
        return None
    return {frozenset((name, k * n) for name, k in powers): x**n}


def over(atoms: Iterable[Atom], a: Sum) -> Sum:
    """The sum over atoms: what does not vary along them stands before it. Raises Foreign where
    nothing of a term does."""
    bound = tuple(sorted(set(atoms), key=repr))
    out: Sum = {}
    for powers, x in a.items():
        inside = frozenset((n, k) for n, k in powers if free_atoms(n) & set(bound))
        if not inside:
            raise Foreign
        made = leaf(("sum", bound, ((inside, 1.0),)))
        out = plus(out, times({powers - inside: x}, made))
    return out


def same(a: Sum, b: Sum) -> bool:
    """Whether two have the same monomials, with numbers equal up to rounding."""
    if a.keys() != b.keys():
        return False
    return all(abs(x - b[k]) <= _SAME * max(abs(x), abs(b[k])) for k, x in a.items())


def _multiplied(p: Powers, q: Powers) -> Powers:
    out = dict(p)
    for name, k in q:
        out[name] = 1 if name[0] in ("mask", "unmask") else out.get(name, 0) + k
    return frozenset((n, k) for n, k in out.items() if k)


def _small(a: dict[Powers, float]) -> Sum:
    if len(a) > _MOST_TERMS:
        raise TooLarge
    return a


class Reader:
    """Reads values of a graph as sums of products. Sums run over `keys`, wherever they stand."""

    def __init__(self, views: Views, keys: tuple[Atom, ...] = ()) -> None:
        self.views, self.graph, self.keys = views, views.graph, keys

    def of(self, v: int, dims: Dims, depth: int = 0) -> Sum:
        """The value as a sum of products of leaves."""
        if depth > _MOST_DEPTH:
            raise TooLarge
        at, inside = self.views.see(v, dims)
        constant = self.views.splat(at)
        if constant is not None:
            return number(constant)
        op = self.views.maker.get(at)
        made = None if op is None else self._made(op, inside, depth + 1)
        return leaf(("value", at, inside)) if made is None else made

    def _made(self, op: Any, dims: Dims, depth: int) -> Sum | None:
        read = ARITHMETIC.get(registry.meaning(op.kernel), Reader._summed)
        return read(self, op, dims, depth)

    def _both(self, op: Any, dims: Dims, depth: int) -> tuple[Sum, Sum]:
        a, b = (self.of(u, self.views.operand(u, dims), depth) for u in op.inputs)
        return a, b

    def _added(self, op: Any, dims: Dims, depth: int) -> Sum:
        return plus(*self._both(op, dims, depth))

    def _subtracted(self, op: Any, dims: Dims, depth: int) -> Sum:
        return plus(*self._both(op, dims, depth), -1.0)

    def _multiplied(self, op: Any, dims: Dims, depth: int) -> Sum:
        return times(*self._both(op, dims, depth))

    def _divided(self, op: Any, dims: Dims, depth: int) -> Sum | None:
        a, b = self._both(op, dims, depth)
        below = power(b, -1)
        return None if below is None else times(a, below)

    def _negated(self, op: Any, dims: Dims, depth: int) -> Sum:
        return times(self._first(op, dims, depth), number(-1.0))

    def _power(self, op: Any, dims: Dims, depth: int) -> Sum | None:
        return power(self._first(op, dims, depth), int(op.params.get("y", 2)))

    def _first(self, op: Any, dims: Dims, depth: int) -> Sum:
        return self.of(op.inputs[0], self.views.operand(op.inputs[0], dims), depth)

    def _selected(self, op: Any, dims: Dims, depth: int) -> Sum | None:
        if len(op.inputs) != 3:
            return None
        mask, otherwise, chosen = op.inputs
        which = self.views.see(mask, self.views.operand(mask, dims))
        if self.views.splat(otherwise) == 0.0:
            return times(
                leaf(("mask", *which)), self.of(chosen, self.views.operand(chosen, dims), depth)
            )
        if self.views.splat(chosen) == 0.0:
            return times(
                leaf(("unmask", *which)),
                self.of(otherwise, self.views.operand(otherwise, dims), depth),
            )
        return None

    def _summed(self, op: Any, dims: Dims, depth: int) -> Sum | None:
        axes = self.views.summed(op)
        if axes is None:
            return None
        source = self.graph.values[op.inputs[0]]
        size = 1
        for a in axes:
            size *= source.shape[a]
        total = 1
        for _, n in self.keys:
            total *= n
        if not self.keys or size != total or set(atoms_of(dims)) & set(self.keys):
            return None
        left, kept = list(self.keys), iter(dims)
        inner: list[tuple[Atom, ...]] = []
        for d in range(source.rank):
            if d not in axes:
                inner.append(next(kept))
                continue
            mine: list[Atom] = []
            n = 1
            while n < source.shape[d] and left:
                mine.append(left.pop(0))
                n *= mine[-1][1]
            if n != source.shape[d]:
                return None
            inner.append(tuple(mine))
        return over(self.keys, self.of(op.inputs[0], tuple(inner), depth))


#: What is read of values element by element, by what its kernel means.
ARITHMETIC: Mapping[Meaning, Callable[[Reader, Any, Dims, int], Sum | None]] = {
    "sum": Reader._added,
    "difference": Reader._subtracted,
    "product": Reader._multiplied,
    "quotient": Reader._divided,
    "negative": Reader._negated,
    "power": Reader._power,
    "choice": Reader._selected,
}
