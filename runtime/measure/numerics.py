"""The numerics rule: a plan may be no less accurate than the program it came from.

Reassociated sums differ in the last bits, so "the same numbers" is judged against float64: the
plan's error may be at most four times that of the original as it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: How many times the original's error a plan's may be.
ALLOWED = 4.0
#: Times that the original is run on other roundings of its arguments.
SHAKES = 3


@dataclass(frozen=True)
class Accuracy:
    """Errors of one group of outputs against float64, as a share of the group's norm."""

    name: str
    original: float
    plan: float
    allowed: float

    @property
    def ok(self) -> bool:
        return self.plan <= self.allowed

    def __str__(self) -> str:
        verdict = "ok" if self.ok else "TOO LARGE"
        return f"{self.name}: error {self.plan:.2e}, the original's {self.original:.2e}: {verdict}"


def standard(
    fn: Callable[..., Any], fresh: Callable[[], Sequence[Any]]
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """What plans of `fn` are held against, and what it gives itself, for `accuracy`: flat outputs
    in float64, and as written. `fresh` gives the arguments, anew for each call.

    Of outputs that are in 64 bits as written, nothing finer tells the error: it is taken to be what
    the program makes of arguments that are moved in their last places.
    """
    import jax

    reference, once = in_float64(fn, fresh()), as_written(fn, fresh())
    fine = [k for k, x in enumerate(once) if x.dtype in (np.float64, np.complex128)]
    for seed in range(SHAKES if fine else 0):
        moved = as_written(fn, jax.tree.map(lambda x, s=seed: shaken(x, s), fresh()))
        for k in fine:
            ends = [_wide(reference[k])]
            if _error(ends, [_wide(moved[k])]) > _error(ends, [_wide(once[k])]):
                once[k] = moved[k]
    return reference, once


def in_float64(fn: Callable[..., Any], args: Sequence[Any]) -> list[np.ndarray]:
    """Flat outputs of `fn`, with every float of it and of its arguments as float64."""
    from . import float64

    return [on_host(x) for x in float64.in_float64(fn, args)]


def shaken(x: Any, seed: int) -> Any:
    """Floating-point numbers moved by at most one in their last places; all else as it is."""
    import jax.numpy as jnp

    if is_key(x) or not jnp.issubdtype(getattr(x, "dtype", bool), jnp.floating):
        return x
    x = np.asarray(x)
    eps = _ulp(x.dtype)
    up = np.random.default_rng(seed).uniform(-eps, eps, x.shape)
    moved: np.ndarray = (x.astype(np.float64) * (1.0 + up)).astype(x.dtype)
    return moved


def as_written(fn: Callable[..., Any], args: Sequence[Any]) -> list[np.ndarray]:
    """Flat outputs of `fn` on one device, rounded to 16 bits wherever the program says so.

    XLA may leave such roundings out, and on CPUs, which multiply in 32 bits, it leaves out most: a
    plan that sends 16 bits, as the program has it, would be held against one in 32.
    """
    import jax

    strict = jax.jit(fn, compiler_options={"xla_allow_excess_precision": False})
    return [on_host(x) for x in jax.tree.leaves(strict(*args))]


def on_host(x: Any) -> np.ndarray:
    """An array as NumPy has it; keys of random numbers as the words that they are."""
    import jax

    return np.asarray(jax.random.key_data(x) if is_key(x) else x)


def is_key(x: Any) -> bool:
    """Whether an array holds keys of random numbers."""
    import jax

    return hasattr(x, "dtype") and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)


def accuracy(
    reference: Sequence[np.ndarray],
    original: Sequence[Any],
    plan: Sequence[Any],
    groups: Sequence[str] = (),
) -> tuple[Accuracy, ...]:
    """Compare flat outputs of the original and of a plan with float64 ones, group by group.

    `groups` names the group of every output (all one group if empty). A group's error is the norm
    of the difference over the norm of the reference; integers must be equal. The least error that
    counts is one unit in the last place of the outputs' dtype, since a single number may be right
    by luck. Infinities and what is no number agree with their likes alone.
    """
    names = list(groups) or ["outputs"] * len(reference)
    found = []
    for name in dict.fromkeys(names):
        mine = [k for k, n in enumerate(names) if n == name]
        exact = [_wide(reference[k]) for k in mine]
        once = [_wide(original[k]) for k in mine]
        floor = max((_ulp(np.asarray(original[k]).dtype) for k in mine), default=0.0)
        these = [_wide(plan[k]) for k in mine]
        judged = [_judged(r, x) for r, x in zip(exact, once, strict=True)]
        errors = [
            _error(*([y[at] for y, at in zip(x, judged, strict=True)] for x in (exact, given)))
            for given in (once, these)
        ]
        found.append(Accuracy(name, errors[0], errors[1], ALLOWED * max(errors[0], floor)))
    return tuple(found)


def _ulp(dtype: Any) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _wide(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.complex128 if np.iscomplexobj(x) else np.float64, copy=False)


def _judged(exact: np.ndarray, once: np.ndarray) -> Any:
    """Where a plan is judged: what the original overflows to, or is no number of, is asked of no
    plan."""
    finite = np.isfinite(once)
    return ... if finite.all() else finite | _same(exact, once)


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    same: np.ndarray = (a == b) | (np.isnan(a) & np.isnan(b))
    return same


def _error(reference: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    off = scale = 0.0
    for r, x in zip(reference, found, strict=True):
        with np.errstate(invalid="ignore"):  # infinities apart from infinities
            apart = np.ravel(x - r)
        if not np.isfinite(apart).all():
            other = ~_same(r, x)
            apart = np.abs(x[other] - r[other])
            apart, r = np.where(np.isnan(apart), np.inf, apart), r[np.isfinite(r)]
        r = np.ravel(r)
        off += float(np.vdot(apart, apart).real)
        scale += float(np.vdot(r, r).real)
    return float(np.sqrt(off) / np.sqrt(scale)) if scale else float(np.sqrt(off))
