"""Random operations of every kernel, with the values of their operands.

Most come of what templates say (`rules/verify/samples.py`), as when rules are tried. A few kernels
have cases of their own, functions that are traced: their parameters hold functions or shapes that
templates do not draw, or their operands depend on each other.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import KEY
from tapestry_egg.reference.executor import execute, run_operation
from tapestry_egg.rules.verify.samples import Draw as Shapes
from tapestry_egg.rules.verify.samples import Proposal, propose
from tapestry_egg.runtime.lower.kernels.attention import (
    flash_attention_backward_p,
    flash_attention_p,
)
from tapestry_egg.tracing.codec import decode_params, primitive
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import ZRange

Array = Any
Case = tuple[Callable[..., Any], tuple[Any, ...]]
T = TypeVar("T")
TEMPLATES = Path(registry.__file__).with_name("templates")


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

    def integers(
        self, shape: Sequence[int], low: int = -9, high: int = 10, dtype: Any = np.int32
    ) -> Array:
        return np.asarray(self.numbers.integers(low, high, tuple(shape))).astype(dtype)

    def flags(self, shape: Sequence[int]) -> Array:
        return np.asarray(self.numbers.integers(0, 2, tuple(shape)), bool)

    def complexes(self, shape: Sequence[int]) -> Array:
        return (self.floats(shape) + 1j * self.floats(shape)).astype(np.complex64)

    def any(self, type_: TensorType) -> Array:
        """Numbers of a type; integers that have no sign are counted from 0."""
        if type_.dtype.startswith("key"):
            keys = np.zeros(type_.shape, KEY)
            keys["words"] = self.integers((*type_.shape, 2), 0, 2**32, np.uint32)
            return keys
        dtype = np.dtype(type_.dtype)
        if dtype.kind == "b":
            return self.flags(type_.shape)
        if dtype.kind in "iu":
            return self.integers(type_.shape, -9 if dtype.kind == "i" else 0, 10, dtype)
        if dtype.kind == "c":
            return self.complexes(type_.shape)
        return self.floats(type_.shape, dtype)


Generator = Callable[[Draw, str], Case]

#: Kernel -> what draws a case of it, of those that are not made of their templates.
TRACED: dict[str, Generator] = {}
#: Kernels as other versions of JAX spell them, and those of newer versions.
SPELLINGS = {
    "copy_p": "copy",
    **{f"scatter_{kind}": f"scatter-{kind}" for kind in ("add", "sub", "mul", "max", "min")},
}
ABSENT = {name for name in ("log2",) if not hasattr(lax, name)}
#: Kernel -> the family of its templates, of all that can be drawn.
FAMILY = {
    kernel: Path(entries[0].path).stem
    for kernel, entries in registry.templates().items()
    if Path(entries[0].path).parent == TEMPLATES and kernel not in {*SPELLINGS, *ABSENT}
}
CASES = tuple(FAMILY)


def of(*kernels: str) -> Callable[[Generator], Generator]:
    """Register what draws cases of the given kernels."""

    def register(generator: Generator) -> Generator:
        for kernel in kernels:
            assert kernel not in TRACED, f"two generators for {kernel}"
            TRACED[kernel] = generator
        return generator

    return register


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


@cache
def application(kernel: str, seed: int | str) -> Application:
    """A random operation of a kernel; of those that are traced, the last of it in a case."""
    rng = random.Random(seed)
    if kernel not in TRACED:
        return sampled(kernel, rng)
    found: list[Operation] = []
    while not found:  # tracing drops operations that change nothing
        fn, args = TRACED[kernel](Draw(rng), kernel)
        program = trace(fn, *args)
        graph = program.graph
        found = [op for op in graph.operations if op.kernel == kernel]
    op = found[-1]
    at = graph.operations.index(op)
    before = replace(graph, outputs=op.inputs, operations=graph.operations[:at], output_names=())
    return Application(
        kernel,
        op.params,
        tuple(graph.values[v] for v in op.inputs),
        tuple(graph.values[v] for v in op.outputs),
        execute(before, [np.asarray(x) for x in program.flatten(*args)]),
    )


def sampled(kernel: str, rng: random.Random) -> Application:
    """A random operation as templates have it that JAX takes, with the result types of JAX."""
    for _ in range(1000):
        params, types = proposal(kernel, rng)
        made = jax_types(kernel, params, tuple(types))
        if made is not None:
            wanted = registry.output_types(kernel, params, types)
            assert made == tuple((t.shape, t.dtype) for t in wanted), f"{kernel} {types} {params}"
            operands = values(kernel, types, Draw(rng))
            return Application(kernel, params, tuple(types), tuple(wanted), tuple(operands))
    raise AssertionError(f"JAX takes no {kernel} that was drawn")


DTYPES = ("float32", "float32", "int32", "bfloat16", "complex64", "int8", "uint8", "bool")
WIDE = {"int64", "uint64", "float64", "complex128"}
#: Kernels of which all operands have one of these dtypes.
OF_DTYPES = {"threefry2x32": ("uint32",)}


def proposal(kernel: str, rng: random.Random) -> Proposal:
    """Parameters and operand types of a kernel, small and of 32 bits at most."""
    draw = Shapes(rng, 0)
    draw.extents, draw.ranks, draw.dtypes = (1, 2, 3, 4, 5, 6), (), DTYPES
    for _ in range(10_000):
        draw.dtype = rng.choice(OF_DTYPES.get(kernel, DTYPES))
        inputs = rng.choice(registry.templates()[kernel]).inputs
        count = sum(not (o.many or o.optional) for o in inputs)
        if any(o.many for o in inputs):
            count += rng.randint(1, 3)
        elif rng.random() < 0.5:
            count = len(inputs)
        found = propose(kernel, [None] * count, draw)
        if found is None or not registry.valid(kernel, *found):
            continue
        try:
            made = registry.signature(kernel, found[0], tuple(found[1])).output_types
        except TemplateError:
            continue
        if "accuracy" in found[0]:  # of which XLA for CPUs has one
            found[0]["accuracy"] = None
        if not {t.dtype for t in (*found[1], *made)} & WIDE:
            return found
    raise AssertionError(f"no {kernel} was drawn")


def jax_types(
    kernel: str, params: Mapping[str, Any], types: tuple[TensorType, ...]
) -> tuple[tuple[tuple[int, ...], str], ...] | None:
    """Shapes and dtypes of what JAX's primitive gives; None where it takes no such operands."""
    bound = decode_params(params, kernel=kernel)
    try:
        made = jax.eval_shape(partial(primitive(kernel).bind, **bound), *map(_struct, types))
    except (TypeError, ValueError, AssertionError, NotImplementedError):
        return None
    made = made if isinstance(made, list | tuple) else [made]
    return tuple((x.shape, x.dtype.name) for x in made)


@cache
def _struct(type_: TensorType) -> Any:
    if type_.dtype.startswith("key"):
        return jax.eval_shape(lambda: jax.random.split(jax.random.key(0), type_.shape))
    return jax.ShapeDtypeStruct(type_.shape, jax.numpy.dtype(type_.dtype))


#: Kernel -> the ends of the floats that its operands have.
_WITHIN: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(
        "log log1p log2 sqrt rsqrt lgamma digamma igamma igammac regularized_incomplete_beta "
        "polygamma".split(),
        (0.2, 0.9),
    ),
    "acosh": (1.2, 1.9),
    "zeta": (2.2, 2.9),
}


def values(kernel: str, types: Sequence[TensorType], draw: Draw) -> list[Array]:
    """Operands for which the kernel is defined, and not near a corner of it."""
    found = [draw.any(t) for t in types]
    if kernel in _WITHIN:
        low, high = _WITHIN[kernel]
        found = [draw.numbers.uniform(low, high, x.shape).astype(x.dtype) for x in found]
    if kernel == "polygamma":
        found[0] = np.full_like(found[0], 2)
    elif kernel == "pow":
        found[0] = np.abs(found[0]).astype(found[0].dtype)
    elif kernel in ("div", "rem"):
        found[1] = np.where(found[1] == 0, 3, found[1]).astype(found[1].dtype)
    elif kernel.startswith("shift_"):
        counts = 8 * found[1].dtype.itemsize + 3
        found[1] = draw.integers(types[1].shape, 0, counts, found[1].dtype)
    elif kernel == "mulhi":
        ends = np.iinfo(found[0].dtype)
        found = [draw.integers(x.shape, ends.min, ends.max, x.dtype) for x in found]
    elif kernel in ("eq_to", "le_to", "lt_to") and found[0].dtype.kind not in "iub":
        special = np.asarray([-0.0, 0.0, -1, 2, np.inf, np.nan]).astype(found[0].dtype)
        found = [draw.numbers.choice(special, x.shape) for x in found]
    elif kernel in ("eq", "ne", "lt", "le", "gt", "ge"):
        found = [np.round(x.astype(np.complex64).real).astype(x.dtype) for x in found]
    elif kernel == "clamp":
        found[0] = np.minimum(found[0], found[2].min())
    elif kernel == "select_n" and found[0].dtype != bool:
        found[0] = draw.integers(types[0].shape, 0, len(types) - 1, found[0].dtype)
    elif kernel == "select_and_scatter_add":  # no element is as large as another
        order = draw.numbers.permutation(found[1].size)
        found[1] = order.reshape(types[1].shape).astype(found[1].dtype)
    return found


def places(
    params: Mapping[str, Any],
    dims: Sequence[int],
    windows: Mapping[int, int],
    types: Sequence[TensorType],
    draw: Draw,
) -> Array:
    """Where windows of an operand begin along `dims`: also outside of it, unless that is promised
    not to be."""
    (mode,) = params["mode"]["$enum"][1:]
    inside = mode == "PROMISE_IN_BOUNDS"
    low = 0 if inside or types[1].dtype.startswith("u") else -2
    ends = [types[0].shape[d] - windows[d] + 1 + 2 * (not inside) for d in dims]
    columns = [draw.integers(types[1].shape[:-1], low, end) for end in ends]
    return np.stack(columns, -1).astype(types[1].dtype)


def close(got: Array, want: Array, what: str, tolerance: float, narrow: float = 2e-2) -> None:
    """Equal shapes and dtypes; integers and flags exactly, floats up to a tolerance, relative and
    absolute (`narrow` for those of less than 32 bits, whose terms may be as large as the greatest
    result and cancel)."""
    got, want = np.asarray(got), np.asarray(want)
    assert got.shape == want.shape, f"{what}: shape {got.shape}, not {want.shape}"
    assert got.dtype == want.dtype, f"{what}: dtype {got.dtype}, not {want.dtype}"
    if got.dtype.kind in "biu" or got.dtype.names:
        assert np.array_equal(got, want), f"{what}: {got} is not {want}"
        return
    wide = np.complex128 if got.dtype.kind == "c" else np.float64
    a, b = got.astype(wide), want.astype(wide)
    if got.dtype.itemsize < 4:
        greatest = np.abs(b[np.isfinite(b)]).max(initial=1.0)
        near = np.allclose(a, b, narrow, narrow * greatest, equal_nan=True)
    else:
        near = np.allclose(a, b, tolerance, tolerance, equal_nan=True)
    assert near, f"{what}: {a} is not {b}"


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


# What is traced


@of("gather")
def gather(draw: Draw, kernel: str) -> Case:
    params, types = proposal(kernel, draw.rng)
    windows = dict(enumerate(params["slice_sizes"]))
    at = places(params, params["dimension_numbers"]["start_index_map"], windows, types, draw)
    return partial(lax.gather, **decode_params(params, kernel=kernel)), (draw.any(types[0]), at)


@of("scatter", *(f"scatter-{kind}" for kind in ("add", "sub", "mul", "max", "min")))
def scatter(draw: Draw, kernel: str) -> Case:
    write = getattr(lax, kernel.replace("-", "_"))
    while True:
        params, types = proposal(kernel, draw.rng)
        params = {k: v for k, v in params.items() if not k.startswith("update_")}
        numbers = params["dimension_numbers"]
        apart = (*numbers["inserted_window_dims"], *numbers["operand_batching_dims"])
        own = [d for d in range(types[0].rank) if d not in apart]
        sizes = [types[2].shape[u] for u in numbers["update_window_dims"]]
        windows = {**dict.fromkeys(apart, 1), **dict(zip(own, sizes, strict=True))}
        at = places(params, numbers["scatter_dims_to_operand_dims"], windows, types, draw)
        said = decode_params(params, kernel=kernel)
        counted = [TensorType(t.shape, "int32") for t in types]
        added = registry.signature("scatter-add", params, tuple(counted))
        numbers = [np.zeros(types[0].shape, np.int32), at, np.ones(types[2].shape, np.int32)]
        (hits,) = run_operation("scatter-add", params, added, numbers)
        # Which of two updates of one element stays is not said.
        if hits.max(initial=0) <= 1 or not (kernel == "scatter" or params["unique_indices"]):
            return partial(write, **said), (draw.any(types[0]), at, draw.any(types[2]))


@of("scatter_apply")
def scatter_apply(draw: Draw, kernel: str) -> Case:
    rows, width = draw.size(2, 8), draw.size()
    form = draw.choice(("rows", "wild", "clip", "column", "unique", "all"))
    x = draw.floats((rows, width))
    if form == "all":
        return lambda x: jnp.asarray(x).at[...].apply(jnp.square), (x,)
    if form == "column":
        return lambda x: jnp.asarray(x).at[:, -1].apply(jnp.square), (x,)
    if form == "unique":
        at = np.int32(draw.numbers.permutation(rows)[: draw.size(1, rows)])
    else:
        low, high = (0, rows) if form == "rows" else (-2, rows + 2)
        at = draw.integers(draw.shape(1, 2), low, high)
    apply = dict(unique_indices=form == "unique", mode="clip" if form == "clip" else None)
    return lambda x, i: jnp.asarray(x).at[i].apply(lambda v: 3 * v + 1, **apply), (x, at)


@of("ragged_dot_general")
def ragged_dot(draw: Draw, kernel: str) -> Case:
    b, m, k, n, groups = (draw.size(1, 4) for _ in range(5))
    rows = draw.size(2, 8)
    cuts = np.sort(draw.numbers.integers(0, rows + 1, groups))
    sizes = np.diff(cuts, prepend=0).astype(np.int32)  # some rows may belong to no group
    form = draw.choice(("rows", "batch", "middle", "contracted", "plain"))
    if form == "plain":
        x, y = draw.floats((rows, k)), draw.floats((groups, k, n))
        return lax.ragged_dot, (x, y, sizes)
    if form == "batch":
        dims = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
        x, y = draw.floats((b, rows, k)), draw.floats((groups, b, k, n))
        sizes = np.broadcast_to(sizes, sizes.shape)
    elif form == "middle":
        dims = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (0,), (0,))
        x, y = draw.floats((rows, m, k)), draw.floats((groups, k, n))
    elif form == "rows":
        dims = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        x, y = draw.floats((rows, k)), draw.floats((groups, k, n))
    else:
        dims = lax.RaggedDotDimensionNumbers((((1, 3), (1, 3)), ((0,), (0,))), (1,), ())
        x, y = draw.floats((b, rows, m, k)), draw.floats((b, rows, n, k))
    return lambda x, y, s: lax.ragged_dot_general(x, y, s, dims), (x, y, sizes)


@of("reduce")
def combined(draw: Draw, kernel: str) -> Case:
    """The greatest of several arrays' elements with what stands beside it, and a weighted sum."""
    shape = draw.shape(1, 3)
    axes = draw.some(range(len(shape)))
    xs = draw.integers(shape, -9, 9), draw.floats(shape)

    def greater(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        ahead = a[0] >= b[0]
        return jnp.where(ahead, a[0], b[0]), jnp.where(ahead, a[1], 0.5 * b[1])

    return lambda *xs: lax.reduce(xs, (np.int32(-9), np.float32(0)), greater, axes), xs


@of("top_k")
def top_k(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    axis = draw.size(0, len(shape) - 1)
    k = draw.size(1, shape[axis])
    x = draw.choice((draw.floats, draw.integers))(shape)
    return lambda x: lax.top_k(x, k, axis=axis), (x,)


@of("round", "reduce_precision", "sign", "not", "clz", "population_count")
@of("bessel_i0e", "bessel_i1e")
def of_one_operand(draw: Draw, kernel: str) -> Case:
    """Those whose template has parameters that only some of its kernels have."""
    bits = kernel in ("not", "clz", "population_count")
    x = draw.any(TensorType(draw.shape(), "int32" if bits else "float32"))
    if kernel == "round":
        method = draw.choice(tuple(lax.RoundingMethod))
        return lambda x: lax.round(x * 4, method), (x,)
    if kernel == "reduce_precision":
        return partial(lax.reduce_precision, exponent_bits=4, mantissa_bits=draw.size(3, 7)), (x,)
    return primitive(kernel).bind, (x,)


def definite(draw: Draw, batch: tuple[int, ...], n: int) -> np.ndarray:
    """Symmetric matrices that are far from singular."""
    x = draw.floats((*batch, n, n))
    return (x @ np.swapaxes(x, -1, -2) + 2 * np.eye(n)).astype(np.float32)


@of("cholesky")
def cholesky(draw: Draw, kernel: str) -> Case:
    x = definite(draw, draw.shape(0, 2), draw.size(1, 4))
    return lambda x: lax.linalg.cholesky(x, symmetrize_input=False), (x,)


@of("triangular_solve")
def triangular_solve(draw: Draw, kernel: str) -> Case:
    batch, n, many = draw.shape(0, 2), draw.size(1, 4), draw.size()
    left, lower, transpose, unit = (draw.coin() for _ in range(4))
    a, b = definite(draw, batch, n), draw.floats((*batch, *((n, many) if left else (many, n))))
    return (
        lambda a, b: lax.linalg.triangular_solve(
            a, b, left_side=left, lower=lower, transpose_a=transpose, unit_diagonal=unit
        ),
        (a, b),
    )


def matrices(draw: Draw, *dims: int) -> Array:
    """Numbers or complex numbers [batch..., dims...]."""
    shape = (*draw.shape(0, 2), *dims)
    return draw.complexes(shape) if draw.coin() else draw.floats(shape)


@of("lu", "qr", "geqrf", "svd", "householder_product")
def of_any_matrix(draw: Draw, kernel: str) -> Case:
    x = matrices(draw, draw.size(1, 5), draw.size(1, 5))
    full, more = draw.coin(), draw.coin()
    if kernel == "lu":
        return lax.linalg.lu, (x,)
    if kernel == "geqrf":
        return primitive(kernel).bind, (x,)
    if kernel == "qr":
        return lambda x: lax.linalg.qr(x, pivoting=more, full_matrices=full), (x,)
    if kernel == "svd":
        return lambda x: lax.linalg.svd(x, full_matrices=full, compute_uv=more), (x,)
    x = matrices(draw, *sorted((draw.size(1, 5), draw.size(1, 5)), reverse=True))
    taus = draw.floats((*x.shape[:-2], draw.size(0, x.shape[-1]))).astype(x.dtype)
    return lax.linalg.householder_product, (x, taus)


@of("eigh", "eig", "schur", "hessenberg", "tridiagonal")
def of_a_square_matrix(draw: Draw, kernel: str) -> Case:
    n = draw.size(1, 4)
    x = matrices(draw, n, n)
    one, other = draw.coin(), draw.coin()
    if kernel == "eigh":
        return lambda x: lax.linalg.eigh(x, lower=one, symmetrize_input=False), (x,)
    if kernel == "eig":
        return (
            lambda x: lax.linalg.eig(
                x, compute_left_eigenvectors=one, compute_right_eigenvectors=other
            ),
            (x,),
        )
    if kernel == "schur":
        return lambda x: lax.linalg.schur(x, compute_schur_vectors=one), (x,)
    if kernel == "tridiagonal":
        return lambda x: lax.linalg.tridiagonal(x, lower=one), (x,)
    return lax.linalg.hessenberg, (x,)


@of("lu_pivots_to_permutation")
def exchanges(draw: Draw, kernel: str) -> Case:
    count = draw.size(1, 4)
    size = count + draw.size(0, 2)
    pivots = draw.integers((*draw.shape(0, 2), count), 0, size)
    return lambda p: lax.linalg.lu_pivots_to_permutation(p, size), (pivots,)


@of("ormqr")
def reflections(draw: Draw, kernel: str) -> Case:
    m, other = draw.size(1, 5), draw.size(1, 5)
    n = draw.size(1, m)
    x = matrices(draw, m, n)
    left, transpose = draw.coin(), draw.coin()
    taus = draw.floats((*x.shape[:-2], draw.size(1, n))).astype(x.dtype)
    c = draw.floats((*x.shape[:-2], *((m, other) if left else (other, m)))).astype(x.dtype)
    bind = primitive("ormqr").bind
    return lambda *xs: bind(*xs, left=left, transpose=transpose), (x, taus, c)


@of("tridiagonal_solve")
def tridiagonal_solve(draw: Draw, kernel: str) -> Case:
    batch, n, sides = draw.shape(0, 2), draw.size(1, 5), draw.size(1, 4)
    lower, upper = draw.floats((*batch, n)), draw.floats((*batch, n))
    lower[..., 0] = upper[..., -1] = 0
    middle = draw.floats((*batch, n)) + 3
    b = draw.floats((*batch, n, sides))
    return lax.linalg.tridiagonal_solve, (lower, middle, upper, b)


@of("symmetric_product")
def symmetric_product(draw: Draw, kernel: str) -> Case:
    batch, n, m = draw.shape(0, 2), draw.size(1, 4), draw.size(1, 4)
    alpha, beta = draw.choice((1.0, 0.5)), draw.choice((0.0, 2.0))
    bind = primitive("symmetric_product").bind
    return (
        lambda x, c: bind(x, c, alpha=alpha, beta=beta),
        (draw.floats((*batch, n, m)), draw.floats((*batch, n, n))),
    )


@of("threefry2x32")
def threefry(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    scalar = draw.coin()
    k = [draw.integers(() if scalar else shape, 0, 2**32, np.uint32) for _ in range(2)]
    x = [draw.integers(shape, 0, 2**32, np.uint32) for _ in range(2)]
    return lambda *xs: primitive(kernel).bind(*xs), (*k, *x)


@of("iota_2x32_shape")
def counters(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    return lambda: primitive(kernel).bind(shape=shape), ()


@of("flash_attention", "flash_attention_backward")
def fused(draw: Draw, kernel: str) -> Case:
    batch, rows, keys, groups, shared, width = (draw.size(1, 4) for _ in range(6))
    causal = draw.coin()
    window = draw.size(1, 4) if causal and draw.coin() else 0
    params = {"scale": 0.5, "causal": causal, "window": window, "fill": -4.0}
    q = draw.floats((batch, rows, groups * shared, width))
    k, v = (draw.floats((batch, keys, groups, width)) for _ in range(2))
    mask: tuple[Array, ...] = ()
    if draw.coin():
        full = (batch, groups * shared, rows, keys)
        given = draw.floats(tuple(n if draw.coin() else 1 for n in full))
        mask = (given > 0,) if draw.coin() else (given,)
    if kernel == "flash_attention":
        return lambda *xs: flash_attention_p.bind(*xs, **params), (q, k, v, *mask)

    def gradients(q: Array, k: Array, v: Array, grad: Array, *mask: Array) -> list[Array]:
        out, stats = flash_attention_p.bind(q, k, v, *mask, **params)
        return flash_attention_backward_p.bind(q, k, v, stats, out, grad, *mask, **params)

    return gradients, (q, k, v, draw.floats(q.shape), *mask)
