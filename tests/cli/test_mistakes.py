"""Likely first mistakes: each gets one error of tapestry-egg's that says what to do instead."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import typer
from jax.sharding import AbstractMesh
from typer.testing import CliRunner

import tapestry_egg as te
from tapestry_egg.cli.app import app
from tapestry_egg.cli.console import objective_text
from tapestry_egg.cli.report import named_baseline
from tapestry_egg.errors import GraphError, RuleError, TapestryError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.printable import printable
from tapestry_egg.rules.language.book import load_book

X = np.ones(8, np.float32)
QUICK = Settings(work=0.1, workers=1, recompute=0, forms=0)


def double(x: jax.Array) -> jax.Array:
    return x * 2.0


@functools.cache
def graph() -> Any:
    return te.trace(double, X)


@functools.cache
def front() -> Front:
    mesh = [MeshShape(("x",), (2,))]
    return te.optimize(graph(), "cpu:2", mesh_shapes=mesh, settings=QUICK)


def optimized(**more: Any) -> Any:
    return te.optimize(graph(), "cpu:2", settings=QUICK, **more)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "a limit on what is no objective, of te.jit": (
        lambda: te.jit(double, limits={"memory": "1GiB"}),
        "^limits: unknown objective 'memory'.*peak_bytes",
    ),
    "a share as a limit of te.jit": (
        lambda: te.jit(double, limits={"peak_bytes": "50%"}),
        r"limit on peak_bytes: 50% is a share of the least.*front\.best",
    ),
    "a share as a limit of te.optimize": (
        lambda: optimized(limits={"peak_bytes": "50%"}),
        r"limit on peak_bytes: 50% is a share of the least.*front\.best",
    ),
    "devices as a target": (
        lambda: te.optimize(graph(), jax.devices()),  # type: ignore[arg-type]
        "target: expected the name of a machine, given .CpuDevice.*'h100:8'",
    ),
    "a mesh as a target": (
        lambda: te.optimize(graph(), jax.make_mesh((1,), ("x",))),  # type: ignore[arg-type]
        "target: expected the name of a machine, given Mesh.*mesh=",
    ),
    "more devices than a host joins": (
        lambda: te.optimize(graph(), "h100:16"),
        "h100:16 is too large.*Write h100:2x8",
    ),
    "a tree as pins": (
        lambda: optimized(pins=[("x",)]),
        "pins: expected layouts by path, given a list.*Write pins=",
    ),
    "a tree as pins of te.jit": (
        lambda: te.jit(double, pins=[("x",)]),  # type: ignore[arg-type]
        "pins: expected layouts by path",
    ),
    "a path as state": (lambda: optimized(state="[0]"), r"state: expected inputs.*\{'\[0\]'"),
    "an amount as limits of a choice": (
        lambda: front().best("seconds", limits="10MiB"),  # type: ignore[arg-type]
        "limits: expected amounts by objective, given a str.*60GiB",
    ),
    "a kind of device as a target": (
        lambda: te.optimize(graph(), "tpu:8"),
        "'tpu'.*Did you mean 'v4:8' or 'v5e:8' or 'v5p:8' or 'v6e:8'",
    ),
    "a function to optimize": (
        lambda: te.optimize(double, "cpu:2"),
        "expected a traced program, given a function.*te.trace",
    ),
    "a jitted function to optimize": (lambda: te.optimize(jax.jit(double), "cpu:2"), "te.trace"),
    "a front to optimize": (lambda: te.optimize(front(), "cpu:2"), "a front.*already"),
    "a plan to optimize": (lambda: te.optimize(front()[0], "cpu:2"), "a plan.*already"),
    "a path to optimize": (lambda: te.optimize("x.json", "cpu:2"), "te.load"),
    "one objective": (lambda: optimized(objectives="seconds"), r"\('seconds', 'peak_bytes'\)"),
    "no objective": (lambda: optimized(objectives=()), "objectives: there is none"),
    "an unknown objective": (lambda: optimized(objectives=("makespan",)), "peak_bytes, joules"),
    "an unknown limit": (lambda: optimized(limits={"memory": "1GiB"}), "peak_bytes"),
    "a limit of no size": (lambda: optimized(limits={"peak_bytes": "1e400GiB"}), "not an amount"),
    "a limit of 10^400": (lambda: optimized(limits={"peak_bytes": 10**400}), "not an amount"),
    "a limit of 10^9999": (lambda: optimized(limits={"peak_bytes": 10**9999}), "not an amount"),
    "limits as a list": (lambda: optimized(limits=["peak_bytes"]), "'peak_bytes': '60GiB'"),
    "negative work": (lambda: Settings(work=-1), "Settings: work is -1.*more than 0"),
    "work of no amount": (lambda: Settings(work=float("nan")), "work is nan"),
    "work as text": (lambda: Settings(work="10"), "work is '10'.*more than 0"),  # type: ignore[arg-type]
    "settings as a dict": (
        lambda: te.optimize(graph(), "cpu:2", settings={"work": 10}),  # type: ignore[arg-type]
        r"settings: expected settings, given a dict.*te.Settings\(work=10\)",
    ),
    "settings of jit as a dict": (
        lambda: te.jit(double, settings={"work": 10}),  # type: ignore[arg-type]
        "given a dict",
    ),
    "work for a question": (
        lambda: front().why_not({"[0]": ("x",)}, settings=1),  # type: ignore[arg-type]
        "expected settings, given an int",
    ),
    "work for recipes": (lambda: front().recipes(settings=2), "expected settings, given an int"),  # type: ignore[arg-type]
    "no micro-batches": (lambda: Settings(micro_batches=(2, 0)), "micro_batches are.*whole number"),
    "one number": (lambda: Settings(micro_batches=3), "micro_batches are 3"),  # type: ignore[arg-type]
    "half a micro-batch": (lambda: Settings(micro_batches=(1.5,)), "micro_batches"),  # type: ignore[arg-type]
    "axes of one name": (lambda: MeshShape(("x", "x"), (2, 4)), "two have one name.*its own"),
    "an int to save": (lambda: te.save(3, "x.json"), "an int cannot be saved"),  # type: ignore[arg-type]
    "less than nothing": (
        lambda: optimized(objectives=("seconds - joules - 1",)),
        "of a plan: -.*is not an amount",
    ),
    "no workers": (lambda: Settings(workers=0), "workers is 0"),
    "a negative gap": (lambda: Settings(gap=-0.1), "gap is -0.1.*0 or more"),
    "sizes for a mesh shape": (lambda: optimized(mesh_shapes=[(2,)]), "te.MeshShape"),
    "one rule book": (lambda: optimized(rules="mine.yaml"), r"rules=\['mine.yaml'\]"),
    "a number for a mesh": (lambda: te.jit(double, mesh=8), r"jax.devices\(\)"),
    "a target for a mesh": (lambda: te.jit(double, mesh="h100:8"), "target='h100:8'"),
    "sizes for a mesh": (lambda: te.jit(double, mesh=(2, 4)), r"jax.make_mesh\(\(2, 4\), "),
    "sizes for a mesh to optimize for": (
        lambda: optimized(mesh=(2,)),
        r"te.MeshShape\(\('x',\), \(2,\)\)",
    ),
    "a target in upper case": (lambda: te.optimize(graph(), "H100:8"), "Did you mean 'h100:8'"),
    "a target with its memory": (
        lambda: te.optimize(graph(), "a100-80gb:2x8"),
        "Did you mean 'a100:2x8'",
    ),
    "a target without a colon": (lambda: te.optimize(graph(), "h100-8"), "Did you mean 'h100'"),
    "no devices": (lambda: te.jit(double, mesh=[]), "no devices"),
    "an abstract mesh": (
        lambda: te.jit(double, mesh=AbstractMesh((8,), ("x",))),
        "AbstractMesh has no devices",
    ),
    "an unknown aim": (lambda: te.jit(double, minimize="memory"), "minimize: unknown objective"),
    "nothing to jit": (lambda: te.jit(3), "expected a function, given an int"),
    "a graph to jit": (lambda: te.jit(graph().graph), "te.optimize"),
    "nothing to trace": (lambda: te.trace(3), "expected a function"),
    "a front to compile": (lambda: te.compile(front()), r"front\['p0'\]"),
    "a graph to compile": (lambda: te.compile(graph()), "te.optimize"),
    "a function to compile": (lambda: te.compile(double), "te.jit"),
    "a number of devices to compile for": (lambda: te.compile(front()[0], 8), "jax.devices"),
    "an abstract mesh to compile for": (
        lambda: te.compile(front()[0], AbstractMesh((2,), ("x",))),
        "AbstractMesh",
    ),
    "an unknown plan": (lambda: front()["p99"], "no plan 'p99'.*has p0"),
    "a plan too far": (lambda: front()[99], "no plan 99"),
    "an unknown best": (lambda: front().best("speed"), "Objectives are seconds"),
    "no path to load": (lambda: te.load(None), "path of a file"),
    "no path to save": (lambda: te.save(graph(), None), "path of a file"),
    "a function to save": (lambda: te.save(double, "x.json"), "te.trace"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_the_remedy(name: str) -> None:
    call, said = MISTAKES[name]
    with pytest.raises(TapestryError) as caught:
        call()
    assert __import__("re").search(said, str(caught.value).replace("\n", " ")), caught.value


def test_an_unknown_plan_is_also_what_python_calls_it() -> None:
    with pytest.raises(KeyError):
        front()["p99"]
    with pytest.raises(IndexError):
        front()[99]
    assert front()[-1] is front().plans[-1]


DEEP = sys.getrecursionlimit() * 50
ODD: dict[str, bytes] = {
    "text.txt": b"hello",
    "noise.json": bytes(range(256)) * 9,
    "other.json": b'{"a": 1}',
    "empty.json": b"",
    "empty.yaml": b"",
    "half.json": b'{"tapestry_egg": "front", ',
    "half.yaml": b"[1, 2",
    "half.json.gz": b"\x1f\x8b",
    "deep.json": b"[" * DEEP + b"]" * DEEP,
    "deep.yaml": b"[" * DEEP,
    "version.json": b'{"tapestry_egg": "front", "version": 1' + b"0" * 400 + b"}",
    "digits.json": b'{"tapestry_egg": "front", "version": 1' + b"0" * 9999 + b"}",
    "steering.json": b'{"tapestry_egg": "\\u001b[31m"}',
}


@pytest.mark.parametrize("name", ODD)
def test_odd_files_are_refused_in_one_error(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(ODD[name])
    ran = CliRunner().invoke(app, ["verify", str(path)])
    assert ran.exit_code == 1 and not ran.stdout
    assert ran.stderr.startswith(f"error: {path}") and ran.stderr.count("error:") == 1
    assert isinstance(ran.exception, SystemExit)


@pytest.mark.parametrize("shape", ["4294967296,4294967296", "999999999999999,999999999999999"])
def test_a_shape_whose_bytes_overflow_is_refused_when_read(shape: str, tmp_path: Path) -> None:
    te.save(graph(), tmp_path / "g.json")
    text = (tmp_path / "g.json").read_text().replace("float32[8]", f"float32[{shape}]")
    (tmp_path / "g.json").write_text(text)
    with pytest.raises(GraphError, match="63 bits") as caught:
        te.load(tmp_path / "g.json")
    assert "$.values[0]" in caught.value.where


def test_an_unknown_objective_is_a_wrong_command_line(tmp_path: Path) -> None:
    te.save(graph(), tmp_path / "g.json")
    line = ["optimize", str(tmp_path / "g.json"), "--target", "cpu:2", "--objective", "makespan"]
    ran = CliRunner().invoke(app, line)
    assert ran.exit_code == 2 and "unknown objective 'makespan'" in ran.output


def test_text_that_steers_terminals_is_written_out(tmp_path: Path) -> None:
    assert printable("a\x1b[2J\x9b\u202eb\n\tc") == "a\\x1b[2J\\x9b\\u202eb\n\tc"
    name = "red\x1b[31m<b>"
    program = te.trace(double, X, name=name)
    mesh = [MeshShape(("x",), (2,))]
    found = te.optimize(program, "cpu:2", mesh_shapes=mesh, settings=QUICK)
    page = found.report(tmp_path / "report").read_text()
    texts = [str(found), found[0].explain(), page, found.plot(tmp_path / "f.svg").read_text()]
    texts.append(str(GraphError(name, where=name, hint=name)))
    for text in texts:
        assert "\x1b" not in text
    assert "red\\x1b[31m<b>" in texts[0] and "<b>" not in page


def test_a_rule_book_includes_only_what_is_in_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rules"
    (folder / "below").mkdir(parents=True)
    rule = "(rule ((= a (Op1 s x)) (= b (Op1 s a))) ((union b a)))"
    for path in (tmp_path / "secret.egg", folder / "mine.egg", folder / "below" / "mine.egg"):
        path.write_text(rule)
    (folder / "link.egg").symlink_to(tmp_path / "secret.egg")
    (folder / "near.egg").symlink_to(folder / "mine.egg")

    def book(include: str) -> Any:
        path = folder / "book.yaml"
        path.write_text(
            "rules:\n- name: r\n  law: l\n  reason: r\n  numerics: exact\n"
            f"  given: [s]\n  guard: $s.kernel == sort\n  include: {include}\n"
        )
        return load_book(path)

    for include in ("mine.egg", "below/mine.egg", "below/../mine.egg", "near.egg"):
        assert book(include).rules[0].egg == rule
    for include in ("../secret.egg", "link.egg", str(tmp_path / "secret.egg"), "/dev/zero"):
        with pytest.raises(RuleError, match="is not in the folder of the rule file") as caught:
            book(include)
        assert "book.yaml:8" in caught.value.where


def test_a_picture_is_what_its_name_says(tmp_path: Path) -> None:
    te.save(front(), tmp_path / "front.json")
    line = ["front", str(tmp_path / "front.json"), "--svg"]
    assert CliRunner().invoke(app, [*line, str(tmp_path / "a.svg")]).exit_code == 0
    assert (tmp_path / "a.svg").read_text().startswith("<svg")
    ran = CliRunner().invoke(app, [*line, str(tmp_path / "a.png")])
    assert isinstance(ran.exception, TapestryError) and not (tmp_path / "a.png").exists()
    assert "cannot be drawn as .png" in str(ran.exception)
    te.save(graph(), tmp_path / "graph.json")
    ran = CliRunner().invoke(app, ["show", str(tmp_path / "graph.json"), "--svg", "g.png"])
    assert isinstance(ran.exception, GraphError) and "dot -Tpng" in str(ran.exception)


def test_objectives_are_named_as_in_python(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("bill: dollars + joules / 1e6\n")
    assert objective_text("joules") == "joules"
    assert objective_text("seconds * joules") == "seconds * joules"
    assert objective_text(f"{file}:bill") == "dollars + joules / 1e6"
    for wrong in ("seconds *", "watts"):
        with pytest.raises(typer.BadParameter):
            objective_text(wrong)
    for wrong in (f"{file}:none", f"{file}.yaml:bill"):
        with pytest.raises(typer.BadParameter, match=r"mine\.yaml"):
            objective_text(wrong)


@pytest.mark.parametrize("text", ["cut.json", "=cut.json", "cut="])
def test_a_baseline_is_a_name_and_a_file(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="is not NAME=FILE"):
        named_baseline(text)


FAULTY = """
import jax.numpy as jnp

def good(x): return x * 2.0
def shapes(x): return x @ x
def own(x): raise ValueError("of mine")
def good_args(): return (jnp.ones((8, 4)),)
shapes_args = own_args = good_args
"""


@pytest.mark.parametrize(("name", "line", "said"), [("shapes", 5, "dot_general"), ("own", 6, "of")])
def test_a_program_that_fails_is_told_at_its_line(
    name: str, line: int, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    with pytest.raises(TapestryError, match=rf"faulty.py:{line}: tracing it raised .*{said}"):
        CliRunner().invoke(
            app, ["trace", f"{file}:{name}", "-o", str(tmp_path / "x")], catch_exceptions=False
        )


def test_a_program_that_fails_stops_no_other(tmp_path: Path) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    programs = [f"{file}:own", f"{tmp_path}/nowhere.py", f"{file}:good"]
    options = ["-t", "cpu:2", "-o", str(tmp_path / "out"), "--work", "0.2", "--quiet", "--json"]
    done = CliRunner().invoke(app, ["optimize", *programs, *options])
    assert done.exit_code == 1
    assert "faulty.py:6: tracing it raised" in done.output and "no such file" in done.output
    assert (tmp_path / "out" / "faulty-good.front.json").exists()


@pytest.mark.parametrize("options", [[], ["--resume"]])
def test_a_folder_that_cannot_be_written_is_told_before_the_search(
    options: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tapestry_egg.pipeline import batch

    te.save(graph(), tmp_path / "g.json")
    (tmp_path / "taken").write_text("a file")
    monkeypatch.setattr(batch, "optimize_file", lambda *_: pytest.fail("searched"))
    command = ["optimize", str(tmp_path / "g.json"), "-t", "cpu:2", "-q", *options]
    with pytest.raises(TapestryError, match=r"cannot be written.*\n.*another folder"):
        CliRunner().invoke(app, [*command, "-o", str(tmp_path / "taken")], catch_exceptions=False)
    with pytest.raises(TapestryError, match="cannot be written"):
        optimized(resume=tmp_path / "taken" / "s.npz", on_progress=lambda _: pytest.fail("begun"))
