"""Every template: any disjoint cover of its index space gives what the whole gives.

Hypothesis draws shapes, parameters and the cover (uneven, of map and reduce dims, with halos where
boxes overlap). Integers must agree exactly, floats up to 1e-5 (2e-2 below 32 bits), relative and
absolute: partial results are rounded to the output's dtype before they combine.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import TapestryError, TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature, Passage, evaluate
from tapestry_egg.reference.call import KEY
from tapestry_egg.reference.executor import combine, run_operation, without_gaps
from tapestry_egg.reference.kernels import REFERENCES, reference
from tapestry_egg.runtime.lower.kernels.kernels import LOWERINGS
from tapestry_egg.tracing.codec import decode_params, primitive
from tapestry_egg.zspace import ZRange
from tests.metakernels.cases import (
    CASES,
    FAMILY,
    JAX,
    SHARDS,
    SPELLINGS,
    TEMPLATES,
    TRACED,
    Application,
    Array,
    application,
    check_cover,
    close,
)
from tests.metakernels.covers import random_cover

#: Index groups that no operation can be cut along although their dims are not all `whole`; covers
#: cut none of which shards exchange states (`tests/runtime/test_lower_states.py` does).
NEVER_CUT = {
    **{kernel: {"r"} for kernel in ("reduce_xor", "argmax", "argmin", "top_k")},
    "conv_general_dilated": {"z"},
    "scatter_apply": {"b"},
}
SEEDS = st.integers(0, 2**32)
MANY = 8  # examples of kernels whose cases take several forms; one entry of few forms needs fewer
FEW = 3


def covered(kernel: str, seed: int) -> None:
    app = application(kernel, seed)
    check_cover(app, random_cover(app.signature, random.Random(seed), cuts=4))


@pytest.mark.parametrize("kernel", CASES)
def test_shards_give_what_the_whole_gives(kernel: str) -> None:
    examples = FEW if FAMILY[kernel] == "elementwise" else MANY

    @settings(max_examples=examples)
    @given(SEEDS)
    def check(seed: int) -> None:
        covered(kernel, seed)

    check()


def test_every_kernel_has_a_reference() -> None:
    own = {  # of files that other tests read
        kernel
        for kernel, entries in registry.templates().items()
        if all(Path(entry.path).parent != TEMPLATES for entry in entries)
    }
    assert set(registry.templates()) - own == set(REFERENCES) - own, (
        "a template without a reference, or the other way round"
    )
    assert set(TRACED) <= set(CASES)
    for kernel, like in SPELLINGS.items():
        assert registry.templates()[kernel] == registry.templates()[like]


@pytest.mark.slow
def test_every_entry_is_drawn_and_cut_along_every_index_group() -> None:
    wanted = set()
    for kernel in CASES:
        for entry in registry.templates()[kernel]:
            groups = set(entry.index or {"i": None}) - NEVER_CUT.get(kernel, set())
            groups -= {g for g, r in entry.roles.items() if r.text == "whole"}
            wanted |= {(kernel, entry.origin.line, g) for g in groups or {""}}
    for kernel in CASES:
        for seed in range(80):
            own = {w for w in wanted if w[0] == kernel}
            if not own:
                break
            app, rng = application(kernel, seed), random.Random(seed)
            assert app.template is not None, f"{app} has no template"
            cut = {""}
            for d, dim in enumerate(app.signature.index):
                if any(b.shape[d] < dim.size for b in random_cover(app.signature, rng, cuts=6)):
                    cut.add(dim.name.rstrip("0123456789"))
            wanted -= {(kernel, app.template.origin.line, g) for g in cut}
    assert not wanted, f"never drawn, or never cut: {sorted(wanted)}"


# A template that reads less than it needs, or claims too much, fails the cover property. Every
# box of every operand is made one smaller, moved by one, or fixed; what else a template says
# (roles, monoids, the order of dims) has faults planted in its text. What the shards then give is
# compared with what the right template gives for the whole (which `test_template_jax` holds
# against JAX); some covers must differ, or be refused.


Plant = Callable[[str], None]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Puts a template file before the package's own for the length of a test."""

    def put(text: str) -> None:
        path = tmp_path / "planted.yaml"
        path.write_text(text, "utf-8")
        registry.add_templates(path)

    return put


def wrong(kernel: str, put: Callable[[], None], seeds: int = 20) -> bool:
    """Whether a random case fails the property once `put` has planted a template."""
    cases = [application(kernel, seed) for seed in range(seeds)]
    right = [app.run() for app in cases]
    put()
    pairs = zip(cases, right, strict=True)
    return not all(agrees(app, want, seed) for seed, (app, want) in enumerate(pairs))


def agrees(
    app: Application,
    right: tuple[object, ...],
    seed: int,
    signature: OperationSignature | None = None,
) -> bool:
    """Whether random shards give what is right, cut as the signature says (the app's own)."""
    try:
        signature = app.signature if signature is None else signature
        cover = random_cover(signature, random.Random(seed), cuts=4)
        made = run_operation(app.kernel, app.params, signature, app.operands, cover)
        for q, (got, want) in enumerate(zip(made, right, strict=True)):
            close(got, want, f"output {q}", SHARDS)
    except (AssertionError, TapestryError, ValueError, IndexError):
        return False
    return True


MUL = """
- kernels: [mul]
  inputs: {x: , y: }
  when: $x.shape == $y.shape
  out: {shape: $x.shape, dtype: $x.dtype}
  project: {y: "[%s for $d, $n in enumerate($y.shape)]"}
"""
CUM = "- {kernels: [%s], inputs: {x: }, out: {shape: $x.shape, dtype: $x.dtype}, roles: {i: map}}"

#: (what is wrong, kernel, the file it is in, a text of it, what stands there instead)
EDITS = [
    # contraction
    ("places mixed up", "conv_general_dilated", "contraction", "[$step[$d] * @w[index(",
     "[$window[$d] - $step[$d] - $step[$d] * @w[index("),
    ("groups mixed up", "conv_general_dilated", "contraction", "$inner * @g + @k,", "@g + @k,"),
    # window
    ("wrong value outside", "reduce_window_min", "window", "max if $kernel == reduce_window_max",
     "max if true"),
    ("a window too few", "select_and_scatter_add", "window",
     "first: \"[0 - ($w - 1 - $l) // $s for", "first: \"[1 - ($w - 1 - $l) // $s for"),
    # movement
    ("not reversed", "rev", "movement", "[$n - 1 - @i[$d] if", "[@i[$d] if"),
    ("not permuted", "transpose", "movement", "arrange($permutation, @i)", "@i"),
    # indexing
    ("monoid", "scatter-mul", "indexing", "prod if $kernel in", "sum if $kernel in"),
    # random
    ("one key only", "random_bits", "random", 'keys: "@b"', 'keys: "[0 for $q in @b]"'),
    ("one word only", "threefry2x32", "random", "  inputs: {k1: , k2: , x1: , x2: }",
     """  inputs: {k1: , k2: , x1: , x2: }
  project: {x1: "[0 * $r for $r in @i]"}"""),
    # reduction
    ("monoid", "reduce_max", "reduction", "else reduce(max)", "else reduce(sum)"),
    ("cut", "argmax", "reduction", 'roles: {r: "join($kernel) if',
     'roles: {r: "reduce(max) if'),
    ("one result less", "top_k", "reduction", "[0 :+ $params.k if $d == $at",
     "[0 :+ max(1, $params.k - 1) if $d == $at"),
    ("cut", "sort", "reduction", "[whole if $d == $dimension else map for", "[map for"),
    # streaming
    ("cut", "softmax", "streaming", "[whole if $d in $axes else map for", "[map for"),
    ("cut", "attention", "streaming", "[whole if $d in $pc else map for", "[map for"),
    ("monoid", "dot_logsumexp", "streaming", "reduce(logaddexp) if $d in $axes",
     "reduce(sum) if $d in $axes"),
    ("cut", "dot_logsumexp", "streaming", "k: whole", "k: reduce(sum)"),
    # linalg
    ("batch lost", "triangular_solve", "linalg", 'a: "[@i..., ', 'a: "[[0 for $q in @i]..., '),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "file", "old", "new"),
    [pytest.param(*edit[1:], id=f"{edit[1]}-{edit[0]}") for edit in EDITS],
)
def test_an_edited_template_fails(plant: Plant, kernel: str, file: str, old: str, new: str) -> None:
    text = (TEMPLATES / f"{file}.yaml").read_text("utf-8")
    assert old in text, "the template has changed: plant the fault anew"
    assert not wrong(kernel, lambda: plant(text), seeds=3), "without the fault all agree"
    assert wrong(kernel, lambda: plant(text.replace(old, new)))


@pytest.mark.parametrize("row", ["0 * @i[$d]", "@i[$d] + 1", "@i[$d] - 1"])
def test_an_elementwise_kernel_that_reads_other_elements_fails(plant: Plant, row: str) -> None:
    assert not wrong("mul", lambda: plant(MUL % "@i[$d]"))
    assert wrong("mul", lambda: plant(MUL % row))


@pytest.mark.parametrize("kernel", [k for k in CASES if k.startswith("cum")])
def test_a_cumulative_kernel_cut_along_its_axis_fails(plant: Plant, kernel: str) -> None:
    assert wrong(kernel, lambda: plant(CUM % kernel))


@pytest.mark.parametrize("kernel", [k for k in CASES if FAMILY[k] != "elementwise"])
def test_every_box_of_every_operand_is_needed(kernel: str) -> None:
    """An operand's box that is one smaller, starts one later, or follows no index dim: in some
    case what the shards give differs from the whole, or they are refused."""
    noticed: dict[tuple[int, str], bool] = {}
    for seed in range(60):
        if seed >= 10 and all(noticed.values()):
            break
        app = application(kernel, seed)
        whole = app.run()
        for fault, signature in faulty(app.signature):
            if not noticed.get(fault):
                noticed[fault] = not agrees(app, whole, seed, signature)
    assert all(noticed.values()), noticed


def faulty(signature: OperationSignature) -> Iterator[tuple[tuple[int, str], OperationSignature]]:
    """The signature with a fault in one row of an operand's projection: operand and kind, result.

    Only those where the projection names fewer or other elements than before.
    """
    for p, (own, type_) in enumerate(zip(signature.inputs, signature.input_types, strict=True)):
        for k, (row, n) in enumerate(zip(own.matrix, own.shape, strict=True)):
            made = {}
            if n > 1:
                made["smaller"] = replace(own, shape=put(own.shape, k, n - 1))
            if type_.shape[k] > 1:
                made["later"] = replace(own, offset=put(own.offset, k, own.offset[k] + 1))
            cut = [dim.role in ("map", "reduce") and dim.size > 1 for dim in signature.index]
            if any(a and c for a, c in zip(row, cut, strict=True)):
                still = tuple(0 if c else a for a, c in zip(row, cut, strict=True))
                made["still"] = replace(own, matrix=put(own.matrix, k, still))
            for kind, projection in made.items():
                yield (p, kind), replace(signature, inputs=put(signature.inputs, p, projection))


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def test_every_family_has_a_planted_fault() -> None:
    planted = {FAMILY[edit[1]] for edit in EDITS} | {"elementwise"}
    assert planted == set(FAMILY.values())


# Every template against the JAX primitive itself: whole, and on the boxes of a shard. Operands
# are drawn as in `test_template_covers`; all operations of a family run in one jitted call.


FAMILIES = tuple(dict.fromkeys(FAMILY.values()))
# Those of the most operations or the longest loops, which XLA compiles for seconds.
_MANY_PROGRAMS = ("elementwise", "streaming", "linalg", "indexing", "random", "reduction")


def drawn(family: str, seeds: Sequence[int]) -> list[Application]:
    kernels = [k for k in CASES if FAMILY[k] == family]
    return [application(k, f"{k}{seed}") for k in kernels for seed in seeds]


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, jitted with as little optimization as XLA can do."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.device_get(jax.jit(function, compiler_options=fast)(*args))


def by_jax(calls: Sequence[tuple[str, Any, Sequence[Array]]]) -> list[list[Array]]:
    """The outputs of (kernel, plain parameters, operands), computed by JAX."""

    def run(operands: Any) -> Any:
        out = []
        for (kernel, params, _), xs in zip(calls, operands, strict=True):
            made = primitive(kernel).bind(*map(taken, xs), **decode_params(params, kernel=kernel))
            out.append([words_of(x) for x in (made if isinstance(made, list | tuple) else [made])])
        return out

    plain = [[{"words": x["words"]} if x.dtype.names else x for x in xs] for _, _, xs in calls]
    return [
        [as_keys(x["words"]) if isinstance(x, dict) else x for x in xs]
        for xs in compiled(run, plain)
    ]


def taken(x: Any) -> Any:
    """What JAX takes for an array of ours: random keys are made of their words."""
    return jax.random.wrap_key_data(x["words"]) if isinstance(x, dict) else x


def words_of(x: Any) -> Any:
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return {"words": jax.random.key_data(x)} if keys else x


def as_keys(words: Array) -> Array:
    out = np.zeros(words.shape[:-1], KEY)
    out["words"] = words
    return out


def check_whole(apps: Sequence[Application]) -> None:
    results = by_jax([(a.kernel, a.params, a.operands) for a in apps])
    for app, wanted in zip(apps, results, strict=True):
        for q, (got, want) in enumerate(zip(app.run(), wanted, strict=True)):
            if app.kernel == "cholesky":
                want = np.tril(want)  # JAX leaves the other triangle as it was
            close(got, want, f"output {q} of {app}", JAX)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in _MANY_PROGRAMS else ()) for f in FAMILIES],
)
def test_references_give_what_jax_gives(family: str) -> None:
    check_whole(drawn(family, range(1 if family in ("elementwise", "random") else 2)))


def on_a_block(
    app: Application, box: ZRange
) -> tuple[tuple[str, Any, list[Array]], list[Array]] | None:
    """The bare kernel on the boxes that an index box reads, and what it should give; None where
    what lies outside is filled in by whoever runs the kernel."""
    sig = app.signature
    box = next(without_gaps(sig, box))
    operands = [x[sig.operand_box(p, box).slices] for p, x in enumerate(app.operands)]
    if any(sig.margins(p, box) != ((0, 0),) * x.ndim for p, x in enumerate(operands)):
        return None
    shapes = [p.image(box).shape for p in sig.outputs]
    local = registry.localize(app.kernel, app.params, sig, [x.shape for x in operands], shapes)
    want = list(reference(app.kernel, app.params, sig, operands, box))
    return (app.kernel, local, operands), want


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "elementwise"],
)
def test_jax_runs_on_the_boxes_of_a_shard_with_the_local_parameters(family: str) -> None:
    """Along every index dim but those where the template says that the block's place matters."""
    calls, wanted = [], []
    for app in drawn(family, range(50, 53)):
        sig = app.signature
        dims = [replace(d, role="whole") if k in sig.placed else d for k, d in enumerate(sig.index)]
        free = replace(sig, index=tuple(dims))
        made = on_a_block(app, random_cover(free, random.Random(str(app)), cuts=2)[0])
        if made is not None and app.kernel != "cholesky":
            calls.append(made[0])
            wanted.append((app, made[1]))
    for made, (app, want) in zip(by_jax(calls), wanted, strict=True):
        for q, (a, b) in enumerate(zip(made, want, strict=True)):
            close(a, b, f"output {q} of {app} on a block", JAX)
    assert len(calls) >= 3


def test_kernels_that_must_know_their_place_are_those_that_are_lowered_with_it() -> None:
    declared = {k for k, entries in registry.templates().items() if any(e.placed for e in entries)}
    assert declared == set(LOWERINGS)


@pytest.mark.parametrize("kernel", sorted(set(LOWERINGS) & set(CASES)))
def test_a_place_that_is_declared_matters(kernel: str) -> None:
    """On some block along such a dim the bare kernel gives something else, or cannot run."""
    for seed in range(40):
        app = application(kernel, seed)
        sig = app.signature
        for d in sig.placed:
            n = sig.index[d].size
            if n < 2 or sig.index[d].role not in ("map", "reduce"):
                continue
            half = ZRange.from_shape(sig.extents).with_dim(d, n // 2, n)
            made = on_a_block(app, half)
            if made is None:
                return
            try:
                got = by_jax([made[0]])[0]
            except TypeError:  # what is written is larger than the block
                return
            if not all(np.array_equal(a, b) for a, b in zip(got, made[1], strict=True)):
                return
    raise AssertionError(f"{kernel} never depends on where its block lies")


# What templates declare besides boxes: laws of partial values, costs, types.


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
