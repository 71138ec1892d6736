"""The kernel `largest`: what runs it, what it must agree with, and a program that gains by it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from tapestry_egg.metakernels.registry import add_templates
from tapestry_egg.reference.kernels import add_reference
from tapestry_egg.tracing.codec import register_primitive

HERE = Path(__file__).parent
RULES = HERE / "largest-rules.yaml"


def run(x: jax.Array) -> jax.Array:
    return jnp.max(x, axis=-1, keepdims=True)


largest = Primitive("largest")
largest.def_impl(run)
largest.def_abstract_eval(lambda x: x.update(shape=(*x.shape[:-1], 1)))
mlir.register_lowering(largest, mlir.lower_fun(run, multiple_results=False))

register_primitive(largest)
add_templates(HERE / "largest-template.yaml")
add_reference("largest", lambda call: call.operands[0].max(axis=-1, keepdims=True))


def program(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.sort(x)[:, -1:] * w


def example() -> tuple[object, tuple[jax.ShapeDtypeStruct, ...]]:
    return program, (
        jax.ShapeDtypeStruct((4096, 8192), jnp.float32),
        jax.ShapeDtypeStruct((4096, 64), jnp.float32),
    )
