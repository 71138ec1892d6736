"""Compile a plan: one jitted `shard_map` that is called like the user's own function."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..blockgraph import TensorType
from ..codec import primitive
from ..errors import PlanError, TargetError
from ..layout import Layout, MeshShape
from ..plan import Plan
from .lower import lower

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    from ..trace import Program


def compile(plan: Plan, mesh: Mesh | Sequence[jax.Device] | None = None) -> CompiledPlan:
    """The function of a plan, on the devices of `mesh`.

    `mesh` supplies devices only: they are arranged row-major in the plan's own mesh shape, so plans
    of several shapes run on one mesh, of whichever axis types. Without it the devices of
    `jax.devices()` are used. A mesh of `jax.experimental.topologies` compiles without the hardware.

    The result takes and returns the pytrees of the traced function, or flat arguments and a tuple
    where the plan's graph was not traced. Arguments may be on the host or on devices in any layout.
    Raises TargetError where devices are lacking, PlanError where the plan does not fit its graph.
    """
    for what, layouts, values in (
        ("input", plan.in_shardings, plan.graph.inputs),
        ("output", plan.out_shardings, plan.graph.outputs),
    ):
        for i, (layout, v) in enumerate(zip(layouts, values, strict=True)):
            type_ = plan.graph.values[v]
            if layout.partial or not layout.divides(type_.shape, plan.mesh):
                raise PlanError(
                    f"{what} {i}, {type_}, cannot cross the program's boundary as "
                    f"{layout.show(plan.mesh)}",
                    where=plan.name,
                    hint="At the boundary nothing is partial, and blocks are equal.",
                )
    return CompiledPlan(plan, jax_mesh(plan.mesh, mesh))


@dataclass(frozen=True)
class CompiledPlan:
    """A plan on a mesh of devices: call it, or `lower()` and `compile()` it ahead of time.

    `in_shardings` and `out_shardings` are flat, in the order of the graph's inputs and outputs.
    """

    plan: Plan
    mesh: Mesh

    @cached_property
    def program(self) -> Program:
        """What knows the pytrees of the user's function."""
        from ..trace import Program

        return self.plan.program or Program.of(self.plan.graph)

    @cached_property
    def in_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(self._sharding(layout) for layout in self.plan.in_shardings)

    @cached_property
    def out_shardings(self) -> tuple[NamedSharding, ...]:
        return tuple(self._sharding(layout) for layout in self.plan.out_shardings)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the plan. Raises TraceError for another structure of arguments than was traced,
        PlanError for an array of another shape or dtype."""
        import jax

        leaves = self.program.flatten(*args, **kwargs)
        graph = self.plan.graph
        types = [graph.values[v] for v in graph.inputs]
        names = graph.input_names or [f"argument {i}" for i in range(len(leaves))]
        arrays = [_checked(x, t, n) for x, t, n in zip(leaves, types, names, strict=True)]
        if any(isinstance(x, jax.core.Tracer) for x in arrays):  # inside the user's own jit
            return self.program.unflatten(self._mapped(*arrays), like=(args, kwargs))
        with jax.set_mesh(self.mesh):  # another mesh may be active
            placed = [
                jax.device_put(x, sharding)
                for x, sharding in zip(arrays, self.in_shardings, strict=True)
            ]
            outputs = self._jitted(*placed)
        return self.program.unflatten(outputs, like=(args, kwargs))

    def lower(self) -> jax.stages.Lowered:
        """The plan as StableHLO, with nothing run."""
        import jax

        from ..arrays import decode_dtype

        graph = self.plan.graph
        arguments = [
            jax.ShapeDtypeStruct(
                graph.values[v].shape, decode_dtype(graph.values[v].dtype), sharding=sharding
            )
            for v, sharding in zip(graph.inputs, self.in_shardings, strict=True)
        ]
        with jax.set_mesh(self.mesh):
            lowered: jax.stages.Lowered = self._jitted.lower(*arguments)
        return lowered

    def compile(self) -> jax.stages.Compiled:
        """The executable, for `hlo_stats`, `compare` and JAX's own analyses."""
        return self.lower().compile()

    @cached_property
    def _mapped(self) -> Any:
        import jax

        local = lower(self.plan, caller_of(self.mesh))

        graph = self.plan.graph

        def step(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            outputs = zip(local(*arguments), graph.outputs, strict=True)
            return tuple(_weakened(x, graph.values[v].weak) for x, v in outputs)

        step.__name__ = re.sub(r"\W", "_", self.plan.graph.name) or "step"
        return jax.shard_map(
            step,
            mesh=self.mesh,
            in_specs=tuple(s.spec for s in self.in_shardings),
            out_specs=tuple(s.spec for s in self.out_shardings),
            check_vma=False,  # replication is what the plan says, and is tested by its numbers
        )

    @cached_property
    def _jitted(self) -> Any:
        import jax

        donated = self.plan.graph.donated
        return jax.jit(
            self._mapped,
            in_shardings=self.in_shardings,
            out_shardings=self.out_shardings,
            donate_argnums=tuple(i for i, d in enumerate(donated) if d),
            keep_unused=True,  # they are resident anyway, and argument numbers stay the graph's
            compiler_options=_compiler_options(self.mesh),
        )

    def _sharding(self, layout: Layout) -> NamedSharding:
        from jax.sharding import NamedSharding

        return NamedSharding(self.mesh, partition_spec(layout, self.plan.mesh))


def caller_of(mesh: Mesh) -> int:
    """The number of the device, row-major, that runs what has effects: the first of process 0."""
    owners = [d.process_index for d in mesh.devices.flat]
    return owners.index(min(owners))


def _compiler_options(mesh: Mesh) -> dict[str, str] | None:
    """What the compiler must leave alone for the plan to be carried out.

    XLA for CPU drops optimization barriers before its last merging of equal operations, which
    would turn a second gather (made to save memory) back into the first.
    """
    if mesh.devices.flat[0].platform == "cpu":
        return {"xla_disable_hlo_passes": "cse_barrier_expander"}
    return None


def partition_spec(layout: Layout, mesh: MeshShape) -> PartitionSpec:
    """JAX's spelling of a layout without partial values."""
    from jax.sharding import PartitionSpec

    entries: list[str | tuple[str, ...] | None] = []
    for axes in layout.dims:
        names = tuple(mesh.names[a] for a in axes)
        entries.append(names if len(names) > 1 else names[0] if names else None)
    while entries and entries[-1] is None:
        entries.pop()
    return PartitionSpec(*entries)


def jax_mesh(shape: MeshShape, mesh: Mesh | Sequence[jax.Device] | None = None) -> Mesh:
    """A JAX mesh of the plan's shape over the first devices of `mesh`, row-major.

    Raises TargetError where there are too few.
    """
    import jax
    import numpy as np

    if mesh is None:
        devices = list(jax.devices())
    else:
        devices = list(np.asarray(getattr(mesh, "devices", mesh), dtype=object).flat)
    if len(devices) < shape.devices:
        raise TargetError(
            f"the plan needs {shape.devices} devices ({shape}), there are {len(devices)}",
            hint="To run on virtual CPU devices, set JAX_PLATFORMS=cpu and "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={shape.devices} before JAX starts.",
        )
    devices = devices[: shape.devices]
    if mesh is None:  # JAX knows which order of a TPU's devices keeps neighbours together
        auto = (jax.sharding.AxisType.Auto,) * len(shape.sizes)
        return jax.make_mesh(shape.sizes, shape.names, auto, devices=devices)
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return jax.sharding.Mesh(grid.reshape(shape.sizes), shape.names)


def _weakened(x: jax.Array, weak: bool) -> jax.Array:
    """The same array, weakly typed as the user's function returns it.

    Inside, weak types decide nothing: every operation was traced with its dtypes.
    """
    import jax

    if getattr(jax.typeof(x), "weak_type", False) == weak:
        return x
    bind = primitive("convert_element_type").bind
    changed: jax.Array = bind(x, new_dtype=x.dtype, weak_type=weak, sharding=None)
    return changed


def _checked(x: Any, type_: TensorType, name: str) -> Any:
    """An argument of the type that the plan was made for."""
    import jax
    import numpy as np

    from ..arrays import decode_dtype, dtype_name

    if not hasattr(x, "dtype"):
        x = np.asarray(x, None if isinstance(x, list) else decode_dtype(type_.dtype))
    dtype = jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True)
    given = TensorType(tuple(x.shape), dtype_name(dtype))
    if (given.shape, given.dtype) != (type_.shape, type_.dtype):
        raise PlanError(
            f"is {given}, the plan was made for {type_}",
            where=name,
            hint="Trace and optimize again for other shapes.",
        )
    return x
