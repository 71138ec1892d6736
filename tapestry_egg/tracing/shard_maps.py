"""A `shard_map` of the user's as a program over whole arrays, which a plan may cut as it likes.

The function that every device would run is mapped over the axes of its mesh, as `vmap` maps over
named axes: a block's number becomes a dim, a `psum` a sum over that dim, an `all_gather` or a
`ppermute` a rearrangement along it. How many devices there are then no longer matters; a plan that
cuts these dims does what the user has written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from .control_flow import bound, controlled, evaluated, opened
from .settings import check_settings_kept, settings_of


def over_whole_arrays(eqn: Any) -> Any:
    """The closed jaxpr of a shard_map equation applied to whole arrays.

    Raises what JAX raises for a collective that `vmap` cannot map.
    """
    import jax

    return jax.make_jaxpr(_whole(eqn.params, eqn.outvars))(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in eqn.invars)
    )


def _whole(params: Any, outvars: Sequence[Any]) -> Callable[..., list[Any]]:
    """The function of a shard_map, applied to whole arrays."""
    import jax

    mesh = params["mesh"]
    own = params.get("newly_manual_axes") or params.get("manual_axes") or mesh.axis_names
    sizes = {a: n for a, n in zip(mesh.axis_names, mesh.axis_sizes, strict=True) if a in own}

    def run(*blocks: Any) -> list[Any]:
        return _run(params["jaxpr"], blocks)

    def whole(*operands: Any) -> list[Any]:
        takes = [_axes_of(s, x.ndim) for s, x in zip(params["in_specs"], operands, strict=True)]
        gives = [
            _axes_of(s, v.aval.ndim) for s, v in zip(params["out_specs"], outvars, strict=True)
        ]
        blocks = [_apart(x, dims, sizes) for x, dims in zip(operands, takes, strict=True)]
        order = _MESH_ORDER.set(tuple(mesh.axis_names))
        mapped: Callable[..., Any] = run
        for axis in reversed(sizes):  # the first axis is the outermost map, and its dim the first
            given = tuple(0 if axis in _flat(dims) else None for dims in takes)
            mapped = jax.vmap(
                mapped, in_axes=given, out_axes=0, axis_name=axis, axis_size=sizes[axis]
            )
        try:
            made = mapped(*blocks)
        finally:
            _MESH_ORDER.reset(order)
        return [_together(y, dims, sizes) for y, dims in zip(made, gives, strict=True)]

    return whole


# The axes of the mesh that is being mapped: a permutation numbers devices by their order there.
_MESH_ORDER: ContextVar[tuple[str, ...]] = ContextVar("_MESH_ORDER", default=())


# What every device runs, traced again without the types that say over which axes a value varies


def _run(callee: Any, arguments: Sequence[Any]) -> list[Any]:
    return evaluated(callee, arguments, _apply)


def _apply(eqn: Any, xs: list[Any]) -> Sequence[Any]:
    check_settings_kept(eqn, "")
    with settings_of(eqn):
        return _results(eqn, xs)


def _results(eqn: Any, xs: list[Any]) -> Sequence[Any]:
    from .jaxprs import INLINED

    kernel, params = eqn.primitive.name, eqn.params
    if kernel in ("pvary", "pcast", "preduced"):
        return xs  # it only says over which axes a value varies
    if kernel == "shard_map":  # over other axes
        return _whole(params, eqn.outvars)(*xs)
    if kernel in _PLACED:
        return [_asked(x, params[_PLACED[kernel]], params) for x in xs]
    if kernel == "psum_invariant":
        from jax import lax

        return [lax.psum(x, params["axes"]) for x in xs]
    made: Sequence[Any] | None = controlled(kernel, params, xs, _run)
    if made is not None:
        return made
    if kernel in _OVER_SEVERAL and params.get("axis_index_groups") is None:
        axes = params["axis_name"]
        axes = axes if isinstance(axes, tuple) else (axes,)
        # Of one axis `vmap` maps permutations of all devices only, and no broadcast.
        if len(axes) > 1 or kernel in ("ppermute", "pbroadcast"):
            return [_OVER_SEVERAL[kernel](params, axes, x) for x in xs]
        if kernel == "all_to_all":
            xs = [_varying(x, axes) for x in xs]
    if kernel == "all_gather_invariant":
        from jax import lax

        tiled = {"axis": params["all_gather_dimension"], "tiled": params["tiled"]}
        return [lax.all_gather(x, params["axis_name"], **tiled) for x in xs]
    callee = next((params[p] for p in INLINED.get(kernel, ()) if p in params), None)
    if callee is not None and params.get("differentiated"):
        return _recomputed(eqn, callee, xs)
    if callee is not None:
        return _run(callee, xs)
    kept = {k: None if k in ("sharding", "out_sharding") else v for k, v in params.items()}
    return bound(eqn.primitive, kept, xs)


# Places that are asked for on the axes that the shard_map leaves to the compiler

_PLACED = {"sharding_constraint": "sharding", "reshard": "dst_sharding"}


def _asked(x: Any, sharding: Any, params: Any) -> Any:
    """A block under the constraint that its function makes of it."""
    from jax import lax
    from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

    mesh, spec = getattr(sharding, "mesh", None), getattr(sharding, "spec", None)
    if mesh is None or spec is None:
        return x
    free = params.get("unconstrained_dims") or ()
    entries = [*spec, *(None,) * (x.ndim - len(spec))]
    dims = [PartitionSpec.UNCONSTRAINED if d in free else e for d, e in enumerate(entries)]
    kinds = (AxisType.Auto,) * len(mesh.axis_names)
    plain = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=kinds)
    return lax.with_sharding_constraint(x, NamedSharding(plain, PartitionSpec(*dims)))


def _recomputed(eqn: Any, callee: Any, xs: list[Any]) -> Sequence[Any]:
    """What a backward pass computes again: still a call, since nothing else says so."""
    import jax

    params = eqn.params
    made = jax.make_jaxpr(lambda *ys: _run(callee, ys))(*xs)
    jaxpr, constants = opened(made)
    kept = jaxpr.replace(
        constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info
    )
    fence = params["prevent_cse"]
    fence = (False,) * len(constants) + fence if isinstance(fence, tuple) else fence
    return eqn.primitive.bind(*constants, *xs, **{**params, "jaxpr": kept, "prevent_cse": fence})


# Collectives over several axes at once, which vmap maps one axis at a time


def _gathered(x: Any, axes: Sequence[str]) -> Any:
    """The values of all devices along several axes, stacked in front."""
    from jax import lax

    shape = x.shape
    for a in reversed(axes):
        x = lax.all_gather(x, a)
    return x.reshape(-1, *shape)


def _varying(x: Any, axes: Sequence[str]) -> Any:
    """The same value, for `vmap` one of each device: it maps an `all_to_all` of no other."""
    import jax.numpy as jnp
    from jax import lax

    return lax.select(jnp.broadcast_to(lax.axis_index(axes) >= 0, x.shape), x, x)


def _ppermute(params: Any, axes: Sequence[str], x: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    axes = tuple(a for a in _MESH_ORDER.get() if a in axes)  # in whichever order they are named
    count = lax.axis_size(axes)
    source: list[int | None] = [None] * count
    for a, b in params["perm"]:
        source[b] = a
    idle = iter(sorted(set(range(count)) - {a for a in source if a is not None}))
    every = [next(idle) if a is None else a for a in source]
    if len(axes) == 1:
        moved = lax.ppermute(x, axes[0], [(a, b) for b, a in enumerate(every)])
    else:
        moved = _gathered(x, axes)[jnp.array(every)[lax.axis_index(axes)]]
    if None not in source:
        return moved
    reached = jnp.array([a is not None for a in source])[lax.axis_index(axes)]
    return jnp.where(reached, moved, jnp.zeros_like(moved))


def _pbroadcast(params: Any, axes: Sequence[str], x: Any) -> Any:
    return _gathered(x, axes)[params["source"]]


def _all_gather(params: Any, axes: Sequence[str], x: Any) -> Any:
    import jax.numpy as jnp

    d = params["all_gather_dimension"]
    every = jnp.moveaxis(_gathered(x, axes), 0, d)
    if not params["tiled"]:
        return every
    return every.reshape(*x.shape[:d], -1, *x.shape[d + 1 :])


def _reduce_scatter(params: Any, axes: Sequence[str], x: Any) -> Any:
    from jax import lax

    d, total = params["scatter_dimension"], lax.psum(x, axes)
    size = x.shape[d] // params["axis_size"] if params["tiled"] else 1
    own = lax.dynamic_slice_in_dim(total, lax.axis_index(axes) * size, size, d)
    return own if params["tiled"] else own.reshape(*x.shape[:d], *x.shape[d + 1 :])


def _all_to_all(params: Any, axes: Sequence[str], x: Any) -> Any:
    import jax.numpy as jnp
    from jax import lax

    every = _gathered(x, axes)
    s, c = params["split_axis"], params["concat_axis"]
    size = x.shape[s] // every.shape[0]  # without `tiled` too: the dim is then as long as the axes
    own = lax.dynamic_slice_in_dim(every, lax.axis_index(axes) * size, size, s + 1)
    own = jnp.moveaxis(own, 0, c)
    return own.reshape(*own.shape[:c], -1, *own.shape[c + 2 :])


_OVER_SEVERAL: Mapping[str, Callable[[Any, Sequence[str], Any], Any]] = {
    "ppermute": _ppermute,
    "pbroadcast": _pbroadcast,
    "all_gather": _all_gather,
    "all_gather_invariant": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}


# Blocks and whole arrays


def _axes_of(spec: Any, rank: int) -> tuple[tuple[str, ...], ...]:
    """Per dim, the names of the mesh axes that cut it, major to minor."""
    entries = list(spec) + [None] * (rank - len(tuple(spec)))
    return tuple(() if e is None else e if isinstance(e, tuple) else (e,) for e in entries)


def _flat(dims: Iterable[Sequence[str]]) -> list[str]:
    return [a for axes in dims for a in axes]


def _apart(x: Any, dims: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Any:
    """The blocks of a whole array: a dim in front for every axis that cuts it, in mesh order."""
    import jax.numpy as jnp

    shape: list[int] = []
    place: dict[str, int] = {}
    for n, axes in zip(x.shape, dims, strict=True):
        for a in axes:
            place[a] = len(shape)
            shape.append(sizes[a])
            n //= sizes[a]
        shape.append(n)
    front = [place[a] for a in sizes if a in place]
    rest = [k for k in range(len(shape)) if k not in front]
    return jnp.transpose(jnp.reshape(x, shape), (*front, *rest))


def _together(y: Any, dims: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Any:
    """The whole array of blocks that have a dim in front for every axis; what does not vary over an
    axis is taken from the first of its devices."""
    import jax.numpy as jnp

    used = [a for a in sizes if a in _flat(dims)]
    y = y[tuple(slice(None) if a in used else 0 for a in sizes)]
    order: list[int] = []
    shape: list[int] = []
    for k, axes in enumerate(dims):
        order += [*(used.index(a) for a in axes), len(used) + k]
        n = y.shape[len(used) + k]
        for a in axes:
            n *= sizes[a]
        shape.append(n)
    return jnp.reshape(jnp.transpose(y, order), shape)


def over_dims_only(params: Mapping[str, Any]) -> bool:
    """Whether a collective is one over dims of its operands, as vmap leaves it."""
    axes = params.get("axes", ("",))
    return params.get("axis_index_groups") is None and all(isinstance(a, int) for a in axes)
