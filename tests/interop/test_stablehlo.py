"""StableHLO modules as programs: every operation is seen, and numbers are those of XLA itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import models
import tapestry_egg as te
from tapestry_egg.cli.app import main
from tapestry_egg.errors import TraceError

X = np.linspace(-2.0, 2.0, 24, dtype=np.float32).reshape(4, 6)
Fn = Callable[..., Any]


def through_text(function: Fn, *args: Any) -> te.Program:
    """The program of what JAX lowers a function to."""
    return te.from_stablehlo(jax.jit(function, keep_unused=True).lower(*args).as_text(), "f")


def same(function: Fn, *args: Any, rtol: float = 1e-6) -> te.Program:
    """Hold a program read from StableHLO against XLA's own run of it."""
    program = through_text(function, *args)
    wanted = jax.tree.leaves(jax.jit(function)(*args))
    for got, want in zip(program(*jax.tree.leaves(args)), wanted, strict=True):
        assert got.dtype == want.dtype and got.shape == want.shape
        np.testing.assert_allclose(
            np.asarray(got, np.float64), np.asarray(want, np.float64), rtol=rtol, atol=1e-6
        )
    return program


def sorting(by: str) -> str:
    """A module that sorts two arrays, the elements of which are %a, %b and %c, %d, by one test."""
    return (
        "module { func.func @main(%x: tensor<4xi32>, %y: tensor<4xi32>) -> tensor<4xi32> { "
        '%0:2 = "stablehlo.sort"(%x, %y) <{dimension = 0 : i64, is_stable = true}> ({'
        "^bb0(%a: tensor<i32>, %b: tensor<i32>, %c: tensor<i32>, %d: tensor<i32>): "
        f"%t = stablehlo.compare LT, {by} : (tensor<i32>, tensor<i32>) -> tensor<i1> "
        "stablehlo.return %t : tensor<i1>}) : (tensor<4xi32>, tensor<4xi32>) -> "
        "(tensor<4xi32>, tensor<4xi32>) return %0#1 : tensor<4xi32> } }"
    )


CASES: dict[str, tuple[Any, ...]] = {
    "a product and what jax.nn has": (lambda x: jax.nn.gelu(x @ x.T) + jax.nn.softmax(x @ x.T), X),
    "argmax, cumulative sums": (lambda x: (jnp.argmax(x, 1), jnp.cumsum(x, 0)), X),
    "sort by two keys": (lambda x: lax.sort((x > 0, x, x * 2), dimension=1, num_keys=2), X),
    "top": (lambda x: lax.top_k(x, 2), X),
    "gathers": (lambda x: (x[jnp.array([3, 1])], jnp.take(x, 7, axis=0, mode="fill")), X),
    "scatters": (lambda x: (x.at[1].add(2.0), x.at[:, 2].set(0.0), x.at[9].max(1.0)), X),
    "slices from negative starts": (lambda x: lax.dynamic_slice(x, (-3, 2), (2, 2)), X),
    "updates from negative starts": (
        lambda x, i: lax.dynamic_update_slice(x, x[:1] * 3, (i, i), allow_negative_indices=False),
        *(X, np.int32(-3)),
    ),
    "windows": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (1, 2), "SAME"), X),
    "a pooling's gradient": (
        jax.grad(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID").sum()),
        X,
    ),
    "branches by number": (
        lambda x, i: lax.switch(i, [jnp.sin, jnp.cos, lambda v: v * 2], x),
        *(X, np.int32(2)),
    ),
    "a loop until": (lambda x: lax.while_loop(lambda v: v.sum() < 9, lambda v: v + 1, x), X),
    "a scan": (lambda x: lax.scan(lambda c, v: (c + v, c * v), x[0], x), X),
    "narrow constants": (
        lambda x: x.astype(jnp.bfloat16) * jnp.asarray([1.5, jnp.inf, 3, -0.25, 5, 6], "bfloat16"),
        X,
    ),
    "complex": (lambda x: jnp.abs(jnp.fft.fft(x * (1 + 2j))), X),
    "truth": (lambda x: (jnp.any(x > 1, 0), jnp.all(x > -3, 1), (x > 0) ^ (x < 1)), X),
    "rounding": (lambda x: (jnp.round(x * 2.5), lax.round(x * 2.5), jnp.trunc(x)), X),
    "reductions from something": (lambda x: lax.reduce(x, 3.0, lax.add, (1,)), X),
    "a reduction of its own": (
        lambda x: lax.reduce(x, 1.0, lambda a, b: a * b + 1, (1,)),
        X[:, :1],
    ),
    "convolution": (
        lambda x: lax.conv_general_dilated(
            x.reshape(1, 1, 4, 6),
            jnp.ones((2, 1, 3, 3)) * x[0, 0],
            (1, 2),
            [(1, 2), (0, 1)],
            (2, 1),
        ),
        X,
    ),
    "bits": (lambda x: lax.bitcast_convert_type(x, jnp.int32) >> 3, X),
}


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_those_of_xla(case: str) -> None:
    function, *args = CASES[case]
    same(function, *args)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("mlp", "recurrent", "while_loop"),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("sorting", "moe", "llama")),
    ],
)
def test_train_steps_are_the_same_programs(name: str) -> None:
    step, args = models.example(name)
    program = same(step, *args, rtol=1e-4)
    assert not any(op.kernel.startswith("call") for op in program.graph.operations)


def test_a_scan_over_layers_is_a_counted_loop_that_plans_know() -> None:
    def layers(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    w = np.ones((5, 6, 6), np.float32)
    (loop,) = [op for op in same(layers, X, w).graph.operations if op.regions]
    assert loop.kernel == "scan" and loop.params["length"] == 5
    assert "dot_general" in {op.kernel for op in loop.regions[0].operations}


def test_operations_are_of_lines_of_the_module_or_of_the_program_that_it_was_made_of() -> None:
    lowered = jax.jit(lambda x: jnp.sin(x) @ x.T).lower(X)
    plain = te.from_stablehlo(lowered.as_text(), file="f.mlir").graph.operations[0].source
    assert plain.file == "f.mlir" and "stablehlo.sine" in plain.text
    told = te.from_stablehlo(lowered.as_text(debug_info=True)).graph.operations[0].source
    assert told.file.endswith("test_stablehlo.py") and "jnp.sin" in told.text


@pytest.mark.slow
def test_what_is_planned_runs_and_is_the_same() -> None:
    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - 0.1 * g, value

    w, x = np.ones((8, 16), np.float32) / 9, np.ones((32, 8), np.float32)
    text = jax.jit(step, donate_argnums=0).lower(w, x).as_text()
    program = te.from_stablehlo(text, "step")
    assert program.graph.donated == (True, False)
    plan = te.optimize(
        program, "cpu:8", settings=te.Settings(work=0.1, forms=0, recompute=0)
    ).best()
    for got, want in zip(te.compile(plan)(w, x), step(w, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not a module", "not a StableHLO module"),
        ("module {}", "no function @main"),
        (
            "module { func.func @main(%a: tensor<?xf32>) -> tensor<?xf32> { "
            "return %a : tensor<?xf32> } }",
            "unknown size",
        ),
        (
            "module { func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { "
            "%0 = stablehlo.custom_call @mine(%a) : (tensor<2xf32>) -> tensor<2xf32> "
            "return %0 : tensor<2xf32> } }",
            "'mine', which only a compiler knows",
        ),
        (
            "module { func.func @main(%a: tensor<2xi64>) -> tensor<2xi64> { "
            "return %a : tensor<2xi64> } }",
            "JAX_ENABLE_X64",
        ),
        (
            "module { func.func @main(%a: tensor<2xf32>) -> tensor<2xf32> { "
            '%0 = "stablehlo.all_reduce"(%a) <{replica_groups = dense<[[0, 1]]> : '
            "tensor<1x2xi64>}> ({^bb0(%x: tensor<f32>, %y: tensor<f32>): "
            "%s = stablehlo.add %x, %y : tensor<f32> stablehlo.return %s : tensor<f32>}) : "
            "(tensor<2xf32>) -> tensor<2xf32> return %0 : tensor<2xf32> } }",
            "stablehlo.all_reduce: is not known here",
        ),
        (sorting("%b, %a"), "a sort by another order"),
        (sorting("%d, %c"), "a sort by another order"),
    ],
)
def test_what_cannot_be_read_is_told(text: str, told: str) -> None:
    with pytest.raises(TraceError, match=told):
        te.from_stablehlo(text)


def test_an_exported_function_has_its_pytrees_and_keys() -> None:
    def step(state: dict[str, jax.Array], *, key: jax.Array) -> tuple[Any, jax.Array]:
        kept = {k: jnp.tanh(v) for k, v in state.items()}
        return kept, jax.random.split(key)[0]

    args, key = {"w": X, "b": X[0]}, jax.random.wrap_key_data(jnp.arange(2, dtype="uint32"))
    exported = jax.export.export(jax.jit(step))(args, key=key)
    try:
        program = te.from_export(exported)
    except TraceError as error:  # how JAX makes random bits may want 64 of them
        assert "JAX_ENABLE_X64" in str(error)
        exported = jax.export.export(jax.jit(lambda state: step(state, key=key)[0]))(args)
        np.testing.assert_allclose(te.from_export(exported)(args)["w"], np.tanh(X), rtol=1e-6)
        return
    state, _ = program(args, key=key)
    np.testing.assert_allclose(state["w"], np.tanh(X), rtol=1e-6)
    assert "[0]['w']" in program.graph.input_names


def test_bytes_of_an_exported_function() -> None:
    pytest.importorskip("flatbuffers")
    exported = jax.export.export(jax.jit(lambda w, x: {"y": x @ w["a"]}))({"a": X.T}, X)
    program = te.from_export(bytes(exported.serialize()))
    np.testing.assert_allclose(program({"a": X.T}, X)["y"], X @ X.T, rtol=1e-5)
    with pytest.raises(TraceError, match=r"not a function of jax\.export"):
        te.from_export(b"something else")
    with pytest.raises(TraceError, match=r"expected jax\.export\.Exported"):
        te.from_export(3)


def test_sorts_go_by_the_arrays_that_they_compare() -> None:
    x, y = np.array([3, 1, 2, 1], np.int32), np.arange(4, dtype=np.int32)
    program = te.from_stablehlo(sorting("%a, %b"))
    np.testing.assert_array_equal(program(x, y)[0], [1, 3, 2, 0])


def test_the_greatest_of_an_exported_function() -> None:
    """They are exported as a composite, whose sort is by falling keys."""
    exported = jax.export.export(jax.jit(lambda x: lax.top_k(x, 2)))(X)
    for got, wanted in zip(te.from_export(exported)(X), lax.top_k(X, 2), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.slow
def test_the_command_line_takes_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.mlir"
    file.write_text(jax.jit(lambda x: jnp.sin(x) @ x.T).lower(X).as_text())
    out = tmp_path / "mine.json"
    with pytest.raises(SystemExit, match="0"):
        main(["trace", str(file), "-o", str(out)])
    assert {op.kernel for op in te.load(out).graph.operations} >= {"sin", "dot_general"}
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["show", str(out), "--egraph"])
    assert '"root_eclasses"' in capsys.readouterr().out


@pytest.mark.parametrize("shapes", [((4, 6), (6, 3)), ((6,), (6, 3)), ((4, 6), (6,)), ((6,), (6,))])
def test_the_older_product_of_vectors_and_matrices(shapes: tuple[tuple[int, ...], ...]) -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.normal(size=s).astype(np.float32) for s in shapes)
    types = [f"tensor<{''.join(f'{n}x' for n in x.shape)}f32>" for x in (a, b, a @ b)]
    text = (
        f"module {{ func.func @main(%a: {types[0]}, %b: {types[1]}) -> {types[2]} {{ "
        "%0 = stablehlo.dot %a, %b, precision = [HIGHEST, HIGHEST] : "
        f"({types[0]}, {types[1]}) -> {types[2]} return %0 : {types[2]} }} }}"
    )
    program = te.from_stablehlo(text, "f")
    np.testing.assert_allclose(program(a, b)[0], a @ b, rtol=1e-5)
    (product,) = program.graph.operations
    assert product.params["precision"] == [{"$enum": ["Precision", "HIGHEST"]}] * 2


def test_what_a_module_asks_of_a_compiler_is_refused() -> None:
    from jax.experimental.compute_on import compute_on
    from jax.experimental.layout import Layout, with_layout_constraint

    def on_host(x: jax.Array) -> jax.Array:
        with compute_on("device_host"):
            return x * 2

    with pytest.raises(TraceError, match="compute units"):
        through_text(on_host, X)
    with pytest.raises(TraceError, match="LayoutConstraint"):
        through_text(lambda x: with_layout_constraint(x * 2, Layout((1, 0))), X)
