"""Loops, branches and calls of StableHLO, as JAX has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .constants import word
from .reductions import top_k

#: Calls out of the module that only say where their operand lies, which the plan decides.
_NO_CHANGE = {"Sharding"}


def while_(operation: Any, args: list[Any], runner: Any) -> Any:
    """A loop; one that counts from a known number to another runs that often, which plans need."""
    from jax import lax

    test, body = (region.blocks[0] for region in operation.regions)

    def run(carry: Any) -> Any:
        return tuple(runner.block(body, carry))

    counted = _counted(test, body, args, runner)
    if counted is None:
        return lax.while_loop(
            lambda carry: runner.block(test, carry)[0], run, tuple(map(_traced, args))
        )
    counter, first, last = counted
    ends = list(body.operations[len(body.operations) - 1].operation.operands)
    others = [k for k in range(len(args)) if k != counter and ends[k] != body.arguments[k]]

    def step(i: Any, carry: Any) -> Any:
        full = list(args)  # what no iteration changes is not carried along
        full[counter] = i.astype(args[counter].dtype)
        for k, x in zip(others, carry, strict=True):
            full[k] = x
        made = run(full)
        return tuple(made[k] for k in others)

    found = lax.fori_loop(first, last, step, tuple(_traced(args[k]) for k in others))
    whole = list(args)
    whole[counter] = np.asarray(max(first, last), args[counter].dtype)
    for k, x in zip(others, found, strict=True):
        whole[k] = x
    return tuple(whole)


def _traced(value: Any) -> Any:
    """What loops carry, as JAX's arrays."""
    import jax.numpy as jnp

    return jnp.asarray(value)


def _counted(test: Any, body: Any, args: list[Any], runner: Any) -> tuple[int, int, int] | None:
    """Which number is counted up by one, from what until what; None where none is."""
    *compared, end = [op.operation for op in test.operations]
    told = [op for op in compared if op.name != "stablehlo.constant"]
    if (
        len(told) != 1
        or told[0].name != "stablehlo.compare"
        or end.operands[0] != told[0].results[0]
    ):
        return None
    if word(told[0].attributes["comparison_direction"]) != "LT":
        return None
    left, right = told[0].operands
    counter = next((k for k, a in enumerate(test.arguments) if a == left), None)
    limit = _known(right, test, args, runner)
    if counter is None or limit is None or not isinstance(args[counter], np.ndarray | np.generic):
        return None
    made = [op.operation for op in body.operations]
    result = made[-1].operands[counter]
    adder = next(
        (op for op in made if op.name == "stablehlo.add" and op.results[0] == result), None
    )
    if adder is None:
        return None
    counted, by = adder.operands
    step = _known(by, body, args, runner)
    if counted != body.arguments[counter] or step != 1:
        return None
    return counter, int(args[counter]), limit


def _known(value: Any, block: Any, args: list[Any], runner: Any) -> int | None:
    """The number that a value of a loop is known to be, made inside or outside, or carried along
    unchanged; None where it is not known."""
    from .constants import constant

    for op in block.operations:
        if op.operation.results[:1] and value in list(op.operation.results):
            if op.operation.name != "stablehlo.constant":
                return None
            found: Any = constant(op.operation)
            return int(found) if found.ndim == 0 else None
    found = runner.outer(value)
    if isinstance(found, np.ndarray | np.generic) and np.ndim(found) == 0:
        return int(found)
    return None


def case(operation: Any, args: list[Any], runner: Any) -> Any:
    """A branch by number; a number that no branch has takes the last."""
    import jax.numpy as jnp
    from jax import lax

    regions = list(operation.regions)
    branches = [lambda _, b=r.blocks[0]: tuple(runner.block(b, ())) for r in regions]
    last = len(branches) - 1
    index = jnp.where((args[0] < 0) | (args[0] > last), last, args[0])
    return lax.switch(index, branches, None)


def if_(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    yes, no = (
        lambda _, b=region.blocks[0]: tuple(runner.block(b, ())) for region in operation.regions
    )
    return lax.cond(args[0], yes, no, None)


def call(operation: Any, args: list[Any], runner: Any) -> Any:
    return runner.call(operation.attributes["callee"].value, args)


def composite(operation: Any, args: list[Any], runner: Any) -> Any:
    """What a composite operation is made of; of CHLO's `top_k` that is a sort by falling keys."""
    if operation.attributes["name"].value == "chlo.top_k":
        return top_k(operation, args, runner)
    return runner.call(operation.attributes["decomposition"].value, args)


def custom_call(operation: Any, args: list[Any], runner: Any) -> Any:
    name = operation.attributes["call_target_name"].value
    if name not in _NO_CHANGE:
        raise ValueError(f"a call of {name!r}, which only a compiler knows")
    return args[0]


def as_it_is(operation: Any, args: list[Any], runner: Any) -> Any:
    """Layouts are left to the plan."""
    return args[0]


OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    "stablehlo.while": while_,
    "stablehlo.case": case,
    "stablehlo.if": if_,
    "stablehlo.composite": composite,
    "stablehlo.custom_call": custom_call,
    "func.call": call,
    "sdy.sharding_constraint": as_it_is,
}
