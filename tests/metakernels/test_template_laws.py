"""What templates declare besides boxes: laws of partial values, costs, types."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import Passage, evaluate
from tapestry_egg.reference.executor import combine
from tapestry_egg.zspace import ZRange
from tests.metakernels.cases import CASES, JAX, Application, Array, application, close


def check_passage(app: Application, law: Passage, rng: np.random.Generator) -> None:
    """f(x•y) = f(x)•f(y) on the operands of the group, the others as they are."""

    def other(x: Array) -> Array:
        if x.dtype.kind in "iu":  # of any size: what wraps must wrap alike on both sides
            ends = np.iinfo(x.dtype)
            return rng.integers(ends.min, ends.max, x.shape, x.dtype)
        noise = rng.uniform(-2, 2, x.shape)
        if x.dtype.kind == "c":
            noise = noise + 1j * rng.uniform(-2, 2, x.shape)
        return np.asarray(noise).astype(x.dtype)

    values = list(enumerate(app.operands))
    xs, ys = ([other(x) if p in law.inputs else x for p, x in values] for _ in range(2))
    both = [
        combine(law.monoid_in, x, y) if p in law.inputs else x
        for p, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    fx, fy, fxy = (app.run(operands=v) for v in (xs, ys, both))
    narrow = any(x.dtype.kind not in "biu" and x.dtype.itemsize < 4 for x in app.operands)
    for q, (a, b, want) in enumerate(zip(fx, fy, fxy, strict=True)):
        joined = combine(law.monoid_out, a, b)
        close(joined, want, f"{law} of output {q} of {app}", 5e-2 if narrow else JAX, 5e-2)


@pytest.mark.parametrize("kernel", CASES)
def test_declared_passages_hold(kernel: str) -> None:
    for seed in range(4):
        app = application(kernel, seed)
        for law in app.signature.passages:
            check_passage(app, law, np.random.default_rng(seed))


@pytest.mark.parametrize(
    ("kernel", "law"),
    [
        ("exp", Passage((0,), "sum", "sum")),
        ("add", Passage((0,), "sum", "sum")),
        ("add", Passage((1,), "sum", "sum")),
        ("dot_general", Passage((0, 1), "sum", "sum")),
        ("div", Passage((1,), "sum", "sum")),
        ("neg", Passage((0,), "max", "max")),
        ("pad", Passage((0,), "sum", "sum")),  # the padding would count once for every part
        ("scatter-add", Passage((2,), "sum", "sum")),  # and so would the starting value
    ],
)
def test_a_wrong_passage_fails(kernel: str, law: Passage) -> None:
    with pytest.raises(AssertionError, match=kernel):
        for seed in range(20):
            app = application(kernel, seed)
            if app.input_types[0].dtype == "float32":
                check_passage(app, law, np.random.default_rng(seed))


def test_products_take_one_partial_operand_and_sums_take_both() -> None:
    """psum(partial + replicated) is the classic error; some laws change the monoid."""

    def sums(kernel: str) -> set[tuple[int, ...]]:
        laws = application(kernel, 0).signature.passages
        return {x.inputs for x in laws if x.monoid_in == x.monoid_out == "sum"}

    assert sums("add") == sums("sub") == {(0, 1)}
    assert sums("dot_general") == {(0,), (1,)}
    assert sums("reduce_sum") == sums("transpose") == sums("neg") == {(0,)}
    assert not sums("exp") and not sums("max")
    negated = registry.signature("neg", {}, (TensorType((2, 3), "float32"),))
    assert Passage((0,), "max", "min") in negated.passages


@pytest.mark.parametrize("kernel", CASES)
def test_one_number_everywhere_gives_one_where_signatures_say_so(kernel: str) -> None:
    for seed in range(4):
        app = application(kernel, seed)
        if app.signature.keeps_fills and all(x.size for x in app.operands):
            filled = [np.full(x.shape, x.flat[0]) for x in app.operands]
            for made in app.run(operands=filled):
                assert made.tobytes() == np.full_like(made, made.flat[0]).tobytes(), str(app)


def test_most_that_is_fused_keeps_fills_and_no_kernel_that_asks_where_it_is() -> None:
    found = {k: application(k, 0).signature for k in CASES}
    keeps = {k for k, s in found.items() if s.keeps_fills}
    assert keeps >= {"broadcast_in_dim", "convert_element_type", "exp", "reduce_sum", "transpose"}
    assert not keeps & {"argmax", "cumsum", "iota", "pad", "sort", "split"}
    fused = {k for k, s in found.items() if s.fusion in ("view", "loop")}
    assert len(keeps & fused) > 0.8 * len(fused)


def test_unknown_kernels_and_regions_are_opaque() -> None:
    x = TensorType((4, 6), "float32")
    for kernel, regions in (("eigh", 0), ("scan", 1), ("no_such_kernel", 0)):
        sig = registry.signature(kernel, {}, (x,), (x,), regions)
        assert sig.opaque and sig.index == ()
        assert sig.inputs[0].image(ZRange((), ())).shape == (4, 6)
        assert registry.localize(kernel, {"p": 1}, sig, [(4, 6)], [(4, 6)]) == {"p": 1}
    with pytest.raises(TemplateError, match="no template fits"):
        registry.signature("no_such_kernel", {}, (x,))


def test_wrong_output_types_are_an_error() -> None:
    x, y = TensorType((4, 6), "float32"), TensorType((4, 6), "int32")
    with pytest.raises(TemplateError, match=r"elementwise\.yaml.*f32\[4, 6\].*s32\[4, 6\]"):
        registry.signature("exp", {"accuracy": None}, (x,), (y,))


f32 = functools.partial(TensorType, dtype="float32")


def test_costs_are_polynomials_in_index_extents() -> None:
    dot = registry.signature(
        "dot_general",
        {"dimension_numbers": [[[1], [0]], [[], []]], "preferred_element_type": None},
        (f32((8, 16)), f32((16, 4))),
    )
    assert evaluate(dot.flops, dot.extents) == 2 * 8 * 16 * 4
    assert evaluate(dot.flops, (4, 4, 8)) == 2 * 4 * 4 * 8


ROWS = {
    "dimension_numbers": {
        "$class": "GatherDimensionNumbers",
        "offset_dims": [1],
        "collapsed_slice_dims": [0],
        "start_index_map": [0],
        "operand_batching_dims": [],
        "start_indices_batching_dims": [],
    },
    "slice_sizes": [1, 4],
    "mode": {"$enum": ["GatherScatterMode", "CLIP"]},
    "fill_value": None,
}


def test_tables_are_cut_by_rows_and_read_by_rows() -> None:
    indices = TensorType((6, 1), "int32")
    read = registry.signature("gather", ROWS, (f32((8, 4)), indices))
    rows = next(d for d, dim in enumerate(read.index) if dim.role == "reduce")
    assert (read.index[rows].size, read.index[rows].monoid) == (8, "sum")
    assert read.inputs[0].reaches(rows) == (0,)
    assert read.reads[0] is not None and evaluate(read.reads[0], read.extents) == 6 * 4


def test_a_reshape_does_not_run_on_a_box_with_gaps() -> None:
    six, two = f32((6,)), f32((2, 3))
    params = {"new_sizes": [2, 3], "dimensions": None, "sharding": None}
    sig = registry.signature("reshape", params, (six,), (two,))
    with pytest.raises(TemplateError, match="the operand box holds elements"):
        registry.localize("reshape", params, sig, [(4,)], [(2, 1)])


def test_what_lies_outside_is_a_monoid_or_a_scalar_operand() -> None:
    pad = application("pad", 0).signature
    assert [pad.beyond(p) for p in (0, 1)] == [1, None]
    pool = application("reduce_window_min", 0).signature
    assert pool.beyond(0) == "min"
    assert replace(pool, outside=()).beyond(0) is None
