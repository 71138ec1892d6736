"""States of a reduction or a scan that devices gather and combine at once, inside `shard_map`.

A device runs the kernel on its block of a dim of the role `scan` or `join`, gathers the states of
all blocks in their order, and combines them with its own result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tapestry_egg.monoids import Monoid, monoid
from tapestry_egg.monoids.fold import State, combine, fold, unwrap, wrap, zero
from tapestry_egg.plans.collectives import apply, block_number
from tapestry_egg.plans.exchanges import states_combined
from tapestry_egg.plans.plan import Change

from .spellings import few_largest

if TYPE_CHECKING:
    import jax

    from .kernels import Call


def after_others(call: Call, made: list[jax.Array]) -> list[jax.Array]:
    """The results of a kernel on a device's block, with what the blocks before it come to where a
    cumulative dim is cut: the blocks after it, of a scan in reverse."""
    for d, dim in enumerate(call.signature.index):
        if dim.role == "scan" and call.block.is_cut(d):
            made = [_scanned(call, d, q, x) for q, x in enumerate(made)]
    return made


def _scanned(call: Call, d: int, q: int, x: jax.Array) -> jax.Array:
    import jax.numpy as jnp
    from jax import lax

    rule = monoid(call.signature.index[d].monoid)
    (part,) = rule.state
    (k,) = (k for k, row in enumerate(call.signature.outputs[q].matrix) if row[d])
    reverse, n = bool(call.whole.get("reverse")), x.shape[k]
    total = lax.slice_in_dim(x, 0, 1, axis=k) if reverse else lax.slice_in_dim(x, n - 1, n, axis=k)
    totals = _gathered(call, d, total, k)
    number = lax.broadcasted_iota(jnp.int32, totals.shape, k)
    here = block_number(call.block.cuts[d], call.block.mesh)
    others = number > here if reverse else number < here
    totals = jnp.where(others, totals, zero(rule, x.dtype, xp=jnp)[part.name])
    before = {part.name: jnp.expand_dims(fold(rule, {part.name: totals}, k, xp=jnp)[part.name], k)}
    own = {part.name: x}
    return combine(rule, *((own, before) if reverse else (before, own)), xp=jnp)[part.name]


def _first_place(call: Call) -> list[jax.Array]:
    """Of `argmax` and `argmin`: the place in the whole dim. Of its block a device makes the state,
    in one pass, by the monoid's own formulas."""
    import jax.numpy as jnp
    from jax import lax

    d = _joined(call)
    if d is None:
        return call.bind(*call.operands)
    (x,), (axis,) = call.operands, call.params["axes"]
    mesh, axes = call.block.mesh, call.block.cuts[d]
    rule = monoid(call.signature.index[d].monoid)
    dtype = jnp.dtype(call.params["index_dtype"])
    places = lax.broadcasted_iota(dtype, x.shape, axis) + jnp.asarray(call.block.offset(d), dtype)
    elements = wrap(rule, x, places, xp=jnp)
    names = tuple(elements)
    neutral = zero(rule, {p.name: e.dtype for p, e in zip(rule.element, (x, places), strict=True)})

    def combined(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        made = combine(
            rule, dict(zip(names, a, strict=True)), dict(zip(names, b, strict=True)), jnp
        )
        return tuple(made[name] for name in names)

    own = lax.reduce(
        tuple(elements.values()), tuple(neutral[name] for name in names), combined, (axis,)
    )
    state = dict(zip(names, own, strict=True))
    k = next(e.scattered for e in states_combined(call.signature, call.block.cuts, mesh))
    if k is not None:
        ordered = [mesh.names[a] for a in axes if mesh.sizes[a] > 1]
        (part,) = unwrap(rule, _scattered(rule, state, ordered, k), xp=jnp).values()
        return [_gathered(call, d, part, k)]
    blocks = {name: _gathered(call, d, jnp.expand_dims(s, axis), axis) for name, s in state.items()}
    return list(unwrap(rule, fold(rule, blocks, axis, xp=jnp), xp=jnp).values())


def _scattered(rule: Monoid, state: State, axes: Sequence[str], k: int) -> State:
    """The states of the devices along some axes combined in their order, of which each device gets
    a block along dim k."""
    import jax.numpy as jnp
    from jax import lax

    names, blocks = tuple(axes), {}
    parts = lax.axis_size(names)
    for name, x in state.items():
        cut = x.reshape(*x.shape[:k], parts, x.shape[k] // parts, *x.shape[k + 1 :])
        blocks[name] = lax.all_to_all(cut, names, split_axis=k, concat_axis=k, tiled=True)
    return fold(rule, blocks, k, xp=jnp)


def _first_few(call: Call) -> list[jax.Array]:
    """Of `top_k`: the greatest of what is greatest in every block. Blocks are gathered in order, so
    that of equal elements those of lower places still come first."""
    import jax.numpy as jnp

    d = _joined(call)
    if d is None:
        return call.bind(*call.operands)
    (x,) = call.operands
    (axis,) = (k for k, row in enumerate(call.signature.inputs[0].matrix) if row[d])
    values, places = few_largest(call, x, min(call.params["k"], x.shape[axis]))
    places = places + jnp.asarray(call.block.offset(d), places.dtype)
    values, places = (_gathered(call, d, s, axis) for s in (values, places))
    best, which = few_largest(call, values, call.params["k"])
    return [best, jnp.take_along_axis(places, which, axis, mode="promise_in_bounds")]


def _joined(call: Call) -> int | None:
    """The cut index dim of the role `join`; None if none is cut."""
    index = enumerate(call.signature.index)
    return next((d for d, dim in index if dim.role == "join" and call.block.is_cut(d)), None)


def _gathered(call: Call, d: int, x: jax.Array, axis: int) -> jax.Array:
    """What all blocks of a cut index dim have, side by side along an axis, in their order."""
    block = call.block
    return apply(x, Change("all_gather", block.cuts[d], axis), block.mesh, call.platform)


#: Kernel -> its lowering on a block of a dim of the role `join`.
JOINED: Mapping[str, Callable[[Call], list[jax.Array]]] = {
    "argmax": _first_place,
    "argmin": _first_place,
    "top_k": _first_few,
}
