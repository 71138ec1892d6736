"""Functions that `nnx.jit` or `eqx.filter_jit` made: their modules stay what they are, the arrays
between go through a plan."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from tapestry_egg.tracing.call_signature import read_signature
from tapestry_egg.tracing.library_jits import Adopted, Answer, LibraryJit, answer_of, library_jit

from .optimized import Bound, Optimized
from .planning import Request


def adopt(fn: Any, request: Request, words: Mapping[str, Any]) -> AdoptedJit | None:
    """A function of another library's `jit` with a plan inside; None where it is none.

    Raises TraceError where words are given that belong to the library's own `jit`.
    """
    library = library_jit(fn, words)
    return None if library is None else AdoptedJit(library, request)


class AdoptedJit(Adopted):
    """Called and used as the library's own function; `front`, `plan` and `compiled` as usual."""

    def __init__(self, library: LibraryJit, request: Request) -> None:
        self.library = library
        kept: list[_Inside] = []

        def planned(jitted: Any) -> _Inside:
            kept.append(_Inside(Optimized(read_signature(jitted), request, library.mirrored)))
            return kept[0]

        self._outer = library.around(planned)
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
            return answer_of(self._outer, args, kwargs)
        finally:
            _QUESTION.reset(asking)


# What is asked of the function inside instead of calling it.
_QUESTION: ContextVar[str] = ContextVar("question", default="")


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
        raise Answer(answer)

    def __getattr__(self, name: str) -> Any:
        if name == "optimized":
            raise AttributeError(name)
        return getattr(self.optimized, name)
