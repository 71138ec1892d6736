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
from functools import cached_property
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
_BLOCK = re.compile(r"(<!-- story: (\w+) -->\n```text\n)(.*?)(```)", re.S)


@dataclass(frozen=True)
class Story:
    """README's example, its front for eight H100s, and every stage on the way."""

    program: Any
    front: Any

    @staticmethod
    def told() -> Story:
        """Trace and plan the example."""
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
        program = te.trace(train_step, w, f32, f32)
        front = te.optimize(program, "h100:8", keep_stages=True)
        return Story(program, front)

    def stage(self, name: str) -> Any:
        """What a pass made."""
        return self.front.stages[name].value

    @cached_property
    def fastest(self) -> Any:
        """The fastest plan."""
        return self.front.best("seconds")

    @cached_property
    def mesh_number(self) -> int:
        """Which entry of a stage is of the given form on that plan's mesh."""
        return int(self.stage("shapes").index(self.fastest.mesh))

    @cached_property
    def value(self) -> int:
        """The number of `w["up"]` in the block graph."""
        graph = self.program.graph
        return int(graph.inputs[graph.input_names.index("[0]['up']")])

    # What each block of the page shows.

    def trace(self) -> str:
        graph = self.program.graph
        from tapestry_egg.show.text import graph_text

        lines = graph_text(graph).splitlines()
        own = f"%{self.value}"
        kept = [x for x in lines if re.search(rf"{re.escape(own)}\b", x)]
        return "\n".join([lines[0], *(re.sub(r"  # .*", "", x) for x in kept)])

    def signature(self) -> str:
        instance = self._schedule.program.instances[self._reader]
        signature = instance.signature
        dims = [d.name for d in signature.index]
        lines = [", ".join(f"{d.name} {d.size} {d.role}" for d in signature.index)]
        ports = zip(
            ("x", 'w["up"]', "result"),
            (*signature.input_types, *signature.output_types),
            (*signature.inputs, *signature.outputs),
            strict=True,
        )
        lines += [f"{name}: {type_} at {p.show(dims)}" for name, type_, p in ports]
        return "\n".join(lines)

    def forms(self) -> str:
        lines = []
        for k, form in enumerate(self.stage("forms")):
            steps = "; ".join(f"{', '.join(s.rules)}: {s.made}" for s in form.steps) or "as given"
            lines.append(f"form {k + 1}: {len(form.graph.operations)} operations, {steps}")
        return "\n".join(lines)

    def schedules(self) -> str:
        from tapestry_egg.show.stages import unit_line

        schedule, flat = self._schedule, self._flat
        units = [schedule.producer[flat], *schedule.readers[flat]]
        return "\n".join(unit_line(schedule, u).strip() for u in units)

    def encodings(self) -> str:
        encoding = self.stage("encodings")[self.mesh_number]
        number = encoding.signature_of[self._reader]
        shown = ("kernel", "extent", "map-dim", "reduce-dim", "tensor", "coefficient")
        lines = []
        for name in shown:
            rows = [row for row in encoding.facts[name] if row[0] == number]
            if name in ("tensor", "coefficient"):
                rows = [row for row in rows if row[1] == 1 and row[-1]]  # port 1 is `w["up"]`
            lines.append(" ".join(f"({name} {' '.join(map(str, row))})" for row in rows))
        return "\n".join(lines)

    def strategies(self) -> str:
        found = self.stage("strategies")[self.mesh_number]
        mesh = found.encoding.algebra.mesh
        number = found.encoding.signature_of[self._reader]
        rows = found.strategies[number]
        dims = [d.name for d in found.encoding.signatures[number].index]
        whole = [r for r in rows if not any(x.partial for x in r.layouts[:2])]
        lines = [f"{len(rows)} strategies; those that read whole values, on the mesh {mesh}:"]
        for row in whole:
            cuts = " ".join(
                f"{d}/{'·'.join(mesh.names[a] for a in axes)}"
                for d, axes in zip(dims, row.cuts, strict=True)
                if axes
            )
            x, w, out = (layout.show(mesh) for layout in row.layouts)
            lines.append(f"{cuts or 'uncut':10} x {x:9} w {w:9} -> {out}")
        return "\n".join(lines)

    def choices(self) -> str:
        choices = self.stage("choices")[self.mesh_number]
        unit = self._schedule.readers[self._flat][0]
        table = choices.copies[self._schedule.program.types[self._flat]]
        mesh, layout = choices.mesh, self.fastest.in_shardings[self._position]
        a = table.number[layout]
        lines = [f"u{unit} has {len(choices.rows[unit])} rows; copies of {table.tensor} from "]
        lines[0] += f"{layout.show(mesh)}:"
        for b, to in enumerate(table.layouts):
            if a != b and table.seconds[a, b] < float("inf"):
                steps = " then ".join(
                    f"{s.kind}({','.join(mesh.names[x] for x in s.axes)})"
                    for s in table.path(layout, to)
                )
                cost = f"{table.seconds[a, b] * 1e6:6.1f} us {table.wire[a, b] / 2**20:5.1f} MiB"
                lines.append(f"{to.show(mesh):16} {cost}  {steps}")
        return "\n".join([*lines[:9], f"... and {len(lines) - 9} more"])

    def problems(self) -> str:
        posed = self.stage("problems")[self.mesh_number]
        unit = self._schedule.producer[self._flat]
        variable = posed.problem.variables[unit]
        lines = [f"variable {unit} ({variable.name}): {len(variable)} rows"]
        for r, row in enumerate(posed.unit_row[unit].tolist()):
            have = posed.choices.rows[unit].gives[row][0].show(posed.choices.mesh)
            held = [u.amount[r] for u in variable.uses if u.amount[r]]
            most = max(held, default=0.0) / 2**20
            lines.append(f"row {r:2}: {have:9} {variable.seconds[r] * 1e6:.1f} us, {most:.0f} MiB")
        pairs = [p for p in posed.problem.pairs if unit in (p.a, p.b)]
        names = [posed.problem.variables[p.b if p.a == unit else p.a].name for p in pairs]
        more = f"... and {len(lines) - 8} more rows"
        return "\n".join([*lines[:8], more, f"pairs with {', '.join(names)}"])

    def results(self) -> str:
        found = self.stage("results")[self.mesh_number]
        unit = self._schedule.producer[self._flat]
        lines = []
        for c in found.archive.corners():
            row = int(found.assembled.unit_row[unit][c.rows[unit]])
            have = found.assembled.choices.rows[unit].gives[row][0]
            bound = found.archive.bound(c.peak, c.joules)
            lines.append(
                f"{c.seconds * 1e6:.0f} us, {c.peak / 2**20:.0f} MiB: "
                f"{have.show(found.assembled.choices.mesh)}, proven {bound * 1e6:.0f} us"
            )
        return "\n".join(lines)

    def front_table(self) -> str:
        lines = []
        for plan in self.front:
            layout = plan.in_shardings[self._position].show(plan.mesh)
            own = [c for c in plan.collectives if c.value.startswith(f"%{self.value} ")]
            moved = ", ".join(
                f"{c.kind} over {'·'.join(c.axes)}, {c.payload_bytes / 2**20:.0f} MiB" for c in own
            )
            lines.append(f"{plan.name}: w['up'] lies as {layout:7} {moved}".rstrip())
        return "\n".join(lines)

    def lower(self) -> str:
        import jax

        import tapestry_egg as te

        plan = self.front[len(self.front) - 1]
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

        plan = self.front[len(self.front) - 1]
        run = te.compile(plan, jax.devices()[: plan.mesh.devices])
        rows = compare(plan, run.lower().compile()).rows
        return "\n".join(
            f"{r.kind} over {r.group}: planned {r.planned_bytes:,} bytes, compiled "
            f"{r.compiled_bytes:,}"
            for r in rows
        )

    # Where it is.

    @cached_property
    def _schedule(self) -> Any:
        return self.stage("schedules")[0]

    @cached_property
    def _flat(self) -> int:
        return int(self._schedule.program.bodies[0].values[self.value])

    @cached_property
    def _reader(self) -> int:
        """The first operation that reads it: `x @ w["up"]`."""
        instances = self._schedule.program.instances
        return next(
            k
            for k, i in enumerate(instances)
            if self._flat in i.inputs and i.signature.kernel == "dot_general"
        )

    @cached_property
    def _position(self) -> int:
        return int(self.program.graph.inputs.index(self.value))


#: Name of a block of the page -> what fills it.
BLOCKS: Mapping[str, Callable[[Story], str]] = {
    "trace": Story.trace,
    "signature": Story.signature,
    "forms": Story.forms,
    "schedules": Story.schedules,
    "encodings": Story.encodings,
    "strategies": Story.strategies,
    "choices": Story.choices,
    "problems": Story.problems,
    "results": Story.results,
    "front": Story.front_table,
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
