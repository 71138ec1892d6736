"""What a function says beside its numbers is planned as `jax.jit` means it, or the function runs as
it is written and one warning says so. Nothing is dropped."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental.compute_on import compute_on
from jax.experimental.layout import Format, Layout, with_layout_constraint
from jax.experimental.shard_alike import shard_alike
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import UnplannedError
from tapestry_egg.pipeline import Settings

QUICK = Settings(work=0.1, recompute=0, forms=0, merge=False)
X = jnp.arange(128.0).reshape(16, 8) / 64
KEY = jax.random.key(7)
DEVICES = jax.devices()


def mesh(sizes: tuple[int, ...], names: tuple[str, ...], kind: AxisType = AxisType.Auto) -> Mesh:
    devices = np.array(DEVICES[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, names, axis_types=(kind,) * len(sizes))


EIGHT, TWO = mesh((8,), ("x",)), mesh((2,), ("x",))
GRID, TYPED = mesh((4, 2), ("a", "b")), mesh((8,), ("x",), AxisType.Explicit)
Around = Callable[[], contextlib.AbstractContextManager[Any]]


@dataclass(frozen=True)
class Said:
    """A function, its arguments, and the words of `jax.jit` and settings that it is called under.
    `placed` says whether `jax.jit` and a plan put results in the same places."""

    fn: Callable[..., Any]
    arguments: tuple[Any, ...] = (X,)
    words: dict[str, Any] = field(default_factory=dict)
    around: Around = contextlib.nullcontext
    placed: bool = True


def double(x: jax.Array) -> jax.Array:
    return x * 2


def draws(key: jax.Array) -> Any:
    with jax.threefry_partitionable(False):
        keys = jax.random.split(key, 3)
        scanned = lax.scan(lambda c, k: (c, jax.random.normal(k, (4,))), 0.0, keys)[1]
        drawn = jax.vmap(lambda k: jax.random.bits(k, (3,), "uint16"))(keys)
        again = jax.grad(jax.checkpoint(lambda x: (x * jax.random.normal(key, (5,))).sum()))(2.0)
    return scanned, drawn, again, jax.random.normal(key, (5,))


def draws_on_blocks(key: jax.Array, x: jax.Array) -> jax.Array:
    with jax.threefry_partitionable(False):
        block = jax.shard_map(
            lambda b: b + jax.random.normal(key, b.shape),
            mesh=EIGHT,
            in_specs=P("x"),
            out_specs=P("x"),
        )
        return block(x)


def wide(x: jax.Array) -> jax.Array:
    with jax.enable_x64(True):
        return jnp.cumsum(x.astype("float64") / 3)


def asked(sharding: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: lax.with_sharding_constraint(x * 2, sharding)


def nested(**words: Any) -> Callable[[jax.Array], jax.Array]:
    return lambda x: jax.jit(double, **words)(x)


ON_TWO = NamedSharding(TWO, P("x"))
ON_EIGHT = NamedSharding(EIGHT, P("x"))

PLANNED: dict[str, Said] = {
    "random bits under a setting of their own": Said(draws, (KEY,), placed=False),
    "random bits on blocks": Said(draws_on_blocks, (KEY, X), placed=False),
    "random bits under that setting around": Said(
        lambda key: jax.random.normal(key, (9,)),
        (KEY,),
        around=lambda: jax.threefry_partitionable(False),
        placed=False,
    ),
    "64 bits inside": Said(wide, placed=False),
    "no promotion around": Said(
        lambda x: jax.nn.softmax(x @ x.T),
        around=lambda: jax.numpy_dtype_promotion("strict"),
        placed=False,
    ),
    "no broadcasting around": Said(
        lambda x: jax.nn.softmax(x @ x.T),
        around=lambda: jax.numpy_rank_promotion("raise"),
        placed=False,
    ),
    "a constraint on two of eight devices": Said(asked(ON_TWO)),
    "a function inside with results on a mesh": Said(nested(out_shardings=ON_EIGHT)),
    "a function inside with arguments on a mesh": Said(
        nested(in_shardings=ON_TWO, out_shardings=NamedSharding(TWO, P(None, "x")))
    ),
    "types with layouts": Said(
        lambda x: jnp.matmul(x.T, x, out_sharding=P("x")),
        (jax.device_put(X, NamedSharding(TYPED, P("x"))),),
        around=lambda: jax.set_mesh(TYPED),
    ),
    "options of XLA": Said(
        double, words={"compiler_options": {"xla_embed_ir_in_executable": True}}, placed=False
    ),
}


def in_place(x: jax.Array) -> jax.Array:
    ref = jax.new_ref(x)
    ref[3] = jnp.ones(8)
    return jax.freeze(ref)


def computed_on_host(x: jax.Array) -> jax.Array:
    with compute_on("device_host"):
        y = x * 2
    return y + 1


def noted(x: jax.Array) -> jax.Array:
    with set_xla_metadata(a="b"):
        return x * 2


def two_meshes(x: jax.Array) -> jax.Array:
    return asked(NamedSharding(GRID, P("b", "a")))(asked(ON_EIGHT)(x))


def seen(x: jax.Array) -> jax.Array:
    jax.debug.inspect_array_sharding(x, callback=lambda s: None)
    return x * 2


def partial_sums(x: jax.Array) -> jax.Array:
    return jax.reshard(jnp.einsum("ij,kj->ik", x, x, out_sharding=P(unreduced={"x"})), P())


ALONE = SingleDeviceSharding(DEVICES[2])
HOST = NamedSharding(EIGHT, P("x"), memory_kind="pinned_host")

WRITTEN: dict[str, Said] = {
    "a reference": Said(in_place),
    "a reference as an argument": Said(lambda r, x: r[...] + x, (jax.new_ref(X), X)),
    "a token as an argument": Said(lambda t, x: x * 2, (lax.create_token(), X)),
    "layouts alike": Said(
        lambda x: shard_alike(x, jnp.ones_like(x))[1],
        (jax.device_put(X, NamedSharding(GRID, P("a", "b"))),),
    ),
    "constraints on two meshes": Said(two_meshes),
    "results on one device": Said(double, words={"out_shardings": ALONE}),
    "arguments on one device": Said(double, (jax.device_put(X, DEVICES[3]),)),
    "device": Said(double, words={"device": DEVICES[5]}),
    "a default device": Said(double, around=lambda: jax.default_device(DEVICES[4])),
    "a function inside on one device": Said(nested(device=DEVICES[3])),
    "results in host memory": Said(double, words={"out_shardings": HOST}),
    "arguments in host memory": Said(
        lambda x: jax.device_put(x, jax.memory.Space.Device) * 2, (jax.device_put(X, HOST),)
    ),
    "an order of dims in memory": Said(
        double, words={"out_shardings": Format(Layout((1, 0)), ON_EIGHT)}
    ),
    "an order of dims inside": Said(lambda x: with_layout_constraint(x * 2, Layout((1, 0)))),
    "compute units": Said(computed_on_host),
    "notes to XLA": Said(noted),
    "a look at layouts": Said(seen),
    "four bits": Said(lambda x: x + x, (jnp.ones(8, jnp.int4),)),
    "partial sums": Said(
        partial_sums,
        (jax.device_put(X, NamedSharding(TYPED, P(None, "x"))),),
        around=lambda: jax.set_mesh(TYPED),
    ),
}


def outcome(jit: Callable[..., Any], said: Said, calls: int = 2) -> tuple[Any, list[str]]:
    """The result of the last call, and what was warned of in all."""
    with warnings.catch_warnings(record=True) as caught, said.around():
        warnings.simplefilter("always")
        run = jit(said.fn, **said.words)
        for _ in range(calls):
            result = run(*said.arguments)
    return result, [str(w.message) for w in caught if "of te.jit" in str(w.message)]


def same(got: Any, wanted: Any, placed: bool) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert jax.typeof(a).update(sharding=None) == jax.typeof(b).update(sharding=None)
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)
        if placed:
            assert a.sharding == b.sharding and a.format == b.format


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANNED)
def test_it_is_planned_with_the_same_result(kind: str) -> None:
    said = PLANNED[kind]
    got, told = outcome(functools.partial(te.jit, settings=QUICK), said)
    assert not told
    same(got, outcome(jax.jit, said)[0], said.placed)
    with said.around():
        assert te.jit(said.fn, settings=QUICK, **said.words).plan(*said.arguments)


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.filterwarnings("ignore:backend and device argument")
def test_it_runs_as_written_and_one_warning_says_so(kind: str) -> None:
    said = WRITTEN[kind]
    got, (told,) = outcome(te.jit, said, calls=3)
    assert "runs as it is written, not planned" in told
    same(got, outcome(jax.jit, said)[0], True)
    with said.around(), pytest.raises(UnplannedError):
        te.jit(said.fn, **said.words).plan(*said.arguments)


def test_a_reference_that_is_written_stays_written() -> None:
    def add(ref: Any, x: jax.Array) -> jax.Array:
        ref[...] += x
        return ref[...].sum()

    ref = jax.new_ref(jnp.zeros_like(X))
    with pytest.warns(UserWarning, match="as it is written"):
        assert te.jit(add)(ref, X) == X.sum()
    np.testing.assert_array_equal(ref[...], X)


REFUSED: dict[str, Said] = {
    "devices that differ": Said(
        lambda x, y: x + y, (jax.device_put(X, DEVICES[3]), jax.device_put(X, DEVICES[2]))
    ),
    "a constraint elsewhere": Said(asked(ON_TWO), (jax.device_put(X, ON_EIGHT),)),
    "no array": Said(double, ("a string",)),
    "an argument that lies otherwise": Said(
        double, (jax.device_put(X, ON_EIGHT),), {"in_shardings": NamedSharding(EIGHT, P(None, "x"))}
    ),
    "options inside": Said(nested(compiler_options={"xla_embed_ir_in_executable": True})),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_jax_jit_refuses_is_refused_in_its_words(kind: str) -> None:
    errors = []
    for jit in (jax.jit, te.jit):
        with pytest.raises((TypeError, ValueError)) as error:
            outcome(jit, REFUSED[kind])
        errors.append((type(error.value), str(error.value)[:60]))
    assert errors[0] == errors[1]


@pytest.mark.slow
def test_calls_for_other_devices_are_not_served_by_the_plan_for_these() -> None:
    run = te.jit(double, settings=QUICK)
    assert len(run(X).devices()) == 8
    with pytest.warns(UserWarning, match="bound to one device"):
        assert run(jax.device_put(X, DEVICES[3])).devices() == {DEVICES[3]}
    assert run(jax.device_put(X, ON_TWO)).sharding.device_set == set(DEVICES[:2])
    assert len(run(X).devices()) == 8
    named = te.jit(double, mesh=DEVICES, settings=QUICK)
    assert len(named(jax.device_put(X, DEVICES[3])).devices()) == 8


def test_what_computes_nothing_moves_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = te.jit(lambda x, y: (y, x))(X, 1.0)
    assert y is X or y.devices() == X.devices()
    assert x.weak_type


@pytest.mark.parametrize("jit", [jax.jit, te.jit])
def test_a_function_around_a_jitted_one_is_not_that_one(jit: Callable[..., Any]) -> None:
    """`functools.wraps` copies what is noted on a function, also to its gradient."""
    cube = jit(lambda x: x**3)

    @functools.wraps(cube)
    def more(x: jax.Array) -> jax.Array:
        return cube(x) + 1  # type: ignore[no-any-return]

    for fn, wanted in ((jax.grad(cube), 48.0), (more, 65.0)):
        assert te.trace(fn, 4.0)(4.0) == wanted
        assert te.jit(fn, settings=QUICK)(4.0) == wanted


@pytest.mark.slow
def test_what_is_called_in_order_is_called_in_order() -> None:
    calls: list[Any] = []

    def body(carry: jax.Array, i: jax.Array) -> Any:
        io_callback(lambda k: calls.append(int(k)), None, i, ordered=True)
        return carry, i

    def fn(x: jax.Array) -> jax.Array:
        io_callback(lambda: calls.append("first"), None, ordered=True)
        y, _ = lax.scan(body, x, jnp.arange(3))
        jax.debug.callback(lambda: calls.append("last"), ordered=True)
        return y * 2  # type: ignore[no-any-return]

    te.jit(fn, settings=QUICK)(X)
    jax.effects_barrier()
    assert calls == ["first", 0, 1, 2, "last"]


@pytest.mark.slow
def test_what_is_called_on_blocks_of_a_mesh_is_called_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def block(x: jax.Array) -> jax.Array:
        jax.debug.print("block {}", lax.axis_index("x"))
        return jnp.cos(x)

    mapped = jax.shard_map(block, mesh=EIGHT, in_specs=P("x"), out_specs=P("x"))
    got = te.jit(mapped, settings=QUICK)(jnp.arange(16.0))
    jax.effects_barrier()
    np.testing.assert_allclose(got, jnp.cos(jnp.arange(16.0)), rtol=1e-6)
    assert sorted(capsys.readouterr().out.split("\n")) == ["", *(f"block {k}" for k in range(8))]
