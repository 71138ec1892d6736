"""Flax linen: `TrainState`, mutable collections, lifted transforms."""

from __future__ import annotations

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from . import Step, cross_entropy, random_tokens


class _Trained(TrainState):
    """A train state with moving statistics, averaged parameters and a key."""

    batch_stats: Any = None
    averaged: Any = None
    key: Any = None


def _images(n: int, size: int, classes: int = 10, channels: int = 3) -> tuple[jax.Array, jax.Array]:
    image, label = jax.random.split(jax.random.key(7))
    return (
        jax.random.normal(image, (n, size, size, channels)),
        jax.random.randint(label, (n,), 0, classes),
    )


class _Bottleneck(nn.Module):
    width: int
    stride: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train):
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, dtype=self.dtype)
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        y = nn.relu(norm()(conv(self.width, (1, 1))(x)))
        y = nn.relu(norm()(conv(self.width, (3, 3), self.stride)(y)))
        y = norm(scale_init=nn.initializers.zeros)(conv(4 * self.width, (1, 1))(y))
        if x.shape != y.shape:
            x = norm()(conv(4 * self.width, (1, 1), self.stride)(x))
        return nn.relu(x + y)


class _ResNet(nn.Module):
    stages: tuple[int, ...]
    width: int
    classes: int
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(self.width, (7, 7), 2, use_bias=False, dtype=self.dtype)(x)
        x = nn.BatchNorm(use_running_average=not train, dtype=self.dtype)(x)
        x = nn.max_pool(nn.relu(x), (3, 3), (2, 2), "SAME")
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                stride = 2 if i and not j else 1
                x = _Bottleneck(self.width * 2**i, stride, self.dtype)(x, train)
        return nn.Dense(self.classes)(x.mean((1, 2)).astype(jnp.float32))


def resnet50(small: bool = False) -> Step:
    """ResNet-50 in bfloat16: batch norms, Nesterov momentum, cosine schedule, smoothed labels."""
    stages, width, n, size, classes = (
        ((1, 1, 1, 1), 8, 8, 32, 10) if small else ((3, 4, 6, 3), 64, 512, 224, 1000)
    )
    model = _ResNet(stages, width, classes, jnp.bfloat16)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.4, 500, 50_000)
    decayed = partial(jax.tree.map, lambda p: p.ndim > 1)
    tx = optax.chain(
        optax.add_decayed_weights(1e-4, decayed), optax.sgd(schedule, 0.9, nesterov=True)
    )

    def arguments():
        images, labels = _images(n, size, classes)
        variables = model.init(jax.random.key(0), images[:1])
        state = _Trained.create(
            apply_fn=model.apply,
            params=variables["params"],
            tx=tx,
            batch_stats=variables["batch_stats"],
        )
        return state, images, labels

    def step(state, images, labels):
        def loss(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = state.apply_fn(variables, images, mutable=["batch_stats"])
            target = optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)
            return optax.softmax_cross_entropy(logits, target).mean(), (new, logits)

        (value, (new, logits)), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=new["batch_stats"])
        return state, {"loss": value, "accuracy": (logits.argmax(-1) == labels).mean()}

    return Step(step, arguments)


class _Encoder(nn.Module):
    heads: int
    hidden: int
    drop: float
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, mask=None, train=True):
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.MultiHeadDotProductAttention(
            self.heads, dtype=self.dtype, dropout_rate=self.drop, deterministic=not train
        )(y, mask=mask)
        x = x + nn.Dropout(self.drop, deterministic=not train)(y)
        y = nn.LayerNorm(dtype=self.dtype)(x)
        y = nn.gelu(nn.Dense(self.hidden, dtype=self.dtype)(y))
        y = nn.Dropout(self.drop, deterministic=not train)(y)
        return x + nn.Dense(x.shape[-1], dtype=self.dtype)(y)


class _ViT(nn.Module):
    patch: int
    width: int
    layers: int
    heads: int
    classes: int

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Conv(self.width, (self.patch,) * 2, self.patch, dtype=jnp.bfloat16)(x)
        x = x.reshape(x.shape[0], -1, self.width)
        first = self.param("class", nn.initializers.zeros, (1, 1, self.width))
        x = jnp.concatenate([jnp.tile(first, (x.shape[0], 1, 1)).astype(x.dtype), x], 1)
        places = nn.initializers.normal(0.02)
        x = x + self.param("places", places, (1, *x.shape[1:])).astype(x.dtype)
        for _ in range(self.layers):
            x = _Encoder(self.heads, 4 * self.width, 0.1, jnp.bfloat16)(x, train=train)
        return nn.Dense(self.classes)(nn.LayerNorm()(x[:, 0].astype(jnp.float32)))


def vit(small: bool = False) -> Step:
    """A ViT-B/16 in bfloat16 with dropout, mixup, averaged parameters and AdamW."""
    n, size, model = (
        (8, 32, _ViT(8, 32, 2, 4, 10)) if small else (1024, 224, _ViT(16, 768, 12, 12, 1000))
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, weight_decay=0.05))

    def arguments():
        images, labels = _images(n, size, model.classes)
        params = model.init({"params": jax.random.key(0)}, images[:1], train=False)["params"]
        state = _Trained.create(
            apply_fn=model.apply, params=params, tx=tx, averaged=params, key=jax.random.key(1)
        )
        return state, images, labels

    def step(state, images, labels):
        mix, drop = jax.random.split(jax.random.fold_in(state.key, state.step))
        share = jax.random.beta(mix, 0.2, 0.2)
        images = share * images + (1 - share) * images[::-1]
        target = jax.nn.one_hot(labels, model.classes)
        target = share * target + (1 - share) * target[::-1]

        def loss(params):
            logits = state.apply_fn({"params": params}, images, rngs={"dropout": drop})
            return optax.softmax_cross_entropy(logits, target).mean()

        value, grads = jax.value_and_grad(loss)(state.params)
        state = state.apply_gradients(grads=grads)
        averaged = optax.incremental_update(state.params, state.averaged, 1e-3)
        return state.replace(averaged=averaged), value

    return Step(step, arguments)


class _Residual(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x, time):
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))
        y = y + nn.Dense(self.width)(nn.swish(time))[:, None, None]
        y = nn.Conv(self.width, (3, 3))(nn.swish(nn.GroupNorm(8)(y)))
        return y + (x if x.shape == y.shape else nn.Conv(self.width, (1, 1))(x))


class _UNet(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, x, time):
        half = self.widths[0] // 2
        angles = time[:, None] * jnp.exp(-jnp.arange(half) * (9.2 / half))
        t = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1)
        t = nn.Dense(4 * half)(nn.swish(nn.Dense(4 * half)(t)))
        channels = x.shape[-1]
        x, kept = nn.Conv(self.widths[0], (3, 3))(x), []
        for w in self.widths:
            x = _Residual(w)(x, t)
            kept.append(x)
            x = nn.Conv(w, (3, 3), 2)(x)
        b, h, w, c = x.shape
        y = nn.MultiHeadDotProductAttention(4)(nn.GroupNorm(8)(x).reshape(b, h * w, c))
        x = _Residual(c)(x + y.reshape(x.shape), t)
        for w, skip in zip(self.widths[::-1], kept[::-1], strict=True):
            x = jax.image.resize(x, (*skip.shape[:3], x.shape[-1]), "nearest")
            x = _Residual(w)(jnp.concatenate([nn.Conv(w, (3, 3))(x), skip], -1), t)
        return nn.Conv(channels, (3, 3))(nn.swish(nn.GroupNorm(8)(x)))


def diffusion_unet(small: bool = False) -> Step:
    """A denoising diffusion U-Net with attention, random times and averaged parameters."""
    n, size, widths = (4, 16, (16, 32)) if small else (256, 64, (128, 256, 384))
    model, tx = _UNet(widths), optax.adam(2e-4)
    signal = jnp.cumprod(1 - jnp.linspace(1e-4, 0.02, 1000))

    def arguments():
        images, _ = _images(n, size)
        params = model.init(jax.random.key(0), images[:1], jnp.zeros((1,)))["params"]
        state = _Trained.create(
            apply_fn=model.apply, params=params, tx=tx, averaged=params, key=jax.random.key(1)
        )
        return state, images

    def step(state, images):
        key, times, noises = jax.random.split(state.key, 3)
        time = jax.random.randint(times, (images.shape[0],), 0, 1000)
        noise = jax.random.normal(noises, images.shape)
        level = signal[time][:, None, None, None]

        def loss(params):
            noisy = jnp.sqrt(level) * images + jnp.sqrt(1 - level) * noise
            return jnp.mean((state.apply_fn({"params": params}, noisy, time) - noise) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        state = state.apply_gradients(grads=grads)
        averaged = optax.incremental_update(state.params, state.averaged, 1e-4)
        return state.replace(averaged=averaged, key=key), value

    return Step(step, arguments)


class _Bert(nn.Module):
    vocabulary: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens, segments, padding):
        embed = nn.Embed(self.vocabulary, self.width)
        x = embed(tokens) + nn.Embed(2, self.width)(segments)
        x = x + nn.Embed(512, self.width)(jnp.arange(tokens.shape[1]))
        x = nn.Dropout(0.1, deterministic=False)(nn.LayerNorm()(x))
        mask = nn.make_attention_mask(padding, padding)
        for _ in range(self.layers):
            x = _Encoder(self.heads, 4 * self.width, 0.1)(x, mask)
        y = nn.LayerNorm()(nn.gelu(nn.Dense(self.width)(x)))
        bias = self.param("bias", nn.initializers.zeros, (self.vocabulary,))
        pooled = nn.tanh(nn.Dense(self.width)(x[:, 0]))
        return embed.attend(y) + bias, nn.Dense(2)(pooled)


def bert_lamb(small: bool = False) -> Step:
    """BERT-base: masked words and next sentences, padding masks, LAMB with linear decay."""
    n, length, model = (
        (8, 16, _Bert(64, 32, 2, 4)) if small else (512, 512, _Bert(30_522, 768, 12, 12))
    )
    schedule = optax.polynomial_schedule(1e-3, 0.0, 1.0, 100_000)
    tx = optax.lamb(schedule, weight_decay=0.01)

    def arguments():
        tokens = random_tokens(n, length, model.vocabulary)
        segments = jnp.tile(jnp.arange(length) // (length // 2), (n, 1))
        batch = {
            "tokens": tokens,
            "segments": segments,
            "padding": jnp.arange(length) < length - jnp.arange(n)[:, None] % 4,
            "follows": tokens[:, 0] % 2,
        }
        names = ("params", "dropout")
        keys = dict(zip(names, jax.random.split(jax.random.key(0)), strict=True))
        params = model.init(keys, tokens[:1], segments[:1], batch["padding"][:1])["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return state, batch, jax.random.key(5)

    def step(state, batch, key):
        masks, drop = jax.random.split(key)
        hidden = jax.random.bernoulli(masks, 0.15, batch["tokens"].shape) & batch["padding"]
        tokens = jnp.where(hidden, 3, batch["tokens"])

        def loss(params):
            words, follows = state.apply_fn(
                {"params": params},
                tokens,
                batch["segments"],
                batch["padding"],
                rngs={"dropout": drop},
            )
            missed = optax.softmax_cross_entropy_with_integer_labels(words, batch["tokens"])
            missed = (missed * hidden).sum() / jnp.maximum(hidden.sum(), 1)
            return missed + cross_entropy(follows, batch["follows"])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return Step(step, arguments)


class _T5Attention(nn.Module):
    heads: int
    buckets: int = 32
    relative: bool = False

    @nn.compact
    def __call__(self, x, memory, mask=None):
        width = x.shape[-1] // self.heads
        project = partial(nn.DenseGeneral, (self.heads, width), use_bias=False)
        q, k, v = project(name="q")(x), project(name="k")(memory), project(name="v")(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k)
        if self.relative:
            apart = jnp.arange(k.shape[1]) - jnp.arange(q.shape[1])[:, None]
            near = jnp.abs(apart)
            far = 8 + (jnp.log(jnp.maximum(near, 1) / 8.0) * 4).astype(int)
            bucket = jnp.where(near < 8, near, jnp.minimum(far, 15)) + 16 * (apart > 0)
            scores = scores + nn.Embed(self.buckets, self.heads)(bucket).transpose(2, 0, 1)
        if mask is not None:
            scores = jnp.where(mask, scores, -1e9)
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
        return nn.DenseGeneral(x.shape[-1], (-2, -1), use_bias=False)(y)


class _T5(nn.Module):
    vocabulary: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, source, target):
        embed = nn.Embed(self.vocabulary, self.width)
        causal = jnp.tri(target.shape[1], dtype=bool)

        def feed(x):
            h = nn.RMSNorm()(x)
            gate = nn.gelu(nn.Dense(2 * self.width, use_bias=False)(h))
            h = gate * nn.Dense(2 * self.width, use_bias=False)(h)
            return x + nn.Dense(self.width, use_bias=False)(h)

        x = embed(source)
        for i in range(self.layers):
            h = nn.RMSNorm()(x)
            x = feed(x + _T5Attention(self.heads, relative=not i)(h, h))
        memory = nn.RMSNorm()(x)
        y = embed(target)
        for i in range(self.layers):
            h = nn.RMSNorm()(y)
            y = y + _T5Attention(self.heads, relative=not i)(h, h, causal)
            y = feed(y + _T5Attention(self.heads)(nn.RMSNorm()(y), memory))
        return embed.attend(nn.RMSNorm()(y) / jnp.sqrt(self.width))


def t5_adafactor(small: bool = False) -> Step:
    """An encoder and decoder with relative positions, gated layers, Adafactor and a z-loss."""
    n, length, model = (
        (8, 16, _T5(64, 32, 2, 4)) if small else (256, 512, _T5(32_128, 1024, 12, 16))
    )
    tx = optax.adafactor(1e-2, min_dim_size_to_factor=16)

    def arguments():
        source = random_tokens(n, length, model.vocabulary)
        target = random_tokens(n, length // 2, model.vocabulary, 9)
        params = model.init(jax.random.key(0), source[:1], target[:1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx), source, target

    def step(state, source, target):
        def loss(params):
            shifted = jnp.pad(target[:, :-1], ((0, 0), (1, 0)))
            logits = state.apply_fn({"params": params}, source, shifted)
            total = jax.nn.logsumexp(logits, -1)
            return cross_entropy(logits, target) + 1e-4 * jnp.mean(total**2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return Step(step, arguments)


class _Generator(nn.Module):
    width: int
    size: int

    @nn.compact
    def __call__(self, z):
        x = nn.Dense(self.width * 4 * (self.size // 4) ** 2)(z)
        x = x.reshape(-1, self.size // 4, self.size // 4, 4 * self.width)
        x = nn.relu(nn.BatchNorm(False)(x))
        x = nn.ConvTranspose(2 * self.width, (4, 4), (2, 2))(x)
        x = nn.relu(nn.BatchNorm(False)(x))
        return nn.tanh(nn.ConvTranspose(3, (4, 4), (2, 2))(x))


class _Critic(nn.Module):
    width: int

    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.leaky_relu(nn.Conv(self.width * 2**i, (4, 4), 2)(x), 0.2)
        return nn.Dense(1)(x.reshape(x.shape[0], -1))[:, 0]


def wasserstein_gan(small: bool = False) -> Step:
    """A WGAN with gradient penalty: five critic steps in a loop, then one of the generator."""
    n, size, width, latent = (8, 16, 8, 8) if small else (256, 64, 64, 128)
    generator, critic = _Generator(width, size), _Critic(width)
    adam = optax.adam(1e-4, 0.5, 0.9)

    def arguments():
        images, _ = _images(n, size)
        made = generator.init(jax.random.key(0), jnp.zeros((2, latent)))
        judge = critic.init(jax.random.key(1), images[:1])["params"]
        state = {
            "generator": made["params"],
            "statistics": made["batch_stats"],
            "critic": judge,
            "adams": (adam.init(made["params"]), adam.init(judge)),
        }
        return state, images, jax.random.key(2)

    def step(state, images, key):
        def fake(params, key, statistics):
            variables = {"params": params, "batch_stats": statistics}
            z = jax.random.normal(key, (images.shape[0], latent))
            return generator.apply(variables, z, mutable=["batch_stats"])

        judged = partial(critic.apply)

        def critic_loss(params, key):
            z, mix = jax.random.split(key)
            made, _ = fake(state["generator"], z, state["statistics"])
            share = jax.random.uniform(mix, (images.shape[0], 1, 1, 1))
            between = share * images + (1 - share) * made
            slope = jax.grad(lambda x: judged({"params": params}, x).sum())(between)
            norm = jnp.sqrt((slope**2).sum((1, 2, 3)) + 1e-12)
            gained = judged({"params": params}, made) - judged({"params": params}, images)
            return gained.mean() + 10 * ((norm - 1) ** 2).mean()

        def improve(carry, key):
            params, moments = carry
            value, grads = jax.value_and_grad(critic_loss)(params, key)
            updates, moments = adam.update(grads, moments)
            return (optax.apply_updates(params, updates), moments), value

        first, second = state["adams"]
        (judge, second), values = jax.lax.scan(
            improve, (state["critic"], second), jax.random.split(key, 5)
        )

        def generator_loss(params):
            made, new = fake(params, key, state["statistics"])
            return -judged({"params": judge}, made).mean(), new["batch_stats"]

        made, statistics = jax.grad(generator_loss, has_aux=True)(state["generator"])
        updates, first = adam.update(made, first)
        state = {
            "generator": optax.apply_updates(state["generator"], updates),
            "statistics": statistics,
            "critic": judge,
            "adams": (first, second),
        }
        return state, values.mean()

    return Step(step, arguments)


class _Layer(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x, _):
        causal = nn.make_causal_mask(x[..., 0])
        x = _Encoder(self.heads, 4 * x.shape[-1], 0.1, jnp.bfloat16)(x, causal)
        return x, None


class _Scanned(nn.Module):
    vocabulary: int
    width: int
    layers: int
    heads: int

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)
        x = embed(tokens)
        layers = nn.scan(
            nn.remat(_Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = layers(self.heads)(x, None)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16)(x)).astype(jnp.float32)


def gpt_scan_remat(small: bool = False) -> Step:
    """A GPT of scanned, recomputed layers in bfloat16 whose gradients add up over four calls."""
    n, length, model = (
        (8, 16, _Scanned(64, 32, 3, 4)) if small else (64, 1024, _Scanned(50_304, 1024, 24, 16))
    )
    tx = optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-4, 0.9, 0.95)), 4
    )

    def arguments():
        tokens = random_tokens(n, length + 1, model.vocabulary)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        params = model.init(keys, tokens[:1, :-1])["params"]
        state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
        return state, tokens, jax.random.key(2)

    def step(state, tokens, key):
        def loss(params):
            logits = state.apply_fn(
                {"params": params},
                tokens[:, :-1],
                rngs={"dropout": jax.random.fold_in(key, state.step)},
            )
            return cross_entropy(logits, tokens[:, 1:])

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return Step(step, arguments)


class _Experts(nn.Module):
    experts: int
    hidden: int
    factor: float = 1.25

    @nn.compact
    def __call__(self, x):
        n, width = x.shape[0] * x.shape[1], x.shape[-1]
        tokens = x.reshape(n, width)
        chances = jax.nn.softmax(nn.Dense(self.experts, use_bias=False)(tokens))
        room = max(4, int(2 * self.factor * n / self.experts))
        gates, chosen = jax.lax.top_k(chances, 2)
        gates = gates / gates.sum(-1, keepdims=True)
        wanted = jax.nn.one_hot(chosen, self.experts, dtype=jnp.int32)
        flat = wanted.transpose(1, 0, 2).reshape(2 * n, self.experts)
        place = (jnp.cumsum(flat, 0) * flat - 1).reshape(2, n, self.experts).transpose(1, 0, 2)
        kept = jax.nn.one_hot(place.max(-1), room) * gates[..., None]
        combine = jnp.einsum("nke,nkc->nec", wanted.astype(x.dtype), kept)
        sent = jnp.einsum("nec,nd->ecd", (combine > 0).astype(x.dtype), tokens)
        normal = nn.initializers.lecun_normal(batch_axis=0)
        up = self.param("up", normal, (self.experts, width, self.hidden))
        down = self.param("down", normal, (self.experts, self.hidden, width))
        h = jnp.einsum("ech,ehd->ecd", nn.gelu(jnp.einsum("ecd,edh->ech", sent, up)), down)
        share = wanted[:, 0].astype(x.dtype).mean(0)
        self.sow("losses", "balance", self.experts * (share * chances.mean(0)).sum())
        return jnp.einsum("nec,ecd->nd", combine, h).reshape(x.shape)


class _Sparse(nn.Module):
    vocabulary: int
    width: int
    layers: int
    heads: int
    experts: int

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocabulary, self.width)(tokens)
        causal = nn.make_causal_mask(tokens)
        for _ in range(self.layers):
            x = x + nn.SelfAttention(self.heads)(nn.LayerNorm()(x), mask=causal)
            x = x + _Experts(self.experts, 2 * self.width)(nn.LayerNorm()(x))
        return nn.Dense(self.vocabulary, use_bias=False)(nn.LayerNorm()(x))


def moe_top2(small: bool = False) -> Step:
    """A decoder of experts, two for a token, with capacities and a balancing loss that is sown."""
    n, length, model = (
        (8, 16, _Sparse(64, 32, 2, 4, 8)) if small else (32, 1024, _Sparse(32_000, 1024, 6, 16, 16))
    )
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.lion(1e-4, weight_decay=0.1))

    def arguments():
        tokens = random_tokens(n, length + 1, model.vocabulary)
        params = model.init(jax.random.key(0), tokens[:1, :-1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx), tokens

    def step(state, tokens):
        def loss(params):
            logits, sown = state.apply_fn({"params": params}, tokens[:, :-1], mutable=["losses"])
            balance = sum(jax.tree.leaves(sown["losses"]))
            return cross_entropy(logits, tokens[:, 1:]) + 0.01 * balance, balance

        (value, balance), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), (value, balance)

    return Step(step, arguments)


class _ActorCritic(nn.Module):
    actions: int
    width: int

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(16, (8, 8), 4)(x))
        x = nn.relu(nn.Conv(32, (4, 4), 2)(x))
        x = nn.relu(nn.Dense(self.width)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.actions)(x), nn.Dense(1)(x)[:, 0]


def ppo_epochs(small: bool = False) -> Step:
    """PPO on pixels: advantages by a backward scan, epochs and shuffled minibatches by scans."""
    horizon, n, size, model = (
        (4, 8, 16, _ActorCritic(4, 32)) if small else (128, 256, 84, _ActorCritic(6, 512))
    )
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(2.5e-4, eps=1e-5))

    def arguments():
        keys = jax.random.split(jax.random.key(3), 5)
        rollout = {
            "seen": jax.random.normal(keys[0], (horizon, n, size, size, 4)),
            "action": jax.random.randint(keys[1], (horizon, n), 0, model.actions),
            "chance": -1.0 - jax.random.uniform(keys[2], (horizon, n)),
            "reward": jax.random.normal(keys[3], (horizon, n)),
            "done": jnp.zeros((horizon, n)),
            "value": jax.random.normal(keys[4], (horizon + 1, n)),
        }
        params = model.init(jax.random.key(0), rollout["seen"][0, :1])["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx), rollout, keys[0]

    def step(state, rollout, key):
        def backward(after, x):
            reward, done, value, following = x
            delta = reward + 0.99 * following * (1 - done) - value
            after = delta + 0.99 * 0.95 * (1 - done) * after
            return after, after

        value = rollout["value"]
        x = rollout["reward"], rollout["done"], value[:-1], value[1:]
        _, gain = jax.lax.scan(backward, jnp.zeros(n), x, reverse=True)
        batch = {k: rollout[k] for k in ("seen", "action", "chance")}
        batch |= {"gain": gain, "wanted": gain + value[:-1]}
        batch = jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:]), batch)

        def loss(params, b):
            logits, value = state.apply_fn({"params": params}, b["seen"])
            chances = jax.nn.log_softmax(logits)
            taken = jnp.take_along_axis(chances, b["action"][:, None], 1)[:, 0]
            ratio = jnp.exp(taken - b["chance"])
            gain = (b["gain"] - b["gain"].mean()) / (b["gain"].std() + 1e-8)
            clipped = jnp.clip(ratio, 0.8, 1.2)
            policy = -jnp.minimum(ratio * gain, clipped * gain).mean()
            entropy = -(jnp.exp(chances) * chances).sum(-1).mean()
            return policy + 0.5 * ((value - b["wanted"]) ** 2).mean() - 0.01 * entropy

        def minibatch(state, b):
            value, grads = jax.value_and_grad(loss)(state.params, b)
            return state.apply_gradients(grads=grads), value

        def epoch(state, key):
            order = jax.random.permutation(key, horizon * n)
            parts = jax.tree.map(lambda a: a[order].reshape(4, -1, *a.shape[1:]), batch)
            return jax.lax.scan(minibatch, state, parts)

        state, values = jax.lax.scan(epoch, state, jax.random.split(key, 3))
        return state, values.mean()

    return Step(step, arguments)


class _Net(nn.Module):
    widths: tuple[int, ...]

    @nn.compact
    def __call__(self, *x):
        h = jnp.concatenate(x, -1)
        for w in self.widths[:-1]:
            h = nn.relu(nn.LayerNorm()(nn.Dense(w)(h)))
        return nn.Dense(self.widths[-1])(h)


def soft_actor_critic(small: bool = False) -> Step:
    """SAC: two critics by vmap, averaged targets, a learned temperature, three optimizers."""
    n, seen, acts, width = (16, 8, 2, 32) if small else (4096, 376, 17, 1024)
    actor, critic = _Net((width, width, 2 * acts)), _Net((width, width, 1))
    tx = optax.adam(3e-4)

    def arguments():
        keys = jax.random.split(jax.random.key(3), 4)
        batch = {
            "seen": jax.random.normal(keys[0], (n, seen)),
            "after": jax.random.normal(keys[1], (n, seen)),
            "action": jnp.tanh(jax.random.normal(keys[2], (n, acts))),
            "reward": jax.random.normal(keys[3], (n,)),
            "done": jnp.zeros((n,)),
        }
        policy = actor.init(keys[0], batch["seen"])["params"]
        first = (batch["seen"], batch["action"])
        critics = jax.vmap(lambda k: critic.init(k, *first)["params"])(keys[:2])
        params = {"actor": policy, "critics": critics, "temperature": jnp.zeros(())}
        state = {
            "params": params,
            "target": critics,
            "moments": {k: tx.init(v) for k, v in params.items()},
        }
        return state, batch, keys[3]

    def act(params, seen, key):
        mean, log = jnp.split(actor.apply({"params": params}, seen), 2, -1)
        log = jnp.clip(log, -20, 2)
        raw = mean + jnp.exp(log) * jax.random.normal(key, mean.shape)
        chance = (-0.5 * ((raw - mean) / jnp.exp(log)) ** 2 - log - 0.919).sum(-1)
        chance -= (2 * (jnp.log(2.0) - raw - jax.nn.softplus(-2 * raw))).sum(-1)
        return jnp.tanh(raw), chance

    def worth(params, seen, action):
        one = jax.vmap(lambda p: critic.apply({"params": p}, seen, action)[:, 0])
        return one(params)

    def step(state, batch, key):
        now, later = jax.random.split(key)
        params = state["params"]
        heat = jnp.exp(params["temperature"])
        action, chance = act(params["actor"], batch["after"], later)
        following = worth(state["target"], batch["after"], action).min(0) - heat * chance
        wanted = batch["reward"] + 0.99 * (1 - batch["done"]) * following

        def critics_loss(p):
            return ((worth(p, batch["seen"], batch["action"]) - wanted) ** 2).mean()

        def actor_loss(p):
            action, chance = act(p, batch["seen"], now)
            value = worth(params["critics"], batch["seen"], action).min(0)
            return (heat * chance - value).mean(), chance

        grads = {"critics": jax.grad(critics_loss)(params["critics"])}
        grads["actor"], chance = jax.grad(actor_loss, has_aux=True)(params["actor"])
        short = jax.lax.stop_gradient(chance - acts).mean()
        grads["temperature"] = jax.grad(lambda t: -jnp.exp(t) * short)(params["temperature"])
        new, moments = {}, {}
        for name, g in grads.items():
            updates, moments[name] = tx.update(g, state["moments"][name])
            new[name] = optax.apply_updates(params[name], updates)
        target = optax.incremental_update(new["critics"], state["target"], 0.005)
        return {"params": new, "target": target, "moments": moments}, wanted.mean()

    return Step(step, arguments)
