"""Forms of programs, and what they compute when JAX compiles them for one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.forms import forms
from tapestry_egg.rules.language.book import DEFAULT_BOOKS, load_books
from tapestry_egg.tracing.codec import decode_params, primitive
from tapestry_egg.tracing.trace import trace

Array = Any
BOOKS = load_books(DEFAULT_BOOKS)


def kernels(form: Form | te.Plan) -> set[str]:
    return {op.kernel for op in form.graph.operations}


def types(*shapes: tuple[int, ...], dtype: Any = jnp.float32) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(s, dtype) for s in shapes]


def draw(shapes: Sequence[jax.ShapeDtypeStruct], below: int = 2) -> list[Array]:
    """Arrays of these types: normal numbers, and integers below a bound."""
    rng = np.random.default_rng(0)
    return [
        jnp.asarray(
            rng.integers(0, below, s.shape) if s.dtype == jnp.int32 else rng.normal(size=s.shape),
            s.dtype,
        )
        for s in shapes
    ]


def form_of(function: Callable[..., Any], *args: Any, target: str = "h100:1") -> Form:
    return forms(trace(function, *args).graph, BOOKS, load_target(target))[:2][-1]


def lean_form_of(function: Callable[..., Any], *args: Any, target: str = "h100:1") -> Form:
    """The form that holds less memory than those that take less time."""
    found = forms(trace(function, *args).graph, BOOKS, load_target(target), lean=True)
    (form,) = [f for f in found if f.slower]
    return form


def run(form: Form, *inputs: Array) -> list[Array]:
    """A form's results on one device."""
    results: list[Array] = compiled(form, *inputs)(*inputs)
    return results


def compiled(form: Form, *inputs: Any) -> Any:
    """A form compiled for one device, for inputs of these types."""
    graph = form.graph

    def function(*given: Array) -> list[Array]:
        at = dict(zip(graph.inputs, given, strict=True))
        at.update({v: jnp.asarray(a) for v, a in graph.constants.items()})
        for op in graph.operations:
            kernel = primitive(op.kernel)
            params = kernel.get_bind_params(decode_params(op.params, kernel=op.kernel))
            functions, bound = params if isinstance(params, tuple) else ((), params)
            made = kernel.bind(*functions, *(at[v] for v in op.inputs), **bound)
            at.update(zip(op.outputs, made if kernel.multiple_results else [made], strict=True))
        return [at[v] for v in graph.outputs]

    return jax.jit(function).lower(*inputs).compile()
