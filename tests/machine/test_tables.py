"""Measured tables: what they hold is what comes out, and between and beyond they stay sane."""

from __future__ import annotations

import csv
import subprocess
import sys
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import nnls

from benchmarks.bench_tables import monotone_floor
from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds, kernel_seconds
from tapestry_egg.machine.tables.collectives import collective_table, errors_by_kind
from tapestry_egg.machine.tables.files import TableFile, packaged_table, users_table
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.tables.kriging import solved
from tapestry_egg.machine.tables.matmuls import errors_by_dtype, matmul_table
from tapestry_egg.machine.tables.series import Series, _nonnegative, rising, scatter
from tapestry_egg.machine.target import Target, load_target

BF16 = "bfloat16"


def raw(name: str) -> list[dict[str, str]]:
    """The rows of a packaged file, read by a reader of this test's own."""
    text = (resources.files("tapestry_egg.machine.tables") / name).read_text()
    return list(csv.DictReader(x for x in text.splitlines() if not x.startswith("#")))


def product(batch: float, m: float, n: float, k: float, dtype: str = BF16) -> Gemm[float]:
    return Gemm(batch, m, n, k, dtype, dtype, dtype)


def seconds(target: Target, gemm: Gemm[float], traffic: float = 0.0) -> float:
    """By the tables, which hold times of some milliseconds, whatever the device draws then."""
    target = replace(target, sustained=())
    flops = 2.0 * gemm.batch * gemm.m * gemm.n * gemm.k
    return float(kernel_seconds(flops, traffic, gemm.dtype, target, True, gemm))


@pytest.mark.parametrize(
    ("target", "name", "dtype", "median", "high"),
    [
        ("h100:8", "h100_matmuls.csv", BF16, 0.02, 0.06),
        ("h100:8", "h100_matmuls.csv", "float32", 0.04, 0.15),
        ("b200:8", "b200_matmuls.csv", BF16, 0.02, 0.06),
        ("mi355x:8", "mi355x_matmuls.csv", "float16", 0.04, 0.12),
    ],
)
def test_measured_products_cost_what_was_measured(
    target: str, name: str, dtype: str, median: float, high: float
) -> None:
    t, column = load_target(target), f"{dtype}*{dtype}->{dtype}"
    apart = [
        abs(seconds(t, product(*(float(row[x]) for x in ("batch", "m", "n", "k")), dtype))
            / float(row[column]) * 1e6 - 1)
        for row in raw(name)
        if row[column]
    ]  # fmt: skip
    assert len(apart) > 250
    assert np.median(apart) < median and np.percentile(apart, 90) < high


@pytest.mark.parametrize("name", ["h100_matmuls.csv", "b200_matmuls.csv"])
def test_a_product_left_out_is_foretold_by_the_others(name: str, tmp_path: Path) -> None:
    """Nine in ten rows, written as a table of one's own, foretell the tenth within the bars."""
    file = packaged_table(name)
    assert file is not None
    head, *lines = [x for x in file.text.splitlines() if not x.startswith("#")]
    kept = "\n".join([head, *(x for k, x in enumerate(lines) if k % 10 != 4)])
    (tmp_path / "own.csv").write_text(kept)
    t = own_target(tmp_path, name[:4])
    apart = []
    for row in raw(name)[4::10]:
        if cell := row["bfloat16*bfloat16->bfloat16"]:
            shape = [float(row[x]) for x in ("batch", "m", "n", "k")]
            apart.append(abs(seconds(t, product(*shape)) / float(cell) * 1e6 - 1))
    assert np.median(apart) <= 0.05 and np.percentile(apart, 90) <= 0.15


def test_errors_are_those_of_leaving_rows_out() -> None:
    """One row left out by hand: its error is what the formula for all of them at once says."""
    file = packaged_table("b200_matmuls.csv")
    assert file is not None
    table = matmul_table(file)
    column = table.column("float32", "float32", "float32")
    assert column is not None
    own, errors = table.left_out(column)
    lines = file.text.splitlines()
    for k in (0, 17, 120):
        shape = ",".join(str(x) for x in table.shapes[own[k]]) + ","
        mine = lines.index(next(x for x in lines if x.startswith(shape)))
        cells = lines[mine].split(",")
        measured = float(cells[4 + column])
        cells[4 + column] = ""
        without = users_table(
            "b.csv", "\n".join([*lines[:mine], ",".join(cells), *lines[mine + 1 :]]).encode()
        )
        found = matmul_table(without).time(table.shapes[own[k]].reshape(4, 1) * 1.0, column, 0.0)
        assert found[0] * 1e6 / measured - 1 == pytest.approx(errors[k], rel=0.02, abs=2e-4)


@pytest.mark.parametrize("name", ["h100", "b200", "gb200", "gb300", "b300"])
def test_large_collectives_cost_what_was_measured(name: str) -> None:
    for row in raw(f"{name}_collectives.csv"):
        if row["kind"].startswith("permute") or row["dtype"] != "float32":
            continue
        devices, group = int(row["devices"]), int(row["group"])
        t = load_target(f"{name}:{devices}")
        mesh = MeshShape(("x", "y"), (devices // group, group))
        apart = []
        for column, cell in row.items():
            if cell and column.isdigit() and int(column) >= 1 << 22:
                local = int(column) / (group if row["kind"] == "all_gather" else 1)
                found = collective_seconds(row["kind"], local, (1,), mesh, t)
                apart.append(abs(found / float(cell) * 1e6 - 1))
        assert np.median(apart) < 0.05


@pytest.mark.parametrize("count", [1, 2, 7, 60])
def test_systems_are_solved_as_numpy_does(count: int) -> None:
    rng = np.random.default_rng(count)
    a = rng.normal(size=(count, count))
    known, values = a @ a.T + np.eye(count), rng.normal(size=count)
    assert np.allclose(solved(known, values), np.linalg.solve(known, values), rtol=1e-9, atol=1e-12)


def series(*seconds: float, noise: float = 0.0, low: int = 10) -> Series:
    """A series of times of 2^low bytes, twice as many, and so on."""
    sizes = np.exp2(low + np.arange(len(seconds)))
    return Series("all_reduce", "float32", 8, 8, np.log(sizes), np.log(seconds), noise)


def test_a_pipelined_message_that_was_left_out_is_foretold() -> None:
    """(sqrt(a) + sqrt(b V))^2, chunks as large as is best: a straight line between the neighbours'
    logarithms is 4 % above it, the trend is not."""
    sizes = np.exp2(np.arange(16, 30, 2.0))
    times = (np.sqrt(20e-6) + np.sqrt(sizes / 300e9)) ** 2
    s = Series("all_reduce", "float32", 8, 8, np.log(sizes), np.log(times))
    assert np.abs(s.left_out()[1:-1]).max() < 0.01
    chord = np.exp((s.log_seconds[2] + s.log_seconds[4]) / 2) / times[3] - 1
    assert chord > 0.04


def test_small_messages_that_scatter_are_smoothed_and_large_ones_are_not() -> None:
    times = [30e-6, 30e-6, 60e-6, 30e-6, 30e-6, 31e-6, 32e-6]
    small, large = series(*times, noise=0.4), series(*times, noise=0.4, low=24)
    assert np.exp(small.at(np.log([4096.0]))[0]) == pytest.approx(30e-6, rel=0.1)
    steady = series(1e-3, 2e-3, 4.6e-3, 9.2e-3, 18.4e-3, noise=0.4, low=24)
    assert np.exp(steady.at(steady.log_bytes)) == pytest.approx(
        np.exp(steady.log_seconds), rel=0.05
    )
    assert scatter([small]) > 0.1 and scatter([large]) == 0.0


def test_the_floor_that_no_monotone_time_comes_below() -> None:
    """Of 3 and 1 one time is both within a half: 1.5 of each. One of four rows may be far off."""
    assert monotone_floor([[3.0, 1.0]], 1.0) == pytest.approx(0.5, abs=1e-6)
    assert monotone_floor([[1.0, 2.0], [1.0, 9.0, 2.0, 3.0]], 0.8) == pytest.approx(0, abs=1e-6)
    assert monotone_floor([[1.0, 9.0, 2.0, 3.0]], 1.0) == pytest.approx(7 / 11, abs=1e-6)


def test_coefficients_of_the_trend_are_the_least_squares_none_below_0() -> None:
    """SciPy's, wherever the search begins."""
    rng = np.random.default_rng(0)
    for k in range(300):
        rows = int(rng.integers(1, 12))
        columns, values = rng.normal(size=(rows, 3)), rng.normal(size=rows)
        if k % 3 == 0:  # one depends on the others
            columns[:, 2] = columns[:, 0] + columns[:, 1]
        near = rng.integers(0, 2, 3).astype(float)
        x, (y, left) = _nonnegative(columns, values, near), nnls(columns, values)
        assert x.min() >= 0
        assert np.linalg.norm(columns @ x - values) == pytest.approx(left, rel=1e-9, abs=1e-12)
        if rows > 3 and k % 3:
            np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-12)


def test_seconds_of_a_table_take_no_import_of_scipy() -> None:
    code = (
        "import sys; from tapestry_egg.machine.target import load_target; "
        "from tapestry_egg.machine.costs import collective_seconds; "
        "from tapestry_egg.graph.layout import MeshShape; "
        "mesh = MeshShape(('x',), (8,)); "
        "collective_seconds('all_reduce', 1e6, (0,), mesh, load_target('h100:8')); "
        "sys.exit('scipy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["h100", "b200", "gb200"])
def test_more_bytes_never_take_less_time(name: str) -> None:
    file = packaged_table(f"{name}_collectives.csv")
    assert file is not None
    for s in collective_table(file).series:
        assert (np.diff(s.at(np.linspace(0, 25, 400))) >= 0).all()


def test_levels_run_beside_each_other_and_the_slowest_paces_all() -> None:
    """All-reduces over hosts: the ports' time where the message is large, as nccl-tests find."""
    t, mesh = load_target("b200:4x8"), MeshShape(("x",), (32,))
    # 16 GiB over 4 hosts of 8 B200 (P6-B200): 87.18 ms; 1 GiB: 5.75 ms.
    assert collective_seconds("all_reduce", 2.0**34, (0,), mesh, t) == pytest.approx(
        87.18e-3, rel=0.1
    )
    assert collective_seconds("all_reduce", 2.0**30, (0,), mesh, t) == pytest.approx(
        5.75e-3, rel=0.1
    )


def test_waits_at_all_levels_add_up() -> None:
    """Also those of a level between the one that was measured and the outermost."""
    t, mesh = load_target("h100:4x8"), MeshShape(("x",), (64,))
    nodes, hosts = t.levels

    def seconds(wait: float) -> float:
        between = replace(hosts, max=(4,), latency_seconds=wait)
        machine = replace(t, levels=(nodes, between, hosts), shape=(2, 4, 8))
        return float(collective_seconds("all_reduce", 8.0, (0,), mesh, machine))

    assert seconds(1e-3) - seconds(0.0) == pytest.approx(3e-3)  # a ring of four


@pytest.mark.parametrize(
    ("hosts", "reduced", "gathered", "scattered"),
    [(1, 461.5, 264.9, 264.6), (2, 436.1, 226.3, 226.4), (4, 219.1, 229.4, 215.5),
     (8, 192.7, 178.5, 177.5), (16, 188.4, 126.7, 126.5), (32, 194.2, 77.0, 77.3),
     (64, 177.4, 44.4, 45.1)],
)  # fmt: skip
def test_collectives_of_a_gibibyte_over_hosts_of_p5(
    hosts: int, reduced: float, gathered: float, scattered: float
) -> None:
    """Bus bandwidths (GB/s) of Hugging Face's cluster, the upper edges of the published bands; all
    but the all-reduce copy 1 GiB once more."""
    n = 8 * hosts
    t, mesh = load_target(f"p5:{hosts}x8" if hosts > 1 else "p5:8"), MeshShape(("x",), (n,))
    share = 2.0**30 * (n - 1) / n * 1e-9
    copied = 2 * 2.0**30 / t.hbm_bytes_per_second
    together = collective_seconds("all_reduce", 2.0**30, (0,), mesh, t)
    gathering = collective_seconds("all_gather", 2.0**30 / n, (0,), mesh, t) + copied
    scattering = collective_seconds("reduce_scatter", 2.0**30, (0,), mesh, t) + copied
    assert together == pytest.approx(2 * share / reduced, rel=0.1 if hosts > 4 else 0.25)
    assert gathering == pytest.approx(share / gathered, rel=0.07)
    assert scattering == pytest.approx(share / scattered, rel=0.07)


@pytest.mark.parametrize(("hosts", "rate"), [(4, 35.6), (8, 29.1), (16, 24.8), (32, 19.8)])
def test_small_all_to_alls_over_hosts_of_p5(hosts: int, rate: float) -> None:
    """Algorithm bandwidth (GB/s) of 32 MiB by nccl-tests: a message to each device waits."""
    t, mesh = load_target(f"p5:{hosts}x8"), MeshShape(("x",), (8 * hosts,))
    assert collective_seconds("all_to_all", 2.0**25, (0,), mesh, t) == pytest.approx(
        2.0**25 / (rate * 1e9), rel=0.25
    )


def test_rings_over_hosts_go_through_all_devices() -> None:
    t, step = load_target("p5:4x8"), 40e-6
    everywhere, alone = MeshShape(("x",), (32,)), MeshShape(("x", "y"), (4, 8))
    inside = collective_seconds("all_gather", 2.0**16, (1,), alone, t)
    over = collective_seconds("all_gather", 2.0**14, (0,), everywhere, t)
    assert over == pytest.approx(inside + 31 * step, rel=0.03)
    # Groups of one device per host: three steps, each group with ports of its own.
    assert collective_seconds("all_gather", 1.0, (0,), alone, t) == pytest.approx(
        3 * step + t.launch_seconds, rel=0.01
    )
    # An all-to-all sends each of the 24 devices of other hosts a message of its own.
    exchanged = collective_seconds("all_to_all", 2.0**10, (0,), everywhere, t)
    within = collective_seconds("all_to_all", 2.0**8, (1,), alone, t)
    assert exchanged == pytest.approx(within + 100e-6 + 24 * 5e-6, rel=0.03)
    large = collective_seconds("reduce_scatter", 2.0**33, (0,), alone, t)
    assert large == pytest.approx(2.0**33 * 3 / 4 / 46.5e9, rel=0.01)


def test_all_reduces_go_by_rings_or_by_trees_whichever_is_quicker() -> None:
    t, mesh = load_target("p5:4x8"), MeshShape(("x", "y"), (4, 8))
    amounts = np.array([1.0, 2.0**33])
    small, large = collective_seconds("all_reduce", amounts, (0,), mesh, t)
    assert small == pytest.approx(6 * 40e-6 + t.launch_seconds, rel=0.01)  # a ring of four
    assert large == pytest.approx(2 * 2.0**33 * 3 / 4 / 46.5e9, rel=0.01)
    assert [small, large] == [collective_seconds("all_reduce", x, (0,), mesh, t) for x in amounts]
    # A ring of 32 waits for 62 steps, a tree for three hops more than inside a host.
    everywhere = MeshShape(("x",), (32,))
    inside = collective_seconds("all_reduce", 2.0**16, (1,), mesh, t)
    over = collective_seconds("all_reduce", 2.0**16, (0,), everywhere, t)
    assert over == pytest.approx(inside + 3 * 100e-6, rel=0.03)
    # The ring is the quicker one of them where much is sent.
    much = collective_seconds("all_reduce", 2.0**34, (0,), everywhere, t)
    assert much == pytest.approx(2 * 2.0**34 * 3 / 32 / 46.5e9 + 62 * 40e-6, rel=0.1)
    both = collective_seconds("all_reduce", np.array([2.0**16, 2.0**34]), (0,), everywhere, t)
    assert list(both) == [over, much]
    # Trees that nobody measured send what rings do.
    level = replace(t.levels[1], tree_bytes_per_second=0.0, ring_seconds=1.0)
    trees = replace(t, levels=(t.levels[0], level))
    assert collective_seconds("all_reduce", 2.0**33, (0,), mesh, trees) == pytest.approx(
        large + 3 * 100e-6 - 6 * 40e-6, rel=0.001
    )


sizes = st.floats(1, 1e6)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(st.sampled_from(("h100:8", "b200:8", "mi355x:8")), st.sampled_from((BF16, "float32")),
       st.floats(1, 4096), sizes, sizes, sizes, st.integers(0, 3), st.floats(1, 64))  # fmt: skip
def test_products_take_time_and_larger_ones_not_much_less(
    spec: str, dtype: str, batch: float, m: float, n: float, k: float, dim: int, times: float
) -> None:
    """Measured times themselves fall by up to a third where another kernel is taken."""
    t, shape = load_target(spec), [batch, m, n, k]
    small = seconds(t, product(*shape, dtype))
    shape[dim] *= times
    large = seconds(t, product(*shape, dtype))
    assert small > 0 and large >= 0.6 * small
    rate = dict(t.peak)[dtype] if spec != "mi355x:8" else 2516e12
    flops = 2.0 * shape[0] * shape[1] * shape[2] * shape[3]
    assert large >= flops / rate / 1.05


def test_a_product_beyond_the_table_goes_by_work() -> None:
    t = load_target("h100:8")
    edge = seconds(t, product(4, 4096, 4096, 4096))
    assert seconds(t, product(4, 4096, 4096, 16384)) == pytest.approx(4 * edge, rel=0.01)
    assert seconds(t, product(64, 4096, 4096, 4096)) == pytest.approx(16 * edge, rel=0.01)
    # More batches than were measured fill the device as more rows do.
    many, tall = product(32, 512, 512, 512), product(4, 4096, 512, 512)
    assert seconds(t, many) == pytest.approx(seconds(t, tall))
    assert seconds(t, product(1, 1, 1, 1)) == pytest.approx(t.launch_seconds, rel=0.02)


def test_traffic_is_the_floor_and_other_dtypes_have_the_roofline() -> None:
    t = load_target("h100:8")
    gemm = product(1, 256, 256, 256)
    assert seconds(t, gemm, 1e9) == pytest.approx(1e9 / t.hbm_bytes_per_second)
    whole = product(1, 4096, 4096, 4096, "int8")
    assert seconds(t, whole) == pytest.approx(2 * 4096**3 / t.rate("int8", True) + t.launch_seconds)
    half = product(1, 4096, 4096, 4096, "float16")
    assert seconds(t, half) == seconds(t, product(1, 4096, 4096, 4096))


def test_arrays_cost_what_numbers_do() -> None:
    t, rng = load_target("b200:8"), np.random.default_rng(0)
    shape = np.exp2(rng.uniform(0, 16, (4, 50)))
    many = kernel_seconds(
        2.0 * shape.prod(axis=0), np.zeros(50), BF16, t, True, Gemm(*shape, BF16, BF16, BF16)
    )
    assert many == pytest.approx([seconds(t, product(*x)) for x in shape.T.tolist()])


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12))
def test_rising_never_falls_and_keeps_what_rises(values: list[float]) -> None:
    found = rising(np.array(values))
    assert all(a <= b for a, b in pairwise(found.tolist()))
    assert rising(np.sort(values)).tolist() == sorted(values)


# A user's own tables

PRODUCTS = "batch,m,n,k,float32*float32->float32\n" + "\n".join(
    f"1,{m},{n},{k},{2e-3 * m * n * k / 4096 + 1:.6g}"
    for m in (64, 256)
    for n in (64, 256)
    for k in (64, 256)
)
COLLECTIVES = """\
# of my own
kind,dtype,devices,group,1024,1048576
all_reduce,float32,8,2,10,100
all_reduce,float32,8,8,20,400
"""


def own_target(folder: Path, base: str, tables: str = "tables: {matmuls: own.csv}\n") -> Target:
    text = (resources.files("tapestry_egg.machine") / f"targets/{base}.yaml").read_text()
    before, rest = text.split("tables:\n")
    rest = rest[rest.index("\n\n") :]
    (folder / "mine.yaml").write_text(before + tables + rest)
    return load_target(f"{folder}/mine.yaml:8")


def test_a_users_tables_lie_beside_the_target(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(PRODUCTS)
    (tmp_path / "links.csv").write_text(COLLECTIVES)
    t = own_target(tmp_path, "h100", "tables: {matmuls: own.csv, collectives: links.csv}\n")
    one = MeshShape(("x", "y"), (4, 2))
    assert collective_seconds("all_reduce", 2.0**20, (1,), one, t) == pytest.approx(100e-6)
    all_ = MeshShape(("x",), (8,))
    assert collective_seconds("all_reduce", 2.0**20, (0,), all_, t) == pytest.approx(400e-6)
    # Halfway between 2 and 8 lies 4; what the table lacks goes by the links' rates.
    four = MeshShape(("x", "y"), (2, 4))
    assert collective_seconds("all_reduce", 2.0**20, (1,), four, t) == pytest.approx(200e-6)
    gathered = collective_seconds("all_gather", 2.0**20, (0,), all_, t)
    assert gathered == pytest.approx(7 * 2**20 / (450e9 * 0.77) + 7 * 3.6e-6 + t.launch_seconds)
    assert seconds(t, product(1, 256, 256, 256, "float32")) == pytest.approx(
        (2e-3 * 4096 + 1) * 1e-6, rel=0.05
    )
    assert t.matmuls is not None and t.matmuls.own_text == PRODUCTS


@pytest.mark.parametrize(
    ("name", "old", "new", "where", "says"),
    [
        ("own.csv", "1,64,64,64,", "1,64,64,x,", "own.csv:2", "k is 'x', it must be a number"),
        ("own.csv", "1,64,64,64,", "1,64,64,0,", "own.csv:2", "above 0"),
        ("own.csv", "1,64,64,64,", "1,64,64,64.5,", "own.csv:2", "whole number"),
        ("own.csv", "1,64,64,64,", "1,64,64,64,nan,", "own.csv:2", "has 6 cells, not 5"),
        ("own.csv", "1,64,64,256,", "1,64,64,64,", "own.csv:3", "occurs twice"),
        ("own.csv", "float32*float32->float32", "float33*float32->float32", "own.csv: the header",
         "does not name dtypes"),
        ("own.csv", "batch,m", "m,batch", "own.csv:1", "the columns are not batch, m, n, k"),
        ("links.csv", "all_reduce,float32,8,2", "all_red,float32,8,2", "links.csv:3", "known are"),
        ("links.csv", "float32,8,2", "float32,8,16", "links.csv:3", "from 2 to devices"),
        ("links.csv", "8,2,10,100", "8,2,10,", "links.csv:3", "needs two times"),
        ("links.csv", "8,2,10,100", "8,2,10,-1", "links.csv:3", "above 0"),
        ("links.csv", "8,8,20,400", "8,2,20,400", "links.csv:4", "occurs twice"),
        ("links.csv", "1024,1048576", "1024,1 MiB", "links.csv:3", "no number of bytes"),
    ],
)  # fmt: skip
def test_damaged_tables_name_the_place(
    tmp_path: Path, name: str, old: str, new: str, where: str, says: str
) -> None:
    texts = {"own.csv": PRODUCTS, "links.csv": COLLECTIVES}
    assert texts[name].count(old) == 1
    texts[name] = texts[name].replace(old, new)
    for file, text in texts.items():
        (tmp_path / file).write_text(text)
    with pytest.raises(TargetError) as caught:
        own_target(tmp_path, "h100", "tables: {matmuls: own.csv, collectives: links.csv}\n")
    assert says in str(caught.value) and caught.value.where == where


def test_a_table_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"no table '\.\./own\.csv'"):
        own_target(tmp_path, "h100", "tables: {matmuls: ../own.csv}\n")


@pytest.mark.parametrize("data", [b"\xff\xfe", b"", b"# words alone\n"])
def test_files_that_are_no_tables(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "own.csv").write_bytes(data)
    with pytest.raises(TargetError) as caught:
        own_target(tmp_path, "h100")
    assert caught.value.where.startswith("own.csv")


def test_another_table_than_costs_were_counted_by_is_refused() -> None:
    for file in (TableFile("h100_matmuls.csv", "0" * 32), TableFile("own.csv", "0" * 32, PRODUCTS)):
        with pytest.raises(TargetError, match="not the table"):
            matmul_table(file)
    with pytest.raises(TargetError, match="no such table"):
        matmul_table(TableFile("../targets/h100.yaml", "0" * 32))


def packaged_tables() -> list[str]:
    folder = resources.files("tapestry_egg.machine.tables")
    return sorted(f.name for f in folder.iterdir() if f.name.endswith(".csv"))


def test_packaged_tables_say_source_and_licence() -> None:
    assert len(packaged_tables()) >= 8
    for name in packaged_tables():
        text = (resources.files("tapestry_egg.machine.tables") / name).read_text()
        assert "# source: " in text and "# licence: " in text and "# unit: " in text
        file = packaged_table(name)
        assert file is not None and len(text) < 40_000
        assert matmul_table(file) if "matmul" in name else collective_table(file)


@pytest.mark.long
@pytest.mark.parametrize("name", packaged_tables())
def test_packaged_tables_predict_what_they_leave_out(name: str) -> None:
    file = packaged_table(name)
    assert file is not None
    table = matmul_table(file) if "matmul" in name else collective_table(file)
    assert errors_by_dtype(table) if "matmul" in name else errors_by_kind(table)


def test_faster_links_and_arithmetic_are_faster_than_the_tables_say() -> None:
    t, mesh = load_target("h100:8"), MeshShape(("x",), (8,))
    fast = replace(t, link_speed=2.0, matmul_speed=2.0)
    gemm = product(1, 4096, 4096, 4096)
    assert seconds(fast, gemm) == pytest.approx(seconds(t, gemm) / 2)
    slow, quick = (collective_seconds("all_gather", 1e9, (0,), mesh, x) for x in (t, fast))
    delay = collective_seconds("all_gather", 0.0, (0,), mesh, t)
    assert quick - delay == pytest.approx((slow - delay) / 2)
    assert collective_seconds("all_gather", 0.0, (0,), mesh, fast) == delay
