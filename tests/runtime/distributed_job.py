"""A job of several processes on this machine, and the program that each of them runs.

    python -m tests.runtime.distributed_job SCENARIOS PROCESS PROCESSES PORT OPTIONS

writes one line of JSON, with an entry for each scenario: what it planned, whether its numbers are
right, how often it searched.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Ended:
    """How a process of a job ended. `code` is None where it had to be killed."""

    code: int | None
    told: dict[str, Any] = field(default_factory=dict)
    text: str = ""


def run_job(
    scenarios: str,
    *options: Mapping[str, Any],
    env: Mapping[str, str] | None = None,
    seconds: float = 600.0,
) -> list[Ended]:
    """Run scenarios one after another, with one process per `options`; all are killed after
    `seconds`.

    `devices` among the options is the number of a process's own devices (4).
    """
    port = _free_port()
    flags = " ".join(f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f)
    started = []
    for k, own in enumerate(options):
        count = own.get("devices", 4)
        environment = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={count}",
            "TAPESTRY_EGG_PLAN_CACHE": "off",
            **(env or {}),
        }
        command = [sys.executable, "-m", "tests.runtime.distributed_job", scenarios]
        command += [str(k), str(len(options)), str(port), json.dumps(own)]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # killed with the search's own processes
            )
        )
    end = time.monotonic() + seconds
    ended = []
    for process in started:
        code: int | None = None
        try:
            text, _ = process.communicate(timeout=max(0.1, end - time.monotonic()))
            code = process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # JAX hears SIGTERM and goes on
            text, _ = process.communicate()
        lines = [x for x in text.splitlines() if x.startswith("{")]
        ended.append(Ended(code, json.loads(lines[-1]) if lines else {}, text))
    return ended


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


# ---- one process -------------------------------------------------------------------------------

_SEARCHES: list[int] = []


def _main(scenarios: str, process: int, processes: int, port: int, own: dict[str, Any]) -> None:
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", processes, process)

    from tapestry_egg.errors import TapestryError
    from tapestry_egg.pipeline import pipeline

    search = pipeline.optimize

    def counted(*args: Any, **kwargs: Any) -> Any:
        _SEARCHES.append(1)
        time.sleep(own.get("search_sleep", 0.0))
        return search(*args, **kwargs)

    pipeline.optimize = counted  # type: ignore[assignment]
    jax.devices()  # JAX itself waits here for all processes
    if "nice" in own:
        os.nice(own["nice"])
    if "dies_after" in own:
        threading.Timer(own["dies_after"], os._exit, (9,)).start()
    time.sleep(own.get("sleep", 0.0))
    told: dict[str, Any] = {}
    try:
        for name in scenarios.split():
            told[name] = {**_SCENARIOS[name](process, own), "searches": len(_SEARCHES)}
    except TapestryError as error:
        told["error"] = str(error)
    print(json.dumps(told), flush=True)
    if "error" in told or "faults" in told:  # JAX would wait for the others, who may be gone
        if process == 0:
            time.sleep(2.0)  # its end is the end of all
        os._exit(0)
    jax.distributed.shutdown()


def train_step(width: int = 64) -> tuple[Any, tuple[Any, ...]]:
    """A train step and arguments that are the same in every process."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def step(w: Any, x: Any, y: Any, rate: float) -> Any:
        def loss(w: Any) -> Any:
            return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda p, g: p - rate * g, w, grads), value

    draw = np.random.default_rng(0)
    w = {"up": draw.normal(size=(32, width)), "down": draw.normal(size=(width, 32))}
    w = {k: np.asarray(v, np.float32) for k, v in w.items()}
    x, y = (np.asarray(draw.normal(size=(128, 32)), np.float32) for _ in range(2))
    return step, (w, x, y, 0.125)


def _jit(fn: Any, **options: Any) -> Any:
    import jax

    import tapestry_egg as te
    from tapestry_egg.pipeline.settings import Settings

    settings = Settings(work=0.1, recompute=0, forms=0, merge=False, workers=1)
    return te.jit(fn, mesh=jax.devices(), settings=settings, **options)


def _right(results: Any, expected: Any) -> bool:
    """Whether the blocks that this process holds are those of the expected arrays."""
    import jax
    import numpy as np

    def close(got: Any, want: Any) -> bool:
        want = np.asarray(want)
        return bool(got.shape == want.shape) and all(
            np.allclose(np.asarray(s.data), want[s.index], rtol=2e-5, atol=2e-5)
            for s in got.addressable_shards
        )

    return all(jax.tree.leaves(jax.tree.map(close, results, expected)))


def _train(process: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """`te.jit` of a train step on host arrays, on its own results, and on arrays that lie badly."""
    import jax
    import numpy as np
    from jax.sharding import AxisType, NamedSharding, PartitionSpec

    from tapestry_egg.files.fingerprint import plan_fingerprint

    step, args = train_step(own.get("width", 64))
    run = _jit(step, minimize=own.get("minimize", "seconds"), limits=own.get("limits", {}))
    plan = run.plan(*args)
    results = run(*args)
    right = [_right(results, step(*args))]
    after = jax.tree.map(np.asarray, step(*args)[0])
    right.append(_right(run(results[0], *args[1:]), step(after, *args[1:])))
    mesh = jax.make_mesh((8,), ("all",), (AxisType.Auto,))
    for spec in (PartitionSpec("all"), PartitionSpec(None, "all"), PartitionSpec()):
        sharding = NamedSharding(mesh, spec)
        x = jax.make_array_from_callback(args[1].shape, sharding, lambda at: args[1][at])
        right.append(_right(run(args[0], x, *args[2:]), step(*args)))
    on_device = jax.tree.map(jax.numpy.asarray, args[0])  # each process has its own
    right.append(_right(run(on_device, *args[1:]), step(*args)))
    return {
        "plan": plan_fingerprint(plan),
        "right": right,
        "global": all(not x.is_fully_addressable for x in jax.tree.leaves(results)),
    }


def _faults(process: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """One fault after another; every process raises each of them, so they stay in step."""
    import jax

    import tapestry_egg as te
    from tapestry_egg.errors import TapestryError
    from tapestry_egg.pipeline import pipeline
    from tapestry_egg.runtime.processes.distributed import PATIENCE

    step, args = train_step()
    other = process == 1
    said: dict[str, str] = {}

    def attempt(name: str, fn: Any, *given: Any, **options: Any) -> None:
        try:
            _jit(fn, **options)(*(given or args))
            said[name] = "none"
        except (TapestryError, ArithmeticError) as error:
            said[name] = f"{type(error).__name__}: {error}"

    def longer(*given: Any) -> Any:
        w, value = step(*given)
        return w, value + 1.0

    longer.__name__ = "step"
    attempt("program", longer if other else step)
    attempt("limits", step, limits={"peak_bytes": 2e9 if other else 1e9})
    attempt("unmet", step, limits={"peak_bytes": 1})
    version, te.__version__ = te.__version__, "9.9" if other else te.__version__
    attempt("version", step)
    te.__version__ = version
    attempt("data", step, args[0], args[1] + process, *args[2:])

    def double(x: Any) -> Any:
        return x * 2

    def square(x: Any) -> Any:
        return x * x

    attempt("order", square if other else double, args[1])
    search = pipeline.optimize

    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("a defect")

    pipeline.optimize = broken  # type: ignore[assignment]
    attempt("defect", double, args[1])
    pipeline.optimize = search
    compile_, failing = jax.stages.Lowered.compile, ZeroDivisionError("no memory")

    def cannot(*_: Any, **__: Any) -> Any:
        raise failing

    if other:
        jax.stages.Lowered.compile = cannot  # type: ignore[method-assign]
    attempt("compilation", double, args[1])
    jax.stages.Lowered.compile = compile_  # type: ignore[method-assign]
    attempt("nothing", square, args[1])
    os.environ[PATIENCE] = "2"
    if other:
        time.sleep(3.5)
    attempt("absent", double, args[2][:64])
    if not other:
        time.sleep(4.0)
    return said


def _calls(process: int, own: Mapping[str, Any]) -> dict[str, Any]:
    """Calls into Python, in a loop and outside; the first process alone makes them, in order."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import io_callback

    made: list[str] = []
    scalar = jax.ShapeDtypeStruct((), jnp.float32)

    def said(name: str) -> Any:
        def call(x: Any) -> Any:
            made.append(f"{name} {float(x):g}")
            return np.float32(x + 1)

        return call

    def step(x: Any) -> Any:
        first = io_callback(said("io"), scalar, x[0, 0], ordered=True)
        pure = jax.pure_callback(said("pure"), scalar, first)
        jax.debug.callback(lambda v: made.append(f"debug {float(v):g}"), pure, ordered=True)

        def body(c: Any, _: None) -> Any:
            return io_callback(said("loop"), scalar, c, ordered=True), None

        last, _ = lax.scan(body, pure, None, length=3)
        return x @ x * last, last

    x = np.ones((64, 64), np.float32)
    run = _jit(step)
    right = []
    for _ in range(2):
        got = run(x)
        jax.block_until_ready(got)
        jax.effects_barrier()
        right.append(_right(got, (x @ x * 6, np.float32(6))))

    def bad(v: Any) -> Any:
        raise LookupError("the user's own")

    def fails(x: Any) -> Any:
        return x @ x * io_callback(bad, scalar, x[0, 0])

    try:
        jax.block_until_ready(_jit(fails)(x))
        raised = "nothing"
    except Exception as error:
        raised = str(error)
    return {"made": made, "right": right, "raised": raised}


_SCENARIOS = {"train": _train, "faults": _faults, "calls": _calls}


if __name__ == "__main__":
    name, process, processes, port, options = sys.argv[1:]
    _main(name, int(process), int(processes), int(port), json.loads(options))
