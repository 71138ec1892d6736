"""The command line from a user's program to plans that run, and what it says when it cannot."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapestry_egg.cli.app import main

PROGRAM = """
import jax, jax.numpy as jnp

def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])

def step(w, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

def example():
    w = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 4), 0.2)}
    return step, (w, jnp.ones((8, 8)))
"""


class Run:
    """Runs commands in this process and keeps what they printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *before: str) -> None:
        self._capsys, self._before = capsys, before
        self.out = self.err = ""

    def __call__(self, *arguments: object) -> int:
        self._capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([*self._before, *map(str, arguments)])
        self.out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return int(exit_.value.code or 0)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with a program, its graph and its front, all made by the command line."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "mlp.py").write_text(PROGRAM)
    for arguments in (
        ["trace", f"{folder}/mlp.py", "-o", f"{folder}/mlp.json", "-q"],
        ["optimize", f"{folder}/mlp.json", "-t", "cpu:2", "-o", f"{folder}/out"]
        + ["--seconds", "1", "-q"],
    ):
        with pytest.raises(SystemExit) as exit_:
            main(arguments)
        assert exit_.value.code == 0
    yield folder


@pytest.mark.slow
def test_trace_writes_a_graph_that_show_prints(work: Path, run: Run) -> None:
    assert run("show", work / "mlp.json") == 0
    assert "dot_general" in run.out and "mlp.py:5" in run.out
    assert run("show", "--json", work / "mlp.json") == 0
    data = json.loads(run.out)
    assert data["name"] == "mlp"
    assert data["inputs"] == ["f32[8, 16]", "f32[16, 4]", "f32[8, 8]"]
    assert data["kernels"]["dot_general"] >= 4


def test_standard_input_is_a_dash(work: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stdin:
        buffer = io.BytesIO((work / "mlp.json").read_bytes())

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert run("show", "-", "--json") == 0
    assert json.loads(run.out)["name"] == "mlp"


def test_what_is_wrong_with_standard_input_is_told_of_it(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stdin:
        buffer = io.BytesIO(b'{"tapestry_egg": ')

    monkeypatch.setattr(sys, "stdin", Stdin())
    assert run("front", "-") == 1
    assert run.err.startswith("error: standard input:1:") and "not JSON" in run.err


def test_optimize_writes_front_picture_and_manifest(work: Path, run: Run) -> None:
    names = {p.name for p in (work / "out").iterdir()}
    assert names == {"mlp.front.json", "mlp.front.svg", "batch.json"}
    assert ET.parse(work / "out" / "mlp.front.svg").getroot().tag.endswith("svg")
    assert run("front", work / "out" / "mlp.front.json", "--json") == 0
    rows = json.loads(run.out)
    assert rows and {"seconds", "peak_bytes", "joules", "mesh"} <= rows[0].keys()


@pytest.mark.slow
def test_what_is_current_is_skipped_and_what_changed_is_not(work: Path, run: Run) -> None:
    again = ["optimize", work / "mlp.json", "-t", "cpu:2", "-o", work / "out", "--seconds", "1"]
    assert run(*again, "-q", "--json") == 0
    assert json.loads(run.out)["skipped"] is True
    assert run(*again, "-q", "--limit", "peak_bytes=1GiB", "--json") == 0
    assert json.loads(run.out)["skipped"] is False


@pytest.mark.slow
def test_snapshots_of_a_program_have_its_fastest_plan(
    work: Path, run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tapestry_egg.extract.__main__ import main as extract

    assert run("problem", work / "mlp.json", "-t", "cpu:2", "-o", tmp_path) == 0
    assert "pose_problems" in run.err and "search" not in run.err
    files = run.out.split()
    assert files and all(name.endswith(".problem.json.gz") for name in files)
    assert extract([*files, "--seconds", "5", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert all(row["values"]["seconds"] >= row["bound"] for row in found)
    assert run("front", work / "out" / "mlp.front.json", "--json") == 0
    fastest = min(plan["seconds"] for plan in json.loads(run.out))
    assert min(row["values"]["seconds"] for row in found) == pytest.approx(fastest)


def test_front_draws_over_other_axes(work: Path, run: Run, tmp_path: Path) -> None:
    picture = tmp_path / "f.svg"
    front = work / "out" / "mlp.front.json"
    assert run("front", front, "--svg", picture, "--x", "joules") == 0
    assert "energy per step" in picture.read_text(encoding="utf-8")
    assert run("front", front, "--svg", picture, "--x", "beauty") == 1
    assert run.err.startswith("error: ")


def test_explain_tells_layouts_and_collectives(work: Path, run: Run) -> None:
    front = work / "out" / "mlp.front.json"
    assert run("explain", front) == 0
    for word in ("time per step", "inputs", "[0]['a']", "operations", "collectives"):
        assert word in run.out
    assert max(map(len, run.out.split("\n"))) <= 80
    assert run("explain", front, "p0", "--json") == 0
    assert {"bound", "collectives", "inputs", "outputs"} <= json.loads(run.out).keys()


@pytest.mark.slow
@pytest.mark.parametrize("program", [False, True])
def test_run_compares_with_the_original(work: Path, run: Run, program: bool) -> None:
    given = ["--program", work / "mlp.py"] if program else []
    front = work / "out" / "mlp.front.json"
    assert run("run", front, "--json", "--repeat", 1, *given) == 0
    data = json.loads(run.out)
    assert max(data["differences"].values()) < 1e-5
    assert data["seconds"] > 0
    assert len(data["accuracy"]) == program


@pytest.mark.slow
def test_run_takes_kernels_of_the_users_own(run: Run, tmp_path: Path) -> None:
    rules = Path(__file__).parents[2] / "docs" / "rules"
    front = tmp_path / "largest-program.front.json"
    program, book = f"{rules}/largest.py:program", f"{rules}/largest-rules.yaml"
    made = ["optimize", program, "-t", "cpu:2", "-o", tmp_path, "-q", "--rules", book]
    assert run(*made, "--work", "0.1") == 0
    assert run("explain", front, "--kernels", f"{rules}/largest.py") == 0
    assert "largest-instead-of-sorting" in run.out
    # In a process of its own: kernels stay registered.
    command = [sys.executable, "-m", "tapestry_egg.cli.app", "run", front]
    alone = subprocess.run(command, capture_output=True, text=True)
    assert alone.returncode == 1
    assert "there is no kernel or family largest" in alone.stderr
    assert "--kernels FILE.py" in alone.stderr


@pytest.mark.slow
def test_questions_are_asked_as_in_python(work: Path, run: Run, tmp_path: Path) -> None:
    asked = ["--mesh", "data=2", "--pin", "[1]=data", "--state", "['a']=[0]['a']", "--max-axes", 1]
    asked += ["--numerics", "relaxed", "--work", 1, "-q", "-t", "cpu:2", "-o", tmp_path]
    assert run("optimize", work / "mlp.json", *asked) == 0
    assert run("front", tmp_path / "mlp.front.json", "--save", tmp_path / "plan.json") == 0
    from tapestry_egg.files.files import load
    from tapestry_egg.plans.plan import Plan

    plan = load(tmp_path / "plan.json")
    assert isinstance(plan, Plan)
    names, laid = (
        plan.graph.input_names,
        dict(zip(plan.graph.inputs, plan.body.inputs, strict=True)),
    )
    x = plan.graph.inputs[names.index("[1]")]
    assert plan.mesh.names == ("data",) and laid[x].dims == ((0,), ())
    assert plan.origin is not None and len(plan.origin.feedback) == 1
    assert run("run", tmp_path / "plan.json", "--repeat", 1) == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--pin", "[0]"], "'[0]' is not PATH=AXES"),
        (["--pin", "[9]=x"], "no input lies at '[9]'"),
        (["--pin", "[1]=x+,y"], "is not PATH=AXES"),
        (["--state", "[0]"], "'[0]' is not OUTPUT=INPUT"),
        (["--mesh", "data"], "'data' is not NAME=SIZE"),
        (["--mesh", "a=2,a=2"], "is not NAME=SIZE"),
        (["--mesh", "data=3"], "has 3 devices"),
        (["--numerics", "loose"], "numerics is 'loose'"),
        (["--kernels", "nowhere.py"], "nowhere.py: no such file"),
    ],
)
def test_malformed_questions_say_how(
    work: Path, run: Run, tmp_path: Path, asked: list[str], said: str
) -> None:
    assert run("optimize", work / "mlp.json", "-t", "cpu:2", "-o", tmp_path, "-q", *asked) == 1
    assert said in run.err


@pytest.mark.slow
def test_overlap_is_another_question(work: Path, run: Run, tmp_path: Path) -> None:
    asked = ["optimize", work / "mlp.json", "-t", "h100:2", "-o", tmp_path, "--work", 1, "-q"]
    assert run(*asked) == 0
    assert run(*asked) == 0 and "as before" in run.out
    assert run(*asked, "--overlap") == 0 and "as before" not in run.out
    from tapestry_egg.files.files import load

    assert any(note.kind == "overlap" for note in load(tmp_path / "mlp.front.json").notes)  # type: ignore[union-attr]


def test_the_version_is_told(run: Run) -> None:
    from tapestry_egg import __version__

    assert run("--version") == 0
    assert run.out == f"tapestry-egg {__version__}\n"


def test_verify_tells_good_from_bad_and_goes_on(work: Path, run: Run, tmp_path: Path) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text((work / "mlp.json").read_text().replace('"dot_general"', '"dot', 1))
    assert run("verify", bad, work / "mlp.json", work / "out" / "mlp.front.json") == 1
    assert "bad.json:" in run.err
    assert run.out.count(": ok") == 2


RULE = """
  - name: {name}
    law: a + b = b + a
    reason: Sums commute.
    numerics: exact
    match: add(a, b)
    replace: add(b, a)
"""


def test_verify_refuses_rules_of_one_name(run: Run, tmp_path: Path) -> None:
    twice, mine, ours = (tmp_path / f"{name}.yaml" for name in ("twice", "mine", "ours"))
    twice.write_text("rules:" + RULE.format(name="swapped") * 2)
    mine.write_text("rules:" + RULE.format(name="swapped"))
    ours.write_text("rules:" + RULE.format(name="all-gather"))
    assert run("verify", twice) == 1
    assert f"{twice}:9:5" in run.err and "rule 'swapped' is defined twice" in run.err
    assert f"The other one is at {twice}:2:5" in run.err and "rename one of them" in run.err
    assert run("verify", ours) == 1
    assert "rule 'all-gather' is defined twice" in run.err and "collectives.yaml" in run.err
    other = tmp_path / "other.yaml"
    other.write_text(mine.read_text())
    assert run("verify", mine, other) == 1
    assert run.out.count(": ok") == 1 and f"{other}:2:5" in run.err
    assert run("verify", mine, mine) == 0


def test_help_tells_the_stages_in_their_order(run: Run) -> None:
    assert run("--help") == 0
    assert "Stages: trace -> encode -> saturate -> extract -> lower -> run." in run.out


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ([], 0, ""),
        (["--help"], 0, ""),
        (["frobnicate"], 2, "No such command 'frobnicate'"),
        (["show"], 2, "Missing argument"),
        (["show", "--nope"], 2, "--nope"),
        (["show", "nowhere.json"], 1, "error: nowhere.json"),
        (["trace", "nowhere.py", "-o", "x.json"], 1, "error: nowhere.py: no such file"),
        (["optimize", "x.json", "-t", "abacus:8"], 1, "unknown target 'abacus'"),
        (["optimize", "x.json", "-t", "cpu:2", "--limit", "peak_bytes"], 1, "OBJECTIVE=AMOUNT"),
        (["optimize", "x.json", "-t", "cpu:2", "--objective", "beauty"], 2, "beauty"),
        (["kernels", "frobnicate"], 1, "no template for kernel 'frobnicate'"),
        (["rules", "frobnicate"], 1, "no rule 'frobnicate'"),
        (["targets", "abacus:8"], 1, "unknown target 'abacus'"),
    ],
)
def test_exit_codes_and_errors(run: Run, arguments: list[str], code: int, said: str) -> None:
    assert run(*arguments) == code
    assert said in run.err
    if code:
        assert run.err.startswith("error: ")
        assert run.out == ""


@pytest.mark.parametrize("command", ["rules", "kernels", "targets"])
def test_lists_print_text_and_json(run: Run, command: str) -> None:
    assert run(command) == 0
    assert len(run.out.splitlines()) > 3
    assert run(command, "--json") == 0
    assert len(json.loads(run.out)) > 3


@pytest.mark.slow
def test_one_kernel_is_shown_as_it_is_written(run: Run) -> None:
    assert run("kernels", "dot_general") == 0
    assert "kernels: [dot_general" in run.out and "roles:" in run.out
    assert run("targets", "h100:4x8") == 0
    assert "32" in run.out
    assert "modelled against measured" in run.out and "all_reduce float32" in run.out


@pytest.mark.slow
def test_a_target_says_how_well_its_tables_hold(run: Run) -> None:
    assert run("targets", "h100:8", "--json") == 0
    errors = {e["what"]: e for e in json.loads(run.out)["modelled_against_measured"]}
    assert errors["bfloat16*bfloat16->bfloat16"]["median"] <= 0.05
    assert errors["bfloat16*bfloat16->bfloat16"]["high"] <= 0.15
    assert run("targets", "v5e:4") == 0
    assert "modelled against measured" not in run.out


def test_a_plan_asked_for_in_vain(work: Path, run: Run) -> None:
    front = work / "out" / "mlp.front.json"
    assert run("explain", front, "--plan", "best-of-all") == 1
    assert "no plan 'best-of-all'" in run.err and "It has " in run.err
    assert run("explain", front, "p0", "--plan", "p1") == 2
    assert run("explain", front, "--limit", "peak_bytes=1 B") == 1
    assert "least found" in run.err
    assert run("explain", work / "mlp.json") == 1
    assert "holds a graph, not a front" in run.err


@pytest.mark.slow
def test_data_goes_to_the_pipe_while_bars_go_to_the_terminal(work: Path) -> None:
    ours, theirs = os.openpty()
    shown: list[bytes] = []

    def watch() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while chunk := os.read(ours, 4096):
                shown.append(chunk)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    command = ["optimize", work / "mlp.json", "-t", "cpu:2", "-o", work / "piped", "--json"]
    command += ["--work", 0.1, "--workers", 1]
    done = subprocess.run(
        [sys.executable, "-m", "tapestry_egg", *map(str, command)],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        timeout=120,
    )
    os.close(theirs)
    watcher.join(timeout=10)
    os.close(ours)
    assert done.returncode == 0
    assert json.loads(done.stdout)["plans"] >= 1
    assert b"saturate" in b"".join(shown)


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(work: Path) -> None:
    command = f"{sys.executable} -m tapestry_egg show {work / 'mlp.json'} | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith("mlp:")
    assert "Traceback" not in done.stderr and "Broken" not in done.stderr


def test_what_native_libraries_print_is_not_on_standard_output() -> None:
    """As SciPy's HiGHS prints, past Python: JSON that another program reads stays whole."""
    code = (
        "import os, tapestry_egg.cli as cli, tapestry_egg.cli.app as app\n"
        "app.main = lambda _: (print('{'), os.write(1, b'native\\n'), print('}'))\n"
        "cli.main([])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (told.stdout, told.stderr, told.returncode) == ("{\n}\n", "native\n", 0)
