"""The template language: expressions, patterns, positions of errors, template files, speed."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.expressions import Expression, Origin, PassageText
from tapestry_egg.metakernels.language.patterns import Pattern
from tapestry_egg.metakernels.language.template_file import read_templates
from tapestry_egg.metakernels.signatures.parameters import hashable, readable
from tapestry_egg.metakernels.signatures.values import Row, digits
from tapestry_egg.zspace import Projection

SCOPE: dict[str, Any] = {
    "$a": 7,
    "$b": -3,
    "$s": (2, 3, 5, 8),
    "$d": {"spec": (1, 0), "mode": "CLIP"},
    "$x": TensorType((4, 6), "bfloat16"),
    "@m": (Row((1, 0, 0)), Row((0, 1, 0))),
    "@k": Row((0, 0, 1)),
}


def value(text: str) -> Any:
    return Expression(text)(SCOPE)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("1 + 2 * 3", 7),
        ("-2 * 3 + 1", -5),
        ("-$b - -1", 4),
        ("7 // 2 * 2", 6),
        ("8 / 4", 2),
        ("1.0 * 7 / 2", 3.5),
        ("$a % 4", 3),
        ("(1 + 2) * 3", 9),
        ("not 1 == 2 and 3 < 4 or false", True),
        ("1 if $a > 0 else 2 if $b > 0 else 3", 1),
        ("1 if $a < 0 else 2 if $b > 0 else 3", 3),
        ("$s[1:]", (3, 5, 8)),
        ("$s[:-1]", (2, 3, 5)),
        ("$s[-1]", 8),
        ("$s[[0, 2]]", (2, 5)),
        ("[$s..., 1, $s[:1]...]", (2, 3, 5, 8, 1, 2)),
        ("[$n * 2 for $n in $s if $n > 2]", (6, 10, 16)),
        ("[$n - $k for $k, $n in enumerate($s)]", (2, 2, 3, 5)),
        ("3 in $s", True),
        ("4 not in $s", True),
        ("[]", ()),
        ("$d.spec[0]", 1),
        ("$d.mode == CLIP", True),
        ("'scatter-add'", "scatter-add"),
        ("$x.shape[1] * $x.rank", 12),
        ("kind($x.dtype) == float and bits($x.dtype) == 16", True),
        ("without($s, [0, -1])", (3, 5)),
        ("arrange([2, 0, 1], [a, b, c])", ("b", "c", "a")),
        ("prod($s) + sum($s) + len($s) + max($s) - min(4, 3)", 240 + 18 + 4 + 8 - 3),
        ("zip($s, range(4))", ((2, 0), (3, 1), (5, 2), (8, 3))),
        ("none == none", True),
        ("2 * @k + @m[0] - 1 :+ 3", Row((1, 0, 2), -1, 3)),
        ("[@m..., 0 :+ 4]", (Row((1, 0, 0)), Row((0, 1, 0)), Row((), 0, 4))),
        ("@k :+ 2 if $a > 0 else 0", Row((0, 0, 1), 0, 2)),
        ("9 - @k", Row((0, 0, -1), 9)),
        ("dot([4, 2], @m)", Row((4, 2, 0))),
    ],
)
def test_expressions(text: str, want: Any) -> None:
    got = value(text)
    assert got == want and type(got) is type(want)


_NUMBERS = st.recursive(
    st.integers(0, 9).map(str),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from("+ - *".split()), inner).map(" ".join),
        inner.map("({})".format),
        inner.map("-{}".format),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} > 2 else {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]}, {t[1]}][{t[0]} > {t[1]}]"),
    ),
    max_leaves=12,
)


@given(_NUMBERS)
@settings(max_examples=100, deadline=None)
def test_precedence_is_pythons(text: str) -> None:
    assert value(text) == eval(text)


@pytest.mark.parametrize(
    ("text", "column", "message", "hint"),
    [
        ("$a + * 2", 6, "unexpected '*'", "`$name`"),
        ("[$a, 2", 7, "ends too early", "`]`"),
        ("$a ? 2", 4, "unexpected '?'", ""),
        ("$aa + 1", 1, "$aa is not a name here", "Did you mean $a?"),
        ("1 + @j", 5, "@j is not an index group here", ""),
        ("lenn($s)", 1, "there is no function lenn", "Did you mean len?"),
        ("$a / 2", 4, "7 / 2 is not exact", ""),
        ("$s + 1", 4, "is not a number", ""),
        ("$s[9]", 4, "no entry 9 in the list of length 4", ""),
        ("1 + $s[$a]", 8, "no entry 7", ""),
        ("$x.shap", 4, "'shap' is not an attribute", "shape"),
        ("[$d...]", 2, "`...` spreads a list or repeats a number", ""),
        ("len([1...])", 1, "len is given (1...,), whose size is not known here", ""),
        ("E[1]", 3, "cannot be indexed", ""),
        ("prod($a)", 1, "prod cannot take 7", ""),
        ("1 < a", 3, "1 < 'a' has no value", ""),
        ("2 ^ 9999", 3, "2 ^ 9999 is too large", ""),
        ("range(10 ^ 9)", 1, "a list of 1000000000 entries", ""),
        ("1 :+ true", 6, "True is not an extent", ""),
        ("(@k :+ 2) + 1", 11, "`:+` must come last", ""),
        ("[$i for $i in $a]", 15, "7 is not a list", ""),
        ("@k :+ -1", 7, "-1 is not an extent", ""),
        ("fail('no')", 1, "no", ""),
        ("$a.__class__", 4, "'__class__' is not an attribute", ""),
        ("$x.__class__", 4, "'__class__' is not an attribute", ""),
    ],
)
def test_errors_have_a_place_a_caret_and_a_hint(
    text: str, column: int, message: str, hint: str
) -> None:
    with pytest.raises(TemplateError) as caught:
        Expression(text, Origin("own.yaml", 12, 5))(SCOPE)
    error = caught.value
    assert message in error.what and error.where == f"own.yaml:12:{4 + column}"
    lines = error.hint.split("\n  ")
    assert lines[0] == text and lines[1] == " " * (column - 1) + "^"
    assert hint in "".join(lines[2:])


@pytest.mark.parametrize(
    ("pattern", "shape", "want"),
    [
        ("[$batch..., $n, $k]", (2, 3, 4, 5), {"$batch": (2, 3), "$n": 4, "$k": 5}),
        ("[$n, $rest...]", (2,), {"$n": 2, "$rest": ()}),
        ("[$a, $rest..., $z]", (2, 9, 3), {"$a": 2, "$rest": (9,), "$z": 3}),
        ("[]", (), {}),
        ("[$_..., 1]", (4, 1), {}),
        ("[$n]", (2, 3), None),
        ("[$n, 1]", (2, 3), None),
        ("[$n, $m, $k...]", (2,), None),
        ("[$n, $n]", (3, 3), {"$n": 3}),
        ("[$n, $n]", (3, 4), None),
    ],
)
def test_patterns(pattern: str, shape: tuple[int, ...], want: dict[str, Any] | None) -> None:
    names: dict[str, Any] = {}
    assert Pattern(pattern).match(shape, names) == (want is not None)
    assert want is None or names == want


def test_a_name_has_one_value_in_all_patterns() -> None:
    names: dict[str, Any] = {}
    assert Pattern("[$b..., $n, $k]").match((2, 3, 4), names)
    assert Pattern("[$b..., $k, $m]").match((2, 4, 5), names)
    assert not Pattern("[$b..., $k]").match((2, 3), names)


@pytest.mark.parametrize(("text", "column"), [("[$a..., $b...]", 9), ("[$a, 1 + 2]", 8), ("$a", 1)])
def test_malformed_patterns(text: str, column: int) -> None:
    with pytest.raises(TemplateError) as caught:
        Pattern(text, Origin("f", 1, 1)).axes()
    assert caught.value.where == f"f:1:{column}"


def test_passages() -> None:
    law = PassageText("sum(x, ys...) -> prod if $a > 0").law()
    assert (law.monoid_in, law.ports, law.monoid_out) == ("sum", ("x", "ys..."), "prod")
    assert PassageText("sum(x) -> sum if $a > 0").holds(SCOPE)
    assert not PassageText("sum(x) -> sum if $a < 0").holds(SCOPE)
    with pytest.raises(TemplateError, match="unexpected"):
        PassageText("sum(x) => sum").law()


# Mixed-radix digits

_SHAPES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=4)


@st.composite
def _reshapes(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    source = draw(_SHAPES)
    left, target = math.prod(source), []
    while left > 1:
        n = draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        target.append(n)
        left //= n
        if len(target) > 5:
            target.append(left)
            break
    return tuple(source), tuple(draw(st.permutations(target)))


@pytest.mark.slow
@given(_reshapes())
@settings(max_examples=150, deadline=None)
def test_digits_name_the_same_element_on_both_sides(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
) -> None:
    source, target = shapes
    found = digits(source, target)
    index = found["sizes"]
    assert math.prod(index) == math.prod(source)
    rank = len(index)
    sides = []
    for shape, rows in ((source, found["source"]), (target, found["target"])):
        matrix = tuple(c for c, _ in rows)
        projection = Projection(
            matrix, (0,) * len(rows), tuple(n for _, n in rows), index_rank=rank
        )
        sides.append((np.arange(math.prod(shape)).reshape(shape), projection))
    mapped = [d for d in range(rank) if found["roles"][d] == "map"]
    for point in np.ndindex(*index):
        at = [i if d in mapped else 0 for d, i in enumerate(point)]
        seen = []
        for array, projection in sides:
            box = projection.point(at)
            seen.append(
                array[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))].ravel()
            )
        assert np.array_equal(*seen)


def test_digits_of_shapes_of_other_sizes() -> None:
    with pytest.raises(ValueError, match="differ in size"):
        digits((2, 3), (5,))


# Template files


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "own.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "where", "message"),
    [
        ("kernels: [f]", "own.yaml:1:10", "expected an entry, a mapping"),
        ("[f", "own.yaml:2:1", "not YAML"),
        ("f", "own.yaml:1:1", "expected a list of entries, or kernels"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape", "own.yaml:4:", "not YAML"),
        ("- kernels: [f]\n  out: {shape: 1, dtype: 2}", "own.yaml:1:3", "'inputs' is missing"),
        ("- kernels: [f]\n  inputs: {}", "own.yaml:1:3", "either `out` or `outputs`"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n  flop: 1",
         "own.yaml:4:3", "unknown key 'flop'"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n  fusion: loops",
         "own.yaml:4:11", "unknown fusion"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n"
         "  in_products: sometimes", "own.yaml:4:16", "unknown in_products 'sometimes'"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n  commutes: true",
         "own.yaml:4:13", "only a kernel of two operands commutes"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n"
         '  project: {y: "[]"}', "own.yaml:4:12", "'y' in `project` is not declared"),
        ("- kernels: [f]\n  inputs: {x: , x: }\n  out: {shape: $x.shape, dtype: a}",
         "own.yaml:2:17", "'x' is given twice"),
        ('- kernels: [f]\n  inputs: {x: "[$n"}\n  out: {shape: $x.shape, dtype: a}',
         "own.yaml:2:19", "ends too early"),
        ('- kernels: [f]\n  inputs: {x: }\n  out: {shape: "[1,]", dtype: a}', "own.yaml:3:20",
         "unexpected ']'"),
    ],
)  # fmt: skip
def test_malformed_files(tmp_path: Path, text: str, where: str, message: str) -> None:
    with pytest.raises(TemplateError) as caught:
        for template in read_templates(_file(tmp_path, text)):
            template.check()
    assert caught.value.where.startswith(where) and message in caught.value.what


def _own(tmp_path: Path, text: str) -> None:
    registry.add_templates(_file(tmp_path, text))


def test_files_added_by_a_relative_path_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: $x.dtype}\n"
    text += '  index: {i: "$x.shape"}\n  project: {x: "@i", out: "@i"}\n'
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text, "utf-8")
    registry.add_templates("mine.yaml")
    monkeypatch.chdir("/")
    assert [Path(path).read_text("utf-8") for path in registry.added()] == [text]


_X = TensorType((4, 6), "float32")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            'index: {i: "[4, 6]"}\n  project: {x: "@i", out: "@i[:1]"}',
            "1 rows for a tensor of rank 2",
        ),
        ('index: {i: "[4, 5]"}\n  project: {x: "@i", out: "@i"}', "covers only"),
        ('index: {i: "[4, 6]"}\n  project: {x: "[@i[0] + 1, @i[1]]", out: "@i"}', "leaves x"),
        ('index: {i: "[4, 6]"}\n  roles: {i: maps}\n  project: {x: "@i", out: "@i"}', "not a role"),
        ("roles: {i: [map]}", "expected an expression"),
        ('roles: {i: "[map]"}', "1 roles for 2 index dims"),
        ("let: {dtype: $dtype}\n  when: $dtype == float32", "$dtype is defined by itself"),
        ("when: $strenght > 1", "$strenght is not a name here"),
        ("flops: $x.dtype", "not a polynomial"),
        ("passages: [sum(y) -> sum]", "no operand 'y'"),
    ],
)
def test_templates_that_contradict_themselves(fields: str, message: str, tmp_path: Path) -> None:
    text = (
        f"- kernels: [f]\n  inputs: {{x: }}\n  out: {{shape: $x.shape, dtype: float32}}\n  {fields}"
    )
    with pytest.raises(TemplateError) as caught:
        _own(tmp_path, text)
        registry.signature("f", {"dtype": "float32"}, (_X,))
    assert message in caught.value.what and caught.value.where.startswith("own.yaml:")


def test_entries_are_tried_in_order(tmp_path: Path) -> None:
    _own(
        tmp_path,
        """
- kernels: [f]
  inputs: {x: "[$n, $n]"}
  out: {shape: $x.shape, dtype: $x.dtype}
  flops: 3
- kernels: [f]
  inputs: {x: "[$m, $n]"}
  when: $strength > 1
  out: {shape: "[$n]", dtype: $x.dtype}
  index: {n: $n, m: $m}
  roles: {m: reduce(max)}
  project: {x: "[@m, @n]", out: "[@n]"}
  flops: "2 * @n + @m"
""",
    )
    square = TensorType((4, 4), "float32")
    assert registry.signature("f", {"strength": 0}, (square,)).flops == ((3.0, (0, 1)),)
    sig = registry.signature("f", {"strength": 2}, (_X,))
    assert [(d.name, d.size, d.role, d.monoid) for d in sig.index] == [
        ("n", 6, "map", None),
        ("m", 4, "reduce", "max"),
    ]
    assert sig.inputs[0] == Projection(((0, 1), (1, 0)), (0, 0), (1, 1))
    assert sig.flops == ((2.0, (0,)), (1.0, (1,)))
    assert registry.signature("f", {"strength": 1}, (_X,), (_X,)).opaque


# Parameters and speed


def test_parameters_are_read_in_plain_form() -> None:
    assert readable({"$dtype": "float32"}) == "float32"
    assert readable({"$enum": ["GatherScatterMode", "CLIP"]}) == "CLIP"
    assert readable({"$enum": "GatherScatterMode", "name": "CLIP"}) == "CLIP"
    assert readable({"$class": "GatherDimensionNumbers", "offset_dims": [1, [2]]}) == {
        "offset_dims": (1, (2,))
    }
    assert readable([np.int64(3), {"$list": [1]}]) == (3, (1,))
    assert readable(np.dtype("int8")) == "int8"
    assert hashable({"a": [1, {"b": [2]}]}) == hashable({"a": (1, {"b": (2,)})})


def test_an_operation_of_a_known_kind_is_looked_up_in_a_few_calls() -> None:
    registry.templates()
    operations = []
    for n in range(50):
        x, row, table = (TensorType(s, "float32") for s in ((8, n + 2), (8,), (64, n + 2)))
        dot = {"dimension_numbers": [[[1], [1]], [[], []]], "preferred_element_type": None}
        operations.append(("add", {}, (x, x), (x,)))
        operations.append(("reduce_sum", {"axes": [1], "out_sharding": None}, (x,), (row,)))
        operations.append(("dot_general", dot, (x, x), (TensorType((8, 8), "float32"),)))
        take = {
            "dimension_numbers": {
                "$class": "GatherDimensionNumbers",
                "offset_dims": [1],
                "collapsed_slice_dims": [0],
                "start_index_map": [0],
                "operand_batching_dims": [],
                "start_indices_batching_dims": [],
            },
            "slice_sizes": [1, n + 2],
            "mode": {"$enum": ["GatherScatterMode", "CLIP"]},
            "fill_value": None,
        }
        operations.append(("gather", take, (table, TensorType((8, 1), "int32")), (x,)))
    plain = [json.loads(json.dumps(params)) for _, params, _, _ in operations]

    def calls() -> int:
        """Python functions called for all signatures."""
        count = 0

        def called(frame: object, event: str, argument: object) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(called)
        try:
            for (kernel, _, ins, outs), params in zip(operations, plain, strict=True):
                registry.signature(kernel, params, ins, outs)
        finally:
            sys.setprofile(None)
        return count

    calls()  # thousands an operation
    assert calls() < 100 * len(operations)
