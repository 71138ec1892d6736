"""Running a plan for its numbers: against the original program, the clock, and XLA's account."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tapestry_egg.errors import TraceError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.plans.plan import Plan
from tapestry_egg.printable import printable
from tapestry_egg.quantities import TIME

if TYPE_CHECKING:
    from tapestry_egg.runtime.measure.compare import Comparison
    from tapestry_egg.runtime.measure.numerics import Accuracy
    from tapestry_egg.tracing.entry import Entry

    Array = np.ndarray[Any, Any]


#: Differences up to this share of an output's largest magnitude count as rounding.
CLOSE = 1e-4
#: What differs more must be this many times farther off than the original itself moves when its
#: arguments change in their last places: an output that is made of rounding moves freely.
_NOISE = 16.0


@dataclass(frozen=True)
class Rehearsal:
    """What running a plan showed.

    `differences` pairs every output with its largest difference to the original program's, as a
    share of the output's largest magnitude. It is small unless the output is itself made of
    rounding, such as an optimizer's step along a gradient that is zero in exact arithmetic.
    `noise` is how far the original's outputs move when its arguments change in their last places;
    it is looked at where differences are large. `accuracy` judges by float64, where the program was
    at hand to compute with it.
    `seconds` is the median of the timed runs, `original_seconds` that of the original on one
    device.
    """

    plan: Plan
    platform: str
    differences: tuple[tuple[str, float], ...]
    seconds: float
    original_seconds: float
    comparison: Comparison
    accuracy: tuple[Accuracy, ...] = ()
    noise: tuple[float, ...] = ()

    @property
    def differing(self) -> tuple[str, ...]:
        """The outputs that differ from the original's by more than rounding explains."""
        noise = self.noise or (0.0,) * len(self.differences)
        return tuple(
            name
            for (name, share), n in zip(self.differences, noise, strict=True)
            if not share <= max(CLOSE, _NOISE * n)
        )

    @property
    def ok(self) -> bool:
        """Whether the plan is as accurate as the original: by float64 where that could be judged,
        otherwise no output may differ by more than rounding. And whether exactly the planned bytes
        were moved."""
        right = all(a.ok for a in self.accuracy) if self.accuracy else not self.differing
        return right and self.comparison.equal

    def data(self) -> dict[str, Any]:
        """The same as plain data."""
        return {
            "plan": self.plan.name,
            "mesh": str(self.plan.mesh),
            "platform": self.platform,
            "differences": dict(self.differences),
            "differing": list(self.differing),
            "ok": self.ok,
            "accuracy": [asdict(a) for a in self.accuracy],
            "seconds": self.seconds,
            "original_seconds": self.original_seconds,
            "planned_peak_bytes": self.comparison.planned_peak_bytes,
            "compiled_peak_bytes": self.comparison.compiled_peak_bytes,
            "collectives_equal": self.comparison.equal,
            "collectives": [
                {
                    "kind": row.kind,
                    "group": row.group,
                    "planned_bytes": row.planned_bytes,
                    "compiled_bytes": row.compiled_bytes,
                }
                for row in self.comparison.rows
            ],
        }

    def __str__(self) -> str:
        took = TIME.format(self.seconds)
        original = TIME.format(self.original_seconds)
        close = sum(share <= CLOSE for _, share in self.differences)
        worst, share = max(self.differences, key=lambda pair: pair[1], default=("nothing", 0.0))
        return printable(
            "\n".join(
                [
                    f"plan {self.plan.name}, mesh {self.plan.mesh}, {self.platform} devices",
                    f"outputs within {CLOSE:g} of the original's: "
                    f"{close} of {len(self.differences)}; farthest: {worst} by {share:.2g} of its "
                    "largest value",
                    *(
                        f"DIFFERS by more than rounding: {name}"
                        for name in (() if self.accuracy else self.differing)
                    ),
                    *(f"{a} (float64 decides)" for a in self.accuracy),
                    f"time per step here: {took}; the original on one device: {original}",
                    str(self.comparison),
                ]
            )
        )


def rehearse(
    plan: Plan, program: str | None = None, *, repeat: int = 5, seed: int = 0
) -> Rehearsal:
    """Run `plan` and the original program on the same arguments, and compare: `rehearse_all` of one
    plan."""
    (shown,) = rehearse_all((plan,), program, repeat=repeat, seed=seed)
    return shown


def rehearse_all(
    plans: Sequence[Plan], program: str | None = None, *, repeat: int = 5, seed: int = 0
) -> Iterator[Rehearsal]:
    """Run plans of one program and the original program on the same arguments, and compare; the
    original is run and timed once.

    The arguments are those of `program` (`FILE.py:NAME`, see `tracing/entry.py`), else random ones
    drawn with `seed`: numbers in [0, 1), integers 0 and 1, so that roots and indices are in their
    domain. Raises TargetError where the machine lacks devices, TraceError where the program's
    arguments are not the plan's.
    """
    simulate_devices(max((plan.mesh.devices for plan in plans), default=1))
    original = None
    for plan in plans:
        original = original or _Original(plan, program, repeat, seed)
        yield original.beside(plan)


class _Original:
    """The program as it was given, not the form of it that a plan runs, and its arguments: those of
    `program`, else random ones."""

    def __init__(self, plan: Plan, program: str | None, repeat: int, seed: int) -> None:
        import jax

        from tapestry_egg.runtime.measure.numerics import is_key
        from tapestry_egg.tracing.emit import emit
        from tapestry_egg.tracing.entry import load_entry

        types = [plan.graph.values[v] for v in plan.graph.inputs]
        self.repeat, self.seed = repeat, seed
        self.entry = load_entry(program) if program else None
        leaves = _leaves(self.entry, types) if self.entry else random_arguments(types, seed)
        self.leaves = [x if is_key(x) else np.asarray(x) for x in leaves]
        run = jax.jit(emit(plan.program.graph if plan.program else plan.graph))
        self.run = run.lower(*self.fresh()).compile()

    def fresh(self) -> list[Any]:
        """The arguments again: those that are donated do not outlive a call."""
        import jax

        from tapestry_egg.runtime.measure.numerics import is_key

        return [jax.random.clone(x) if is_key(x) else x for x in self.leaves]

    @cached_property
    def ran(self) -> tuple[list[Array], float]:
        """What it gives, and how long it takes on one device."""
        return _ran(lambda: self.run(*self.fresh()), self.repeat)

    @cached_property
    def noise(self) -> list[float]:
        """How far its outputs move when its arguments change in their last places."""
        from tapestry_egg.runtime.measure.numerics import SHAKES, on_host, shaken

        expected, _ = self.ran
        noise = [0.0] * len(expected)
        for k in range(SHAKES):
            moved = self.run(*(shaken(x, self.seed + k) for x in self.fresh()))
            pairs = zip(noise, map(on_host, moved), expected, strict=True)
            noise = [max(n, _difference(m, e)) for n, m, e in pairs]
        return noise

    @cached_property
    def standard(self) -> tuple[list[Array], list[Array]] | None:
        """What it gives in float64 and as written, where its function is at hand."""
        from tapestry_egg.runtime.measure.numerics import standard

        entry = self.entry
        return standard(entry.function, lambda: entry.arguments) if entry else None

    def beside(self, plan: Plan) -> Rehearsal:
        """What running a plan of it shows."""
        import jax

        from tapestry_egg.runtime.compiled import compile
        from tapestry_egg.runtime.measure.compare import compare
        from tapestry_egg.runtime.measure.numerics import accuracy

        # Flat: what a plan file holds of the user's pytrees does not matter here.
        planned = compile(replace(plan, program=None))
        compiled = planned.compile()
        found, seconds = _ran(lambda: planned(*self.fresh()), self.repeat)
        expected, original_seconds = self.ran
        names = plan.graph.output_names or tuple(f"output {i}" for i in range(len(found)))
        names = tuple(name or "result" for name in names)  # that of one alone has no path
        differences = [_difference(f, e) for f, e in zip(found, expected, strict=True)]
        judged = accuracy(*self.standard, found) if self.standard else ()
        close = judged or all(share <= CLOSE for share in differences)
        return Rehearsal(
            plan=plan,
            platform=jax.devices()[0].platform,
            differences=tuple(zip(names, differences, strict=True)),
            seconds=seconds,
            original_seconds=original_seconds,
            comparison=compare(plan, compiled),
            accuracy=judged,
            noise=(0.0,) * len(differences) if close else tuple(self.noise),
        )


def simulate_devices(count: int) -> None:
    """Let JAX's CPU backend show `count` devices, where it has not started yet.

    Accelerators are not touched: where they are present, JAX prefers them.
    """
    flag = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if flag not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {flag}={count}".strip()


def random_arguments(types: Sequence[TensorType], seed: int) -> list[Any]:
    """One array per type: numbers in [0, 1), integers 0 and 1, fresh keys."""
    import jax

    from tapestry_egg.graph.arrays import decode_dtype, key_impl

    random = np.random.default_rng(seed)
    arrays: list[Any] = []
    for i, type_ in enumerate(types):
        dtype = decode_dtype(type_.dtype)
        if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
            key = jax.random.key(seed + i, impl=key_impl(type_.dtype[4:-1]))
            arrays.append(jax.random.split(key, type_.shape) if type_.shape else key)
        elif np.issubdtype(dtype, np.integer) or dtype == np.bool_:
            arrays.append(random.integers(0, 2, type_.shape).astype(dtype))
        else:
            arrays.append(random.random(type_.shape).astype(dtype))
    return arrays


def _leaves(entry: Entry, types: Sequence[TensorType]) -> list[Any]:
    """The arrays of a program's arguments; they must be what the plan takes."""
    import jax

    from tapestry_egg.graph.arrays import dtype_name

    leaves = jax.tree.leaves(entry.arguments)
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise TraceError(
            "the arguments are only shapes",
            where=entry.name,
            hint="Give arrays, or leave --program.",
        )
    given = [str(TensorType(np.shape(x), dtype_name(jax.typeof(x).dtype))) for x in leaves]
    wanted = [str(t) for t in types]
    if given != wanted:
        at = next((i for i, (g, w) in enumerate(zip(given, wanted, strict=False)) if g != w), None)
        raise TraceError(
            f"argument {at} is {given[at]}, the plan takes {wanted[at]}"
            if at is not None
            else f"{len(given)} arrays given, the plan takes {len(wanted)}",
            where=entry.name,
            hint="Give the program that the plan was made for.",
        )
    return leaves


def _difference(found: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    """Largest difference as a share of the largest magnitude; NaN agrees with NaN only."""
    if found.size == 0:
        return 0.0
    wide = np.complex128 if np.iscomplexobj(expected) else np.float64
    a, b = found.astype(wide), expected.astype(wide)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    if same.all():
        return 0.0
    apart = np.abs(a - b)[~same]
    scale = float(np.abs(b[np.isfinite(b)]).max(initial=0.0)) or 1.0
    return float(apart.max() / scale) if np.isfinite(apart).all() else float("inf")


def _ran(call: Any, repeat: int) -> tuple[list[Array], float]:
    """What the first of `repeat` calls of something compiled gives, and their median seconds,
    results waited for."""
    import jax

    from tapestry_egg.runtime.measure.numerics import on_host

    given, seconds = list[Any](), list[float]()
    for _ in range(max(repeat, 1)):
        started = time.perf_counter()
        made = jax.block_until_ready(call())
        seconds.append(time.perf_counter() - started)
        given = given or [on_host(x) for x in made]
    return given, statistics.median(seconds)
