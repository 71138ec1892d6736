"""Tracing and re-emitting: the emitted program must be the traced one, bit for bit."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.shard_alike import shard_alike

from tapestry_egg.errors import GraphError, TraceError, UnplannedError
from tapestry_egg.files.files import load, save
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.tracing import codec
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.plain import check_plain, handles_in
from tapestry_egg.tracing.spelled import Spelled
from tapestry_egg.tracing.trace import Program, trace
from tests.graph.traced_programs import (
    CASES,
    SLOW,
    Array,
    Case,
    Pair,
    case,
    mlp_params,
    mlp_step,
    normal,
)

#: Compiled with little optimisation: every program runs once.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}

NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
#: What compiles for longest.
DEAR = {"dropout", "remat", "mlp", "scan-grad"}


# ---- comparing ---------------------------------------------------------------------------------


def bits(x: Any) -> tuple[Any, ...]:
    weak = bool(getattr(x, "weak_type", False))
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return str(x.dtype), x.shape, weak, np.asarray(jax.random.key_data(x)).tobytes()
    return str(x.dtype), x.shape, weak, np.asarray(x).tobytes()


def assert_same(expected: Any, given: Any) -> None:
    assert jax.tree.structure(expected) == jax.tree.structure(given)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(given), strict=True):
        assert bits(a) == bits(b)


def run(program: Program, c: Case) -> Any:
    flat = program.flatten(*c.args, **c.kwargs)
    outputs = jax.jit(emit(program), keep_unused=True, compiler_options=QUICK)(*flat)
    return program.unflatten(outputs, jax.tree.structure((c.args, c.kwargs)))


def operations(graph: BlockGraph) -> Iterator[Operation]:
    for op in graph.operations:
        yield op
        for region in op.regions:
            yield from operations(region)


@functools.cache
def traced(name: str) -> tuple[Case, Program]:
    c = CASES[name]()
    return c, trace(c.fn, *c.args, **c.options, **c.kwargs)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n in (*SLOW, *DEAR) else ()) for n in CASES]
)
def test_emitted_program_is_the_traced_one(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, program = traced(name)
    verify_graph(program.graph)
    expected = jax.jit(c.fn, compiler_options=QUICK)(*c.args, **c.kwargs)
    assert_same(expected, run(program, c))

    save(program, tmp_path / "graph.json.gz")
    loaded = load(tmp_path / "graph.json.gz")
    assert isinstance(loaded, Program)
    # The same text of the lowered program gives the same bits, without compiling once more.
    flat = loaded.flatten(*c.args, **c.kwargs)
    once = jax.jit(emit(program)).lower(*flat).as_text()
    monkeypatch.setattr(codec, "_PRIMITIVES", {})  # as in a process that has traced nothing
    again = jax.jit(emit(loaded)).lower(*flat).as_text()
    assert again == once
    outputs = jax.tree.leaves(expected)
    rebuilt = loaded.unflatten(outputs, jax.tree.structure((c.args, c.kwargs)))
    assert jax.tree.structure(rebuilt) == jax.tree.structure(expected) or name == "nnx"


@pytest.mark.parametrize("name", NAMES)
def test_structure(name: str) -> None:
    c, program = traced(name)
    graph = program.graph
    flat, _ = jax.tree.flatten((c.args, c.kwargs))
    assert len(graph.inputs) == len(flat) == len(graph.donated) == len(set(graph.input_names))
    for value, leaf in zip(graph.inputs, flat, strict=True):
        aval, type_ = jax.typeof(leaf), graph.values[value]
        assert (type_.shape, type_.dtype) == (aval.shape, str(aval.dtype))
        assert type_.weak == aval.weak_type
    called = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "remat2"}
    for op in operations(graph):
        assert op.kernel not in called
        assert bool(op.regions) == (op.kernel in ("scan", "while", "cond"))
        check_plain(dict(op.params), "params")
        again = codec.encode_params(
            codec.decode_params(op.params, kernel=op.kernel), kernel=op.kernel
        )
        assert again == op.params
    check_live(graph)


def check_live(graph: BlockGraph) -> None:
    needed = set(graph.outputs)
    for op in reversed(graph.operations):
        assert op.effectful or needed & set(op.outputs), f"dead {op.kernel}"
        needed |= set(op.inputs)
        for region in op.regions:
            check_live(region)
    assert set(graph.constants) <= needed
    used = {*graph.inputs, *graph.constants, *(v for op in graph.operations for v in op.outputs)}
    assert used == set(range(len(graph.values)))


# ---- what a graph says -------------------------------------------------------------------------


def test_names_donation_and_sources() -> None:
    _, program = traced("gpt")
    graph = program.graph
    assert graph.name == "gpt_step"
    assert "[0]['layers'][0]['qkv']" in graph.input_names
    assert graph.output_names[-1] == "[2]"
    names = dict(zip(graph.input_names, graph.donated, strict=True))
    assert names["[0]['embed']"] and not names["[2]"]
    einsum = next(op for op in graph.operations if "jnp.einsum" in op.source.text)
    assert einsum.source.file.endswith("traced_programs.py")
    assert einsum.source.function == "gpt_loss"
    assert any(op.scope.startswith("transpose(jvp())") for op in graph.operations)
    assert any("jit(gelu)" in op.scope or "jit(_where)" in op.scope for op in graph.operations)


def test_library_functions_are_placed_at_their_caller() -> None:
    def first(x: Array) -> Array:
        return jnp.where(x > 0, x, 0.0)

    def second(x: Array) -> Array:
        return jnp.where(x > 0, x, 0.0)  # JAX takes the inner trace from its cache

    for fn in (first, second):
        ops = trace(fn, normal(3)).graph.operations
        assert {op.source.function.rpartition(".")[2] for op in ops} == {fn.__name__}


def test_remat_regions_are_numbered_and_fenced() -> None:
    c, program = traced("remat")
    numbers = {op.remat for op in program.graph.operations} - {None}
    assert len(numbers) == 3  # two blocks, and what is left of the nested regions
    emitted = jax.jit(emit(program)).lower(*program.flatten(*c.args)).as_text()
    barriers = [sorted(fenced_types(x)) for x in (jax.jit(c.fn).lower(*c.args).as_text(), emitted)]
    assert barriers[0] == barriers[1] and len(barriers[0]) == len(numbers)
    # Without prevent_cse JAX puts no barrier, and a forward pass alone recomputes nothing.
    _, in_loop = traced("remat-scan")
    assert all(op.remat is None for op in operations(in_loop.graph))
    forward = trace(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), normal(3))
    assert all(op.remat is None for op in forward.graph.operations)


def fenced_types(text: str) -> Iterator[list[str]]:
    """The types that each barrier of a lowered program fences."""
    for line in text.splitlines():
        if "stablehlo.optimization_barrier" in line:
            yield sorted(line.rpartition(" : ")[2].split(", "))


def test_effects_stay_in_order(capfd: Any) -> None:
    c, program = traced("printing")
    assert [op.kernel for op in operations(program.graph) if op.effectful].count("debug_print") == 2
    jax.block_until_ready(jax.jit(emit(program))(*c.args))
    jax.effects_barrier()
    lines = capfd.readouterr().out.splitlines()
    assert len(lines) == 4 and lines[-1].startswith("c ")


def test_handles_run_here_but_cannot_be_saved(tmp_path: Any) -> None:
    def fn(x: Array) -> Any:
        y = jax.pure_callback(lambda v: np.asarray(v) * 2, jax.ShapeDtypeStruct((3,), "float32"), x)
        mesh = jax.make_mesh((1,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec()
        return y, jax.shard_map(
            lambda v: lax.psum(v, "d"), mesh=mesh, in_specs=spec, out_specs=spec
        )(x)

    c = case(fn, normal(3))
    program = trace(fn, *c.args)
    kernels = {op.kernel for op in program.graph.operations}
    assert "pure_callback" in kernels and "shard_map" not in kernels  # traced over whole arrays
    assert_same(jax.jit(fn)(*c.args), run(program, c))
    with pytest.raises(GraphError, match=r"pure_callback.*test_trace\.py:") as e:
        save(program, tmp_path / "graph.json")
    assert "callback" in e.value.hint and not list(tmp_path.iterdir())


@pytest.mark.slow
def test_explicit_mesh_is_stripped() -> None:
    count = 2 if len(jax.devices()) > 1 else 1
    mesh = jax.make_mesh((count,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    spec = jax.sharding.PartitionSpec

    def loss(x: Array, w: Array) -> Array:
        y = jnp.einsum("bk,kn->bn", x, w, out_sharding=spec("d", None))
        y = jax.sharding.reshard(jnp.tanh(y), spec(None, "d")) + jax.nn.relu(y).mean()
        y = jnp.broadcast_to(y, (2, *y.shape)).astype(jnp.bfloat16)
        rows, _ = lax.scan(lambda c, v: (c + v, v), jnp.zeros_like(y[:, 0]), y.swapaxes(0, 1))
        return (rows + jnp.arange(4)).sum().astype(jnp.float32)

    fn = jax.value_and_grad(loss)
    with jax.set_mesh(mesh):
        x = jax.device_put(normal(4, 4), jax.sharding.NamedSharding(mesh, spec("d")))
        w = jax.device_put(normal(4, 4), jax.sharding.NamedSharding(mesh, spec()))
        expected = jax.jit(fn)(x, w)
        program = trace(fn, x, w)
    assert not {"reshard", "mesh_cast"} & {op.kernel for op in operations(program.graph)}
    assert not any(handles_in(op.params) for op in operations(program.graph))
    given = run(program, case(fn, normal(4, 4), normal(4, 4)))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-2), expected, given))


def test_placement_is_dropped_but_offloading_kept() -> None:
    device = jax.devices()[0]

    def fn(x: Array) -> Array:
        x = lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(device))
        return jax.device_put(x, device) + 1

    assert [op.kernel for op in trace(fn, normal(3)).graph.operations] == ["add"]


def test_what_is_computed_for_nothing_is_told() -> None:
    def forgets(state: dict[str, Array], x: Array) -> Array:
        grads = jax.grad(lambda s: jnp.tanh(x @ s["w"]).sum() + s["b"].sum())(state)
        jax.tree.map(lambda s, g: jnp.sin(s - g) * jnp.cos(s) + jnp.exp(g), state, grads)
        return x + 1

    def returns(state: dict[str, Array], x: Array) -> dict[str, Array]:
        return jax.tree.map(lambda s: s - x.sum(), state)

    state = {"b": normal(3), "w": normal(4, 3)}
    with pytest.warns(UserWarning) as told:
        trace(forgets, state, normal(5, 4), donate_argnums=0)
    dead, wasted = (str(w.message) for w in told)
    assert "operations were removed" in dead and dead.startswith("forgets: ")
    assert "2 of 2 donated arrays, the first of them [0]['b'] f32[3]" in wasted
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(returns, state, normal(5, 4), donate_argnums=0)
        trace(lambda s, x: x + 1, state, normal(5, 4))


@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (lambda x: jax.device_put(x, jax.memory.Space.Host), "no plan keeps host memory"),
        (lambda x: jax.freeze(jax.new_ref(x)), "no plan keeps new_ref"),
        (lambda x: shard_alike(x, x * 2), "no plan keeps shard_alike"),
    ],
)
def test_what_no_plan_keeps_is_refused(fn: Any, says: str) -> None:
    with pytest.raises(UnplannedError, match=says):
        trace(fn, normal(3))


def test_abstract_and_static_arguments() -> None:
    def fn(x: Array, n: int, y: Array, *, mode: str = "a", flip: bool = False) -> Array:
        return (x * n + y) if mode == "b" and flip else x - y

    x = jax.ShapeDtypeStruct((3,), jnp.float32)
    options = {"static_argnums": 1, "static_argnames": ("mode", "flip"), "donate_argnums": 2}
    program = trace(fn, x, 4, x, mode="b", flip=True, name="scaled", **options)
    assert program.graph.name == "scaled"
    assert program.graph.input_names == ("[0]", "[2]")
    assert program.graph.donated == (False, True)
    a, b = normal(3), normal(3, seed=1)
    expected = np.asarray(a * 4 + b)
    assert np.allclose(program(a, 4, b, mode="b", flip=True), expected)
    with pytest.raises(TraceError, match="static argument 1 is 5"):
        program(a, 5, b, mode="b", flip=True)
    again = trace(jax.jit(fn, **options), x, 4, x, mode="b", flip=True)
    assert again.graph.name == "fn"
    assert (again.in_tree, again.static) == (program.in_tree, program.static)
    assert again.graph.operations == program.graph.operations
    assert again.graph.donated == program.graph.donated


def test_errors_name_the_argument() -> None:
    with pytest.raises(TraceError, match=r"argument \[1\]\['b'\]\[0\]: str 'text'"):
        trace(lambda x, y: x, normal(2), {"a": normal(1), "b": ["text"]})
    with pytest.raises(TraceError, match=r"argument \['k'\]"):
        trace(lambda x, *, k: x, normal(2), k=object())
    with pytest.raises(TraceError, match=r"argument \[0\]"):
        trace(lambda x: x, 2**40)
    with pytest.raises(ZeroDivisionError):
        trace(lambda x: x / (1 // 0), normal(2))  # the function's own fault
    with pytest.raises(TypeError, match="boolean"):
        trace(lambda x: x if x > 0 else -x, 1.0)
    with pytest.raises(TraceError, match="mutable reference"):
        trace(lambda r: r[...] + 1, jax.new_ref(normal(2)))
    with pytest.raises(TraceError, match=r"closes over"):
        jax.jit(lambda y: trace(lambda x: x + y, normal(2)) and y)(1.0)


def test_calls_of_another_structure_are_refused() -> None:
    program = trace(mlp_step, mlp_params(), normal(5, 8), normal(5, 4))
    bad = mlp_params()
    bad["w"].append(normal(1))
    with pytest.raises(TraceError, match=r"at \[0\]\[0\]\['w'\]"):
        program(bad, normal(5, 8), normal(5, 4))
    with pytest.raises(GraphError, match=r"\[1\] is float32\[6, 8\], the graph takes float32"):
        program(mlp_params(), normal(6, 8), normal(5, 4))


def test_loaded_namedtuples_come_back(tmp_path: Any) -> None:
    c, program = traced("structures")
    save(program, tmp_path / "p.json")
    loaded = load(tmp_path / "p.json")
    assert isinstance(loaded, Program)
    result = loaded(*c.args, **c.kwargs)
    assert type(result[0]) is Pair and result[0].right[0][1] is None
    unknown = Program(loaded.graph, loaded.in_tree, rename(loaded.out_tree))
    assert type(unknown(*c.args, **c.kwargs)[0]).__name__ == "Other"


def rename(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {k: "gone:Other" if k == "namedtuple" else rename(v) for k, v in tree.items()}
    return [rename(v) for v in tree] if isinstance(tree, list) else tree


# ---- parameters --------------------------------------------------------------------------------

PARAMETERS: dict[str, Any] = {
    "nested": ((1, (2, ())), [3, (4,)], {"a": 1, "b": (None,)}, {1: 2}, frozenset(("x", "y"))),
    "floats": (1.5, float("inf"), -0.0, 2**70, -(2**63), True, "text", 1 + 2j),
    "dtypes": (jnp.dtype("bfloat16"), np.dtype("int8"), jax.random.key(0).dtype, jnp.dtype(bool)),
    "scalar_type": np.float32,
    "enums": (lax.GatherScatterMode.CLIP, lax.Precision.HIGHEST, lax.RandomAlgorithm.RNG_PHILOX),
    "more_enums": (lax.AccuracyMode.DEFAULT, lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
    "gather": lax.GatherDimensionNumbers((0,), (1,), (1,)),
    "scatter": lax.ScatterDimensionNumbers((0,), (1,), (1,)),
    "conv": lax.ConvDimensionNumbers((0, 1), (0, 1), (1, 0)),
    "ragged": lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,)),
    "algorithm": lax.DotAlgorithm(np.float32, np.float32, np.float32),
    "array": np.arange(6, dtype=">i4").reshape(2, 3),
    "primitive": lax.ge_p,
    "tree": jax.tree.structure(({"a": 1, "b": [2, None]}, (3,))),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_come_back(name: str) -> None:
    plain = codec.encode_params({name: PARAMETERS[name]})
    check_plain(plain, "$")
    back = codec.decode_params(plain)[name]
    if isinstance(PARAMETERS[name], np.ndarray):
        assert np.array_equal(back, PARAMETERS[name]) and back.dtype == np.int32
    else:
        assert back == PARAMETERS[name] and type(back) is type(PARAMETERS[name])
    assert codec.encode_params({name: back}) == plain


def test_dims_that_are_told_by_ranges_are_tuples() -> None:
    def rows(dims: Any) -> Program:
        def f(x: Array, at: Array) -> Array:
            numbers = lax.ScatterDimensionNumbers(dims(1, 2), dims(0, 1), dims(0, 1))
            return lax.scatter_add(x, at, jnp.ones((2, 4)), numbers)

        return trace(f, jnp.zeros((8, 4)), jnp.zeros((2, 1), jnp.int32))

    told = rows(range).graph
    assert told == rows(lambda begin, end: tuple(range(begin, end))).graph
    op = next(op for op in told.operations if op.kernel == "scatter-add")
    types = [tuple(told.values[v] for v in vs) for vs in (op.inputs, op.outputs)]
    assert registry.signature_of(op, *types).index


def test_parameters_refuse_what_is_not_listed() -> None:
    for bad in (
        {"$class": "Popen", "args": ["true"]},
        {"$class": "GatherDimensionNumbers", "nothing": 1},
        {"$enum": ["GatherScatterMode", "__class__"]},
        {"$enum": ["os", "system"]},
        {"$dtype": "object"},
        {"$primitive": "no_such_primitive"},
        {"$primitive": ["add"]},
        {"$handle": -1},
        {"$eval": "1"},
        {"$array": {"dtype": "float32", "shape": [2], "data": "AAAA"}},
        {"$scalar": {"dtype": "finfo", "shape": [], "data": ""}},
    ):
        with pytest.raises(GraphError):
            codec.decode_params({"p": bad})
    tolerance = codec.encode_params({"accuracy": lax.Tolerance(1e-3, 0.0, 0)})
    assert codec.decode_params(tolerance)["accuracy"].atol == 1e-3
    thing = object()
    assert codec.encode_params({"a": thing}) == codec.encode_params({"a": thing})
    assert codec.decode_params(codec.encode_params({"a": thing}))["a"] is thing


@pytest.mark.parametrize("name", ["threefry2x32", "rbg", "unsafe_rbg", "philox4x32"])
def test_keys_of_every_kind_come_back(name: str) -> None:
    dtype = jax.random.key(0, impl=name).dtype
    assert decode_dtype(str(dtype)) == dtype
    assert codec.decode_params(codec.encode_params({"impl": dtype._impl}))["impl"] is dtype._impl


def test_emit_checks_declared_types() -> None:
    import dataclasses

    graph = trace(lambda x: jnp.sin(x).sum(), normal(3)).graph
    values = tuple(dataclasses.replace(t, shape=(2,)) if t.shape == () else t for t in graph.values)
    with pytest.raises(GraphError, match=r"operation 1 \(reduce_sum.*JAX gives"):
        emit(dataclasses.replace(graph, values=values))(normal(3))


# ---- operations that are spelled ---------------------------------------------------------------

SPELLED: dict[str, tuple[Callable[[Spelled], int], Callable[..., Any]]] = {
    "cast": (lambda s: s.cast(0, "bfloat16"), lambda x: x.astype(jnp.bfloat16)),
    "reshaped": (lambda s: s.reshaped(0, (6, 4)), lambda x: x.reshape(6, 4)),
    "transposed": (lambda s: s.transposed(0, (2, 0, 1)), lambda x: x.transpose(2, 0, 1)),
    "spread": (
        lambda s: s.spread(0, (2, 5, 3, 4), (0, 2, 3)),
        lambda x: lax.broadcast_in_dim(x, (2, 5, 3, 4), (0, 2, 3)),
    ),
    "sliced": (
        lambda s: s.sliced(0, (0, 1, 0), (2, 3, 4), (1, 1, 3)),
        lambda x: lax.slice(x, (0, 1, 0), (2, 3, 4), (1, 1, 3)),
    ),
    "padded": (
        lambda s: s.padded(0, s.constant(np.zeros((), "float32"), "float32"), PADDING),
        lambda x: lax.pad(x, np.float32(0), PADDING),
    ),
    "joined": (lambda s: s.joined((0, 0), 1), lambda x: jnp.concatenate([x, x], 1)),
    "counted": (lambda s: s.counted(7), lambda x: lax.iota(np.int32, 7)),
}
PADDING = [(0, 1, 0), (2, -1, 0), (1, 1, 2)]


@pytest.mark.parametrize("name", SPELLED)
def test_operations_are_spelled_as_jax_spells_them(name: str) -> None:
    spell, function = SPELLED[name]
    traced = trace(function, jax.ShapeDtypeStruct((2, 3, 4), "float32")).graph
    spelled = Spelled([TensorType((2, 3, 4), "float32")])
    made = spell(spelled)
    assert spell(spelled) == made  # equal ones once
    (own,), (expected,) = spelled.operations, traced.operations
    assert (own.kernel, own.params) == (expected.kernel, dict(expected.params))
    assert spelled.values[made] == traced.values[expected.outputs[0]]
