"""The recipes that practitioners shard GPT-2 by, written by hand with explicit collectives.

Each baseline takes exactly the step of `models.gpt2` - the same parameter tree, the same AdamW -
and runs it as one `jax.shard_map` over a list of devices. They are written as an expert would write
them: every gradient is reduced once, query, key and value share one reduction of their input's
gradient, logits are never gathered, and the optimizer runs where its parameters live.

    run = BASELINES["fsdp"](config, jax.devices())
    state = run.place(gpt2.arguments(config))
    params, opt_state, loss = run.step(*state)

`run.step.lower(*abstract(config, run))` compiles ahead of time, also for devices that are only
described.

The docstrings give what moves as payloads per device, in elements: what enters an all-reduce (AR)
or reduce-scatter (RS), or leaves an all-gather (AG). `P` is the number of parameters, `L` that of
layers, `T = batch * sequence * width` the size of the residual stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import gpt2
from tapestry_egg.errors import PlanError
from tapestry_egg.plans.compiler_options import BARRIERS_ON_CPUS

P = PartitionSpec
Tree = Any
Array = jax.Array
Grads = Callable[[Tree, gpt2.Batch], tuple[Array, Tree]]
"""Parameters and batch, both local, to the global mean loss and the finished local gradients."""


class Baseline(NamedTuple):
    """One sharded training step, bound to its devices."""

    step: Any
    """`(params, opt_state, batch) -> (params, opt_state, loss)`, jitted; donates the first two."""
    in_shardings: tuple[Tree, Tree, Tree]
    """A `NamedSharding` for every leaf of the arguments; outputs leave in the same ones."""
    place: Callable[[tuple[Tree, Tree, Tree]], tuple[Tree, Tree, Tree]]
    """Copies arguments onto the devices; the originals outlive a `step` that donates the copies."""


def data_parallel(config: gpt2.Config, devices: Sequence[jax.Device]) -> Baseline:
    """Replicate the model, split the batch, all-reduce the gradients: AR `P`."""
    mesh = _mesh(devices, data=len(devices))
    _divides("data_parallel", "batch rows", config.batch, len(devices))

    def grads(params: Tree, batch: gpt2.Batch) -> tuple[Array, Tree]:
        value, local = jax.value_and_grad(lambda p: gpt2.loss(p, batch) / len(devices))(params)
        return lax.psum(value, "data"), lax.psum(local, "data")

    specs = jax.tree.map(lambda _: P(), gpt2.abstract(config)[0])
    return _bind(config, mesh, specs, grads)


def fsdp(config: gpt2.Config, devices: Sequence[jax.Device], *, regather: bool = True) -> Baseline:
    """Shard parameters, gradients and optimizer state over the batch's axis (ZeRO-3).

    A layer's parameters are gathered when it runs, its kernels dropped and gathered again for the
    backward pass (not its biases and norms: no gradient needs the ones, the others are vectors).
    Embeddings, last norm and head serve both ends of the step, are gathered once and kept. AG `P +
    layers' kernels`, RS `P`. Without `regather` all is kept: AG `P`, RS `P`, the whole model live.
    """
    count = len(devices)
    mesh = _mesh(devices, data=count)
    _divides("fsdp", "batch rows", config.batch, count)
    dims = jax.tree.map(lambda leaf: _first_divisible(leaf.shape, count), gpt2.abstract(config)[0])

    def gather(shards: Tree, dims: Tree) -> Tree:
        return jax.tree.map(
            lambda x, dim: x if dim < 0 else lax.all_gather(x, "data", axis=dim, tiled=True),
            shards,
            dims,
        )

    def reduce(full: Tree, dims: Tree) -> Tree:
        return jax.tree.map(
            lambda g, dim: (
                lax.psum(g, "data")
                if dim < 0
                else lax.psum_scatter(g, "data", scatter_dimension=dim, tiled=True)
            ),
            full,
            dims,
        )

    def grads(shards: Tree, batch: gpt2.Batch) -> tuple[Array, Tree]:
        shards, layers = _without_layers(shards)
        root_dims, layer_dims = _without_layers(dims)
        root = gather(shards, root_dims)
        x, embed_vjp = jax.vjp(lambda root: gpt2.embed(root, batch["tokens"]), root)
        backward = []
        for layer, dim in zip(layers, layer_dims, strict=True):
            weights = gather(layer, dim)
            x, vjp = jax.vjp(gpt2.block, weights, x)
            backward.append(_release(vjp, weights) if regather else vjp)
        value, head_vjp = jax.vjp(
            lambda root, x: gpt2.head_loss(root, x, batch["targets"]) / count, root, x
        )
        root_grads, x = head_vjp(jnp.ones_like(value))
        layer_grads = []
        for layer, dim, vjp in zip(layers[::-1], layer_dims[::-1], backward[::-1], strict=True):
            if regather:
                # Tied to the incoming gradient, so that no gather starts before it is needed.
                layer, x = lax.optimization_barrier((layer, x))
                vjp = vjp(gather(layer, dim))
            full, x = vjp(x)
            layer_grads.append(reduce(full, dim))
        root_grads = jax.tree.map(jnp.add, root_grads, embed_vjp(x)[0])
        out = {**reduce(root_grads, root_dims), "layers": layer_grads[::-1]}
        return lax.psum(value, "data"), out

    specs = jax.tree.map(lambda dim: P() if dim < 0 else P(*[None] * dim, "data"), dims)
    return _bind(config, mesh, specs, grads)


def fsdp_keep_gathered(config: gpt2.Config, devices: Sequence[jax.Device]) -> Baseline:
    """`fsdp` that keeps the gathered parameters until their backward pass: AG `P`, RS `P`."""
    return fsdp(config, devices, regather=False)


def tensor_parallel(config: gpt2.Config, devices: Sequence[jax.Device]) -> Baseline:
    """Split heads, hidden units and vocabulary over all devices (Megatron): AR `(4 L + 2) T`."""
    return _megatron("tensor_parallel", config, devices, data=1, sequence=False)


def tensor_sequence_parallel(config: gpt2.Config, devices: Sequence[jax.Device]) -> Baseline:
    """Megatron with the residual stream split along the sequence.

    Every all-reduce becomes a reduce-scatter and an all-gather, AG and RS `(4 L + 2) T`; the
    gradients of norms and output biases are partial over the sequence, AR `(6 L + 2) width`.
    """
    return _megatron("tensor_sequence_parallel", config, devices, data=1, sequence=True)


def tensor_sequence_parallel_regather(
    config: gpt2.Config, devices: Sequence[jax.Device]
) -> Baseline:
    """`tensor_sequence_parallel` that keeps only its own positions of what it gathers.

    A gathered input is dropped after its product and gathered again for the gradient of the
    kernel: `(2 L + 1) T` more AG, and nothing kept is as large as the whole residual stream.
    """
    name = "tensor_sequence_parallel_regather"
    return _megatron(name, config, devices, data=1, sequence=True, regather=True)


def data_tensor_parallel(config: gpt2.Config, devices: Sequence[jax.Device]) -> Baseline:
    """Two replicas, each tensor-parallel over half of the devices.

    AR `(4 L + 2) T / 2` within a replica, and of every device's own gradients across the two.
    """
    return _megatron("data_tensor_parallel", config, devices, data=2, sequence=False)


def data_tensor_sequence_parallel(config: gpt2.Config, devices: Sequence[jax.Device]) -> Baseline:
    """Two replicas, each tensor- and sequence-parallel over half of the devices."""
    return _megatron("data_tensor_sequence_parallel", config, devices, data=2, sequence=True)


BASELINES: dict[str, Callable[[gpt2.Config, Sequence[jax.Device]], Baseline]] = {
    "data_parallel": data_parallel,
    "fsdp": fsdp,
    "fsdp_keep_gathered": fsdp_keep_gathered,
    "tensor_parallel": tensor_parallel,
    "tensor_sequence_parallel": tensor_sequence_parallel,
    "tensor_sequence_parallel_regather": tensor_sequence_parallel_regather,
    "data_tensor_parallel": data_tensor_parallel,
    "data_tensor_sequence_parallel": data_tensor_sequence_parallel,
}


def abstract(config: gpt2.Config, baseline: Baseline) -> tuple[Tree, Tree, Tree]:
    """Return the arguments of `baseline.step` as `jax.ShapeDtypeStruct`s with their shardings."""
    params, opt_state, batch = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        gpt2.abstract(config),
        baseline.in_shardings,
    )
    return params, opt_state, batch


# Megatron's conjugate pair. Inside shard_map (without replication tracking) psum transposes to
# psum, which would count a replicated gradient once per device; these say what each side means.


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def copy_in(x: Array, axis: str) -> Array:
    """Hand a replicated value to every device's own branch; the branches' gradients are summed."""
    return x


copy_in.defvjp(lambda x, axis: (x, None), lambda axis, _, g: (lax.psum(g, axis),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def sum_out(x: Array, axis: str) -> Array:
    """Sum the devices' partial values; each device's gradient is that of the sum."""
    total: Array = lax.psum(x, axis)
    return total


sum_out.defvjp(lambda x, axis: (lax.psum(x, axis), None), lambda axis, _, g: (g,))


def _regathering(f: Callable[[Tree, Array], Array]) -> Callable[[Tree, Array], Array]:
    """`f` of weights and of the gathered sequence; only the shards are kept for its gradient."""

    @jax.custom_vjp
    def apply(p: Tree, x: Array) -> Array:
        return f(p, lax.all_gather(x, "model", axis=1, tiled=True))

    def forward(p: Tree, x: Array) -> tuple[Array, Any]:
        full = lax.all_gather(x, "model", axis=1, tiled=True)
        out, vjp = jax.vjp(f, p, full)
        return out, (_release(vjp, full), x)

    def backward(saved: Any, g: Array) -> tuple[Tree, Array]:
        vjp, x = saved
        x, g = lax.optimization_barrier((x, g))
        weights, full = vjp(lax.all_gather(x, "model", axis=1, tiled=True))(g)
        return weights, lax.psum_scatter(full, "model", scatter_dimension=1, tiled=True)

    apply.defvjp(forward, backward)
    return apply


def _megatron(
    name: str,
    config: gpt2.Config,
    devices: Sequence[jax.Device],
    *,
    data: int,
    sequence: bool,
    regather: bool = False,
) -> Baseline:
    ways = len(devices) // data
    mesh = _mesh(devices, data=data, model=ways)
    _divides(name, "batch rows", config.batch, data)
    _divides(name, "heads", config.heads, ways)
    _divides(name, "hidden units", 4 * config.width, ways)
    _divides(name, "vocabulary entries", config.vocabulary, ways)
    if sequence:
        _divides(name, "positions", config.sequence, ways)

    # From the residual stream into a tensor-parallel region, and from its partial sums back.
    if sequence:
        # The transpose of either is the other, which here is exactly the gradient that is meant.
        enter = functools.partial(lax.all_gather, axis_name="model", axis=1, tiled=True)
        leave = functools.partial(
            lax.psum_scatter, axis_name="model", scatter_dimension=1, tiled=True
        )
    else:
        enter = functools.partial(copy_in, axis="model")
        leave = functools.partial(sum_out, axis="model")

    def region(f: Callable[[Tree, Array], Array]) -> Callable[[Tree, Array], Array]:
        return _regathering(f) if regather else lambda p, x: f(p, enter(x))

    attention, mlp = region(_partial_attention), region(_partial_mlp)
    unembed = region(lambda head, x: x @ head)

    column = {"kernel": P(None, "model"), "bias": P("model")}
    row = {"kernel": P("model"), "bias": P()}
    norm = {"scale": P(), "bias": P()}
    layer = {"ln1": norm, "ln2": norm, "out": row, "up": column, "down": row}
    layer |= {"query": column, "key": column, "value": column}
    specs: Tree = {
        "wte": P("model"),
        "wpe": P("model") if sequence else P(),
        "layers": [layer] * config.layers,
        "lnf": norm,
    }
    if not config.tied:
        specs["head"] = P(None, "model")

    def loss(params: Tree, batch: gpt2.Batch) -> Array:
        x = leave(_partial_lookup(params["wte"], batch["tokens"])) + params["wpe"]
        for p in params["layers"]:
            x = x + leave(attention(p, gpt2.layernorm(p["ln1"], x))) + p["out"]["bias"]
            x = x + leave(mlp(p, gpt2.layernorm(p["ln2"], x))) + p["down"]["bias"]
        head = params["wte"].T if config.tied else params["head"]
        logits = unembed(head, gpt2.layernorm(params["lnf"], x))
        return _vocabulary_parallel_cross_entropy(logits, batch["targets"]) / data

    def grads(params: Tree, batch: gpt2.Batch) -> tuple[Array, Tree]:
        value, grads = jax.value_and_grad(loss)(params, batch)

        def finish(grad: Array, spec: PartitionSpec) -> Array:
            axes = ("data",) if data > 1 else ()
            if sequence and spec == P():  # used by each device on its own positions only
                axes = (*axes, "model")
            return lax.psum(grad, axes) if axes else grad

        return lax.psum(value, "data") if data > 1 else value, jax.tree.map(finish, grads, specs)

    return _bind(config, mesh, specs, grads)


def _partial_lookup(table: Array, tokens: Array) -> Array:
    """Rows of a vocabulary-sharded table, zero where another device holds the row."""
    local = tokens - lax.axis_index("model") * table.shape[0]
    mine = (local >= 0) & (local < table.shape[0])
    return jnp.where(mine[..., None], table[jnp.where(mine, local, 0)], 0)


def _partial_attention(p: Tree, x: Array) -> Array:
    """This device's heads' share of the attention's output, before its bias."""
    q = jnp.einsum("bsd,dhk->bshk", x, p["query"]["kernel"]) + p["query"]["bias"]
    k = jnp.einsum("bsd,dhk->bshk", x, p["key"]["kernel"]) + p["key"]["bias"]
    v = jnp.einsum("bsd,dhk->bshk", x, p["value"]["kernel"]) + p["value"]["bias"]
    return jnp.einsum("bshk,hkd->bsd", gpt2.attend(q, k, v), p["out"]["kernel"])


def _partial_mlp(p: Tree, x: Array) -> Array:
    """This device's hidden units' share of the perceptron's output, before its bias."""
    down: Array = p["down"]["kernel"]
    return jax.nn.gelu(x @ p["up"]["kernel"] + p["up"]["bias"]) @ down


def _vocabulary_parallel_cross_entropy(logits: Array, targets: Array) -> Array:
    """Mean cross-entropy from `[batch, sequence, vocabulary / ways]`: 3 numbers a token move."""
    peak = lax.pmax(lax.stop_gradient(jnp.max(logits, axis=-1)), "model")
    local = targets - lax.axis_index("model") * logits.shape[-1]
    mine = (local >= 0) & (local < logits.shape[-1])
    picked = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[..., None], axis=-1)[..., 0]
    mass = jnp.sum(jnp.exp(logits - peak[..., None]), axis=-1)
    mass, picked = sum_out(jnp.stack([mass, jnp.where(mine, picked, 0)]), "model")
    return jnp.mean(jnp.log(mass) + peak - picked)


def _bind(config: gpt2.Config, mesh: Mesh, specs: Tree, grads: Grads) -> Baseline:
    """Finish a baseline from the parameters' specs and the function that yields their gradients."""
    _, opt_state, batch = gpt2.abstract(config)
    state_specs = optax.tree_map_params(
        gpt2.OPTIMIZER, lambda _, spec: spec, opt_state, specs, transform_non_params=lambda _: P()
    )
    rows = jax.tree.map(lambda _: P("data"), batch)

    def step(params: Tree, opt_state: Tree, batch: gpt2.Batch) -> tuple[Tree, Tree, Array]:
        value, gradients = grads(params, batch)
        updates, opt_state = gpt2.OPTIMIZER.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    outputs = (specs, state_specs, P())
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, state_specs, rows), out_specs=outputs, check_vma=False
    )

    def shardings(specs: Tree) -> Tree:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    in_shardings = (shardings(specs), shardings(state_specs), shardings(rows))
    # XLA for CPU drops optimization barriers before its last merging of equal operations, which
    # would turn a second gather back into the first, and ends the process over small loops of some.
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    jitted = jax.jit(
        mapped,
        in_shardings=in_shardings,
        out_shardings=shardings(outputs),
        donate_argnums=(0, 1),
        compiler_options=BARRIERS_ON_CPUS if on_cpu else None,
    )

    def place(args: tuple[Tree, Tree, Tree]) -> tuple[Tree, Tree, Tree]:
        # A placed array may share its buffer with the original, which a donating step would delete.
        params, opt_state, batch = jax.device_put(jax.tree.map(jnp.copy, args), in_shardings)
        return params, opt_state, batch

    return Baseline(jitted, in_shardings, place)


def _mesh(devices: Sequence[jax.Device], **axes: int) -> Mesh:
    return Mesh(np.array(devices).reshape(tuple(axes.values())), tuple(axes))


def _divides(name: str, what: str, size: int, ways: int) -> None:
    if size % ways:
        raise PlanError(
            f"{size} {what} do not divide over {ways} devices",
            where=name,
            hint="choose a number of devices that divides them, or another baseline",
        )


def _first_divisible(shape: tuple[int, ...], ways: int) -> int:
    """The first dim that splits evenly, or -1: a leaf that does not split is replicated."""
    return next((dim for dim, size in enumerate(shape) if size % ways == 0), -1)


def _without_layers(tree: Tree) -> tuple[Tree, list[Tree]]:
    return {key: value for key, value in tree.items() if key != "layers"}, tree["layers"]


def _release(vjp: Any, values: Tree) -> Any:
    """Drop `values` from what a vjp function saved; called with equal ones, the result is whole."""
    leaves, treedef = jax.tree.flatten(vjp)
    position = {id(value): i for i, value in enumerate(jax.tree.leaves(values))}
    slots = [position.get(id(leaf)) for leaf in leaves]
    kept = [leaf for leaf, slot in zip(leaves, slots, strict=True) if slot is None]

    def restore(kept: list[Array], values: Tree) -> Any:
        rest, again = iter(kept), jax.tree.leaves(values)
        filled = [next(rest) if slot is None else again[slot] for slot in slots]
        return jax.tree.unflatten(treedef, filled)

    return jax.tree_util.Partial(restore, kept)
