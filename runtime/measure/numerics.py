"""The numerics rule: a plan may be no less accurate than the program it came from.

Reassociated sums differ in the last bits, so "the same numbers" is judged against float64: the
plan's error may be at most four times the original's own.
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
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(fn)(*wide))]


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

    x = jnp.asarray(x)
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
