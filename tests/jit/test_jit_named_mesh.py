"""A whole training step under a named mesh, as a JAX user writes one: constraints inside, shardings
at the boundary, donated state, and the algebra on."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from models import gpt2
from tapestry_egg.tracing.constraints import KERNEL
from tests.pipeline.test_words import constrained, holds

pytestmark = pytest.mark.slow

CONFIG = gpt2.config("tiny", layers=1)


def user_mesh(kind: AxisType) -> Mesh:
    return jax.make_mesh((2, 4), ("data", "model"), axis_types=(kind,) * 2)


def megatron(path: Any, leaf: Any) -> P:
    """Heads and the hidden width over `model`, the rest on every device."""
    name, rank = jax.tree_util.keystr(path), leaf.ndim
    if any(f"'{k}'" in name for k in ("query", "key", "value")):
        return P(*(None,) * (rank - 2), "model", None)
    if "'up'" in name:
        return P(*(None,) * (rank - 1), "model")
    if ("'out'" in name and rank == 3) or ("'down'" in name and rank == 2) or "'wte'" in name:
        return P("model", *(None,) * (rank - 1))
    return P()


def sliced(path: Any, leaf: Any) -> P:
    """The first dim over all devices where it divides, as ZeRO cuts the state."""
    return P(("data", "model")) if leaf.ndim and leaf.shape[0] % 8 == 0 else P()


def auto_step(mesh: Mesh) -> Any:
    """Sequence parallelism between the layers, asked for by a constraint."""

    def loss(params: Any, batch: Any) -> jax.Array:
        x = gpt2.embed(params, batch["tokens"])
        for layer in params["layers"]:
            x = gpt2.block(layer, x)
            x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P("data", "model", None)))
        return gpt2.head_loss(params, x, batch["targets"])

    return step_of(loss)


def explicit_step(mesh: Mesh) -> Any:
    """The same in types: parameters are gathered, activations cut and joined again."""

    def loss(params: Any, batch: Any) -> jax.Array:
        params = jax.tree.map(lambda a: jax.sharding.reshard(a, P()), params)
        rows = params["wte"].at[batch["tokens"]].get(out_sharding=P("data"))
        x = rows + params["wpe"][: batch["tokens"].shape[-1]]
        for layer in params["layers"]:
            x = gpt2.block(layer, x)
            x = jax.sharding.reshard(x, P("data", "model", None))
            x = jax.sharding.reshard(x, P("data"))
        # The rows that the embedding is asked for are cut, and so is a gather along them.
        logits = gpt2.head_logits(params, x)
        picked = jnp.sum(jax.nn.one_hot(batch["targets"], logits.shape[-1]) * logits, -1)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    return step_of(loss)


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(got, wanted, rtol=2e-3, atol=2e-5)


def step_of(loss: Any) -> Any:
    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = gpt2.OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(AxisType.Auto, id="auto"),
        pytest.param(AxisType.Explicit, id="explicit", marks=pytest.mark.long),
    ],
)
def test_a_training_step_keeps_every_word_with_the_algebra_on(kind: AxisType) -> None:
    mesh = user_mesh(kind)
    step = (auto_step if kind == AxisType.Auto else explicit_step)(mesh)
    lies = megatron if kind == AxisType.Auto else sliced

    def on_mesh(tree: Any) -> Any:
        return jax.tree_util.tree_map_with_path(
            lambda path, a: NamedSharding(mesh, lies(path, a)), tree
        )

    given = jax.tree.map(np.asarray, gpt2.arguments(CONFIG))
    wanted = jax.jit(gpt2.step)(*given)
    state = on_mesh(given[:2])
    rows = jax.tree.map(lambda _: NamedSharding(mesh, P("data")), given[2])
    with jax.set_mesh(mesh):
        placed = jax.device_put(given, (*state, rows))
        by_jax = jax.jit(step, in_shardings=(*state, rows), out_shardings=(*state, None))(*placed)
        run = te.jit(
            step,
            mesh=mesh,
            in_shardings=(*state, rows),
            out_shardings=(*state, None),
            donate_argnums=(0, 1),
            cache=False,
            settings=te.Settings(work=0.1, merge=False),
        )
        got = run(*placed)
        assert all(a.is_deleted() for a in jax.tree.leaves(placed[:2]))
        jax.tree.map(close, by_jax, wanted)
        jax.tree.map(close, got, wanted)
        for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(by_jax), strict=True):
            assert ours.sharding.mesh == mesh
            assert ours.sharding.is_equivalent_to(theirs.sharding, ours.ndim)
            assert jax.typeof(ours) == jax.typeof(theirs)
        front = run.front(*got[:2], placed[2])
        plan = run.plan(*got[:2], placed[2])
        traced = te.trace(step, *got[:2], placed[2]).graph
        asked = {str(op.params["dims"]) for op in traced.operations if op.kernel == KERNEL}
        assert front.original is not None and "[['data'], ['model'], []]" in asked
        for p in (plan, *front, front.original):
            kept = constrained(p)
            assert {str(dims) for dims, *_ in kept} == asked
            assert all(holds(*one) for one in kept)
        # 8 × 16 × 32 over (data, model): what a device holds of the stream between the layers.
        assert "tensor<4x4x32xf32>" in run.lower(*got[:2], placed[2]).as_text()
        # What comes back is used by a plain `jax.jit`, and goes in again without a new plan.
        total = jax.jit(lambda t: sum(jnp.sum(a * a) for a in jax.tree.leaves(t)))(got[0])
        np.testing.assert_allclose(
            total, sum(np.sum(np.square(a)) for a in jax.tree.leaves(wanted[0])), rtol=1e-3
        )
        again = run(*got[:2], placed[2])
        close(again[2], jax.jit(gpt2.step)(*wanted[:2], given[2])[2])
        assert run.plan(*again[:2], placed[2]) is plan
