"""What all tests run in: JAX on the CPU, as eight virtual devices, unless the environment says
otherwise; no deadlines; interruptible."""

from __future__ import annotations

import os
import signal

import pytest
from hypothesis import settings

# The clock of a busy machine is no property of the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# A plan of an earlier run would hide what this one does.
os.environ["TAPESTRY_EGG_PLAN_CACHE"] = "off"
# A shell starts what runs in the background deaf to Ctrl-C, and its children inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_FLAG = "--xla_force_host_platform_device_count"
if _FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}=8".strip()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` run only where JAX is told of one: JAX_PLATFORMS=cuda pytest -m gpu."""
    if "cuda" in os.environ["JAX_PLATFORMS"]:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU and JAX_PLATFORMS=cuda"))
