"""Re-emitting a block graph as a JAX function, operation by operation, exactly as traced."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.arrays import decode_dtype, dtype_name
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType

from .codec import decode_params, primitive
from .control_flow import binds_counts, bound, scanned
from .jaxprs import REGIONS
from .plain import handles_in
from .settings import plain_settings
from .trace import Program


@dataclass(frozen=True)
class _Bound:
    """An operation with its primitive and JAX's own parameters, decoded once."""

    operation: Operation
    primitive: Any
    params: Mapping[str, Any]
    types: tuple[TensorType, ...]
    where: str


def emit(program: Program | BlockGraph) -> Callable[..., list[Any]]:
    """A JAX function of the graph's inputs that gives the graph's outputs, flat.

    It applies the traced primitives to the same operands in the same order, with the same weak
    types, and can be jitted: the results are the original's bit for bit, except where XLA compiles
    a few operations another way because the calls around them are gone. Recomputed regions
    (`jax.checkpoint`) read their inputs through an optimization barrier, as JAX itself lowers
    them. Raises GraphError for a graph that does not fit this version of JAX, naming the
    operation; the function raises it for inputs of other types.
    """
    graph = program.graph if isinstance(program, Program) else program
    evaluate = _evaluator(graph)

    def run(*flat: Any) -> list[Any]:
        with plain_settings(graph):
            return evaluate(*flat)

    names = graph.input_names or tuple(f"input {i}" for i in range(len(graph.inputs)))
    types = tuple(graph.values[v] for v in graph.inputs)

    def call(*flat: Any) -> list[Any]:
        import jax

        if len(flat) != len(types):
            raise GraphError(
                f"{len(flat)} inputs given, the graph takes {len(types)}", where=graph.name
            )
        for name, type_, value in zip(names, types, flat, strict=True):
            aval = jax.typeof(value)
            if (aval.shape, dtype_name(aval.dtype)) != (type_.shape, type_.dtype):
                raise GraphError(
                    f"{name} is {dtype_name(aval.dtype)}{list(aval.shape)}, "
                    f"the graph takes {type_.dtype}{list(type_.shape)}",
                    where=graph.name,
                    hint=_x64_hint(type_.dtype),
                )
        return run(*flat)

    return call


def closed_jaxpr(graph: BlockGraph) -> Any:
    """The graph as a JAX ClosedJaxpr with exactly the graph's input and output types.

    Raises GraphError where JAX gives an output another type than the graph declares.
    """
    import jax

    with plain_settings(graph):
        arguments = [struct(graph.values[v]) for v in graph.inputs]
        closed = jax.make_jaxpr(_evaluator(graph))(*arguments)
    for i, (v, aval) in enumerate(zip(graph.outputs, closed.out_avals, strict=True)):
        _check_type(graph.values[v], aval, f"{graph.name}, output {i}")
    return closed


def constant(array: np.ndarray, type_: TensorType) -> Any:
    """The value to bind for a constant, weakly typed where the graph says so."""
    if not type_.weak:
        return array
    if type_.rank == 0:
        value = array.item()
        import jax

        if dtype_name(jax.typeof(value).dtype) == type_.dtype:
            return value
    bind = primitive("convert_element_type").bind
    return bind(array, new_dtype=array.dtype, weak_type=True, sharding=None)


def _evaluator(graph: BlockGraph) -> Callable[..., list[Any]]:
    every = [_bind(op, graph, i) for i, op in enumerate(graph.operations)]
    fences = _fences(graph)

    def run(*flat: Any) -> list[Any]:
        env: dict[int, Any] = dict(zip(graph.inputs, flat, strict=True))
        for v, array in graph.constants.items():
            env[v] = constant(array, graph.values[v])
        fenced: dict[tuple[int, int], Any] = {}
        for i, item in enumerate(every):
            op = item.operation
            if i in fences:
                assert op.remat is not None
                values = _barrier([env[v] for v in fences[i]])
                fenced.update({(op.remat, v): x for v, x in zip(fences[i], values, strict=True)})
            operands = [
                env[v] if op.remat is None else fenced.get((op.remat, v), env[v]) for v in op.inputs
            ]
            env.update(zip(op.outputs, _apply(item, operands), strict=True))
        return [env[v] for v in graph.outputs]

    return run


def _bind(op: Operation, graph: BlockGraph, index: int) -> _Bound:
    where = f"{graph.name}, operation {index} ({op.kernel}, {op.source})"
    types = tuple(graph.values[v] for v in op.outputs)
    try:
        params = decode_params(op.params, kernel=op.kernel)
        params.update(_region_params(op))
        return _Bound(op, primitive(op.kernel), params, types, where)
    except GraphError as e:
        raise GraphError(e.what, where=e.where or where, hint=e.hint) from e


def _region_params(op: Operation) -> Iterator[tuple[str, Any]]:
    """The nested graphs as the jaxpr parameters that the primitive wants."""
    names = REGIONS.get(op.kernel, ())
    jaxprs = [closed_jaxpr(region) for region in op.regions]
    if op.is_branch:
        yield names[0], tuple(jaxprs)
    elif len(jaxprs) != len(names):
        raise GraphError(f"{op.kernel} has {len(jaxprs)} regions, {len(names)} expected")
    else:
        yield from zip(names, jaxprs, strict=True)


def _apply(item: _Bound, operands: Sequence[Any]) -> Sequence[Any]:
    from jax.extend.core import jaxpr_as_fun

    try:
        if item.operation.is_scan and not binds_counts():
            return scanned(item.params, jaxpr_as_fun(item.params["jaxpr"]), operands)
        results = bound(item.primitive, item.params, operands)
    except _MALFORMED as e:
        if handles_in(item.operation.params):
            raise  # a callback's own exception
        raise GraphError(
            f"JAX refuses the operation: {_first_line(e)}",
            where=item.where,
            hint="The graph may come from another version of JAX; trace the function again.",
        ) from e
    if len(results) != len(item.types):
        raise GraphError(
            f"JAX gives {len(results)} results, the graph {len(item.types)}", where=item.where
        )
    import jax

    for type_, result in zip(item.types, results, strict=True):
        _check_type(type_, jax.typeof(result), item.where)
    return results


#: What JAX raises for parameters or operands that do not fit a primitive.
_MALFORMED = (
    TypeError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    AssertionError,
    NotImplementedError,
    OverflowError,
    ZeroDivisionError,
    RecursionError,
)


def _check_type(type_: TensorType, aval: Any, where: str) -> None:
    found = (getattr(aval, "shape", None), dtype_name(getattr(aval, "dtype", "?")))
    if found != (type_.shape, type_.dtype):
        raise GraphError(
            f"JAX gives {aval}, the graph says {type_}",
            where=where,
            hint=_x64_hint(type_.dtype),
        )


def _x64_hint(dtype: str) -> str:
    wide = dtype in ("float64", "int64", "uint64", "complex128")
    return 'Set jax.config.update("jax_enable_x64", True) first.' if wide else ""


def struct(type_: TensorType) -> Any:
    import jax

    dtype = decode_dtype(type_.dtype)
    return jax.ShapeDtypeStruct(type_.shape, dtype, weak_type=type_.weak)


def _fences(graph: BlockGraph) -> dict[int, tuple[int, ...]]:
    """Operation index -> values to fence before it, for the operations of recomputed regions.

    All inputs of a region that exist when its first operation runs go through one barrier, so that
    the recomputation waits for all of them, the cotangent included; a region whose operations were
    moved apart fences the rest where it is first read. Constants need no fence.
    """
    inside: dict[int, set[int]] = {}
    reads: dict[int, dict[int, int]] = {}  # region -> value -> first reader
    for i, op in enumerate(graph.operations):
        if op.remat is not None:
            made = inside.setdefault(op.remat, set())
            for v in op.inputs:
                if v not in made and v not in graph.constants:
                    reads.setdefault(op.remat, {}).setdefault(v, i)
            made.update(op.outputs)
    producers = graph.producers()
    fences: dict[int, list[int]] = {}
    for values in reads.values():
        first = min(values.values())
        for v, reader in values.items():
            at = first if producers.get(v, -1) < first else reader
            fences.setdefault(at, []).append(v)
    return {i: tuple(values) for i, values in fences.items()}


def _barrier(values: Sequence[Any]) -> Sequence[Any]:
    from jax import lax

    return lax.optimization_barrier(tuple(values))  # type: ignore[no-any-return]


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
