"""Scores: what stands under an exponential, as a product, a factor, masks and additions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry_egg.graph.blockgraph import Operation
from tapestry_egg.metakernels import registry

from .views import Atom, Dims, Views, atoms_of

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
