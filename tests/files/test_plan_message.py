"""Fronts in bytes: what they leave out and take from the receiver, and what of them is believed."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import GraphError, PlanError, TapestryError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.files import plan_message
from tapestry_egg.files.plan_cache import PlanCache, _head
from tapestry_egg.files.plan_message import packed, unpacked
from tapestry_egg.pipeline.settings import Settings

X = jnp.ones((16, 8))
KEY = "k" * 64


def program() -> te.Program:
    def host(x: Any) -> Any:
        return np.asarray(x) + 1

    return te.trace(lambda x: jax.pure_callback(host, x, x) * 2, X)


@pytest.fixture(scope="module")
def front() -> Front:
    """A front of a program with an object of this process, and with shardings of the user's own."""
    found = te.optimize(
        program(), "cpu:4", settings=Settings(work=0.1, forms=0, recompute=0, workers=1)
    )
    return replace(found, original=replace(found.plans[0], name="given"))


@pytest.fixture(scope="module")
def data(front: Front) -> bytes:
    plan = front.plans[0]
    assert plan.program is not None
    return packed(front, plan.program)


def test_the_users_own_plan_has_the_objects_of_the_receiver_too(data: bytes) -> None:
    mine = program()
    again = unpacked(data, mine)
    assert again.original is not None and again.original.program is mine
    np.testing.assert_allclose(te.compile(again.original, jax.devices()[:4])(X), (X + 1) * 2)


def changed(data: bytes, change: Callable[[Any], Any]) -> bytes:
    message = json.loads(zlib.decompress(data))
    change(message)
    return zlib.compress(json.dumps(message).encode())


def test_what_a_kept_front_says_of_the_users_own_plan_is_certified(
    data: bytes, tmp_path: Path
) -> None:
    def cheaper(message: Any) -> None:
        message["front"]["original"]["costs"]["seconds"] *= 0.5

    for body, believed in ((data, True), (changed(data, cheaper), False)):
        path = tmp_path / f"{KEY}.front"
        path.write_bytes(_head(KEY, body) + body)
        if believed:
            assert PlanCache(tmp_path).get(KEY, program()) is not None
            continue
        with pytest.warns(UserWarning, match=r"original\.costs\.seconds"):
            assert PlanCache(tmp_path).get(KEY, program()) is None


FAULTS: dict[str, Callable[[Any], Any]] = {
    "no front": lambda m: m.pop("front"),
    "no lines": lambda m: m.pop("lines"),
    "fewer lines": lambda m: m["lines"].pop(),
    "lines of something else": lambda m: m.update(lines=3),
    "no sources": lambda m: m["front"].pop("sources"),
    "another object": lambda m: m["front"]["graphs"][0]["operations"][0]["params"].update(
        callback={"$dict": [["tapestry_egg.object", 99]]}
    ),
    "a constant of nowhere": lambda m: m["front"]["graphs"][0]["constants"].update(
        {"1": {"of": 9}}
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bytes_that_hold_something_else_are_refused(fault: str, data: bytes) -> None:
    with pytest.raises((GraphError, PlanError)):
        unpacked(changed(data, FAULTS[fault]), program())


@pytest.mark.parametrize("junk", [b"", b"front", zlib.compress(b"{}"), zlib.compress(b"[]")])
def test_bytes_that_hold_nothing_are_refused(junk: bytes) -> None:
    with pytest.raises(TapestryError, match=r"not a packed front|cut off"):
        unpacked(junk, program())


def test_a_message_may_not_grow_without_end(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_message, "_MOST_BYTES", 1 << 10)
    with pytest.raises(GraphError, match="more than 1024 bytes"):
        unpacked(data, program())
