"""Loops and branches: how the local functions of an operation's regions are called.

Of a region's operands, its outputs, and whether a call in it has failed by now.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import jax

    Arrays = Sequence[jax.Array]


class LocalFunction(Protocol):
    """The local function of one region."""

    @property
    def calls(self) -> bool:
        """Whether some call in it may fail, and all devices must know."""

    def run(self, arguments: Arrays, failed: Any) -> tuple[tuple[jax.Array, ...], Any]:
        """The outputs, and whether a call has failed by now."""


#: No call has failed. Where no call may, nothing else goes through loops and branches.
NOT_FAILED = 0

_Region = tuple[Any, Any]


def _scan(
    params: Any, regions: tuple[LocalFunction, ...], operands: Arrays, failed: Any
) -> _Region:
    from jax import lax

    consts = operands[: params["num_consts"]]
    rest = operands[params["num_consts"] :]
    carries = params["num_carry"]

    def step(carry: tuple[Any, Any], slices: Any) -> tuple[tuple[Any, Any], Any]:
        before, failed = carry
        outputs, failed = regions[0].run((*consts, *before, *slices), failed)
        return (list(outputs[:carries]), failed), list(outputs[carries:])

    (final, failed), stacked = lax.scan(
        step,
        (list(rest[:carries]), _flag(failed, regions)),
        list(rest[carries:]),
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*final, *stacked], failed


def _while(
    params: Any, regions: tuple[LocalFunction, ...], operands: Arrays, failed: Any
) -> _Region:
    from jax import lax

    n, m = params["cond_nconsts"], params["body_nconsts"]
    asked, run = operands[:n], operands[n : n + m]
    test, body = regions
    failed = _flag(failed, regions)
    if test.calls:  # a condition has no room for a flag: ask before the loop and in its body

        def verdict(carry: Arrays, failed: Any) -> tuple[Any, Any]:
            (go,), failed = test.run((*asked, *carry), failed)
            return go & (failed == 0), failed

        def again(state: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            outputs, failed = body.run((*run, *state[0]), state[2])
            return list(outputs), *verdict(outputs, failed)

        first = list(operands[n + m :])
        final, _, failed = lax.while_loop(
            lambda state: state[1], again, (first, *verdict(first, failed))
        )
        return final, failed

    def goes_on(state: tuple[Any, Any]) -> Any:
        (go,), _ = test.run((*asked, *state[0]), NOT_FAILED)
        return go & (state[1] == 0) if body.calls else go

    def step(state: tuple[Any, Any]) -> tuple[Any, Any]:
        outputs, failed = body.run((*run, *state[0]), state[1])
        return list(outputs), failed

    final, failed = lax.while_loop(goes_on, step, (list(operands[n + m :]), failed))
    return final, failed


def _cond(
    params: Any, regions: tuple[LocalFunction, ...], operands: Arrays, failed: Any
) -> _Region:
    from jax import lax

    def branch(region: LocalFunction) -> Callable[..., Any]:
        return lambda failed, *xs: region.run(xs, failed)

    outputs, failed = lax.switch(
        operands[0], [branch(r) for r in regions], _flag(failed, regions), *operands[1:]
    )
    return outputs, failed


def _flag(failed: Any, regions: tuple[LocalFunction, ...]) -> Any:
    """The flag as regions carry it: an s32[] where one of them calls, and else nothing at all."""
    import jax.numpy as jnp

    return jnp.asarray(failed, jnp.int32) if any(r.calls for r in regions) else None


#: Kernel with regions -> how it runs them.
REGIONS: dict[str, Callable[[Any, tuple[LocalFunction, ...], Arrays, Any], _Region]] = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
