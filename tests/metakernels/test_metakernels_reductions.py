"""`reduce:` in templates: dims of the inputs that become reduced index dims."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.instantiate import instantiate
from tapestry_egg.metakernels.language.template_file import read_templates
from tapestry_egg.metakernels.signatures.signature import OperationSignature


def signature(folder: Path, text: str) -> OperationSignature:
    """The signature of a template of x: f32[2, 3, 4] and y: f32[4]."""
    path = folder / "own.yaml"
    path.write_text(text)
    (template,) = read_templates(path)
    types = TensorType((2, 3, 4), "float32"), TensorType((4,), "float32")
    return instantiate(template, "f", {}, types, None).signature


REDUCED = """
f:
  index: "[$a]"
  inputs:
    x: {shape: "[$a, $n, $m]", dtype: $d, ipf: "[1, new, new] :> [1, $n, $m]"}
    y: {shape: "[$m]", dtype: $d, ipf: "[drop, new] :> [%s]"}
  reduce: %s
  outputs: {out: {dtype: $d}}
"""


@pytest.mark.parametrize(
    ("reduce", "dims_of_x", "dims_of_y", "added"),
    [
        ("{m: sum}", [0, 0, 1], [1], [(4, "sum")]),
        ("{m: max, n: sum}", [0, 2, 1], [1], [(4, "max"), (3, "sum")]),
        ("{r: {monoid: sum, over: {x: 2, y: 0}}}", [0, 0, 1], [1], [(4, "sum")]),
        ("{r: {monoid: sum, over: {x: -1, y: -1}}}", [0, 0, 1], [1], [(4, "sum")]),
        ("{r: {monoid: sum, over: {x: '[1]'}}}", [0, 1, 0], [0], [(3, "sum")]),
        ("{r: {monoid: min, over: {x: '[1, 2]'}}}", [0, 1, 2], [0], [(3, "min"), (4, "min")]),
        ("{m: whole if $d == float32 else sum}", [0, 0, 1], [1], [(4, "whole")]),
    ],
)
def test_reduced_dims_follow_new_index_dims(
    tmp_path: Path, reduce: str, dims_of_x: list[int], dims_of_y: list[int], added: Any
) -> None:
    sig = signature(tmp_path, REDUCED % ("$m", reduce))
    assert [(d.size, d.monoid or d.role) for d in sig.index] == [(2, "map"), *added]
    assert sig.output_types[0].shape == (2,)
    for p, wanted in zip(sig.inputs, (dims_of_x, dims_of_y), strict=True):
        whole = sig.input_types[sig.inputs.index(p)].shape
        for k, d in enumerate(wanted):
            follows = d > 0 or (p is sig.inputs[0] and k == 0)
            assert p.matrix[k] == tuple(int(follows and e == d) for e in range(len(sig.index)))
            assert p.shape[k] == (1 if follows else whole[k])


@pytest.mark.parametrize(
    ("extent", "reduce", "said"),
    [
        ("$m", "{k: sum}", "no input has a dim $k to reduce"),
        ("$m", "{a: sum}", "'a' is an index group already"),
        ("$m", "{m: plus}", "'plus' is not a monoid"),
        ("1", "{m: sum}", "dim 0 of operand 1, f32[4], is not read whole"),
        ("$m", "{r: {monoid: sum, over: {x: 3}}}", "3 is outside x, f32[2, 3, 4]"),
        ("$m", "{r: {monoid: sum, over: {x: 1, y: 0}}}", "the dims to reduce differ: [3] and [4]"),
        ("$m", "{r: {monoid: sum, over: {z: 1}}}", "'z' in `over` is no operand"),
        ("$m", "{m: sum, r: {monoid: sum, over: {x: 2}}}", "dim 2 of operand 0 is reduced twice"),
        ("$m", "{r: {over: {x: 2}}}", "'monoid' is missing in a reduction"),
    ],
)
def test_reductions_that_cannot_be(tmp_path: Path, extent: str, reduce: str, said: str) -> None:
    with pytest.raises(TemplateError) as caught:
        signature(tmp_path, REDUCED % (extent, reduce))
    assert said in caught.value.what and caught.value.where.startswith("own.yaml:7:")
