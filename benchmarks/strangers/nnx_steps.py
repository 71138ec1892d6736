"""Flax NNX: stateful modules, split and merged around a pure step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from . import Step, cross_entropy, random_tokens


def _pure(
    build: Callable[[], Any], data: Callable[[], tuple[Any, ...]], body: Callable[..., Any]
) -> Step:
    """A step over the state of what `build` makes; `body(objects, *data)` changes the objects."""
    definition: list[Any] = []

    def arguments():
        graph, state = nnx.split(build())
        definition[:] = [graph]
        return state, *data()

    def step(state, *batch):
        objects = nnx.merge(definition[0], state)
        told = body(objects, *batch)
        return nnx.state(objects), told

    return Step(step, arguments)


class _Block(nnx.Module):
    def __init__(self, width, heads, drop, dtype, rngs):
        kw: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
        self.before, self.between = nnx.LayerNorm(width, **kw), nnx.LayerNorm(width, **kw)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, **kw)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, **kw),
            nnx.Linear(4 * width, width, **kw),
        )
        self.drop = nnx.Dropout(drop, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.drop(self.attention(self.before(x), mask=mask))
        return x + self.drop(self.down(nnx.gelu(self.up(self.between(x)))))


class _GPT(nnx.Module):
    def __init__(self, vocabulary, width, layers, heads, length, rngs):
        self.embed = nnx.Embed(vocabulary, width, dtype=jnp.bfloat16, rngs=rngs)
        self.places = nnx.Embed(length, width, dtype=jnp.bfloat16, rngs=rngs)
        self.blocks = nnx.List(
            [_Block(width, heads, 0.1, jnp.bfloat16, rngs) for _ in range(layers)]
        )
        self.norm = nnx.LayerNorm(width, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.places(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = nnx.remat(lambda b, x: b(x, mask))(block, x)
        return self.embed.attend(self.norm(x)).astype(jnp.float32)


def gpt_muon(small: bool = False) -> Step:
    """A GPT in bfloat16 with dropout and recomputed blocks: Muon for matrices, AdamW for others."""
    n, length, sizes = (
        (8, 16, (64, 32, 2, 4, 16)) if small else (64, 1024, (50_304, 768, 12, 12, 1024))
    )

    def build():
        model = _GPT(*sizes, rngs=nnx.Rngs(0))
        tx = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(0.02, ns_steps=5))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    def body(objects, tokens):
        model, optimizer = objects
        value, grads = nnx.value_and_grad(
            lambda m: cross_entropy(m(tokens[:, :-1]), tokens[:, 1:])
        )(model)
        optimizer.update(model, grads)
        return value

    return _pure(build, lambda: (random_tokens(n, length + 1, sizes[0]),), body)


class _Llama(nnx.Module):
    def __init__(self, width, heads, groups, hidden, rank, rngs):
        self.heads, self.groups, self.head = heads, groups, width // heads
        kw: dict[str, Any] = {"use_bias": False, "param_dtype": jnp.bfloat16, "rngs": rngs}
        self.first, self.second = nnx.RMSNorm(width, rngs=rngs), nnx.RMSNorm(width, rngs=rngs)
        self.q = nnx.LoRALinear(width, width, lora_rank=rank, **kw)
        self.k = nnx.Linear(width, groups * self.head, **kw)
        self.v = nnx.LoRALinear(width, groups * self.head, lora_rank=rank, **kw)
        self.o = nnx.Linear(width, width, **kw)
        self.gate, self.up = nnx.Linear(width, hidden, **kw), nnx.Linear(width, hidden, **kw)
        self.down = nnx.Linear(hidden, width, **kw)

    def turned(self, x):
        half = self.head // 2
        rate = 10_000.0 ** (-jnp.arange(half) / half)
        angle = jnp.arange(x.shape[1])[:, None, None] * rate
        a, b = jnp.split(x.astype(jnp.float32), 2, -1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)

    def __call__(self, x):
        b, t, w = x.shape
        h = self.first(x)
        q = self.turned(self.q(h).reshape(b, t, self.heads, self.head))
        k = self.turned(self.k(h).reshape(b, t, self.groups, self.head))
        v = self.v(h).reshape(b, t, self.groups, self.head)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.reshape(b, t, w))
        h = self.second(x)
        return x + self.down(nnx.silu(self.gate(h)) * self.up(h))


def llama_lora(small: bool = False) -> Step:
    """Low-rank adapters of a frozen Llama in bfloat16: grouped heads, rotary places, remat."""
    n, length, sizes, layers, vocabulary = (
        (8, 16, (32, 4, 2, 64, 2), 2, 64)
        if small
        else (32, 2048, (2048, 32, 8, 8192, 16), 16, 128_256)
    )

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(vocabulary, sizes[0], param_dtype=jnp.bfloat16, rngs=rngs)
            self.layers = nnx.List([_Llama(*sizes, rngs=rngs) for _ in range(layers)])
            self.norm = nnx.RMSNorm(sizes[0], rngs=rngs)

        def __call__(self, tokens):
            x = self.embed(tokens)
            for layer in self.layers:
                x = nnx.remat(lambda m, x: m(x))(layer, x)
            return self.embed.attend(self.norm(x)).astype(jnp.float32)

    def build():
        model = Model(nnx.Rngs(0))
        tx = optax.adamw(optax.linear_schedule(2e-4, 0.0, 1000))
        return model, nnx.Optimizer(model, tx, wrt=nnx.LoRAParam)

    def body(objects, tokens):
        model, optimizer = objects
        adapters = nnx.DiffState(0, nnx.LoRAParam)
        value, grads = nnx.value_and_grad(
            lambda m: cross_entropy(m(tokens[:, :-1]), tokens[:, 1:]), argnums=adapters
        )(model)
        optimizer.update(model, grads)
        return value

    return _pure(build, lambda: (random_tokens(n, length + 1, vocabulary),), body)


class _Inverted(nnx.Module):
    """Depthwise convolutions between pointwise ones, with squeezed channels as gates."""

    def __init__(self, width, after, stride, rngs):
        hidden = 4 * width
        self.widen = nnx.Conv(width, hidden, (1, 1), use_bias=False, rngs=rngs)
        self.deep = nnx.Conv(
            hidden,
            hidden,
            (3, 3),
            strides=stride,
            feature_group_count=hidden,
            use_bias=False,
            rngs=rngs,
        )
        self.squeeze = nnx.Linear(hidden, width // 4, rngs=rngs)
        self.excite = nnx.Linear(width // 4, hidden, rngs=rngs)
        self.narrow = nnx.Conv(hidden, after, (1, 1), use_bias=False, rngs=rngs)
        self.norms = nnx.List([nnx.BatchNorm(c, rngs=rngs) for c in (hidden, hidden, after)])

    def __call__(self, x):
        y = nnx.silu(self.norms[0](self.widen(x)))
        y = nnx.silu(self.norms[1](self.deep(y)))
        gate = nnx.sigmoid(self.excite(nnx.silu(self.squeeze(y.mean((1, 2))))))
        y = self.norms[2](self.narrow(y * gate[:, None, None]))
        return x + y if x.shape == y.shape else y


def efficientnet(small: bool = False) -> Step:
    """Depthwise convolutions with batch norms, gates and RMSProp, as EfficientNets have them."""
    n, size, stages, classes = (
        (8, 16, ((8, 1), (16, 2)), 10)
        if small
        else (1024, 224, ((16, 1), (24, 2), (40, 2), (80, 3), (112, 3), (192, 4)), 1000)
    )

    class Model(nnx.Module):
        def __init__(self, rngs):
            width = stages[0][0]
            self.enter = nnx.Conv(3, width, (3, 3), strides=2, rngs=rngs)
            blocks = []
            for after, count in stages:
                for i in range(count):
                    blocks.append(_Inverted(width, after, 1 if i else 2, rngs))
                    width = after
            self.blocks = nnx.List(blocks)
            self.leave = nnx.Linear(width, classes, rngs=rngs)
            self.drop = nnx.Dropout(0.2, rngs=rngs)

        def __call__(self, x):
            x = self.enter(x)
            for block in self.blocks:
                x = block(x)
            return self.leave(self.drop(x.mean((1, 2))))

    def build():
        model = Model(nnx.Rngs(0))
        tx = optax.rmsprop(optax.exponential_decay(0.016, 2400, 0.97), 0.9, 1e-3, momentum=0.9)
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param), metrics

    def data():
        images = jax.random.normal(jax.random.key(1), (n, size, size, 3))
        return images, jax.random.randint(jax.random.key(2), (n,), 0, classes)

    def body(objects, images, labels):
        model, optimizer, metrics = objects

        def loss(model):
            logits = model(images)
            return cross_entropy(logits, labels), logits

        (value, logits), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        metrics.update(loss=value, logits=logits, labels=labels)
        optimizer.update(model, grads)
        return value

    return _pure(build, data, body)


def seq2seq_gru(small: bool = False) -> Step:
    """A bidirectional GRU encoder and an attending GRU decoder, padded, with AMSGrad."""
    n, length, vocabulary, width = (8, 8, 32, 16) if small else (512, 64, 16_000, 512)

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.source = nnx.Embed(vocabulary, width, rngs=rngs)
            self.target = nnx.Embed(vocabulary, width, rngs=rngs)
            self.encode = nnx.Bidirectional(
                nnx.RNN(nnx.GRUCell(width, width, rngs=rngs), rngs=rngs),
                nnx.RNN(nnx.GRUCell(width, width, rngs=rngs), rngs=rngs),
            )
            self.narrow = nnx.Linear(2 * width, width, rngs=rngs)
            self.decode = nnx.RNN(nnx.GRUCell(width, width, rngs=rngs), rngs=rngs)
            self.leave = nnx.Linear(2 * width, vocabulary, rngs=rngs)

        def __call__(self, source, lengths, target):
            memory = self.narrow(self.encode(self.source(source), seq_lengths=lengths))
            y = self.decode(self.target(target), initial_carry=memory[:, -1])
            scores = jnp.einsum("btd,bsd->bts", y, memory) / jnp.sqrt(width)
            padded = jnp.arange(source.shape[1]) >= lengths[:, None, None]
            shares = jax.nn.softmax(jnp.where(padded, -1e9, scores))
            seen = jnp.einsum("bts,bsd->btd", shares, memory)
            return self.leave(jnp.concatenate([y, seen], -1))

    def build():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.amsgrad(1e-3), wrt=nnx.Param)

    def data():
        lengths = length - jnp.arange(n) % 3
        return (
            random_tokens(n, length, vocabulary),
            lengths,
            random_tokens(n, length, vocabulary, 9),
        )

    def body(objects, source, lengths, target):
        model, optimizer = objects

        def loss(model):
            logits = model(source, lengths, target[:, :-1])
            wrong = optax.softmax_cross_entropy_with_integer_labels(logits, target[:, 1:])
            counts = target[:, 1:] > 0
            return (wrong * counts).sum() / counts.sum()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return _pure(build, data, body)


def double_dqn(small: bool = False) -> Step:
    """Double Q-learning from a replay buffer on the device: drawn, learnt, priorities written."""
    n, kept, size = (8, 64, 16) if small else (1024, 65_536, 84)

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = nnx.Conv(4, 32, (8, 8), strides=4, rngs=rngs)
            self.b = nnx.Conv(32, 64, (4, 4), strides=2, rngs=rngs)
            flat = 64 * ((size + 7) // 8) ** 2
            self.value = nnx.Sequential(
                nnx.Linear(flat, 512, rngs=rngs), nnx.relu, nnx.Linear(512, 1, rngs=rngs)
            )
            self.gain = nnx.Sequential(
                nnx.Linear(flat, 512, rngs=rngs), nnx.relu, nnx.Linear(512, 6, rngs=rngs)
            )

        def __call__(self, x):
            x = nnx.relu(self.b(nnx.relu(self.a(x / 255.0)))).reshape(x.shape[0], -1)
            gain = self.gain(x)
            return self.value(x) + gain - gain.mean(-1, keepdims=True)

    def build():
        model, target = Net(nnx.Rngs(0)), Net(nnx.Rngs(0))
        tx = optax.chain(optax.clip_by_global_norm(10.0), optax.adam(1e-4))
        replay = nnx.Dict(
            seen=nnx.Variable(jnp.zeros((kept, size, size, 4), jnp.uint8)),
            action=nnx.Variable(jnp.zeros(kept, jnp.int32)),
            reward=nnx.Variable(jnp.zeros(kept)),
            weight=nnx.Variable(jnp.ones(kept)),
        )
        return model, target, nnx.Optimizer(model, tx, wrt=nnx.Param), replay

    def body(objects, key):
        model, target, optimizer, replay = objects
        weight = replay["weight"][...]
        drawn = jax.random.categorical(key, jnp.log(weight), shape=(n,))
        seen = replay["seen"][...][drawn].astype(jnp.float32)
        after = replay["seen"][...][(drawn + 1) % kept].astype(jnp.float32)
        action, reward = replay["action"][...][drawn], replay["reward"][...][drawn]
        best = model(after).argmax(-1)
        wanted = reward + 0.99 * jnp.take_along_axis(target(after), best[:, None], 1)[:, 0]

        def loss(model):
            taken = jnp.take_along_axis(model(seen), action[:, None], 1)[:, 0]
            wrong = taken - jax.lax.stop_gradient(wanted)
            share = 1.0 / (weight[drawn] / weight.sum())
            return (share / share.max() * optax.huber_loss(wrong)).mean(), wrong

        (value, wrong), grads = nnx.value_and_grad(loss, has_aux=True)(model)
        optimizer.update(model, grads)
        replay["weight"][...] = weight.at[drawn].set(jnp.abs(wrong) + 1e-3)
        new = jax.tree.map(
            lambda a, b: 0.005 * a + 0.995 * b, nnx.state(model, nnx.Param), nnx.state(target)
        )
        nnx.update(target, new)
        return value

    return _pure(build, lambda: (jax.random.key(4),), body)


def ensemble(small: bool = False) -> Step:
    """Sixteen networks at once, by vmap over modules, with bootstrapped batches; NAdam."""
    members, n, width = (4, 8, 16) if small else (16, 8192, 1024)

    def build():
        @nnx.split_rngs(splits=members)
        @nnx.vmap
        def many(rngs):
            return nnx.Sequential(
                nnx.Linear(32, width, rngs=rngs),
                nnx.LayerNorm(width, rngs=rngs),
                nnx.swish,
                nnx.Linear(width, width, rngs=rngs),
                nnx.swish,
                nnx.Linear(width, 2, rngs=rngs),
            )

        model = many(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.nadam(1e-3), wrt=nnx.Param)

    def data():
        x = jax.random.normal(jax.random.key(0), (n, 32))
        return x, jnp.sin(x.sum(-1)), jax.random.key(1)

    def body(objects, x, y, key):
        model, optimizer = objects
        chosen = jax.random.randint(key, (members, n), 0, n)

        def loss(model):
            out = nnx.vmap(lambda m, x: m(x))(model, x[chosen])
            mean, log = out[..., 0], jax.nn.softplus(out[..., 1])
            return (0.5 * ((y[chosen] - mean) / (log + 1e-3)) ** 2 + jnp.log(log + 1e-3)).mean()

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    return _pure(build, data, body)


def vq_vae(small: bool = False) -> Step:
    """A VQ-VAE: nearest codes, straight-through gradients, a codebook of moving averages."""
    n, size, codes, width = (8, 16, 16, 16) if small else (512, 64, 1024, 128)

    class Model(nnx.Module):
        def __init__(self, rngs):
            kw: dict[str, Any] = {"strides": 2, "rngs": rngs}
            self.a, self.b = (
                nnx.Conv(3, width, (4, 4), **kw),
                nnx.Conv(width, width, (4, 4), **kw),
            )
            self.c = nnx.ConvTranspose(width, width, (4, 4), **kw)
            self.d = nnx.ConvTranspose(width, 3, (4, 4), **kw)
            self.codes = nnx.BatchStat(jax.random.normal(rngs.params(), (codes, width)))
            self.counts = nnx.BatchStat(jnp.ones(codes))
            self.sums = nnx.BatchStat(self.codes[...])

        def __call__(self, x):
            z = self.b(nnx.relu(self.a(x)))
            flat = z.reshape(-1, width)
            book = self.codes[...]
            apart = (flat**2).sum(-1, keepdims=True) - 2 * flat @ book.T + (book**2).sum(-1)
            nearest = apart.argmin(-1)
            chosen = jax.nn.one_hot(nearest, codes)
            flat = jax.lax.stop_gradient(flat)
            self.counts[...] = 0.99 * self.counts[...] + 0.01 * chosen.sum(0)
            self.sums[...] = 0.99 * self.sums[...] + 0.01 * chosen.T @ flat
            self.codes[...] = self.sums[...] / (self.counts[...] + 1e-5)[:, None]
            q = book[nearest].reshape(z.shape)
            through = z + jax.lax.stop_gradient(q - z)
            return self.d(nnx.relu(self.c(through))), jnp.mean((z - jax.lax.stop_gradient(q)) ** 2)

    def build():
        model = Model(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adam(2e-4), wrt=nnx.Param)

    def body(objects, x):
        model, optimizer = objects

        def loss(model):
            made, apart = model(x)
            return jnp.mean((made - x) ** 2) + 0.25 * apart

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    def data():
        return (jax.random.normal(jax.random.key(1), (n, size, size, 3)),)

    return _pure(build, data, body)
