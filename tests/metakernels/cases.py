"""Programs around one kernel each, with shapes and parameters drawn at random.

A case is a function and its arguments; tracing it gives at least one operation of the kernel it is
registered for. `Draw` takes its decisions from a `random.Random`, so that hypothesis can make them
(`st.randoms(use_true_random=False)`) as well as a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import ml_dtypes
import numpy as np
from jax.extend.core import ClosedJaxpr

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.executor import execute, run_operation
from tapestry_egg.tracing.codec import encode_params
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import ZRange

Array = Any
Case = tuple[Callable[..., Any], tuple[Any, ...]]
T = TypeVar("T")


class Draw:
    """Decisions of one case: extents, choices, and arrays of random numbers."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def size(self, low: int = 1, high: int = 6) -> int:
        return self.rng.randint(low, high)

    def shape(self, low: int = 0, high: int = 3) -> tuple[int, ...]:
        return tuple(self.size() for _ in range(self.rng.randint(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        return options[self.rng.randrange(len(options))]

    def some(self, options: Sequence[T], least: int = 0) -> tuple[T, ...]:
        """A part of the options, in their order."""
        chosen = set(self.rng.sample(range(len(options)), self.rng.randint(least, len(options))))
        return tuple(o for k, o in enumerate(options) if k in chosen)

    def order(self, n: int) -> tuple[int, ...]:
        return tuple(self.rng.sample(range(n), n))

    def coin(self) -> bool:
        return self.rng.random() < 0.5

    @property
    def numbers(self) -> np.random.Generator:
        return np.random.default_rng(self.rng.getrandbits(32))

    def floats(self, shape: Sequence[int], dtype: Any = np.float32) -> Array:
        """Of either sign, and not near zero, where many functions have a corner."""
        numbers = self.numbers
        return np.asarray(
            numbers.uniform(0.2, 0.9, shape) * numbers.choice([1, -1], tuple(shape))
        ).astype(dtype)

    def positive(self, shape: Sequence[int]) -> Array:
        return np.asarray(self.numbers.uniform(0.2, 0.9, shape), np.float32)

    def integers(
        self, shape: Sequence[int], low: int = -9, high: int = 10, dtype: Any = np.int32
    ) -> Array:
        return np.asarray(self.numbers.integers(low, high, tuple(shape))).astype(dtype)

    def flags(self, shape: Sequence[int]) -> Array:
        return np.asarray(self.numbers.integers(0, 2, tuple(shape)), bool)

    def complexes(self, shape: Sequence[int]) -> Array:
        return (self.floats(shape) + 1j * self.floats(shape)).astype(np.complex64)

    def any(self, shape: Sequence[int]) -> Array:
        """Numbers of a kind that sums are defined for."""
        kind = self.choice(("float", "integer", "float", "narrow", "complex"))
        if kind == "integer":
            return self.integers(shape)
        if kind == "complex":
            return self.complexes(shape)
        return self.floats(shape, ml_dtypes.bfloat16 if kind == "narrow" else np.float32)


Generator = Callable[[Draw, str], Case]

#: Kernel -> what draws a case of it.
CASES: dict[str, Generator] = {}
#: Kernel -> the family whose module registered it.
FAMILY: dict[str, str] = {}


def of(family: str, *kernels: str) -> Callable[[Generator], Generator]:
    """Register what draws cases of the given kernels."""

    def register(generator: Generator) -> Generator:
        for kernel in kernels:
            assert kernel not in CASES, f"two generators for {kernel}"
            CASES[kernel] = generator
            FAMILY[kernel] = family
        return generator

    return register


def drawn(kernel: str, rng: random.Random) -> Case:
    """A case of one kernel."""
    return CASES[kernel](Draw(rng), kernel)


@dataclass(frozen=True, eq=False)
class Application:
    """One operation with the values of its operands."""

    kernel: str
    params: Mapping[str, Any]
    input_types: tuple[TensorType, ...]
    output_types: tuple[TensorType, ...]
    operands: tuple[Array, ...]

    @property
    def signature(self) -> OperationSignature:
        return registry.signature(self.kernel, self.params, self.input_types, self.output_types)

    @property
    def template(self) -> Template | None:
        return registry.entry(self.kernel, self.params, self.input_types, self.output_types)

    def run(
        self, cover: Sequence[ZRange] | None = None, operands: Sequence[Array] | None = None
    ) -> tuple[Array, ...]:
        """The outputs by the reference, whole or shard by shard."""
        values = self.operands if operands is None else operands
        return run_operation(self.kernel, self.params, self.signature, values, cover)

    def __str__(self) -> str:
        return f"{self.kernel}{tuple(map(str, self.input_types))} {self.params}"


def _applied(kernel: str, program: ClosedJaxpr, args: Sequence[Any]) -> Application:
    """The one operation of a program, which reads all that it is given."""
    (eqn,) = program.eqns
    while "jaxpr" in eqn.params:
        (eqn,) = eqn.params["jaxpr"].eqns
    read, made = (
        tuple([TensorType(v.aval.shape, v.aval.dtype.name) for v in vs])
        for vs in (eqn.invars, eqn.outvars)
    )
    assert eqn.primitive.name == kernel
    params = encode_params(eqn.params, kernel=kernel)
    return Application(kernel, params, read, made, tuple([np.asarray(x) for x in args]))


def application(kernel: str, rng: random.Random) -> Application:
    """The last operation of a kernel in a case of it."""
    fn, args = drawn(kernel, rng)
    if kernel in ("split", "unstack"):  # slices, once they are traced
        return _applied(kernel, jax.make_jaxpr(fn)(*args), args)
    program = trace(fn, *args)
    graph = program.graph
    op = next(op for op in reversed(graph.operations) if op.kernel == kernel)
    at = graph.operations.index(op)
    before = replace(graph, outputs=op.inputs, operations=graph.operations[:at], output_names=())
    return Application(
        kernel,
        op.params,
        tuple(graph.values[v] for v in op.inputs),
        tuple(graph.values[v] for v in op.outputs),
        execute(before, [np.asarray(x) for x in program.flatten(*args)]),
    )


def close(got: Array, want: Array, what: str, tolerance: float, narrow: float = 2e-2) -> None:
    """Equal shapes and dtypes; integers and flags exactly, floats up to a tolerance, relative and
    absolute (`narrow` for those of less than 32 bits)."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    if got.dtype.kind in "biu" or got.dtype.names:
        assert np.array_equal(got, want), f"{what}: {got} is not {want}"
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    limit = narrow if got.dtype.itemsize < 4 else tolerance
    a, b = got.astype(wide), want.astype(wide)
    assert np.allclose(a, b, limit, limit, equal_nan=True), f"{what}: {a} is not {b}"


#: Floats in shards against whole: partial results are rounded to the output's dtype.
SHARDS = 1e-5
#: Floats against JAX, whose transcendental functions differ by some units in the last place, and
#: whose intermediate results are of the output's dtype.
JAX = 3e-4


def check_cover(app: Application, cover: Sequence[ZRange]) -> None:
    """Shard by shard, choosing boxes by the projections alone, gives what the whole gives."""
    for q, (got, want) in enumerate(zip(app.run(cover), app.run(), strict=True)):
        boxes = ", ".join(map(str, cover))
        close(got, want, f"output {q} of {app} cut into {boxes}", SHARDS)
