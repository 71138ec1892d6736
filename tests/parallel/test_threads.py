"""First use by several threads at once, each time in a process that has used nothing yet."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

_HEAD = """
import sys, threading
import tapestry_egg as te

def at_once(*calls, often=False):
    start, found = threading.Barrier(len(calls)), [None] * len(calls)
    sys.setswitchinterval(1e-6 if often else 0.005)  # how often threads change places

    def run(k):
        start.wait()
        try:
            found[k] = calls[k]()
        except BaseException as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(calls))]
    [t.start() for t in threads]
    [t.join() for t in threads]
    sys.setswitchinterval(0.005)
    for x in found:
        if isinstance(x, BaseException):
            raise x
    return found
"""


def fresh(program: str) -> None:
    """Run a program in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _HEAD + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def test_registries_are_seen_whole_or_not_at_all() -> None:
    fresh(
        """
        from tapestry_egg.metakernels import registry
        from tapestry_egg.monoids import monoids, single_monoids

        counts = at_once(*[lambda: len(registry.templates())] * 8, often=True)
        assert len(set(counts)) == 1 and counts[0] > 100, counts
        counts = at_once(*[lambda: (len(monoids()), single_monoids())] * 8, often=True)
        assert len(set(counts)) == 1, counts
        """
    )


def test_handles_of_many_threads_are_told_apart() -> None:
    fresh(
        """
        from tapestry_egg.tracing.codec import Handles

        handles = Handles()
        objects = [[object() for _ in range(2000)] for _ in range(8)]
        puts = [lambda own=own: [handles.put(x) for x in own] for own in objects]
        numbers = at_once(*puts, often=True)
        for own, given in zip(objects, numbers):
            assert all(handles.get(n) is x for n, x in zip(given, own))
        """
    )


@pytest.mark.slow
def test_threads_trace_and_plan_programs_of_their_own() -> None:
    fresh(
        """
        import jax, jax.numpy as jnp
        from tapestry_egg.pipeline import Settings

        def work(k):
            def fn(x, w, v):
                return jnp.tanh(x @ w + x @ v) * k
            x, w = (jax.ShapeDtypeStruct(s, "float32") for s in ((64, 32), (32, 16)))
            program = te.trace(fn, x, w, w)
            return len(te.optimize(program, "cpu:2", settings=Settings(work=0.2, workers=1)))

        assert min(at_once(*[lambda k=k: work(k) for k in range(4)])) > 0
        """
    )


@pytest.mark.slow
def test_a_function_that_threads_call_first_is_planned_once() -> None:
    fresh(
        """
        import jax, numpy as np
        from tapestry_egg.pipeline.jit import optimized
        from tapestry_egg.pipeline import Settings

        planned = []
        plan_program = optimized.plan_program

        def counted(*args, **kwargs):
            planned.append(threading.get_ident())
            return plan_program(*args, **kwargs)

        optimized.plan_program = counted
        step = te.jit(lambda x: x * 2.0 + 1.0, target="cpu:1", mesh=jax.devices()[:1],
                      settings=Settings(work=0.2, workers=1))
        x = np.ones(16, np.float32)
        for y in at_once(*[lambda: step(x)] * 8):
            np.testing.assert_allclose(y, 3.0)
        assert len(planned) == 1, planned
        """
    )
