"""Operations with effects, and calls into Python: run on one device, for all of them.

Every device of a plan runs the same program, so an effect would happen once on each, and a result
that comes from outside could differ from one to the next. One device runs the operation; what it
gives is added up over the mesh, where the others hold zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..blockgraph import Operation, TensorType
from ..layout import MeshShape
from ..metakernels.signature import carried_type
from .collectives import block_number

if TYPE_CHECKING:
    import jax


def run_once(
    op: Operation, results: Sequence[TensorType], operands: Sequence[Any], mesh: MeshShape, at: int
) -> list[jax.Array]:
    """The outputs of an operation that device number `at` of the mesh runs, the same everywhere.

    `operands` are whole. Operations that JAX keeps in order stay in it.
    """
    import jax.numpy as jnp
    from jax import lax

    from ..arrays import decode_dtype
    from ..codec import decode_params, primitive

    kernel = primitive(op.kernel)
    params = decode_params(op.params, kernel=op.kernel)

    def run(*xs: Any) -> list[jax.Array]:
        out = _bind(kernel, params, xs)
        return list(out) if kernel.multiple_results else [out]

    if mesh.devices == 1:
        return run(*operands)

    def sent(*xs: Any) -> list[jax.Array]:
        return [_packed(x, t) for x, t in zip(run(*xs), results, strict=True)]

    def nothing(*xs: Any) -> list[jax.Array]:
        return [jnp.zeros(t.shape, decode_dtype(t.dtype)) for t in map(carried_type, results)]

    everywhere = tuple(range(len(mesh.sizes)))
    found = lax.cond(block_number(everywhere, mesh) == at, sent, nothing, *operands)
    return [_unpacked(lax.psum(x, mesh.names), t) for x, t in zip(found, results, strict=True)]


def _bind(kernel: Any, params: Mapping[str, Any], operands: Sequence[Any]) -> Any:
    """The primitive on one device; the user's choice of another device is not kept."""
    if kernel.name in ("debug_callback", "debug_print") and _is_ordered(params):
        # JAX keeps the order of prints on one device only, that of other calls on any number.
        from jax.experimental import io_callback

        def call(*xs: Any) -> tuple[()]:
            kernel.impl(*xs, **params)
            return ()

        return io_callback(call, (), *operands, ordered=True)
    changed = {"sharding": None} if "callback" in params and "sharding" in params else {}
    bound = kernel.get_bind_params({**params, **changed})
    functions, bound = bound if isinstance(bound, tuple) else ((), bound)
    return kernel.bind(*functions, *operands, **bound)


def _is_ordered(params: Mapping[str, Any]) -> bool:
    return bool(params.get("ordered")) or "Ordered" in str(params.get("effect", ""))


# How results travel: as integers, see `carried_type`


def _packed(x: jax.Array, type_: TensorType) -> jax.Array:
    import jax.numpy as jnp
    from jax import lax

    from ..arrays import decode_dtype

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

    from ..arrays import decode_dtype

    dtype = decode_dtype(type_.dtype)
    if dtype.kind == "b" or "int" in dtype.name:
        return x.astype(dtype)
    if dtype.kind == "c":
        pair = lax.bitcast_convert_type(x, f"float{dtype.itemsize * 4}")
        return lax.complex(pair[..., 0], pair[..., 1])
    if dtype.name.startswith("float4"):
        return lax.bitcast_convert_type(x, "float32").astype(dtype)
    return lax.bitcast_convert_type(x, dtype)
