"""The program of a plan as a jaxpr, emitted without devices, and checked by the ledger."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tapestry_egg.collector import rarely_collected
from tapestry_egg.errors import GraphError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.plans.plan import AUDITED
from tapestry_egg.plans.specs import partition_spec
from tapestry_egg.runtime.ledger.check import check
from tapestry_egg.runtime.lower.host_calls import Caller
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.tracing.codec import primitive
from tapestry_egg.tracing.settings import plain_settings

if TYPE_CHECKING:
    import jax
    from jax.sharding import AbstractMesh, Mesh

    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.plans.plan import Plan


@rarely_collected()
def audit(plan: Plan) -> None:
    """Check a plan by the ledger, unless this process has done so before.

    A plan of which it is not known what machine it was made for promises nothing. One with
    operations that this JAX does not have is no program here, nor is one that cannot be emitted
    without devices. Raises PlanError where the program emitted for that machine is not what the
    plan promises.
    """
    if plan.origin is None or plan in AUDITED:
        return
    try:
        program = emitted(plan)
    except (GraphError, ValueError):
        return
    check(plan, program)
    AUDITED.add(plan)


def platform_of(plan: Plan) -> str:
    """JAX's name of the platform that a plan was made for; empty if that is not known."""
    machine = plan.origin.machine if plan.origin else None
    return "" if machine is None else machine.platform


def emitted(plan: Plan) -> Any:
    """The jaxpr of a plan for its own machine: one `shard_map` over a mesh without devices."""
    import jax

    graph, mesh = plan.graph, jax.sharding.AbstractMesh(plan.mesh.sizes, plan.mesh.names)
    compute_constants(graph)
    with plain_settings(graph), jax.sharding.use_abstract_mesh(mesh):
        step = mapped(plan, mesh, platform_of(plan), Caller())
        types = [graph.values[v] for v in graph.inputs]
        return jax.make_jaxpr(step)(
            *(jax.ShapeDtypeStruct(t.shape, decode_dtype(t.dtype), weak_type=t.weak) for t in types)
        )


def mapped(
    plan: Plan, mesh: Mesh | AbstractMesh, platform: str, caller: Caller
) -> Callable[..., tuple[jax.Array, ...]]:
    """The plan as one `shard_map` of flat arguments and results, for the compiler of `platform`.

    Raises PlanError where the plan does not fit its graph.
    """
    import jax

    local = lower(plan, caller, platform=platform)
    graph, layouts, shape = plan.graph, plan.in_shardings, plan.mesh
    types = [graph.values[v] for v in graph.inputs]
    # Arrays without elements are made inside: XLA turns them into constants, and then misses
    # the arguments of the `shard_map`.
    held = [i for i, t in enumerate(types) if t.size]
    shapes = [x.local_shape(t.shape, shape) for x, t in zip(layouts, types, strict=True)]

    def step(*arguments: jax.Array) -> tuple[jax.Array, ...]:
        given = iter(arguments)
        blocks = [
            next(given) if t.size else jax.lax.empty(block, decode_dtype(t.dtype))
            for t, block in zip(types, shapes, strict=True)
        ]
        outputs = zip(local(*blocks), graph.outputs, strict=True)
        return tuple(_weakened(x, graph.values[v].weak) for x, v in outputs)

    made = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=tuple(partition_spec(layouts[i], shape) for i in held),
        out_specs=tuple(partition_spec(x, shape) for x in plan.out_shardings),
        check_vma=False,  # replication is what the plan says, and is tested by its numbers
    )
    return lambda *arguments: made(*(arguments[i] for i in held))


def compute_constants(graph: BlockGraph) -> None:
    """Ask for the constants of a graph and its regions: those of loaded ones are computed late."""
    for constant in graph.constants.values():
        assert constant is not None
    for op in graph.operations:
        for region in op.regions:
            compute_constants(region)


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
