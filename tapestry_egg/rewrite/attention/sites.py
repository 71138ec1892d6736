"""Softmaxes of scores, and the products that use them: what attention is, forward and backward.

From every exponential its elements are followed through views and arithmetic to the products that
read them. What such a product reads is then written as a sum of products: with weights p = e / Σ e

    out = p·v      dv = pᵀ·g      dq = (p∘(g·vᵀ) - p Σ p∘(g·vᵀ))·k      dk = (…)ᵀ·q

up to factors, masks that the scores have anyway, and the order of dims.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.metakernels import registry

from .sums import ARITHMETIC, Leaf, Powers, Reader, Sum, leaf, over, power, same, times
from .views import Atom, Dims, Views, atoms_of

# Scores: what stands under an exponential, as a product, a factor, masks and additions.


# Operations one behind the other that are read; told where scores have more.
_MOST_DEPTH = 16
#: A number put where a mask fails that is no greater vanishes beside scores, whatever is added to
#: those of a row.
_VANISHES = -1e9


@dataclass(frozen=True)
class Scores:
    """scale·(left·right) + Σ additions, where every mask holds.

    `dims` are those of the product, `left` and `right` its operands as they are read, with their
    dims. Masks are (value, dims, whether it holds where keys are seen, what is put elsewhere),
    additions (value, dims, factor). Scores are `shifted` if the program adds to all of a row what
    is not told here, which only a number that a mask puts elsewhere could tell.
    """

    product: Operation
    dims: Dims
    left: tuple[int, Dims]
    right: tuple[int, Dims]
    scale: float = 1.0
    masks: tuple[tuple[int, Dims, bool, float], ...] = ()
    additions: tuple[tuple[int, Dims, float], ...] = ()
    shifted: bool = False


def at_default(views: Views, op: Operation) -> bool:
    """Whether a product asks for no more than fused attention gives: default precision."""
    sig = views.signature(op)
    return not sig.precision or sig.input_types[0].dtype != "float32"


def scores_of(
    views: Views, v: int, dims: Dims, keys: tuple[Atom, ...], depth: int = 0
) -> Scores | None:
    """What the scores `v` are made of; what does not vary along `keys` is not told, as a softmax
    does not see it. None where they are something else."""
    v, dims = views.see(v, dims)
    op = views.maker.get(v)
    if op is not None and depth > _MOST_DEPTH:
        views.ended, op = True, None
    if op is None:
        return None
    means = registry.meaning(op.kernel)

    def of(u: int) -> Dims:
        return views.operand(u, dims)

    def varies(u: int) -> bool:
        return bool(set(atoms_of(views.see(u, of(u))[1])) & set(keys))

    if views.is_product(op):
        return _product(views, op, dims) if at_default(views, op) else None
    if means in ("product", "quotient"):
        a, b = op.inputs
        factor = views.splat(b)
        if factor is None and means == "product":
            a, b = b, a
            factor = views.splat(b)
        if not factor:
            return None
        inner = scores_of(views, a, of(a), keys, depth + 1)
        return inner and scaled(inner, 1.0 / factor if means == "quotient" else factor)
    if means == "difference" and not varies(op.inputs[1]):
        inner = scores_of(views, op.inputs[0], of(op.inputs[0]), keys, depth + 1)
        return inner and replace(inner, shifted=True)
    if means in ("sum", "difference"):
        for k in (0, 1) if means == "sum" else (0,):
            a, b = op.inputs[k], op.inputs[1 - k]
            inner = scores_of(views, a, of(a), keys, depth + 1)
            if inner is None:
                continue
            if inner.masks and varies(b):  # what is put where a mask fails would be added to
                return None
            if not varies(b):
                return replace(inner, shifted=True)
            added = (*views.see(b, of(b)), -1.0 if means == "difference" else 1.0)
            return replace(inner, additions=(*inner.additions, added))
        return None
    if means == "choice" and len(op.inputs) == 3:
        mask, otherwise, chosen = op.inputs
        for holds, inner_value, fill in ((True, chosen, otherwise), (False, otherwise, chosen)):
            put = views.splat(fill)
            if put is None:
                continue
            inner = scores_of(views, inner_value, of(inner_value), keys, depth + 1)
            if inner is None or (inner.shifted and put > _VANISHES):
                return None
            which = views.see(mask, of(mask))
            return replace(inner, masks=(*inner.masks, (*which, holds, put)))
    return None


def scaled(scores: Scores, factor: float) -> Scores:
    """The scores times a number."""
    return replace(
        scores,
        scale=scores.scale * factor,
        masks=tuple((v, d, h, put * factor) for v, d, h, put in scores.masks),
        additions=tuple((v, d, x * factor) for v, d, x in scores.additions),
    )


def _product(views: Views, op: Operation, dims: Dims) -> Scores:
    left, right = operands_of(views, op, dims)
    return Scores(op, dims, (op.inputs[0], left), (op.inputs[1], right))


def operands_of(views: Views, op: Operation, dims: Dims) -> tuple[Dims, Dims]:
    """The dims of the operands of a product whose result has `dims`; what it contracts is new.

    Raises ValueError where it cannot be read."""
    sig = views.signature(op)
    left, right = views.passed(sig, 2, dims, (0, 1), ("sum", op.outputs[0]))
    if left is None or right is None:
        raise ValueError(f"{op.kernel} is no plain product")
    return left, right


def result_of(
    views: Views, op: Operation, known: Dims, which: int
) -> tuple[Dims, tuple[Dims, Dims]]:
    """The dims of a product's result and of its operands, where those of operand number `which` are
    known; what only the other one has is new. Raises ValueError where it cannot be read."""
    sig = views.signature(op)
    out, other = views.passed(sig, which, known, (2, 1 - which), ("free", op.outputs[0]))
    if out is None or other is None:
        raise ValueError(f"{op.kernel} is no plain product")
    return out, (known, other) if which == 0 else (other, known)


@dataclass(frozen=True)
class Use:
    """A product that reads weights, or what their derivative makes of them: the dims of its result,
    of that operand, and of the other one, and the factor before it."""

    product: Operation
    dims: Dims
    other: int
    other_dims: Dims
    factor: float = 1.0


@dataclass
class Site:
    """A softmax over `keys` of scores, with its uses. `derivative` is the product g·vᵀ that the
    backward pass reads: its operand with the keys, then the one with the rows."""

    keys: tuple[Atom, ...]
    scores: Scores
    forward: list[Use] = field(default_factory=list)
    by_values: list[Use] = field(default_factory=list)
    by_rows: list[Use] = field(default_factory=list)  # gives dq
    by_keys: list[Use] = field(default_factory=list)  # gives dk
    derivative: tuple[tuple[int, Dims], tuple[int, Dims]] | None = None


def sites(views: Views) -> Iterator[Operation]:
    """The exponentials that may be those of a softmax."""
    for op in views.graph.operations:
        if (
            registry.meaning(op.kernel) == "exponential"
            and views.graph.values[op.outputs[0]].rank >= 2
        ):
            yield op


def read_site(views: Views, op: Operation) -> Site | None:
    """What an exponential is the softmax of, and who uses it. Raises views.Split where atoms must
    be finer."""
    e = op.outputs[0]
    root = views.fresh(("exp", e), views.graph.values[e].shape)
    labels, products, sums = _followed(views, e, root)
    if not products:
        return None
    for keys in sums:
        scores = scores_of(views, op.inputs[0], root, keys)
        if scores is None:
            continue
        site = Site(keys, scores)
        _Uses(views, site, (e, root)).read(products, labels)
        if site.forward or site.by_rows or site.by_keys:
            return site
    return None


def _followed(
    views: Views, e: int, root: Dims
) -> tuple[dict[int, Dims], list[Operation], list[tuple[Atom, ...]]]:
    """The values with all dims of e that are made of it, the products that read one of them, and
    over which of its atoms sums of e itself run."""
    labels, stack = {e: root}, [e]
    products: dict[int, Operation] = {}
    sums: dict[tuple[Atom, ...], None] = {}
    every = set(atoms_of(root))
    while stack:
        v = stack.pop()
        for reader in views.readers.get(v, ()):
            if views.is_product(reader):
                if at_default(views, reader):
                    products[reader.outputs[0]] = reader
                continue
            axes = views.summed(reader)
            if axes is not None and views.see(v, labels[v]) == (e, root):
                sums[tuple(a for k in axes for a in labels[v][k])] = None
            made = _made_of(views, reader, v, labels[v])
            if made is not None and set(atoms_of(made)) == every:
                (out,) = reader.outputs
                if out not in labels:
                    labels[out] = made
                    stack.append(out)
    return labels, list(products.values()), [s for s in sums if s]


def _made_of(views: Views, op: Operation, v: int, dims: Dims) -> Dims | None:
    """The dims of what an operation makes of a value with these dims, element by element or as a
    view; None for any other."""
    if len(op.outputs) != 1:
        return None
    if registry.meaning(op.kernel) not in ARITHMETIC:
        return views.outside(op, dims) if op.inputs[0] == v else None
    values = views.graph.values
    return dims if values[op.outputs[0]].shape == values[v].shape else None


class _Uses:
    """Sorts the products that read a softmax's elements by what they compute."""

    def __init__(self, views: Views, site: Site, e: tuple[int, Dims]) -> None:
        self.views, self.site = views, site
        self.keys = site.keys
        self.reader = Reader(views, site.keys)
        self.e = leaf(("value", *e))
        below = power(over(site.keys, self.e), -1)
        assert below is not None
        self.weights = times(self.e, below)

    def read(self, products: list[Operation], labels: dict[int, Dims]) -> None:
        for op in products:
            for which in (0, 1):
                if op.inputs[which] in labels:
                    self._use(op, which, labels[op.inputs[which]])
                    break

    def _use(self, op: Operation, which: int, dims: Dims) -> None:
        found = self.reader.of(op.inputs[which], dims)
        out, sides = result_of(self.views, op, dims, which)
        use = Use(op, out, op.inputs[1 - which], sides[1 - which])
        gone = set(atoms_of(dims)) - set(atoms_of(out))
        if same(found, self.weights):
            if gone == set(self.keys):
                self.site.forward.append(use)
            elif gone and not gone & set(self.keys):
                self.site.by_values.append(use)
            return
        factor = self._derivative(found)
        if factor is None:
            return
        use = Use(op, out, use.other, use.other_dims, factor)
        if gone == set(self.keys):
            self.site.by_rows.append(use)
        elif gone and not gone & set(self.keys):
            self.site.by_keys.append(use)

    def _derivative(self, found: Sum) -> float | None:
        """The factor c where `found` is c (p∘d - p Σ p∘d) for a product d = g·vᵀ; what is masked
        of it must be masked in the scores."""
        masks = {("mask" if m[2] else "unmask", m[0], m[1]) for m in self.site.scores.masks}
        general: dict[Powers, float] = {}
        for powers, x in found.items():
            general[frozenset((n, k) for n, k in powers if n not in masks)] = x
        if len(general) != 2 or len(found) != 2:
            return None
        own = {n for powers in self.weights for n, _ in powers}
        for powers, x in general.items():
            rest = [(n, k) for n, k in powers if n not in own]
            if len(rest) != 1 or rest[0][1] != 1 or rest[0][0][0] != "value":
                continue
            d: Sum = leaf(rest[0][0])
            weighted = times(self.weights, d)
            mean = times(self.weights, over(self.keys, weighted))
            wanted = {**times(weighted, {frozenset(): x}), **times(mean, {frozenset(): -x})}
            if same(general, wanted) and self._of_values(rest[0][0]):
                return x
        return None

    def _of_values(self, name: Leaf) -> bool:
        """Whether d is a product of something with the keys and something with the rows; noted."""
        _, v, dims = name
        op = self.views.maker.get(v)
        if op is None or not self.views.is_product(op):
            return False
        pair = tuple(zip(op.inputs, operands_of(self.views, op, dims), strict=True))
        with_keys = [set(self.keys) <= set(atoms_of(d)) for _, d in pair]
        if with_keys == [True, False]:
            found = pair[0], pair[1]
        elif with_keys == [False, True]:
            found = pair[1], pair[0]
        else:
            return False
        if self.site.derivative is None:
            self.site.derivative = found
        return self.site.derivative == found
