"""A StableHLO module as a JAX function of flat arrays, and the lines that its operations have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tapestry_egg.errors import TraceError
from tapestry_egg.graph.blockgraph import Source

from . import control, operations, reductions
from .constants import dtype_of, shape_of

_OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    **operations.OPERATIONS,
    **reductions.OPERATIONS,
    **control.OPERATIONS,
}
#: A scope that says which of a module's places an operation is of.
MARK = "stablehlo@"


class Module:
    """A parsed module. Calling it runs `main` on JAX arrays, operation by operation.

    `types` are the shapes and dtypes of the arguments, `names` what the module calls them, and
    `places` where operations come from: lines of the program that the module was made of where it
    says so, else its own. Raises TraceError for text that is no module with a `main`.
    """

    def __init__(self, text: str | bytes, file: str) -> None:
        from jax.interpreters import mlir
        from jaxlib.mlir import ir

        self.file = file
        self.places: list[Source] = []
        self._known: dict[str, int] = {}
        self._context = mlir.make_ir_context()
        try:
            self._module = ir.Module.parse(text, self._context)
        except Exception as e:  # the parser's own error, with line and column
            raise TraceError(
                f"not a StableHLO module: {str(e).strip()}",
                where=file,
                hint="Write it by jax.jit(f).lower(...).as_text().",
            ) from None
        found: list[Any] = [op.operation for op in self._module.body.operations]
        self._functions = {
            op.attributes["sym_name"].value: op for op in found if op.name == "func.func"
        }
        if "main" not in self._functions:
            raise TraceError("the module has no function @main", where=file)
        main = self._functions["main"]
        self._lines = text.decode(errors="replace") if isinstance(text, bytes) else text
        try:
            self.types = [
                (shape_of(a.type), dtype_of(a.type.element_type))
                for a in main.regions[0].blocks[0].arguments
            ]
        except (KeyError, ValueError, AttributeError) as e:
            raise TraceError(f"@main takes what JAX has not: {e}", where=file) from None
        told: Any = main.attributes["arg_attrs"] if "arg_attrs" in main.attributes else ()
        self.donated = [
            k
            for k, said in enumerate(told)
            if "tf.aliasing_output" in said or "jax.buffer_donor" in said
        ]

    def __call__(self, *args: Any) -> tuple[Any, ...]:
        """The results of `main`. Raises TraceError at an operation that is not known here."""
        with self._context:
            return tuple(_Runner(self).call("main", list(args)))

    def place(self, operation: Any) -> int:
        """The number in `places` of where an operation comes from."""
        told = str(operation.location)
        if told not in self._known:
            self._known[told] = len(self.places)
            self.places.append(self._source(operation.location))
        return self._known[told]

    def function(self, name: str) -> Any:
        return self._functions[name]

    def _source(self, location: Any) -> Source:
        """The innermost line that a location tells of."""
        import linecache

        name = ""
        while not hasattr(location, "filename"):
            if hasattr(location, "child_loc"):
                name, location = location.name_str, location.child_loc
            elif hasattr(location, "callee"):
                location = location.callee
            elif getattr(location, "locations", None):
                location = location.locations[0]
            else:
                return Source()
        file, line, column = location.filename, location.start_line, location.start_col
        if file == "-":  # the module's own text
            lines = self._lines.splitlines()
            text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
            return Source(self.file, line, column, name, text[:200])
        return Source(file, line, column, name, linecache.getline(file, line).strip())


class _Runner:
    """Runs functions and blocks of a module on JAX arrays; the values known so far by theirs."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.known: dict[Any, Any] = {}

    def call(self, name: str, args: Sequence[Any]) -> list[Any]:
        """The results of a function of the module."""
        inner = _Runner(self.module)
        return inner.block(self.module.function(name).regions[0].blocks[0], args)

    def block(self, block: Any, args: Sequence[Any]) -> list[Any]:
        """What a block returns; it sees the values around it."""
        import jax

        self.known.update(zip(block.arguments, args, strict=True))
        *steps, end = [op.operation for op in block.operations]
        for op in steps:
            with jax.named_scope(f"{MARK}{self.module.place(op)}"):
                made = self._run(op)
            made = made if isinstance(made, tuple | list) else (made,)
            self.known.update(zip(op.results, made, strict=True))
        return [self.known[v] for v in end.operands]

    def outer(self, value: Any) -> Any:
        """What a value is known to be here; None where it is not."""
        return self.known.get(value)

    @staticmethod
    def combination(region: Any) -> str:
        """The one operation by which a region combines its two arguments, `second` where it returns
        the second; empty for all else."""
        *steps, end = [op.operation for op in region.blocks[0].operations]
        first, second = (*region.blocks[0].arguments, None, None)[:2]
        if len(region.blocks[0].arguments) != 2 or len(end.operands) != 1:
            return ""
        if not steps:
            return "second" if end.operands[0] == second else ""
        if len(steps) > 1 or {*steps[0].operands} != {first, second}:
            return ""
        return "" if end.operands[0] != steps[0].results[0] else steps[0].name.rpartition(".")[2]

    def _run(self, op: Any) -> Any:
        if op.name not in _OPERATIONS:
            raise self._refused(op, "is not known here")
        if "_xla_compute_type" in str(op.attributes.get("mhlo.frontend_attributes", "")):
            raise self._refused(op, "asks for compute units of its own, which no plan keeps")
        args = [self.known[v] for v in op.operands]
        if op.name not in ("stablehlo.constant", "stablehlo.while"):
            args = [_strong(a) for a in args] if op.name not in _FROM_KNOWN else args
        try:
            return _OPERATIONS[op.name](op, args, self)
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise self._refused(op, str(e)) from e

    def _refused(self, op: Any, why: str) -> TraceError:
        place = self.module.places[self.module.place(op)]
        where = f"{place.file}:{place.line}" if place.file else self.module.file
        return TraceError(
            f"{op.name}: {why}",
            where=where,
            hint="docs/interop.md says what is read. Trace the JAX function where you have it.",
        )


#: What looks at numbers that are known before anything runs.
_FROM_KNOWN = frozenset(
    {
        *("stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.select_and_scatter"),
        *("func.call", "stablehlo.composite"),
    }
)


def _strong(value: Any) -> Any:
    """A value as an array of JAX's, of its own dtype."""
    import jax.numpy as jnp

    return jnp.asarray(value) if isinstance(value, np.ndarray | np.generic) else value
