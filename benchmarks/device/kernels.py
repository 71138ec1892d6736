"""Small programs of one kernel or few, which `bench_device` plans and runs: products of matrices,
passes through memory, chains of tiny kernels, and fused attention.

Each is a function and the types of its arguments; arrays are drawn where it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

#: b × m × k by b × k × n, per dtype: in the package's table, between its rows, and beyond them.
_PRODUCTS = (
    (1, 512, 512, 512), (1, 1024, 4096, 1024), (1, 4096, 4096, 4096), (4, 2048, 1024, 2048),
    (1, 2048, 512, 4096), (1, 768, 768, 3072), (1, 3000, 1100, 700), (12, 1024, 1024, 64),
    (192, 1024, 64, 1024), (192, 1024, 1024, 64), (1, 16384, 768, 768), (1, 16384, 3072, 768),
    (1, 16384, 768, 50304), (1, 8192, 8192, 8192), (1, 8192, 4096, 14336), (1, 64, 4096, 4096),
    (1, 8, 4096, 14336),
)  # fmt: skip
_DTYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class Kernel:
    """A function of arrays of the shapes and dtypes given; integers are drawn below `high`."""

    group: str
    function: Callable[..., Any]
    types: tuple[jax.ShapeDtypeStruct, ...]
    high: int = 1


def kernels() -> dict[str, Kernel]:
    """All of them, by name."""
    return dict((*_products(), *_passes(), *_chains(), *_attention()))


def _product(x: Any, y: Any) -> Any:
    import jax.numpy as jnp

    return jnp.matmul(x, y)


def _products() -> Iterator[tuple[str, Kernel]]:
    import jax

    for dtype in _DTYPES:
        for b, m, k, n in _PRODUCTS:
            lead = () if b == 1 else (b,)
            types = (
                jax.ShapeDtypeStruct((*lead, m, k), dtype),
                jax.ShapeDtypeStruct((*lead, k, n), dtype),
            )
            yield f"{dtype} {b}x{m}x{k}x{n}", Kernel(f"product {dtype}", _product, types)


def _passes() -> Iterator[tuple[str, Kernel]]:
    """Passes through memory, from one that fits the cache to a gigabyte."""
    import jax
    import jax.numpy as jnp

    def normed(x: Any, scale: Any) -> Any:
        mean = jnp.mean(x, -1, keepdims=True)
        spread = jnp.mean(jnp.square(x - mean), -1, keepdims=True)
        return (x - mean) * jax.lax.rsqrt(spread + 1e-5) * scale

    def adam(w: Any, m: Any, v: Any, g: Any) -> Any:
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        return w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v

    f32 = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype("float32"))
    bf16 = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype("bfloat16"))
    i32 = partial(jax.ShapeDtypeStruct, dtype=jnp.dtype("int32"))
    for mebibytes in (1, 16, 128, 1024):
        rows = mebibytes * 256
        whole = (f32((rows, 1024)),)
        yield f"add one, {mebibytes} MiB", Kernel("pass", lambda x: x + 1, whole)
    rows = 64 * 1024
    large, narrow = f32((rows, 1024)), f32((1024,))
    yield "gelu, bf16", Kernel("pass", lambda x: jax.nn.gelu(x), (bf16((rows, 2048)),))
    yield "sum of all", Kernel("pass", lambda x: jnp.sum(x), (large,))
    yield "sum of rows", Kernel("pass", lambda x: jnp.sum(x, -1), (large,))
    yield "sum of columns", Kernel("pass", lambda x: jnp.sum(x, 0), (large,))
    yield "softmax", Kernel("pass", lambda x: jax.nn.softmax(x, -1), (large,))
    softmax = (f32((2048, 50304)),)
    yield "softmax of long rows", Kernel("pass", lambda x: jax.nn.softmax(x, -1), softmax)
    yield "layernorm", Kernel("pass", normed, (large, narrow))
    yield "transpose", Kernel("pass", lambda x: x.T + 0, (f32((8192, 8192)),))
    yield (
        "turn of four dims",
        Kernel("pass", lambda x: jnp.transpose(x, (0, 2, 1, 3)) + 0, (bf16((64, 1024, 16, 64)),)),
    )
    yield "adam", Kernel("pass", adam, (f32((8192, 4096)),) * 4)
    yield (
        "rows of a table",
        Kernel("pass", lambda t, i: t[i], (f32((50304, 1024)), i32((65536,))), 50304),
    )
    yield (
        "sums into rows",
        Kernel(
            "pass", lambda x, i: jnp.zeros((50304, 1024)).at[i].add(x), (large, i32((rows,))), 50304
        ),
    )
    yield "cumulative sum", Kernel("pass", lambda x: jnp.cumsum(x, -1), (large,))
    yield "sort", Kernel("pass", lambda x: jnp.sort(x, -1), (f32((4096, 4096)),))
    yield "top 8", Kernel("pass", lambda x: jax.lax.top_k(x, 8), (f32((16384, 1024)),))
    image, filters = bf16((64, 56, 56, 256)), bf16((3, 3, 256, 256))
    yield (
        "convolution",
        Kernel(
            "convolution",
            lambda x, w: jax.lax.conv_general_dilated(
                x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            ),
            (image, filters),
        ),
    )


def _chains() -> Iterator[tuple[str, Kernel]]:
    """Kernels that do next to nothing, one after another: what one more launch takes."""
    import jax
    import jax.numpy as jnp

    def chain(steps: int, x: Any, w: Any) -> Any:
        for _ in range(steps):
            x = jnp.tanh(x @ w)
        return x

    for steps in (1, 16, 64):
        yield (
            f"{steps} tiny products",
            Kernel(
                "launch", partial(chain, steps), (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
            ),
        )


def _attention() -> Iterator[tuple[str, Kernel]]:
    import jax
    import jax.numpy as jnp

    def forward(causal: bool, q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=causal, implementation="cudnn")

    def backward(causal: bool, q: Any, k: Any, v: Any) -> Any:
        def loss(*given: Any) -> Any:
            return jnp.sum(forward(causal, *given).astype(jnp.float32))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    for batch, keys, heads, width in ((16, 1024, 12, 64), (4, 4096, 16, 128), (1, 16384, 16, 128)):
        type_ = jax.ShapeDtypeStruct((batch, keys, heads, width), jnp.bfloat16)
        for causal in (False, True):
            name = f"{batch}x{keys}x{heads}x{width}{' causal' if causal else ''}"
            group = "attention"
            yield f"attention {name}", Kernel(group, partial(forward, causal), (type_,) * 3)
            yield f"and gradient {name}", Kernel(group, partial(backward, causal), (type_,) * 3)
