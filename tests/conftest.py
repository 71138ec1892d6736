"""What all tests run in: JAX on the CPU, as eight virtual devices, unless the environment says
otherwise; no deadlines; interruptible; tests that interrupt their process in one of their own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import settings

# The clock of a busy machine is no property of the code. Every run draws the same examples, so that
# who changes one thing is told of that alone; `make test-all` draws new ones.
settings.register_profile("suite", deadline=None, derandomize=True)
settings.register_profile("draws", deadline=None)
settings.load_profile("suite")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A plan of an earlier run would hide what this one does.
os.environ["TAPESTRY_EGG_PLAN_CACHE"] = "off"
os.environ["TAPESTRY_EGG_RECEIPTS"] = "off"
# A shell starts what runs in the background deaf to Ctrl-C, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# LLVM's optimisation takes almost half of a compilation. Without it machine code is slower; the
# compiled module, its collectives and its memory are the same.
_FLAGS = {
    "--xla_force_host_platform_device_count": 8,
    "--xla_backend_optimization_level": 0,
}
for flag, value in _FLAGS.items():
    if flag not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}={value}".strip()


# What imports leave stays to the end. Collecting it again and again took a tenth of the time.
gc.disable()


def pytest_collection_finish() -> None:
    """Tests begin with a collector that seldom looks through what was imported, and what JAX keeps
    of every program: that took a twentieth of the time. No module has added templates yet."""
    _restore({}, [])
    gc.set_threshold(10_000, 10, 1000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run only where JAX is told of one: JAX_PLATFORMS=cuda pytest -m gpu."""
    if "cuda" in os.environ["JAX_PLATFORMS"]:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and JAX_PLATFORMS=cuda"))


def _own_templates() -> Iterator[None]:
    """Templates that a test adds are gone after it, those that its module adds after the module."""
    registry = sys.modules.get("tapestry_egg.metakernels.registry")
    known = (registry.templates(), [*registry._ADDED]) if registry else ({}, [])
    yield
    _restore(*known)


_of_a_module = pytest.fixture(_own_templates, autouse=True, scope="module")
_of_a_test = pytest.fixture(_own_templates, autouse=True)


def _restore(templates: Mapping[str, Any], added: list[str]) -> None:
    registry = sys.modules.get("tapestry_egg.metakernels.registry")
    if registry is None or (registry._TEMPLATES is templates or registry._ADDED == added == []):
        return
    registry._TEMPLATES, registry._ADDED[:] = templates, added
    for cache in (registry._INSTANCES, registry._SIGNATURES, registry._TYPES, registry._BOUND):
        cache.clear()


_CHILD = "TAPESTRY_EGG_TEST_CHILD"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `child` by a pytest of its own: a signal that comes late ends only that."""
    if not pyfuncitem.get_closest_marker("child") or _CHILD in os.environ:
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command,
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, _CHILD: "1"},
        capture_output=True,
        text=True,
        timeout=900,
        start_new_session=True,  # a Ctrl-C of the terminal is for the parent
    )
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout + done.stderr
    return True
