"""Temporary folders and files: gone when they are left, and after a kill with the next use."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tapestry_egg import scratch as scratch_module
from tapestry_egg.atomic import write_atomic
from tapestry_egg.scratch import locked, remove_unheld, scratch


def killed(program: str, folder: Path) -> None:
    """Run a program until it says that it is there, then kill it."""
    with subprocess.Popen(
        [sys.executable, "-c", program, str(folder)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "there\n"
        process.send_signal(signal.SIGKILL)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of temporary files, which this process has not looked through yet."""
    import threading

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch_module, "_sweeping", threading.Lock())
    return tmp_path


def test_a_scratch_folder_ends_with_its_use(temporary: Path) -> None:
    with scratch() as folder:
        (folder / "a").write_text("a")
        assert folder.parent == temporary
    assert not list(temporary.iterdir())


def test_what_a_killed_process_left_is_removed_and_nothing_else(temporary: Path) -> None:
    killed(
        "import sys, tempfile, time\n"
        "tempfile.tempdir = sys.argv[1]\n"
        "from tapestry_egg.scratch import scratch\n"
        "with scratch() as folder:\n"
        "    (folder / 'a').write_text('a')\n"
        "    print('there', flush=True)\n"
        "    time.sleep(100)\n",
        temporary,
    )
    (left,) = temporary.iterdir()
    held = temporary / ".tapestry-egg-scratch-held"
    held.mkdir()
    of_others = {"of-others", "tapestry-egg-cache", ".tapestry-egg"}  # a user's own, too
    for name in of_others:
        (temporary / name).mkdir()
    with locked(held), scratch() as folder:
        kept = {held.name, folder.name, *of_others}
        assert {p.name for p in temporary.iterdir()} == kept and left.name not in kept


def test_a_killed_write_goes_with_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "front.json"
    killed(
        "import sys, time, os\n"
        "from pathlib import Path\n"
        "from tapestry_egg import atomic\n"
        "def stop(*_):\n"
        "    print('there', flush=True)\n"
        "    time.sleep(100)\n"
        "os.replace = stop\n"
        "atomic.write_atomic(Path(sys.argv[1]) / 'front.json', 'half')\n",
        tmp_path,
    )
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".front.json.") and left.suffix == ".tmp"
    other = tmp_path / ".front.json.backup.1-1.tmp"  # of a file called front.json.backup
    other.write_text("")
    with locked(other):
        write_atomic(path, "whole")
    assert path.read_text() == "whole"
    assert {p.name for p in tmp_path.iterdir()} == {path.name, other.name}


def test_what_someone_holds_is_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with locked(file) as held, locked(file, wait=False) as twice:
        assert held and not twice
        remove_unheld(file)
        assert file.exists()
    remove_unheld(file)
    assert not file.exists()


@pytest.mark.parametrize("opened", [False, True])
def test_a_folder_that_is_swept_before_it_is_locked_is_made_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, opened: bool
) -> None:
    # As another process does that looks through the temporary files between the two.
    left = [temporary / "first", temporary / "second"]

    def sweep(path: Path) -> None:
        if path in swept:
            swept.remove(path)
            path.rmdir()

    def make(prefix: str) -> str:
        folder = left.pop(0)
        folder.mkdir()
        if not opened:
            sweep(folder)
        return str(folder)

    def open_first(path: Path, *args: int, **options: int) -> int:
        number = real(path, *args, **options)
        sweep(path)
        return number

    swept, real = {left[0]}, os.open
    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(os, "open", open_first)
    with scratch() as folder:
        assert folder == temporary / "second" and folder.is_dir()
    assert not list(temporary.iterdir())
