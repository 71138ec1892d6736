"""`tapestry-egg kernels`: templates as written, and what they say of given operands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.test_cli import Run

TAPESTRY = str(Path(__file__).parents[2] / "docs" / "templates" / "tapestry.yaml")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys, "kernels")


def test_a_template_of_yours_is_shown_as_it_is_written(run: Run) -> None:
    assert run("desaturate", "--templates", TAPESTRY) == 0
    assert run.out.startswith("# tapestry.yaml:")
    assert run.out.split("\n")[1] == "desaturate:" and "gray: {dtype: uint8}" in run.out
    assert "conv:" not in run.out
    assert run("--templates", TAPESTRY) == 0
    assert "matmul" in run.out and "dot_general" in run.out


def test_x13_halos_are_told(run: Run) -> None:
    arguments = ["conv", "--templates", TAPESTRY, "--shape", "2,4,10,10", "--shape", "8,4,3,3"]
    assert run(*arguments, "--parts", "2", "--parts", "4") == 0
    index, x, f, y, two, four = run.out.strip().split("\n\n")[1:]
    assert [line.split() for line in index.split("\n")[1:]] == [
        ["n", "2", "map"],
        ["out", "8", "map"],
        ["y", "8", "map"],
        ["x", "8", "map"],
        ["in", "4", "reduce(sum)"],
    ]
    assert x.split("\n") == [
        "X: f32[2, 4, 10, 10] at [n, in, y:+3, x:+3]",
        "( 1 0 0 0 0 | 0 | 1 )",
        "( 0 0 0 0 1 | 0 | 1 )",
        "( 0 0 1 0 0 | 0 | 3 )",
        "( 0 0 0 1 0 | 0 | 3 )",
        "y: neighbours share 2 of 3 cells of dim 2",
        "x: neighbours share 2 of 3 cells of dim 3",
    ]
    assert f.startswith("F: f32[8, 4, 3, 3] at [out, in, 0:+3, 0:+3]\n")
    assert y.startswith("Y: f32[2, 8, 8, 8] at [n, out, y, x]\n")
    # Rows 0 to 6 and 4 to 10 of the halves 0 to 5 and 5 to 10: one row from the neighbour.
    rows = dict(line.split(maxsplit=1) for line in two.split("\n")[1:])
    assert rows["y"] == "dim 2 + 1 before, 1 after  whole  dim 2          448"
    # Two rows of 10 cells for 2 images of 4 channels, and the whole of F twice.
    assert 448 == 2 * 10 * 2 * 4 + 8 * 4 * 3 * 3
    assert rows["in"].split() == ["dim", "1", "dim", "1", "partial", "(sum)", "0"]
    assert "gathered" in dict(line.split(maxsplit=1) for line in four.split("\n")[1:])["y"]


def test_strides_longer_than_their_window_skip_cells(run: Run) -> None:
    """Every third cell from 1 on: of the cells between two, none is read."""
    limits = ["start_indices=[1]", "limit_indices=[11]", "strides=[3]"]
    assert run("slice", "--shape=12", *(f"--param={text}" for text in limits)) == 0
    assert "2 cells of dim 0 skipped between neighbours" in run.out


def test_dims_that_cannot_be_cut_say_why(run: Run) -> None:
    assert run("linear", "--templates", TAPESTRY, *("--shape=4,1", "--shape=1,8", "--shape=8")) == 0
    assert "in: not legal, index dim in is a whole dim" in run.out
    assert run("add", "--shape=4,1", "--shape=4,1") == 0
    assert "not legal, index dim i1 has one point only" in run.out
    assert run("rev", "--shape=4", "--param", "dimensions=[0]") == 0
    assert run.out.strip().split("\n")[-1].split() == ["i", "gathered", "dim", "0", "0"]


def test_operands_by_name_dtypes_and_parameters(run: Run) -> None:
    assert run("matmul", "--templates", TAPESTRY, "--shape", "W=16x4", "--shape", "X=8x16") == 0
    assert "matmul(X: f32[8, 16], W: f32[16, 4]) -> result: f32[8, 4]" in run.out
    assert run("convert_element_type", "--shape", "int32[]", "--param", "new_dtype=float32") == 0
    assert "convert_element_type(x: s32[]) -> out: f32[]" in run.out
    assert "The index space is one point." in run.out
    xs = ["--shape=xs=2,3", "--shape=xs=2,4", "--param=axis=1"]
    assert run("concat", "--templates", TAPESTRY, *xs) == 0
    assert "concat(xs[0]: f32[2, 3], xs[1]: f32[2, 4])" in run.out


def test_the_same_as_json(run: Run) -> None:
    arguments = ["reduce_sum", "--shape", "8,15", "--param", "axes=[1]", "--parts", "3", "--json"]
    assert run(*arguments) == 0
    data = json.loads(run.out)
    assert data["index"][1] == {"name": "r", "size": 15, "role": "reduce", "monoid": "sum"}
    assert data["inputs"][0]["affineMap"]["projection"] == [[1, 0], [0, 1]]
    assert data["outputs"][0] == {
        "name": "out",
        "type": "f32[8]",
        "affineMap": {"projection": [[1, 0]], "offset": [0]},
        "shape": [1],
    }
    assert data["splits"][1] == {
        "dim": "r",
        "parts": 3,
        "legal": True,
        "refusal": "",
        "ports": {"x": "dim 1", "out": "partial (sum)"},
        "read_again": {"x": 0},
    }


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "2"], "name it"),
        (["matmul", "--shape", "X=2,3"], "no template for kernel 'matmul'"),
        (["add", "--shape", "float33[2]"], "'float33[2]' is not a type"),
        (["add", "--shape", "2,-3"], "'2,-3' is not a type"),
        (["add", "--shape", "x y=2"], "'x y' is not the name of an operand"),
        (["add", "--shape", "x=2", "--shape", "z=2"], "The template's operands are x, y."),
        (["add", "--shape", "x=2", "--shape", "2"], "all in order, or all by name"),
        (["add", "--shape", "2", "--shape", "3"], "`when: broadcastable($x.shape, $y.shape)`"),
        (["add", "--param", "axis"], "'axis' is not NAME=VALUE"),
        (["dot_general", "--shape", "2", "--shape", "2"], "$dimension_numbers is not a name here"),
        (["add", "--templates", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["add", "--shape", "9999999999999999,2"], "is not a type"),
    ],
)
def test_errors_say_what_to_do(run: Run, arguments: list[str], said: str) -> None:
    assert run(*arguments) == 1
    assert run.err.startswith("error: ") and said in run.err and run.out == ""
