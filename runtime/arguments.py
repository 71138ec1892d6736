"""The arguments of a compiled plan: of its types, in its layouts, given up where donated."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import TensorType

if TYPE_CHECKING:
    import jax


def checked(x: Any, type_: TensorType, name: str) -> Any:
    """An argument of the type that the plan was made for.

    Raises PlanError for another shape or dtype.
    """
    import jax
    import numpy as np

    from tapestry_egg.graph.arrays import decode_dtype, dtype_name

    if not hasattr(x, "dtype"):
        x = np.asarray(x, None if isinstance(x, list) else decode_dtype(type_.dtype))
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    given = TensorType(tuple(x.shape), dtype_name(dtype))
    if (given.shape, given.dtype) != (type_.shape, type_.dtype):
        raise PlanError(
            f"is {given}, the plan was made for {type_}",
            where=name,
            hint="Trace and optimize again for other shapes.",
        )
    return x


def unique(arrays: Sequence[Any], given_up: Sequence[bool], names: Sequence[str]) -> None:
    """Raises PlanError, with nothing moved yet, where an array that is given up to a call is
    another argument of it, too. Arrays of NumPy's are copied, and may be."""
    import jax

    first: dict[int, int] = {}
    for k, x in enumerate(arrays if any(given_up) else ()):
        j = first.setdefault(id(x), k) if isinstance(x, jax.Array) else k
        if j < k and (given_up[j] or given_up[k]):
            raise PlanError(
                f"is donated and the same array as {names[k if given_up[j] else j]}: the same "
                "buffer is not donated twice, nor read beside",
                where=names[j if given_up[j] else k],
                hint="Donate an array once, and give a copy (x.copy()) in the other place.",
            )


@dataclass(slots=True)
class Moves:
    """Arguments that lie on a mesh and are moved: one that is moved a second time is told of, once
    for all. Once is no matter: a checkpoint is restored as it was saved."""

    told: bool = False
    _before: set[int] = field(default_factory=set)

    def count(self, given: Sequence[Any], placed: Sequence[Any], names: Sequence[str]) -> None:
        """Warns of arrays that are moved again."""
        if self.told:
            return
        now = {k for k, (x, y) in enumerate(zip(given, placed, strict=True)) if _moved(x, y)}
        again = sorted(now & self._before)
        self._before |= now
        if again:
            self.told = True
            more = f" and {len(again) - 3} more" if len(again) > 3 else ""
            warnings.warn(
                f"{', '.join(names[k] for k in again[:3])}{more} lie on a mesh in other layouts "
                f"than the plan's and are moved at every call. Put them where the plan has them "
                f"(input_shardings of compiled(...)); or call clear_cache(), and the next call "
                f"plans for where they lie, unless in_shardings or pins say otherwise.",
                stacklevel=6,
            )


def _moved(given: Any, placed: Any) -> bool:
    """Whether an array that the user put on several devices has been copied to others."""
    import jax

    if given is placed or not isinstance(given, jax.Array) or not given.committed:
        return False
    lies = given.sharding
    return len(lies.device_set) > 1 and not lies.is_equivalent_to(placed.sharding, given.ndim)


def taken_as_it_is(x: Any, sharding: jax.sharding.Sharding) -> bool:
    """Whether JAX puts an argument in place itself: numbers and arrays of NumPy's, and arrays that
    lie so already or that nobody has put anywhere."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array):
        return not x.committed or x.sharding.is_equivalent_to(sharding, x.ndim)
    return type(x) in (bool, int, float, complex) or isinstance(x, np.ndarray | np.generic)


def placed_as(x: Any, sharding: jax.sharding.Sharding, donated: bool) -> Any:
    """The same array if it lies so, else a copy that does; a donated one is given up for it."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array):
        lies = x.sharding
        # On axes of type Explicit an array has its layout in its type.
        typed = bool(getattr(getattr(lies, "mesh", None), "explicit_axes", ()))
        if lies == sharding or (not typed and lies.is_equivalent_to(sharding, x.ndim)):
            return x
        if sharding.is_fully_addressable and _cut_on_host(x, sharding):
            placed = jax.device_put(np.asarray(x), sharding)
        elif sharding.is_fully_addressable or not x.is_fully_addressable:
            placed = jax.device_put(x, sharding, donate=donated)
            same = lies.is_equivalent_to(sharding, x.ndim)
            if same or lies.device_set != sharding.device_set:
                return placed  # some of their blocks are the very same
        else:
            placed = spread(x, sharding)
        if donated and not x.is_deleted():
            x.delete()
        return placed
    return jax.device_put(x, sharding) if sharding.is_fully_addressable else spread(x, sharding)


def spread(x: Any, sharding: Any) -> jax.Array:
    """What every process holds for itself, the same on each, as one array over all of them.

    Every process gives its own blocks, and nothing is sent.
    """
    import jax
    import numpy as np

    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = spread(jax.random.key_data(x), sharding)  # the last dim is not cut
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    host = np.asarray(x)
    host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype), copy=False)
    return jax.make_array_from_callback(host.shape, sharding, lambda at: host[at])


def _cut_on_host(x: jax.Array, sharding: jax.sharding.Sharding) -> bool:
    """Whether an array is better cut by NumPy: one that lies whole on a CPU device.

    JAX would compile a program that slices it for every shape, which takes longer than many a
    program that it is for.
    """
    import jax

    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended) or sharding.is_fully_replicated:
        return False
    devices = x.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def donated_arguments(
    tree: Any, donated: Sequence[bool]
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The numbers and names of the donated arguments, from the structure of (args, kwargs).

    Raises PlanError for an argument that is donated in part: JAX has no way to say it.
    """
    positional, named = tree.children()
    keys = named.node_data()[1] if named.node_data() else ()
    rest = list(donated)
    found: list[int | str] = []
    for at, child in [*enumerate(positional.children()), *zip(keys, named.children(), strict=True)]:
        flags, rest = rest[: child.num_leaves], rest[child.num_leaves :]
        if any(flags) and not all(flags):
            raise PlanError(
                f"{sum(flags)} of the {len(flags)} arrays in it are donated",
                where=f"argument {at!r}",
                hint="Donate the whole argument or none of it.",
            )
        if any(flags):
            found.append(at)
    return tuple(i for i in found if isinstance(i, int)), tuple(
        k for k in found if isinstance(k, str)
    )
