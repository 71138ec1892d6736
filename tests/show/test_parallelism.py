"""The words for parallelism: plans with a textbook's layouts are called by the textbook's name."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.show.parallelism import axis_uses, layers_again, summary

TOKENS, WIDTH, INNER = 1 << 16, 512, 2048
ARRAY = jax.ShapeDtypeStruct

Tree = dict[str, Any]


def loss(w: Tree, x: jax.Array) -> jax.Array:
    return jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2)


def step(w: Tree, m: Tree, x: jax.Array) -> tuple[Tree, Tree]:
    g = jax.grad(loss)(w, x)
    m = jax.tree.map(lambda m, g: 0.9 * m + g, m, g)
    return jax.tree.map(lambda w, m: w - 0.1 * m, w, m), m


def plan_of(pins: Tree, mesh: MeshShape, target: str = "h100:4", tokens: int = TOKENS) -> Any:
    w = {"a": ARRAY((WIDTH, INNER), "float32"), "b": ARRAY((INNER, WIDTH), "float32")}
    graph = te.trace(jax.jit(step, donate_argnums=(0, 1)), w, w, ARRAY((tokens, WIDTH), "float32"))
    settings = Settings(work=0.3, workers=1, recompute=0)
    front = te.optimize(
        graph,
        target,
        objectives=("seconds", "peak_bytes"),
        state={"[0]": "[0]", "[1]": "[1]"},
        pins=pins,
        mesh=mesh,
        settings=settings,
    )
    return front.best("seconds")


ONE = MeshShape(("d",), (4,))
WHOLE: Tree = {"[0]": (), "[1]": ()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pins", "mesh", "said"),
    [
        (
            {**WHOLE, "[2]": ("d",)},
            ONE,
            "data parallel over d (4 on nvlink), state on every device",
        ),
        (
            {"[0]": (), "[1]": ("d",), "[2]": ("d",)},
            ONE,
            "data parallel over d (4 on nvlink), ZeRO-1",
        ),
        (
            {"[0]": ("d",), "[1]": ("d",), "[2]": ("d",)},
            ONE,
            "data parallel over d (4 on nvlink), ZeRO-3",
        ),
        ({**WHOLE, "[2]": ()}, MeshShape(("d",), (1,)), "one device"),
    ],
)
def test_textbook_plans_have_the_textbooks_names(pins: Tree, mesh: MeshShape, said: str) -> None:
    assert summary(plan_of(pins, mesh, f"h100:{mesh.devices}")) == said


@pytest.mark.slow
def test_two_axes_are_told_apart() -> None:
    cut = {"['a']": (None, "t"), "['b']": ("t", None)}
    pins = {f"[{k}]{path}": layout for k in range(2) for path, layout in cut.items()}
    plan = plan_of({**pins, "[2]": ("d",)}, MeshShape(("d", "t"), (2, 2)), tokens=4096)
    data, tensor = axis_uses(plan)
    assert data.data == 1.0 and tensor.tensor == 1.0
    assert "data parallel over d (2 on nvlink), state on every device" in summary(plan)
    assert "tensor parallel over t (2 on nvlink)" in summary(plan)


@pytest.mark.parametrize(
    ("tokens", "said"), [((), "tensor parallel"), (("d",), "tensor + sequence parallel")]
)
def test_a_forward_pass_has_weights_too(tokens: Any, said: str) -> None:
    def forward(p: jax.Array, q: jax.Array, r: jax.Array) -> jax.Array:
        return jnp.tanh(q @ p) @ r

    shapes = (WIDTH, INNER), (512, WIDTH), (INNER, WIDTH)
    front = te.optimize(
        te.trace(forward, *(ARRAY(shape, "float32") for shape in shapes)),
        "h100:4",
        pins={"[0]": (None, "d"), "[1]": tokens, "[2]": ("d",)},
        mesh=ONE,
        settings=Settings(work=0.3, workers=1, merge=False),
    )
    assert summary(front.best("seconds")) == f"{said} over d (4 on nvlink)"


@pytest.mark.slow
def test_weights_that_are_gathered_before_their_loop_are_told() -> None:
    """Between steps such a plan holds a part of the weights, in its loop all of them at once."""

    def loss(ws: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)

    def step(ws: jax.Array, x: jax.Array) -> jax.Array:
        return ws - 0.1 * jax.grad(loss)(ws, x)

    shapes = (16, WIDTH, WIDTH), (4096, WIDTH)
    front = te.optimize(
        te.trace(step, *(ARRAY(shape, "float32") for shape in shapes), donate_argnums=0),
        "h100:4",
        pins={"[0]": (None, "d"), "[1]": ("d",)},
        mesh=ONE,
        settings=Settings(work=0.3, workers=1, recompute=0),
    )
    seen = set()
    for plan in front:
        gathers = [c for c in plan.collectives if c.kind == "all_gather"]
        for use in axis_uses(plan):
            early = any(use.name in c.axes and "f32[16, 512, 512]" in c.value for c in gathers)
            at = "stacks of weights gathered whole", "weights gathered before their loop"
            loops = any(op.is_scan for op in plan.graph.operations)
            assert str(use).endswith(f"ZeRO-3, {at[loops]}") == early
            assert "ZeRO-3" in str(use)
            seen.add(early)
    assert seen == {True, False}


AFFINE = """
affine:
  index: "[$rows..., $out]"
  inputs:
    x: {shape: "[$rows..., $in]", dtype: $dtype, ipf: "[..., 0] :> [..., $in]"}
    w: {shape: "[$in, $out]", dtype: $dtype, ipf: "[drop..., new, 1] :> [$in, 1]"}
  reduce: {in: sum}
  outputs:
    y: {dtype: $dtype}
  flops: 2
"""


@pytest.mark.parametrize(
    ("result", "said"), [(("d",), "data parallel"), ((None, "d"), "tensor parallel")]
)
def test_a_kernel_of_the_users_reads_data_first(result: Any, said: str, tmp_path: Any) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(AFFINE)
    made = te.kernel("affine", str(path))(te.tensor("x", (4096, 512)), te.tensor("w", (512, 256)))
    front = te.optimize(
        te.program(made),
        "h100:4",
        pins={"result": result},
        mesh=ONE,
        settings=Settings(work=0.3, workers=1),
    )
    assert summary(front.best("seconds")).startswith(f"{said} over d (4 on nvlink)")


def test_layers_whose_values_are_computed_again_are_counted() -> None:
    def gradient(again: int) -> Any:
        def layer(x: jax.Array, w: jax.Array) -> jax.Array:
            return jnp.tanh(x @ w)

        def loss(ws: Any, x: jax.Array) -> jax.Array:
            for k, w in enumerate(ws["layers"]):
                x = (jax.checkpoint(layer) if k < again else layer)(x, w["up"])
            return jnp.sum(x * x)

        return jax.grad(loss)

    ws = {"layers": [{"up": jnp.ones((8, 8))}] * 3}
    for again, said in [(0, ""), (2, ", in 2 of 3 layers"), (3, ", in 3 of 3 layers")]:
        assert layers_again(te.trace(gradient(again), ws, jnp.ones((8, 8))).graph) == said
