"""Ctrl-C ends a command in one line, and keeps what was found until then."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import tapestry_egg as te
from tapestry_egg.extract.front.notes import INTERRUPTED
from tapestry_egg.parallel.deadline import ends_at, interruptible

#: A program of which a first front is there early, and much is left to do.
PROGRAM = """
import jax, jax.numpy as jnp

def loss(w, x, y):
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - y) ** 2)

def train_step(w, x, y):
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x, y))

def example():
    w = {"up": jnp.ones((1024, 4096)), "down": jnp.ones((4096, 1024))}
    return train_step, (w, jnp.ones((8192, 1024)), jnp.ones((8192, 1024)))
"""
ROOT = Path(__file__).resolve().parents[2]


def begun(*command: object, folder: Path) -> subprocess.Popen[str]:
    """A command in a process group of its own, as a terminal starts it."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )


def interrupted(process: subprocess.Popen[str], word: str) -> str:
    """All that it says where Ctrl-C comes once it has said a word; it ends as a shell expects."""
    assert process.stdout is not None
    said = ""
    try:
        while word not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        os.killpg(process.pid, signal.SIGINT)
        said += process.communicate(timeout=120)[0]
    finally:
        process.kill()
    assert process.returncode == 130, said
    assert "Traceback" not in said and "Exception ignored" not in said, said
    return said


def test_an_end_before_there_is_anything_is_told_in_one_line(tmp_path: Path) -> None:
    """Where modules are imported, in the interpreter's own end, and in a command."""
    importing = (
        "import sys, signal\n"
        "class Slow:\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == 'tapestry_egg.cli.app':\n"
        "            signal.raise_signal(signal.SIGINT)\n"
        "import tapestry_egg.cli\n"
        "sys.meta_path.insert(0, Slow())\n"
        "tapestry_egg.cli.main([])\n"
    )
    running = (
        "import signal, tapestry_egg.cli, tapestry_egg.cli.graphs as graphs\n"
        "graphs.host_only = lambda: signal.raise_signal(signal.SIGINT)\n"
        "tapestry_egg.cli.main(['trace', 'x.py', '-o', 'x.json'])\n"
    )
    for code in (importing, running):
        process = begun("-c", code, folder=tmp_path)
        assert process.communicate(timeout=60)[0] == "error: interrupted\n"
        assert process.returncode == 130


def test_an_interruption_is_not_lost_in_a_callback_of_the_collector(tmp_path: Path) -> None:
    code = (
        "import gc, signal, time\n"
        "from tapestry_egg.parallel.deadline import end_as_interrupted\n"
        "end_as_interrupted()\n"
        "said = []\n"
        "def callback(phase, info):\n"
        "    if not said:\n"
        "        said.append(phase)\n"
        "        signal.raise_signal(signal.SIGINT)\n"
        "gc.callbacks.append(callback)\n"
        "try:\n"
        "    gc.collect()\n"
        "    time.sleep(20)\n"
        "except KeyboardInterrupt:\n"
        "    print('heard', len(said))\n"
    )
    assert begun("-c", code, folder=tmp_path).communicate(timeout=60)[0] == "heard 1\n"


@pytest.mark.slow
def test_a_search_that_is_interrupted_leaves_its_front(tmp_path: Path) -> None:
    (tmp_path / "mlp.py").write_text(PROGRAM)
    arguments = ("optimize", "mlp.py", "-t", "h100:8", "-o", "out")
    said = interrupted(begun("-m", "tapestry_egg", *arguments, folder=tmp_path), "front ")
    assert said.endswith(f"{INTERRUPTED}\nerror: interrupted\n")
    front = te.load(tmp_path / "out" / "mlp.front.json")
    assert isinstance(front, te.Front) and len(front) and INTERRUPTED in front.notes


@pytest.mark.long
def test_a_demo_that_is_interrupted_leaves_its_front(tmp_path: Path) -> None:
    process = begun("-m", "examples.demo", tmp_path / "out", folder=ROOT)
    said = interrupted(process, "merge_sent")  # plans that fit a device are found by then
    assert str(INTERRUPTED) in said and said.endswith("error: interrupted\n")
    front = te.load(tmp_path / "out" / "gpt2.front.json")
    assert isinstance(front, te.Front) and len(front)
    assert (tmp_path / "out" / "front.svg").exists() and "run p0" not in said


@pytest.mark.long
def test_a_zoo_that_is_interrupted_prints_its_table() -> None:
    process = begun("-m", "benchmarks.zoo", "mlp", "gpt2", "--work", 1, folder=ROOT)
    said = interrupted(process, "mlp  h100:8")
    assert "worst gap" in said and said.count("mlp  ") == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_an_interruption_within_compiled_code_is_one(depth: int) -> None:
    """Python calls it a SystemError, once for each call of C code between."""

    def loaded(calls: int) -> None:
        if not calls:
            raise KeyboardInterrupt
        try:
            loaded(calls - 1)
        except BaseException as error:
            raise SystemError("returned a result with an exception set") from error

    with pytest.raises(KeyboardInterrupt), interruptible():
        loaded(depth)
    with pytest.raises(KeyboardInterrupt), ends_at(time.perf_counter() + 60.0):
        loaded(depth)
    with pytest.raises(SystemError, match="of another kind"), interruptible():
        raise SystemError("of another kind") from ValueError()
