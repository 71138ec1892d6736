"""Functions that `nnx.jit` or `eqx.filter_jit` made: their modules stay what they are, the arrays
between go through a plan."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

from tapestry_egg.errors import TraceError
from tapestry_egg.tracing.call_signature import read_signature

from .optimized import Bound, Optimized
from .planning import Request

# From the `jax.jit` inside of a library's function to one of these functions around another.
Rebuild = Callable[[Callable[[Any], Any]], Any]


def adopt(fn: Any, request: Request, words: Mapping[str, Any]) -> Adopted | None:
    """A function of another library's `jit` with a plan inside; None where it is none.

    Raises TraceError where words are given that belong to the library's own `jit`.
    """
    nnx = _of_nnx(fn)
    rebuild = nnx or _of_equinox(fn)
    if rebuild is None:
        return None
    for name, given in words.items():
        if given is not None:
            raise TraceError(
                f"the function was jitted by {type(fn).__module__.partition('.')[0]}",
                where=name,
                hint="Give these to its own jit; te.jit keeps them.",
            )
    return Adopted(rebuild, request, _UPDATED if nnx else "")


#: Where the function inside of `nnx.jit` returns its arguments' modules, as they are updated.
_UPDATED = "[0]"


class Adopted:
    """Called and used as the library's own function; `front`, `plan` and `compiled` as usual."""

    def __init__(self, rebuild: Rebuild, request: Request, mirrored: str = "") -> None:
        kept: list[_Inside] = []

        def planned(jitted: Any) -> _Inside:
            kept.append(_Inside(Optimized(read_signature(jitted), request, mirrored)))
            return kept[0]

        self._outer = rebuild(planned)
        (self._inside,) = kept
        functools.update_wrapper(self, self._outer, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outer(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def __getattr__(self, name: str) -> Any:
        """`lower` and the like, as far as the library has them."""
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._outer, name)

    def front(self, *args: Any, **kwargs: Any) -> Any:
        """The Pareto front for arguments of these types."""
        return self._ask("front", args, kwargs)

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        """The plan that a call with arguments of these types runs."""
        return self._ask("plan", args, kwargs)

    def compiled(self, *args: Any, **kwargs: Any) -> Any:
        """The plan on its devices. It takes the arrays between, as the library makes them."""
        return self._ask("compiled", args, kwargs)

    def clear_cache(self) -> None:
        """Forget all plans and executables."""
        self._inside.optimized.clear_cache()

    def _ask(self, question: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Ask where the library would call, with what it would pass: its tracing needs its own
        surroundings."""
        asking = _QUESTION.set(question)
        try:
            self._outer(*args, **kwargs)
        except _Answer as answer:
            return answer.args[0]
        finally:
            _QUESTION.reset(asking)


# What is asked of the function inside instead of calling it.
_QUESTION: ContextVar[str] = ContextVar("question", default="")


class _Answer(Exception):
    """Leads out of the library's function without a call."""


class _Inside:
    """What stands in a library's function where its `jax.jit` stood."""

    def __init__(self, optimized: Optimized) -> None:
        self.optimized = optimized

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        question = _QUESTION.get()
        if not question:
            return self.optimized(*args, **kwargs)
        asking = _QUESTION.set("")
        try:
            answer = getattr(self.optimized, question)(*args, **kwargs)
        finally:
            _QUESTION.reset(asking)
        raise _Answer(answer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimized":
            raise AttributeError(name)
        return getattr(self.optimized, name)


def _of_nnx(fn: Any) -> Rebuild | None:
    nnx: Any = sys.modules.get("flax.nnx")
    if nnx is None or not type(fn).__module__.startswith("flax.nnx.transforms"):
        return None
    info = getattr(getattr(fn, "jitted_fn", None), "_jit_info", None)
    if info is None:
        return None
    simple = hasattr(fn, "graph")  # no references that are shared or change their structure

    def rebuild(inside: Callable[[Any], Any]) -> Any:
        static = set(info.static_argnums)
        given = fn.in_shardings
        if isinstance(given, tuple):  # nnx put None at the static ones
            given = tuple(s for i, s in enumerate(given) if i not in static)
        made = nnx.jit(
            fn.fun,
            in_shardings=given,
            out_shardings=fn.out_shardings,
            static_argnums=info.static_argnums or None,
            static_argnames=info.static_argnames or None,
            donate_argnums=info.donate_argnums or None,
            donate_argnames=info.donate_argnames or None,
            graph=fn.graph if simple else True,
            graph_updates=not simple,
        )
        made.jitted_fn = inside(made.jitted_fn)
        return made

    return rebuild


def _of_equinox(fn: Any) -> Rebuild | None:
    if "equinox" not in sys.modules or not type(fn).__module__.startswith("equinox"):
        return None
    if getattr(getattr(fn, "_cached", None), "_jit_info", None) is None:
        return None

    def rebuild(inside: Callable[[Any], Any]) -> Any:
        made = copy.copy(fn)
        object.__setattr__(made, "_cached", inside(fn._cached))
        return made

    return rebuild
