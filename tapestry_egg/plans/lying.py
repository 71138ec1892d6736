"""What compilers are told of the order in which the dims of an array lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax


def laid_in_order(x: jax.Array, order: Sequence[int] | None = None) -> jax.Array:
    """An array that its compiler lays as its dims are written, or with those of `order` from the
    outermost on. A module that `jax.export` writes says nothing of it."""
    found: jax.Array = _primitive().bind(x, order=tuple(order or range(x.ndim)))
    return found


@cache
def _primitive() -> Any:
    """JAX's `with_layout_constraint`, but not in what is exported: nothing promises that a later
    compiler knows what that becomes."""
    from jax.experimental.layout import Layout, with_layout_constraint
    from jax.extend.core import Primitive
    from jax.interpreters import mlir

    def told(x: jax.Array, *, order: tuple[int, ...]) -> jax.Array:
        return with_layout_constraint(x, Layout(order))

    lower_told = mlir.lower_fun(told, multiple_results=False)

    def lowered(context: Any, x: Any, *, order: tuple[int, ...]) -> Any:
        if context.module_context.lowering_parameters.for_export:
            return [x]
        return lower_told(context, x, order=order)

    found = Primitive("laid_in_order")
    found.def_impl(lambda x, *, order: x)
    found.def_abstract_eval(lambda x, *, order: x)
    mlir.register_lowering(found, lowered)
    return found
