"""Programs named on the command line: found, run, or refused with the user's own line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tapestry_egg.errors import TraceError
from tapestry_egg.tracing.entry import is_entry, load_entry

PROGRAM = """
from beside import SIZE

def step(x):
    return x + 1

def other(x, y):
    return x * y

def other_args():
    return SIZE, 2

def example():
    return step, (SIZE,)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "beside.py").write_text("SIZE = 3\n")
    path = tmp_path / "json.py"  # a name of the standard library, to be left alone
    path.write_text(PROGRAM)
    return path


def test_what_names_a_program() -> None:
    assert is_entry("gpt2.py") and is_entry("a/gpt2.py:step")
    assert not is_entry("gpt2.json") and not is_entry("gpt2")


def test_a_file_alone_is_its_example(program: Path) -> None:
    entry = load_entry(str(program))
    assert (entry.name, entry.arguments) == ("json", (3,))
    assert entry.function(*entry.arguments) == 4


def test_a_function_takes_its_own_arguments_or_those_of_the_example(program: Path) -> None:
    other = load_entry(f"{program}:other")
    assert other.function(*other.arguments) == 6
    assert other.name == "json-other"
    assert load_entry(f"{program}:step").arguments == (3,)


def test_the_standard_library_keeps_its_names(program: Path) -> None:
    load_entry(str(program))
    assert sys.modules["json"] is json


def test_a_file_of_a_package_is_imported_as_such(tmp_path: Path) -> None:
    package = tmp_path / "zoo_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sizes.py").write_text("SIZE = 5\n")
    (package / "cat.py").write_text(
        "from .sizes import SIZE\ndef example():\n    return abs, (SIZE,)\n"
    )
    assert load_entry(str(package / "cat.py")).arguments == (5,)


@pytest.mark.parametrize(
    ("text", "name", "said", "at"),
    [
        ("def f(x):\n    return x\n", ":g", "no function 'g' in the file", ""),
        ("def f(x):\n    return x\n", "", "the file says no arguments to trace with", ""),
        ("def f(x):\n    return x\n", ":f", "no arguments to trace 'f' with", ""),
        ("def f(x):\n    return x\ndef f_args(): ...\n", "", "no function is named", ""),
        ("def example():\n    return 3\n", "", "example() returns no (function, arguments)", ""),
        ("x = 1\n\n1 / 0\n", "", "importing it raised ZeroDivisionError", ":3"),
        ("x = 1\nx +\n", "", "importing it raised SyntaxError", ":2"),
        ("def example():\n    raise KeyError('w')\n", "", "example() raised KeyError: 'w'", ":2"),
    ],
)
def test_faults_are_named_with_their_line(
    tmp_path: Path, text: str, name: str, said: str, at: str
) -> None:
    path = tmp_path / "faulty.py"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        load_entry(f"{path}{name}")
    assert caught.value.what.startswith(said)
    assert caught.value.where == f"{path}{at}"
    assert caught.value.hint


def test_functions_that_a_library_has_wrapped_are_among_those_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "wrapped.py"
    path.write_text("import jax\nf = jax.jit(lambda x: x)\nf_args = lambda: (1,)\nclass C: ...\n")
    with pytest.raises(TraceError) as caught:
        load_entry(f"{path}:g")
    assert caught.value.hint == "It has f, f_args."
    with pytest.raises(TraceError) as caught:
        load_entry(str(path))
    assert caught.value.hint == f"Write {path}:f."


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(TraceError, match=r"nowhere\.py: no such file"):
        load_entry("nowhere.py:step")
