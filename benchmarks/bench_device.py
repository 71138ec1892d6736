"""One device: what plans promise beside what runs there, seconds, bytes and joules.

    python -m benchmarks.bench_device plan out/device           # anywhere: plans into a folder
    python -m benchmarks.bench_device run out/device rows.json  # where the device is
    python -m benchmarks.bench_device show rows.json            # the tables
    python -m benchmarks.bench_device                           # all three, where there is a GPU

The two ends may be different machines: plans are files, and running them needs no e-graph. Small
programs (`device/kernels.py`) are planned as they are; of programs three plans are run, that of the
least memory, one in the middle and the fastest, then `jax.jit` of the same function. Seconds of a
step are medians by the clock, calls sent one after another; `device` those that JAX's profiler
recorded of its kernels; joules those of the driver's counter over a second and a half. `run` ends
where its `--seconds` are spent, and keeps what it has after every row.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tapestry_egg.atomic import write_atomic
from tapestry_egg.quantities import BYTES, TIME

from . import programs
from .device.kernels import Kernel, kernels

#: For how many seconds a step runs again and again, at least.
LONG = 1.5
#: The machine that plans are for.
TARGET = "h100:1"
_LARGE = ("mlp", "llama", "resnet", "moe", "recurrent", "state_space", "graph_network", "decode",
          "lora", "convnet", "sorting", "while_loop", "ragged_moe")  # fmt: skip


def made(name: str) -> programs.Made:
    """A program at the size at which it is run."""
    if name.startswith("gpt2 small"):
        from models import gpt2

        dtype = "bfloat16" if "bf16" in name else "float32"
        config = gpt2.config("gpt2_small", dtype=dtype)
        given = (*gpt2.abstract(config)[:2], gpt2.tokens(config))
        return programs.Made(gpt2.step, given, donated=(0, 1))
    return programs.described(f"models:{name}", programs.LARGE)


def names() -> list[str]:
    """The programs, in the order in which they are run."""
    return ["gpt2 small", "gpt2 small, bf16", *_LARGE]


def plan(folder: Path, target: str = TARGET) -> None:
    """Plans of all of them for a target of one device, as files; what is there already stays."""
    import tapestry_egg as te

    folder.mkdir(parents=True, exist_ok=True)

    def kept(name: str, function: Callable[..., Any], types: Any, donated: Any) -> None:
        path = folder / f"{_file(name)}.json"
        if path.exists():
            return
        begin = time.perf_counter()
        front = te.optimize(te.trace(function, *types, donate_argnums=donated), target=target)
        front.save(path)
        fastest = front.best("seconds").costs
        print(
            f"{name:40} {len(front.plans):3} plans, {TIME.format(fastest.seconds)}, "
            f"{BYTES.format(fastest.peak_bytes)} in {time.perf_counter() - begin:.1f} s",
            flush=True,
        )

    for name, kernel in kernels().items():
        kept(name, kernel.function, kernel.types, ())
    for name in names():
        program = made(name)
        kept(name, program.function, program.arguments, program.donated)


def run(
    folder: Path, out: Path, seconds: float, only: list[str], count: int, profile: list[str]
) -> None:
    """Rows of what runs on this process's first device, kept after each of them."""
    import jax

    import tapestry_egg as te

    until = time.monotonic() + seconds
    device = jax.devices()[0]
    rows: list[dict[str, Any]] = []
    head = {"device": device.device_kind, "jax": jax.__version__, "rows": rows}

    def add(**row: Any) -> None:
        rows.append(row)
        write_atomic(out, json.dumps(head, indent=1))
        print(
            json.dumps(
                {k: v for k, v in row.items() if k not in ("parts", "sizes", "instructions")}
            ),
            flush=True,
        )

    every = {**{n: None for n in names()[:1]}, **kernels(), **{n: None for n in names()[1:]}}
    for name, kernel in every.items():
        if only and not any(word in name for word in only):
            continue
        if time.monotonic() > until:
            add(name=name, skipped="no time left")
            continue
        front = te.load(folder / f"{_file(name)}.json", certify=False)  # our own, of `plan`
        try:
            if kernel is not None:
                add(name=name, group=kernel.group, **_kernel(front, kernel))
            else:
                for row in _program(front, made(name), until, count, name in profile):
                    add(name=name, group="program", **row)
        except Exception as e:  # what fails on a device is a row, too
            add(name=name, error=f"{type(e).__name__}: {e}"[:2000])


def _kernel(front: Any, kernel: Kernel) -> dict[str, Any]:
    import tapestry_egg as te

    plan = front.best("seconds")
    ran = te.compile(plan)
    args = _drawn(kernel.types, kernel.high)
    step = _clock(ran, args, 0.05)
    row = {"planned": plan.costs.seconds, "clock": step}
    try:
        return {**row, **_profiled(ran, args)}
    except te.TapestryError as e:
        return {**row, "unprofiled": str(e)}


def _program(
    front: Any, program: programs.Made, until: float, count: int, profile: bool
) -> Iterator[dict[str, Any]]:
    import jax

    import tapestry_egg as te

    order = sorted(front.plans, key=lambda p: p.costs.peak_bytes)
    places = [round(i * (len(order) - 1) / max(1, count - 1)) for i in range(count)]
    chosen = [order[i] for i in dict.fromkeys(places)]
    leaves, tree = jax.tree.flatten(program.arguments)
    for plan in chosen:
        if time.monotonic() > until:
            return
        begin = time.perf_counter()
        ran = te.compile(plan)
        executable = ran.compile()
        built = time.perf_counter() - begin
        costs = plan.costs
        flat = [jax.device_put(x) for x in _drawn(leaves, 2)]
        yield {
            "plan": plan.name, "planned": costs.seconds, "peak": costs.peak_bytes,
            "joules_planned": costs.joules, "built": built, **_held(executable),
            **_loop(ran, flat, tree.unflatten, plan.graph.donated),
        }  # fmt: skip
        if profile and plan is chosen[-1]:
            yield {"plan": f"{plan.name}, by kernel", "clock": 0.0, **_by_kernel(ran, leaves, tree)}
    begin = time.perf_counter()
    jitted = jax.jit(program.function, donate_argnums=program.donated)
    executable = jitted.lower(*program.arguments).compile()
    built = time.perf_counter() - begin
    flat = [jax.device_put(x) for x in _drawn(leaves, 2)]
    sizes = [len(jax.tree.leaves(a)) for a in program.arguments]
    donated = [i in program.donated for i, count in enumerate(sizes) for _ in range(count)]
    yield {
        "plan": "jax.jit", "built": built, **_held(executable),
        **_loop(executable, flat, tree.unflatten, donated),
    }  # fmt: skip


def _held(executable: Any) -> dict[str, float]:
    """Bytes of a device by XLA's own count."""
    m = executable.memory_analysis()
    whole = m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes
    return {"compiled": whole + m.temp_size_in_bytes}


def _loop(
    call: Callable[..., Any],
    flat: list[Any],
    grouped: Callable[[list[Any]], Any],
    donated: Any,
) -> dict[str, Any]:
    """Seconds and joules of a step, by the clock: each call gets what the last one gave of what it
    takes over, which outputs of the same types stand for, in order."""
    import jax

    counter = _energy()

    def step(xs: list[Any]) -> list[Any]:
        return _taken(xs, jax.tree.leaves(call(*grouped(xs))), donated)

    first = jax.tree.leaves(call(*grouped(flat)))
    sums = [float(x) for x in _sizes(first)]
    flat = [x for x in step(_taken(flat, first, donated))]
    jax.block_until_ready(flat)
    times: list[float] = []
    begin, before, count = time.perf_counter(), counter(), 0
    while time.perf_counter() - begin < LONG or count < 5:
        start, some = time.perf_counter(), 0
        while some < 5:
            flat, some = step(flat), some + 1
        jax.block_until_ready(flat)
        times.append((time.perf_counter() - start) / some)
        count += some
    joules = (counter() - before) / count
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "clock": statistics.median(times), "steps": count, "joules": joules, "sizes": sums,
        "allocated": stats.get("peak_bytes_in_use"),
    }  # fmt: skip


def _taken(given: list[Any], made: list[Any], donated: Any) -> list[Any]:
    """The arguments of the next step."""
    free, taken = list(made), []
    for x, gone in zip(given, donated, strict=True):
        if gone:
            same = (i for i, y in enumerate(free) if (y.shape, y.dtype) == (x.shape, x.dtype))
            x = free.pop(next(same))
        taken.append(x)
    return taken


def _sizes(arrays: list[Any]) -> list[Any]:
    """The mean of the sizes of what is in each array."""
    import jax
    import jax.numpy as jnp

    known = [x for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return jax.jit(lambda xs: [jnp.mean(jnp.abs(x.astype(jnp.float32))) for x in xs])(known)


def _by_kernel(ran: Any, leaves: Any, tree: Any) -> dict[str, Any]:
    """What JAX's profiler says of a program's kernels and collectives, beside what was planned."""
    import tapestry_egg as te

    args = tree.unflatten(_drawn(leaves, 2))
    found = te.measure(ran, *args, steps=3)
    return {
        "rows": [
            (r.name, r.planned_count, r.planned_seconds, r.measured_count, r.measured_seconds)
            for r in found.rows
        ],
        "instructions": [
            (i.name, i.what, i.count, i.seconds, i.shape) for i in found.instructions[:60]
        ],
    }


def _profiled(ran: Any, args: Any) -> dict[str, Any]:
    """Seconds of the kernels by JAX's profiler, and by what they are."""
    import tapestry_egg as te

    found = te.measure(ran, *args, steps=10)
    kinds: dict[str, float] = {}
    for i in found.instructions:
        kinds[i.what] = kinds.get(i.what, 0.0) + i.seconds
    return {"device": sum(kinds.values()), "parts": kinds}


def _clock(call: Callable[..., Any], args: Any, least: float) -> float:
    """Seconds of one of many calls sent one after another."""
    import jax

    jax.block_until_ready(call(*args))
    count, found = 4, []
    while True:
        begin = time.perf_counter()
        for _ in range(count):
            out = call(*args)
        jax.block_until_ready(out)
        spent = time.perf_counter() - begin
        if spent < least:
            count *= 2
            continue
        found.append(spent / count)
        if len(found) == 3:
            return statistics.median(found)


def _drawn(types: Any, high: int) -> list[Any]:
    """Arrays of random numbers; integers are those given, as rows of a table that all are the same
    one are summed far slower than any program's; where only their type is, below `high`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    key = jax.random.key(0)
    found = []
    for i, t in enumerate(types):
        own = jax.random.fold_in(key, i)
        if isinstance(t, np.ndarray | jax.Array) and jnp.issubdtype(t.dtype, jnp.integer):
            found.append(jnp.array(t))  # a copy, which a step may take over
        elif jnp.issubdtype(t.dtype, jax.dtypes.prng_key):
            found.append(jax.random.key(i))  # of programs that take one
        elif jnp.issubdtype(t.dtype, jnp.floating):
            drawn = 0.02 * jnp.abs(jax.random.normal(own, t.shape, jnp.float32))
            found.append(drawn.astype(t.dtype))  # positive, as sums of squares are
        else:
            found.append(jax.random.randint(own, t.shape, 0, high).astype(t.dtype))
    return jax.block_until_ready(found)


def _energy() -> Callable[[], float]:
    """Reads the driver's counter of joules; zero where there is none."""
    try:
        import pynvml  # type: ignore[import-not-found]  # where the driver's library is

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    except Exception:  # no driver, or one that does not tell
        return lambda: 0.0


def _file(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def show(path: Path) -> None:
    """The tables of what has been run."""
    data = json.loads(path.read_text())
    print(f"{data['device']}, jax {data['jax']}")
    said = {r["name"]: r["sizes"] for r in data["rows"] if r.get("plan") == "jax.jit"}
    for row in data["rows"]:
        if "error" in row or "skipped" in row:
            print(f"{row['name']:42} {row.get('error') or row['skipped']}")
            continue
        planned, ran = row.get("planned"), row.get("device") or row["clock"]
        off = f"{ran / planned - 1:+7.1%}" if planned else "       "
        line = f"{row['name']:42} {row.get('plan', ''):8} {TIME.format(planned or 0):>9}"
        line += f" {TIME.format(ran):>9} {off} clock {TIME.format(row['clock'])}"
        if "compiled" in row:
            promised, held = row.get("peak") or 0, row["compiled"]
            line += f" {BYTES.format(promised)} promised, {BYTES.format(held)} compiled"
            if row["name"] in said:
                both = zip(row["sizes"], said[row["name"]], strict=True)
                line += f", apart {max(abs(a - b) / (abs(b) or 1.0) for a, b in both):.1e}"
            line += f", {row.get('joules_planned') or 0:.3g} J promised, {row['joules']:.3g} J"
        print(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("plan", "run", "show"), nargs="?")
    parser.add_argument("path", type=Path, nargs="?", default=Path("out/device"))
    parser.add_argument("rows", type=Path, nargs="?", default=Path("rows.json"))
    parser.add_argument("--seconds", type=float, default=1e9, help="when to begin nothing more")
    parser.add_argument("--plans", type=int, default=3, help="of a program (3)")
    parser.add_argument("--profile", nargs="*", default=[], help="programs told by kernel")
    parser.add_argument("--target", default=TARGET, help=f"what plans are for ({TARGET})")
    parser.add_argument("--only", nargs="*", default=[], help="names, or parts of them")
    args = parser.parse_args()
    if args.what is None:
        import jax

        if jax.default_backend() != "gpu":
            print("skipped: there is no GPU here")
            return
        plan(args.path, args.target)
        run(args.path, args.rows, args.seconds, args.only, args.plans, args.profile)
        show(args.rows)
    elif args.what == "plan":
        plan(args.path, args.target)
    elif args.what == "run":
        run(args.path, args.rows, args.seconds, args.only, args.plans, args.profile)
    else:
        show(args.path)


if __name__ == "__main__":
    main()
