"""Operations with effects, and calls into Python: run on one device, for all of them.

Every device of a plan runs the same program, so an effect would happen once on each, and a result
that comes from outside could differ from one to the next. One device runs the operation; what it
gives is added up over the mesh, where the others hold zeros.

An exception in a call must not end one device's program: the others would wait for it for ever. It
is kept, a flag goes to all devices, later calls are left out, and loops that call end. When its
program is done, a device of every process raises it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import carried_type
from tapestry_egg.plans.collectives import block_number

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True, eq=False)
class Caller:
    """Who runs what has effects: device number `device` of the mesh, row-major.

    `reporters` are the devices, one of every process, that raise what a call has raised.
    """

    device: int = 0
    reporters: tuple[int, ...] = (0,)
    raised: list[BaseException] = field(default_factory=list)


def calls(graph: BlockGraph) -> bool:
    """Whether a graph, or one inside it, calls into Python."""
    return any(
        registry.calls_python(op.kernel) or any(map(calls, op.regions)) for op in graph.operations
    )


def run_once(
    op: Operation,
    results: Sequence[TensorType],
    operands: Sequence[Any],
    mesh: MeshShape,
    caller: Caller,
    failed: Any,
) -> tuple[list[jax.Array], Any]:
    """The outputs of an operation that one device runs, the same everywhere, and whether it failed.

    `operands` are whole. `failed` is an s32[], other than 0 where a call has raised before; then
    nothing is run, and the outputs are zeros. It is None in a body where nothing calls. Operations
    that JAX keeps in order stay in it.
    """
    import jax.numpy as jnp
    from jax import lax

    from tapestry_egg.graph.arrays import decode_dtype
    from tapestry_egg.tracing.codec import decode_params, primitive

    kernel = primitive(op.kernel)
    params = decode_params(op.params, kernel=op.kernel)
    if mesh.devices == 1:
        return _bind(kernel, params, operands), failed
    kept = (*results, *([FLAG] if registry.calls_python(op.kernel) else ()))

    def sent(*xs: Any) -> list[jax.Array]:
        if registry.calls_python(op.kernel):
            out = _call(kernel, params, xs, results, caller)
        else:
            out = _bind(kernel, params, xs)
        return [_packed(x, t) for x, t in zip(out, kept, strict=True)]

    def nothing(*xs: Any) -> list[jax.Array]:
        return [jnp.zeros(t.shape, decode_dtype(t.dtype)) for t in map(carried_type, kept)]

    here = block_number(tuple(range(len(mesh.sizes))), mesh) == caller.device
    if failed is not None:
        here = here & (failed == 0)
    found = lax.cond(here, sent, nothing, *operands)
    outputs = [_unpacked(lax.psum(x, mesh.names), t) for x, t in zip(found, kept, strict=True)]
    if registry.calls_python(op.kernel):
        failed = failed | outputs.pop()
    return outputs, failed


def report(
    outputs: Sequence[jax.Array], failed: jax.Array, mesh: MeshShape, caller: Caller
) -> None:
    """Raise on one device of every process, after all that it computes, what a call has raised."""
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.experimental import io_callback

    def fail(*_: Any) -> None:
        if caller.raised:
            raise caller.raised.pop()
        raise RuntimeError("a call into Python failed in another process; see what that one says")

    done = []  # one element of every output, for the order
    for x in outputs:
        if x.size and x.dtype != jax.dtypes.float0:
            keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
            done.append((jax.random.key_data(x) if keys else x).ravel()[0])
    number = block_number(tuple(range(len(mesh.sizes))), mesh)
    here = jnp.any(jnp.array([number == r for r in caller.reporters]))
    lax.cond(
        here & (failed != 0), lambda *xs: io_callback(fail, None, *xs), lambda *xs: None, *done
    )


#: What says whether a call has raised.
FLAG = TensorType((), "int32")


def _bind(kernel: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> list[jax.Array]:
    bound = kernel.get_bind_params(dict(params))
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    out = kernel.bind(*functions, *operands, **bound)
    return list(out) if kernel.multiple_results else [out]


def _call(
    kernel: Any,
    params: Mapping[str, Any],
    operands: Sequence[Any],
    results: Sequence[TensorType],
    caller: Caller,
) -> list[jax.Array]:
    """A call into Python that does not raise: what it gives, or zeros, and then the flag.

    The user's choice of a device is not kept. JAX keeps the order of prints on one device only, so
    that prints are calls like any others.
    """
    import jax

    from tapestry_egg.graph.arrays import decode_dtype
    from tapestry_egg.tracing.codec import primitive

    structs = [jax.ShapeDtypeStruct(t.shape, decode_dtype(t.dtype)) for t in (*results, FLAG)]
    callback: Callable[..., Any] = (
        params["callback"]
        if kernel.name in ("io_callback", "pure_callback")
        else functools.partial(kernel.impl, **params)
    )

    def guarded(*xs: Any) -> tuple[Any, ...]:
        try:
            return (*_checked(callback(*xs), results), _number(0))
        except BaseException as e:  # raised again by `report`
            caller.raised.append(e)
            return tuple(_zeros(t) for t in results) + (_number(1),)

    avals = tuple(jax.core.ShapedArray(s.shape, s.dtype) for s in structs)
    common: dict[str, Any] = {"callback": guarded, "result_avals": avals, "sharding": None}
    if kernel.name == "pure_callback":
        out = kernel.bind(*operands, **common, vmap_method=params.get("vmap_method"))
    else:
        bind = primitive("io_callback").bind
        out = bind(*operands, **common, ordered=_is_ordered(params))
    return list(out)


def _is_ordered(params: Mapping[str, Any]) -> bool:
    return bool(params.get("ordered")) or "Ordered" in str(params.get("effect", ""))


def _checked(made: Any, results: Sequence[TensorType]) -> list[Any]:
    """What a call has given, numbers as arrays of 32 bits where JAX has no others. Raises
    ValueError where it is not what the program was told."""
    import jax
    import numpy as np

    from tapestry_egg.graph.arrays import dtype_name

    arrays = [np.asarray(x) for x in made or ()]
    arrays = [x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False) for x in arrays]
    given = [TensorType(x.shape, dtype_name(x.dtype)) for x in arrays]
    wanted = [TensorType(t.shape, t.dtype) for t in results]
    if given != wanted:
        raise ValueError(
            f"a call into Python gave {', '.join(map(str, given)) or 'nothing'}, "
            f"not {', '.join(map(str, wanted)) or 'nothing'}"
        )
    return arrays


def _number(n: int) -> Any:
    import numpy as np

    return np.int32(n)


def _zeros(type_: TensorType) -> Any:
    import numpy as np

    from tapestry_egg.graph.arrays import decode_dtype

    return np.zeros(type_.shape, decode_dtype(type_.dtype))


# How results travel: as integers, see `carried_type`


def _packed(x: jax.Array, type_: TensorType) -> jax.Array:
    import jax.numpy as jnp
    from jax import lax

    from tapestry_egg.graph.arrays import decode_dtype

    to = decode_dtype(carried_type(type_).dtype)
    if x.dtype.kind == "c":
        x = jnp.stack([x.real, x.imag], -1)
    elif x.dtype.name.startswith("float4"):
        x = x.astype(jnp.float32)
    if x.dtype.kind == "b" or "int" in x.dtype.name:
        return x.astype(to)
    return lax.bitcast_convert_type(x, to)


def _unpacked(x: jax.Array, type_: TensorType) -> jax.Array:
    from jax import lax

    from tapestry_egg.graph.arrays import decode_dtype

    dtype = decode_dtype(type_.dtype)
    if dtype.kind == "b" or "int" in dtype.name:
        return x.astype(dtype)
    if dtype.kind == "c":
        pair = lax.bitcast_convert_type(x, f"float{dtype.itemsize * 4}")
        return lax.complex(pair[..., 0], pair[..., 1])
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(x, "float32").astype(dtype)
    return lax.bitcast_convert_type(x, dtype)
