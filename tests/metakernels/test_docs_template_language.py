"""docs/template-language.md: every file, command and expression in it is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tapestry_egg.cli.app import main
from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.template_file import _FIELDS
from tapestry_egg.metakernels.signatures.values import DRAWN, FUNCTIONS
from tapestry_egg.rules.verify.samples import Draw

PAGE = (Path(__file__).parents[2] / "docs" / "template-language.md").read_text()


def fences(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[tuple[str, str]]:
    for fence in fences("console"):
        for part in re.split(r"^\$ ", fence, flags=re.MULTILINE)[1:]:
            command, _, output = part.partition("\n")
            yield command, output


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    for text in fences("yaml"):
        head, name = text.split("\n")[0].rsplit(" ", 1)
        assert head == "# file:"
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(("command", "output"), list(commands()))
def test_commands_print_what_the_page_says(
    folder: Path, capsys: pytest.CaptureFixture[str], command: str, output: str
) -> None:
    program, *arguments = shlex.split(command)
    assert program == "tapestry-egg"
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    out, err = capsys.readouterr()
    assert (out + err).strip() == output.strip()
    assert bool(exit_.value.code) == output.startswith("error")


def _expressions() -> Iterator[tuple[str, str]]:
    for fence in fences("expressions"):
        yield from (tuple(map(str.strip, line.split("#"))) for line in fence.splitlines()[1:])  # type: ignore[misc]


@pytest.mark.parametrize(("text", "value"), list(_expressions()))
def test_expressions_have_the_value_that_the_page_says(text: str, value: str) -> None:
    assert Expression(text)({"$s": (2, 3, 5)}) == Expression(value)({})


def test_all_ways_to_write_a_projection_are_one(folder: Path) -> None:
    from tapestry_egg.graph.blockgraph import TensorType

    registry.add_templates(folder / "sums.yaml")
    registry.add_templates(Path(__file__).with_name("sums.yaml"))
    x = TensorType((2, 3, 4), "float32")
    kernels = ["by_position", "by_rows"]
    kernels += ["sliced", "in_parts", "inserted", "row_inserted", "in_full", "named"]
    found = [registry.signature(k, {"axis": 2}, (x,)) for k in kernels]
    assert len({s.inputs for s in found}) == len({s.outputs for s in found}) == 1


def test_every_field_and_function_is_on_the_page() -> None:
    rows = re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE)
    described = set(re.findall(r"`(\w+)[:`]", " ".join(rows)))
    assert set(_FIELDS) - described == {"kernels", "out"}  # in the rows of `blocks` and `outputs`
    listed = re.search(r"Functions: `(.*?)`", PAGE, re.DOTALL)
    assert listed is not None and set(listed[1].split()) == set(FUNCTIONS)
    assert all(f"`{name}(" in PAGE for name in DRAWN)
    assert all(callable(getattr(Draw, name)) for name in DRAWN)


def test_only_samples_draw() -> None:
    with pytest.raises(TemplateError, match="extent draws at random"):
        Expression("extent() + 1")({})
