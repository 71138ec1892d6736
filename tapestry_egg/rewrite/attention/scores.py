"""Scores: what stands under an exponential, as a product, a factor, masks and additions."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
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


def at_default(graph: BlockGraph, op: Operation) -> bool:
    """Whether a product asks for no more than fused attention gives: default precision."""
    types = [tuple(graph.values[v] for v in vs) for vs in (op.inputs, op.outputs)]
    asked = registry.signature_of(op, types[0], types[1]).precision
    return not asked or types[0][0].dtype != "float32"


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
    kernel = op.kernel

    def of(u: int) -> Dims:
        return views.operand(u, dims)

    def varies(u: int) -> bool:
        return bool(set(atoms_of(views.see(u, of(u))[1])) & set(keys))

    if kernel == "dot_general":
        return _product(views, op, dims) if at_default(views.graph, op) else None
    if kernel in ("mul", "div") and len(op.inputs) == 2:
        a, b = op.inputs
        factor = views.splat(b)
        if factor is None and kernel == "mul":
            a, b = b, a
            factor = views.splat(b)
        if not factor:
            return None
        inner = scores_of(views, a, of(a), keys, depth + 1)
        return inner and scaled(inner, 1.0 / factor if kernel == "div" else factor)
    if kernel == "sub" and not varies(op.inputs[1]):
        inner = scores_of(views, op.inputs[0], of(op.inputs[0]), keys, depth + 1)
        return inner and replace(inner, shifted=True)
    if kernel in ("add", "add_any", "sub"):
        for k in (0, 1) if kernel != "sub" else (0,):
            a, b = op.inputs[k], op.inputs[1 - k]
            inner = scores_of(views, a, of(a), keys, depth + 1)
            if inner is None:
                continue
            if inner.masks and varies(b):  # what is put where a mask fails would be added to
                return None
            if not varies(b):
                return replace(inner, shifted=True)
            added = (*views.see(b, of(b)), -1.0 if kernel == "sub" else 1.0)
            return replace(inner, additions=(*inner.additions, added))
        return None
    if kernel == "select_n" and len(op.inputs) == 3:
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
    """The dims of the operands of a product whose result has `dims`; what it contracts is new."""
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    ranks = [views.graph.values[u].rank for u in op.inputs]
    free = [
        [d for d in range(n) if d not in (*c, *b)]
        for n, c, b in zip(ranks, (lc, rc), (lb, rb), strict=True)
    ]
    shape = views.graph.values[op.inputs[0]].shape
    summed = views.fresh(("sum", op.outputs[0]), [shape[d] for d in lc])
    nb, nl = len(lb), len(free[0])
    sides = []
    for rank, c, b, f, first in (
        (ranks[0], lc, lb, free[0], nb),
        (ranks[1], rc, rb, free[1], nb + nl),
    ):
        at = {
            **{d: dims[k] for k, d in enumerate(b)},
            **{d: dims[first + k] for k, d in enumerate(f)},
            **{d: summed[k] for k, d in enumerate(c)},
        }
        sides.append(tuple(at[d] for d in range(rank)))
    return sides[0], sides[1]


def result_of(
    views: Views, op: Operation, known: Dims, which: int
) -> tuple[Dims, tuple[Dims, Dims]]:
    """The dims of a product's result and of its operands, where those of operand number `which` are
    known; what only the other one has is new."""
    (lc, rc), (lb, rb) = op.params["dimension_numbers"]
    mine, theirs = ((lc, lb), (rc, rb)) if which == 0 else ((rc, rb), (lc, lb))
    shape = views.graph.values[op.inputs[1 - which]].shape
    at = {e: known[d] for d, e in zip((*mine[0], *mine[1]), (*theirs[0], *theirs[1]), strict=True)}
    free = [e for e in range(len(shape)) if e not in at]
    new = views.fresh(("free", op.outputs[0]), [shape[e] for e in free])
    at.update(zip(free, new, strict=True))
    other = tuple(at[e] for e in range(len(shape)))
    kept = [known[d] for d in range(len(known)) if d not in (*mine[0], *mine[1])]
    batch = [known[d] for d in mine[1]]
    out = [*batch, *kept, *new] if which == 0 else [*batch, *new, *kept]
    return tuple(out), (known, other) if which == 0 else (other, known)
