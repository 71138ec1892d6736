"""The census against counts by hand, by XLA and by brute force, and of every program of models/."""

from __future__ import annotations

import importlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import primitives

import models
import tapestry_egg as te
from tapestry_egg.cli.app import main
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.registry import opaque_primitives
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.pipeline.census import Census, census, legal_roles
from tapestry_egg.tracing.jaxprs import INLINED, REGIONS
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import ZRange

f32 = jax.ShapeDtypeStruct


def floats(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, np.float32)


def count(fn: Callable[..., Any], *args: Any) -> Census:
    return census(te.trace(fn, *args).graph)


# By hand


def test_a_product_and_its_tanh_by_hand() -> None:
    found = count(lambda x, w: jnp.tanh(x @ w), floats(8, 16), floats(16, 4))
    assert found.roles == ("contraction", "elementwise")
    product, tanh = found.work("contraction"), found.work("elementwise")
    # Each result is 16 products and as many sums; tanh counts ten operations.
    assert (product.operations, product.flops) == (1, 2 * 8 * 16 * 4)
    assert product.bytes == 4 * (8 * 16 + 16 * 4 + 8 * 4)
    assert (tanh.flops, tanh.bytes) == (10 * 8 * 4, 4 * 2 * 8 * 4)
    assert found.work() == product + tanh
    assert (found.flops_share, found.bytes_share, found.whole) == (1, 1, ())


def test_dims_of_size_one_do_not_count_as_splits() -> None:
    found = count(lambda x: x * 2, floats(1, 1))
    assert (found.flops_share, found.bytes_share) == (0, 0)
    assert [c.reason for c in found.whole] == ["one index point"]


def test_what_is_read_is_counted_and_not_what_stands_beside_it() -> None:
    rows = count(lambda x: x[2:4], floats(8, 16)).work()
    assert rows.bytes == 2 * 4 * (2 * 16)
    looked_up = count(lambda t, i: t[i], floats(1000, 16), f32((4,), np.int32)).work("indexing")
    assert looked_up.bytes < 4 * 1000


def test_kinds_of_index_dims_are_counted_apart() -> None:
    found = count(lambda x: (x.sum(), jnp.sin(x)), floats(8))
    total = found.work()
    assert found.work(split="map").flops == 10 * 8
    assert found.work(split="reduce").flops == 8
    assert found.work(split="any") == found.work(split="map") + found.work(split="reduce") == total


# Loops


@pytest.mark.parametrize("length", [1, 7])
def test_a_scan_counts_its_body_as_often_as_it_runs(length: int) -> None:
    def f(w: Any, xs: Any) -> Any:
        return lax.scan(lambda h, x: (jnp.tanh(h @ w), x * h), jnp.zeros(16), xs)

    found = count(f, floats(16, 16), floats(length, 16))
    inside = found.work(looped=True)
    assert inside.operations == 3
    assert inside.flops == length * (2 * 16 * 16 + 10 * 16 + 16)
    assert inside.bytes == length * 4 * ((16 * 16 + 16 + 16) + 2 * 16 + 3 * 16)


def test_scans_multiply_whiles_count_once_and_branches_share_one_run() -> None:
    def f(x: Any, n: Any) -> Any:
        def inner(c: Any, _: Any) -> Any:
            return c + 1, None

        def outer(c: Any, _: Any) -> Any:
            return lax.scan(inner, c, length=3)[0], None

        x = lax.scan(outer, x, length=5)[0]
        x = lax.while_loop(lambda c: c[0] < 9, lambda c: jnp.sin(c), x)
        return lax.cond(n > 0, lambda c: c * c, lambda c: c - 1, x)

    found = count(f, floats(100), f32((), np.int32))
    per_kernel = {
        kernel: sum(c.work.flops for c in found.counted if c.operation.kernel == kernel)
        for kernel in ("add", "sin", "mul", "sub")
    }
    assert per_kernel == {"add": 3 * 5 * 100, "sin": 10 * 100, "mul": 50, "sub": 50}
    assert {c.operation.kernel for c in found.counted if c.looped} == {"add"}


# What has no template


def mystery(n: int) -> BlockGraph:
    """x + x, then a kernel that nobody knows, on n floats."""
    values = (TensorType((n,), "float32"),) * 3
    at = Source("model.py", 3, 1)
    operations = (
        Operation("add", (0, 0), (1,), source=Source("model.py", 2, 1)),
        Operation("mystery", (1,), (2,), source=at),
        Operation("mystery", (1,), (3,), source=at),
    )
    return BlockGraph("mystery", (*values, values[0]), operations, (0,), (2, 3))


def test_an_opaque_operation_lowers_the_share() -> None:
    found = census(mystery(100))
    # An opaque operation counts one operation per element that it reads or writes.
    assert found.work("opaque").flops == 2 * 200
    assert found.flops_share == pytest.approx(100 / (100 + 400))
    assert found.bytes_share == pytest.approx(1200 / (1200 + 1600))
    (merged,) = found.whole
    assert (merged.operation.kernel, merged.reason) == ("mystery", "no template")
    assert (merged.work.operations, merged.operation.source.line) == (2, 3)


def test_effects_and_whole_dims_say_so() -> None:
    def f(x: Any) -> Any:
        jax.debug.print("{}", x)
        return jnp.sort(x)

    reasons = {c.operation.kernel: c.reason for c in count(f, floats(64)).whole}
    assert reasons["debug_print"] == "has effects"
    assert reasons["sort"] == "index dim i is a whole dim"
    keys = count(lambda k: k[:4], jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 8)))
    assert not keys.whole, "random keys are cut as other arrays are"


# Against XLA


def test_products_and_convolutions_count_as_xla_counts_them() -> None:
    def f(images: Any, kernel: Any, w: Any) -> Any:
        x = lax.conv_general_dilated(
            images, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.einsum("nhwc,cd->nd", x, w)

    args = floats(4, 17, 17, 3), floats(3, 3, 3, 8), floats(8, 5)
    cost = jax.jit(f).lower(*args).cost_analysis()
    assert count(f, *args).work("contraction").flops == pytest.approx(cost["flops"], rel=0.02)


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gpt2", "moe", "vit"))]
)
def test_a_train_step_counts_as_xla_counts_it(name: str) -> None:
    """But for divisions, four operations here, and transcendental functions, ten, there apart."""
    fn, args = abstract(name, "example")
    cost = jax.jit(fn).lower(*args).cost_analysis()
    assert count(fn, *args).work().flops == pytest.approx(
        cost["flops"] + 10 * cost["transcendentals"], rel=0.05
    )


# Legality, by brute force


def splits(signature: OperationSignature) -> set[str]:
    """Roles of index dims that fall into equal parts whose images are equal blocks of outputs."""
    found: set[str] = set()
    for d, dim in enumerate(signature.index):
        for parts in (m for m in range(2, dim.size + 1) if dim.size % m == 0):
            whole = ZRange.from_shape(signature.extents)
            boxes = list(whole.split(d, dim.size // parts))
            assert len(boxes) == parts
            if dim.role in ("reduce", "join"):
                fits = all(len({p.image(b) for b in boxes}) == 1 for p in signature.outputs)
            else:
                fits = dim.role in ("map", "scan") and all(
                    any(
                        [p.image(b) for b in boxes] == list(tensor.split(k, n // parts))
                        for k, n in enumerate(tensor.shape)
                        if n % parts == 0
                    )
                    for p, tensor in zip(
                        signature.outputs,
                        [ZRange.from_shape(t.shape) for t in signature.output_types],
                        strict=True,
                    )
                )
            if fits:
                found.add(dim.role)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convnet", "sorting"])
def test_what_can_be_split_is_what_brute_force_splits(name: str) -> None:
    checked = set()
    for op, values in walk(te.trace(*flat(abstract(name, "example"))).graph):
        types = [values[v] for v in op.inputs], [values[v] for v in op.outputs]
        if op.regions or not all(t.size for t in itertools.chain(*types)):
            continue
        signature = registry.signature(op.kernel, op.params, *types)
        if signature not in checked:
            assert set(legal_roles(signature)[0]) == splits(signature), op
        checked.add(signature)
    assert len(checked) > 50


def walk(graph: BlockGraph) -> Any:
    for op in graph.operations:
        yield op, graph.values
        for region in op.regions:
            yield from walk(region)


# The programs of models/


def abstract(name: str, which: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A function of a program and shapes for its arguments; nothing is computed."""
    module = importlib.import_module(f"models.{name}")
    if which == "forward":
        return module.forward, jax.eval_shape(module.forward_args)
    made: list[Any] = []

    def arguments() -> Any:
        fn, args = module.example()
        made.append(fn)
        return args

    args = jax.eval_shape(arguments)
    return made[0], args


def flat(entry: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, ...]:
    return entry[0], *entry[1]


#: Programs whose kernels others have too.
MORE = {"graph_network", "llama", "lora", "nnx_gpt2", "resnet", "state_space"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.long if n in MORE else ()) for n in models.PROGRAMS]
)
def test_nearly_all_work_of_every_program_can_be_split(name: str) -> None:
    found = count(*flat(abstract(name, "example")))
    assert found.work().operations > 10
    assert found.flops_share >= 0.99, found.whole[:3]
    # A sort along its only dim is one device's, and goes through memory again and again.
    unlike = [c for c in found.counted if c.operation.kernel != "sort"]
    whole = sum(c.work.bytes for c in unlike if not c.split)
    assert whole <= 0.01 * sum(c.work.bytes for c in unlike), found.whole[:3]


# The command


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as exit_:
        main(["census", *arguments])
    out, err = capsys.readouterr()
    return int(exit_.value.code or 0), out, err


@pytest.fixture
def graph(tmp_path: Path) -> str:
    path = tmp_path / "mystery.json"
    te.save(mystery(100), path)
    return str(path)


def test_the_command_prints_roles_totals_and_what_has_no_split(
    graph: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, graph)
    lines = [line.split() for line in out.splitlines()]
    assert code == 0
    assert ["opaque", "2", "80.00", "%", "0.00", "%", "57.14", "%", "0.00", "%"] in lines
    assert ["total", "3", "100.00", "%", "20.00", "%", "100.00", "%", "42.86", "%"] in lines
    assert "mystery 2 80.00 % 57.14 % no template model.py:3:1".split() in lines


def test_the_command_takes_graphs_and_programs_and_goes_on_after_a_fault(
    graph: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "double.py"
    program.write_text(
        "import jax.numpy as jnp\n"
        "def twice(x):\n    return 2 * x\n"
        "def twice_args():\n    return jnp.ones(8)\n"
    )
    code, out, err = run(capsys, graph, "missing.json", f"{program}:twice")
    assert code == 1
    assert "missing.json" in err and "Traceback" not in err
    table = out.split("\n\n")[-1].splitlines()
    assert table[1].split() == "mystery 3 20.00 % 42.86 %".split()
    assert table[2].split() == "double-twice 1 100.00 % 100.00 %".split()


def test_a_share_is_never_rounded_up_to_the_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "large.py"
    program.write_text(
        "import jax, jax.numpy as jnp\n"
        "def large(x, n):\n    return x + 1, n + 1\n"
        "def large_args():\n    return jax.ShapeDtypeStruct((10**6,), jnp.float32), jnp.ones(())\n"
    )
    _, out, _ = run(capsys, f"{program}:large")
    assert "total 2 100.00 % 99.99 % 100.00 % 99.99 %".split() in [
        s.split() for s in out.splitlines()
    ]


def test_json_has_the_same_numbers(graph: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--json", graph)
    data = json.loads(out)
    assert code == 0
    assert (data["name"], data["operations"], data["flops"]) == ("mystery", 3, 500)
    assert data["flops_share"] == pytest.approx(0.2)
    assert data["roles"]["opaque"]["flops_share"] == 0
    assert data["dims"]["map"]["bytes_share"] == pytest.approx(1200 / 2800)
    assert data["no_split"][0]["source"] == "model.py:3:1"


def test_without_graphs_the_command_says_how_to_use_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = run(capsys)
    assert (code, err) == (0, "") and out.startswith("Usage: tapestry-egg census")


# Every primitive of JAX is understood, or listed with the reason why not.


#: Tracing leaves nothing of these where they do nothing: placements, and solvers' own functions.
DISSOLVED = {"device_put", "custom_linear_solve", "reshard", "mesh_cast"}
#: Functions of newer JAX that are made of others, and traced as these.
MADE_OF_OTHERS = {"one_minus_square", "polynomial"}

#: What real programs are made of: transformers, convolutional networks, mixtures of experts, with
#: their gradients and optimizers, in Flax, Equinox and plain JAX.
IN_PROGRAMS = """
    mul add broadcast_in_dim div reshape reduce_sum dot_general transpose integer_pow select_n jit
    add_any sub eq sqrt max convert_element_type neg square lt iota rsqrt gather reduce_max
    stop_gradient exp conv_general_dilated ge psum tanh scatter-add squeeze sin and gt random_bits
    shift_right_logical or bitcast_convert_type custom_jvp_call ragged_dot_general slice
    random_fold_in cos log pow rev cumsum logistic sort scan remat2 is_finite sign abs
    reduce_window_max select_and_scatter_add top_k argmax scatter reduce_precision custom_vjp_call
    while cond debug_print fft cholesky
""".split()


def understood() -> set[str]:
    return set(registry.templates()) | set(INLINED) | set(REGIONS) | DISSOLVED | MADE_OF_OTHERS


def test_what_real_programs_are_made_of_is_understood() -> None:
    assert set(IN_PROGRAMS) - understood() == {"debug_print"}


def test_every_public_primitive_has_a_template_or_a_reason() -> None:
    public = {getattr(primitives, name).name for name in dir(primitives) if name.endswith("_p")}
    assert len(public) > 150
    assert public - understood() - set(opaque_primitives()) == set()


def test_no_primitive_is_both_and_every_reason_is_a_sentence() -> None:
    assert set(opaque_primitives()) & understood() == set()
    assert all(each.reason.endswith(".") for each in opaque_primitives().values())


@pytest.mark.parametrize("name", sorted(MADE_OF_OTHERS))
def test_what_is_made_of_others_is_traced_as_these(name: str) -> None:
    function = getattr(lax, name, None)
    if function is None:
        pytest.skip(f"this JAX has no {name}")
    rest = ((2.0, -1.0, 0.5),) if name == "polynomial" else ()
    program = trace(lambda x: function(x, *rest), jnp.arange(8.0))
    assert {op.kernel for op in program.graph.operations} <= {"add", "sub", "mul"}
    x = np.linspace(-2.0, 2.0, 8, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(program)(x), jax.jit(function)(x, *rest))
