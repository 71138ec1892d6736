"""States of monoids over the axes of a device mesh, inside `shard_map`: combined, or scattered.

Where a monoid has a mesh form, its states are combined by psum, pmax and pmin as
`monoids/monoids.yaml` says (logsumexp: pmax, rescale, psum). Else they are gathered, or exchanged,
and combined on every device in the order of the devices, so that monoids that do not commute are
right too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.monoids import Monoid
from tapestry_egg.monoids.fold import State, fold, over_mesh
from tapestry_egg.monoids.formula import MESH_FUNCTIONS, arithmetic

if TYPE_CHECKING:
    import jax


def all_reduce(monoid: Monoid, state: State, axes: Sequence[str], dtype: str) -> State:
    """The states of the devices along the mesh axes `axes` as one, on each of them.

    `dtype` is that of the (first part of the) elements. Raises MonoidError where the parts of the
    state are not those of the monoid.
    """
    import jax.numpy as jnp
    from jax import lax

    names = tuple(axes)
    if monoid.mesh is not None and kind(dtype) in monoid.mesh.kinds:
        return over_mesh(
            monoid,
            state,
            {
                **arithmetic(jnp),
                "psum": lambda x: lax.psum(x, names),
                "pmax": lambda x: lax.pmax(x, names),
                "pmin": lambda x: lax.pmin(x, names),
            },
        )
    gathered = {part: lax.all_gather(x, names, axis=0) for part, x in state.items()}
    return fold(monoid, gathered, 0, xp=jnp)


def reduce_scatter(
    monoid: Monoid, state: State, axes: Sequence[str], dim: int, dtype: str
) -> State:
    """The same, cut along leading dim `dim`: every device gets its block of every part.

    Block j goes to the device whose coordinates along `axes`, major to minor, ravel to j. Sums go
    by psum_scatter, other monoids by all-to-all and a fold. Raises PlanError where the dim does not
    fall into equal blocks.
    """
    import jax.numpy as jnp
    from jax import lax

    names = tuple(axes)
    parts = lax.axis_size(names)
    for name, x in state.items():
        if x.shape[dim] % parts:
            raise PlanError(
                f"{name} of {monoid.name} cannot be cut into {parts} equal blocks: dim {dim} has "
                f"{x.shape[dim]} elements"
            )
    if _scatters(monoid, dtype):
        made = over_mesh(
            monoid,
            state,
            {
                **arithmetic(jnp),
                "psum": lambda x: lax.psum_scatter(x, names, scatter_dimension=dim, tiled=True),
                "pmax": lambda x: lax.pmax(x, names),
                "pmin": lambda x: lax.pmin(x, names),
            },
        )
        block = partial(_own_block, dim=dim, parts=parts, number=lax.axis_index(names))
        summed = {p for p in made if _is_sum(monoid, p)}
        return {p: x if p in summed else block(x) for p, x in made.items()}
    blocks: dict[str, Any] = {}
    for name, x in state.items():
        cut = x.reshape(*x.shape[:dim], parts, x.shape[dim] // parts, *x.shape[dim + 1 :])
        blocks[name] = lax.all_to_all(cut, names, split_axis=dim, concat_axis=dim, tiled=True)
    return fold(monoid, blocks, dim, xp=jnp)


def _is_sum(monoid: Monoid, part: str) -> bool:
    assert monoid.mesh is not None
    return monoid.mesh.formulas[part].outermost == "psum"


def _scatters(monoid: Monoid, dtype: str) -> bool:
    """Whether some part is a psum of what every device knows, and no psum is inside a formula."""
    if monoid.mesh is None or kind(dtype) not in monoid.mesh.kinds:
        return False
    if any("psum" in term.functions for term in monoid.mesh.terms.values()):
        return False
    for formula in monoid.mesh.formulas.values():
        count = formula.text.count("psum")
        if count > (formula.outermost == "psum"):
            return False
        if formula.outermost not in MESH_FUNCTIONS and formula.functions & {"psum"}:
            return False
    return any(_is_sum(monoid, part) for part in monoid.mesh.formulas)


def _own_block(x: jax.Array, *, dim: int, parts: int, number: Any) -> jax.Array:
    from jax import lax

    size = x.shape[dim] // parts
    return lax.dynamic_slice_in_dim(x, number * size, size, dim)
