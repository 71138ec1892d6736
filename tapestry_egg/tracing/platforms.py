"""Programs that differ by platform (`jax.lax.platform_dependent`): which branch runs where.

Of such a conditional JAX lowers the branches of the platforms that it lowers for, and no other: a
kernel that is written for GPUs stands in a program that runs on CPUs, too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

#: How JAX calls the platforms that plans run on.
_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


def branch_everywhere(params: Mapping[str, Any]) -> Any | None:
    """The branch of a conditional that runs on every platform that plans run on, as those of
    `jnp.diagonal` do but inside of Pallas; None where platforms differ, or a value decides."""
    of = params.get("branches_platforms")
    if of is None:
        return None
    default = len(of) - 1 if of[-1] is None else None
    taken = {
        next((i for i, names in enumerate(of) if names and name in names), default)
        for name in _PLATFORMS
    }
    (one,) = taken if len(taken) == 1 else (None,)
    return None if one is None else params["branches"][one]


def switched(
    params: Mapping[str, Any], branches: Sequence[Callable[..., Any]], operands: Sequence[Any]
) -> Any:
    """What a conditional gives: of the branch that its first operand chooses, or the platform."""
    from jax import lax

    of = params.get("branches_platforms")
    if of is None:
        return lax.switch(operands[0], branches, *operands[1:])
    named = {name: f for names, f in zip(of, branches, strict=True) for name in names or ()}
    default = branches[-1] if of[-1] is None else None
    return lax.platform_dependent(*operands[1:], default=default, **named)
