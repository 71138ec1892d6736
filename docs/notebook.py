"""The tutorial as a notebook: `python docs/notebook.py` writes tutorial.ipynb from tutorial.md.

Text becomes cells of Markdown, blocks of Python cells of code, in their order; the first cell makes
eight simulated devices, as the page wants them. A test holds the notebook against the page.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
DEVICES = """import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"  # before jax is imported"""
# A line that shows an object's text shows the object itself in a notebook: tables with pictures.
_PRINTED = re.compile(r"^print\((front)\)$", re.MULTILINE)


def notebook(page: str) -> dict[str, Any]:
    """The notebook (nbformat 4.5) of a page of Markdown."""
    parts = re.split(r"^```python\n(.*?)^```\n", page, flags=re.MULTILINE | re.DOTALL)
    cells = [_cell("code", DEVICES)]
    for k, part in enumerate(parts):
        if text := part.strip("\n"):
            cells.append(_cell("code" if k % 2 else "markdown", text))
    return {
        "cells": [{"id": f"cell-{k}", **cell} for k, cell in enumerate(cells)],
        "metadata": {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _cell(kind: str, text: str) -> dict[str, Any]:
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    if kind == "code":
        text = _PRINTED.sub(r"\1", text)
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def written() -> str:
    """The text of tutorial.ipynb."""
    page = (FOLDER / "tutorial.md").read_text(encoding="utf-8")
    return json.dumps(notebook(page), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (FOLDER / "tutorial.ipynb").write_text(written(), encoding="utf-8")
