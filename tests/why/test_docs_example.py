"""docs/why.md prints what its example answers, number by number."""

from __future__ import annotations

import contextlib
import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parents[2] / "docs" / "why.md"
#: The page's searches, in this process, and as much of them as finds the plans that it tells of.
BRIEFLY = {
    'target="h100:8")': 'target="h100:8", settings=te.Settings(workers=1))',
    '("x", None)})': '("x", None)}, settings=te.Settings(work=1.0, front=False, workers=1))',
}


def test_the_answers_on_the_page_are_those_of_its_program() -> None:
    found = re.findall(r"^```(python|text)\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {}
    compared = 0
    for (kind, code), (then, printed) in pairwise(found):
        if (kind, then) != ("python", "text"):
            continue
        for old, new in BRIEFLY.items():
            code = code.replace(old, new)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            exec(compile(code, "train.py", "exec"), names)
        shown = printed.removesuffix("...\n")  # of a long answer the page shows the beginning
        assert out.getvalue()[: len(shown) if shown != printed else None] == shown
        compared += 1
    assert compared == 4
