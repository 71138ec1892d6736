"""The devices that benchmarks and tests compile for: virtual, or only described."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

from tapestry_egg.errors import TargetError


def devices_of(target: str) -> Sequence[Any]:
    """The devices of `NAME:SHAPE`: virtual ones for `cpu`, else ones described to the compiler.

    Raises TargetError where JAX has no compiler for them here.
    """
    import jax
    from jax.experimental import topologies

    from tapestry_egg.machine.target import load_target

    machine = load_target(target)
    if machine.name == "cpu":
        return jax.devices("cpu")[: machine.devices]
    shape = "x".join(map(str, machine.shape))
    try:
        if machine.name == "h100":
            described = topologies.get_topology_desc(
                platform="cuda",
                topology_name=machine.name,
                topology=f"1x{shape}" if "x" in shape else f"1x1x{shape}",
                target_config=(resources.files(__package__) / "h100.txtpb").read_text(),
            )
        else:
            described = topologies.get_topology_desc(
                platform="tpu", topology_name=f"{machine.name}:{shape}"
            )
    except Exception as e:  # JAX's plugins raise whatever they like
        raise TargetError(
            f"JAX cannot compile for {target} here: {e}",
            hint="For h100, `make gpu-aot` installs the compiler; for TPUs, `pip install libtpu`.",
        ) from None
    return described.devices
