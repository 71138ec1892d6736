"""A device's memory: a limit of every search, unless the user gives another; what is above it is
marked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.front import Front, in_order
from tapestry_egg.files.files import load, save
from tapestry_egg.pipeline import Settings
from tapestry_egg.report.report import write_report
from tapestry_egg.show.chart import front_svg
from tapestry_egg.show.plot import front_info
from tests.extract.test_front_choice import plan as plan_of

QUICK = Settings(work=0.3, algebra=replace(Settings().algebra, iterations=0))
PLANS = in_order([plan_of(1, 300, 5), plan_of(2, 200, 4), plan_of(9, 100, 3)])


def holding(usable: int | None) -> Front:
    return Front(PLANS, target="h100:2", graph_name="g", usable_bytes=usable)


def test_the_best_plan_is_one_that_a_device_holds() -> None:
    assert holding(None).best().name == "p0"
    assert holding(300).best().name == "p0"
    assert holding(299).best().name == "p1"
    assert holding(299).best(limits={"seconds": 5}).name == "p1"
    assert holding(299).best(limits={"peak_bytes": 300}).name == "p0", "the user's own word"
    assert [p.name for p in holding(250).ranked("joules")] == ["p2", "p1"]
    assert holding(150).knee().name == "p2"


def test_where_no_plan_fits_the_least_peak_is_told() -> None:
    with pytest.raises(ExtractError) as caught:
        holding(50).best()
    assert "peak_bytes: a device has 50 B, least found 100 B" in caught.value.hint
    assert holding(50).knee().name == "p1"
    with pytest.raises(ExtractError, match="asked 60 B, least found 100 B"):
        holding(50).best(limits={"peak_bytes": 60})


def test_what_is_above_is_marked_everywhere(tmp_path: Path) -> None:
    front = holding(250)
    lines = str(front).splitlines()
    assert [line.split()[0] for line in lines if "!" in line] == ["p0", "!"]
    assert "! above the 250 B that a device has for programs" in lines
    assert [row["fits"] for row in front.table()] == [False, True, True]
    page = write_report(front, tmp_path).read_text()
    assert "300 B !" in page and "200 B !" not in page and "! above the 250 B" in page
    picture = front_svg(front_info(front))
    assert picture.count('fill="none" stroke="#') == 1 and "ring: above the 250 B" in picture
    assert "more than a device's memory" in picture
    for usable in (None, 300):
        whole = holding(usable)
        assert "!" not in str(whole) and all(row["fits"] for row in whole.table())
        assert "ring:" not in front_svg(front_info(whole))


def test_a_saved_front_keeps_it(tmp_path: Path) -> None:
    front = _front(te.load_target("h100:8"))
    assert front.usable_bytes == 80_000_000_000
    save(front, tmp_path / "f.json")
    again = load(tmp_path / "f.json")
    assert isinstance(again, Front) and again.usable_bytes == front.usable_bytes


def test_virtual_devices_share_the_memory_of_the_machine() -> None:
    assert te.load_target("cpu:8").usable_bytes is None
    assert te.load_target("v5e:4x4").usable_bytes == 15.75 * 2**30


def _front(machine: te.Target) -> Front:
    def step(w, x):
        return jnp.tanh(x @ w["up"]) @ w["down"]

    w = {"up": jnp.ones((64, 256)), "down": jnp.ones((256, 64))}
    program = te.trace(step, w, jnp.ones((128, 64)))
    return te.optimize(program, machine, settings=QUICK, mesh_shapes=[te.MeshShape(("x",), (8,))])


@pytest.mark.slow
def test_a_search_looks_for_a_plan_within_it() -> None:
    h100 = te.load_target("h100:8")
    free = _front(h100)
    peaks = sorted(p.costs.peak_bytes for p in free)
    assert free.best().costs.peak_bytes > peaks[0]
    tight = _front(replace(h100, hbm_bytes=free.best().costs.peak_bytes - 1))
    assert all(tight.fits(p) for p in tight)
    assert tight.best().costs.peak_bytes < free.best().costs.peak_bytes
    parted = _front(replace(h100, hbm_bytes=peaks[0] - 1))
    assert parted.best().micro_batches > 1, (
        "below every plan of the whole batch it is taken in parts"
    )
    assert parted.best().costs.peak_bytes < peaks[0]
    assert parted.best().micro_batches == 4, "two are too many rows at a time, sixteen too few"
    with pytest.raises(ExtractError, match=r"a device has .* nothing searched holds"):
        _front(replace(h100, hbm_bytes=parted[-1].costs.peak_bytes // 8))
