"""Damaged files of monoids, rules and targets: an error with its place, or a file that is fine."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tapestry_egg
from tapestry_egg.errors import TapestryError
from tapestry_egg.machine.target import load_target
from tapestry_egg.monoids.definition import read_monoids
from tapestry_egg.rules.language.book import load_book
from tests.metakernels.fuzz_mutations import damaged_text

PACKAGE = Path(tapestry_egg.__file__).parent
READERS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "monoids": (read_monoids, ["monoids/monoids.yaml"]),
    "rules": (
        load_book,
        ["rules/books/algebra.yaml", "rules/books/fusion.yaml", "rules/books/sharding.yaml"],
    ),
    "targets": (
        lambda path: load_target(f"{path}:8"),
        ["machine/targets/h100.yaml", "machine/targets/v5e.yaml"],
    ),
}


@pytest.fixture(params=READERS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        pytest.param(b"a: " + b"[" * 100_000, "more than 50 levels", id="deep list"),
        pytest.param(b"- " * 1_000 + b"a", "more than 50 levels", id="deep blocks"),
        pytest.param(b"#" * (5 << 20), "at most", id="large"),
        pytest.param(b"\xff\xfe", "not UTF-8", id="not UTF-8"),
        pytest.param(b"a: \x00", "not YAML", id="zero byte"),
        pytest.param(b"a: [\n", "not YAML", id="open list"),
        pytest.param(b"--- {}\n--- {}\n", "not YAML", id="two documents"),
        pytest.param(b"a: &a [*a]\n", None, id="an alias of what is around it"),
        pytest.param(b"? [a]\n: 1\n", None, id="a list for a name"),
        pytest.param(b"a: 2001-13-45\n", None, id="no such month"),
        pytest.param(b"a: !!python/object/apply:os.abort []\n", None, id="a call"),
    ],
)
def test_hostile_files_are_refused(
    kind: str, data: bytes, says: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(data)
    with pytest.raises(TapestryError, match=says) as e:
        READERS[kind][0](path)
    assert "mine.yaml" in e.value.where


def test_damaged_files_are_read_or_refused(kind: str, tmp_path: Path) -> None:
    """Two entries of a shipped file at a time, with random damage: no other error ever leaves."""
    read, files = READERS[kind]
    rng = random.Random(f"damaged {kind}")
    refused = 0
    for _ in range(150):
        entries = (PACKAGE / rng.choice(files)).read_text("utf-8").split("\n\n")
        text = "\n\n".join(entries if kind == "targets" else [entries[0], rng.choice(entries)])
        path = tmp_path / "mine.yaml"
        path.write_text(damaged_text(text, rng), "utf-8", errors="replace")
        try:
            read(path)
        except TapestryError as e:
            assert e.where and e.what, e
            refused += 1
    assert refused > 30
