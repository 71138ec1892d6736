"""Parameters in files: what would end the process later on is refused when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.errors import GraphError
from tapestry_egg.tracing import codec
from tapestry_egg.tracing.plain import check_plain, handles_in

HIGHEST = {"$enum": ["Precision", "HIGHEST"]}
PRESET = {"$enum": ["DotAlgorithmPreset", "BF16_BF16_F32"]}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file of a program with a product."""
    path = tmp_path_factory.mktemp("plain") / "graph.json"
    te.save(te.trace(lambda x: lax.dot(x, x) + 1, jnp.ones((4, 4))), path)
    return json.loads(path.read_text())


def read(document: Any, folder: Path, **params: Any) -> Any:
    changed = json.loads(json.dumps(document))
    (dot,) = (op for op in changed["operations"] if op["kernel"] == "dot_general")
    dot["params"].update(params)
    path = folder / "changed.json"
    path.write_text(json.dumps(changed))
    return te.load(path)


@pytest.mark.parametrize(
    "precision",
    [
        *([], [[]], [HIGHEST], [HIGHEST, None], [HIGHEST, PRESET], "highest", "", 0, -0.0, True),
        *({}, {"$enum": ["FftType", "FFT"]}, {"$int": "7"}, {"$dtype": "float32"}),
    ],
)
def test_a_precision_that_compilers_give_up_on_is_refused(
    precision: Any, document: Any, tmp_path: Path
) -> None:
    with pytest.raises(GraphError, match="is no precision") as caught:
        read(document, tmp_path, precision=precision)
    assert caught.value.where.endswith("$.operations[0].params.precision")


@pytest.mark.parametrize("name", ["accuracy", "fft_type", "rounding_method"])
@pytest.mark.parametrize("value", [HIGHEST, "FFT", 0, [], {"$class": "DotAlgorithm"}])
def test_a_member_of_something_else_is_refused(
    name: str, value: Any, document: Any, tmp_path: Path
) -> None:
    with pytest.raises(GraphError, match=f"is no {name}"):
        read(document, tmp_path, **{name: value})


@pytest.mark.parametrize(
    "precision", [None, "highest", "BF16_BF16_F32", lax.DotAlgorithm(*[jnp.float32] * 3)]
)
def test_precisions_of_jax_come_back(precision: Any, tmp_path: Path) -> None:
    program = te.trace(lambda x: lax.dot(x, x, precision=precision), jnp.ones((4, 4)))
    te.save(program, tmp_path / "graph.json")
    (op,) = te.load(tmp_path / "graph.json").graph.operations  # type: ignore[union-attr]
    assert not handles_in(op.params)
    params = codec.decode_params(op.params, kernel=op.kernel)
    jax.make_jaxpr(lambda x: lax.dot_general_p.bind(x, x, **params))(jnp.ones((4, 4)))


@pytest.mark.parametrize(
    "value",
    [
        {"$int": "9" * 400},
        {"$int": 9},
        {"$float": "1e400"},
        {"$float": []},
        {"$complex": [1]},
        {"$dtype": "object"},
        {"$dtype": 3},
        {"$enum": ["Precision"]},
        {"$enum": "Precision"},
        {"$class": ["GatherDimensionNumbers"]},
        {"$dict": [["a"]]},
        {"$list": {}},
        {"$array": []},
        {"$primitive": 1},
    ],
)
def test_forms_that_stand_for_nothing_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(GraphError) as caught:
        check_plain({"a": [value]}, "$.params")
    assert caught.value.where.startswith("$.params.a[0]")
