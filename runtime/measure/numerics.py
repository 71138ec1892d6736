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


def in_float64(fn: Callable[..., Any], args: Sequence[Any]) -> list[np.ndarray]:
    """Flat outputs of `fn` computed with every float of its arguments widened to float64."""
    import jax

    with jax.enable_x64(True):
        wide = jax.tree.map(_widened, tuple(args))
        return [on_host(x) for x in jax.tree.leaves(jax.jit(fn)(*wide))]


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
    by luck.
    """
    names = list(groups) or ["outputs"] * len(reference)
    found = []
    for name in dict.fromkeys(names):
        mine = [k for k, n in enumerate(names) if n == name]
        floor = max((_ulp(np.asarray(original[k]).dtype) for k in mine), default=0.0)
        errors = [
            _error([reference[k] for k in mine], [np.asarray(x[k]) for k in mine])
            for x in (original, plan)
        ]
        found.append(Accuracy(name, errors[0], errors[1], ALLOWED * max(errors[0], floor)))
    return tuple(found)


def _widened(x: Any) -> Any:
    import jax.numpy as jnp

    x = x if is_key(x) else jnp.asarray(x)
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _ulp(dtype: Any) -> float:
    import jax.numpy as jnp

    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.floating) else 0.0


def _error(reference: Sequence[np.ndarray], found: Sequence[np.ndarray]) -> float:
    off = scale = 0.0
    for r, x in zip(reference, found, strict=True):
        wide = np.asarray(r, dtype=np.float64)
        off += float(np.sum((np.asarray(x, dtype=np.float64) - wide) ** 2))
        scale += float(np.sum(wide**2))
    return float(np.sqrt(off) / np.sqrt(scale)) if scale else float(np.sqrt(off))
