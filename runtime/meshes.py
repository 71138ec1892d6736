"""JAX's meshes for plans: which device has which place, and who acts for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.devices import in_network_order
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime.lower.host_calls import Caller
from tapestry_egg.tracing.constraints import contract_of

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh


def jax_mesh(
    shape: MeshShape, mesh: Mesh | Sequence[jax.Device] | None = None, target: str = ""
) -> Mesh:
    """A JAX mesh of the plan's shape over the first devices of `mesh`, row-major in its order.

    Devices that no JAX mesh has in an order come in that of the network of `target` (`v5e:4x4`); a
    plan on a part of it has the first of those.
    Raises TargetError where there are too few.
    """
    import jax
    import numpy as np
    from jax.sharding import Mesh as JaxMesh

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
    if not isinstance(mesh, JaxMesh):
        counts = target.rpartition(":")[2].partition("@")[0].split("x")
        known = tuple(int(n) for n in counts) if all(n.isdigit() for n in counts) else ()
        # A plan on a part of the machine takes the first of all its devices.
        whole = prod(known) if known else 0
        if not shape.devices <= whole <= len(devices):
            whole, known = shape.devices, (shape.devices,)
        devices = in_network_order(devices[:whole], known)
    devices = devices[: shape.devices]
    grid = np.empty(len(devices), dtype=object)
    grid[:] = devices
    return jax.sharding.Mesh(grid.reshape(shape.sizes), shape.names)


def boundary_mesh(plan: Plan, mesh: Any) -> Mesh | None:
    """The JAX mesh itself where its axes express every layout at the plan's boundary."""
    from jax.sharding import Mesh

    if not isinstance(mesh, Mesh) or not all(isinstance(n, str) for n in mesh.axis_names):
        return None
    contract = contract_of(mesh)
    layouts = (*plan.in_shardings, *plan.out_shardings)
    if contract.blocks(plan.mesh) is None:
        return None
    if any(contract.express(layout, plan.mesh) is None for layout in layouts):
        return None
    return mesh


def caller_of(mesh: Mesh) -> Caller:
    """Who runs what has effects: the first device of process 0; the first of each reports."""
    owners = [d.process_index for d in mesh.devices.flat]
    first = {owner: owners.index(owner) for owner in sorted(set(owners))}
    return Caller(first[min(owners)], tuple(first.values()))
