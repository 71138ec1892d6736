"""Energy and money: joules and dollars of what a plan does on a target.

Joules have two parts. The dynamic one follows from work: flops, bytes and the seconds that kernels
run, whenever they do. The idle one is drawn from the first second of a step to its last, by every
device that the plan holds (`Target.held`). Both are linear, so the sums over the kernels and copies
of a plan are those of the plan; where copies run beside kernels, the idle part belongs to the
length of the whole step, not to the sum of its parts, and a bound on the seconds of a step is one
on its idle joules.
"""

from __future__ import annotations

from math import prod

from tapestry_egg.graph.layout import MeshShape

from .costs import (
    LOCAL,
    Amount,
    collective_seconds,
    collective_wire_bytes,
    local_traffic,
    turning_seconds,
)
from .target import Target


def idle_joules(seconds: Amount, devices: int, target: Target) -> Amount:
    """Energy that devices draw in so many seconds, whatever they do; with it that of those of the
    machine that a plan leaves unused, where they count."""
    return seconds * (target.power.idle_watts * target.held(devices))


def dynamic_joules(
    flops: Amount,
    hbm_bytes: Amount,
    wire_bytes: Amount,
    kernel_seconds: Amount,
    devices: int,
    target: Target,
    dtype: str = "bfloat16",
    contraction: bool = True,
) -> Amount:
    """Energy above idle over all devices: devices · (P·seconds + e_f·flops + e_h·bytes + e_w·wire).

    All amounts are those of one device; `kernel_seconds` are those in which a kernel runs. An
    operation's energy is the watts of its unit over the unit's published rate. `dtype` and
    `contraction` choose the arithmetic's as in `kernel_seconds`: a unit draws as much at its full
    rate in one dtype as in another.
    """
    power = target.power
    one = (
        kernel_seconds * power.kernel_watts
        + flops * (power.flops_watts / target.peak_rate(dtype, contraction))
        + hbm_bytes * power.joules_per_byte
        + wire_bytes * power.joules_per_wire_byte
    )
    return one * devices


def joules(
    flops: Amount,
    hbm_bytes: Amount,
    wire_bytes: Amount,
    seconds: Amount,
    devices: int,
    target: Target,
    dtype: str = "bfloat16",
    contraction: bool = True,
) -> Amount:
    """Energy of a kernel that runs alone for `seconds`, over all devices: dynamic and idle."""
    work = dynamic_joules(
        flops, hbm_bytes, wire_bytes, seconds, devices, target, dtype, contraction
    )
    return work + idle_joules(seconds, devices, target)


def collective_dynamic_joules(
    kind: str, local_bytes: Amount, axes: tuple[int, ...], mesh: MeshShape, target: Target
) -> Amount:
    """Energy above idle of one change of layout over all devices: wire, and memory at both ends.

    A collective occupies a few of a device's many cores: it counts as no kernel.
    """
    group = prod(s.group for s in target.spans(mesh, axes))
    wire = collective_wire_bytes(kind, local_bytes, group)
    if kind in LOCAL:
        memory = local_traffic(kind, local_bytes, group) if group > 1 else local_bytes * 0.0
    else:
        memory = wire * 2.0  # what is sent is read, and as much is received and written
    nothing = local_bytes * 0.0
    return dynamic_joules(nothing, memory, wire, nothing, mesh.devices, target)


def collective_joules(
    kind: str, local_bytes: Amount, axes: tuple[int, ...], mesh: MeshShape, target: Target
) -> Amount:
    """Energy of one change of layout that runs alone, over all devices: dynamic and idle."""
    seconds = collective_seconds(kind, local_bytes, axes, mesh, target)
    work = collective_dynamic_joules(kind, local_bytes, axes, mesh, target)
    return work + idle_joules(seconds, mesh.devices, target)


def turning_joules(local_bytes: Amount, devices: int, target: Target) -> Amount:
    """Energy of a kernel that writes a block with its dims in another order, over all devices."""
    seconds, nothing = turning_seconds(local_bytes, target), local_bytes * 0.0
    return joules(nothing, 2.0 * local_bytes, nothing, seconds, devices, target)


def dollars(seconds: float, devices: int, target: Target) -> float:
    """What a plan on so many devices costs for so long, at the target's price: for those that it
    holds (`Target.held`); 0 where the target has no price."""
    if target.price is None:
        return 0.0
    return seconds * target.held(devices) * target.price.dollars_per_device_hour / 3600.0
