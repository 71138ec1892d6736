"""Templates by position: the kernels of docs/templates/tapestry.yaml, the numbers of the Tapestry
papers' worked examples, and every way to write one projection."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection, ZRange

TAPESTRY = Path(__file__).parents[2] / "docs" / "templates" / "tapestry.yaml"

MATMUL = """
matmul:
  index: "[$batch..., $in_row, $out_col]"

  constraints:
    dtype:
      enum:
        - int32
        - int64
        - float32
        - float64
        - complex64
        - complex128

  inputs:
    X:
      shape: "[$batch..., $in_row, $inner]"
      dtype: "$dtype"
      ipf: "[..., 1, 0] :> [..., 1, $inner]"

    W:
      shape: "[$batch..., $inner, $out_col]"
      dtype: "$dtype"
      ipf: "[..., 0, 1] :> [..., $inner, 1]"

  outputs:
    result:
      dtype: "$dtype"
"""

Load = Callable[[str], None]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Loads a template file, or the text of one, for the time of a test."""

    def read(text: str) -> None:
        path = tmp_path / "own.yaml"
        path.write_text(text)
        registry.add_templates(path)

    return read


@pytest.fixture
def tapestry(load: Load) -> None:
    registry.add_templates(TAPESTRY)


def of(kernel: str, *shapes: tuple[int, ...], dtype: str = "float32", **params: Any) -> Any:
    types = [TensorType(s, dtype) for s in shapes]
    return registry.signature(kernel, params, types)


def dims(sig: OperationSignature) -> list[tuple[int, str]]:
    return [(d.size, d.monoid or d.role) for d in sig.index]


def projection(
    matrix: Sequence[Sequence[int]], offset: Any = None, shape: Any = None
) -> Projection:
    rank = len(matrix)
    return Projection(
        tuple(map(tuple, matrix)), tuple(offset or (0,) * rank), tuple(shape or (1,) * rank)
    )


# The matmul of the template language's first draft


def test_matmul_loads_as_it_was_first_written(load: Load) -> None:
    load(MATMUL)
    sig = of("matmul", (7, 10, 5), (7, 5, 12))
    assert dims(sig) == [(7, "map"), (10, "map"), (12, "map")]
    assert sig.inputs == (
        projection([[1, 0, 0], [0, 1, 0], [0, 0, 0]], shape=(1, 1, 5)),
        projection([[1, 0, 0], [0, 0, 0], [0, 0, 1]], shape=(1, 5, 1)),
    )
    assert sig.outputs == (Projection.identity(3),)
    assert list(map(str, sig.output_types)) == ["f32[7, 10, 12]"]


@pytest.mark.parametrize("batch", [(), (3,), (3, 2)])
def test_matmul_by_position_is_matmul_by_groups(load: Load, batch: tuple[int, ...]) -> None:
    """The same signature from both forms, and with `reduce:` that of JAX's dot_general."""
    load(
        MATMUL + "  reduce: {inner: sum}\n  passages: [sum(X) -> sum, sum(W) -> sum]\n  flops: 2\n"
    )
    shapes = (*batch, 4, 5), (*batch, 5, 6)
    by_position = of("matmul", *shapes)
    load("""
- kernels: [matmul]
  inputs: {X: "[$batch..., $m, $inner]", W: "[$batch..., $inner, $n]"}
  out: {shape: "[$batch..., $m, $n]", dtype: $X.dtype}
  index: {batch: $batch, in_row: $m, out_col: $n, inner: $inner}
  roles: {inner: reduce(sum)}
  project:
    X: "[@batch..., @in_row, @inner]"
    W: "[@batch..., @inner, @out_col]"
    out: "[@batch..., @in_row, @out_col]"
  passages: [sum(X) -> sum, sum(W) -> sum]
  flops: 2
""")
    assert of("matmul", *shapes) == by_position
    assert by_position.index[-1].name == "inner"
    k = len(batch)
    numbers = [[[k + 1], [k]], [list(range(k)), list(range(k))]]
    dot = of("dot_general", *shapes, dimension_numbers=numbers, preferred_element_type=None)
    assert (dot.inputs, dot.outputs, dims(dot), dot.flops, dot.passages) == (
        by_position.inputs,
        by_position.outputs,
        dims(by_position),
        by_position.flops,
        by_position.passages,
    )


@pytest.mark.parametrize(
    ("shapes", "dtype", "said"),
    [
        (((2, 3), (4, 5)), "float32", "W: $inner is 4 in [4, 5] as [$batch..., $inner, $out_col]"),
        (((2,), (2, 5)), "float32", "X: [2] has rank 1, the pattern"),
        (((2, 3),), "float32", "operands given: 1, declared: X, W"),
        (((6, 2, 3), (3, 5)), "float32", "W: $batch is [] in [3, 5]"),
        (((2, 3), (3, 5)), "float16", "$dtype is float16, not int32 or int64"),
    ],
)
def test_operands_that_do_not_fit_are_told_why(
    load: Load, shapes: Any, dtype: str, said: str
) -> None:
    load(MATMUL)
    with pytest.raises(TemplateError, match="no template fits matmul") as caught:
        of("matmul", *shapes, dtype=dtype)
    assert f"own.yaml:2:1: {said}" in caught.value.hint


# Every way to write one projection

SUM = """
f:
  index: "[$shape[:$axis]..., $shape[$axis + 1:]...]"
  inputs:
    x: {shape: "[$shape...]", dtype: $dtype, ipf: %s}
  outputs:
    y: {dtype: $dtype}
"""
LINES_OF_SUM = [
    '"[1...[:$axis]..., new, 1...[$axis + 1:]...] :> [1...[:$axis]..., $shape[$axis], 1...]"',
    '"[...[:$axis], new, ...[$axis + 1:]] :> [...[:$axis], $shape[$axis], ...[$axis + 1:]]"',
    '"D[1...[:$axis], new, 1...] + [0...] :> [1...[:$axis], $shape[$axis], ...]"',
    '"[ones($axis)..., new, ones($index.size - $axis)...] + [0...] :> [...[:$axis], $n, ...]"',
    '{map: "[1...[:$axis], new, 1...]", shape: "[1...[:$axis], $shape[$axis], 1...]"}',
    '{map: "D[1...[:$axis], new, 1...]", offset: "[...]", shape: "[...[:$axis], $n, 1...]"}',
    '{transform: insert, index: "$axis", source: "[1...]", patch: "[0] :> [$shape[$axis]]"}',
    '{transform: insert, index: "$axis", source: {map: "[...]"}, patch: "[new] :> [$n]"}',
    '{transform: insertRow, source: "[1...]", index: "$axis", row: "[0... | 0 | $shape[$axis]]"}',
    '"[@i[:$axis]..., 0 :+ $n, @i[$axis:]...]"',
    '"[[1, 0... | 0 | 1], [0, 1, 0 | 0 | 1], [0... | 0 | $n], [0..., 1 | 0 | 1]]"',
    '{transform: insert, index: "$axis", source: "[1...]", patch: "[0] :> [$.shape[$axis]]"}',
    "{affineMap: {projection: [[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]], offset: [0, 0, 0, 0]},"
    ' shape: [1, 1, "$shape[$axis]", 1]}',
    '{affineMap: {projection: ["[1, 0, 0]", "[0, 1, 0]", "zeros(3)", "[0, 0, 1]"],'
    ' offset: "zeros(4)"}, shape: "[1, 1, $n, 1]"}',
]


@pytest.mark.parametrize("ipf", LINES_OF_SUM)
def test_x11_sum_over_axis_2_in_every_form(load: Load, ipf: str) -> None:
    load(SUM % ipf + '  let: {n: "$shape[$axis]"}\n')
    sig = of("f", (2, 3, 4, 5), axis=2)
    assert dims(sig) == [(2, "map"), (3, "map"), (5, "map")]
    assert sig.inputs == (
        projection([[1, 0, 0], [0, 1, 0], [0, 0, 0], [0, 0, 1]], shape=(1, 1, 4, 1)),
    )
    assert sig.outputs == (Projection.identity(3),)
    assert sig.output_types[0].shape == (2, 3, 5)


@pytest.mark.parametrize("ipf", LINES_OF_SUM[:10])
@pytest.mark.parametrize(("axis", "left"), [(0, (3, 4, 5)), (1, (2, 4, 5)), (3, (2, 3, 4))])
def test_x11_sum_over_any_axis(load: Load, ipf: str, axis: int, left: tuple[int, ...]) -> None:
    load(SUM % ipf + '  let: {n: "$shape[$axis]"}\n')
    registry.add_templates(TAPESTRY)
    sig = of("f", (2, 3, 4, 5), axis=axis)
    assert sig.output_types[0].shape == left == sig.extents
    shipped = of("sum", (2, 3, 4, 5), axis=axis)
    assert shipped.output_types[0].shape == left
    assert dims(shipped) == [*((n, "map") for n in left), ((2, 3, 4, 5)[axis], "sum")]
    whole = ZRange.from_shape(left), ZRange.from_shape(shipped.extents)
    assert sig.inputs[0].image(whole[0]) == shipped.inputs[0].image(whole[1])
    assert sig.inputs[0].shape[axis] == (2, 3, 4, 5)[axis]


def test_what_is_inserted_takes_no_index_dim(load: Load) -> None:
    load(SUM % '{transform: insert, index: "0", source: "[1...]", patch: "[1] :> [2]"}')
    with pytest.raises(TemplateError, match="1 in a patch: its rows take no index dim, write 0"):
        of("f", (2, 3), axis=0)


def test_a_shape_by_insertion(load: Load) -> None:
    """Undoing a sum: a dim is put back where it was."""
    load("""
widen:
  params: {axis: , n: "2"}
  index: "[$shape...]"
  inputs:
    x: {shape: "[$shape...]", dtype: $dtype, ipf: "[1...]"}
  outputs:
    y:
      shape: {transform: insert, index: $axis, source: "[$.index...]", patch: "[$n]"}
      dtype: $dtype
      ipf: {transform: insert, index: $axis, source: "[1...]", patch: "[0] :> [$n]"}
""")
    sig = of("widen", (3, 4), axis=1)
    assert sig.output_types[0].shape == (3, 2, 4)
    assert sig.outputs == (projection([[1, 0], [0, 0], [0, 1]], shape=(1, 2, 1)),)
    assert of("widen", (3, 4), axis=-1, n=5).output_types[0].shape == (3, 4, 5)


def test_dims_of_the_four_kinds(load: Load) -> None:
    """A stride keeps an index dim, 0 uses it up, `new` uses none, `drop` makes no row of it."""
    load("""
f:
  index: "[$a, $b, $c]"
  inputs:
    x: {shape: "[$a, $c]", dtype: $d, ipf: "[1, drop, 1]"}
    y: {shape: "[$b, $n]", dtype: $d, ipf: "[drop, 1, 0] :> [1, $n]"}
    z: {shape: "[$m, $two]", dtype: $d, ipf: "[new, drop..., 2] + [1, 0] :> [$m - 1, 2]"}
    w: {shape: "[$a, $c]", dtype: $d, ipf: "[1, drop, ...]"}
  outputs: {out: {dtype: $d}}
""")
    assert of("f", (2, 4), (3, 7), (5, 8), (2, 4)).inputs == (
        projection([[1, 0, 0], [0, 0, 1]]),
        projection([[0, 1, 0], [0, 0, 0]], shape=(1, 7)),
        projection([[0, 0, 0], [0, 0, 2]], offset=(1, 0), shape=(4, 2)),
        projection([[1, 0, 0], [0, 0, 1]]),
    )


# The worked examples


def test_linear_reduces_only_without_a_bias(tapestry: None) -> None:
    assert dims(of("linear", (6, 2, 3), (3, 4)))[-1] == (3, "sum")
    assert dims(of("linear", (6, 2, 3), (3, 4), (4,)))[-1] == (3, "whole")


def test_x10_add_of_selections_and_under_broadcasting(tapestry: None) -> None:
    sig = of("add", (10, 5), (10, 5))
    second = sig.inputs[1].translate((200, 50))
    assert second == projection([[1, 0], [0, 1]], offset=(200, 50))
    assert str(second.image(ZRange((5, 0), (10, 5)))) == "zr[205:210, 50:55]"
    sig = of("add", (10, 10, 10), (1, 10), (10, 1, 1))
    assert sig.output_types[0].shape == (10, 10, 10)
    assert sig.inputs[1] == projection([[0, 0, 0], [0, 0, 1]])
    assert sig.inputs[2] == projection([[1, 0, 0], [0, 0, 0], [0, 0, 0]])
    assert len(sig.passages) == 1 and sig.passages[0].inputs == (0, 1, 2)


def test_x13_padding_leaves_the_tensor_and_is_refused(load: Load) -> None:
    load("""
blur:
  index: "[$h, $w]"
  inputs: {x: {shape: "[$h, $w]", dtype: $d, ipf: "D[1, 1] + [-1, -1] :> [3, 3]"}}
  outputs: {y: {dtype: $d}}
""")
    with pytest.raises(TemplateError) as caught:
        of("blur", (8, 8))
    assert "leaves x, f32[8, 8]: it reaches zr[-1:9, -1:9]" in caught.value.what
    assert caught.value.where == "own.yaml:4:52"


# Run shard by shard: the projections choose the boxes, NumPy computes on them


def _convolve(x: Any, f: Any, stride: int = 1, dilation: int = 1) -> Any:
    high, wide = (dilation * (n - 1) + 1 for n in f.shape[2:])
    y = [(n - k) // stride + 1 for n, k in zip(x.shape[2:], (high, wide), strict=True)]
    out = np.zeros((x.shape[0], f.shape[0], *y), x.dtype)
    for i, j in np.ndindex(*y):
        rows = slice(i * stride, i * stride + high, dilation)
        window = x[:, :, rows, j * stride : j * stride + wide : dilation]
        out[:, :, i, j] = np.einsum("nchw,ochw->no", window, f)
    return out


def _chunks(x: Any, chunk: int, axis: int = 0) -> list[Any]:
    return np.split(x, range(chunk, x.shape[axis], chunk), axis)


KERNELS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w: x @ w,
    "linear": lambda x, a, b=None: x @ a if b is None else x @ a + b,
    "relu": lambda x: np.maximum(x, 0),
    "add": lambda *xs: sum(xs[1:], xs[0]),
    "sum": lambda x, axis: x.sum(axis),
    "concat": lambda *xs, axis=0: np.concatenate(xs, axis),
    "split": _chunks,
    "desaturate": lambda x: x.sum(-1, dtype=np.uint8),
    "conv": _convolve,
}

CASES: list[tuple[str, list[tuple[int, ...]], dict[str, int]]] = [
    ("matmul", [(4, 5), (5, 6)], {}),
    ("matmul", [(2, 3, 4, 5), (2, 3, 5, 6)], {}),
    ("linear", [(4, 3), (3, 5)], {}),
    ("linear", [(2, 4, 3), (3, 5), (5,)], {}),
    ("relu", [(4, 5)], {}),
    ("add", [(4, 1, 6), (5, 1), (6,)], {}),
    ("sum", [(3, 4, 5)], {"axis": 1}),
    ("sum", [(3, 4, 5)], {"axis": -1}),
    ("concat", [(3, 2, 4), (3, 5, 4), (3, 1, 4)], {"axis": 1}),
    ("concat", [(2, 3), (2, 4)], {"axis": -1}),
    ("split", [(10, 3, 4)], {"chunk": 4}),
    ("split", [(3, 4, 7)], {"chunk": 3, "axis": -1}),
    ("desaturate", [(2, 4, 5, 3)], {}),
    ("conv", [(2, 4, 8, 9), (3, 4, 3, 2)], {}),
    ("conv", [(2, 2, 11, 12), (3, 2, 3, 3)], {"stride": 2, "dilation": 2}),
]


def covers(sig: OperationSignature, rng: np.random.Generator) -> Iterator[ZRange]:
    """A random disjoint cover of the index space by boxes; dims that are whole stay so."""
    cuts = []
    for d in sig.index:
        inner = [] if d.role == "whole" else rng.choice(d.size, min(2, d.size), replace=False)
        ends = sorted({0, d.size, *map(int, inner)})
        cuts.append(list(itertools.pairwise(ends)))
    for box in itertools.product(*cuts):
        yield ZRange(tuple(a for a, _ in box), tuple(b for _, b in box))


@pytest.mark.parametrize(("kernel", "shapes", "params"), CASES)
def test_shards_make_what_the_whole_makes(
    tapestry: None, kernel: str, shapes: list[tuple[int, ...]], params: dict[str, int]
) -> None:
    rng = np.random.default_rng(0)
    dtype = "uint8" if kernel == "desaturate" else "int64"
    dtype = "int32" if kernel == "matmul" else dtype
    operands = [rng.integers(0, 9, s).astype(dtype) for s in shapes]
    sig = of(kernel, *shapes, dtype=dtype, **params)
    whole = KERNELS[kernel](*operands, **params)
    whole = whole if isinstance(whole, list) else [whole]
    assert [w.shape for w in whole] == [t.shape for t in sig.output_types]
    for _ in range(3):
        made = [np.zeros_like(w) for w in whole]
        for box in covers(sig, rng):
            local = [x[p.image(box).slices] for x, p in zip(operands, sig.inputs, strict=True)]
            parts = KERNELS[kernel](*local, **params)
            parts = parts if isinstance(parts, list) else [parts]
            for out, part, p in zip(made, parts, sig.outputs, strict=True):
                out[p.image(box).slices] += part  # partial sums of reduced dims add up
        for out, want in zip(made, whole, strict=True):
            assert np.array_equal(out, want)
