"""Primitives without a template, and loops of many verdicts, traced again as what they are made of.

Libraries define primitives of their own, to say how they are differentiated or batched. When a
program is traced these rules have been used up, and what is left to run is the Python function that
JAX itself traces when it lowers the primitive, or the one that evaluates it eagerly.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from .settings import DRAWS, settings_of

_LOG = logging.getLogger(__name__)


def expansion(eqn: Any, known: Mapping[int, Any]) -> Any | None:
    """The closed jaxpr of what an equation's primitive is made of; None where nothing says it.

    It takes the equation's operands, except that `known` (operand number -> value) may be used in
    their place where the function asks for values.
    """
    for function in _functions(eqn):
        for given in ({}, known) if known else ({},):
            traced = _traced(eqn, function, given)
            if traced is not None:
                return traced
    _LOG.info("%s has no template and is not made of others: it stays whole", eqn.primitive.name)
    return None


def _traced(eqn: Any, function: Callable[..., Any], known: Mapping[int, Any]) -> Any | None:
    import jax

    avals = [v.aval for v in eqn.invars]

    def call(*operands: Any) -> Any:
        values = [known.get(p, x) for p, x in enumerate(operands)]
        out = function(*values, **eqn.params)
        return list(out) if eqn.primitive.multiple_results else [out]

    try:
        with settings_of(eqn):
            closed = jax.make_jaxpr(call)(*avals)
    except Exception as e:  # the function is not meant to be traced, or not with these operands
        _LOG.info("%s cannot be traced: %s", eqn.primitive.name, e)
        return None
    made = [(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.outvars]
    wanted = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
    itself = [e.primitive for e in closed.jaxpr.eqns] == [eqn.primitive]
    return None if made != wanted or itself else closed


def _functions(eqn: Any) -> Iterator[Callable[..., Any]]:
    """The Python functions that a primitive is made of, as JAX lowers it and as it runs it."""
    primitive = eqn.primitive
    if primitive.name in DRAWS:
        yield functools.partial(_drawn, primitive.name)
    is_high = getattr(primitive, "is_high", None)  # made of others by a method of its own
    if callable(is_high) and is_high(*(v.aval for v in eqn.invars), **eqn.params):
        yield primitive.to_lojax
    lowered = _lowered(primitive)
    if lowered is not None:
        yield lowered
    run = inspect.unwrap(getattr(primitive, "impl", None) or primitive.bind)
    inner = run
    while isinstance(inner, functools.partial):
        inner = inner.func
    module = getattr(inner, "__module__", None) or ""
    if inspect.isfunction(inner) and not module.startswith("jax._src"):
        yield run  # JAX's own compile the primitive itself, and do nothing for the other ones


def _drawn(kernel: str, keys: Any, **params: Any) -> Any:
    """Random bits, or new keys, by the generator of the keys itself."""
    import jax

    impl = keys.dtype._impl  # JAX has no public name for it

    def one(key: Any) -> Any:
        if kernel == "random_bits":
            return impl.random_bits(key, params["bit_width"], params["shape"])
        return impl.split(key, params["shape"])

    for _ in range(keys.ndim):
        one = jax.vmap(one)
    made = one(jax.random.key_data(keys))
    if kernel == "random_bits":
        return made
    return jax.random.wrap_key_data(made, impl=jax.random.key_impl(keys))


def _lowered(primitive: Any) -> Callable[..., Any] | None:
    """The function that JAX's lowering of a primitive traces, where it is one of `lower_fun`."""
    try:
        from jax._src.interpreters import mlir

        rule = mlir._lowerings[primitive].rule
        inside = inspect.getclosurevars(rule).nonlocals
    except (ImportError, AttributeError, KeyError, TypeError):
        return None
    found = inside.get("fun")
    made_so = getattr(rule, "__name__", "") == "f_lowered" and "multiple_results" in inside
    return found if made_so and callable(found) else None


def with_one_verdict(eqn: Any) -> Any:
    """A loop over many examples (a `while` under vmap, each with a condition of its own) as a loop
    that runs while any of them does, whose body leaves those that are done as they are.

    That is what JAX makes of it too, further down. The new body also reads the constants of the
    condition, before its own.
    """
    import jax
    from jax import lax
    from jax.extend.core import jaxpr_as_fun

    tests, bodies = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    test, body = (jaxpr_as_fun(eqn.params[p]) for p in ("cond_jaxpr", "body_jaxpr"))

    def any_of(*values: Any) -> Any:
        (verdicts,) = test(*values)
        return lax.reduce_or(verdicts, tuple(range(verdicts.ndim)))

    def step(*values: Any) -> list[Any]:
        carry = values[tests + bodies :]
        (verdicts,) = test(*values[:tests], *carry)
        leading = tuple(range(verdicts.ndim))
        return [
            lax.select(lax.broadcast_in_dim(verdicts, new.shape, leading), new, old)
            for new, old in zip(body(*values[tests:]), carry, strict=True)
        ]

    avals = [v.aval for v in eqn.invars]
    params = {
        "cond_jaxpr": jax.make_jaxpr(any_of)(*avals[:tests], *avals[tests + bodies :]),
        "body_jaxpr": jax.make_jaxpr(step)(*avals),
        "body_nconsts": tests + bodies,
    }
    return eqn.replace(params={**eqn.params, **params})


def constants_among(operands: Sequence[int], constants: Mapping[int, Any]) -> dict[int, Any]:
    """Operand number -> value, of the operands that are constants."""
    return {p: constants[v] for p, v in enumerate(operands) if v in constants}
