"""The scripts of examples/ run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tapestry_egg.cli.app import main

ROOT = Path(__file__).parents[2]
#: What each is given, and what it must print.
SAYS = {
    "front.py": (["1"], "why not [0]['up'] as [x, .]?"),
    "train.py": ([], "plan p0 of train_step on cpu:8"),
    "linear_relu.py": (["."], "plan p0 of linear.relu on h100:4, mesh 2x×2y"),
}


def run(folder: Path, *words: str) -> str:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def test_every_script_is_here() -> None:
    scripts = {p.name for p in (ROOT / "examples").glob("*.py")} - {"__init__.py"}
    assert scripts == {*SAYS, "demo.py"}  # `make demo` takes a minute


@pytest.mark.long
@pytest.mark.parametrize("name", SAYS)
def test_an_example_runs(name: str, tmp_path: Path) -> None:
    given, says = SAYS[name]
    assert says in run(tmp_path, str(ROOT / "examples" / name), *given)


@pytest.mark.slow
def test_the_command_line_plans_a_program_written_in_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(ROOT / "examples" / "linear_relu.py")
    out = str(tmp_path / "out")
    with pytest.raises(SystemExit, match="0"):
        main(["optimize", file, "--target", "cpu:4", "--work", "0.1", "-o", out])
    (front,) = (tmp_path / "out").glob("*.front.json")
    capsys.readouterr()
    with pytest.raises(SystemExit, match="0"):
        main(["front", str(front), "--kernels", file])
    assert "linear" in front.name and "p0" in capsys.readouterr().out
