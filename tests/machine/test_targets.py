"""Targets and costs against hand numbers, brute force over devices, and malformed files."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from math import prod
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from tapestry_egg.errors import PlanError, TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import (
    LOCAL,
    MOVING,
    collective_seconds,
    collective_wire_bytes,
    kernel_seconds,
)
from tapestry_egg.machine.energy import collective_joules, idle_joules, joules
from tapestry_egg.machine.target import Target, check_machine, known_targets, load_target

SPECS = ("h100:8", "a100:2x8", "h200:4x4", "v100:2x16", "b200:1", "v4:4x4x4", "v4:2x2x4", "v5e:4x4")
SPECS += ("v5e:2x4x4", "v5e:16x2", "v5p:2x4x4x8", "v6e:2x4", "cpu:6", "cpu:2x4")


def axes_of(mesh: MeshShape) -> list[tuple[int, ...]]:
    """Every non-empty set of axes."""
    n = range(len(mesh.sizes))
    return [a for k in range(1, len(mesh.sizes) + 1) for a in itertools.combinations(n, k)]


def groups(mesh: MeshShape, axes: tuple[int, ...]) -> list[list[int]]:
    """Device numbers of each group over `axes`, found by counting."""
    ids = np.arange(mesh.devices).reshape(mesh.sizes)
    last = np.moveaxis(ids, axes, range(-len(axes), 0))
    return last.reshape(-1, mesh.parts(axes)).tolist()


# Loading


def test_every_known_target_loads_with_its_sources() -> None:
    gpus = ("a100", "b200", "b300", "gb200", "gb300", "h100", "h200", "mi355x", "p5", "v100")
    assert set(known_targets()) == {*gpus, "cpu", "v4", "v5e", "v5p", "v6e"}
    for name in known_targets():
        t = load_target(f"{name}:4")
        assert t.name == name and t.devices == 4 and t.spec == f"{name}:4" == str(t)
        assert t.sources and t.retrieved >= "2026-11-21" and t.title
        assert t.rate("float32", False) > 0 and hash(t) == hash(load_target(f"{name}:4"))
        assert (t.fusing is not None) == (name in gpus)
        if t.fusing:  # as XLA describes it, within an eighth of what data sheets have
            rate = 2 * t.fusing.cores * t.fusing.units * t.fusing.hertz
            assert rate == pytest.approx(dict(t.vector)["float32"], rel=0.125)
            memory = t.hbm_bytes_per_second / t.fusing.bytes_per_second
            assert 0.6 < memory < 1.0
        if name == "v100":  # its tensor cores take float16 alone
            assert t.rate("float16", True) > 2 * t.rate("bfloat16", True)
        elif name != "cpu":
            assert t.rate("bfloat16", True) > 2 * t.rate("float32", False)


def test_datasheet_figures() -> None:
    h100 = load_target("h100:8")
    assert dict(h100.peak)["bfloat16"] == pytest.approx(989.4e12)
    assert dict(h100.peak)["float32"] == pytest.approx(494.7e12)
    assert dict(load_target("a100:8").peak)["float32"] == 156e12
    assert h100.hbm_bytes == 80_000_000_000
    assert h100.hbm_bytes_per_second == pytest.approx(0.904 * 3350e9)
    assert load_target("h200:8").hbm_bytes == 141_000_000_000
    assert load_target("v5e:4x4").hbm_bytes == 15.75 * 2**30  # what the TPU compiler allows
    assert load_target("v4:4x4x4").hbm_bytes == 30.75 * 2**30
    assert load_target("v5e:16x16").devices == 256


def test_rates_fall_back_by_family() -> None:
    h100, v5e = load_target("h100:8"), load_target("v5e:4x4")
    assert h100.rate("float8_e4m3fn", True) == pytest.approx(0.7 * 1978.9e12)
    assert h100.rate("uint8", True) == h100.rate("int8", True)
    a100 = load_target("a100:8")
    assert a100.rate("complex64", True) == a100.rate("float32", True)
    assert a100.rate("complex64@highest", True) == pytest.approx(19.5e12 * a100.flops_efficiency)
    assert h100.rate("complex64", True) == 225e12  # attained
    assert h100.peak_rate("complex64", True) == h100.peak_rate("float32", True)
    assert h100.rate("int32", True) == h100.rate("float32", False)  # no matrix unit for it
    assert v5e.rate("float16", True) == v5e.rate("bfloat16", True)
    assert v5e.rate("bfloat16", False) == v5e.rate("key<fry>", False) < v5e.rate("bfloat16", True)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("h100", "does not say how many"),
        ("h100:", "does not say how many"),
        ("h100:eight", "does not say how many"),
        ("h100:2x", "does not say how many"),
        ("h100x8", "how many devices, and 'h100x8' is no known target.*\n.*as h100:8.*b200, b300"),
        ("h100:0", "not a shape"),
        ("h1000:8", "unknown target 'h1000'.*\n.*a100, b200, b300"),
        ("h100:16", "too large"),
        ("h100:2x2x8", "3 dims"),
        ("cpu:2x2x2", "3 dims, cpu at most 2\n.*wired.*memory any number.*mesh_shapes"),
        ("v5e:32x4", "too large"),
        ("v5e:2x2x4x4", "4 dims"),
        ("nowhere/chip.yaml:8", "nowhere/chip.yaml: cannot be read"),
    ],
)
def test_wrong_specs(spec: str, says: str) -> None:
    with pytest.raises(TargetError, match=f"(?s){says}"):
        load_target(spec)


def test_importing_costs_does_not_import_jax() -> None:
    code = "import sys, tapestry_egg.machine.costs; sys.exit('jax' in sys.modules)"
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root).returncode == 0


# Users' files

CHIP = """\
name: mine
title: my chip
retrieved: 2026-11-21
sources: [a napkin]
peak: {bfloat16: 1e12}
vector: {float32: 1e11}
hbm:
  bytes: 8e9
  bytes_per_second: 1e11
  reserved_bytes: 1e9
launch_seconds: 1e-6
efficiency: {flops: 0.5, hbm: 0.5}
power:
  idle: 10
  max: 100
  measured: true
  busy: {kernel: 15, flops: 60, hbm: 30, link: 15}
levels:
  - {name: ring, kind: torus, max: [4], wrap: {multiple: 4, every_dim: false},
     bytes_per_second: 1e9, efficiency: 0.5, latency_seconds: 1e-6}
  - {name: lan, kind: switch, bytes_per_second: 1e8, efficiency: 1.0, latency_seconds: 1e-5}
"""


def test_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(CHIP)
    t = load_target(f"{file}:2x4")
    assert t == load_target(Path(f"{file}:2x4")) and t.spec == "mine:2x4"
    assert t.hbm_bytes == 7_000_000_000 and t.rate("bfloat16", True) == 0.5e12
    mesh = MeshShape(("x", "y"), (2, 4))
    assert t.link(mesh, (1,)).bytes_per_second == 1e9  # both ways round the ring, half efficient
    assert t.link(mesh, (0,)).bytes_per_second == 1e8
    # Watts are those at the published rates: half of each here, and both ways round the ring.
    assert joules(0.5e12, 0.5e11, 1e9, 1.0, 1, t) == pytest.approx(10 + 15 + 30 + 15 + 7.5)
    assert idle_joules(2.0, 8, t) == pytest.approx(160)


@pytest.mark.parametrize("base", known_targets())
def test_a_file_may_say_what_differs_from_a_shipped_target(tmp_path: Path, base: str) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(f"name: mine\nlike: {base}\nstep_seconds: 0.125\nhbm: {{bytes: 8e9}}\n")
    with pytest.raises(TargetError, match="'reserved_bytes' is missing in hbm"):
        load_target(f"{file}:4")
    file.write_text(f"like: {base}\nstep_seconds: 0.125\n")
    with pytest.raises(TargetError, match="'name' is missing"):
        load_target(f"{file}:4")
    file.write_text(f"name: mine\nlike: {base}\nstep_seconds: 0.125\n")
    shipped = load_target(f"{base}:4")
    assert load_target(f"{file}:4") == replace(shipped, name="mine", step_seconds=0.125)


@pytest.mark.parametrize(
    ("old", "new", "where", "says"),
    [
        ("bytes: 8e9", "bytes: lots", "8:10", "'bytes' is not a number: 'lots'"),
        ("bytes: 8e9", "bytes: -1", "8:10", "above 0"),
        ("bytes: 8e9", "bytes: nan", "8:10", "above 0"),
        ("bytes: 8e9", "bytes: 1e8", "8:3", "nothing is left"),
        ("bytes: 8e9", "bytes: [1]", "8:10", "not a text"),
        ("  bytes: 8e9\n", "", "8:3", "'bytes' is missing in hbm"),
        ("bytes: 8e9", "bites: 8e9\n  bytes: 8e9", "8:3", "unknown key 'bites' in hbm"),
        ("bytes: 8e9", "bytes: 8e9\n  bytes: 8e9", "9:3", "given twice"),
        ("title: my chip", "title: [my chip", "3:10", "expected"),
        ("title: my chip", "titel: my chip", "1:1", "'title' is missing"),
        ("retrieved: 2026-11-21", "since: 1\nretrieved: 2026-11-21", "3:1", "unknown key 'since'"),
        ("sources: [a napkin]", "sources: a napkin", "4:10", "not a list"),
        ("vector: {float32: 1e11}", "vector: {bfloat16: 1}", "6:9", "no entry float32"),
        ("vector: {float32: 1e11}", "vector: fast", "6:9", "not a mapping"),
        ("efficiency: {flops: 0.5", "efficiency: {flops: 1.5", "12:21", "at most 1"),
        ("idle: 10", "idle: 200", "14:3", "above max"),
        ("measured: true", "measured: perhaps", "16:13", "true or false"),
        ("hbm: 30", "hbm: much", "17:38", "is not a number"),
        ("kind: torus", "kind: mesh", "19:5", "neither switch nor torus"),
        ("max: [4]", "max: [4.5]", "19:37", "whole number"),
        ("kind: switch", "kind: torus, max: [2]", "1:1", "only the innermost"),
        ("name: lan", "name: lan, speed: 3", "21:17", "unknown key 'speed'"),
        ("name: ring", "name: ring, message_seconds: 1e-6", "19:5", "only a switch has"),
        ("name: lan", "name: lan, tree_bytes_per_second: 1", "21:5", "without ring_seconds"),
        ("name: mine", "- name: mine", "2:1", "expected"),
        ("name: mine", "name: mine\nlike: h1000", "2:7", "unknown target 'h1000'"),
    ],
)
def test_malformed_files_name_the_place(
    tmp_path: Path, old: str, new: str, where: str, says: str
) -> None:
    assert CHIP.count(old) == 1, old
    file = tmp_path / "mine.yaml"
    file.write_text(CHIP.replace(old, new))
    with pytest.raises(TargetError) as caught:
        load_target(f"{file}:2x4")
    assert says in str(caught.value)
    assert caught.value.where == f"{file}:{where}"


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"# only a comment\n", b"a: \x07", b"- 1"])
def test_files_that_are_no_targets(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "mine.yaml"
    file.write_bytes(data)
    with pytest.raises(TargetError) as caught:
        load_target(f"{file}:8")
    assert str(file) in caught.value.where


def test_a_file_is_data_only(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(CHIP.replace("my chip", "!!python/object/apply:os.system ['exit 1']"))
    with pytest.raises(TargetError):
        load_target(f"{file}:8")


@pytest.mark.parametrize(
    ("record", "field", "value"),
    [
        *(("split_k", "cores", 0), ("fusing", "hertz", -1.0), ("caches", "line", 0.0)),
        *(("power", "max_watts", 0.0), ("power", "idle_watts", float("nan"))),
    ],
)
def test_every_figure_of_a_machine_from_elsewhere_is_checked(
    record: str, field: str, value: float
) -> None:
    """Such as are divided by are above zero."""
    h100 = load_target("h100:8")
    check_machine(h100, "machine")
    check_machine(replace(h100, power=replace(h100.power, idle_watts=0.0)), "machine")
    broken = replace(h100, **{record: replace(getattr(h100, record), **{field: value})})
    with pytest.raises(TargetError, match=rf"machine\.{record}\.{field}: .* is out of range"):
        check_machine(broken, "machine")


# Meshes


def test_mesh_shapes_of_one_host_and_of_several() -> None:
    def sizes(spec: str, n: int = 2) -> list[tuple[int, ...]]:
        return [m.sizes for m in load_target(spec).mesh_shapes(n)]

    assert sizes("h100:8") == [(8,), (2, 4), (4, 2)]
    assert sizes("h100:8", 1) == [(8,)] and sizes("h100:8", 3)[-1] == (2, 2, 2)
    assert sizes("h100:4x8")[:2] == [(32,), (4, 8)]
    assert sizes("v5e:4x4") == [(16,), (4, 4), (2, 8), (8, 2)]
    assert sizes("h100:1") == [(1,)]
    # Two hosts of six: 3 x 4 would put half of one group on each host unevenly, 4 x 3 would not.
    assert (3, 4) not in sizes("cpu:2x6") and (4, 3) in sizes("cpu:2x6")
    assert [m.names for m in load_target("cpu:8").mesh_shapes(3)][-1] == ("x", "y", "z")
    with pytest.raises(TargetError):
        load_target("cpu:8").mesh_shapes(0)


@pytest.mark.parametrize("spec", SPECS)
def test_mesh_shapes_are_all_the_even_factorizations(spec: str) -> None:
    t = load_target(spec)
    meshes = t.mesh_shapes(3)
    assert len(set(meshes)) == len(meshes)
    assert all(m.devices == t.devices for m in meshes)
    if t.devices > 1:
        assert all(s > 1 for m in meshes for s in m.sizes)
    # By counting: a mesh is even when each group visits every coordinate it touches equally often.
    coords = np.stack(np.unravel_index(np.arange(t.devices), t.shape), axis=-1)
    every = range(2, t.devices + 1)
    for n in (1, 2):
        for sizes in itertools.product([s for s in every if t.devices % s == 0], repeat=n):
            if prod(sizes) != t.devices:
                continue
            mesh = MeshShape(("x", "y")[:n], sizes)
            even = True
            for axis in range(n):
                kinds = set()
                for group in groups(mesh, (axis,)):
                    moved = coords[group] - coords[group].min(axis=0)
                    kinds.add(tuple(map(tuple, moved.tolist())))
                even &= len(kinds) == 1
            assert (mesh in meshes) == even, sizes


@pytest.mark.parametrize("spec", SPECS)
def test_spans_partition_the_group_by_level(spec: str) -> None:
    t = load_target(spec)
    coords = np.stack(np.unravel_index(np.arange(t.devices), t.shape), axis=-1)
    inner = min(t.levels[0].rank, len(t.shape))
    for mesh in t.mesh_shapes(3):
        for axes in axes_of(mesh):
            spans = {s.level: s for s in t.spans(mesh, axes)}
            members = coords[groups(mesh, axes)[0]]
            hosts = {tuple(c[:-inner]) for c in members.tolist()}
            network = spans.get(t.levels[1].name)
            assert (network.group if network else 1) == len(hosts)
            assert prod(s.group for s in spans.values()) == mesh.parts(axes)
            link = t.link(mesh, axes)
            assert all(link.bytes_per_second <= s.bytes_per_second for s in spans.values())


def test_meshes_that_do_not_fit() -> None:
    t = load_target("h100:2x8")
    with pytest.raises(TargetError, match="has 32 devices, the target has 16"):
        t.link(MeshShape(("x",), (32,)), (0,))
    with pytest.raises(TargetError, match="no axes"):
        t.link(MeshShape(("x",), (16,)), (1,))
    uneven = load_target("cpu:3x4")
    straddling = MeshShape(("x", "y"), (2, 6))
    assert uneven.link(straddling, (1,)).bytes_per_second == 0.5e9  # the slower level
    torus = load_target("v5e:3x4")
    assert torus.link(straddling, (1,)).bytes_per_second <= 45e9
    assert t.link(MeshShape(("x", "y"), (16, 1)), (1,)).bytes_per_second == float("inf")


# Links of a torus, by sending every byte along a route


def busiest_link(t: Target, mesh: MeshShape, axes: tuple[int, ...]) -> float:
    """Bytes over the busiest link when each device sends 1/g byte to each member of its group.

    Routes go dim by dim, the short way round where the dim is a ring (ties split in two).
    """
    level, shape = t.levels[0], t.shape
    load: dict[tuple[int, tuple[int, ...], int], float] = defaultdict(float)
    rings = [level.wrap_multiple > 0 and n % level.wrap_multiple == 0 for n in shape]
    if level.wrap_every_dim and not (all(rings) and len(shape) == level.rank):
        rings = [False] * len(shape)
    where = [tuple(map(int, np.unravel_index(i, shape))) for i in range(t.devices)]
    for group in groups(mesh, axes):
        share = 1 / len(group)
        for a, b in itertools.permutations(group, 2):
            at = list(where[a])
            for d, n in enumerate(shape):
                there = (where[b][d] - at[d]) % n if rings[d] else where[b][d] - at[d]
                if rings[d] and 2 * there == n:
                    ways = [(there, share / 2), (there - n, share / 2)]
                elif rings[d] and 2 * there > n:
                    ways = [(there - n, share)]
                else:
                    ways = [(there, share)]
                for steps, part in ways:
                    for k in range(abs(steps)):
                        sign = 1 if steps > 0 else -1
                        here = (*at[:d], (at[d] + sign * k) % n, *at[d + 1 :])
                        load[d, here, sign] += part
                at[d] = where[b][d]
    return max(load.values())


@pytest.mark.parametrize(
    "spec", ["v5e:4x4", "v5e:2x8", "v5e:16x2", "v4:4x4x4", "v4:2x2x4", "v6e:5"]
)
def test_torus_all_to_all_loads_the_busiest_link(spec: str) -> None:
    t = load_target(spec)
    for mesh in t.mesh_shapes(2):
        for axes in axes_of(mesh):
            (span,) = t.spans(mesh, axes)
            seconds = busiest_link(t, mesh, axes) / t.levels[0].bytes_per_second
            assert span.exchange_seconds_per_byte == pytest.approx(seconds), (mesh, axes)


def test_rings_lines_and_interleaved_groups() -> None:
    def rate(spec: str, sizes: tuple[int, ...], axis: int) -> float:
        mesh = MeshShape(("x", "y", "z")[: len(sizes)], sizes)
        return load_target(spec).link(mesh, (axis,)).bytes_per_second

    assert rate("v5e:4x4", (4, 4), 1) == 45e9  # a line: one link at its ends
    assert rate("v5e:16x16", (16, 16), 1) == 90e9  # a ring: both ways
    assert rate("v5e:16x16", (256,), 0) == 180e9  # two dims at once
    assert rate("v4:4x4x4", (4, 4, 4), 0) == 90e9
    assert rate("v4:2x4x4", (2, 4, 4), 2) == 45e9  # not whole cubes: no rings
    assert rate("v4:4x4", (4, 4), 1) == 45e9  # nor is a plane
    assert rate("v5e:4x4", (4, 2, 2), 1) == 22.5e9  # two interleaved groups share each link


# Formulas


def test_kernel_seconds_by_hand() -> None:
    h100 = load_target("h100:8")
    n = 4096
    dot = kernel_seconds(2.0 * n**3, 3.0 * n * n * 2, "bfloat16", h100, True)
    assert dot == pytest.approx(137_438_953_472 / 692.58e12 + 2e-6, rel=1e-6)
    full = kernel_seconds(2.0 * n**3, 3.0 * n * n * 4, "float32", h100, True)
    assert full == pytest.approx(137_438_953_472 / 346.29e12 + 2e-6, rel=1e-6)
    add = kernel_seconds(float(n * n), 3.0 * n * n * 4, "float32", h100, False)
    assert add == pytest.approx(201_326_592 / (0.904 * 3350e9) + 2e-6, rel=1e-6)
    assert isinstance(add, float)
    many = kernel_seconds(
        np.array([2.0 * n**3, float(n * n)]), np.array([100.0, 12.0 * n * n]), "float32", h100, True
    )
    assert many.shape == (2,) and many[1] == pytest.approx(add)
    assert many[0] == pytest.approx(full)


def test_wire_bytes_by_hand() -> None:
    b, g = 1000.0, 4
    assert collective_wire_bytes("all_gather", b, g) == 3000
    assert collective_wire_bytes("all_reduce", b, g) == 1500
    assert collective_wire_bytes("reduce_scatter", b, g) == 750
    assert collective_wire_bytes("all_to_all", b, g) == 750
    assert collective_wire_bytes("slice", b, g) == collective_wire_bytes("to_partial", b, g) == 0
    # An all-reduce is a reduce-scatter and an all-gather of what that leaves.
    rest = collective_wire_bytes("all_gather", b / g, g)
    assert 1500 == collective_wire_bytes("reduce_scatter", b, g) + rest
    with pytest.raises(PlanError, match="broadcast"):
        collective_wire_bytes("broadcast", b, g)


def test_collective_seconds_by_hand() -> None:
    """On a target without tables."""
    a100 = load_target("a100:4x8")
    mesh = MeshShape(("x", "y"), (4, 8))
    v, nvlink, network = 1e9, 300e9 * 0.77, 25e9 * 0.8
    hbm = 0.775 * 2039e9
    assert collective_seconds("all_reduce", v, (1,), mesh, a100) == pytest.approx(
        5e-6 + 2 * v * 7 / 8 / nvlink + 6 * 3.6e-6
    )
    assert collective_seconds("all_gather", v / 8, (1,), mesh, a100) == pytest.approx(
        5e-6 + v * 7 / 8 / nvlink + 7 * 3.6e-6
    )
    # Over hosts and GPUs: 2V(n-1)/n inside, 2(V/n)(m-1)/m outside.
    assert collective_seconds("all_reduce", v, (0, 1), mesh, a100) == pytest.approx(
        32e-6 + 2 * v * 7 / 8 / nvlink + 2 * v / 8 * 3 / 4 / network + 6 * 3.6e-6 + 3 * 5e-6
    )
    # Gathering V/32 each: V/32 x 3 over the network, then V/8 x 7 over NVLink.
    assert collective_seconds("all_gather", v / 32, (0, 1), mesh, a100) == pytest.approx(
        32e-6 + v / 32 * 3 / network + v / 8 * 7 / nvlink + 7 * 3.6e-6 + 3 * 5e-6
    )
    # Three in four bytes leave the host; of the quarter that stays, 7/8 go to another GPU.
    assert collective_seconds("all_to_all", v, (0, 1), mesh, a100) == pytest.approx(
        32e-6 + v * 3 / 4 / network + v / 4 * 7 / 8 / nvlink + 7 * 3.6e-6 + 3 * 5e-6
    )
    assert collective_seconds("slice", v, (1,), mesh, a100) == pytest.approx(2 * v / 8 / hbm)
    assert collective_seconds("to_partial", v, (1,), mesh, a100) == pytest.approx(2 * v / hbm)
    # To the next GPU of the host; and of a row of them over all hosts, where the network paces all.
    assert collective_seconds("permute", v, (1,), mesh, a100) == pytest.approx(
        5e-6 + v / nvlink + 3.6e-6
    )
    assert collective_seconds("permute", v, (0, 1), mesh, a100) == pytest.approx(
        32e-6 + v / network + 5e-6
    )
    with pytest.raises(PlanError):
        collective_seconds("broadcast", v, (1,), mesh, a100)


@pytest.mark.parametrize("kind", MOVING)
def test_a_fast_axis_is_cheaper_than_a_slow_one(kind: str) -> None:
    for spec, sizes in (("h100:4x4", (4, 4)), ("v5e:2x2x1", (2, 2)), ("cpu:4x4", (4, 4))):
        t, mesh = load_target(spec), MeshShape(("x", "y"), sizes)
        slow = collective_seconds(kind, 1e8, (0,), mesh, t)
        fast = collective_seconds(kind, 1e8, (1,), mesh, t)
        assert fast < slow / 2, spec


amounts = st.floats(0, 1e13)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPECS), st.sampled_from(MOVING + LOCAL), amounts, amounts, st.data())
def test_collectives_grow_with_bytes(
    spec: str, kind: str, small: float, more: float, data: st.DataObject
) -> None:
    t = load_target(spec)
    mesh = data.draw(st.sampled_from(t.mesh_shapes(3)))
    axes = data.draw(st.sampled_from(axes_of(mesh)))
    large = small + more
    for price in (collective_seconds, collective_joules):
        a, b = price(kind, small, axes, mesh, t), price(kind, large, axes, mesh, t)
        assert 0 <= a <= b
        both = price(kind, np.array([small, large]), axes, mesh, t)
        assert both == pytest.approx([a, b])
    if mesh.parts(axes) > 1 and kind in MOVING:
        # Slow links cannot be beaten, nor can all levels' own bytes be more than the flat total.
        wire = collective_wire_bytes(kind, large, mesh.parts(axes))
        best = max(level.full_bytes_per_second for level in t.levels)
        if t.collectives is not None:
            best /= 0.77  # measured: only what is published bounds it
        assert collective_seconds(kind, large, axes, mesh, t) >= wire / best * (1 - 1e-9)


@pytest.mark.parametrize("kind", MOVING)
def test_levels_carry_exactly_the_flat_total(kind: str, tmp_path: Path) -> None:
    """With equal levels and no latency, time is wire bytes over bandwidth, however they nest."""
    file = tmp_path / "flat.yaml"
    text = CHIP.replace(
        "kind: torus, max: [4], wrap: {multiple: 4, every_dim: false}", "kind: switch"
    )
    text = text.replace("1e9, efficiency: 0.5", "1e8, efficiency: 1.0").replace(": 1e-6", ": 0")
    file.write_text(text.replace("latency_seconds: 1e-5", "latency_seconds: 0"))
    t = load_target(f"{file}:6x4")
    for mesh in t.mesh_shapes(3):
        for axes in axes_of(mesh):
            wire = collective_wire_bytes(kind, 1e6, mesh.parts(axes))
            assert collective_seconds(kind, 1e6, axes, mesh, t) == pytest.approx(wire / 1e8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(amounts, amounts, amounts, st.floats(0, 10)), min_size=1, max_size=4))
def test_joules_add_over_kernels(kernels: list[tuple[float, float, float, float]]) -> None:
    t = load_target("h100:8")
    apart = sum(joules(*k, 8, t) for k in kernels)
    flops, hbm, wire, seconds = (sum(column) for column in zip(*kernels, strict=True))
    assert joules(flops, hbm, wire, seconds, 8, t) == pytest.approx(apart)
    assert joules(flops, hbm, wire, seconds, 16, t) == pytest.approx(2 * apart)
