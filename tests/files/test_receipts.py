"""Files that were certified before are known by their content, and by nothing else."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import GraphError, PlanError
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.front import Front
from tapestry_egg.files import files, fingerprint
from tapestry_egg.files.files import sealed
from tapestry_egg.pipeline import Settings

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


@cache
def planned() -> Front:
    program = te.trace(lambda x, w: jnp.tanh(x @ w), X, X)
    return te.optimize(
        program, "cpu:8", settings=Settings(work=0.2, workers=1, recompute=0, forms=0)
    )


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(fingerprint.PLACE, str(tmp_path / "receipts"))
    return tmp_path


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are certified from here on."""
    found: list[str] = []
    admit, admit_front = files.admit, files.admit_front

    def one(*given: Any) -> None:
        found.append("plan")
        admit(*given)

    def front(*given: Any) -> None:
        found.append("front")
        admit_front(*given)

    monkeypatch.setattr(fingerprint, "_is_as_written", lambda: True)  # but for these two
    monkeypatch.setattr(files, "admit", one)
    monkeypatch.setattr(files, "admit_front", front)
    return found


def test_what_was_written_here_is_not_certified_again(folder: Path, certified: list[str]) -> None:
    for name, saved in (("front", planned()), ("plan", planned().plans[0])):
        te.save(saved, folder / f"{name}.json")
        loaded = te.load(folder / f"{name}.json")
        assert not certified
        assert loaded == saved
        assert pickle.loads(pickle.dumps(loaded)) == saved
        te.save(loaded, folder / "again.json")
        assert (folder / "again.json").read_bytes() == (folder / f"{name}.json").read_bytes()


def test_what_comes_from_elsewhere_is_certified_once(
    folder: Path, certified: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "front.json"
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv(fingerprint.PLACE, "off")
        te.save(planned(), path)
        assert te.load(path) == planned()
    assert te.load(path) == te.load(path) == planned()
    assert certified == ["front", "front"]


def test_an_edited_file_is_another_file(folder: Path, certified: list[str]) -> None:
    path = folder / "front.json"
    te.save(planned(), path)
    document = json.loads(path.read_text())
    document["plans"][0]["costs"]["peak_bytes"] //= 4
    path.write_text(json.dumps(document))
    with pytest.raises(GraphError, match="digest differs"):
        te.load(path)
    path.write_text(json.dumps(sealed(document)))
    with pytest.raises(PlanError, match="counted again"):
        te.load(path)
    assert certified == ["front"]


def test_plans_that_nobody_has_certified_are_not_believed(
    folder: Path, certified: list[str]
) -> None:
    plan = planned().plans[0]
    te.save(replace(plan, costs=replace(plan.costs, seconds=1e-9)), folder / "plan.json")
    with pytest.raises(PlanError, match="counted again"):
        te.load(folder / "plan.json")


def test_a_process_whose_code_was_replaced_keeps_no_receipts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert fingerprint._is_as_written()
    with monkeypatch.context() as patch:
        profile = Walk.profile
        patch.setattr(Walk, "profile", lambda self: profile(self))
        te.save(planned(), folder / "front.json")
        assert not fingerprint._is_as_written()
    assert not (folder / "receipts").exists()
    te.save(planned(), folder / "front.json")
    assert (folder / "receipts").exists()
