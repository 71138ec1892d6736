"""Shape patterns over lists of tensors: groups, indexed dims, and one value for every name."""

from __future__ import annotations

from typing import Any

import pytest

from tapestry_egg.errors import TemplateError
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.language.faults import Mismatch
from tapestry_egg.metakernels.language.patterns import Pattern, bind
from tapestry_egg.tracing.graph_documents import type_of_text


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
