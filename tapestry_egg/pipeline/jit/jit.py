"""`jit`: where `jax.jit` stood, an optimised, sharded step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from tapestry_egg.errors import TapestryError
from tapestry_egg.extract.pins.pins import Pins
from tapestry_egg.machine.target import Target
from tapestry_egg.progress import Progress
from tapestry_egg.rules.language.book import RuleBook
from tapestry_egg.tracing.arguments import check_jit
from tapestry_egg.tracing.call_signature import on_mesh, read_signature

from .adopted import adopt
from .optimized import Optimized
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
    check_jit(fn, mesh, minimize, limits, rules, settings)
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
