"""`jit`: where `jax.jit` stood, an optimised, sharded step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import TargetError
from .extract.front import Front
from .extract.pins import Pins
from .plan import Plan
from .progress import Progress
from .rules.book import RuleBook
from .target import Target, load_target

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from .blockgraph import BlockGraph
    from .pipeline import Settings
    from .runtime.compile import CompiledPlan

# Seconds of search that a first call waits for, unless `settings` says otherwise.
_AT_LEAST = 2.0
_PER_OPERATION = 0.03

# How devices call themselves -> the target file that describes them.
_KINDS = (
    ("h100", "h100"),
    ("h200", "h200"),
    ("b200", "b200"),
    ("a100", "a100"),
    ("v6", "v6e"),
    ("v5p", "v5p"),
    ("v5 lite", "v5e"),
    ("v5e", "v5e"),
    ("v5", "v5p"),
    ("v4", "v4"),
)


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
    donate_argnums: int | Sequence[int] = (),
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    settings: Settings | None = None,
    on_progress: Progress | None = None,
) -> Optimized:
    """Optimise `fn` for a mesh of devices: call the result as you would call `jax.jit(fn)`.

    Planned at the first call for every new combination of argument types: of all plans within
    `limits` the one with the least `minimize`. `mesh` supplies the devices (default: all), `target`
    their description (default: from the devices' kind). `pins` fixes layouts of inputs, and
    `numerics="relaxed"` allows rules that change rounding, as in `optimize`. Under a JAX
    transformation (`grad`, `vmap`) the original function runs, so an optimised function still
    differentiates.
    Raises TargetError for devices that no target file describes, and what `optimize` raises.
    """
    return Optimized(
        fn,
        mesh,
        minimize,
        dict(limits or {}),
        target,
        tuple(rules),
        state,
        numerics,
        dict(pins or {}),
        _tuple(donate_argnums),
        _tuple(static_argnums),
        _names(static_argnames),
        settings,
        on_progress,
    )


class Optimized:
    """A function that is planned per argument types; `front(*args)` and `plan(*args)` show how."""

    def __init__(
        self,
        fn: Callable[..., Any],
        mesh: Any,
        minimize: str,
        limits: Mapping[str, float | str],
        target: str | Path | Target | None,
        rules: tuple[str | Path | RuleBook, ...],
        state: Mapping[str, str] | None,
        numerics: str,
        pins: Pins,
        donate_argnums: tuple[int, ...],
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        settings: Settings | None,
        on_progress: Progress | None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._mesh, self._target = mesh, target
        self._minimize, self._limits = minimize, limits
        self._rules, self._state, self._pins = rules, state, pins
        self._numerics = numerics
        self._donate, self._static = donate_argnums, static_argnums
        self._static_names = static_argnames
        self._settings, self._progress = settings, on_progress
        self._fronts: dict[Any, Front] = {}
        self._compiled: dict[Any, CompiledPlan] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the chosen plan for these argument types, planning it first if it is new."""
        import jax

        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((args, kwargs))):
            return jax.jit(
                self._fn, static_argnums=self._static, static_argnames=self._static_names
            )(*args, **kwargs)
        return self.compiled(*args, **kwargs)(*args, **kwargs)

    def front(self, *args: Any, **kwargs: Any) -> Front:
        """The Pareto front for arguments of these types (arrays or `jax.ShapeDtypeStruct`)."""
        from .pipeline import OBJECTIVES, optimize
        from .trace import trace

        key = self._key(args, kwargs)
        if key not in self._fronts:
            program = trace(
                self._fn,
                *args,
                donate_argnums=self._donate,
                static_argnums=self._static,
                static_argnames=self._static_names,
                **kwargs,
            )
            self._fronts[key] = optimize(
                program,
                self._machine(),
                tuple(dict.fromkeys((*OBJECTIVES, self._minimize, *self._limits))),
                limits=self._limits,
                rules=self._rules,
                state=self._state,
                numerics=self._numerics,
                pins=self._pins,
                settings=self._settings or _patience(program.graph),
                on_progress=self._progress,
            )
        return self._fronts[key]

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with arguments of these types runs."""
        return self.front(*args, **kwargs).best(self._minimize, self._limits)

    def compiled(self, *args: Any, **kwargs: Any) -> CompiledPlan:
        """The plan on its devices, with `.lower()` and `.compile()` as in JAX."""
        from .runtime.compile import compile

        key = self._key(args, kwargs)
        if key not in self._compiled:
            self._compiled[key] = compile(self.plan(*args, **kwargs), self._mesh)
        return self._compiled[key]

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """The plan as StableHLO."""
        return self.compiled(*args, **kwargs).lower()

    def _key(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        import jax

        static: tuple[Any, ...] = tuple((i, args[i]) for i in self._static if i < len(args))
        static += tuple((k, kwargs[k]) for k in self._static_names if k in kwargs)
        dynamic = [a for i, a in enumerate(args) if i not in self._static]
        named = {k: v for k, v in kwargs.items() if k not in self._static_names}
        leaves, tree = jax.tree.flatten((dynamic, named))
        avals = tuple(
            (tuple(x.shape), str(x.dtype), bool(getattr(x, "weak_type", False)))
            if hasattr(x, "shape") and hasattr(x, "dtype")
            else type(x)
            for x in leaves
        )
        return (static, tree, avals)

    def _machine(self) -> Target:
        if isinstance(self._target, Target):
            return self._target
        devices = self._devices()
        if self._target is not None:
            return load_target(self._target)
        return load_target(f"{target_name(devices[0])}:{len(devices)}")

    def _devices(self) -> list[Any]:
        import jax

        if self._mesh is None:
            return list(jax.devices())
        given = getattr(self._mesh, "devices", self._mesh)
        return list(given.flat) if hasattr(given, "flat") else list(given)


def _patience(graph: BlockGraph) -> Settings:
    """How long a call may wait for its plan: longer for longer programs, seconds for short ones."""
    from .pipeline import Settings

    def count(g: BlockGraph) -> int:
        return len(g.operations) + sum(count(r) for op in g.operations for r in op.regions)

    most = Settings()
    return replace(most, seconds=min(most.seconds, _AT_LEAST + _PER_OPERATION * count(graph)))


def target_name(device: Any) -> str:
    """The name of the target file for a JAX device.

    Raises TargetError when none fits.
    """
    if device.platform == "cpu":
        return "cpu"
    kind = str(device.device_kind).lower()
    for part, name in _KINDS:
        if part in kind:
            return name
    raise TargetError(
        f"no target describes devices of kind {device.device_kind!r}",
        where="mesh",
        hint="Pass target=, the name of one that ships with tapestry-egg or a file of your own.",
    )


def _tuple(value: int | Sequence[int]) -> tuple[int, ...]:
    return (value,) if isinstance(value, int) else tuple(value)


def _names(value: str | Sequence[str]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value)
