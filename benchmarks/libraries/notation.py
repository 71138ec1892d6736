"""Libraries that only spell: einops, opt_einsum, jmp (precision), chex and tree_math (pytrees),
jaxtyping (types)."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from . import Program


def einops_patches() -> Program:
    """Gradients of a patch embedding and one layer of attention over the patches."""
    from einops import rearrange, reduce, repeat

    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "embed": 0.05 * jax.random.normal(keys[0], (8 * 8 * 3, 128)),
        "token": jax.random.normal(keys[1], (128,)),
        "qkv": 0.05 * jax.random.normal(keys[2], (128, 3 * 128)),
        "head": 0.05 * jax.random.normal(keys[3], (128, 10)),
    }
    images = jax.random.normal(keys[4], (16, 64, 64, 3))

    def loss(params, images):
        patches = rearrange(images, "b (h p) (w q) c -> b (h w) (p q c)", p=8, q=8)
        x = patches @ params["embed"]
        x = jnp.concatenate([repeat(params["token"], "d -> b 1 d", b=len(images)), x], 1)
        q, k, v = rearrange(x @ params["qkv"], "b n (t h d) -> t b h n d", t=3, h=4)
        scores = jax.nn.softmax(jnp.einsum("bhnd,bhmd->bhnm", q, k) / 32**0.5)
        x = x + rearrange(jnp.einsum("bhnm,bhmd->bhnd", scores, v), "b h n d -> b n (h d)")
        return jnp.mean((reduce(x, "b n d -> b d", "mean") @ params["head"]) ** 2)

    return jax.value_and_grad(loss), (params, images)


def opt_einsum_network() -> Program:
    """A ring of five tensors with open ends, contracted along the path that is found for it."""
    import opt_einsum

    spelling = "aibj,bkcl,cmdn,doep,eqar->ijklmnopqr"
    keys = jax.random.split(jax.random.key(0), 5)
    sizes = dict.fromkeys("abcde", 24) | dict.fromkeys("ijklmnopqr", 2)
    terms = spelling.partition("->")[0].split(",")
    tensors = [
        jax.random.normal(key, tuple(sizes[c] for c in term))
        for key, term in zip(keys, terms, strict=True)
    ]

    def contracted(*tensors):
        return opt_einsum.contract(spelling, *tensors, optimize="greedy", backend="jax")

    return contracted, tuple(tensors)


def jmp_scaled_step() -> Program:
    """A step in float16 with a dynamic scale of the loss, skipped where gradients overflow."""
    import jmp

    policy = jmp.get_policy("params=float32,compute=float16,output=float32")
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "up": 0.05 * jax.random.normal(keys[0], (64, 256)),
        "down": 0.05 * jax.random.normal(keys[1], (256, 16)),
    }
    x = jax.random.normal(keys[2], (128, 64))

    def step(params, scale, x):
        def loss(params):
            w, inputs = policy.cast_to_compute((params, x))
            y = policy.cast_to_output(jax.nn.gelu(inputs @ w["up"]) @ w["down"])
            return scale.scale(jnp.mean(y**2))

        grads = scale.unscale(jax.grad(loss)(params))
        finite = jmp.all_finite(grads)
        stepped = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jmp.select_tree(finite, stepped, params), scale.adjust(finite)

    return step, (params, jmp.DynamicLossScale(jnp.float32(2.0**10)), x)


def chex_filter() -> Program:
    """A bank of Kalman filters over a sequence, its state a dataclass of chex."""
    import chex

    @chex.dataclass(frozen=True)
    class Belief:
        mean: jax.Array
        covariance: jax.Array

    a = jnp.eye(4) + 0.1 * jnp.eye(4, k=2)
    c = jnp.eye(2, 4)

    def one(belief, y):
        mean, p = a @ belief.mean, a @ belief.covariance @ a.T + 0.01 * jnp.eye(4)
        gain = jnp.linalg.solve(c @ p @ c.T + 0.1 * jnp.eye(2), c @ p).T
        made = Belief(mean=mean + gain @ (y - c @ mean), covariance=p - gain @ c @ p)
        return made, made.mean

    def filtered(belief, ys):
        last, means = jax.lax.scan(jax.vmap(one), belief, ys)
        return last, means

    start = Belief(mean=jnp.zeros((64, 4)), covariance=jnp.tile(jnp.eye(4), (64, 1, 1)))
    return filtered, (start, jax.random.normal(jax.random.key(0), (50, 64, 2)))


def tree_math_conjugate_gradients() -> Program:
    """Twenty steps of conjugate gradients on vectors that are pytrees."""
    import tree_math as tm

    keys = jax.random.split(jax.random.key(0), 3)
    matrix = jax.random.normal(keys[0], (256, 96)) / 16.0
    start = {"w": jax.random.normal(keys[1], (96, 32)), "b": jax.random.normal(keys[2], (32,))}

    def solved(matrix, right):
        @tm.unwrap
        def apply(x):
            return {"w": matrix.T @ (matrix @ x["w"]) + 0.1 * x["w"], "b": 2.0 * x["b"]}

        def step(_, state):
            x, residual, direction = state
            image = apply(direction)
            squared = residual @ residual
            rate = squared / (direction @ image)
            left = residual - rate * image
            return x + rate * direction, left, left + (left @ left) / squared * direction

        b = tm.Vector(right)
        return jax.lax.fori_loop(0, 20, step, (0.0 * b, b, b))[0].tree

    return solved, (matrix, start)


def jaxtyping_layer() -> Program:
    """A gated layer and its gradients, with shapes that are checked while it is traced."""
    from beartype import beartype
    from jaxtyping import Array, Float, jaxtyped

    @jaxtyped(typechecker=beartype)
    def gated(
        x: Float[Array, "batch time wide"],  # noqa: F722
        up: Float[Array, "wide two hidden"],  # noqa: F722
        down: Float[Array, "hidden wide"],  # noqa: F722
    ) -> Float[Array, "batch time wide"]:  # noqa: F722
        gate, value = jnp.einsum("btw,wkh->kbth", x, up)
        return x + (jax.nn.silu(gate) * value) @ down

    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (8, 64, 96))
    up, down = 0.1 * jax.random.normal(keys[1], (96, 2, 256)), jnp.ones((256, 96)) / 256
    return jax.grad(lambda x, up, down: jnp.mean(gated(x, up, down) ** 2), (1, 2)), (x, up, down)
