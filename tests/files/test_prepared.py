"""Constants in files: what prepared operations make of them is nothing that a file can say."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import numpy as np
import pytest

from tapestry_egg.errors import GraphError
from tapestry_egg.files.files import load
from tests.files.attacks import get
from tests.files.test_admission import changed, saved


def zeros(*shape: int) -> dict[str, str]:
    """A constant as files have it."""
    return {"data": base64.b64encode(np.zeros(shape, np.float32)).decode()}


def test_what_prepared_operations_read_and_make_is_nothing_else(tmp_path: Path) -> None:
    """A constant under such a number would run in its place, and be taken for it here."""
    document = json.loads(saved("joined", tmp_path).read_text())
    (g,) = (g for g, one in enumerate(document["graphs"]) if one["prepared"])
    graph = document["graphs"][g]
    prepared, constants = ("graphs", g, "prepared", "constants"), ("graphs", g, "constants")
    (made,) = {v for op in graph["operations"] for v in op["inputs"]} & {
        v for op in graph["prepared"]["operations"] for v in op["outputs"]
    }
    (scale,), (read,) = graph["constants"], graph["inputs"]
    for place, more, what in (
        (constants, {str(made): zeros(64, 64)}, "makes a value that is there already"),
        (prepared, {scale: 0.5}, "is not what the program has there"),
        (prepared, {str(read): zeros(1024, 64)}, "is not what the program has there"),
    ):
        with pytest.raises(GraphError, match=what):
            load(changed(saved("joined", tmp_path), place, get(document, place) | more))
