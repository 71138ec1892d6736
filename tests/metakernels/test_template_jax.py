"""Every template against the JAX primitive itself: whole, and on the boxes of a shard.

Operands are drawn as in `test_template_covers`; all operations of a family run in one jitted call.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from tapestry_egg.metakernels import registry
from tapestry_egg.reference.call import KEY
from tapestry_egg.reference.executor import without_gaps
from tapestry_egg.reference.kernels import reference
from tapestry_egg.runtime.lower.kernels.kernels import LOWERINGS
from tapestry_egg.tracing.codec import decode_params, primitive
from tapestry_egg.zspace import ZRange
from tests.metakernels.cases import CASES, FAMILY, JAX, Application, Array, application, close
from tests.metakernels.covers import random_cover

FAMILIES = tuple(dict.fromkeys(FAMILY.values()))
# Those of the most operations or the longest loops, which XLA compiles for seconds.
_MANY_PROGRAMS = ("elementwise", "streaming", "linalg", "indexing", "random", "reduction")


def drawn(family: str, seeds: Sequence[int]) -> list[Application]:
    kernels = [k for k in CASES if FAMILY[k] == family]
    return [application(k, f"{k}{seed}") for k in kernels for seed in seeds]


def compiled(function: Callable[..., Any], *args: Any) -> Any:
    """What the function returns, jitted with as little optimization as XLA can do."""
    fast = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.device_get(jax.jit(function, compiler_options=fast)(*args))


def by_jax(calls: Sequence[tuple[str, Any, Sequence[Array]]]) -> list[list[Array]]:
    """The outputs of (kernel, plain parameters, operands), computed by JAX."""

    def run(operands: Any) -> Any:
        out = []
        for (kernel, params, _), xs in zip(calls, operands, strict=True):
            made = primitive(kernel).bind(*map(taken, xs), **decode_params(params, kernel=kernel))
            out.append([given(x) for x in (made if isinstance(made, list | tuple) else [made])])
        return out

    plain = [[{"words": x["words"]} if x.dtype.names else x for x in xs] for _, _, xs in calls]
    return [
        [as_keys(x["words"]) if isinstance(x, dict) else x for x in xs]
        for xs in compiled(run, plain)
    ]


def taken(x: Any) -> Any:
    """What JAX takes for an array of ours: random keys are made of their words."""
    return jax.random.wrap_key_data(x["words"]) if isinstance(x, dict) else x


def given(x: Any) -> Any:
    keys = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return {"words": jax.random.key_data(x)} if keys else x


def as_keys(words: Array) -> Array:
    out = np.zeros(words.shape[:-1], KEY)
    out["words"] = words
    return out


def check_whole(apps: Sequence[Application]) -> None:
    results = by_jax([(a.kernel, a.params, a.operands) for a in apps])
    for app, wanted in zip(apps, results, strict=True):
        for q, (got, want) in enumerate(zip(app.run(), wanted, strict=True)):
            if app.kernel == "cholesky":
                want = np.tril(want)  # JAX leaves the other triangle as it was
            close(got, want, f"output {q} of {app}", JAX)


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow if f in _MANY_PROGRAMS else ()) for f in FAMILIES],
)
def test_references_give_what_jax_gives(family: str) -> None:
    check_whole(drawn(family, range(1 if family in ("elementwise", "random") else 2)))


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_references_give_what_jax_gives_at_length(family: str) -> None:
    check_whole(drawn(family, range(100, 102 if family in ("elementwise", "random") else 108)))


def on_a_block(
    app: Application, box: ZRange
) -> tuple[tuple[str, Any, list[Array]], list[Array]] | None:
    """The bare kernel on the boxes that an index box reads, and what it should give; None where
    what lies outside is filled in by whoever runs the kernel."""
    sig = app.signature
    box = next(without_gaps(sig, box))
    operands = [at_box(x, sig.operand_box(p, box)) for p, x in enumerate(app.operands)]
    if any(sig.margins(p, box) != ((0, 0),) * x.ndim for p, x in enumerate(operands)):
        return None
    shapes = [p.image(box).shape for p in sig.outputs]
    local = registry.localize(app.kernel, app.params, sig, [x.shape for x in operands], shapes)
    want = list(reference(app.kernel, app.params, sig, operands, box))
    return (app.kernel, local, operands), want


@pytest.mark.parametrize(
    "family",
    [pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES if f != "elementwise"],
)
def test_jax_runs_on_the_boxes_of_a_shard_with_the_local_parameters(family: str) -> None:
    """Along every index dim but those where the template says that the block's place matters."""
    calls, wanted = [], []
    for app in drawn(family, range(50, 53)):
        sig = app.signature
        dims = [replace(d, role="whole") if k in sig.placed else d for k, d in enumerate(sig.index)]
        free = replace(sig, index=tuple(dims))
        made = on_a_block(app, random_cover(free, random.Random(str(app)), cuts=2)[0])
        if made is not None and app.kernel != "cholesky":
            calls.append(made[0])
            wanted.append((app, made[1]))
    for made, (app, want) in zip(by_jax(calls), wanted, strict=True):
        for q, (a, b) in enumerate(zip(made, want, strict=True)):
            close(a, b, f"output {q} of {app} on a block", JAX)
    assert len(calls) >= 3


def test_kernels_that_must_know_their_place_are_those_that_are_lowered_with_it() -> None:
    declared = {k for k, entries in registry.templates().items() if any(e.placed for e in entries)}
    assert declared == set(LOWERINGS)


@pytest.mark.parametrize("kernel", sorted(set(LOWERINGS) & set(CASES)))
def test_a_place_that_is_declared_matters(kernel: str) -> None:
    """On some block along such a dim the bare kernel gives something else, or cannot run."""
    for seed in range(40):
        app = application(kernel, seed)
        sig = app.signature
        for d in sig.placed:
            n = sig.index[d].size
            if n < 2 or sig.index[d].role not in ("map", "reduce"):
                continue
            half = ZRange.from_shape(sig.extents).with_dim(d, n // 2, n)
            made = on_a_block(app, half)
            if made is None:
                return
            try:
                got = by_jax([made[0]])[0]
            except TypeError:  # what is written is larger than the block
                return
            if not all(np.array_equal(a, b) for a, b in zip(got, made[1], strict=True)):
                return
    raise AssertionError(f"{kernel} never depends on where its block lies")


def at_box(x: Array, box: ZRange) -> Array:
    return x[(*(slice(s, e) for s, e in zip(box.start, box.end, strict=True)), ...)]
