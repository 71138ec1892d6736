"""Which kernels move elements is said by their templates, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.instantiate import instantiate
from tapestry_egg.metakernels.language.template_file import read_templates
from tapestry_egg.metakernels.signatures.signature import OperationSignature

X = TensorType((8, 6), "float32")
#: A user's own kernel: every second row.
THINNED = """
thinned:
  inputs: {x: "[$m, $n]"}
  %s
  outputs: {out: {shape: "[$m // 2, $n]", dtype: $x.dtype}}
  index: {i: $m // 2, j: $n}
  project: {x: "[2 * @i, @j]", out: "[@i, @j]"}
  fusion: loop
  elements: kept
"""


def signature(kernel: str, params: dict[str, object], *types: TensorType) -> OperationSignature:
    return registry.signature(kernel, params, types)


def test_the_kernels_of_jax_that_move_elements_say_so() -> None:
    sliced = {"start_indices": [0, 0], "limit_indices": [4, 6], "strides": None}
    part = signature("slice", sliced, X)
    assert (part.moved, part.takes) == ((0,), (0,))
    assert signature("concatenate", {"dimension": 0}, X, X, X).moved == (0, 1, 2)
    assert signature("rev", {"dimensions": [0]}, X).moved == (0,)
    assert signature("tanh", {"accuracy": None}, X).moved == ()


def test_a_template_of_ones_own_says_it_too(tmp_path: Path) -> None:
    for said, moved in (("moves: [x]", (0,)), ("flops: 0", ())):
        path = tmp_path / f"{len(moved)}.yaml"
        path.write_text(THINNED % said, "utf-8")
        registry.add_templates(path)
        assert signature("thinned", {}, X).moved == moved


def test_what_writes_rows_says_so_by_what_it_wants_straight() -> None:
    rows = {
        "update_window_dims": [1],
        "inserted_window_dims": [0],
        "scatter_dims_to_operand_dims": [0],
        "operand_batching_dims": [],
        "scatter_indices_batching_dims": [],
    }
    places, new = TensorType((3, 1), "int32"), TensorType((3, 6), "float32")
    for kernel in ("scatter-add", "scatter"):
        assert signature(kernel, {"dimension_numbers": rows}, X, places, new).into_rows
    assert not signature("tanh", {"accuracy": None}, X).into_rows


def test_a_pad_dilates_where_it_puts_something_between_elements() -> None:
    number = TensorType((), "float32")
    for edges, dilates in (([2, 1, 0], False), ([0, 0, 1], True), ([-1, 0, 2], True)):
        config = {"padding_config": [edges, [0, 0, 0]]}
        assert signature("pad", config, X, number).dilates is dilates
    # Compilers make a fill of a pad of nothing.
    nothing = TensorType((0, 6), "float32")
    assert not signature("pad", {"padding_config": [[0, 1, 0], [0, 0, 0]]}, nothing, number).dilates


@pytest.mark.parametrize(
    ("said", "fault"),
    [
        ("dilates: 3", "3 is neither true nor false"),
        ("writes: {part: x, into: x, at: x}", "has the parts into, part and at"),
        ("writes: {into: y, part: x, at: x}", "'y' in `writes` is not declared"),
    ],
)
def test_what_is_said_of_a_kernel_is_checked(tmp_path: Path, said: str, fault: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(THINNED % said, "utf-8")
    with pytest.raises(TemplateError, match=fault):
        (template,) = read_templates(path)
        instantiate(template, "thinned", {}, [X], None)


@pytest.mark.parametrize("field", ["moves", "takes", "repeats", "stored"])
def test_operands_that_there_are_not_are_refused(tmp_path: Path, field: str) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(THINNED % f"{field}: [y]", "utf-8")
    with pytest.raises(TemplateError, match=f"'y' in `{field}` is not declared"):
        read_templates(path)
