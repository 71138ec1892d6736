"""Llama-1B on eight and Llama-3-8B on 64 H100, with parameters in float32 and products in bfloat16.

    python -m benchmarks.bench_llama 1B          # 16 sequences of 4096
    python -m benchmarks.bench_llama 8B          # 64 sequences of 8192, about half a minute

Attention is plain einsums, its softmax in float32; layers run in a scan, rematerialised. Nothing is
allocated: the fronts are what is measured, and when there is a first plan: its gap is to what is
proven by then of the forms and meshes that were looked at.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

import tapestry_egg as te
from benchmarks.zoo import ShapesOnly
from models import llama

Params = dict[str, Any]
WORK = 5.0
_BOTH = {"groups": 8, "heads": 32, "vocabulary": 128256}
SIZES = {
    "1B": {"layers": 16, "width": 2048, "hidden": 8192, "batch": 16, "sequence": 4096, **_BOTH},
    "8B": {"layers": 32, "width": 4096, "hidden": 14336, "batch": 64, "sequence": 8192, **_BOTH},
}
TARGETS = {"1B": "h100:8", "8B": "h100:8x8"}


def attention(p: Params, x: jax.Array) -> jax.Array:
    """Causal attention in grouped heads; of 16-bit operands, with scores in float32."""
    batch, sequence, _ = x.shape
    q = llama.rotary(jnp.einsum("bsd,dhk->bshk", x, p["wq"])).astype(x.dtype)
    k = llama.rotary(jnp.einsum("bsd,dgk->bsgk", x, p["wk"])).astype(x.dtype)
    v = jnp.einsum("bsd,dgk->bsgk", x, p["wv"])
    heads, groups, width = q.shape[2], k.shape[2], q.shape[3]
    q = q.reshape(batch, sequence, groups, heads // groups, width)
    scores = jnp.einsum("bqgrk,btgk->bgrqt", q, k).astype(jnp.float32) / width**0.5
    causal = jnp.arange(sequence)[:, None] >= jnp.arange(sequence)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1).astype(x.dtype)
    out = jnp.einsum("bgrqt,btgk->bqgrk", weights, v)
    return jnp.einsum("bshk,hkd->bsd", out.reshape(batch, sequence, heads, width), p["wo"])


def loss(params: Params, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """Mean cross-entropy, in nats per token; logits in float32."""
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params)
    with mock.patch.object(llama, "attention", attention):
        logits = llama.forward(half, tokens, remat=True).astype(jnp.float32)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def step(params: Params, tokens: jax.Array, targets: jax.Array) -> tuple[Params, jax.Array]:
    """A step of gradient descent."""
    value, grads = jax.value_and_grad(loss)(params, tokens, targets)
    return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value


def program(name: str) -> te.Program:
    """The step traced at its full size, with the parameters donated."""

    def shapes() -> Any:
        return llama.example(remat=True, **SIZES[name])[1]

    with mock.patch.object(np.random, "default_rng", ShapesOnly):
        params, *data = jax.eval_shape(shapes)
    return te.trace(step, params, *data, donate_argnums=0, name=f"llama-{name}")


class FirstPlan:
    """Progress that remembers when it was told of a plan for the first time."""

    def __init__(self) -> None:
        self.begin, self.told = time.perf_counter(), ""

    def __call__(self, phase: te.Phase) -> None:
        if not self.told and phase.text.startswith("front "):
            self.told = f"first plan after {self.spent()}: {phase.text}"

    def spent(self) -> str:
        """Seconds since it began, and those of a processor that this process has had in all."""
        return f"{time.perf_counter() - self.begin:.1f} s ({time.process_time():.1f} of CPU)"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", choices=[*SIZES], default=["1B"])
    parser.add_argument("--work", type=float, default=WORK, help=f"of the search ({WORK:g})")
    given = parser.parse_args()
    for name in given.names:
        first, settings = FirstPlan(), te.Settings(work=given.work)
        front = te.optimize(program(name), TARGETS[name], settings=settings, on_progress=first)
        print(first.told, f"whole front after {first.spent()}", front, sep="\n")


if __name__ == "__main__":
    main()
