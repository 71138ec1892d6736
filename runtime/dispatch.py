"""Dispatch: calls like one that was seen before go to its executable without Python, as JAX's own.

What `jax.jit` has before its Python code is taken here for plans: JAX looks a call up by structure,
types, layouts and static arguments, under all settings that a trace depends on. What it has not
seen, and what no executable takes as it is, is asked for in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

#: The result of a call, what JAX needs to make calls like it (None: they come to Python, too), and
#: whether the next one is to be asked about again.
Answer = tuple[Any, Any, bool]


def dispatcher(
    name: str,
    ask: Callable[..., Answer],
    disabled: Callable[..., Any],
    static_argnums: Iterable[int] = (),
    static_argnames: Iterable[str] = (),
) -> Callable[..., Any]:
    """A function that calls what `ask` answered to the first call of a kind.

    Static arguments are told apart by type and value, and are no arguments of what is called.
    `disabled` is called instead where `jit` is disabled.
    """
    make = _maker()
    if make is None:
        return lambda *args, **kwargs: ask(*args, **kwargs)[0]
    function: Callable[..., Any]
    function = make(name, disabled, ask, list(static_argnums), list(static_argnames))
    return function


class Callee:
    """An executable as `dispatcher` calls it."""

    def __init__(self, executable: jax.stages.Compiled) -> None:
        self._executable = executable
        self._answers: Any = None
        if _maker() is not None:
            inside: Any = executable
            # None where every call has something to do in Python: callbacks, tokens.
            made = inside._executable.create_cpp_call(inside._params)
            self._answers = getattr(made, "_cache_miss", None)

    def ask(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Answer:
        """Run it, once, on arguments that it takes as they are.

        Raises FloatingPointError where JAX looks for NaNs or infinities (`jax_debug_nans`) and
        finds one in the results.
        """
        try:
            if self._answers is None:
                return self._executable(*args, **kwargs), None, False
            answer: Answer = self._answers(*args, **kwargs)
            return answer
        except Exception as e:
            if type(e).__name__ != "InternalFloatingPointError":
                raise
            name, found = e.args  # which JAX's own functions translate, too
            raise FloatingPointError(f"invalid value ({found}) in a result of {name}") from None


def count_miss() -> None:
    """Count a call that came to Python where JAX counts those of its own functions."""
    _counter()("jit_cpp_cache_miss")


@cache
def _counter() -> Callable[[str], object]:
    import jax

    inside: Any = jax._src.util  # type: ignore[attr-defined]
    counter: Callable[[str], object] = getattr(inside, "test_event", lambda name: None)
    return counter


@cache
def _maker() -> Callable[..., Any] | None:
    """JAX's constructor of such functions; None where this version of JAX has none like it."""
    import jax

    try:
        inside: Any = jax._src  # type: ignore[attr-defined]
        pxla, pjit = inside.interpreters.pxla, inside.lib._jax.pjit
        keys, registry = pxla.JitGlobalCppCacheKeys, inside.tree_util.dispatch_registry
        place = pxla.cc_shard_arg

        def make(name: str, disabled: Any, ask: Any, numbers: list[int], names: list[str]) -> Any:
            made = pjit(name, disabled, ask, numbers, names, keys(), registry, place)
            made._fun = disabled  # what JAX calls to say where a NaN that it found comes from
            return made

        probe = make("probe", lambda: 1, lambda: (2, None, False), [], [])
        return make if probe() == 2 and hasattr(probe, "_cache_miss") else None
    except (AttributeError, TypeError):
        return None
