"""README and docs: every Python block and every command in them is run.

Blocks of one page run one after the other in one process, with eight devices; commands in a folder
where `models/gpt2.py` is a small program. `docs/template-language.md` has a test of its own.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

#: What the snippets of README take for granted.
_BEFORE = """
import jax, tapestry_egg as te
mesh = jax.make_mesh((8,), ("x",))
"""
#: Short searches: `tests/story` has the front that README prints.
_BRIEFLY = """
import functools
from tapestry_egg.pipeline import pipeline
from tapestry_egg.pipeline.jit import planning
pipeline.Settings = planning.Settings = functools.partial(te.Settings, work=0.1, workers=1)
"""

PROGRAM = """
import jax, jax.numpy as jnp

def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w["a"]) @ w["b"])

def step(w, x):
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, x))

def example():
    w = {"a": jnp.full((8, 16), 0.1), "b": jnp.full((16, 8), 0.2)}
    return step, (w, jnp.ones((8, 8)))
"""

RULES = """
ruleset: algebra
rules:
  - name: twice-negative
    law: "--x = x"
    reason: Negation is its own inverse.
    numerics: exact
    match: neg(neg(x))
    replace: x
"""

#: Runs commands one after the other; the last line is the list of those that failed.
_COMMANDS = """
import json, sys, traceback
from tapestry_egg.cli.app import main

if __name__ == "__main__":
    failed = []
    for command in json.loads(sys.argv[1]):
        print("$", *command, flush=True)
        try:
            main(command)
        except SystemExit as end:
            if end.code:
                failed.append(command)
        except BaseException:
            traceback.print_exc()
            failed.append(command)
    print(json.dumps(failed))
"""


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "TAPESTRY_EGG_CACHE": str(folder / "cache"),
    }


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)


def commands(page: str) -> list[str]:
    """The lines of a page's indented blocks that are commands, without their comments."""
    lines = re.findall(r"^    ((?:tapestry-egg|python -m) .*)$", (ROOT / page).read_text(), re.M)
    found = []
    for line in (line.partition("#")[0].strip() for line in lines):
        program, _, words = line.partition(" ")
        found += [f"{program} {part.strip()}" for part in words.split(" | ")]
    return found


def pages() -> list[str]:
    found = ["README.md", *(f"docs/{p.name}" for p in sorted((ROOT / "docs").glob("*.md")))]
    return [p for p in found if p != "docs/template-language.md"]


def tiered(found: Iterable[str]) -> list[Any]:
    """README's in the middle tier; the other pages, a minute each, in the last one, as commands."""
    tiers = {True: pytest.mark.slow, False: pytest.mark.long}
    return [pytest.param(p, marks=tiers[p == "README.md"]) for p in found]


@pytest.mark.parametrize("page", tiered(p for p in pages() if blocks(p)))
def test_blocks_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    if page == "docs/jit.md":
        for library in ("equinox", "flax", "optax"):
            pytest.importorskip(library)
    program = tmp_path / "page.py"
    parts = [_BEFORE, *([_BRIEFLY] if page == "README.md" else []), *blocks(page)]
    # Workers import the file again: what it does is for the first process alone.
    body = "\n".join(parts).replace("\n", "\n    ")
    program.write_text(f"if __name__ == '__main__':\n    {body}\n")
    done = run(tmp_path, "page.py")
    assert done.returncode == 0, f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
    if page == "README.md":
        assert re.search(r"^front of train_step on h100:8: \d+ plans$", done.stdout, re.M)


COMMANDS = {
    "README.md": ("out/gpt2.json", "out/gpt2.front.json"),
    "docs/command-line.md": ("out/gpt2.json", "out/gpt2.front.json", "gpt2.svg"),
    "docs/loom.md": ("out/gpt2.loom.json",),
    "docs/objectives.md": ("out/gpt2.front.json",),
    "docs/why.md": ("out/gpt2.front.json", "why.html"),
    "docs/costs.md": ("lanes.svg", "trace.json"),
}


@pytest.mark.long
@pytest.mark.parametrize("page", COMMANDS)
def test_commands_of_a_page_run_one_after_the_other(page: str, tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "gpt2.py").write_text(PROGRAM)
    (tmp_path / "mine.yaml").write_text(RULES)
    (tmp_path / "objectives.yaml").write_text("energy_delay: seconds * joules\n")
    found = commands(page)
    assert len(found) >= (13 if page == "docs/command-line.md" else 4)
    split = [shlex.split(command) for command in found]
    assert {words[0] for words in split} == {"tapestry-egg"}
    (tmp_path / "commands.py").write_text(_COMMANDS)
    given = [
        [str(p) for w in words[1:] for p in (sorted(tmp_path.glob(w)) if "*" in w else [w])]
        for words in split
    ]
    done = run(tmp_path, "commands.py", json.dumps(given))
    assert done.stdout.splitlines()[-1:] == ["[]"], f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert all((tmp_path / name).stat().st_size for name in COMMANDS[page])
