"""Stencils in plain JAX, planned with nothing pinned, beside programs written by hand.

    python -m benchmarks.bench_stencils                  # all of them; minutes
    python -m benchmarks.bench_stencils wave weno        # some
    python -m benchmarks.bench_stencils --run            # their numbers

By hand is one pass over the rows of a device and of `halo` neighbours on either side, which two
permutes bring: a `shard_map` around the same step. Seconds of one step are modelled for h100:8: of
the plan, and of the step on one device with its neighbours' rows at hand and of the permutes. Bytes
are those that the plan promises, and those of the compiled `shard_map`. `--run` compares numbers
with those of `jax.jit`, on eight CPU devices at small extents.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.rehearse import simulate_devices

STEPS, DEVICES = 20, 8
TARGET, ALONE = "h100:8", "h100:1"
#: Extents of a grid by its rank: a GiB of float32 and more, and those on which plans are run.
EXTENTS = {1: (2**28,), 2: (16384, 16384), 3: (768, 768, 768)}
SMALL = {1: (2**14,), 2: (64, 64), 3: (32, 16, 16)}

Array = Any


@dataclass(frozen=True)
class Stencil:
    """A step of so many grids of one rank: grids -> grids. It reads `halo` rows to either side,
    around the ends if it is `periodic`; rows beyond other ends follow the rule of the step."""

    step: Callable[..., Any]
    rank: int
    halo: int = 1
    grids: int = 1
    periodic: bool = True

    def looped(self, *grids: Array) -> Any:
        """So many steps: grids[n, ...] -> grids[n, ...]."""
        import jax

        return jax.lax.fori_loop(0, STEPS, lambda _, x: self.tuple_of(*x), grids)

    def tuple_of(self, *grids: Array) -> tuple[Array, ...]:
        made = self.step(*grids)
        return made if isinstance(made, tuple) else (made,)

    def inside(self, *extended: Array) -> tuple[Array, ...]:
        """The step of one device's rows: extended[n + 2 halo, ...] -> grids[n, ...]."""
        return tuple([x[self.halo : -self.halo] for x in self.tuple_of(*extended)])

    def by_hand(self, *own: Array) -> tuple[Array, ...]:
        """The step inside a `shard_map` over "x": own[n / 8, ...] -> own[n / 8, ...]."""
        import jax
        import jax.numpy as jnp

        h, n = self.halo, DEVICES
        up = [(k, (k + 1) % n) for k in range(n if self.periodic else n - 1)]
        down = [(b, a) for a, b in up]
        extended = [
            jnp.concatenate(
                [jax.lax.ppermute(x[-h:], "x", up), x, jax.lax.ppermute(x[:h], "x", down)]
            )
            for x in own
        ]
        made = self.inside(*extended)
        if self.periodic:
            return made
        k = jax.lax.axis_index("x")
        first = self.tuple_of(*[x[: 3 * h] for x in own])
        last = self.tuple_of(*[x[-3 * h :] for x in own])
        return tuple(
            [
                x.at[:h]
                .set(jnp.where(k == 0, a[:h], x[:h]))
                .at[-h:]
                .set(jnp.where(k == n - 1, b[-h:], x[-h:]))
                for x, a, b in zip(made, first, last, strict=True)
            ]
        )


def _roll(x: Array, by: int, dim: int = 0) -> Array:
    import jax.numpy as jnp

    return jnp.roll(x, by, dim)


def _around(x: Array) -> Array:
    return sum(_roll(x, by, d) for d in range(x.ndim) for by in (1, -1)) - 2 * x.ndim * x


def _neighbours(x: Array) -> Array:
    """The sum of the neighbours of inner points: [n + 2, m + 2] -> [n, m]."""
    return x[2:, 1:-1] + x[:-2, 1:-1] + x[1:-1, 2:] + x[1:-1, :-2]


def _padded(mode: str) -> Callable[[Array], Array]:
    def step(x: Array) -> Array:
        import jax.numpy as jnp

        return x + 0.1 * (_neighbours(jnp.pad(x, 1, mode)) - 4 * x)

    return step


def _bordered(x: Array) -> Array:
    return x.at[1:-1, 1:-1].add(0.1 * (_neighbours(x) - 4 * x[1:-1, 1:-1]))


def _fourth_order(x: Array) -> Array:
    def along(d: int) -> Array:
        near, far = _roll(x, 1, d) + _roll(x, -1, d), _roll(x, 2, d) + _roll(x, -2, d)
        return (16 * near - far - 30 * x) / 12

    return x + 0.01 * (along(0) + along(1))


def _box(x: Array) -> Array:
    """The mean of 3 points along each dim, one after another: 27 of three dims."""
    for d in range(x.ndim):
        x = (_roll(x, 1, d) + 2 * x + _roll(x, -1, d)) / 4
    return x


def _edges(x: Array) -> Array:
    import jax.numpy as jnp

    p, c = jnp.pad(x, 1, "edge"), slice(1, -1)
    near = p[2:, c, c] + p[:-2, c, c] + p[c, 2:, c] + p[c, :-2, c] + p[c, c, 2:] + p[c, c, :-2]
    return x + 0.1 * (near - 6 * x)


def _gradient(x: Array) -> Array:
    import jax.numpy as jnp

    down, across = jnp.gradient(x)
    return x - 0.01 * jnp.sqrt(down**2 + across**2 + 1e-6)


def _wave(now: Array, before: Array) -> tuple[Array, Array]:
    return 2 * now - before + 0.1 * _around(now), now


def _reaction(u: Array, v: Array) -> tuple[Array, Array]:
    """Gray and Scott's: two kinds that spread, of which one feeds on the other."""
    eaten = u * v * v
    return u + 0.1 * _around(u) - eaten, v + 0.05 * _around(v) + eaten


def _staggered(h: Array, u: Array, v: Array) -> tuple[Array, Array, Array]:
    """Shallow water, linear: heights between velocities."""
    u, v = u - 0.1 * (_roll(h, -1) - h), v - 0.1 * (_roll(h, -1, 1) - h)
    return h - 0.1 * (u - _roll(u, 1) + v - _roll(v, 1, 1)), u, v


def _advected(c: Array, u: Array, v: Array) -> tuple[Array, Array, Array]:
    import jax.numpy as jnp

    down = jnp.where(u > 0, c, _roll(c, 1)) * u
    across = jnp.where(v > 0, c, _roll(c, 1, 1)) * v
    return c - 0.1 * (down - _roll(down, -1) + across - _roll(across, -1, 1)), u, v


def _weno(x: Array) -> Array:
    """Weighted essentially non-oscillatory fluxes of fifth order (Jiang and Shu 1996)."""
    a, b, c, d, e = (_roll(x, by) for by in (2, 1, 0, -1, -2))
    fluxes = (2 * a - 7 * b + 11 * c), (5 * c - b + 2 * d), (2 * c + 5 * d - e)
    rough = (
        13 / 12 * (a - 2 * b + c) ** 2 + (a - 4 * b + 3 * c) ** 2 / 4,
        13 / 12 * (b - 2 * c + d) ** 2 + (b - d) ** 2 / 4,
        13 / 12 * (c - 2 * d + e) ** 2 + (3 * c - 4 * d + e) ** 2 / 4,
    )
    weights = [w / (1e-6 + r) ** 2 for w, r in zip((0.1, 0.6, 0.3), rough, strict=True)]
    flux = sum(w * f / 6 for w, f in zip(weights, fluxes, strict=True)) / sum(weights)
    return x - 0.1 * (flux - _roll(flux, 1))


def _limited(x: Array) -> Array:
    import jax.numpy as jnp

    after, before = _roll(x, -1) - x, x - _roll(x, 1)
    least = jnp.minimum(jnp.abs(after), jnp.abs(before)) * jnp.sign(after)
    flux = x + 0.5 * jnp.where(after * before > 0, least, 0.0)
    return x - 0.1 * (flux - _roll(flux, 1))


def _life(x: Array) -> Array:
    import jax.numpy as jnp

    rows = _roll(x, 1) + x + _roll(x, -1)
    near = _roll(rows, 1, 1) + rows + _roll(rows, -1, 1) - x
    return jnp.where((near == 3) | ((near == 2) & (x > 0)), 1.0, 0.0)


def _looked_up(x: Array) -> Array:
    import jax.numpy as jnp

    at = jnp.arange(x.shape[0])
    return x + 0.1 * (x[at - 1] - 2 * x + x[(at + 1) % x.shape[0]])


STENCILS: dict[str, Stencil] = {
    "heat_1d": Stencil(lambda x: x + 0.1 * _around(x), 1),
    "heat_2d": Stencil(lambda x: x + 0.1 * _around(x), 2),
    "heat_3d": Stencil(lambda x: x + 0.1 * _around(x), 3),
    "wrapped": Stencil(_padded("wrap"), 2),
    "zeros": Stencil(_padded("constant"), 2, periodic=False),
    "reflected": Stencil(_padded("reflect"), 2, periodic=False),
    "edges_2d": Stencil(_padded("edge"), 2, periodic=False),
    "edges_3d": Stencil(_edges, 3, periodic=False),
    "bordered": Stencil(_bordered, 2, periodic=False),
    "gradient": Stencil(_gradient, 2, periodic=False),
    "fourth_order": Stencil(_fourth_order, 2, halo=2),
    "box_9": Stencil(_box, 2),
    "box_27": Stencil(_box, 3),
    "wave": Stencil(_wave, 2, grids=2),
    "reaction": Stencil(_reaction, 2, grids=2),
    "staggered": Stencil(_staggered, 2, grids=3),
    "advected": Stencil(_advected, 2, grids=3),
    "weno": Stencil(_weno, 1, halo=3),
    "limited": Stencil(_limited, 1, halo=2),
    "life": Stencil(_life, 2),
    "looked_up": Stencil(_looked_up, 2),
}


def seconds_by_hand(stencil: Stencil) -> float:
    """Seconds of one step by hand: of the kernels of one device, and of the permutes."""
    import jax
    import jax.numpy as jnp

    import tapestry_egg as te

    rows, *rest = EXTENTS[stencil.rank]
    block = (rows // DEVICES + 2 * stencil.halo, *rest)
    extended = [jax.ShapeDtypeStruct(block, jnp.float32)] * stencil.grids
    alone = te.optimize(te.trace(stencil.inside, *extended), ALONE).best("seconds")
    sent = 4.0 * stencil.halo * stencil.grids
    for n in rest:
        sent *= n
    mesh, target = MeshShape(("x",), (DEVICES,)), load_target(TARGET)
    return alone.costs.seconds + 2 * float(collective_seconds("permute", sent, (0,), mesh, target))


def mapped(stencil: Stencil) -> Callable[..., tuple[Array, ...]]:
    """The program by hand, over rows on eight devices."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, PartitionSpec

    devices = Mesh(np.array(jax.devices()[:DEVICES]), ("x",))
    specs = (PartitionSpec("x"),) * stencil.grids
    of_a_device = jax.shard_map(stencil.by_hand, mesh=devices, in_specs=specs, out_specs=specs)
    made: Callable[..., tuple[Array, ...]] = jax.jit(of_a_device)
    return made


def bytes_by_hand(stencil: Stencil) -> float:
    """Bytes that a device sends in one step by hand, as XLA compiles it for eight CPU devices."""
    import jax
    import jax.numpy as jnp

    from tapestry_egg.runtime.measure.hlo import hlo_stats

    grids = [jax.ShapeDtypeStruct(EXTENTS[stencil.rank], jnp.float32)] * stencil.grids
    return hlo_stats(mapped(stencil).lower(*grids).compile()).wire_bytes  # type: ignore[attr-defined]


def errors(stencil: Stencil) -> dict[str, float]:
    """How far numbers are from those of `jax.jit` after some steps at most: of the fastest and the
    leanest plan with rows on eight devices, and, after one step, of the program by hand."""
    import jax
    import numpy as np

    import tapestry_egg as te

    draw, shape = np.random.default_rng(0), SMALL[stencil.rank]
    grids = [draw.normal(size=shape).astype(np.float32) for _ in range(stencil.grids)]
    rows = {f"[{k}]": ("x",) for k in range(stencil.grids)}
    front = te.optimize(
        te.trace(stencil.looped, *grids),
        TARGET,
        mesh_shapes=[MeshShape(("x",), (DEVICES,))],
        pins=rows,
    )

    def error(got: Sequence[Array], want: Sequence[Array]) -> float:
        each = zip(got, want, strict=True)
        return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in each)

    want = jax.jit(stencil.looped)(*grids)
    found = {
        f"by {name}": error(te.compile(front.best(name))(*grids), want)
        for name in ("seconds", "peak_bytes")
    }
    once = jax.jit(stencil.tuple_of)(*grids)
    return {**found, "by hand": error(mapped(stencil)(*grids), once)}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; fails where a plan takes, or sends, more than 1.1 times what the program by
    hand does."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"all by default: {', '.join(STENCILS)}")
    parser.add_argument("--run", action="store_true", help="run small ones on eight CPU devices")
    options = parser.parse_args(arguments)
    simulate_devices(DEVICES)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import jax
    import jax.numpy as jnp

    import tapestry_egg as te

    beyond = 0
    for name in options.names or STENCILS:
        stencil = STENCILS[name]
        if options.run:
            found = errors(stencil)
            print(f"{name:14} {', '.join(f'{k} {v:.1e}' for k, v in found.items())}", flush=True)
            continue
        grids = [jax.ShapeDtypeStruct(EXTENTS[stencil.rank], jnp.float32)] * stencil.grids
        program = te.trace(stencil.looped, *grids, donate_argnums=tuple(range(stencil.grids)))
        costs = te.optimize(program, TARGET).best("seconds").costs
        seconds, by_hand = costs.seconds / STEPS, seconds_by_hand(stencil)
        sent, sent_by_hand = costs.wire_bytes / STEPS, bytes_by_hand(stencil)
        beyond += seconds > 1.1 * by_hand or sent > 1.1 * sent_by_hand
        print(
            f"{name:14} {seconds * 1e6:7.1f} us, by hand {by_hand * 1e6:7.1f};"
            f" {sent / 1024:8.1f} KiB sent, by hand {sent_by_hand / 1024:8.1f};"
            f" {seconds / by_hand:.2f} times the seconds",
            flush=True,
        )
    return int(beyond > 0)


if __name__ == "__main__":
    sys.exit(main())
