"""`jit`: where `jax.jit` stood, an optimised, sharded step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.pins.pins import Pins
from tapestry_egg.machine.target import Target
from tapestry_egg.progress import Progress
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.tracing.arguments import check_jit
from tapestry_egg.tracing.call_signature import on_mesh, read_signature
from tapestry_egg.tracing.library_jits import Adopted, Answer, LibraryJit, answer_of, library_jit

from .optimized import Bound, Optimized
from .planning import Request

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from tapestry_egg.pipeline.settings import Settings


@overload
def jit(fn: Callable[..., Any], **options: Any) -> Optimized: ...
@overload
def jit(fn: None = None, **options: Any) -> Callable[[Callable[..., Any]], Optimized]: ...
def jit(  # type: ignore[misc]  # the overloads leave out what they do not tell apart
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | Sequence[Any] | None = None,
    minimize: str = "seconds",
    limits: Mapping[str, float | str] | None = None,
    target: str | Path | Target | None = None,
    rules: Sequence[str | Path | RuleBook] = (),
    state: Mapping[str, str] | None = None,
    numerics: str = "reorders",
    pins: Pins | None = None,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    device: Any = None,
    backend: str | None = None,
    compiler_options: Mapping[str, Any] | None = None,
    abstracted_axes: Any = None,
    arguments: Literal["pinned", "free"] = "pinned",
    cache: bool | str | Path | None = None,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Any:
    """Optimise `fn` for a mesh of devices: call the result as you would call `jax.jit(fn)`.

    Planned at the first call for every new combination of argument types: of all plans within
    `limits` the one with the least `minimize`. `mesh` supplies the devices (default: all), `target`
    their description (default: from the devices' kind). `pins` fixes layouts of inputs, and
    `numerics="relaxed"` allows rules that change rounding, as in `optimize`. Static and donated
    arguments and shardings are given as to `jax.jit`; those of a function that is already jitted
    (by `jax.jit`, `nnx.jit` or `eqx.filter_jit`) are kept. All inputs stay inputs, whatever
    `keep_unused` says. Without `fn` the result is a decorator. Under a JAX transformation (`grad`,
    `vmap`, `jit`) the original function runs, and a warning says so once. So it does if it says
    what no plan keeps (docs/jit.md lists it), or is bound to one of several devices.

    A JAX mesh is a contract: what crosses the boundary is laid out by its axes and is on that mesh.
    Without one, that of the shardings given counts, then that on which arguments of the first call
    lie, then the one that is set (`jax.set_mesh`). Arguments that lie on several devices by a
    `NamedSharding` stay where they lie when a function is planned first, as under `jax.jit`; with
    `arguments="free"` the plan decides. A list of devices, or nothing, leaves the mesh to the plan.
    Plans keep within the memory of a device unless a limit on `peak_bytes` says otherwise. Where
    the compiled module needs more than the limit, the next plan runs, and a warning says so.

    Plans are kept on disk and found there by the next run: `cache` is a folder for them, False
    keeps none (see `files/plan_cache.py`). Under `jax.distributed` all processes that own devices
    of the mesh call it alike, as with `jax.jit`: the first of them plans for all, host arrays and
    numbers must be the same on each, and results are arrays over all processes. Where processes
    differ, or one does not come, all raise PeerError instead of waiting for ever. Raises
    TargetError for devices that no target file describes, TypeError or ValueError as `jax.jit` does
    for arguments that `fn` does not have, and what `optimize` raises.
    """
    if fn is None:
        return functools.partial(jit, **{k: v for k, v in locals().items() if k != "fn"})
    if abstracted_axes is not None:
        raise TapestryError(
            "te.jit takes no abstracted_axes",
            where="jit",
            hint="Every shape gets a plan of its own; pad to a few lengths.",
        )
    if mesh is not None and not (device is None and backend is None):
        raise TapestryError(
            "mesh and device or backend are both given", where="jit", hint="Give the mesh alone."
        )
    check_jit(
        fn,
        mesh,
        minimize,
        target=target,
        limits=limits,
        rules=rules,
        state=state,
        pins=pins,
        settings=settings,
    )
    request = Request(
        mesh=mesh,
        target=target,
        minimize=minimize,
        limits=dict(limits or {}),
        rules=tuple(rules),
        state=state,
        numerics=numerics,
        pins=dict(pins or {}),
        arguments=arguments,
        cache=cache,
        settings=settings,
        on_progress=on_progress,
    )
    if arguments not in ("pinned", "free"):
        raise TapestryError(
            f"arguments is {arguments!r}", where="jit", hint='It is "pinned" or "free".'
        )
    words = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
        "donate_argnums": donate_argnums,
        "donate_argnames": donate_argnames,
        "in_shardings": in_shardings,
        "out_shardings": out_shardings,
    }
    adopted = adopt(fn, request, words)
    if adopted is not None:
        return adopted
    more = {
        "keep_unused": keep_unused,
        "inline": inline,
        "device": device,
        "backend": backend,
        "compiler_options": compiler_options,
    }
    words["in_shardings"] = on_mesh(in_shardings, mesh)
    words["out_shardings"] = on_mesh(out_shardings, mesh)
    return Optimized(read_signature(fn, **words, **more), request)


# Functions that `nnx.jit` or `eqx.filter_jit` made: their modules stay what they are, the arrays
# between go through a plan.


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
            kept.append(_Inside(Optimized(read_signature(jitted), request, library)))
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
