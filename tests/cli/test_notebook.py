"""The notebook is the tutorial: the same text and the same blocks, which another test runs."""

from __future__ import annotations

import ast
import importlib.util
import json
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_notebook_is_what_the_tutorial_says() -> None:
    spec = importlib.util.spec_from_file_location("docs_notebook", DOCS / "notebook.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (DOCS / "tutorial.ipynb").read_text(encoding="utf-8")
    assert text == module.written(), "python docs/notebook.py"


def test_its_code_is_the_pages_code() -> None:
    cells = json.loads((DOCS / "tutorial.ipynb").read_text(encoding="utf-8"))["cells"]
    code = ["".join(c["source"]) for c in cells if c["cell_type"] == "code"]
    page = (DOCS / "tutorial.md").read_text(encoding="utf-8")
    for block in code[1:]:
        ast.parse(block)
        lines = [line for line in block.splitlines() if line != "front"]
        assert all(line in page for line in lines)
    assert len(code) == page.count("```python") + 1
