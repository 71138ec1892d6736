"""`jit`: where `jax.jit` stood, an optimised, sharded step."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .extract.front import Front
from .extract.pins import Pins
from .plan import Plan
from .planning import Request, best_plan, compile_best, plan_program, whole_front
from .progress import Progress
from .rules.book import RuleBook
from .signature import Signature, read_signature
from .target import Target

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from .pipeline import Settings
    from .runtime.compile import CompiledPlan
    from .trace import Program


def jit(
    fn: Callable[..., Any],
    *,
    mesh: Mesh | Sequence[Any] | None = None,
    minimize: str = "seconds",
    limits: Mapping[str, float | str] | None = None,
    target: str | Path | Target | None = None,
    rules: Sequence[str | Path | RuleBook] = (),
    state: Mapping[str, str] | None = None,
    numerics: str = "reorders",
    pins: Pins | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    cache: bool | str | Path | None = None,
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Optimized:
    """Optimise `fn` for a mesh of devices: call the result as you would call `jax.jit(fn)`.

    Planned at the first call for every new combination of argument types: of all plans within
    `limits` the one with the least `minimize`. `mesh` supplies the devices (default: all), `target`
    their description (default: from the devices' kind). `pins` fixes layouts of inputs, and
    `numerics="relaxed"` allows rules that change rounding, as in `optimize`. Static and donated
    arguments are named as in `jax.jit`; those of a function that is already jitted are kept. Under
    a JAX transformation (`grad`, `vmap`) the original function runs, so an optimised function still
    differentiates.

    Plans are kept on disk and found there by the next run: `cache` is a folder for them, False
    keeps none (see `plan_cache.py`). Under `jax.distributed` all processes that own devices of the
    mesh call it alike, as with `jax.jit`: the first of them plans for all, host arrays and numbers
    must be the same on each, and results are arrays over all processes. Where processes differ, or
    one does not come, all raise PeerError instead of waiting for ever.
    Raises TargetError for devices that no target file describes, and what `optimize` raises.
    """
    signature = read_signature(
        fn,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
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
        cache=cache,
        settings=settings,
        on_progress=on_progress,
    )
    return Optimized(signature, request)


@dataclass(eq=False, slots=True)
class _Planned:
    """What is known for one combination of argument types."""

    front: Front
    request: Request
    compiled: CompiledPlan | None = None
    program: Program | None = None
    whole: Front | None = None


class Optimized:
    """A function that is planned per argument types; `front(*args)` and `plan(*args)` show how."""

    def __init__(self, signature: Signature, request: Request) -> None:
        functools.update_wrapper(self, signature.fn)
        self._signature = signature
        self._request = request
        # By the types as JAX sees them, and by the arguments as they come: a number, an int64 of
        # NumPy. The second only saves asking what they are to JAX.
        self._planned: dict[Any, _Planned] = {}
        self._known: dict[Any, _Planned] = {}
        self._lock = threading.RLock()  # of several threads that call first, one plans

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen plan for these argument types, planning it first if it is new."""
        import jax

        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            return self._signature.jitted(*args, **kwargs)
        return self.compiled(*args, **kwargs)(*args, **kwargs)

    def front(self, *args: Any, **kwargs: Any) -> Front:
        """The Pareto front for arguments of these types (arrays or `jax.ShapeDtypeStruct`)."""
        found = self._lookup(args, kwargs)
        with self._lock:
            if found.whole is None:
                assert found.program is not None
                found.whole = whole_front(found.program, found.request)
            return found.whole

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with arguments of these types runs."""
        found = self._lookup(args, kwargs)
        return found.compiled.plan if found.compiled else best_plan(found.front, found.request)

    def compiled(self, *args: Any, **kwargs: Any) -> CompiledPlan:
        """The plan on its devices, with `.lower()` and `.compile()` as in JAX."""
        found = self._lookup(args, kwargs)
        if found.compiled is None:
            with self._lock:
                if found.compiled is None:
                    found.compiled = compile_best(found.front, found.request)
        return found.compiled

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The plan as StableHLO."""
        return self.compiled(*args, **kwargs).lower()

    def _lookup(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Planned:
        """What is known for these arguments, planned now if they are of new types."""
        import jax

        call = self._signature.split(args, kwargs)
        leaves, tree = jax.tree.flatten((call.args, call.kwargs))
        static = tuple((at, type(value), value) for at, value in call.static)
        context = _trace_context()
        key = (tree, tuple(map(_type_of, leaves)), static, context)
        try:
            found = self._known.get(key)
        except TypeError:  # JAX says which static value cannot be hashed
            self._signature.jitted.trace(*args, **kwargs)
            raise
        if found is None:
            from .trace import trace_signature

            program = trace_signature(self._signature, args, kwargs)
            types = tuple((t.shape, t.dtype, t.weak) for t in program.input_types)
            seen = (tree, types, static, context)
            with self._lock:
                found = self._planned.get(seen)
                if found is None:
                    request = self._request
                    found = self._planned[seen] = _Planned(
                        plan_program(program, request), request, program=program
                    )
            self._known[key] = found
        return found


def _type_of(leaf: Any) -> Any:
    """Shape, dtype and weakness of an array; the type of anything else."""
    try:
        return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False))
    except AttributeError:
        return type(leaf)


def _trace_context() -> Any:
    """Everything in JAX's configuration that a trace depends on: x64, precision, the mesh."""
    import jax

    context = getattr(getattr(jax, "_src", None), "config", None)
    if context is not None and hasattr(context, "trace_context"):
        return context.trace_context()
    values: dict[str, Any] = jax.config.values
    return tuple(values.get(name) for name in ("jax_enable_x64", "jax_default_matmul_precision"))
