"""The example programs trace, run and learn.

What is particular to one is checked against a slow version in NumPy. All run in the reference
executor too, operation by operation, and give what JAX gives; some are planned for eight devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models
import tapestry_egg as te
from models import (
    decode,
    gpt2,
    llama,
    lora,
    moe,
    nnx_gpt2,
    recurrent,
    resnet,
)
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.reference.executor import execute

pytestmark = pytest.mark.slow  # to compile

Example = Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]

EXAMPLES: dict[str, Example] = {
    name: lambda name=name: models.example(name)  # type: ignore[misc]
    for name in models.PROGRAMS
    if name != "gpt2"
}
EXAMPLES["recurrent-gru"] = lambda: recurrent.example("gru")


TRACED = [
    "decode",
    "ragged_moe",
    "graph_network",
    "llama",
    "lora",
    "nnx_gpt2",
    "resnet",
    "sorting",
    "state_space",
    "vit",
]


def quick(fn: Callable[..., Any], **options: Any) -> Any:
    """Compile with little optimisation: these programs run a few times only."""
    flags = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fn, compiler_options=flags, **options)


def shapes(tree: Any) -> Any:
    """The structure of a tree, and the shapes and dtypes of its arrays."""
    return jax.tree.structure(tree), [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@functools.cache
def started(name: str) -> Any:
    """The train step of a program, compiled, and its arguments; some take long to make."""
    step, args = EXAMPLES[name]()
    return quick(step), step, args


def words(tree: Any) -> list[np.ndarray]:
    """The leaves of a tree as NumPy arrays, random keys as their words."""

    def plain(x: Any) -> Any:
        keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if keys else x)

    return [plain(x) for x in jax.tree.leaves(tree)]


def assert_close(got: list[np.ndarray], expected: list[np.ndarray], atol: float = 1e-5) -> None:
    for x, y in zip(got, expected, strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if not np.issubdtype(y.dtype, np.inexact):
            np.testing.assert_array_equal(x, y)
            continue
        near = max(1.0, float(np.max(np.abs(y), initial=0)))
        np.testing.assert_allclose(x, y, 1e-4, atol * near)


def filled(tree: Any) -> Any:
    """The tree of shapes with made-up values: cheaper than what the programs start with."""
    rng = np.random.default_rng(0)

    def fill(x: Any) -> jax.Array:
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jax.random.key(0)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(0, 4, x.shape), x.dtype)
        return jnp.asarray(rng.uniform(0.05, 0.2, x.shape), x.dtype)

    return jax.tree.map(fill, tree)


def traced_result(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[np.ndarray]:
    """What the traced function gives in the reference executor; with random keys, in JAX."""
    program = te.trace(fn, *args)
    if any(t.dtype.startswith("key<") for t in program.input_types):
        return words(quick(program)(*args))
    return list(execute(program.graph, words(program.flatten(*args))))


def test_traced_forward_gives_what_jax_gives() -> None:
    """The other programs are traced as whole steps."""
    args = filled(jax.eval_shape(resnet.forward_args))
    assert_close(traced_result(resnet.forward, args), words(quick(resnet.forward)(*args)))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pytest.mark.long if n in ("lora", "resnet", "state_space") else ())
        for n in TRACED
    ],
)
def test_traced_step_gives_what_jax_gives(name: str) -> None:
    jitted, step, args = started(name)
    # A gradient that is zero but for rounding is as large as any other after Adam's division.
    assert_close(traced_result(step, args), words(jitted(*args)), 6e-3 if "gpt" in name else 1e-5)


@pytest.mark.parametrize(
    "name",
    ["decode", *(pytest.param(n, marks=pytest.mark.long) for n in ("graph_network", "ragged_moe"))],
)
def test_smallest_plan_gives_what_jax_gives(name: str) -> None:
    jitted, step, args = started(name)
    optimized = te.jit(step, minimize="peak_bytes", settings=Settings(work=0.5))
    assert_close(words(optimized(*args)), words(jitted(*args)), 1e-4)
    assert optimized.plan(*args).costs.wire_bytes > 0  # it is divided


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=() if n in TRACED and n != "resnet" else pytest.mark.long)
        for n in EXAMPLES
        if n != "decode"
    ],
)
def test_example_learns(name: str) -> None:
    jitted, _, (state, *batch) = started(name)
    assert all(x.shape[0] % 8 == 0 for x in batch)
    before, losses = shapes(state), []
    for _ in range(6):
        state, loss = jitted(state, *batch)
        losses.append(float(loss))
    assert shapes(state) == before
    assert all(math.isfinite(loss) for loss in losses)
    assert losses[-1] < losses[0]


def test_gpt2_learns_and_donates() -> None:
    _, (params, opt_state, batch) = gpt2.example()
    step = quick(gpt2.step, donate_argnums=(0, 1))
    assert shapes(gpt2.abstract(gpt2.config("tiny"))) == shapes((params, opt_state, batch))
    kept, losses = params["wte"], []
    for _ in range(4):
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    assert kept.is_deleted()
    # An untrained model knows nothing: its loss is that of guessing.
    assert losses[0] == pytest.approx(math.log(64), rel=0.01)
    assert losses[-1] < losses[0]


def test_gpt2_is_pretrained_with_narrow_products_and_wide_parameters() -> None:
    config = gpt2.config("tiny")
    params, opt_state, batch = gpt2.arguments(config, optimizer=gpt2.PRETRAINING)
    products = {
        eqn.invars[0].aval.dtype.name
        for eqn in jax.make_jaxpr(gpt2.pretrain)(params, opt_state, batch).eqns
        if eqn.primitive.name == "dot_general"
    }
    assert products == {"bfloat16"}
    new, state, value = quick(gpt2.pretrain)(params, opt_state, batch)
    assert shapes((new, state)) == shapes((params, opt_state))
    assert float(value) == pytest.approx(float(quick(gpt2.loss)(params, batch)), rel=1e-2)
    # The learning rate begins at nothing; with the second step all parameters move.
    assert not moved(params, new).any()
    assert moved(new, quick(gpt2.pretrain)(new, state, batch)[0]).all()


def moved(before: Any, after: Any) -> np.ndarray:
    """Of every leaf, whether it changed."""
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return np.array([not np.array_equal(a, b) for a, b in leaves])


def test_gpt2_small_has_the_published_size() -> None:
    params, _, _ = gpt2.abstract(gpt2.config("gpt2_small", vocabulary=50257))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == 124_439_808


def numpy_gpt2_loss(params: Any, tokens: Any, targets: Any) -> float:
    """GPT-2's loss token by token and head by head, in float64."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def norm(q: Any, x: Any) -> Any:
        return (x - x.mean()) / math.sqrt(x.var() + 1e-5) * q["scale"] + q["bias"]

    def softmax(x: Any) -> Any:
        e = np.exp(x - x.max())
        return e / e.sum()

    def gelu(x: Any) -> Any:
        return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    def dense(q: Any, x: Any) -> Any:
        return np.tensordot(x, q["kernel"], x.ndim) + q["bias"]

    total = []
    for row, labels in zip(tokens, targets, strict=True):
        xs = [p["wte"][token] + p["wpe"][i] for i, token in enumerate(row)]
        for layer in p["layers"]:
            hs = [norm(layer["ln1"], x) for x in xs]
            q, k, v = ([dense(layer[n], h) for h in hs] for n in ("query", "key", "value"))
            for i in range(len(xs)):
                mixed = np.zeros_like(q[i])
                for head in range(mixed.shape[0]):
                    scores = [q[i][head] @ k[j][head] for j in range(i + 1)]
                    weights = softmax(np.array(scores) / math.sqrt(mixed.shape[1]))
                    mixed[head] = sum(w * v[j][head] for j, w in enumerate(weights))
                xs[i] = xs[i] + dense(layer["out"], mixed)
            xs = [
                x + dense(layer["down"], gelu(dense(layer["up"], norm(layer["ln2"], x))))
                for x in xs
            ]
        for x, label in zip(xs, labels, strict=True):
            logits = p.get("head", p["wte"].T).T @ norm(p["lnf"], x)
            total.append(-math.log(softmax(logits)[label]))
    return float(np.mean(total))


@pytest.mark.parametrize("tied", [True, False])
def test_gpt2_agrees_with_numpy(tied: bool) -> None:
    config = gpt2.config("tiny", tied=tied, batch=2, sequence=6, layers=2)
    rng = np.random.default_rng(1)
    # Larger than at initialisation, with biases, so that no term is negligible.
    params = jax.tree.map(
        lambda x: (0.3 * rng.normal(size=x.shape)).astype(x.dtype), gpt2.abstract(config)[0]
    )
    assert ("head" in params) is not tied
    batch = gpt2.tokens(config)
    expected = numpy_gpt2_loss(params, np.asarray(batch["tokens"]), np.asarray(batch["targets"]))
    assert float(quick(gpt2.loss)(params, batch)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_mixture_of_experts_exchanges_three_times() -> None:
    """Where tokens go, a byte for each place that they may take, what experts read, and the
    gradients of their results: what two products read is exchanged once for both. Nothing else of
    that size moves."""
    args = jax.eval_shape(lambda: moe.example(64, 512, 1024, 4096)[1])
    front = te.optimize(
        te.trace(moe.step, *args),
        "h100:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        settings=Settings(front=False, recompute=0, work=3.0),
    )
    moved = front.best("seconds").collectives
    exchanged = sorted(c.payload_bytes for c in moved if c.kind == "all_to_all")
    experts, capacity = 8, 2 * moe.TOP * 512 // 8
    block = experts * 64 * capacity * 1024 * 4 // 8
    assert exchanged == [64 * 512 * experts * capacity // 8, block, block]
    assert all(c.payload_bytes < block / 8 for c in moved if c.kind != "all_to_all")


def test_decoding_with_a_cache_gives_the_logits_of_all_tokens_at_once() -> None:
    _, (params, cache, prompt) = decode.example(batch=2, prompt=3)
    forward = quick(decode.forward)
    logits = []
    for t in range(prompt.shape[1]):
        one, cache = forward(params, cache, prompt[:, t])
        logits.append(one)
    assert int(cache["position"]) == 3
    expected = quick(llama.forward)(params, prompt)
    np.testing.assert_allclose(np.stack(logits, 1), expected, atol=1e-4)


def test_lora_starts_at_the_model_and_changes_its_adapters_only() -> None:
    jitted, _, ((model, opt_state), *batch) = started("lora")
    (trained, _), _ = jitted((model, opt_state), *batch)
    _, adapters, frozen = nnx.split(trained, nnx.LoRAParam, ...)
    _, first, before = nnx.split(model, nnx.LoRAParam, ...)
    assert all(np.array_equal(a, b) for a, b in zip(words(frozen), words(before), strict=True))
    changed = [not np.array_equal(a, b) for a, b in zip(words(adapters), words(first), strict=True)]
    assert len(changed) == 8 and any(changed)
    plain, _ = started("nnx_gpt2")[2][0]
    np.testing.assert_allclose(
        quick(lora.forward)(model, batch[0]), quick(nnx_gpt2.forward)(plain, batch[0]), atol=1e-5
    )


@pytest.mark.parametrize(
    ("module", "kind"),
    [
        pytest.param(resnet, nnx.BatchStat, id="statistics", marks=pytest.mark.long),
        pytest.param(nnx_gpt2, nnx.RngCount, id="streams"),
    ],
)
def test_resnet_and_dropout_change_their_statistics_and_streams(module: Any, kind: Any) -> None:
    jitted, _, ((model, opt_state), *batch) = started(module.__name__.removeprefix("models."))
    (trained, _), _ = jitted((model, opt_state), *batch)
    before, after = words(nnx.state(model, kind)), words(nnx.state(trained, kind))
    assert before and not any(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    logits = quick(module.forward)(model, batch[0])
    assert np.array_equal(logits, quick(module.forward)(model, batch[0]))
