"""Scans as JAX's versions hold them: how many operands are constants, and how many are carried.

Up to JAX 0.10 a scan's parameters say so in numbers, `num_consts` and `num_carry`; from 0.11 on the
trees `ft_in` (constants, carries, slices) and `ft_out` do. Block graphs have the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_TREES = ("ft_in", "ft_out")


def with_counts(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a scan with `num_consts` and `num_carry`, whichever JAX made them."""
    if "ft_in" not in params:
        return dict(params)
    consts, carry, _ = params["ft_in"].unpack()
    kept = {k: v for k, v in params.items() if k not in _TREES}
    return {**kept, "num_consts": len(consts.vals), "num_carry": len(carry.vals)}


def binds_counts() -> bool:
    """Whether JAX's own scan takes the numbers; if not, `scanned` calls its public face."""
    import jax

    return tuple(jax.__version_info__) < (0, 11)


def scanned(params: Mapping[str, Any], body: Any, operands: Sequence[Any]) -> list[Any]:
    """The results of a scan with counts; `body` takes constants, carries and slices, flat."""
    from jax import lax

    n = int(params["num_consts"])
    m = n + int(params["num_carry"])

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = list(body(*operands[:n], *carry, *slices))
        return out[: m - n], out[m - n :]

    given = {k: params[k] for k in ("length", "reverse", "unroll")}
    final, stacked = lax.scan(step, list(operands[n:m]), list(operands[m:]), **given)
    return [*final, *stacked]
