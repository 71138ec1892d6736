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
from jax.extend.core import jaxpr_as_fun

from tapestry_egg.tracing.control_flow import bound, controlled, evaluated, opened, solver
from tapestry_egg.tracing.jaxprs import INLINED

#: What speaks of the bits of floats, or of their distances.
_OF_BITS = frozenset(("bitcast_convert_type", "nextafter"))


def in_float64(fn: Callable[..., Any], args: Sequence[Any]) -> list[jax.Array]:
    """Flat outputs of `fn`, with every float of it and of its arguments as float64, every complex
    number as complex128."""
    program = jax.make_jaxpr(fn)(*args)
    own = [jnp.asarray(x) for x in jax.tree.leaves(tuple(args))]
    with jax.enable_x64(True):
        wide = [_wide(x) for x in own]
        return jax.jit(lambda *xs: _computed(program, xs))(*wide)


def _computed(callee: Any, arguments: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr, wide, of wide arguments."""

    def constant(x: Any, aval: Any) -> Any:
        return _wide(x if isinstance(x, jax.Array) else jnp.asarray(x, aval.dtype))

    return evaluated(callee, arguments, _applied, constant)


def _applied(eqn: Any, xs: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation, wide."""
    name, params = eqn.primitive.name, eqn.params
    if name in INLINED:
        callee = next(params[k] for k in INLINED[name] if k in params)
        return _computed(callee, xs)
    if name == "custom_linear_solve":
        return _computed(*solver(params, xs))
    made: Sequence[Any] | None = controlled(name, params, xs, _computed)
    if made is not None:
        return made
    if name == "reduce_precision":
        return xs
    drawn = name.startswith(("random_", "rng_"))
    if drawn or name in _OF_BITS or eqn.effects or "result_avals" in params:
        return _as_written(eqn, xs)
    try:
        return [_wide(x) for x in bound(eqn.primitive, _wide_params(params), xs)]
    except (TypeError, NotImplementedError):
        return _as_written(eqn, xs)


def _as_written(eqn: Any, xs: Sequence[Any]) -> Sequence[Any]:
    own = [
        x.astype(v.aval.dtype) if _wider(v.aval.dtype) else x
        for x, v in zip(xs, eqn.invars, strict=True)
    ]
    return [_wide(x) for x in bound(eqn.primitive, eqn.params, own)]


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
    jaxpr, _ = opened(callee)
    if any(v.aval.shape for v in jaxpr.invars):
        raise TypeError("no computation on scalars")
    given = [jax.ShapeDtypeStruct((), _wider(v.aval.dtype) or v.aval.dtype) for v in jaxpr.invars]
    made = jax.make_jaxpr(lambda *xs: _computed(callee, xs))(*given)
    return made if hasattr(callee, "consts") else made.jaxpr


def _wide(x: Any) -> Any:
    """An array with its floats widened; all else as it is."""
    wide = _wider(x.dtype)
    return jnp.asarray(x, wide) if wide else x


def _wider(dtype: Any) -> Any:
    """The dtype in which a float, or a complex number, of this one is computed; else None."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jnp.dtype("complex128")
    return jnp.dtype("float64") if jnp.issubdtype(dtype, jnp.floating) else None
