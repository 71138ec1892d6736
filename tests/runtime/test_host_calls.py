"""What has effects, or calls into Python, is run once for all devices, and in its order."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import tapestry_egg as te
from tapestry_egg.runtime import compare, compile, planned_collectives
from tapestry_egg.runtime.compiled import caller_of
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import random_plan
from tests.runtime.lowered import MESH, numbers, same

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)


class Journal:
    """Python functions that remember what they were called with, in order."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def count(self, x: Any) -> Any:
        """The number of calls so far."""
        self.seen.append(round(float(np.asarray(x).ravel()[0]), 3))
        return np.float32(len(self.seen))


def agree(make: Callable[[Journal], Callable[..., Any]], *args: Any, plans: int = 2) -> None:
    """Under plans drawn at random, the calls and the results are those of `jax.jit`."""
    alone = Journal()
    wanted = jax.tree.map(np.asarray, jax.jit(make(alone))(*args))
    jax.effects_barrier()
    for seed in range(plans):
        journal = Journal()
        program = trace(make(journal), *args)
        plan = replace(random_plan(program.graph, MESH, random.Random(seed)), program=program)
        run = compile(plan)
        got = run(*args)
        jax.effects_barrier()
        for leaf in jax.tree.leaves(got):
            for part in leaf.addressable_shards:  # what replicas hold is compared one by one
                np.testing.assert_array_equal(part.data, np.asarray(leaf)[part.index])
        same(got, wanted)
        assert journal.seen == alone.seen


@pytest.mark.slow
@pytest.mark.parametrize("ordered", [True, False])
def test_a_call_with_a_result_runs_once_and_all_devices_have_it(ordered: bool) -> None:
    def make(journal: Journal) -> Callable[..., Any]:
        def f(x: jax.Array) -> Any:
            n = io_callback(journal.count, SCALAR, x[1, 1], ordered=ordered)
            return n, (x @ x.T) * n

        return f

    agree(make, numbers(8, 8))


@pytest.mark.slow
def test_ordered_calls_keep_their_order_through_loops_and_branches() -> None:
    def make(journal: Journal) -> Callable[..., Any]:
        def call(x: jax.Array) -> jax.Array:
            return io_callback(journal.count, SCALAR, x, ordered=True)

        def f(x: jax.Array) -> Any:
            first = call(x[0, 0])
            second = call(x[0, 1])

            def step(c: jax.Array, row: jax.Array) -> Any:
                n = call(row[0])
                return c * 0.5 + n + call(c[0]) * row, n

            c, ns = lax.scan(step, x[0], x)
            last = lax.while_loop(lambda n: n < 25, lambda n: n * 0 + call(n), second)
            test = lax.while_loop(lambda n: call(n) < 30, lambda n: n + 1, last)
            same_ = lax.cond(first > 0, lambda v: call(v), lambda v: v, test)
            none = lax.cond(first > 5, lambda v: call(v), lambda v: v, test)
            jax.debug.callback(journal.count, same_, ordered=True)
            return c, ns, last, test, same_, none, call(same_)

        return f

    agree(make, numbers(8, 8))


def test_results_of_every_dtype_arrive_bit_for_bit() -> None:
    given = {
        "bool": np.array([True, False]),
        "int8": np.array([-128, 127], np.int8),
        "uint16": np.array([0, 65535], np.uint16),
        "int32": np.array([-(2**31), 2**31 - 1], np.int32),
        "float32": np.array([-0.0, np.nan, -np.inf, 1e-30, 3e38], np.float32),
        "float16": np.array([-0.0, 65504.0], np.float16),
        "bfloat16": np.asarray(jnp.array([-0.0, 1.5], jnp.bfloat16)),
        "float8_e4m3fn": np.asarray(jnp.array([-0.0, 448.0], jnp.float8_e4m3fn)),
        "complex64": np.array([complex(-0.0, 2.0)], np.complex64),
        "empty": np.zeros((0, 3), np.float32),
    }
    types = {k: jax.ShapeDtypeStruct(x.shape, x.dtype) for k, x in given.items()}
    program = trace(lambda x: (io_callback(lambda _: given, types, x), x), numbers(8))
    plan = replace(random_plan(program.graph, MESH, random.Random(0)), program=program)
    got, _ = compile(plan)(numbers(8))
    for name, want in given.items():
        assert got[name].dtype == want.dtype
        assert np.asarray(got[name]).tobytes() == want.tobytes(), name


def test_a_pure_call_that_is_not_pure_gives_all_devices_the_same() -> None:
    rng = np.random.default_rng(0)

    def f(x: jax.Array) -> Any:
        kind = jax.ShapeDtypeStruct((8,), jnp.float32)
        drawn = jax.pure_callback(lambda: rng.normal(size=8).astype(np.float32), kind)
        return drawn, x + drawn

    program = trace(f, numbers(8, 8))
    for seed in range(2):
        plan = random_plan(program.graph, MESH, random.Random(seed))
        drawn, moved = compile(replace(plan, program=program))(numbers(8, 8))
        same(np.asarray(moved), numbers(8, 8) + np.asarray(drawn))
        for leaf in (drawn, moved):
            for part in leaf.addressable_shards:
                np.testing.assert_array_equal(part.data, np.asarray(leaf)[part.index])


def test_what_a_call_gives_may_be_a_number_of_python() -> None:
    def g(x: jax.Array) -> Any:
        half = jax.pure_callback(lambda _: 0.5, SCALAR, x[0])
        wide = io_callback(lambda _: np.arange(2), jax.ShapeDtypeStruct((2,), jnp.int32), x[0])
        return half * x, wide

    program = trace(g, numbers(8))
    plan = replace(random_plan(program.graph, MESH, random.Random(0)), program=program)
    same(compile(plan)(numbers(8)), jax.tree.map(np.asarray, jax.jit(g)(numbers(8))))


def test_prints_are_printed_once(capsys: Any) -> None:
    def f(x: jax.Array) -> Any:
        jax.debug.print("sum {s:.1f}", s=jnp.sum(x), ordered=True)
        jax.debug.print("first {s:.1f}", s=x[0, 0], ordered=True)
        jax.debug.print("any")
        return x @ x

    x = np.ones((8, 8), np.float32)
    program = trace(f, x)
    plan = replace(random_plan(program.graph, MESH, random.Random(1)), program=program)
    compile(plan)(x)
    jax.effects_barrier()
    lines = capsys.readouterr().out.splitlines()
    assert sorted(lines) == ["any", "first 1.0", "sum 64.0"]
    assert lines.index("sum 64.0") < lines.index("first 1.0")


def test_the_device_that_a_call_asks_for_is_not_kept() -> None:
    where = jax.sharding.SingleDeviceSharding(jax.devices()[3])

    def make(journal: Journal) -> Callable[..., Any]:
        return lambda x: io_callback(journal.count, SCALAR, x[0], sharding=where) + x

    journal = Journal()
    program = trace(make(journal), numbers(8))
    plan = replace(random_plan(program.graph, MESH, random.Random(0)), program=program)
    same(compile(plan)(numbers(8)), numbers(8) + 1)
    assert len(journal.seen) == 1


@pytest.mark.slow
def test_sending_the_result_is_planned_priced_and_compiled() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        kind = jax.ShapeDtypeStruct((64, 64), jnp.float32)
        return jnp.tanh(x @ w) @ io_callback(lambda v: np.asarray(v) * 2, kind, w)

    settings = te.Settings(work=0.1, forms=0, recompute=0)
    front = te.optimize(trace(f, numbers(64, 64), numbers(64, 64)), "cpu:8", settings=settings)
    plan = front.best("seconds")  # whose costs a recount has confirmed
    sent = [c for c in planned_collectives(plan) if c.reader.startswith("io_callback")]
    found = [(c.group, c.payload_bytes) for c in sent if c.kind == "all_reduce"]
    assert found == [(8, 64 * 64 * 4), (8, 4)]  # the result, and whether the call failed
    comparison = compare(plan, compile(plan).compile())
    assert comparison.equal, f"\n{comparison}"


def test_process_zero_calls() -> None:
    class Device:
        def __init__(self, process: int) -> None:
            self.process_index = process

    class Mesh:
        devices = np.array([[Device(1), Device(0)], [Device(0), Device(1)]], dtype=object)

    caller = caller_of(Mesh())  # type: ignore[arg-type]
    assert (caller.device, caller.reporters) == (1, (1, 0))


FAILING = """
import random, sys
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from tapestry_egg.runtime import compile
from tapestry_egg.tracing.trace import trace
from tests.runtime.lowered import MESH
from tests.plans.plans import random_plan

SCALAR = jax.ShapeDtypeStruct((), jnp.float32)
after = []

def bad(x):
    raise LookupError("the user's own")

def result(x):
    return (x * io_callback(bad, SCALAR, x[0, 0])) @ x

def effect(x):
    io_callback(bad, None, x[0, 0], ordered=True)
    io_callback(lambda _: after.append(1), None, x[0, 0], ordered=True)
    return jnp.tanh(x @ x) @ x

def note(x):
    jax.debug.callback(bad, x[0, 0])
    return jnp.tanh(x @ x) @ x

def pure(x):
    return (x * jax.pure_callback(bad, SCALAR, x[0, 0])) @ x

def endless(x):
    n = lax.while_loop(lambda n: n < 5, lambda n: io_callback(bad, SCALAR, n), x[0, 0])
    return x @ x * n

def asked(x):
    n = lax.while_loop(lambda n: io_callback(bad, SCALAR, n) < 5, lambda n: n + 1, x[0, 0])
    return x @ x * n

def streamed(x):
    return lax.scan(lambda c, r: (c + io_callback(bad, SCALAR, r[0]) * c, c), x, x)

def branched(x):
    n = lax.cond(x[0, 0] > 0, lambda v: io_callback(bad, SCALAR, v), lambda v: v, x[0, 0])
    return x @ x * n

def misshapen(x):
    return x @ x * jax.pure_callback(lambda v: np.zeros(3, np.float32), SCALAR, x[0, 0])

x = np.ones((8, 8), np.float32)
for fn in (result, effect, note, pure, endless, asked, streamed, branched, misshapen):
    program = trace(fn, x)
    plan = replace(random_plan(program.graph, MESH, random.Random(1)), program=program)
    try:
        jax.block_until_ready(compile(plan)(x))
        jax.effects_barrier()
        print(fn.__name__, "did not raise")
    except Exception as e:
        told = "the user's own" in str(e) or "gave f32[3], not f32[]" in str(e)
        print(fn.__name__, "raised" if told else f"raised something else: {e}")
assert not after, "a call after one that failed"
print(float(jax.jit(jnp.sum)(x)))
"""


@pytest.mark.slow
def test_an_exception_in_a_call_is_raised_and_nobody_waits() -> None:
    child = subprocess.run(
        [sys.executable, "-c", FAILING], capture_output=True, text=True, timeout=300, check=False
    )
    lines = child.stdout.splitlines()
    assert len(lines) == 10 and lines[-1] == "64.0", child.stdout + child.stderr[-3000:]
    assert [line for line in lines[:-1] if not line.endswith(" raised")] == []
