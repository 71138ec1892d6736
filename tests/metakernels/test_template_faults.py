"""A template that reads less than it needs, or claims too much, fails the cover property.

Every box of every operand is made one smaller, moved by one, or fixed; what else a template says
(roles, monoids, the order of dims) has faults planted in its text. What the shards then give is
compared with what the right template gives for the whole (which `test_template_jax` holds against
JAX); some covers must differ, or be refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tapestry_egg.errors import TapestryError
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.executor import run_operation
from tests.metakernels.cases import (
    CASES,
    FAMILY,
    SHARDS,
    TEMPLATES,
    Application,
    application,
    close,
)
from tests.metakernels.covers import random_cover

Plant = Callable[[str], None]


@pytest.fixture
def plant(tmp_path: Path) -> Plant:
    """Puts a template file before the package's own for the length of a test."""

    def put(text: str) -> None:
        path = tmp_path / "planted.yaml"
        path.write_text(text, "utf-8")
        registry.add_templates(path)

    return put


def wrong(kernel: str, put: Callable[[], None], seeds: int = 20) -> bool:
    """Whether a random case fails the property once `put` has planted a template."""
    cases = [application(kernel, seed) for seed in range(seeds)]
    right = [app.run() for app in cases]
    put()
    pairs = zip(cases, right, strict=True)
    return not all(agrees(app, want, seed) for seed, (app, want) in enumerate(pairs))


def agrees(
    app: Application,
    right: tuple[object, ...],
    seed: int,
    signature: OperationSignature | None = None,
) -> bool:
    """Whether random shards give what is right, cut as the signature says (the app's own)."""
    try:
        signature = app.signature if signature is None else signature
        cover = random_cover(signature, random.Random(seed), cuts=4)
        made = run_operation(app.kernel, app.params, signature, app.operands, cover)
        for q, (got, want) in enumerate(zip(made, right, strict=True)):
            close(got, want, f"output {q}", SHARDS)
    except (AssertionError, TapestryError, ValueError, IndexError):
        return False
    return True


MUL = """
- kernels: [mul]
  inputs: {x: , y: }
  when: $x.shape == $y.shape
  out: {shape: $x.shape, dtype: $x.dtype}
  project: {y: "[%s for $d, $n in enumerate($y.shape)]"}
"""
CUM = "- {kernels: [%s], inputs: {x: }, out: {shape: $x.shape, dtype: $x.dtype}, roles: {i: map}}"

#: (what is wrong, kernel, the file it is in, a text of it, what stands there instead)
EDITS = [
    # contraction
    ("places mixed up", "conv_general_dilated", "contraction", "[$step[$d] * @w[index(",
     "[$window[$d] - $step[$d] - $step[$d] * @w[index("),
    ("groups mixed up", "conv_general_dilated", "contraction", "$inner * @g + @k,", "@g + @k,"),
    # window
    ("wrong value outside", "reduce_window_min", "window", "max if $kernel == reduce_window_max",
     "max if true"),
    ("a window too few", "select_and_scatter_add", "window",
     "first: \"[0 - ($w - 1 - $l) // $s for", "first: \"[1 - ($w - 1 - $l) // $s for"),
    # movement
    ("not reversed", "rev", "movement", "[$n - 1 - @i[$d] if", "[@i[$d] if"),
    ("not permuted", "transpose", "movement", "arrange($permutation, @i)", "@i"),
    # indexing
    ("monoid", "scatter-mul", "indexing", "prod if $kernel in", "sum if $kernel in"),
    # random
    ("one key only", "random_bits", "random", 'keys: "@b"', 'keys: "[0 for $q in @b]"'),
    ("one word only", "threefry2x32", "random", "  inputs: {k1: , k2: , x1: , x2: }",
     """  inputs: {k1: , k2: , x1: , x2: }
  project: {x1: "[0 * $r for $r in @i]"}"""),
    # reduction
    ("monoid", "reduce_max", "reduction", "else reduce(max)", "else reduce(sum)"),
    ("cut", "argmax", "reduction", 'roles: {r: "join($kernel) if',
     'roles: {r: "reduce(max) if'),
    ("one result less", "top_k", "reduction", "[0 :+ $params.k if $d == $at",
     "[0 :+ max(1, $params.k - 1) if $d == $at"),
    ("cut", "sort", "reduction", "[whole if $d == $dimension else map for", "[map for"),
    # streaming
    ("cut", "softmax", "streaming", "[whole if $d in $axes else map for", "[map for"),
    ("cut", "attention", "streaming", "[whole if $d in $pc else map for", "[map for"),
    ("monoid", "dot_logsumexp", "streaming", "reduce(logaddexp) if $d in $axes",
     "reduce(sum) if $d in $axes"),
    ("cut", "dot_logsumexp", "streaming", "k: whole", "k: reduce(sum)"),
    # linalg
    ("batch lost", "triangular_solve", "linalg", 'a: "[@i..., ', 'a: "[[0 for $q in @i]..., '),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kernel", "file", "old", "new"),
    [pytest.param(*edit[1:], id=f"{edit[1]}-{edit[0]}") for edit in EDITS],
)
def test_an_edited_template_fails(plant: Plant, kernel: str, file: str, old: str, new: str) -> None:
    text = (TEMPLATES / f"{file}.yaml").read_text("utf-8")
    assert old in text, "the template has changed: plant the fault anew"
    assert not wrong(kernel, lambda: plant(text), seeds=3), "without the fault all agree"
    assert wrong(kernel, lambda: plant(text.replace(old, new)))


@pytest.mark.parametrize("row", ["0 * @i[$d]", "@i[$d] + 1", "@i[$d] - 1"])
def test_an_elementwise_kernel_that_reads_other_elements_fails(plant: Plant, row: str) -> None:
    assert not wrong("mul", lambda: plant(MUL % "@i[$d]"))
    assert wrong("mul", lambda: plant(MUL % row))


@pytest.mark.parametrize("kernel", [k for k in CASES if k.startswith("cum")])
def test_a_cumulative_kernel_cut_along_its_axis_fails(plant: Plant, kernel: str) -> None:
    assert wrong(kernel, lambda: plant(CUM % kernel))


@pytest.mark.parametrize("kernel", [k for k in CASES if FAMILY[k] != "elementwise"])
def test_every_box_of_every_operand_is_needed(kernel: str) -> None:
    """An operand's box that is one smaller, starts one later, or follows no index dim: in some
    case what the shards give differs from the whole, or they are refused."""
    noticed: dict[tuple[int, str], bool] = {}
    for seed in range(60):
        if seed >= 10 and all(noticed.values()):
            break
        app = application(kernel, seed)
        whole = app.run()
        for fault, signature in faulty(app.signature):
            if not noticed.get(fault):
                noticed[fault] = not agrees(app, whole, seed, signature)
    assert all(noticed.values()), noticed


def faulty(signature: OperationSignature) -> Iterator[tuple[tuple[int, str], OperationSignature]]:
    """The signature with a fault in one row of an operand's projection: operand and kind, result.

    Only those where the projection names fewer or other elements than before.
    """
    for p, (own, type_) in enumerate(zip(signature.inputs, signature.input_types, strict=True)):
        for k, (row, n) in enumerate(zip(own.matrix, own.shape, strict=True)):
            made = {}
            if n > 1:
                made["smaller"] = replace(own, shape=put(own.shape, k, n - 1))
            if type_.shape[k] > 1:
                made["later"] = replace(own, offset=put(own.offset, k, own.offset[k] + 1))
            cut = [dim.role in ("map", "reduce") and dim.size > 1 for dim in signature.index]
            if any(a and c for a, c in zip(row, cut, strict=True)):
                still = tuple(0 if c else a for a, c in zip(row, cut, strict=True))
                made["still"] = replace(own, matrix=put(own.matrix, k, still))
            for kind, projection in made.items():
                yield (p, kind), replace(signature, inputs=put(signature.inputs, p, projection))


def put(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    return (*values[:at], value, *values[at + 1 :])


def test_every_family_has_a_planted_fault() -> None:
    planted = {FAMILY[edit[1]] for edit in EDITS} | {"elementwise"}
    assert planted == set(FAMILY.values())
