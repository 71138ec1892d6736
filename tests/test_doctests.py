"""Examples in docstrings give what stands beneath them."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import tapestry_egg

_PACKAGE = Path(tapestry_egg.__file__).parent
_FILES = {p.relative_to(_PACKAGE): p.read_text("utf-8") for p in _PACKAGE.rglob("*.py")}
for _linked in ("extract", "rules", "runtime"):  # rglob follows no links
    _FILES |= {
        p.relative_to(_PACKAGE): p.read_text("utf-8") for p in (_PACKAGE / _linked).glob("**/*.py")
    }
_EXAMPLES = sorted(str(p) for p, text in _FILES.items() if ">>> " in text)


@pytest.mark.parametrize("path", _EXAMPLES)
def test_examples_give_what_they_say(path: str) -> None:
    name = ".".join(("tapestry_egg", *Path(path).with_suffix("").parts)).removesuffix(".__init__")
    tried = doctest.testmod(importlib.import_module(name))
    assert tried.attempted and not tried.failed
