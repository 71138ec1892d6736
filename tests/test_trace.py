"""Tracing and re-emitting: the emitted program must be the traced one, bit for bit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tapestry_egg import codec
from tapestry_egg.arrays import decode_dtype
from tapestry_egg.blockgraph import BlockGraph, Operation, verify_graph
from tapestry_egg.errors import GraphError, TraceError
from tapestry_egg.files import load, save
from tapestry_egg.runtime.emit import emit
from tapestry_egg.trace import Program, trace

Array = jax.Array


def normal(*shape: int, seed: int = 0) -> Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


# ---- programs ----------------------------------------------------------------------------------


def mlp_params() -> dict[str, Any]:
    return {"w": [normal(8, 16), normal(16, 4, seed=1)], "b": [jnp.zeros(16), jnp.zeros(4)]}


def mlp_loss(params: dict[str, Any], x: Array, y: Array) -> Array:
    h = jax.nn.gelu(x @ params["w"][0] + params["b"][0])
    return jnp.mean((h @ params["w"][1] + params["b"][1] - y) ** 2)


def mlp_step(params: Any, x: Array, y: Array) -> Any:
    loss, grads = jax.value_and_grad(mlp_loss)(params, x, y)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss


OPTIMIZER = optax.adamw(1e-3, weight_decay=0.1)


def gpt_params() -> dict[str, Any]:
    layer = {"qkv": normal(8, 24) * 0.3, "out": normal(8, 8) * 0.3, "up": normal(8, 16) * 0.3}
    return {
        "embed": normal(11, 8, seed=1),
        "layers": [{**layer, "down": normal(16, 8, seed=2) * 0.3}],
    }


def gpt_loss(params: Any, tokens: Array, key: Array) -> Array:
    x = params["embed"][tokens[:, :-1]]
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    for i, layer in enumerate(params["layers"]):
        h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
        q, k, v = jnp.split(h @ layer["qkv"], 3, -1)
        scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k) / 2.0, -jnp.inf)
        x = x + jax.nn.softmax(scores) @ v @ layer["out"]
        keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.9, x.shape)
        x = x + jnp.where(keep, jax.nn.gelu(x @ layer["up"]) @ layer["down"], 0.0)
    logits = x @ params["embed"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def gpt_step(params: Any, state: Any, tokens: Array, key: Array) -> Any:
    loss, grads = jax.value_and_grad(gpt_loss)(params, tokens, key)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


def scan_grad(w: Array, x: Array) -> Any:
    def loss(w: Array) -> Array:
        def body(h: Array, a: Array) -> tuple[Array, Array]:
            h = jnp.tanh(h @ w + a)
            return h, h.sum()

        last, sums = lax.scan(body, jnp.zeros(4), x, reverse=True, unroll=2)
        return last.sum() + (sums**2).sum()

    return jax.value_and_grad(loss)(w)


def while_and_cond(x: Array) -> Any:
    def body(state: tuple[Array, Array]) -> tuple[Array, Array]:
        i, y = state
        return i + 1, lax.cond(y.sum() > 0, jnp.sin, lambda v: v * 2.0 - i, y)

    steps, y = lax.while_loop(lambda s: (s[0] < 5) & (jnp.abs(s[1]).sum() < 50), body, (0, x))
    return (
        steps,
        lax.switch(steps % 3, [jnp.cos, jnp.exp, lambda v: v], y),
        lax.fori_loop(0, 3, lambda i, v: v + i, 0.5),
    )


@jax.custom_vjp
def clipped(x: Array) -> Array:
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (jnp.clip(g, -0.5, 0.5) * jnp.cos(x),))


@jax.custom_jvp
def soft(x: Array) -> Array:
    return jnp.log1p(jnp.exp(x))


soft.defjvp(lambda p, t: (soft(*p), t[0] * jax.nn.sigmoid(p[0])))


def custom_derivatives(x: Array) -> Any:
    return clipped(x), soft(x), jax.grad(lambda v: (clipped(v) * soft(v)).sum())(x), jax.nn.relu(x)


def remat(w: Array, x: Array) -> Any:
    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("h"))
    def block(w: Array, x: Array) -> Array:
        return jnp.tanh(checkpoint_name(jnp.sin(x @ w), "h") @ w)

    def loss(w: Array) -> Array:
        inner = jax.checkpoint(lambda v: jnp.cos(jax.checkpoint(jnp.sin)(v) @ w))
        return (block(w, block(w, inner(x))) ** 2).sum()

    return jax.value_and_grad(loss)(w)


def remat_scan(ws: Array, x: Array) -> Any:
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None), prevent_cse=False)
    return jax.grad(lambda ws: lax.scan(layer, x, ws)[0].sum())(ws)


def dropout(key: Array, x: Array) -> Any:
    first, second = jax.random.split(key)
    keep = jax.random.bernoulli(first, 0.5, x.shape)
    return (
        jnp.where(keep, x / 0.5, 0),
        second,
        jax.random.key_data(second),
        jax.random.permutation(second, 5),
    )


def zoo(x: Array, i: Array) -> Any:
    spd = x @ x.T + 4 * jnp.eye(x.shape[0])
    return {
        "sort": lax.sort((x, -x), dimension=0, num_keys=2),
        "gather": (x[i], x.at[i].get(mode="fill", fill_value=jnp.nan), jnp.take(x, i, mode="clip")),
        "scatter": (x.at[i].add(1.0, mode="drop"), x.at[i].max(0.5), x.at[i].apply(jnp.sin)),
        "fft": jnp.fft.irfft(jnp.fft.rfft(x)),
        "cumsum": (jnp.cumsum(x, 1), lax.cumlogsumexp(x, 0, reverse=True)),
        "cholesky": jnp.linalg.cholesky(spd),
        "solve": jnp.linalg.solve(spd, x),
        "svd": jnp.linalg.svd(x, compute_uv=False),
        "reduce": lax.reduce(x, 0.0, lambda a, b: a + b * b, (0,)),
        "window": lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME"),
        "any_window": lax.reduce_window(x, 1.0, lambda a, b: a * b + 1.0, (2, 2), (1, 1), "VALID"),
        "pool_grad": jax.grad(
            lambda v: lax.reduce_window(v, -jnp.inf, lax.max, (2, 2), (1, 1), "SAME").sum()
        )(x),
        "top_k": lax.top_k(x, 2),
        "argmax": jnp.argmax(x, 1),
        "pad": jnp.pad(x, ((1, 0), (0, 2)), constant_values=3.0),
        "dynamic": lax.dynamic_update_slice(x, x[:1], (i[0], 0)),
        "pow": (x**3, jnp.abs(x) ** 0.5, lax.exp(x, accuracy=lax.AccuracyMode.HIGHEST)),
        "bf16": (x.astype(jnp.bfloat16) * jnp.bfloat16(1.5)).sum(),
        "precision": lax.dot_general(x, x, (((1,), (1,)), ((), ())), precision="highest"),
        "algorithm": lax.dot(x, x.T, precision=lax.DotAlgorithmPreset.F32_F32_F32),
        "ragged": lax.ragged_dot(x, jnp.ones((2, 8, 3)), jnp.array([1, 3])),
        "split": jnp.split(x, 2, 1),
        "complex": lax.complex(x, x) * (1 + 2j),
        "bits": lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (4,)),
        "where": jnp.where(x > 0, x, jnp.nan),
        "index": jnp.digitize(x[0], jnp.array([-1.0, 0.0, 1.0])),
        "linear": jax.jit(jnp.linalg.inv)(spd),
        "clamp": jnp.clip(x, -0.5, 0.5),
        "round": (jnp.round(x), lax.reduce_precision(x, 5, 10)),
        "barrier": lax.optimization_barrier((x, i))[0],
        "platform": lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
        "map": lax.map(lambda r: r.sum(), x),
        "assoc": lax.associative_scan(jnp.add, x),
        "hist": jnp.histogram(x, bins=4)[0],
    }


def convolutions(x: Array, k: Array) -> Any:
    def loss(k: Array) -> Array:
        y = lax.conv_general_dilated(
            x, k, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return (y**2).sum()

    return jax.value_and_grad(loss)(k)


TABLE = np.arange(12, dtype=np.int32).reshape(3, 4)
KEY = jax.random.key(7, impl="rbg")


def closures(x: Array) -> Any:
    weak = jnp.broadcast_to(2.0, (3,))  # a weakly typed array
    noise = lax.map(lambda i: jax.random.normal(jax.random.fold_in(KEY, i), (3,)), jnp.arange(2))
    return x @ TABLE.astype(np.float32), weak * jnp.ones(3, jnp.bfloat16), weak, noise, TABLE, 3


def weak_types(x: Any, n: Any) -> Any:
    return x + 1, x * jnp.ones(2, jnp.bfloat16), n * 2, jnp.where(x > n, x, n), x, 2.5


def printing(x: Array) -> Any:
    jax.debug.print("x = {x} {}", "s", x=x)

    def body(c: Array, v: Array) -> tuple[Array, None]:
        jax.debug.print("c {}", c, ordered=True)
        return c + v, None

    return lax.scan(body, jnp.float32(0), x)[0]


class Pair(NamedTuple):
    left: Any
    right: Any


def structures(p: Pair, *, scale: Array, extra: Any) -> Any:
    out: dict[Any, Any] = {2: p.left * scale, 1: None}
    return Pair([p.right], (out, extra)), ()


def through(x: Array, y: Array) -> Any:
    unused = jnp.sin(y)  # dead
    _ = lax.scan(lambda c, a: (c + a, jnp.exp(a)), 0.0, unused)
    return y, x, x, jax.jit(lambda a: (a, 1.0))(x)


@dataclass
class Case:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: dict[str, Any]


def case(fn: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Case:
    return Case(fn, args, kwargs, options or {})


def gpt_case() -> Case:
    params = gpt_params()
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 11, (2, 7)))
    args = params, OPTIMIZER.init(params), tokens, jax.random.key(1)
    return case(gpt_step, *args, options={"donate_argnums": (0, 1)})


def nnx_case() -> Case:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.one, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.drop = nnx.Dropout(0.3, rngs=rngs)

        def __call__(self, x: Array) -> Array:
            return self.drop(nnx.relu(self.norm(self.one(x))))

    definition, params, rest = nnx.split(Net(nnx.Rngs(0)), nnx.Param, ...)

    def step(params: Any, rest: Any, x: Array) -> Any:
        def loss(p: Any) -> Any:
            net = nnx.merge(definition, p, rest, copy=True)
            return (net(x) ** 2).mean(), nnx.state(net)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return case(step, params, rest, normal(5, 4))


def equinox_case() -> Case:
    eqx = pytest.importorskip("equinox")
    arrays, static = eqx.partition(eqx.nn.MLP(4, 2, 8, 2, key=jax.random.key(0)), eqx.is_array)

    def step(arrays: Any, x: Array) -> Any:
        return jax.grad(lambda a: jax.vmap(eqx.combine(a, static))(x).sum())(arrays)

    return case(step, arrays, normal(5, 4))


CASES: dict[str, Callable[[], Case]] = {
    "mlp": lambda: case(mlp_step, mlp_params(), normal(5, 8), normal(5, 4)),
    "gpt": gpt_case,
    "scan-grad": lambda: case(scan_grad, normal(4, 4), normal(6, 4)),
    "while-cond": lambda: case(while_and_cond, normal(3)),
    "custom": lambda: case(custom_derivatives, normal(3)),
    "remat": lambda: case(remat, normal(4, 4), normal(3, 4)),
    "remat-scan": lambda: case(remat_scan, normal(3, 4, 4), normal(2, 4)),
    "dropout": lambda: case(dropout, jax.random.key(5), normal(3, 4)),
    "zoo": lambda: case(zoo, normal(4, 8), jnp.array([2, 0])),
    "conv": lambda: case(convolutions, normal(2, 5, 6, 3), normal(3, 2, 3, 4)),
    "closures": lambda: case(closures, normal(2, 3)),
    "weak": lambda: case(weak_types, 3.5, 2),
    "weak-array": lambda: case(weak_types, jnp.broadcast_to(2.0, (2,)), np.int16(3)),
    "printing": lambda: case(printing, normal(3)),
    "structures": lambda: case(
        structures, Pair(normal(3), normal(2)), scale=np.float32(2), extra=[normal(1), None]
    ),
    "through": lambda: case(through, normal(2), normal(3)),
    "vmap": lambda: case(jax.vmap(lambda v: lax.psum(v, "i"), axis_name="i"), normal(3, 2)),
    "nnx": nnx_case,
    "equinox": equinox_case,
}
#: Importing these libraries takes longer than the rest of the module.
SLOW = ("nnx", "equinox")
NAMES = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]


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
    outputs = jax.jit(emit(program), keep_unused=True)(*flat)
    return program.unflatten(outputs, like=(c.args, c.kwargs))


def operations(graph: BlockGraph) -> Iterator[Operation]:
    for op in graph.operations:
        yield op
        for region in op.regions:
            yield from operations(region)


@functools.cache
def traced(name: str) -> tuple[Case, Program]:
    c = CASES[name]()
    return c, trace(c.fn, *c.args, **c.options, **c.kwargs)


@pytest.mark.parametrize("name", NAMES)
def test_emitted_program_is_the_traced_one(
    name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    c, program = traced(name)
    verify_graph(program.graph)
    expected = jax.jit(c.fn)(*c.args, **c.kwargs)
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
    rebuilt = loaded.unflatten(outputs, like=(c.args, c.kwargs))
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
        codec.check_plain(dict(op.params), "params")
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
    assert einsum.source.file.endswith("test_trace.py")
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
    assert {"pure_callback", "shard_map"} <= {op.kernel for op in program.graph.operations}
    assert_same(jax.jit(fn)(*c.args), run(program, c))
    with pytest.raises(GraphError, match=r"pure_callback.*test_trace\.py:") as e:
        save(program, tmp_path / "graph.json")
    assert "callback" in e.value.hint and not list(tmp_path.iterdir())


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
    assert not any(codec.handles_in(op.params) for op in operations(program.graph))
    given = run(program, case(fn, normal(4, 4), normal(4, 4)))
    assert jax.tree.all(jax.tree.map(lambda a, b: np.allclose(a, b, rtol=1e-2), expected, given))


def test_placement_is_dropped_but_offloading_kept() -> None:
    device = jax.devices()[0]

    def fn(x: Array) -> Array:
        x = lax.with_sharding_constraint(x, jax.sharding.SingleDeviceSharding(device))
        return jax.device_put(x, device) + 1

    assert [op.kernel for op in trace(fn, normal(3)).graph.operations] == ["add"]


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
    codec.check_plain(plain, "$")
    back = codec.decode_params(plain, codec.Handles())[name]
    if isinstance(PARAMETERS[name], np.ndarray):
        assert np.array_equal(back, PARAMETERS[name]) and back.dtype == np.int32
    else:
        assert back == PARAMETERS[name] and type(back) is type(PARAMETERS[name])
    assert codec.encode_params({name: back}) == plain


def test_parameters_refuse_what_is_not_listed() -> None:
    for bad in (
        {"$class": "Popen", "args": ["true"]},
        {"$class": "GatherDimensionNumbers", "nothing": 1},
        {"$enum": ["GatherScatterMode", "__class__"]},
        {"$enum": ["os", "system"]},
        {"$dtype": "object"},
        {"$primitive": "no_such_primitive"},
        {"$primitive": ["add"]},
        {"$handle": 0},
        {"$eval": "1"},
        {"$array": {"dtype": "float32", "shape": [2], "data": "AAAA"}},
        {"$scalar": {"dtype": "finfo", "shape": [], "data": ""}},
    ):
        with pytest.raises(GraphError):
            codec.decode_params({"p": bad}, codec.Handles())
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
