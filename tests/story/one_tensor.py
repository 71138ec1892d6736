"""One tensor's story: `w["up"]` of README's example, as every stage of the pipeline holds it.

`python -m tests.story.one_tensor` prints it, with `--write` into docs/architecture.md, each part
into the block that its name marks; `test_one_tensor.py` fails where the page says anything else.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from tapestry_egg.show.stages import Asked, Place, mentions, value_named

#: The tensor, by its path among the arguments.
NAME = "[0]['up']"
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
_BLOCK = re.compile(r"(<!-- story: (\w+) -->\n```text\n)(.*?)(```)", re.S)


def example(**words: Any) -> Any:
    """README's example, traced; `words` are those of `te.trace`."""
    import jax
    import jax.numpy as jnp

    import tapestry_egg as te

    def loss(w: Any, x: Any, y: Any) -> Any:
        return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)

    def train_step(w: Any, x: Any, y: Any) -> Any:
        return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y))

    f32 = jax.ShapeDtypeStruct((8192, 1024), "float32")
    w = {
        "up": jax.ShapeDtypeStruct((1024, 4096), "float32"),
        "down": jax.ShapeDtypeStruct((4096, 1024), "float32"),
    }
    return te.trace(train_step, w, f32, f32, **words)


@dataclass(frozen=True)
class Story:
    """README's example without donation, its front for eight H100s, and every stage on the way."""

    program: Any
    front: Any

    @staticmethod
    def told() -> Story:
        """Trace and plan the example."""
        import tapestry_egg as te

        program = example()
        front = te.optimize(program, "h100:8", keep_stages=True)
        return Story(program, front)

    @cached_property
    def entry(self) -> int:
        """Which entry of a stage is of the given form on the fastest plan's mesh."""
        shapes = self.front.stages["shapes"].value
        return int(shapes.index(self.front.best("seconds").mesh))

    def of(self, stage: str) -> str:
        """What a stage says of it."""
        return self.front.stages[stage].of(NAME, self.entry if stage in _BY_MESH else 0)

    # What the blocks of the page show that are no stages.

    def trace(self) -> str:
        graph = self.program.graph
        return "\n".join(mentions(graph, value_named(graph, NAME)))

    def signature(self) -> str:
        (schedule, *_) = self.front.stages["schedules"].value
        place = Place.of(schedule.program, Asked(NAME))
        instance = schedule.program.instances[place.instance]
        signature = instance.signature
        dims = [d.name for d in signature.index]
        ports = zip(
            (*instance.inputs, *instance.outputs),
            (*signature.input_types, *signature.output_types),
            (*signature.inputs, *signature.outputs),
            strict=True,
        )
        index = ", ".join(f"{d.name} {d.size} {d.role}" for d in signature.index)
        lines = (f"{place.shown(v)}: {type_} at {p.show(dims)}" for v, type_, p in ports)
        return "\n".join([f"{signature.kernel}: {index}", *lines])

    def lower(self) -> str:
        import jax

        import tapestry_egg as te

        plan = self.gathering
        run = te.compile(plan, jax.devices()[: plan.mesh.devices])
        (w, _, _), _ = plan.input_specs
        text = run.lower().as_text()
        gathers = re.findall(
            r"stablehlo\.all_gather.*?: \((tensor<\w*>)\) -> (tensor<\w*>)", text, re.S
        )
        layout, shape = (
            plan.in_shardings[self._position],
            self.program.input_types[self._position].shape,
        )
        block = "x".join(map(str, layout.local_shape(shape, plan.mesh)))
        own = next(f"{a} -> {b}" for a, b in gathers if a == f"tensor<{block}xf32>")
        return f"{plan.name}: w['up'] enters as {w['up']}\nall_gather: {own}"

    def run(self) -> str:
        import jax

        import tapestry_egg as te
        from tapestry_egg.runtime import compare

        plan = self.gathering
        run = te.compile(plan, jax.devices()[: plan.mesh.devices])
        rows = compare(plan, run.lower().compile()).rows
        return "\n".join(
            f"{r.kind} over {r.group}: planned {r.planned_bytes:,} bytes, compiled "
            f"{r.compiled_bytes:,}"
            for r in rows
        )

    @cached_property
    def gathering(self) -> Any:
        """The last plan that cuts it over both axes."""
        at = self._position
        return [p for p in self.front if sum(map(len, p.in_shardings[at].dims)) == 2][-1]

    @cached_property
    def _position(self) -> int:
        return list(self.program.graph.input_names).index(NAME)


_BY_MESH = ("encodings", "strategies", "choices", "problems", "results")
_STAGES = ("forms", "schedules", *_BY_MESH, "front")

#: Name of a block of the page -> what fills it.
BLOCKS: Mapping[str, Callable[[Story], str]] = {
    "trace": Story.trace,
    "signature": Story.signature,
    **{name: partial(Story.of, stage=name) for name in _STAGES},
    "lower": Story.lower,
    "run": Story.run,
}


def blocks_of(page: str) -> dict[str, str]:
    """What the page shows, by the name of the block."""
    return {name: text for _, name, text, _ in _BLOCK.findall(page)}


def filled(page: str, story: Story) -> str:
    """The page with every block as the story tells it."""
    return _BLOCK.sub(lambda m: f"{m[1]}{BLOCKS[m[2]](story)}\n{m[4]}", page)


if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    told = Story.told()
    if "--write" in sys.argv:
        PAGE.write_text(filled(PAGE.read_text("utf-8"), told), "utf-8")
    else:
        print("\n\n".join(f"{name}\n\n{block(told)}" for name, block in BLOCKS.items()))
