"""JAX's settings: those that a graph is read under, and those of single equations.

A graph holds no settings. What an equation's own settings decide is spelled out when it is traced
(the bits of random keys) or refused; and a graph runs under the same settings everywhere, whatever
those of the caller are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tapestry_egg.errors import UnplannedError
from tapestry_egg.graph.blockgraph import BlockGraph

#: Kernels whose bits depend on `jax_threefry_partitionable`.
DRAWS = frozenset(("random_bits", "random_split"))

#: What plans run on: the memory and the compute units that a device uses by default.
_DEFAULTS = (None, "device")


@contextmanager
def plain_settings(graph: BlockGraph | None = None) -> Iterator[None]:
    """The settings of JAX that a graph is lowered under, with 64-bit types if it has any."""
    import jax

    with ExitStack() as settings:
        settings.enter_context(jax.threefry_partitionable(True))
        settings.enter_context(jax.default_matmul_precision(None))
        settings.enter_context(jax.numpy_dtype_promotion("standard"))
        settings.enter_context(jax.numpy_rank_promotion("allow"))
        if graph is not None and _is_wide(graph):
            settings.enter_context(jax.enable_x64(True))
        yield


def _is_wide(graph: BlockGraph) -> bool:
    """Whether a graph, or one inside it, has values of 64-bit types."""
    if any(t.dtype in ("float64", "int64", "uint64", "complex128") for t in graph.values):
        return True
    return any(_is_wide(region) for op in graph.operations for region in op.regions)


def partitionable(eqn: Any) -> bool:
    """Whether an equation was traced with `jax_threefry_partitionable` on, as graphs have it."""
    return bool(getattr(getattr(eqn, "ctx", None), "threefry_partitionable", True))


@contextmanager
def settings_of(eqn: Any) -> Iterator[None]:
    """The settings that an equation was traced under, for what is traced again in its place."""
    import jax

    with jax.threefry_partitionable(partitionable(eqn)):
        yield


def check_settings_kept(eqn: Any, where: str) -> None:
    """Raise UnplannedError if an equation asks for compute units or a compiler's notes."""
    context = getattr(eqn, "ctx", None)
    kind = getattr(context, "compute_type", None)
    notes = getattr(context, "xla_metadata", None)
    if kind in _DEFAULTS and not notes:
        return
    what = f"compute_on({kind!r})" if kind not in _DEFAULTS else f"set_xla_metadata({notes})"
    raise UnplannedError(
        f"{eqn.primitive.name} is under {what:.120}, which no plan keeps",
        where=where,
        hint="Leave this out of what is planned, or call the function under jax.jit.",
    )
