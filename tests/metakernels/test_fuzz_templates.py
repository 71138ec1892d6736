"""Damaged template files: each loads, or is refused with its place; nothing else ever happens."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tapestry_egg.errors import TapestryError, TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.instantiate import instantiate
from tapestry_egg.metakernels.language.expressions import Expression, Origin
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.patterns import Pattern
from tapestry_egg.metakernels.language.template_file import read_templates
from tests.metakernels.fuzz_mutations import damaged_document, damaged_text

ROOT = Path(__file__).parents[2]
FILES = (
    *sorted((ROOT / "tapestry_egg" / "metakernels" / "templates").glob("*.yaml")),
    ROOT / "docs" / "templates" / "tapestry.yaml",
)


def tensor(*shape: int, dtype: str = "float32") -> TensorType:
    return TensorType(shape, dtype)


_DOT = {"dimension_numbers": [[[1], [0]], [[], []]], "preferred_element_type": None}
#: Operations that the damaged templates are asked about: some fit some of them.
OPERATIONS: list[tuple[dict[str, Any], tuple[TensorType, ...]]] = [
    ({}, ()),
    ({}, (tensor(4, 6),)),
    ({}, (tensor(4, 6), tensor(4, 6))),
    (_DOT, (tensor(4, 6), tensor(6, 5))),
    ({}, (tensor(4, 6), tensor(6, 5), tensor(5))),
    ({}, (tensor(2, 4, 8, 9), tensor(3, 4, 3, 2))),
    ({}, (tensor(2, 4, 5, 3, dtype="uint8"),)),
    ({"axis": 1, "chunk": 2, "axes": [1], "dimension": 0}, (tensor(2, 3, 4),)),
    ({"axes": [1], "dimension": 0, "axis": 0}, (tensor(4, 6), tensor(2, 6))),
    ({"new_sizes": [2, 12], "dimensions": None, "permutation": [1, 0]}, (tensor(4, 6),)),
]

JUNK: list[Any] = [
    *(None, True, -1, 3, 1e300, float("nan"), 10**30, "", [], {}, ["a"], {"map": "[1]"}),
    *("[$n]", "$x", "[...] :> [...]", "@i", "[1, 2", "*", "\u202e\0", {"a": {"b": [1]}}),
    *({"transform": "insert"}, {"affineMap": {"projection": [[1]], "offset": "[0]"}, "shape": 1}),
]


@cache
def texts() -> tuple[str, ...]:
    """Every entry that ships, as a text of its own."""
    found = []
    for path in FILES:
        entry: list[str] = []
        for line in path.read_text().split("\n"):
            if line[:1] not in ("", " ", "#") and entry:
                found.append("\n".join(entry) + "\n")
                entry = []
            if line[:1] != "#":
                entry.append(line)
        found.append("\n".join(entry) + "\n")
    return tuple(t for t in found if t.strip())


@cache
def documents() -> tuple[Any, ...]:
    """Every entry that ships, as plain data."""
    found: list[Any] = []
    for path in FILES:
        data = yaml.safe_load(path.read_text())
        found += (
            [{k: v} for k, v in data.items()] if isinstance(data, dict) else [[e] for e in data]
        )
    return tuple(found)


def damaged(rng: random.Random, count: int) -> Iterator[str]:
    """Half of the files are damaged as texts, half as data."""
    for i in range(count):
        if i % 2:
            yield damaged_text(rng.choice(texts()), rng)
        else:
            data = damaged_document(rng.choice(documents()), rng, JUNK)
            yield yaml.safe_dump(data, sort_keys=False, allow_unicode=True)


def check_error(error: TapestryError, path: Path) -> None:
    """An error names a place in the file and says what is wrong there in plain words."""
    assert isinstance(error, TemplateError)
    assert error.where.startswith((f"{path.name}:", path.name, str(path))), error.where
    assert error.what.strip() and "Traceback" not in str(error) and "object at 0x" not in str(error)


def refused(path: Path) -> int:
    """1 for a file that is refused, or whose templates contradict themselves; 0 for others."""
    try:
        templates = read_templates(path)
        for template in templates:
            template.check()
    except TapestryError as error:
        check_error(error, path)
        return 1
    faults = 0
    for template in templates:
        for params, inputs in OPERATIONS:
            try:
                instantiate(template, "f", params, inputs, None)
            except Mismatch:
                pass
            except TapestryError as error:
                check_error(error, path)
                faults = 1
    return faults


def fuzz(folder: Path, seed: int, count: int) -> int:
    path = folder / "damaged.yaml"
    faults = 0
    for text in damaged(random.Random(seed), count):
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
        faults += refused(path)
    return faults


@pytest.mark.slow
def test_some_damaged_templates(tmp_path: Path) -> None:
    assert fuzz(tmp_path, 0, 500) >= 380


_ALIASES = "a: &a [x, x, x]\n" + "".join(
    f"{b}: &{b} [*{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}, *{a}]\n"
    for a, b in zip("abcdefghijklmnop", "bcdefghijklmnopq", strict=True)
)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"[" * 200_000, "more than 50 levels"),
        (b"- " * 100_000, "more than 50 levels"),
        (b"{a: " * 50_000, "more than 50 levels"),
        (b"? " * 50_000, "more than 50 levels"),
        (b"&a [*a]", "expected an entry"),
        (_ALIASES.encode(), "expected an entry"),
        (b"f: &a\n  inputs: *a\n  outputs: {y: {dtype: a}}\n  index: '[]'\n", "is a list or map"),
        (b"f: {inputs: {x: }, inputs: {}}", "'inputs' is given twice"),
        (b"\x00", "not YAML"),
        (b"\xff\xfe", "not UTF-8"),
        (b"a: \xed\xa0\x80", "not UTF-8"),
        (b"f: !!python/object/apply:os.system [ls]", "expected an entry"),
        (b"--- {}\n--- {}\n", "not YAML"),
        (b"#" * (5 << 20), "at most"),
    ],
)
def test_files_that_are_traps(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "trap.yaml"
    path.write_bytes(content)
    tracemalloc.start()
    try:
        if said == "is a list or map":  # an alias to itself is one more level, and not expanded
            with pytest.raises(TemplateError):
                read_templates(path)
        else:
            with pytest.raises(TemplateError, match=said):
                read_templates(path)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("content", [b"", b"\n\n", b"# nothing", b"{}", b"[]", b"\xef\xbb\xbf"])
def test_empty_files_hold_no_templates(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "empty.yaml"
    path.write_bytes(content)
    assert read_templates(path) == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 5000 + "]" * 5000, "characters"),
        ("[" * 1000 + "]" * 1000, "brackets within brackets"),
        ("-" * 4900 + "1", "nested too deeply"),
        ("not " * 1200 + "1", "nested too deeply"),
        ("1+" * 2000 + "1", "nested too deeply"),
        ("9" * 400, "400 digits"),
        ("9 ^ 9 ^ 9 ^ 9", "too large"),
        ("2 ^ (0 - 1) ^ 99999", "too large"),
        ("range(10 ^ 12)", "a list of"),
        ("ones(10 ^ 12)", "a list of"),
        ("[[[1 for $i in range(9999)] for $j in range(9999)] for $k in range(9999)]", "steps"),
    ],
)
def test_texts_that_are_traps(text: str, said: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(TemplateError, match=said):
            Expression(text)({})
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()


# What is wrong, said for each kind of fault with its place

FORM = """
f:
  params: {axis: "1"}
  index: "%s"
  inputs:
    x:
      shape: "%s"
      dtype: "%s"
      ipf: "%s"
  outputs:
    y:
      shape: "%s"
      dtype: float32
      ipf: "%s"
"""
RIGHT = ("[$a, $b]", "[$a, $b, $c]", "$d", "[..., new] :> [..., $c]", "[$.index...]", "[...]")


@pytest.mark.parametrize(
    ("field", "marked", "said"),
    [  # the caret stands under what follows the `~`
        (0, "[$a, ~$bb]", "$bb is not a name here"),
        (0, "~[$a, 1.5]", "(2, 1.5) are not extents of index group 'i'"),
        (0, "~[$a - 9, $b]", "(-7, 3) are not extents"),
        (0, "[$a, $b~", "the text ends too early"),
        (1, "[$a..., ~$b..., $c]", "a pattern can have only one `...`"),
        (1, "[$a, $b, ~$c[$a]]", "$a is an index here and a dim elsewhere"),
        (1, "[$a, ~$a=($b, $c)]", "$a stands for two things in one pattern"),
        (1, "[$a, ~$.index, $c]", "$.index belongs to the language"),
        (1, "[$a, $b, +~]", "unexpected ']'"),
        (2, "$d +~", "the text ends too early"),
        (3, "[..., new >~: [..., $c]", "unexpected ':'"),
        (3, "~[1, 1, 1] :> [1, 1, $c]", "the map takes more than the 2 index dims"),
        (3, "~[1, new, new] :> [1, 1, $c]", "the map takes 1 of the 2 index dims"),
        (3, "~[1, 1] :> [1, 1, $c]", "the map makes 2 rows for a tensor of rank 3"),
        (3, "[..., ~..., new]", "a second filling"),
        (3, "~[1, 1, 1.5] :> [1, 1, $c]", "1.5 is not an entry of a map"),
        (3, "~[1, 1, new] :> [1, $c]", "2 entries where 3 are needed"),
        (3, "~[1, 1, new] :> [1, 1, 0 - $c]", "-4 is not an extent"),
        (3, "~[1, 1, new] :> [1, 1, $c + 1]", "leaves x, f32[2, 3, 4]"),
        (3, "[1, 1, new] :> ~1", "1 is not a list"),
        (3, "~D[1, 1, new] + [0] :> [1, 1, $c]", "1 entries where 3 are needed"),
        (3, "[@a, ~@bb, 0]", "@bb is not an index group here"),
        (3, "[[1, 0 | 0 | 1], ~[0, 1, 1 | 0 | 1], 0]", "3 entries where 2 are needed"),
        (3, "[1...[:~a], new] :> [1, 1, $c]", "'a' is not an integer"),
        (3, "~$c", "4 is not a projection"),
        (4, "[~$.indx...]", "$.indx is not a name here"),
        (4, "~[..., 1]", "(..., 1) is not a shape"),
        (5, "~[1, 0]", "covers only zr[0:2, 0:1] of y"),
    ],
)
def test_every_fault_has_its_place_and_a_caret(
    tmp_path: Path, field: int, marked: str, said: str
) -> None:
    text, at = marked.replace("~", ""), marked.index("~")
    written = FORM % (*RIGHT[:field], text, *RIGHT[field + 1 :])
    path = tmp_path / "own.yaml"
    path.write_text(written)
    with pytest.raises(TemplateError) as caught:
        for template in read_templates(path):
            template.check()
            instantiate(template, "f", {}, (tensor(2, 3, 4),), None)
    assert said in caught.value.what
    line, column = map(int, caught.value.where.removeprefix("own.yaml:").split(":"))
    assert written.split("\n")[line - 1][column - 1 :].startswith(f'{text[at:]}"')
    shown, caret = caught.value.hint.split("\n  ")[:2]
    assert caret.strip() == "^" and text[at:].startswith(shown[len(caret) - 1 :])


def test_the_right_form_is_right(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(FORM % RIGHT)
    (template,) = read_templates(path)
    made = instantiate(template, "f", {}, (tensor(2, 3, 4),), None)
    assert made.signature.output_types[0].shape == (2, 3)


def test_long_lines_are_shown_around_the_fault() -> None:
    text = "[" + "1, " * 300 + "$a, " + "1, " * 300 + "1]"
    with pytest.raises(TemplateError) as caught:
        Expression(text, Origin("f", 1, 1))({})
    shown, caret = caught.value.hint.split("\n  ")[:2]
    assert len(shown) <= 160 and shown[len(caret) - 1 :].startswith("$a")
    assert caught.value.where == f"f:1:{text.index('$a') + 1}"


@pytest.mark.parametrize(
    "pattern", ["[$a...[:1 / 0]]", "[$a...[:$b]]", "[$a=()]", "[a b]", "[$a=[b, c]", "[99 9]", "+"]
)
def test_malformed_patterns(pattern: str) -> None:
    with pytest.raises(TemplateError) as caught:
        Pattern(pattern, Origin("f", 3, 5)).spans((1, 2), {})
    assert caught.value.where.startswith("f:3:")
