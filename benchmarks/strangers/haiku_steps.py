"""Haiku: transformed functions, states beside parameters, recurrent cores, graph networks."""

from __future__ import annotations

import haiku as hk
import jax
import jax.numpy as jnp
import jraph
import optax

from . import Step, cross_entropy, random_tokens


def scaled_transformer(small: bool = False) -> Step:
    """A float16 transformer with a dynamic loss scale: steps that overflow are skipped."""
    n, length, vocabulary, width, layers, heads = (
        (8, 16, 64, 32, 2, 4) if small else (64, 1024, 32_000, 768, 12, 12)
    )

    def network(tokens):
        x = hk.Embed(vocabulary, width)(tokens).astype(jnp.float16)
        causal = jnp.tri(tokens.shape[1])[None, None]
        start = hk.initializers.VarianceScaling(0.1)

        def norm(x):
            return hk.LayerNorm(-1, True, True)(x.astype(jnp.float32)).astype(x.dtype)

        for _ in range(layers):
            h = norm(x)
            attend = hk.MultiHeadAttention(heads, width // heads, w_init=start, model_size=width)
            y = attend(h, h, h, causal)
            x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
            y = jax.nn.gelu(hk.Linear(4 * width, w_init=start)(norm(x)))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, hk.Linear(width, w_init=start)(y))
        return hk.Linear(vocabulary)(norm(x)).astype(jnp.float32)

    model, tx = hk.transform(network), optax.adamw(3e-4)

    def arguments():
        tokens = random_tokens(n, length + 1, vocabulary)
        params = model.init(jax.random.PRNGKey(0), tokens[:1, :-1])
        scale = {"scale": jnp.float32(2.0**15), "good": jnp.int32(0)}
        return (params, tx.init(params), scale), tokens, jax.random.PRNGKey(1)

    def step(state, tokens, key):
        params, moments, scale = state

        def loss(params):
            half = jax.tree.map(lambda p: p.astype(jnp.float16), params)
            logits = model.apply(half, key, tokens[:, :-1])
            return cross_entropy(logits, tokens[:, 1:]) * scale["scale"]

        value, grads = jax.value_and_grad(loss)(params)
        grads = jax.tree.map(lambda g: g / scale["scale"], grads)
        finite = jnp.all(jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]))
        updates, new = tx.update(grads, moments, params)
        chosen = (optax.apply_updates(params, updates), new)
        params, moments = jax.tree.map(
            lambda a, b: jnp.where(finite, a, b), chosen, (params, moments)
        )
        good = jnp.where(finite, scale["good"] + 1, 0)
        grown = jnp.where(good >= 2000, 2 * scale["scale"], scale["scale"])
        scale = {
            "scale": jnp.where(finite, grown, jnp.maximum(scale["scale"] / 2, 1.0)),
            "good": good % 2000,
        }
        return (params, moments, scale), (value / scale["scale"], optax.global_norm(grads))

    return Step(step, arguments)


def impala(small: bool = False) -> Step:
    """An IMPALA learner: residual convolutions, an LSTM that resets, V-trace corrections."""
    length, n, size, channels = (6, 4, 16, (8,)) if small else (80, 64, 64, (32, 64, 64))
    actions = 6

    def network(seen, before, reward, first):
        def look(x):
            x = x.astype(jnp.float32) / 255
            for c in channels:
                x = hk.max_pool(hk.Conv2D(c, 3)(x), (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
                for _ in range(2):
                    y = hk.Conv2D(c, 3)(jax.nn.relu(x))
                    x = x + hk.Conv2D(c, 3)(jax.nn.relu(y))
            return jax.nn.relu(hk.Linear(64)(hk.Flatten()(jax.nn.relu(x))))

        h = hk.BatchApply(look)(seen)
        acted = jax.nn.one_hot(before, actions)
        h = jnp.concatenate([h, acted, jnp.clip(reward, -1, 1)[..., None]], -1)
        core = hk.ResetCore(hk.LSTM(64))
        h, _ = hk.dynamic_unroll(core, (h, first), core.initial_state(seen.shape[1]))
        return hk.Linear(actions)(h), hk.Linear(1)(h)[..., 0]

    model = hk.without_apply_rng(hk.transform(network))
    tx = optax.chain(optax.clip_by_global_norm(40.0), optax.rmsprop(4.8e-4, 0.99, 0.1))

    def arguments():
        keys = jax.random.split(jax.random.key(3), 4)
        shape = (length + 1, n)
        batch = {
            "seen": jax.random.randint(keys[0], (*shape, size, size, 3), 0, 255, jnp.uint8),
            "action": jax.random.randint(keys[1], shape, 0, actions),
            "reward": jax.random.normal(keys[2], shape),
            "first": jnp.zeros(shape, bool),
            "logits": jax.random.normal(keys[3], (*shape, actions)),
        }
        some = jax.tree.map(lambda x: x[:2, :1], batch)
        inputs = (some["seen"], some["action"], some["reward"], some["first"])
        params = model.init(jax.random.PRNGKey(0), *inputs)
        return (params, tx.init(params)), batch

    def step(state, batch):
        params, moments = state

        def loss(params):
            logits, value = model.apply(
                params, batch["seen"], batch["action"], batch["reward"], batch["first"]
            )
            action = batch["action"][1:, :, None]
            chance = jax.nn.log_softmax(logits[:-1])
            taken = jnp.take_along_axis(chance, action, -1)[..., 0]
            drawn = jax.nn.log_softmax(batch["logits"][:-1])
            drawn = jnp.take_along_axis(drawn, action, -1)[..., 0]
            ratio = jnp.minimum(1.0, jnp.exp(jax.lax.stop_gradient(taken) - drawn))
            discount = 0.99 * ~batch["first"][1:]
            delta = ratio * (batch["reward"][1:] + discount * value[1:] - value[:-1])

            def backward(after, x):
                delta, discount, ratio = x
                after = delta + discount * ratio * after
                return after, after

            given = jax.lax.stop_gradient((delta, discount, ratio))
            _, gain = jax.lax.scan(backward, jnp.zeros(n), given, reverse=True)
            wanted = jax.lax.stop_gradient(gain + value[:-1])
            policy = -(taken * jax.lax.stop_gradient(ratio * delta)).sum()
            entropy = -(jnp.exp(chance) * chance).sum()
            return policy + 0.5 * ((wanted - value[:-1]) ** 2).sum() - 0.01 * entropy

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)


def graph_network(small: bool = False) -> Step:
    """Encode, process, decode on a padded batch of graphs with jraph; Adam, clipped."""
    nodes, edges, graphs, width, rounds = (
        (24, 64, 4, 8, 2) if small else (65_536, 262_144, 256, 128, 8)
    )

    def network(graph):
        def mlp(inputs):
            h = hk.nets.MLP([width, width], activation=jax.nn.silu)(inputs)
            return hk.LayerNorm(-1, True, True)(h)

        @jraph.concatenated_args
        def node(x):
            return mlp(x)

        @jraph.concatenated_args
        def edge(x):
            return mlp(x)

        @jraph.concatenated_args
        def whole(x):
            return mlp(x)

        embed = jraph.GraphMapFeatures(hk.Linear(width), hk.Linear(width), hk.Linear(width))
        graph = embed(graph)
        for _ in range(rounds):
            new = jraph.GraphNetwork(edge, node, whole)(graph)
            graph = new._replace(
                nodes=graph.nodes + new.nodes,
                edges=graph.edges + new.edges,
                globals=graph.globals + new.globals,
            )
        return hk.Linear(1)(graph.globals)[:, 0]

    model = hk.without_apply_rng(hk.transform(network))
    tx = optax.chain(optax.adaptive_grad_clip(0.1), optax.adam(1e-4))

    def arguments():
        keys = jax.random.split(jax.random.key(3), 4)
        graph = jraph.GraphsTuple(
            nodes=jax.random.normal(keys[0], (nodes, 9)),
            edges=jax.random.normal(keys[1], (edges, 4)),
            senders=jax.random.randint(keys[2], (edges,), 0, nodes),
            receivers=jax.random.randint(keys[3], (edges,), 0, nodes),
            n_node=jnp.full(graphs, nodes // graphs),
            n_edge=jnp.full(graphs, edges // graphs),
            globals=jnp.zeros((graphs, 1)),
        )
        params = model.init(jax.random.PRNGKey(0), graph)
        return (params, tx.init(params)), graph, jax.random.normal(keys[0], (graphs,))

    def step(state, graph, wanted):
        params, moments = state

        def loss(params):
            kept = jraph.get_graph_padding_mask(graph)
            wrong = jnp.abs(model.apply(params, graph) - wanted)
            return (wrong * kept).sum() / kept.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)


def graph_attention(small: bool = False) -> Step:
    """Attention over the edges of one large graph: softmaxes of segments, several heads."""
    nodes, edges, width, heads = (24, 96, 8, 2) if small else (169_343, 1_166_243, 256, 4)
    classes = 40

    def network(x, senders, receivers):
        for _ in range(3):
            h = hk.Linear(heads * width, with_bias=False)(x).reshape(nodes, heads, width)
            ends = [hk.Linear(heads, with_bias=False)(x) for _ in range(2)]
            score = jax.nn.leaky_relu(ends[0][senders] + ends[1][receivers], 0.2)
            share = jraph.segment_softmax(score, receivers, nodes)
            sent = h[senders] * share[..., None]
            x = jax.nn.elu(jraph.segment_sum(sent, receivers, nodes).reshape(nodes, -1))
        return hk.Linear(classes)(x)

    model = hk.without_apply_rng(hk.transform(network))
    tx = optax.adamw(5e-3, weight_decay=5e-4)

    def arguments():
        keys = jax.random.split(jax.random.key(3), 4)
        x = jax.random.normal(keys[0], (nodes, 128))
        senders, receivers = (jax.random.randint(k, (edges,), 0, nodes) for k in keys[1:3])
        labels = jax.random.randint(keys[3], (nodes,), 0, classes)
        params = model.init(jax.random.PRNGKey(0), x, senders, receivers)
        known = jnp.arange(nodes) % 2 == 0
        return (params, tx.init(params)), x, senders, receivers, labels, known

    def step(state, x, senders, receivers, labels, known):
        params, moments = state

        def loss(params):
            logits = model.apply(params, x, senders, receivers)
            wrong = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
            return jnp.where(known, wrong, 0).sum() / known.sum()

        value, grads = jax.value_and_grad(loss)(params)
        updates, moments = tx.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return Step(step, arguments)
