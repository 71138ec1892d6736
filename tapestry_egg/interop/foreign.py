"""Programs that other tools hand over: StableHLO modules and functions that `jax.export` wrote."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tapestry_egg.errors import TraceError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.sources import short_file
from tapestry_egg.interop.stablehlo.module import MARK, Module
from tapestry_egg.tracing.trace import Program, trace

#: Endings of files that hold an exported function; others hold StableHLO.
EXPORTED = (".jax", ".jaxexport")


def from_stablehlo(text: str | bytes, name: str = "", *, file: str = "module") -> Program:
    """The program of a StableHLO module, its text or bytecode, which takes and returns flat arrays.

    The module is read by jaxlib's parser and traced operation by operation: all of them are seen,
    planned and changed as those of a traced function are. Arguments that the module says may be
    reused are donated; shardings in it are left out. Operations without a counterpart in JAX's
    public functions, dims of unknown size and modules that are divided over devices already raise
    TraceError, which tells where.
    """
    module = Module(text, file)
    return _program(module, module, name or Path(file).stem, ())


def from_export(exported: Any, name: str = "", *, file: str = "") -> Program:
    """The program of a function that `jax.export.export` gave, or of its bytes, with its pytrees.

    Reading bytes needs the package flatbuffers (the extra `interop`). Raises TraceError for what is
    no such thing, and where `from_stablehlo` does.
    """
    import jax.export

    if isinstance(exported, bytes | bytearray):
        try:
            exported = jax.export.deserialize(bytearray(exported))
        except ImportError as e:
            raise TraceError(
                f"reading an exported function needs a package more: {e}",
                where=file,
                hint="pip install 'tapestry-egg[interop]'",
            ) from None
        except Exception as e:  # flatbuffers raises whatever the bytes make it do
            raise TraceError(f"not a function of jax.export: {e}", where=file) from None
    if not isinstance(exported, jax.export.Exported):
        raise TraceError(
            f"expected jax.export.Exported or its bytes, given {exported!r:.60}",
            where="from_export",
        )
    called = name or exported.fun_name
    module = Module(exported.mlir_module(), file or called)
    kept = exported.module_kept_var_idx
    results: list[Any] = list(exported.out_avals)

    def flat(*leaves: Any) -> list[Any]:
        plain = [jax.random.key_data(x) if _is_key(x) else x for x in leaves]
        made = module(*(plain[i] for i in kept))
        return [
            jax.random.wrap_key_data(x, impl=jax.random.key_impl(a)) if _is_key(a) else x
            for x, a in zip(made, results, strict=True)
        ]

    return _program(module, flat, called, (exported.in_tree, exported.out_tree, exported.in_avals))


def from_file(path: Path) -> Program:
    """The program of a file of either kind, by its ending. Raises TraceError where it cannot be."""
    try:
        data = path.read_bytes()
    except OSError as e:
        raise TraceError(f"cannot be read: {e.strerror or e}", where=str(path)) from None
    if path.suffix in EXPORTED:
        return from_export(data, path.stem, file=str(path))
    return from_stablehlo(data, path.stem, file=str(path))


def _is_key(array: Any) -> bool:
    import jax

    return bool(jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key))


def _program(
    module: Module, flat: Callable[..., Any], name: str, export: tuple[Any, ...]
) -> Program:
    import jax

    if export:
        in_tree, out_tree, avals = export
        types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in avals]

        def function(*args: Any, **kwargs: Any) -> Any:
            return jax.tree.unflatten(out_tree, flat(*jax.tree.leaves((args, kwargs))))

        args, kwargs = jax.tree.unflatten(in_tree, types)
    else:
        function, kwargs = flat, {}
        args = tuple(jax.ShapeDtypeStruct(s, d) for s, d in module.types)
    made = trace(function, *args, name=name, **kwargs)
    donated = tuple(i in set(module.donated) for i in range(len(made.graph.inputs)))
    graph = _placed(made.graph, module)
    if not export and any(donated):
        graph = replace(graph, donated=donated)
    return replace(made, graph=graph)


def _placed(graph: BlockGraph, module: Module) -> BlockGraph:
    """The graph with the module's places for the lines of this package that traced it."""

    def of(op: Operation) -> Operation:
        *_, last = (0, *(int(n) for n in _marks(op.scope)))
        source = module.places[last] if module.places else op.source
        scope = "/".join(p for p in op.scope.split("/") if MARK not in p)
        source = replace(source, file=short_file(source.file))
        regions = tuple(_placed(r, module) for r in op.regions)
        return replace(op, source=source, scope=scope, regions=regions)

    return replace(graph, operations=tuple(map(of, graph.operations)))


def _marks(scope: str) -> list[str]:
    return [part.partition(MARK)[2].rstrip(")") for part in scope.split("/") if MARK in part]
