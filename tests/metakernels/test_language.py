"""The template language: expressions, patterns, positions of errors, template files, speed."""

from __future__ import annotations

import json
import math
import random
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
from tapestry_egg.metakernels.instantiate import instantiate
from tapestry_egg.metakernels.language.expressions import Expression, Origin, PassageText
from tapestry_egg.metakernels.language.faults import Fault, Mismatch
from tapestry_egg.metakernels.language.parser import Start, Tree, parse
from tapestry_egg.metakernels.language.patterns import Pattern, bind
from tapestry_egg.metakernels.language.template_file import read_templates
from tapestry_egg.metakernels.signatures.parameters import hashable, readable
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.signatures.values import Row, digits
from tapestry_egg.rules.language.book import book_names, load_book
from tapestry_egg.tracing.graph_documents import type_of_text
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
            seen.append(array[projection.point(at).slices].ravel())
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
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n"
         "  spelled: {g: [h, p]}", "own.yaml:4:12", "'g' in `spelled` is not declared"),
        ("- kernels: [f]\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: a}\n"
         "  spelled: {f: [h]}", "own.yaml:4:12", "a primitive and a parameter"),
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


# Shape patterns over lists of tensors: groups, indexed dims, and one value for every name.


def test_x12_patterns_over_lists_of_tensors() -> None:
    tensors = Pattern("[$batch..., $shape=($height, $width), $features[$i]]")
    masks = Pattern("[$shape=($height, $width), $features[$i]]")
    names: dict[str, Any] = {}
    bind(
        [
            (tensors, [(100, 128, 256, 512, 2), (100, 128, 256, 512, 4)]),
            (masks, [(256, 512, 2), (256, 512, 4)]),
        ],
        names,
    )
    assert names == {
        "$batch": (100, 128),
        "$shape": (256, 512),
        "$height": 256,
        "$width": 512,
        "$i": 2,
        "$features": (2, 4),
    }


@pytest.mark.parametrize(
    ("masks", "said"),
    [
        ([(256, 512, 2)], r"\$i is 1 .* and 2 before"),
        ([(256, 512, 2), (256, 512, 3)], r"\$features is \[2, 3\] .* and \[2, 4\] before"),
        ([(256, 511, 2), (256, 512, 4)], r"\$shape is \[256, 511\]"),
        ([(256, 512, 2), (1, 256, 512, 4)], r"has rank 4, the pattern .* 3 dims"),
    ],
)
def test_x12_every_name_has_one_value(masks: Any, said: str) -> None:
    tensors = Pattern("[$batch..., $shape=($height, $width), $features[$i]]")
    second = Pattern("[$shape=($height, $width), $features[$i]]")
    shapes = [(100, 128, 256, 512, 2), (100, 128, 256, 512, 4)]
    with pytest.raises(Mismatch, match=said):
        bind([(tensors, shapes), (second, masks)], {})


@pytest.mark.parametrize(
    ("pattern", "shape", "spans"),
    [
        (
            "[$batch..., $hwc[$i]=($shape=($height, $width), $channels[$i]), $features[$i]]",
            (100, 128, 256, 512, 3, 8),
            {"$batch": (0, 2), "$hwc": (2, 5), "$shape": (2, 4), "$height": (2, 3)}
            | {"$width": (3, 4), "$channels": (4, 5), "$features": (5, 6)},
        ),
        (
            "[a, b=[x, y=[j, +k]], c]",
            (9, 8, 7, 6, 5, 4, 3),
            {"$a": (0, 1), "$b": (1, 6), "$x": (1, 2), "$y": (2, 6), "$j": (2, 3), "$k": (3, 6)}
            | {"$c": (6, 7)},
        ),
        ("[*batch, features]", (5, 6, 7), {"$batch": (0, 2), "$features": (2, 3)}),
    ],
)
def test_x12_groups_nest_and_may_hold_the_ellipsis(
    pattern: str, shape: tuple[int, ...], spans: dict[str, tuple[int, int]]
) -> None:
    found = Pattern(pattern).spans(shape)
    assert {s.name: (s.start, s.stop) for s in found} == spans
    hwc = [s.value(shape) for s in found if s.name == "$hwc"]
    assert hwc in ([], [(256, 512, 3)])


def test_x12_a_group_of_each_tensor() -> None:
    names: dict[str, Any] = {}
    pattern = Pattern("[$n..., $hw[$i]=($h[$i], $w[$i])]")
    bind([(pattern, [(7, 2, 3), (7, 4, 5)])], names)
    assert names == {"$n": (7,), "$hw": ((2, 3), (4, 5)), "$h": (2, 4), "$w": (3, 5), "$i": 2}


def test_an_ellipsis_of_a_counted_number_of_dims() -> None:
    pattern = Pattern("[$lead...[:$axis + 1], $n, $tail...]")
    names: dict[str, Any] = {}
    bind([(pattern, [(2, 3, 4, 5)])], names, {"$axis": 1})
    assert names == {"$lead": (2, 3), "$n": 4, "$tail": (5,)}
    with pytest.raises(TemplateError, match="-1 is not a number of dims"):
        pattern.spans((2, 3), {"$axis": -2})


@pytest.mark.parametrize(
    ("pattern", "shape", "said"),
    [
        ("[$a, $b]", (1,), "[1] has rank 1, the pattern [$a, $b] 2 dims"),
        ("[$a, $b...]", (), "1 dims or more"),
        ("[$a, +$b]", (1,), "2 dims or more"),
        ("[$a, 3]", (1, 4), "dim 1 of [1, 4] is 4, the pattern [$a, 3] has 3 there"),
        ("[$n, $n]", (3, 4), "$n is 4 in [3, 4] as [$n, $n], and 3 before"),
        ("[$g=($a, $b), $c]", (1, 2), "2, the pattern [$g=($a, $b), $c] 3 dims"),
    ],
)
def test_shapes_that_do_not_fit_are_told_why(
    pattern: str, shape: tuple[int, ...], said: str
) -> None:
    with pytest.raises(Mismatch) as caught:
        bind([(Pattern(pattern), [shape])], {})
    assert said in str(caught.value)


@pytest.mark.parametrize("other", ["float32[2,2]", "float32[2]", "int32[2,1]"])
def test_tensors_are_joined_only_where_they_agree_in_all_else(other: str) -> None:
    first, second = (type_of_text(t, "here") for t in ("float32[2,1]", other))
    for operands in ((first, second), (second, first)):
        with pytest.raises(TemplateError, match="no template fits concatenate"):
            registry.signature("concatenate", {"dimension": 0}, operands)
    longer = type_of_text("float32[3,1]", "here")
    (joined,) = registry.output_types("concatenate", {"dimension": 0}, (first, longer))
    assert joined.shape == (5, 1)


# `reduce:` in templates: dims of the inputs that become reduced index dims.


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


# The grammar of the template language: which trees texts are, and which texts are refused.


def shown(node: Any) -> Any:
    """A tree as tuples, without its places."""
    if isinstance(node, Tree):
        return (node.data, *map(shown, node.children)) if node.children else node.data
    return node if node is None else str(node)


def number(n: int) -> tuple[str, str]:
    return "integer", str(n)


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("1 + 2 * 3", ("binary", number(1), "+", ("binary", number(2), "*", number(3)))),
        ("1 - 2 - 3", ("binary", ("binary", number(1), "-", number(2)), "-", number(3))),
        ("-2 ^ 3 ^ 4", ("negate", "-", ("binary", number(2), "^",
                                        ("binary", number(3), "^", number(4))))),
        ("2 ^ -1", ("binary", number(2), "^", ("negate", "-", number(1)))),
        ("not a == b", ("inverse", ("compare", ("word", "a"), "==", ("word", "b")))),
        ("a not in b or c", ("either", ("stranger", ("word", "a"), ("word", "b")), ("word", "c"))),
        ("1 if a else 2 if b else 3", ("choice", number(1), ("word", "a"), (
            "choice", number(2), ("word", "b"), number(3)))),
        ("1 :+ 2 if a else 3", ("choice", ("extent", number(1), number(2)), ("word", "a"),
                                number(3))),
        ("[..., 1] :> [0...]", ("box", ("list", ("standard", "..."), number(1)),
                                ("list", ("spread", number(0), "...")))),
        ("[1...[:2]..., 3]", ("list", ("filling", number(1), "...", None, ("upper", number(2)),
                                       "..."), number(3))),
        ("[1, 0... | 4 | 2]", ("augmented", ("entries", number(1), ("spread", number(0), "...")),
                               number(4), number(2))),
        ("[$i for $i, $n in a if b]", ("comprehension", ("variable", "$i"),
                                       ("targets", "$i", "$n"), ("word", "a"), ("word", "b"))),
        ("$x.in[1:]", ("slice", ("attribute", ("variable", "$x"), "in"), ("lower", number(1)),
                       None)),
        ("D [1]", ("diagonal", "D", number(1))),
        ("D(D, true)", ("call", "D", ("word", "D"), "yes")),
        ("else + for", ("binary", ("word", "else"), "+", ("word", "for"))),
    ],
)  # fmt: skip
def test_expressions_are_these_trees(text: str, tree: Any) -> None:
    assert shown(parse(text, "expression")) == tree


@pytest.mark.parametrize(
    ("text", "start", "at", "expected"),
    [
        ("a < b < c", "expression", 6, "`and`"),
        ("1 :+ 2 :+ 3", "expression", 7, "`if`"),
        ("[0] :> [1] :> [2]", "expression", 11, "the end"),
        ("a == not b", "expression", 9, "`(`"),
        ("1 ifx else 2", "expression", 2, "`if`"),
        ("[$a for b in c]", "expression", 8, "`$name`"),
        ("[[0] >: [1]]", "expression", 6, "is `:>`"),
        ("f(1", "expression", 3, "`)`"),
        ("[$n...[2]]", "pattern", 7, "`:`"),
        ("[$n=$m]", "pattern", 4, "`(`"),
        ("sum(x) -> ", "passage", 9, "a word"),
        ("-" * 4000 + "1", "expression", 0, ""),
    ],
)
def test_other_texts_are_refused_where_they_end_to_be_texts(
    text: str, start: Start, at: int, expected: str
) -> None:
    with pytest.raises(Fault) as caught:
        parse(text, start)
    assert (caught.value.at, expected in caught.value.hint) == (at, True)


def shipped_texts() -> list[str]:
    found = {
        e.text for entries in registry.templates().values() for t in entries for e in t.texts()
    }
    for name in book_names():
        for rule in load_book(name).rules:
            if rule.recipe is not None:
                found |= {e.text for e in (*rule.recipe.guards, *rule.recipe.let.values())}
    return sorted(found)


def test_places_are_those_of_the_words_and_damage_never_ends_otherwise_than_in_a_fault() -> None:
    rng = random.Random(0)
    for text in shipped_texts():
        stack: list[Any] = [parse(text, "expression")]
        while stack:
            node = stack.pop()
            if isinstance(node, Tree):
                stack += node.children
            elif node is not None:
                assert text.startswith(str(node), node.start_pos)
        at = rng.randrange(len(text) + 1)
        damaged = text[:at] + rng.choice("[](),.:|?$@ ") + text[at + rng.randrange(2) :]
        try:
            parse(damaged, "expression")
        except Fault as fault:
            assert 0 <= fault.at <= len(damaged)


def test_patterns_of_shipped_templates_are_read() -> None:
    operands = {o for entries in registry.templates().values() for t in entries for o in t.inputs}
    patterns: list[Pattern] = [o.pattern for o in operands if o.pattern is not None]
    assert len(patterns) > 20 and all(p.axes() is not None for p in patterns)
