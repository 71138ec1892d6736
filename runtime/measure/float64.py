"""Programs of JAX in float64: their equations one by one, with every float in them widened.

What a program says of dtypes itself is widened, too: casts to 16 bits, what a loop carries, what is
drawn. What has no float64 is computed as it is written, of operands rounded to what they were: keys
and the random bits drawn of them, so that a program draws the numbers that it draws; bits of
floats; calls into Python, kernels written by hand, and functions that are divided among devices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal, jaxpr_as_fun

from tapestry_egg.graph.blockgraph import COND, SCAN, WHILE
from tapestry_egg.tracing.control_flow import switched, with_counts
from tapestry_egg.tracing.jaxprs import INLINED
from tapestry_egg.tracing.shard_maps import opened

#: What speaks of the bits of floats, or of their distances.
_OF_BITS = frozenset(("bitcast_convert_type", "nextafter"))


def in_float64(fn: Callable[..., Any], args: Sequence[Any]) -> list[jax.Array]:
    """Flat outputs of `fn`, with every float of it and of its arguments as float64, every complex
    number as complex128."""
    program = jax.make_jaxpr(fn)(*args)
    own = [jnp.asarray(x) for x in jax.tree.leaves(tuple(args))]
    with jax.enable_x64(True):
        wide = [_wide(x) for x in own]
        return jax.jit(lambda *xs: _computed(program.jaxpr, program.consts, xs))(*wide)


def _computed(jaxpr: Any, consts: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, wide, of wide arguments."""
    values = dict(zip(jaxpr.constvars, map(_wide, consts), strict=True))
    values.update(zip(jaxpr.invars, arguments, strict=True))

    def read(v: Any) -> Any:
        if not isinstance(v, Literal):
            return values[v]
        aval: Any = v.aval
        return _wide(jnp.asarray(v.val, aval.dtype))

    for eqn in jaxpr.eqns:
        values.update(zip(eqn.outvars, _applied(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _applied(eqn: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, wide."""
    name, params = eqn.primitive.name, eqn.params
    if name in INLINED:
        callee = next(params[k] for k in INLINED[name] if k in params)
        return _computed(*opened(callee), xs)
    if name in _CONTROL:
        return _CONTROL[name](params, xs)
    if name == "reduce_precision":
        return xs
    drawn = name.startswith(("random_", "rng_"))
    if drawn or name in _OF_BITS or eqn.effects or "result_avals" in params:
        return _as_written(eqn, xs)
    try:
        return _bound(eqn.primitive, _wide_params(params), xs)
    except (TypeError, NotImplementedError):
        return _as_written(eqn, xs)


def _as_written(eqn: Any, xs: Sequence[Any]) -> Sequence[Any]:
    own = [
        x.astype(v.aval.dtype) if _wider(v.aval.dtype) else x
        for x, v in zip(xs, eqn.invars, strict=True)
    ]
    return _bound(eqn.primitive, eqn.params, own)


def _bound(primitive: Any, params: Mapping[str, Any], xs: Sequence[Any]) -> Sequence[Any]:
    bound = primitive.get_bind_params(dict(params))
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    made = primitive.bind(*functions, *xs, **bound)
    return [_wide(x) for x in (made if primitive.multiple_results else [made])]


def _wide_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters that say of wide operands what these say of their own. Raises TypeError where that
    cannot be told."""
    found = dict(params)
    for name, value in params.items():
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            found[name] = _wide_scalars(value)
        elif isinstance(value, (type, np.dtype)) and (wide := _wider(value)):
            found[name] = wide
        elif name == "precision":
            found[name] = None
    if "computation" in params:
        found["computation"] = jaxpr_as_fun(found["jaxpr"])
    return found


def _wide_scalars(callee: Any) -> Any:
    """A computation on scalars, on wide ones."""
    jaxpr, consts = opened(callee)
    if any(v.aval.shape for v in jaxpr.invars):
        raise TypeError("no computation on scalars")
    given = [jax.ShapeDtypeStruct((), _wider(v.aval.dtype) or v.aval.dtype) for v in jaxpr.invars]
    made = jax.make_jaxpr(lambda *xs: _computed(jaxpr, consts, xs))(*given)
    return made if hasattr(callee, "consts") else made.jaxpr


# Control flow: its parameters and operands, to its results


def _scan(params: Mapping[str, Any], xs: Sequence[Any]) -> Sequence[Any]:
    said = with_counts(params)
    first, count = said["num_consts"], said["num_carry"]
    jaxpr, consts = opened(said["jaxpr"])

    def step(carry: Any, rows: Any) -> Any:
        made = _computed(jaxpr, consts, [*xs[:first], *carry, *rows])
        return made[:count], made[count:]

    begin, rows = list(xs[first : first + count]), list(xs[first + count :])
    end, stacks = lax.scan(step, begin, rows, said["length"], said["reverse"])
    return [*end, *stacks]


def _while(params: Mapping[str, Any], xs: Sequence[Any]) -> Sequence[Any]:
    asks, makes = params["cond_nconsts"], params["body_nconsts"]
    condition, body = opened(params["cond_jaxpr"]), opened(params["body_jaxpr"])

    def which(carry: Any) -> Any:
        return _computed(*condition, [*xs[:asks], *carry])[0]

    def step(carry: Any) -> Any:
        # Of loops that run together, those that have ended keep what they carry.
        run = which(carry)
        made = _computed(*body, [*xs[asks : asks + makes], *carry])
        if not run.ndim:
            return made
        rows = [run.reshape(run.shape + (1,) * (x.ndim - run.ndim)) for x in made]
        return [jnp.where(r, x, old) for r, x, old in zip(rows, made, carry, strict=True)]

    begin = list(xs[asks + makes :])
    return list(lax.while_loop(lambda carry: jnp.any(which(carry)), step, begin))


def _cond(params: Mapping[str, Any], xs: Sequence[Any]) -> Sequence[Any]:
    def branch(callee: Any) -> Callable[..., Any]:
        return lambda *given: _computed(*opened(callee), given)

    return list(switched(params, [branch(b) for b in params["branches"]], xs))


def _linear_solve(params: Mapping[str, Any], xs: Sequence[Any]) -> Sequence[Any]:
    lengths = params["const_lengths"]
    begin = lengths.matvec + lengths.vecmat
    given = [*xs[begin : begin + lengths.solve], *xs[sum(lengths) :]]
    return _computed(*opened(params["jaxprs"].solve), given)


_CONTROL: dict[str, Callable[[Mapping[str, Any], Sequence[Any]], Sequence[Any]]] = {
    COND: _cond,
    "custom_linear_solve": _linear_solve,
    SCAN: _scan,
    WHILE: _while,
}


def _wide(x: Any) -> Any:
    """An array with its floats widened; all else as it is."""
    wide = _wider(x.dtype)
    return jnp.asarray(x, wide) if wide else x


def _wider(dtype: Any) -> Any:
    """The dtype in which a float, or a complex number, of this one is computed; else None."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype("complex128")
    return jnp.dtype("float64") if jnp.issubdtype(dtype, jnp.floating) else None
