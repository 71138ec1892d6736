"""A plan on several processes: what they compare before its first run."""

from __future__ import annotations

import hashlib
import re
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import PeerError, TargetError

from .distributed import mark_told, participants, peers_of

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from tapestry_egg.plans.plan import Plan


def meet(
    plan: Plan,
    mesh: Mesh,
    arguments: Sequence[Any],
    build: Callable[[], tuple[jax.stages.Compiled, str]],
) -> jax.stages.Compiled:
    """Compare what all processes are about to run, compile it, and compare how that went.

    `build` gives the executable and a digest of its module. Once per compiled plan, before its
    first collective. Raises PeerError on every process where they would run different programs or
    were given different arguments; where one cannot compile, its own error there and a PeerError
    on the others. Raises TargetError where this process owns none of the devices.
    """
    from tapestry_egg.files.fingerprint import plan_fingerprint

    devices = list(mesh.devices.flat)
    peers = peers_of(devices)
    if peers is None:
        raise _not_ours(devices)
    doing = f"run {plan.graph.name or 'a plan'}"
    names = plan.graph.input_names or [f"argument {i}" for i in range(len(arguments))]
    given = {f"argument {n}": _told(x) for n, x in zip(names, arguments, strict=True)}
    with peers.together():
        told = {**environment(devices), "plan": plan_fingerprint(plan)[:16]}
        peers.agree(doing, {**told, **given})
        try:
            executable, module = build()
        except Exception as error:  # of the compiler: the others must not wait for this process
            words = f"{type(error).__name__}: {error}".splitlines()[0]
            with suppress(PeerError):
                peers.agree(doing, {"compilation": words})
            mark_told(error)
            raise
        peers.agree(doing, {"compilation": "well", "module": module})
        return executable


def environment(devices: Any) -> dict[str, str]:
    """What must be the same wherever one program runs: versions and devices."""
    from importlib.metadata import version

    import jax

    import tapestry_egg
    from tapestry_egg.files.fingerprint import code_digest

    places = [(d.id, d.process_index, d.device_kind) for d in devices]
    digest = hashlib.sha256(repr(places).encode()).hexdigest()[:12]
    return {
        "tapestry-egg": f"{tapestry_egg.__version__} ({code_digest()[:12]})",
        "jax": f"{jax.__version__}, jaxlib {version('jaxlib')}",
        "devices": f"{jax.local_device_count()} local ones of {jax.device_count()}",
        "mesh": f"{len(places)} devices of processes "
        f"{', '.join(map(str, sorted({p for _, p, _ in places})))} ({digest})",
    }


def module_digest(lowered: Any) -> str:
    """A digest of the operations of a lowered module, in order.

    Its text would not do: it holds addresses of callbacks, and constants of any size.
    """
    module = lowered.compiler_ir()
    text = module.operation.get_asm(large_elements_limit=16)
    operations = re.findall(r"\b(?:stablehlo|chlo|sdy|func)\.\w+|replica_groups = [^:]*", text)
    return hashlib.sha256("\n".join(operations).encode()).hexdigest()[:16]


def _not_ours(devices: Any) -> TargetError:
    import jax

    owners = ", ".join(map(str, participants(devices)))
    return TargetError(
        f"process {jax.process_index()} owns no device of the mesh",
        where="mesh",
        hint=f"Only processes that own some (here {owners}) can run the plan.",
    )


def _told(x: Any) -> str:
    """What an argument is: a digest of what every process holds for itself, or how it lies."""
    import jax
    import numpy as np

    if isinstance(x, jax.Array) and not x.is_fully_addressable:
        return f"an array over {len(x.sharding.device_set)} devices, {_words(x.sharding)}"
    if isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    data = np.ascontiguousarray(np.asarray(x))
    return f"its own copy, digest {zlib.crc32(data.tobytes()):08x}"


def _words(sharding: Any) -> str:
    return re.sub(r"\b0x[0-9a-fA-F]+", "0x", str(getattr(sharding, "spec", sharding)))
